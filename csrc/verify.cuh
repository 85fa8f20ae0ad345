// Device code of verify: two launches. The first reduces every block of every row, on the whole
// machine. In the second each row gets its law, which with filters is cut first; then each request
// decides: by a block of threads of its own, or with filters by the last of the blocks that cut its
// rows. What is known of a law and why that is enough: mtp_kernels/kernels/verify.py, whose way
// this is; the definition, with the names used here: mtp_kernels/ops/verify.py.
//
// Sums are of integers, so that neither the order of threads nor that of blocks shows.
//
// Compiled, not yet run: no GPU was at hand. The tests run it as host code, in
// tests/cuda_emulation.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "device.cuh"
#include "exact.cuh"
#include "verify.h"

namespace mtp {

constexpr int kReduceThreads = 128, kDecideThreads = 256;
constexpr int kVector = 8;  // lanes that a thread reads at a time
constexpr int kOne = 40;    // a block's heaviest lane weighs 2^40
constexpr int kBlockLanes = static_cast<int>(kBlock);
constexpr float kGreedyBelow = 1e-5f;
constexpr unsigned kAllLanes = 0xffffffffu;

// ---- Reductions ---------------------------------------------------------------------------------

template <typename T>
__device__ T warp_sum(T x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kAllLanes, x, lanes);
  return x;
}

template <typename T>
__device__ T warp_max(T x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const T other = __shfl_xor_sync(kAllLanes, x, lanes);
    x = other > x ? other : x;
  }
  return x;
}

// Sums of what the threads up to this one have, of kDecideThreads.
__device__ inline Units block_prefix_sum(Units x) {
  __shared__ Units sums[kDecideThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const Units before = __shfl_up_sync(kAllLanes, x, lanes);
    if (lane >= lanes) x += before;
  }
  __syncthreads();  // the last call's have been read
  if (lane == 31) sums[warp] = x;
  __syncthreads();
  for (int i = 0; i < warp; ++i) x += sums[i];
  return x;
}

__device__ inline Units block_sum(Units x) {
  __shared__ Units total;
  const Units up_to = block_prefix_sum(x);  // in which all wait that have read the last total
  if (threadIdx.x == kDecideThreads - 1) total = up_to;
  __syncthreads();
  return total;
}

// ---- Rows and their logits ----------------------------------------------------------------------

struct Row {
  int64_t b, i;  // of request b: the target's row i, or that of draft i
  int64_t at;    // in logits, or in draft_logits
  bool is_draft;
  bool is_used;  // by a request; a draft's: not one-hot
};

