// Parameters of the verify op, shared by its CPU and CUDA kernels; the meaning of each is in
// mtp_kernels/ops/verify.py. And what the two launches on CUDA keep between them.
#pragma once

#include "exact_constants.h"

namespace mtp {

constexpr int64_t kBlock = 4096;  // lanes whose weights share a unit: part of the op's definition

enum class Method { standard, block, coupled, synthetic };
enum class DraftKind { logits, filtered_logits, probs };

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

// ---- On CUDA ------------------------------------------------------------------------------------

using Units = unsigned long long;  // what atomicAdd takes

// Lanes whose highest logit the first launch leaves for the filters.
constexpr int kFilterGroup = 32;
constexpr int kFilterGroups = static_cast<int>(kBlock) / kFilterGroup;

// What the first launch leaves of a block of a row.
struct alignas(16) BlockLaw {
  Units sum;      // of the lanes' weights; with filters, from the second launch on, above the cut
  float highest;  // logit, -inf without a finite one
  int best;       // its lane
  float score;    // coupled: of the race's winner
  int winner;     // its lane
  float won;      // its logit
  int is_finite;  // no NaN and no +inf; of probabilities: no negative one either
};

// The distribution of a row's token, or of a draft's, with its blocks' BlockLaws.
struct RowLaw {
  float scale;   // of logits: log2(e) / temperature
  float top;     // the highest logit
  float cut;     // the lowest logit kept
  int is_point;  // all on lane `best`: greedy, or not finite
  int status;
  Units total;  // mass
  int best;
  int winner;  // coupled: of the race
};

// Of a draft: its probability under the target and under what it was drafted from, what is tossed,
// and its weight under the target.
struct Chance {
  double p, q, coin;
  Units weight;
};

struct VerifyScratch {
  int blocks;  // of a row
  int slots;   // rows of a request: K + 1 of the target's, with draft_logits K of the drafts'
  BlockLaw* block_laws;    // [B, slots, blocks]
  RowLaw* laws;            // [B, slots]
  Chance* chances;         // [B, K]
  Units* residual_masses;  // [B, blocks]
  float* groups;  // [B, slots, blocks, kFilterGroups], the highest logits; nullptr: no filters
  int* arrived;   // [B], blocks of the second launch; with filters
};

struct VerifyCall : VerifyParams {
  VerifyScratch scratch;
};

inline bool has_filters(const VerifyParams& p) { return p.top_k.data || p.top_p || p.min_p; }

}  // namespace mtp
