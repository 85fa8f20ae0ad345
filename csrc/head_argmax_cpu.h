// The two stages of head_argmax on CPU, compiled once per instruction set
// (head_argmax_cpu_kernels.cpp). Ranges may be split over threads in any way: a row's result does
// not depend on the split.
#pragma once

#include "head_argmax.h"

namespace mtp {

struct HeadArgmaxCpuKernels {
  // Rows [begin, end) of the inputs workspace, which has inputs_bytes(p).
  void (*lay_out)(const HeadArgmaxParams& p, int64_t begin, int64_t end);
  int64_t (*inputs_bytes)(const HeadArgmaxParams& p);
  // The winners of slices [begin, end), of all rows.
  void (*slices)(const HeadArgmaxParams& p, int64_t begin, int64_t end);
};

extern const HeadArgmaxCpuKernels head_argmax_cpu_scalar;
#if defined(__x86_64__)
extern const HeadArgmaxCpuKernels head_argmax_cpu_avx2;
extern const HeadArgmaxCpuKernels head_argmax_cpu_avx512;
extern const HeadArgmaxCpuKernels head_argmax_cpu_avx512_bf16;
extern const HeadArgmaxCpuKernels head_argmax_cpu_amx;
#endif

}  // namespace mtp