// How many drafts a request has, judged or not. A wrong cu_rows, which is not checked on a GPU,
// does not lead past them.
__device__ inline int64_t num_given(const VerifyParams& p, int64_t b) {
  const int64_t given = integer_at(p.cu_rows, b + 1) - integer_at(p.cu_rows, b) - 1;
  return given < p.drafts ? given : p.drafts;
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

__device__ inline Row row_of_slot(const VerifyCall& c, int64_t slot) {
  const int64_t b = slot / c.scratch.slots, i = slot % c.scratch.slots;
  return i <= c.drafts ? target_row(c, b, i) : draft_row(c, b, i - c.drafts - 1);
}

__device__ inline bool is_probs(const VerifyParams& p, const Row& row) {
  return row.is_draft && p.draft_kind == DraftKind::probs;
}

__device__ inline int64_t draft_id(const VerifyParams& p, int64_t b, int64_t i) {
  return integer_at(p.draft_ids, b * p.draft_ids_stride + i);
}

template <DType kType>
__device__ inline float element(const unsigned* words, int i) {
  if constexpr (kType == DType::fp32) return __uint_as_float(words[i]);
  const unsigned bits = words[i / 2] >> i % 2 * 16 & 0xffffu;
  if constexpr (kType == DType::bf16) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// kVectors times kVector lanes of a row, kApart apart; `padding` behind the last.
template <DType kType, int kVectors, int kApart>
__device__ inline void load_lanes(const void* row, int64_t first, int64_t vocab, float padding,
                                  float (&x)[kVectors][kVector]) {
  constexpr int kBytes = kType == DType::fp32 ? 4 : 2;
  constexpr int kWords = kVector * kBytes / 4;
  unsigned words[kVectors][kWords];
  const bool is_aligned = reinterpret_cast<uint64_t>(row) % sizeof(uint4) == 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t lane = first + v * kApart;
    const char* from = static_cast<const char*>(row) + lane * kBytes;
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
        if constexpr (kType == DType::fp32)
          words[v][j] = __ldg(reinterpret_cast<const unsigned*>(from) + j);
        else
          words[v][j / 2] |= unsigned{__ldg(reinterpret_cast<const unsigned short*>(from) + j)}
                             << j % 2 * 16;
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      x[v][j] = first + v * kApart + j < vocab ? element<kType>(words[v], j) : padding;
}

// The eight bits of a row's mask from lane `first` on, a multiple of 8.
__device__ inline unsigned mask_bits(const int32_t* words, int64_t first) {
  return static_cast<unsigned>(words[first / 32]) >> first % 32 & 0xffu;
}

__device__ inline bool has_edits(const VerifyParams& p) {
  return p.bias_ids || p.output_counts || p.allowed_mask;
}

// Bias, penalties and mask of the target's lanes from `first` on.
__device__ inline void edit(const VerifyParams& p, const Row& row, int64_t first,
                            float (&x)[kVector]) {
  const int64_t end = first + kVector < p.vocab ? first + kVector : p.vocab;
  for (int64_t m = 0; m < p.biases; ++m) {
    const int64_t token = p.bias_ids[row.b * p.bias_ids_stride + m];
    if (token < first || token >= end) continue;
    const float value = p.bias_values[row.b * p.bias_values_stride + m];
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      if (token - first == j) x[j] += value;
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
__device__ inline void read_lanes(const VerifyParams& p, const Row& row, int64_t first,
                                  float (&x)[kVectors][kVector]) {
  const DType dtype = row.is_draft ? p.draft_logits_dtype : p.logits_dtype;
  const int64_t stride = row.is_draft ? p.draft_logits_stride : p.logits_stride;
  const char* from = static_cast<const char*>(row.is_draft ? p.draft_logits : p.logits) +
                     row.at * stride * (dtype == DType::fp32 ? 4 : 2);
  const float padding = is_probs(p, row) ? 0.0f : -INFINITY;
  if (dtype == DType::bf16)
    load_lanes<DType::bf16, kVectors, kApart>(from, first, p.vocab, padding, x);
  else if (dtype == DType::fp16)
    load_lanes<DType::fp16, kVectors, kApart>(from, first, p.vocab, padding, x);
  else
    load_lanes<DType::fp32, kVectors, kApart>(from, first, p.vocab, padding, x);
  if (row.is_draft || !has_edits(p)) return;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) edit(p, row, first + v * kApart, x[v]);
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
__device__ inline Units entrant(float score, int64_t lane) {
  return static_cast<Units>(__float_as_uint(score)) << 32 | (0xffffffffu - lane);
}
__device__ inline float score_of(Units best) {
  return __uint_as_float(static_cast<unsigned>(best >> 32));
}
__device__ inline int64_t lane_of(Units best) { return 0xffffffffu - static_cast<unsigned>(best); }

// The best of a thread's lanes from `first` on, a multiple of 8, of the block that starts at
// `start`.
__device__ inline Units race(const VerifyParams& p, const Row& row, int64_t start, int64_t first,
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

// ---- Launch 1 -----------------------------------------------------------------------------------

__device__ inline bool is_filtered(const VerifyParams& p, int64_t b) {
  const int64_t top_k = p.top_k.data ? integer_at(p.top_k, b) : 0;
  return (0 < top_k && top_k < p.vocab) || (p.top_p && p.top_p[b] < 1) ||
         (p.min_p && p.min_p[b] > 0);
}

// Grid (B * slots * blocks), blocks fastest, kReduceThreads: one block of one row. The sums are
// those of the law without filters.
template <bool kRaces>
__global__ void __launch_bounds__(kReduceThreads)
    verify_reduce_kernel(const __grid_constant__ VerifyCall c) {
  constexpr int kWarps = kReduceThreads / 32, kApart = kVector * kReduceThreads;
  constexpr int kVectors = kBlockLanes / kApart;
  __shared__ float warp_highest[kWarps];
  __shared__ Units warp_weight[kWarps], warp_race[kWarps];
  __shared__ int warp_best[kWarps];
  const VerifyScratch& s = c.scratch;
  const int64_t slot = blockIdx.x / s.blocks, block = blockIdx.x % s.blocks;
  const int64_t start = block * kBlockLanes, first = start + kVector * threadIdx.x;
  const int warp = threadIdx.x / 32;
  const Row row = row_of_slot(c, slot);
  if (s.groups && block == 0 && slot % s.slots == 0 && threadIdx.x == 0) s.arrived[row.b] = 0;
  if (!row.is_used) return;

  float x[kVectors][kVector];
  read_lanes<kVectors, kApart>(c, row, first, x);
  const float least = is_probs(c, row) ? 0.0f : -INFINITY;
  float vector_highest[kVectors], highest = -INFINITY;
  bool is_bad = false;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    vector_highest[v] = -INFINITY;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const bool is_good = x[v][j] >= least && x[v][j] < INFINITY;
      is_bad |= !is_good;
      if (!is_good) x[v][j] = -INFINITY;
      vector_highest[v] = fmaxf(vector_highest[v], x[v][j]);
    }
    highest = fmaxf(highest, vector_highest[v]);
  }
  const float mine = highest;
  highest = warp_max(highest);
  if (threadIdx.x % 32 == 0) warp_highest[warp] = highest;
  is_bad = __syncthreads_or(is_bad);
  for (float other : warp_highest) highest = fmaxf(highest, other);

  int best = kBlockLanes - 1;
  if (mine == highest) {
#pragma unroll
    for (int v = kVectors - 1; v >= 0; --v)
#pragma unroll
      for (int j = kVector - 1; j >= 0; --j)
        if (x[v][j] == highest) best = static_cast<int>(first - start) + v * kApart + j;
  }
  best = __reduce_min_sync(kAllLanes, best);

  Units sum = 0, winner = 0;
  const bool has_law = c.temperature[row.b] >= kGreedyBelow && !is_probs(c, row);
  const bool races = kRaces && has_law && !row.is_draft;
  if (has_law) {
    const float scale = scale_of(c, row.b);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum += weight_below(x[v][j], highest, scale);
      if constexpr (kRaces) {
        if (!races) continue;
        const Units here = race(c, row, start, first + v * kApart, x[v], highest, scale);
        winner = here > winner ? here : winner;
      }
    }
    sum = warp_sum(sum);
    if (kRaces) winner = warp_max(winner);
    if (s.groups && is_filtered(c, row.b)) {
      float* groups = s.groups + (slot * s.blocks + block) * kFilterGroups;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float group = fmaxf(vector_highest[v], __shfl_xor_sync(kAllLanes, vector_highest[v], 1));
        group = fmaxf(group, __shfl_xor_sync(kAllLanes, group, 2));
        if (threadIdx.x % 4 == 0) groups[(v * kReduceThreads + threadIdx.x) / 4] = group;
      }
    }
  }
  if (threadIdx.x % 32 == 0) {
    warp_best[warp] = best;
    warp_weight[warp] = sum;
    warp_race[warp] = winner;
  }
  __syncthreads();
  BlockLaw& to = s.block_laws[slot * s.blocks + block];
  for (int i = 0; i < kWarps; ++i) {
    best = warp_best[i] < best ? warp_best[i] : best;
    winner = warp_race[i] > winner ? warp_race[i] : winner;
  }
  if (threadIdx.x == 0) {
    sum = 0;
    for (Units other : warp_weight) sum += other;
    to.sum = sum;
    to.highest = highest;
    to.best = best;
    to.is_finite = !is_bad;
  }
  if constexpr (kRaces) {
    if (!races) return;
    const int64_t lane = lane_of(winner);
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        if (first - start + v * kApart + j == lane) {
          to.score = score_of(winner);
          to.winner = static_cast<int>(lane);
          to.won = x[v][j];
        }
  }
}

// ---- Laws ---------------------------------------------------------------------------------------

__device__ inline const BlockLaw* block_laws(const VerifyCall& c, const Row& row) {
  return c.scratch.block_laws + slot_of(c, row) * c.scratch.blocks;
}

// Blocks of a law: the highest logit, what it weighs relative to the row's, the mass.
__device__ inline float block_highest(const RowLaw& law, const BlockLaw* blocks, int64_t block) {
  if (law.is_point) return block == law.best / kBlock ? 0.0f : -INFINITY;
  const float highest = blocks[block].highest;
  return highest >= law.cut ? highest : -INFINITY;
}

__device__ inline float block_scale(const RowLaw& law, const BlockLaw* blocks, int64_t block) {
  return exp2_below(block_highest(law, blocks, block), law.top, law.scale);
}

// `less`: weight that is taken out of the block.
__device__ inline Units block_mass(const RowLaw& law, const BlockLaw* blocks, int64_t block,
                                   Units less = 0) {
  const Units sum = law.is_point ? Units{1} << kOne : blocks[block].sum;
  return mass_of(sum - less, block_scale(law, blocks, block));
}

// The law of a row above a cut, by a warp; its sums must be those above the cut.
template <bool kRaces>
__device__ inline RowLaw make_law(const VerifyCall& c, const Row& row, float cut) {
  const VerifyScratch& s = c.scratch;
  const BlockLaw* blocks = block_laws(c, row);
  const int64_t lane = threadIdx.x % 32;
  RowLaw law{};
  bool is_bad = false;
  law.top = -INFINITY;
  for (int64_t i = lane; i < s.blocks; i += 32) {
    is_bad |= !blocks[i].is_finite;
    law.top = fmaxf(law.top, blocks[i].highest);
  }
  is_bad = __any_sync(kAllLanes, is_bad);
  law.top = warp_max(law.top);
  int first = static_cast<int>(s.blocks) - 1;
  for (int64_t i = s.blocks - 1 - lane; i >= 0; i -= 32)
    if (blocks[i].highest == law.top) first = static_cast<int>(i);
  first = __reduce_min_sync(kAllLanes, first);

  law.best = first * kBlock + blocks[first].best;
  law.status = (is_bad ? 1 : 0) + (law.top == -INFINITY ? 2 : 0);
  law.is_point = c.temperature[row.b] < kGreedyBelow || law.status != 0;
  law.cut = cut;
  law.scale = law.is_point ? 1.0f : scale_of(c, row.b);
  if (law.is_point) law.top = 0;
  Units total = 0, winner = 0;
  for (int64_t i = lane; i < s.blocks; i += 32) {
    total += block_mass(law, blocks, i);
    if (kRaces && !law.is_point) {
      const float score = __fmul_rn(blocks[i].score, block_scale(law, blocks, i));
      const Units here = entrant(score, i * kBlock + blocks[i].winner);
      winner = here > winner ? here : winner;
    }
  }
  law.total = warp_sum(total);
  if (kRaces) law.winner = law.is_point ? law.best : lane_of(warp_max(winner));
  return law;
}

// Some lanes of a law's logits: those below its cut, and all but a point's, are -inf.
template <int kVectors, int kApart>
__device__ inline void law_lanes(const VerifyCall& c, const Row& row, const RowLaw& law,
                                 int64_t first, float (&x)[kVectors][kVector]) {
  if (!law.is_point) read_lanes<kVectors, kApart>(c, row, first, x);
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const bool is_best = first + v * kApart + j == law.best;
      if (law.is_point)
        x[v][j] = is_best ? 0.0f : -INFINITY;
      else if (!(x[v][j] >= law.cut))
        x[v][j] = -INFINITY;
    }
}

