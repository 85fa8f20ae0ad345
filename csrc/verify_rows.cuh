// Rows of verify on CUDA: where they are, their logits, and what one lane of them weighs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "device.cuh"
#include "exact.cuh"
#include "verify.h"

namespace mtp {

constexpr int kVector = 8;  // lanes that a thread reads at a time
constexpr int kOne = 40;    // a block's heaviest lane weighs 2^40
constexpr int kBlockLanes = static_cast<int>(kBlock);
constexpr float kGreedyBelow = 1e-5f;

// ---- Rows and their logits ----------------------------------------------------------------------

struct Row {
  int64_t b, i;  // of request b: the target's row i, or that of draft i
  int64_t at;    // in logits, or in draft_logits
  bool is_draft;
  bool is_used;  // by a request; a draft's: not one-hot
};

// How many drafts a request has, judged or not. cu_rows is not checked on a GPU: -1 of a request
// that has no rows, or others than those of the logits.
__device__ inline int64_t num_given(const VerifyParams& p, int64_t b) {
  const int64_t first = integer_at(p.cu_rows, b), end = integer_at(p.cu_rows, b + 1);
  if (first < 0 || end <= first || end > p.rows) return -1;
  return end - first - 1 < p.drafts ? end - first - 1 : p.drafts;
}

__device__ inline Row target_row(const VerifyParams& p, int64_t b, int64_t i) {
  return {b, i, integer_at(p.cu_rows, b) + i, false, i <= num_given(p, b)};
}

__device__ inline Row draft_row(const VerifyParams& p, int64_t b, int64_t i) {
  const int64_t at =
      p.draft_rows.data ? integer_at(p.draft_rows, b * p.draft_rows_stride + i) : b * p.drafts + i;
  return {b, i, at, true, i < num_given(p, b) && 0 <= at && at < p.draft_logits_rows};
}

__device__ inline int64_t slot_of(const VerifyCall& c, const Row& row) {
  return row.b * c.scratch.slots + row.i + (row.is_draft ? c.drafts + 1 : 0);
}

__device__ inline Row row_of_slot(const VerifyCall& c, unsigned slot) {
  const auto slots = static_cast<unsigned>(c.scratch.slots);
  const int64_t b = slot / slots, i = slot % slots;
  return i <= c.drafts ? target_row(c, b, i) : draft_row(c, b, i - c.drafts - 1);
}

__device__ inline bool is_probs(const VerifyParams& p, const Row& row) {
  return row.is_draft && p.draft_kind == DraftKind::probs;
}

__device__ inline int64_t draft_id(const VerifyParams& p, int64_t b, int64_t i) {
  return integer_at(p.draft_ids, b * p.draft_ids_stride + i);
}

// kVectors times kVector lanes of a row of kBytes bytes each, kApart apart; 0 behind the last.
template <int kBytes, int kVectors, int kApart>
__device__ inline void load_words(const char* row, int first, int vocab,
                                  unsigned (&words)[kVectors][kVector * kBytes / 4]) {
  constexpr int kWords = kVector * kBytes / 4;
  const bool is_aligned = reinterpret_cast<uint64_t>(row) % sizeof(uint4) == 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int lane = first + v * kApart;
    const char* from = row + static_cast<int64_t>(lane) * kBytes;
    if (is_aligned && lane + kVector <= vocab) {
#pragma unroll
      for (int w = 0; w < kWords; w += 4) {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(from) + w / 4);
        words[v][w] = four.x, words[v][w + 1] = four.y;
        words[v][w + 2] = four.z, words[v][w + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[v][w] = 0;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (lane + j >= vocab) continue;
        if constexpr (kBytes == 4)
          words[v][j] = __ldg(reinterpret_cast<const unsigned*>(from) + j);
        else
          words[v][j / 2] |= unsigned{__ldg(reinterpret_cast<const unsigned short*>(from) + j)}
                             << j % 2 * 16;
      }
    }
  }
}

// The eight bits of a row's mask from lane `first` on, a multiple of 8.
__device__ inline unsigned mask_bits(const int32_t* words, int first) {
  return static_cast<unsigned>(words[first / 32]) >> first % 32 & 0xffu;
}

__device__ inline bool has_edits(const VerifyParams& p) {
  return p.bias_ids || p.output_counts || p.allowed_mask;
}

// Bias, penalties and mask of the target's lanes from `first` on.
__device__ inline void edit(const VerifyParams& p, const Row& row, int first, float (&x)[kVector]) {
  const int end = first + kVector < p.vocab ? first + kVector : p.vocab;
  for (int64_t m = 0; m < p.biases; ++m) {
    const int token = p.bias_ids[row.b * p.bias_ids_stride + m];
    if (token < first || token >= end) continue;
    const float value = p.bias_values[row.b * p.bias_values_stride + m];
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      x[j] += token - first == j ? value : 0.0f;  // a choice of values, to stay in registers
  }
  const int64_t state = p.output_counts ? integer_at(p.penalty_rows, row.b) : -1;
  if (0 <= state && state < p.penalty_states && first < end) {
    int counts[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      counts[j] = first + j < end ? p.output_counts[state * p.output_counts_stride + first + j] : 0;
    for (int64_t i = 0; i < row.i; ++i) {  // the drafts before this row count as generated
      const int64_t place = draft_id(p, row.b, i) - first;
#pragma unroll
      for (int j = 0; j < kVector; ++j) counts[j] += place == j;
    }
    const unsigned prompt = mask_bits(p.prompt_mask + state * p.prompt_mask_stride, first);
    const float repetition = p.repetition_penalty[row.b];
    const float frequency = p.frequency_penalty[row.b], presence = p.presence_penalty[row.b];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (first + j >= end) continue;
      if ((prompt >> j & 1) || counts[j] > 0)
        x[j] = __fmul_rn(x[j], x[j] > 0 ? __fdiv_rn(1.0f, repetition) : repetition);
      x[j] -= __fmul_rn(frequency, static_cast<float>(counts[j]));
      x[j] -= __fmul_rn(presence, counts[j] > 0 ? 1.0f : 0.0f);
    }
  }
  if (p.allowed_mask && first < end) {
    const unsigned allowed = mask_bits(p.allowed_mask + row.at * p.allowed_mask_stride, first);
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      if (!(allowed >> j & 1)) x[j] = -INFINITY;
  }
}

