// Laws of verify on CUDA: what is known of a row from its blocks, where filters cut it, and what a
// draft's law leaves of it.
#pragma once

#include "verify_rows.cuh"

namespace mtp {

constexpr int kDecideThreads = 256;  // of the blocks that cut rows and decide
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

// ---- Laws ---------------------------------------------------------------------------------------

__device__ inline const BlockLaw* block_laws(const VerifyCall& c, const Row& row) {
  return c.scratch.block_laws + slot_of(c, row) * c.scratch.blocks;
}

// Blocks of a law: the highest logit, what it weighs relative to the row's, the mass.
__device__ inline float block_highest(const RowLaw& law, const BlockLaw* blocks, int block) {
  if (law.is_point) return block == law.best / kBlockLanes ? 0.0f : -INFINITY;
  const float highest = blocks[block].highest;
  return highest >= law.cut ? highest : -INFINITY;
}

__device__ inline float block_scale(const RowLaw& law, const BlockLaw* blocks, int block) {
  return exp2_below(block_highest(law, blocks, block), law.top, law.scale);
}

// `less`: weight that is taken out of the block.
__device__ inline Units block_mass(const RowLaw& law, const BlockLaw* blocks, int block,
                                   Units less = 0) {
  const Units sum = law.is_point ? Units{1} << kOne : blocks[block].sum;
  return mass_of(sum - less, block_scale(law, blocks, block));
}

// The law of a row above a cut, by a warp; its sums must be those above the cut.
template <bool kRaces>
__device__ inline RowLaw make_law(const VerifyCall& c, const Row& row, float cut) {
  const VerifyScratch& s = c.scratch;
  const BlockLaw* blocks = block_laws(c, row);
  const int lane = threadIdx.x % 32;
  RowLaw law{};
  bool is_bad = false;
  law.top = -INFINITY;
  for (int i = lane; i < s.blocks; i += 32) {
    is_bad |= !blocks[i].is_finite;
    law.top = fmaxf(law.top, blocks[i].highest);
  }
  is_bad = __any_sync(kAllLanes, is_bad);
  law.top = warp_max(law.top);
  int first = s.blocks - 1;
  for (int i = s.blocks - 1 - lane; i >= 0; i -= 32)
    if (blocks[i].highest == law.top) first = i;
  first = __reduce_min_sync(kAllLanes, first);

  law.best = first * kBlockLanes + blocks[first].best;
  law.status = (is_bad ? 1 : 0) + (law.top == -INFINITY ? 2 : 0);
  law.is_point = c.temperature[row.b] < kGreedyBelow || law.status != 0;
  law.cut = cut;
  law.scale = law.is_point ? 1.0f : scale_of(c, row.b);
  if (law.is_point) law.top = 0;
  Units total = 0, winner = 0;
  for (int i = lane; i < s.blocks; i += 32) {
    total += block_mass(law, blocks, i);
    if (kRaces && !row.is_draft && !law.is_point) {
      const float score = __fmul_rn(blocks[i].score, block_scale(law, blocks, i));
      const Units here = entrant(score, i * kBlockLanes + blocks[i].winner);
      winner = here > winner ? here : winner;
    }
  }
  law.total = warp_sum(total);
  if (kRaces) law.winner = law.is_point ? law.best : lane_of(warp_max(winner));
  return law;
}

// Some lanes of a law's logits: those below its cut, and all but a point's, are -inf.
template <int kVectors, int kApart>
__device__ inline void law_lanes(const VerifyCall& c, const Row& row, const RowLaw& law, int first,
                                 float (&x)[kVectors][kVector]) {
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

__device__ inline float lane_at(const float (&x)[1][kVector], int place) {
  float found = 0;
#pragma unroll
  for (int j = 0; j < kVector; ++j)
    if (j == place) found = x[0][j];
  return found;
}

__device__ inline Units weight_of(const VerifyCall& c, const Row& row, const RowLaw& law,
                                  int token) {
  float x[1][kVector];
  law_lanes<1, 0>(c, row, law, token / kVector * kVector, x);
  const float highest = block_highest(law, block_laws(c, row), token / kBlockLanes);
  return weight_below(lane_at(x, token % kVector), highest, law.scale);
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
    low = static_cast<int>(static_cast<unsigned>(low) + (static_cast<unsigned>(digit) << shift));
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
  // What a lane counts for top_k, and for top_p.
  __device__ Units value(bool is_top_k, float x) const {
    return is_top_k ? 1 : weight_below(x, law.top, law.scale);
  }
};

// each(x) for the thread's share of the lanes of all blocks that have a key from `low` on.
template <typename Each>
__device__ inline void for_lanes(const Cutting& cut, int low, const Each& each) {
  for (int first = threadIdx.x * kVector; first < cut.c.vocab; first += kDecideThreads * kVector) {
    if (cut.key(cut.blocks[first / kBlockLanes].highest) < low) continue;
    float x[1][kVector];
    law_lanes<1, 0>(cut.c, cut.row, cut.law, first, x);
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      if (cut.key(x[0][j]) >= low) each(x[0][j]);
  }
}

// each(group, x) for the thread's share of the groups that have a key from `low` on; x: the
// highest.
template <typename Each>
__device__ inline void for_groups(const Cutting& cut, int low, const Each& each) {
  const VerifyScratch& s = cut.c.scratch;
  const float* groups = s.groups + slot_of(cut.c, cut.row) * s.blocks * kFilterGroups;
  for (int i = 4 * threadIdx.x; i < s.blocks * kFilterGroups; i += 4 * kDecideThreads) {
    const float4 four = *reinterpret_cast<const float4*>(groups + i);
    const float x[] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (cut.key(x[j]) >= low) each(i + j, x[j]);
  }
}

// The key at which top_k, then top_p cut the lanes that lanes(low, f) shows to f, from key `low`
// on. enough: what top_p keeps, a share or the weight.
template <typename Lanes>
__device__ inline int cut_lanes(const Cutting& cut, int bound, double enough, bool is_share,
                                const Lanes& lanes) {
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    const bool is_top_k = pass == 0;
    if (is_top_k ? !cut.has_top_k() : !cut.has_top_p()) continue;
    bound = select(bound, cut.top, is_top_k ? cut.top_k : enough, is_share && !is_top_k,
                   [&](const auto& add) {
                     lanes(bound, [&](float x) { add(cut.key(x), cut.value(is_top_k, x)); });
                   });
  }
  return bound;
}

// The cut, and the sums above it, of a row whose groups from `bound` on are few enough for the
// threads to hold their lanes, two for a group.
__device__ inline int cut_few(const Cutting& cut, int bound, double enough, bool is_share) {
  constexpr int kVectors = kFilterGroup / kVector / 2;
  __shared__ int listed[kFilterGroups];
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  for_groups(cut, bound, [&](int group, float) { listed[atomicAdd(&count, 1)] = group; });
  __syncthreads();
  const bool has_group = static_cast<int>(threadIdx.x) / 2 < count;
  const int group = has_group ? listed[threadIdx.x / 2] : 0;
  float x[kVectors][kVector];
  if (has_group)
    law_lanes<kVectors, kVector>(cut.c, cut.row, cut.law,
                                 group * kFilterGroup + threadIdx.x % 2 * kVectors * kVector, x);
  const auto lanes = [&](int low, const auto& f) {
    if (!has_group) return;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        if (cut.key(x[v][j]) >= low) f(x[v][j]);
  };
  bound = cut_lanes(cut, bound, enough, is_share, lanes);
  for (int i = threadIdx.x; i < cut.c.scratch.blocks; i += kDecideThreads) cut.blocks[i].sum = 0;
  __syncthreads();
  BlockLaw& block = cut.blocks[group * kFilterGroup / kBlockLanes];
  Units sum = 0;
  lanes(bound, [&](float y) { sum += weight_below(y, block.highest, cut.law.scale); });
  if (sum) atomicAdd(&block.sum, sum);
  return bound;
}

// The lanes of a block that a thread of a warp reads, a vector at a time: f(first, x).
template <typename F>
__device__ inline void for_warp_lanes(const VerifyCall& c, const Row& row, const RowLaw& law,
                                      int block, const F& f) {
  for (int first = block * kBlockLanes + threadIdx.x % 32 * kVector;
       first < (block + 1) * kBlockLanes; first += 32 * kVector) {
    float x[1][kVector];
    law_lanes<1, 0>(c, row, law, first, x);
    f(first, x[0]);
  }
}

// The same of any row, by reading it, once for every eight bits of key.
__device__ inline int cut_many(const Cutting& cut) {
  const int bound = cut_lanes(cut, cut.low, cut.top_p, true,
                              [&](int low, const auto& f) { for_lanes(cut, low, f); });
  for (int i = threadIdx.x / 32; i < cut.c.scratch.blocks; i += kDecideThreads / 32) {
    const float highest = cut.blocks[i].highest;
    if (cut.key(highest) < bound) continue;  // no part of the law, whatever its sum
    Units sum = 0;
    for_warp_lanes(cut.c, cut.row, cut.law, i, [&](int, const float (&x)[kVector]) {
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        if (cut.key(x[j]) >= bound) sum += weight_below(x[j], highest, cut.law.scale);
    });
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) cut.blocks[i].sum = sum;
  }
  return bound;
}