__device__ inline float lane_at(const float (&x)[1][kVector], int64_t place) {
  float found = 0;
#pragma unroll
  for (int j = 0; j < kVector; ++j)
    if (j == place) found = x[0][j];
  return found;
}

__device__ inline Units weight_of(const VerifyCall& c, const Row& row, const RowLaw& law,
                                  int64_t token) {
  float x[1][kVector];
  law_lanes<1, 0>(c, row, law, token / kVector * kVector, x);
  const float highest = block_highest(law, block_laws(c, row), token / kBlock);
  return weight_below(lane_at(x, token % kVector), highest, law.scale);
}

__device__ inline double probability(const VerifyCall& c, const Row& row, const RowLaw& law,
                                     int64_t token) {
  const float scale = block_scale(law, block_laws(c, row), token / kBlock);
  const Units mass = mass_of(weight_of(c, row, law, token), scale);
  return static_cast<double>(mass) / static_cast<double>(law.total);
}

// ---- Filters ------------------------------------------------------------------------------------

// An integer in the order of x, without its `grain` low bits, which are 0 in all of a row's logits.
__device__ inline int key_of(float x, int grain) {
  const int bits = __float_as_int(x);
  return (bits < 0 ? static_cast<int>(0x80000000u - static_cast<unsigned>(bits)) : bits) >> grain;
}

