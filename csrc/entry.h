// Parameters of the entry ops, shared by their CPU and CUDA kernels. No torch header here: the
// per-instruction-set objects and the device code include it.
#pragma once

#include "params.h"

namespace mtp {

struct Norm {
  const void* weight;  // [H], nullptr: no norm
  float eps;
  bool zero_centered;  // gains are 1 + weight
};

// The row of a table that belongs to each token, or zeros.
struct Lookup {
  const void* table;
  int64_t stride;
  IntArray ids;         // [T], no data: row t uses row t of the table
  int64_t vocab_start;  // the table holds ids [vocab_start, vocab_start + vocab_rows)
  int64_t vocab_rows;
  IntArray positions;  // [T], no data unless rows at position 0 get a zero embedding
};

struct Embedding {
  Lookup lookup;
  Norm embed_norm, enorm;
};

// A projection, or the half of one that multiplies one of the two activations.
struct Weight {
  const void* data;  // [H_out, inputs], or packed [H_out/16, inputs/2, 16, 2]
  int64_t out_features;
  int64_t stride;  // between rows, or between panels
  bool packed;
};

// Of entry, and of entry_embed: there without a hidden state, but with its part of the output.
struct EntryParams {
  int64_t rows;         // T
  int64_t hidden_size;  // H
  DType dtype;

  Embedding embedding;
  const void* hidden;  // [T, H] or nullptr
  int64_t hidden_stride;
  Norm hnorm;
  bool hidden_first;

  Weight proj;
  const void* proj_bias;     // [H_out] or nullptr
  const float* hidden_part;  // [T, H_out] or nullptr
  int64_t hidden_part_stride;

  void* normed;  // [T, normed_stride] workspace
  int64_t normed_stride;
  void* out;  // [T, H_out]
};

}  // namespace mtp
