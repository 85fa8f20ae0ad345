// Parameters of the verify op, shared by its CPU and CUDA kernels; the meaning of each is in
// mtp_kernels/ops/verify.py.
#pragma once

#include "params.h"

namespace mtp {

enum class Method { standard, block, coupled, synthetic };
enum class DraftKind { logits, filtered_logits, probs };

// Streams of random words, as numbered in mtp_kernels/ops/_exact.py.
enum class Purpose : uint32_t { target = 0, accept = 1, draft = 2 };

// Optional inputs are nullptr where absent. Strides are in elements, between rows.
struct VerifyParams {
  int64_t requests;  // B
  int64_t drafts;    // K
  int64_t rows;      // R
  int64_t vocab;     // V
  Method method;
  Purpose stream;

  const void* logits;  // [R, V]
  int64_t logits_stride;
  DType logits_dtype;
  IntArray draft_ids;  // [B, K]
  int64_t draft_ids_stride;
  IntArray cu_rows;          // [B + 1]
  IntArray positions;        // [R]
  const float* temperature;  // [B]
  const int64_t* seeds;      // [B]
  IntArray top_k;            // [B]
  const float* top_p;        // [B]
  const float* min_p;        // [B]

  const void* draft_logits;  // [N, V]
  int64_t draft_logits_rows;
  int64_t draft_logits_stride;
  DType draft_logits_dtype;
  DraftKind draft_kind;
  IntArray draft_rows;  // [B, K]
  int64_t draft_rows_stride;

  const int32_t* allowed_mask;  // [R, ceil(V / 32)]
  int64_t allowed_mask_stride;
  int64_t biases;           // M
  const int32_t* bias_ids;  // [B, M]
  int64_t bias_ids_stride;
  const float* bias_values;  // [B, M]
  int64_t bias_values_stride;

  IntArray penalty_rows;         // [B]
  int64_t penalty_states;        // S
  const int32_t* output_counts;  // [S, V]
  int64_t output_counts_stride;
  const int32_t* prompt_mask;  // [S, ceil(V / 32)]
  int64_t prompt_mask_stride;
  const float* presence_penalty;    // [B]
  const float* frequency_penalty;   // [B]
  const float* repetition_penalty;  // [B]

  const float* synthetic_rates;  // [K]

  int64_t* token_ids;     // [B, K + 1]
  int32_t* num_accepted;  // [B]
  int32_t* status;        // [B]
};

}  // namespace mtp