__device__ inline float of_key(int key, int grain) {
  const unsigned bits = static_cast<unsigned>(key) << grain;
  return __uint_as_float(static_cast<int>(bits) < 0 ? 0x80000000u - bits : bits);
}

// The zero bits of a row's logits.
__device__ inline int grain_of(const VerifyParams& p, const Row& row) {
  if (!row.is_draft && (p.bias_ids || p.output_counts)) return 0;
  const DType dtype = row.is_draft ? p.draft_logits_dtype : p.logits_dtype;
  return dtype == DType::bf16 ? 16 : dtype == DType::fp16 ? 13 : 0;
}

constexpr int kBins = kDecideThreads;

// Sums of weights by key. 64-bit sums as two words each: atomics of one word are the fast ones.
struct Histogram {
  unsigned low[kBins], high[kBins];
  Units above;

  __device__ void add(unsigned bin, Units weight) {
    const auto part = static_cast<unsigned>(weight);
    const unsigned old = atomicAdd(&low[bin], part);
    const unsigned rest = static_cast<unsigned>(weight >> 32) + (old + part < old);
    if (rest) atomicAdd(&high[bin], rest);
  }
  __device__ Units at(unsigned bin) const { return static_cast<Units>(high[bin]) << 32 | low[bin]; }
};

// The highest key from which on the weights sum up to `enough`, times all from `low` on if it is a
// share; `low`, if even all do not. each(add) calls add(key, weight) for what the thread has; keys
// below `low` do not count. For a block of threads; eight bits of key at a time.
template <typename Each>
__device__ int select(int low, int top, double enough, bool is_share, const Each& each) {
  __shared__ Histogram h;
  const int64_t span = static_cast<int64_t>(top) - low;
  int shift = 0;
  while (span >> shift >= kBins) shift += 8;
  Units above = 0;                               // kept above the bins
  const unsigned bin = kBins - 1 - threadIdx.x;  // so that a prefix sum is from a bin on
  for (bool is_first = true; shift >= 0; shift -= 8, is_first = false) {
    h.low[bin] = h.high[bin] = 0;
    __syncthreads();
    each([&](int key, Units weight) {
      const unsigned place = (static_cast<unsigned>(key) - static_cast<unsigned>(low)) >> shift;
      if (key >= low && place < kBins) h.add(place, weight);
    });
    __syncthreads();
    const Units from_bin = block_prefix_sum(h.at(bin));
    if (is_first && is_share) {
      if (bin == 0) h.above = from_bin;
      __syncthreads();
      enough *= static_cast<double>(h.above);
    }
    const int count = __syncthreads_count(static_cast<double>(above + from_bin) >= enough);
    const int digit = count > 0 ? count - 1 : 0;
    if (bin == static_cast<unsigned>(digit) + 1) h.above = above + from_bin;
    __syncthreads();
    if (digit + 1 < kBins) above = h.above;
    low += digit << shift;
  }
  return low;
}

// What the filters keep of a row, as they go.
struct Cutting {
  const VerifyCall& c;
  const Row& row;
  const RowLaw& law;  // without filters
  BlockLaw* blocks;
  int grain, low;       // the key that min_p cuts at
  int top;              // the highest key
  double top_k, top_p;  // vocab and 1: off

  __device__ int key(float x) const { return key_of(x, grain); }
  __device__ bool has_top_k() const { return top_k < static_cast<double>(c.vocab); }
  __device__ bool has_top_p() const { return top_p < 1; }
  __device__ Units weight(float x) const { return weight_below(x, law.top, law.scale); }
};

// each(x) for the thread's share of the lanes of all blocks that have a key from `low` on.
template <typename Each>
__device__ inline void for_lanes(const Cutting& cut, int low, const Each& each) {
  for (int64_t first = threadIdx.x * kVector; first < cut.c.vocab;
       first += kDecideThreads * kVector) {
    if (cut.key(cut.blocks[first / kBlock].highest) < low) continue;
    float x[1][kVector];
    law_lanes<1, 0>(cut.c, cut.row, cut.law, first, x);
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      if (cut.key(x[0][j]) >= low) each(x[0][j]);
  }
}

