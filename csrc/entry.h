// Parameters of the entry op, shared by its CPU and CUDA kernels. No torch header here: the
// per-instruction-set objects and the device code include it.
#pragma once

#include "params.h"

namespace mtp {

struct EntryParams {
  int64_t rows;          // T
  int64_t hidden_size;   // H
  int64_t out_features;  // H_out
  DType dtype;

  const void* hidden;  // [T, H]
  int64_t hidden_stride;
  const void* embeds;  // [V, H] with ids, else [T, H]
  int64_t embeds_stride;
  const void* ids;  // [T], nullptr: row t uses embeds[t]
  bool ids_are_int64;
  int64_t vocab_start;  // embeds holds ids [vocab_start, vocab_start + vocab_rows)
  int64_t vocab_rows;
  const void* positions;  // [T], nullptr unless rows at position 0 get a zero embedding
  bool positions_are_int64;

  const void* enorm_weight;       // [H]
  const void* hnorm_weight;       // [H]
  const void* embed_norm_weight;  // [H] or nullptr
  float enorm_eps;
  float hnorm_eps;
  float embed_norm_eps;
  bool zero_centered;  // gains are 1 + weight
  bool hidden_first;

  const void* proj_weight;  // [H_out, 2H], or packed [H_out/16, H, 16, 2]
  int64_t proj_stride;
  bool packed;
  const void* proj_bias;  // [H_out] or nullptr

  void* normed;  // [T, normed_stride] workspace
  int64_t normed_stride;
  void* out;  // [T, H_out]
};

}  // namespace mtp
