// Parameters of the head_argmax op; the meaning of each is in mtp_kernels/ops/head_argmax.py. No
// torch header here: the per-instruction-set objects include it.
#pragma once

#include "params.h"

namespace mtp {

constexpr int64_t kSlice = 512;                  // weight rows that have one winner
constexpr int64_t kNoId = INT64_MAX;             // of a slice without a winner
constexpr int64_t kNoiseIds = int64_t{1} << 34;  // token ids that have noise of their own
constexpr float kGreedyBelow = 1e-5f;

struct HeadArgmaxParams {
  int64_t rows;         // T
  int64_t hidden_size;  // H
  int64_t weight_rows;  // V
  int64_t slices;       // S
  DType dtype;

  const void* hidden;  // [T, H]
  int64_t hidden_stride;
  const void* weight;  // [V, H], or packed [V/16, H/2, 16, 2]
  int64_t weight_stride;
  bool packed;
  int64_t vocab_size;
  int64_t vocab_start;
  IntArray id_map;  // [V], or without data

  const float* temperature;  // [T], nullptr: argmax; so are the next two
  const int64_t* seeds;      // [T]
  IntArray positions;        // [T]
  uint32_t purpose;          // of the random words

  void* inputs;   // workspace: hidden as the dot products read it
  float* values;  // [S, T]
  int64_t* ids;   // [S, T]
};

}  // namespace mtp