// each(x) for the thread's share of the groups that have a key from `low` on, by their highest.
template <typename Each>
__device__ inline void for_groups(const Cutting& cut, int low, const Each& each) {
  const VerifyScratch& s = cut.c.scratch;
  const float* groups = s.groups + slot_of(cut.c, cut.row) * s.blocks * kFilterGroups;
  for (int64_t i = threadIdx.x; i < s.blocks * kFilterGroups; i += kDecideThreads)
    if (cut.key(groups[i]) >= low) each(i, groups[i]);
}

// The sums above a cut, of a row whose groups from `bound` on are few enough to be held by the
// threads, two for a group; returns the cut.
__device__ inline int cut_among_few(const Cutting& cut, int bound, double enough, bool is_share) {
  constexpr int kVectors = kFilterGroup / kVector / 2;
  __shared__ int listed[kFilterGroups];
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  for_groups(cut, bound,
             [&](int64_t group, float) { listed[atomicAdd(&count, 1)] = static_cast<int>(group); });
  __syncthreads();
  const bool has_group = static_cast<int>(threadIdx.x) / 2 < count;
  const int64_t group = has_group ? listed[threadIdx.x / 2] : 0;
  float x[kVectors][kVector];
  law_lanes<kVectors, kVector>(cut.c, cut.row, cut.law,
                               group * kFilterGroup + threadIdx.x % 2 * kVectors * kVector, x);
  const auto each_lane = [&](const auto& f) {
    if (!has_group) return;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int j = 0; j < kVector; ++j) f(x[v][j]);
  };
  if (cut.has_top_k())
    bound = select(bound, cut.top, cut.top_k, false,
                   [&](const auto& add) { each_lane([&](float y) { add(cut.key(y), 1); }); });
  if (cut.has_top_p())
    bound = select(bound, cut.top, enough, is_share, [&](const auto& add) {
      each_lane([&](float y) { add(cut.key(y), cut.weight(y)); });
    });
  for (int64_t i = threadIdx.x; i < cut.c.scratch.blocks; i += kDecideThreads)
    cut.blocks[i].sum = 0;
  __syncthreads();
  BlockLaw& block = cut.blocks[group * kFilterGroup / kBlock];
  Units sum = 0;
  each_lane([&](float y) {
    if (cut.key(y) >= bound) sum += weight_below(y, block.highest, cut.law.scale);
  });
  if (sum) atomicAdd(&block.sum, sum);
  return bound;
}

// The lanes of a block that a thread of a warp reads, a vector at a time: f(first, x).
template <typename F>
__device__ inline void for_warp_lanes(const VerifyCall& c, const Row& row, const RowLaw& law,
                                      int64_t block, const F& f) {
  for (int64_t first = block * kBlock + threadIdx.x % 32 * kVector; first < (block + 1) * kBlock;
       first += 32 * kVector) {
    float x[1][kVector];
    law_lanes<1, 0>(c, row, law, first, x);
    f(first, x[0]);
  }
}

// The same by reading the row, once for every eight bits of key.
__device__ inline int cut_among_many(const Cutting& cut) {
  int bound = cut.low;
  if (cut.has_top_k())
    bound = select(bound, cut.top, cut.top_k, false, [&](const auto& add) {
      for_lanes(cut, bound, [&](float x) { add(cut.key(x), 1); });
    });
  if (cut.has_top_p())
    bound = select(bound, cut.top, cut.top_p, true, [&](const auto& add) {
      for_lanes(cut, bound, [&](float x) { add(cut.key(x), cut.weight(x)); });
    });
  for (int64_t i = threadIdx.x / 32; i < cut.c.scratch.blocks; i += kDecideThreads / 32) {
    const float highest = cut.blocks[i].highest;
    if (cut.key(highest) < bound) continue;  // no part of the law, whatever its sum
    Units sum = 0;
    for_warp_lanes(cut.c, cut.row, cut.law, i, [&](int64_t, const float (&x)[kVector]) {
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        if (cut.key(x[j]) >= bound) sum += weight_below(x[j], highest, cut.law.scale);
    });
    sum = warp_sum(sum);
    __syncwarp();
    if (threadIdx.x % 32 == 0) cut.blocks[i].sum = sum;
  }
  return bound;
}

// The races of the blocks whose winner a cut has removed, again.
__device__ inline void race_again(const VerifyCall& c, const Row& row, const RowLaw& law,
                                  BlockLaw* blocks) {
  for (int64_t i = threadIdx.x / 32; i < c.scratch.blocks; i += kDecideThreads / 32) {
    const float highest = block_highest(law, blocks, i);
    if (highest == -INFINITY || blocks[i].won >= law.cut) continue;
    Units best = 0;
    for_warp_lanes(c, row, law, i, [&](int64_t first, const float (&x)[kVector]) {
      const Units here = race(c, row, i * kBlock, first, x, highest, law.scale);
      best = here > best ? here : best;
    });
    best = warp_max(best);
    if (threadIdx.x % 32 == 0) {
      blocks[i].score = score_of(best);
      blocks[i].winner = static_cast<int>(lane_of(best));
    }
  }
}