// The races of the blocks whose winner a cut has removed, again.
__device__ inline void race_again(const VerifyCall& c, const Row& row, const RowLaw& law,
                                  BlockLaw* blocks) {
  for (int i = threadIdx.x / 32; i < c.scratch.blocks; i += kDecideThreads / 32) {
    const float highest = block_highest(law, blocks, i);
    if (highest == -INFINITY || blocks[i].won >= law.cut) continue;
    Units best = 0;
    for_warp_lanes(c, row, law, i, [&](int first, const float (&x)[kVector]) {
      const Units here = race(c, row, i * kBlockLanes, first, x, highest, law.scale);
      best = here > best ? here : best;
    });
    best = warp_max(best);
    if (threadIdx.x % 32 == 0) {
      blocks[i].score = score_of(best);
      blocks[i].winner = lane_of(best);
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
    for_groups(cut, bound, [&](int, float) { ++count; });
    return block_sum(count);
  };
  Units count = cut.has_top_k() ? 0 : num_groups();
  if (cut.has_top_p() && count > kFilterGroups) {
    Units weight = 0;
    for_lanes(cut, bound, [&](float x) { weight += cut.value(false, x); });
    enough *= static_cast<double>(block_sum(weight));
    is_share = false;
  }
  if (cut.has_top_k() || !is_share) {
    bound = select(bound, cut.top, is_share ? cut.top_k : enough, false, [&](const auto& add) {
      for_groups(cut, bound, [&](int, float x) { add(cut.key(x), cut.value(is_share, x)); });
    });
    count = num_groups();
  }
  bound = count <= kFilterGroups ? cut_few(cut, bound, enough, is_share) : cut_many(cut);
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
  __device__ float unit(const RowLaw& law, const Row& row, int block, double times) const {
    const double scale = static_cast<double>(block_scale(law, block_laws(c, row), block));
    return static_cast<float>(times * scale * 0x1p40 / static_cast<double>(law.total));
  }

  template <int kVectors, int kApart>
  __device__ void weights(int first, Units (&to)[kVectors][kVector]) const {
    const int block = first / kBlockLanes;
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
  for (int i = threadIdx.x / 32; i < s.blocks; i += kDecideThreads / 32) {
    Units sum = 0;
    if (block_highest(r.p, block_laws(r.c, r.p_row), i) > -INFINITY)
      for (int first = i * kBlockLanes + threadIdx.x % 32 * kVector; first < (i + 1) * kBlockLanes;
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

}  // namespace mtp
