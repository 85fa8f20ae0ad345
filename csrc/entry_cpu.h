// The two stages of entry on CPU, compiled once per instruction set (entry_cpu_kernels.cpp). Ranges
// may be split over threads in any way: an element's arithmetic does not depend on the split.
#pragma once

#include "entry.h"

namespace mtp {

struct EntryCpuKernels {
  // Rows [begin, end) of the normed workspace, laid out as csrc/dot.h wants them. Its element type
  // is bf16 where normed_is_bf16(dtype), else fp32 (values rounded to the model dtype).
  void (*norm_rows)(const EntryParams& p, int64_t begin, int64_t end);
  // Output features [begin, end) * kPanel of all rows.
  void (*project_panels)(const EntryParams& p, int64_t begin, int64_t end);
  bool (*normed_is_bf16)(DType dtype);
};

constexpr int64_t kNormedMultiple = 32;  // pads rows of the workspace; kInputMultiple of dot.h

extern const EntryCpuKernels entry_cpu_scalar;
#if defined(__x86_64__)
extern const EntryCpuKernels entry_cpu_avx2;
extern const EntryCpuKernels entry_cpu_avx512;
extern const EntryCpuKernels entry_cpu_avx512_bf16;
#endif

}  // namespace mtp