// The cutting before it begins, but for what min_p removes.
__device__ inline Cutting cutting(const VerifyCall& c, const Row& row, const RowLaw& law,
                                  BlockLaw* blocks) {
  const int64_t top_k = c.top_k.data ? integer_at(c.top_k, row.b) : 0;
  const float min_p = c.min_p ? c.min_p[row.b] : 0.0f;
  const int grain = grain_of(c, row);
  int low = (key_of(-INFINITY, 0) >> grain) + 1;  // of a finite logit
  if (min_p > 0) {
    const float at = law.top + __fmul_rn(log_exact(min_p), c.temperature[row.b]);
    const int kept = (key_of(at, 0) + ((1 << grain) - 1)) >> grain;
    low = kept > low ? kept : low;
  }
  return {c,
          row,
          law,
          blocks,
          grain,
          low,
          key_of(law.top, grain),
          static_cast<double>(0 < top_k && top_k < c.vocab ? top_k : c.vocab),
          c.top_p ? static_cast<double>(c.top_p[row.b]) : 1.0};
}

// Finds a row's cut, makes its blocks those above the cut, and its law; by a block of threads.
template <bool kRaces>
__device__ inline RowLaw cut_law(const VerifyCall& c, const Row& row) {
  const RowLaw law = make_law<kRaces>(c, row, -INFINITY);
  const bool cuts = !row.is_draft || c.draft_kind == DraftKind::filtered_logits;
  if (!cuts || law.is_point || !is_filtered(c, row.b)) return law;

  BlockLaw* blocks = c.scratch.block_laws + slot_of(c, row) * c.scratch.blocks;
  const Cutting cut = cutting(c, row, law, blocks);
  // Every group has at least one lane as high as its highest: a lower bound of the cut.
  int bound = cut.low;
  double enough = cut.top_p;
  bool is_share = true;
  const auto num_groups = [&] {
    Units count = 0;
    for_groups(cut, bound, [&](int64_t, float) { ++count; });
    return block_sum(count);
  };
  if (cut.has_top_k())
    bound = select(bound, cut.top, cut.top_k, false, [&](const auto& add) {
      for_groups(cut, bound, [&](int64_t, float x) { add(cut.key(x), 1); });
    });
  Units count = num_groups();
  if (count > kFilterGroups && cut.has_top_p() && !cut.has_top_k()) {
    Units weight = 0;
    for_lanes(cut, bound, [&](float x) { weight += cut.weight(x); });
    enough *= static_cast<double>(block_sum(weight));
    is_share = false;
    bound = select(bound, cut.top, enough, false, [&](const auto& add) {
      for_groups(cut, bound, [&](int64_t, float x) { add(cut.key(x), cut.weight(x)); });
    });
    count = num_groups();
  }
  bound =
      count <= kFilterGroups ? cut_among_few(cut, bound, enough, is_share) : cut_among_many(cut);
  __syncthreads();
  RowLaw found = law;
  found.cut = of_key(bound, cut.grain);
  if constexpr (kRaces) {
    if (!row.is_draft) race_again(c, row, found, blocks);
    __syncthreads();
  }
  return make_law<kRaces>(c, row, found.cut);
}

// ---- Residuals against draft_logits -------------------------------------------------------------

// `kept` p - q where that is positive, for residuals.
struct Residual {
  const VerifyCall& c;
  Row p_row, q_row;
  RowLaw p, q;
  double kept;

  // What `Law.lanes` multiplies the fractions of a block by.
  __device__ float unit(const RowLaw& law, const Row& row, int64_t block, double times) const {
    const double scale = static_cast<double>(block_scale(law, block_laws(c, row), block));
    return static_cast<float>(times * scale * 0x1p40 / static_cast<double>(law.total));
  }

  template <int kVectors, int kApart>
  __device__ void weights(int64_t first, Units (&to)[kVectors][kVector]) const {
    const int64_t block = first / kBlock;
    const bool from_probs = is_probs(c, q_row);
    const float p_highest = block_highest(p, block_laws(c, p_row), block);
    const float q_highest = from_probs ? 0.0f : block_highest(q, block_laws(c, q_row), block);
    const float p_unit = unit(p, p_row, block, kept);
    const float q_unit = from_probs ? 0.0f : unit(q, q_row, block, 1.0);
    float x[kVectors][kVector], y[kVectors][kVector];
    law_lanes<kVectors, kApart>(c, p_row, p, first, x);
    if (from_probs)
      read_lanes<kVectors, kApart>(c, q_row, first, y);
    else
      law_lanes<kVectors, kApart>(c, q_row, q, first, y);
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float p_lane = __fmul_rn(exp2_below(x[v][j], p_highest, p.scale), p_unit);
        const float q_lane =
            from_probs ? y[v][j] : __fmul_rn(exp2_below(y[v][j], q_highest, q.scale), q_unit);
        to[v][j] = static_cast<Units>(
            static_cast<long long>(__fmul_rn(fmaxf(p_lane - q_lane, 0.0f), 0x1p52f)));
      }
  }
};

// The masses of a residual's blocks, into scratch; by a block of threads. Returns their sum.
__device__ inline Units residual_masses(const Residual& r) {
  const VerifyScratch& s = r.c.scratch;
  Units* masses = s.residual_masses + r.p_row.b * s.blocks;
  Units total = 0;
  __syncthreads();  // the last ones have been read
  for (int64_t i = threadIdx.x / 32; i < s.blocks; i += kDecideThreads / 32) {
    Units sum = 0;
    if (block_highest(r.p, block_laws(r.c, r.p_row), i) > -INFINITY)
      for (int64_t first = i * kBlock + threadIdx.x % 32 * kVector; first < (i + 1) * kBlock;
           first += 32 * kVector) {
        Units weights[1][kVector];
        r.weights<1, 0>(first, weights);
#pragma unroll
        for (int j = 0; j < kVector; ++j) sum += weights[0][j];
      }
    sum = warp_sum(sum);
    total += sum;
    if (threadIdx.x % 32 == 0) masses[i] = sum;
  }
  return block_sum(threadIdx.x % 32 == 0 ? total : 0);
}

