// What entry, entry_hidden, entry_embed and entry_lookup do on CPU, compiled once per instruction
// set (entry_cpu_kernels.cpp). Ranges may be split over threads in any way: an element's arithmetic
// does not depend on the split.
#pragma once

#include "entry.h"

namespace mtp {

// out[t] = normed[t] . weight + hidden_part[t] + bias
struct Projection {
  int64_t rows, inputs;
  DType dtype;
  const void* normed;  // [rows, inputs], padded and laid out as csrc/dot.h wants them
  Weight weight;
  const float* hidden_part = nullptr;
  int64_t hidden_part_stride = 0;
  const void* bias = nullptr;
  void* out;                 // [rows, out_features]
  bool out_is_fp32 = false;  // else of the model dtype
};

// Of entry_hidden.
struct HiddenLayer {
  Norm hnorm;
  Weight weight;
  void* normed;  // [T, H] workspace
};

struct EntryHiddenParams {
  int64_t rows, hidden_size;
  DType dtype;
  const void* hidden;  // [T, H]
  int64_t hidden_stride;
  const HiddenLayer* layers;  // [num_layers]
  int64_t num_layers;
};

struct EntryLookupParams {
  int64_t out_features;
  DType dtype;
  const float* hidden_part;  // [T, H_out]
  int64_t hidden_part_stride;
  Lookup lookup;
  const void* bias;  // [H_out] or nullptr
  void* out;         // [T, H_out]
};

struct EntryCpuKernels {
  // Rows [begin, end) of the normed workspace: of entry both halves, of entry_embed the
  // embedding's. Elements are bf16 where normed_is_bf16(dtype), else fp32 (values rounded to the
  // model dtype).
  void (*norm_rows)(const EntryParams& p, int64_t begin, int64_t end);
  // Rows [begin, end) of the workspaces of all layers.
  void (*norm_hidden)(const EntryHiddenParams& p, int64_t begin, int64_t end);
  // Output features [begin, end) * kPanel of all rows.
  void (*project_panels)(const Projection& p, int64_t begin, int64_t end);
  // Output rows [begin, end).
  void (*look_up)(const EntryLookupParams& p, int64_t begin, int64_t end);
  bool (*normed_is_bf16)(DType dtype);
};

constexpr int64_t kNormedMultiple = 32;  // pads rows of the workspace; kInputMultiple of dot.h

extern const EntryCpuKernels entry_cpu_scalar;
#if defined(__x86_64__)
extern const EntryCpuKernels entry_cpu_avx2;
extern const EntryCpuKernels entry_cpu_avx512;
extern const EntryCpuKernels entry_cpu_avx512_bf16;
extern const EntryCpuKernels entry_cpu_amx;
#endif

const EntryCpuKernels& entry_cpu_kernels();  // of the instruction set in use

}  // namespace mtp