// Lanes of a row as its law is made of them, fp32: -inf behind the last, or 0 of probabilities.
template <int kVectors, int kApart>
__device__ inline void read_lanes(const VerifyParams& p, const Row& row, int first,
                                  float (&x)[kVectors][kVector]) {
  const DType dtype = row.is_draft ? p.draft_logits_dtype : p.logits_dtype;
  const int64_t stride = row.is_draft ? p.draft_logits_stride : p.logits_stride;
  const char* from = static_cast<const char*>(row.is_draft ? p.draft_logits : p.logits) +
                     row.at * stride * (dtype == DType::fp32 ? 4 : 2);
  const auto each = [&](const auto& value) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int j = 0; j < kVector; ++j) x[v][j] = value(v, j);
  };
  if (dtype == DType::fp32) {
    unsigned words[kVectors][kVector];
    load_words<4, kVectors, kApart>(from, first, p.vocab, words);
    each([&](int v, int j) { return __uint_as_float(words[v][j]); });
  } else {
    unsigned words[kVectors][kVector / 2];
    load_words<2, kVectors, kApart>(from, first, p.vocab, words);
    const auto bits = [&](int v, int j) { return words[v][j / 2] >> j % 2 * 16 & 0xffffu; };
    if (dtype == DType::bf16)
      each([&](int v, int j) { return __uint_as_float(bits(v, j) << 16); });
    else
      each([&](int v, int j) {
        return __half2float(__ushort_as_half(static_cast<unsigned short>(bits(v, j))));
      });
  }
  const float padding = is_probs(p, row) ? 0.0f : -INFINITY;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!row.is_draft && has_edits(p)) edit(p, row, first + v * kApart, x[v]);
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      if (first + v * kApart + j >= p.vocab) x[v][j] = padding;
  }
}

__device__ inline bool is_filtered(const VerifyParams& p, int64_t b) {
  const int64_t top_k = p.top_k.data ? integer_at(p.top_k, b) : 0;
  return (0 < top_k && top_k < p.vocab) || (p.top_p && p.top_p[b] < 1) ||
         (p.min_p && p.min_p[b] > 0);
}

// ---- Weights ------------------------------------------------------------------------------------

__device__ inline float scale_of(const VerifyParams& p, int64_t b) {
  return __fdiv_rn(kLog2E, p.temperature[b]);
}

// 2^((x - highest) scale), and 0 for -inf.
__device__ inline float exp2_below(float x, float highest, float scale) {
  return x > -INFINITY ? exp2_exact<0>(__fmul_rn(x - highest, scale)) : 0.0f;
}

// The same in units of 2^-40; so far below the highest as -inf nothing is left of it.
__device__ inline Units weight_below(float x, float highest, float scale) {
  return static_cast<Units>(
      static_cast<long long>(exp2_exact<kOne>(__fmul_rn(x - highest, scale))));
}

__device__ inline Units mass_of(Units weight, float scale) {
  return static_cast<Units>(static_cast<double>(weight) * static_cast<double>(scale));
}

// ---- The race of `coupled` ----------------------------------------------------------------------

__device__ inline int64_t position_of(const VerifyParams& p, int64_t b, int64_t i) {
  return integer_at(p.positions, integer_at(p.cu_rows, b) + i) + 1;
}

// A score, which is not negative, above the lane: the higher the better, of equals the lowest lane.
__device__ inline Units entrant(float score, int lane) {
  return static_cast<Units>(__float_as_uint(score)) << 32 | (0xffffffffu - lane);
}
__device__ inline float score_of(Units best) {
  return __uint_as_float(static_cast<unsigned>(best >> 32));
}
__device__ inline int lane_of(Units best) {
  return static_cast<int>(0xffffffffu - static_cast<unsigned>(best));
}

// The best of a thread's lanes from `first` on, a multiple of 8, of the block that starts at
// `start`.
__device__ inline Units race(const VerifyParams& p, const Row& row, int start, int first,
                             const float (&x)[kVector], float highest, float scale) {
  Units best = 0;
#pragma unroll
  for (int four = 0; four < kVector; four += 4) {
    const Words words = philox(static_cast<uint64_t>(p.seeds[row.b]),
                               static_cast<uint64_t>(position_of(p, row.b, row.i)), p.stream,
                               static_cast<unsigned>((first + four) / 4));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float fraction = exp2_below(x[four + j], highest, scale);
      const Units here =
          entrant(__fdiv_rn(fraction, exponential(words.x[j])), first + four + j - start);
      best = here > best ? here : best;
    }
  }
  return best;
}

}  // namespace mtp