// ---- Launch 2 -----------------------------------------------------------------------------------

// One request's decision; by a block of threads, which all go the same way.
struct Request {
  const VerifyCall& c;
  int64_t b;
  int64_t judged;  // drafts that can be: those before the first bad id or row

  __device__ Request(const VerifyCall& call, int64_t request) : c(call), b(request), judged(0) {
    const int64_t given = num_given(c, b);
    while (judged < given) {
      const int64_t draft = draft_id(c, b, judged);
      if (draft < 0 || draft >= c.vocab || target(judged).status) return;
      const Row row = draft_row(c, b, judged);
      if (row.is_used && law_of(row).status) return;
      ++judged;
    }
  }

  __device__ const RowLaw& law_of(const Row& row) const { return c.scratch.laws[slot_of(c, row)]; }
  __device__ const RowLaw& target(int64_t i) const { return law_of(target_row(c, b, i)); }
  __device__ const Chance& chance(int64_t i) const { return c.scratch.chances[b * c.drafts + i]; }

  // Coins are numbered within the round, which is known by its first row.
  __device__ double coin(int64_t i) const {
    const Words words =
        philox(static_cast<uint64_t>(c.seeds[b]), static_cast<uint64_t>(position_of(c, b, 0)),
               Purpose::accept, static_cast<unsigned>(i));
    return uniform(words.x[0], words.x[1]);
  }

  // Chances of all drafts, each by a thread.
  __device__ void find_chances() const {
    for (int64_t i = threadIdx.x; i < judged; i += kDecideThreads) {
      Chance chance{0, 1, coin(i)};
      if (c.method == Method::synthetic) {
        chance.p = static_cast<double>(c.synthetic_rates[i]);
      } else {
        const int64_t token = draft_id(c, b, i);
        chance.p = probability(c, target_row(c, b, i), target(i), token);
        const Row row = draft_row(c, b, i);
        if (is_probs(c, row) && row.is_used) {
          float x[1][kVector];
          read_lanes<1, 0>(c, row, token / kVector * kVector, x);
          chance.q = static_cast<double>(lane_at(x, token % kVector));
        } else if (row.is_used) {
          chance.q = probability(c, row, law_of(row), token);
        }
      }
      c.scratch.chances[b * c.drafts + i] = chance;
    }
    __syncthreads();
  }

  __device__ Residual residual(int64_t i, double kept) const {
    const Row row = target_row(c, b, i), drafted = draft_row(c, b, i);
    return {c, row, drafted, law_of(row), law_of(drafted), kept};
  }

  // Of what draft i leaves of `kept` p.
  __device__ double residual_mass(int64_t i, double kept) const {
    if (draft_row(c, b, i).is_used)
      return static_cast<double>(residual_masses(residual(i, kept))) * 0x1p-52;
    return kept * (1 - chance(i).p);
  }

  // The standard and the synthetic rule: how many drafts are accepted.
  __device__ int64_t accept_one_by_one() const {
    int64_t accepted = 0;
    while (accepted < judged && chance(accepted).coin * chance(accepted).q < chance(accepted).p)
      ++accepted;
    return accepted;
  }

  // The block rule; `kept_there` becomes what of p is compared with q at the end.
  __device__ int64_t accept_block(double& kept_there) const {
    int64_t accepted = 0;
    double kept = 1;
    for (int64_t i = 1; i <= judged; ++i) {
      const auto [p, q, coin] = chance(i - 1);
      if (q > 0) {
        const double ratio = kept * p / q;
        kept = ratio < 1 ? ratio : 1;
      } else {
        kept = kept * p > 0 ? 1 : 0;
      }
      double passing = kept;
      if (i < judged && kept < 1) {
        const double left = residual_mass(i, kept);
        passing = left / (left + (1 - kept));
      }
      if (coin < passing) {
        accepted = i;
        kept_there = kept;
      }
    }
    return accepted;
  }

  // The token of row i: of what draft i leaves if it is rejected, and else of all the law.
  __device__ int64_t draw(int64_t i, double kept) const;
};

// The index at a random place of the cumulative sum of value(0), ..., by a warp.
template <typename Value>
__device__ inline int64_t warp_place(int64_t count, double uniform, const Value& value) {
  const int lane = threadIdx.x % 32;
  Units total = 0;
  for (int64_t i = lane; i < count; i += 32) total += value(i);
  total = warp_sum(total);
  auto place = static_cast<Units>(uniform * static_cast<double>(total));
  place = place < total ? place : total - 1;
  int64_t index = 0;
  for (int64_t start = 0; start < count; start += 32) {
    Units up_to = start + lane < count ? value(start + lane) : 0;
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const Units before = __shfl_up_sync(kAllLanes, up_to, lanes);
      if (lane >= lanes) up_to += before;
    }
    const unsigned below = __ballot_sync(kAllLanes, up_to <= place);
    index += __popc(below);
    if (below != kAllLanes) break;
    place -= __shfl_sync(kAllLanes, up_to, 31);
  }
  return index;
}

// The same for a block of threads, each with the next of the values.
template <int kCount>
__device__ inline int64_t block_place(const Units (&values)[kCount], double uniform) {
  __shared__ int64_t found;
  __shared__ Units all;
  Units sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += values[i];
  const Units up_to = block_prefix_sum(sum);
  if (threadIdx.x == kDecideThreads - 1) all = up_to;
  __syncthreads();
  const Units total = all;
  auto place = static_cast<Units>(uniform * static_cast<double>(total));
  place = place < total ? place : total - 1;
  if (up_to - sum <= place && place < up_to) {
    Units before = up_to - sum;
    int64_t index = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      before += values[i];
      index += before <= place;
    }
    found = static_cast<int64_t>(threadIdx.x) * kCount + index;
  }
  __syncthreads();
  return found;
}

__device__ inline int64_t Request::draw(int64_t i, double kept) const {
  constexpr int kVectors = kBlockLanes / kDecideThreads / kVector;
  const VerifyScratch& s = c.scratch;
  const Row row = target_row(c, b, i);
  const RowLaw law = law_of(row);
  const BlockLaw* blocks = block_laws(c, row);
  const Words words = philox(static_cast<uint64_t>(c.seeds[b]),
                             static_cast<uint64_t>(position_of(c, b, i)), c.stream, 0);
  const double for_block = uniform(words.x[0], words.x[1]);
  const double for_lane = uniform(words.x[2], words.x[3]);

  const bool is_rejected = i < judged;
  const bool has_q = is_rejected && draft_row(c, b, i).is_used;
  const bool from_residual = has_q && residual_masses(residual(i, kept)) > 0;
  const Units* residual_mass = s.residual_masses + b * s.blocks;
  int64_t excluded = -1;  // the draft, where it is one-hot
  Units excluded_weight = 0;
  if (is_rejected && !has_q) {
    excluded = draft_id(c, b, i);
    excluded_weight = weight_of(c, row, law, excluded);
  }
  const auto mass_at = [&](int64_t block) {
    if (from_residual) return residual_mass[block];
    const bool is_there = excluded >= 0 && block == excluded / kBlock;
    return block_mass(law, blocks, block, is_there ? excluded_weight : 0);
  };
  Units left = 0;
  for (int64_t block = threadIdx.x % 32; block < s.blocks; block += 32) left += mass_at(block);
  if (warp_sum(left) == 0) excluded = -1, excluded_weight = 0;  // nothing is left

  const int64_t block = warp_place(s.blocks, for_block, mass_at);
  const int64_t first = block * kBlock + threadIdx.x * kVectors * kVector;
  Units weights[kVectors][kVector];
  if (from_residual) {
    residual(i, kept).weights<kVectors, kVector>(first, weights);
  } else {
    float x[kVectors][kVector];
    law_lanes<kVectors, kVector>(c, row, law, first, x);
    const float highest = block_highest(law, blocks, block);
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        weights[v][j] =
            first + v * kVector + j == excluded ? 0 : weight_below(x[v][j], highest, law.scale);
  }
  Units in_a_row[kVectors * kVector];
#pragma unroll
  for (int k = 0; k < kVectors * kVector; ++k) in_a_row[k] = weights[k / kVector][k % kVector];
  return block * kBlock + block_place(in_a_row, for_lane);
}

// Grid (B), with filters (B * slots), kDecideThreads.
template <Method kMethod>
__global__ void __launch_bounds__(kDecideThreads)
    verify_decide_kernel(const __grid_constant__ VerifyCall c) {
  constexpr bool kRaces = kMethod == Method::coupled;
  __shared__ bool is_last;
  const VerifyScratch& s = c.scratch;
  int64_t b = blockIdx.x;
  if (s.groups) {
    b = blockIdx.x / s.slots;
    const Row row = row_of_slot(c, blockIdx.x);
    if (row.is_used) {
      const RowLaw law = cut_law<kRaces>(c, row);
      if (threadIdx.x == 0) s.laws[blockIdx.x] = law;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&s.arrived[b], 1) == static_cast<int>(s.slots) - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
  } else {
    for (int64_t i = threadIdx.x / 32; i < s.slots; i += kDecideThreads / 32) {
      const Row row = row_of_slot(c, b * s.slots + i);
      if (!row.is_used) continue;
      const RowLaw law = make_law<kRaces>(c, row, -INFINITY);
      if (threadIdx.x % 32 == 0) s.laws[b * s.slots + i] = law;
    }
    __syncthreads();
  }

  const Request request(c, b);
  int64_t accepted = 0, last;
  double kept = 1;
  if constexpr (kMethod == Method::coupled) {
    while (accepted < request.judged && request.target(accepted).winner == draft_id(c, b, accepted))
      ++accepted;
    last = request.target(accepted).winner;
  } else {
    request.find_chances();
    accepted = kMethod == Method::block ? request.accept_block(kept) : request.accept_one_by_one();
    last = request.draw(accepted, kept);
  }
  for (int64_t i = threadIdx.x; i <= c.drafts; i += kDecideThreads)
    c.token_ids[b * (c.drafts + 1) + i] = i < accepted    ? draft_id(c, b, i)
                                          : i == accepted ? last
                                                          : -1;
  if (threadIdx.x == 0) {
    c.num_accepted[b] = static_cast<int32_t>(accepted);
    c.status[b] = request.target(accepted).status;
  }
}

}  // namespace mtp
