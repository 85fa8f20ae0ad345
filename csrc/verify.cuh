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

#include "verify_laws.cuh"

namespace mtp {

constexpr int kReduceThreads = 128;

// ---- Launch 1 -----------------------------------------------------------------------------------

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
  const auto blocks = static_cast<unsigned>(s.blocks);
  const unsigned slot = blockIdx.x / blocks, block = blockIdx.x % blocks;
  const int start = block * kBlockLanes, first = start + kVector * threadIdx.x;
  const int warp = threadIdx.x / 32;
  const Row row = row_of_slot(c, slot);
  if (s.groups && block == 0 && row.i == 0 && !row.is_draft && threadIdx.x == 0)
    s.arrived[row.b] = 0;
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
        if (x[v][j] == highest) best = first - start + v * kApart + j;
  }
  best = __reduce_min_sync(kAllLanes, best);

  Units sum = 0, winner = 0;
  const bool has_law = !(c.temperature[row.b] < kGreedyBelow) && !is_probs(c, row);
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
      float* groups = s.groups + static_cast<int64_t>(blockIdx.x) * kFilterGroups;
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
  BlockLaw& to = s.block_laws[blockIdx.x];
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
    const int lane = lane_of(winner);
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        if (first - start + v * kApart + j == lane) {
          to.score = score_of(winner);
          to.winner = lane;
          to.won = x[v][j];
        }
  }
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
      const int token = draft_id(c, b, i);
      Chance chance{0, 1, coin(i), 0};
#pragma unroll 1
      for (int side = 0; side < 2; ++side) {
        const Row row = side == 0 ? target_row(c, b, i) : draft_row(c, b, i);
        if (!row.is_used) continue;
        if (is_probs(c, row)) {
          float x[1][kVector];
          read_lanes<1, 0>(c, row, token / kVector * kVector, x);
          chance.q = static_cast<double>(lane_at(x, token % kVector));
          continue;
        }
        const RowLaw& law = law_of(row);
        const Units weight = weight_of(c, row, law, token);
        const float scale = block_scale(law, block_laws(c, row), token / kBlockLanes);
        const double share =
            static_cast<double>(mass_of(weight, scale)) / static_cast<double>(law.total);
        if (row.is_draft) {
          chance.q = share;
        } else {
          chance.p = share;
          chance.weight = weight;
        }
      }
      if (c.method == Method::synthetic) {
        chance.p = static_cast<double>(c.synthetic_rates[i]);
        chance.q = 1;
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
    return __dmul_rn(kept, 1 - chance(i).p);
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
      const Chance& at = chance(i - 1);
      if (at.q > 0) {
        const double ratio = kept * at.p / at.q;
        kept = ratio < 1 ? ratio : 1;
      } else {
        kept = kept * at.p > 0 ? 1 : 0;
      }
      double passing = kept;
      if (i < judged && kept < 1) {
        const double left = residual_mass(i, kept);
        passing = left / (left + (1 - kept));
      }
      if (at.coin < passing) {
        accepted = i;
        kept_there = kept;
      }
    }
    return accepted;
  }

  // The token of row i: of what draft i leaves if it is rejected, and else of all the law.
  __device__ int draw(int64_t i, double kept) const;
};

// The index at a random place of the cumulative sum of value(0), ..., by a warp; 0 if that is 0.
template <typename Value>
__device__ inline int warp_place(int count, double uniform, const Value& value) {
  const int lane = threadIdx.x % 32;
  Units total = 0;
  for (int i = lane; i < count; i += 32) total += value(i);
  total = warp_sum(total);
  if (total == 0) return 0;
  auto place = static_cast<Units>(uniform * static_cast<double>(total));
  place = place < total ? place : total - 1;
  int index = 0;
  for (int start = 0; start < count; start += 32) {
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
__device__ inline int block_place(const Units (&values)[kCount], double uniform) {
  __shared__ int found;
  __shared__ Units all;
  Units sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += values[i];
  if (threadIdx.x == 0) found = 0;
  const Units up_to = block_prefix_sum(sum);
  if (threadIdx.x == kDecideThreads - 1) all = up_to;
  __syncthreads();
  const Units total = all;
  auto place = static_cast<Units>(uniform * static_cast<double>(total));
  place = place < total ? place : total - 1;
  if (up_to - sum <= place && place < up_to) {
    Units before = up_to - sum;
    int index = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      before += values[i];
      index += before <= place;
    }
    found = static_cast<int>(threadIdx.x) * kCount + index;
  }
  __syncthreads();
  return found;
}

__device__ inline int Request::draw(int64_t i, double kept) const {
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
  int excluded = -1;  // the draft, where it is one-hot
  Units excluded_weight = 0;
  if (is_rejected && !has_q) {
    excluded = draft_id(c, b, i);
    excluded_weight = chance(i).weight;
  }
  const auto mass_at = [&](int block) {
    if (from_residual) return residual_mass[block];
    const bool is_there = excluded >= 0 && block == excluded / kBlockLanes;
    return block_mass(law, blocks, block, is_there ? excluded_weight : 0);
  };
  Units left = 0;
  for (int block = threadIdx.x % 32; block < s.blocks; block += 32) left += mass_at(block);
  if (warp_sum(left) == 0) excluded = -1, excluded_weight = 0;  // nothing is left

  const int block = warp_place(s.blocks, for_block, mass_at);
  const int first = block * kBlockLanes + threadIdx.x * kVectors * kVector;
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
  return block * kBlockLanes + block_place(in_a_row, for_lane);
}

// Grid (B), with filters (B * slots), kDecideThreads. One block on an SM is enough: for two, 128
// registers each, ptxas would spill.
template <bool kRaces>
__global__ void __launch_bounds__(kDecideThreads, 1)
    verify_decide_kernel(const __grid_constant__ VerifyCall c) {
  __shared__ bool is_last;
  const VerifyScratch& s = c.scratch;
  int64_t b = blockIdx.x;
  if (s.groups) {
    const Row row = row_of_slot(c, blockIdx.x);
    b = row.b;
    if (row.is_used) {
      const RowLaw law = cut_law<kRaces>(c, row);
      if (threadIdx.x == 0) s.laws[blockIdx.x] = law;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&s.arrived[b], 1) == s.slots - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
  } else {
    for (int i = threadIdx.x / 32; i < s.slots; i += kDecideThreads / 32) {
      const Row row = row_of_slot(c, static_cast<unsigned>(b * s.slots + i));
      if (!row.is_used) continue;
      const RowLaw law = make_law<kRaces>(c, row, -INFINITY);
      if (threadIdx.x % 32 == 0) s.laws[b * s.slots + i] = law;
    }
    __syncthreads();
  }

  const Request request(c, b);
  int64_t accepted = 0;
  int last = -1, status = 0;
  if (num_given(c, b) >= 0) {  // it has rows
    double kept = 1;
    if constexpr (kRaces) {
      while (accepted < request.judged &&
             request.target(accepted).winner == draft_id(c, b, accepted))
        ++accepted;
      last = request.target(accepted).winner;
    } else {
      request.find_chances();
      accepted =
          c.method == Method::block ? request.accept_block(kept) : request.accept_one_by_one();
      last = request.draw(accepted, kept);
    }
    status = request.target(accepted).status;
  }
  for (int64_t i = threadIdx.x; i <= c.drafts; i += kDecideThreads)
    c.token_ids[b * (c.drafts + 1) + i] = i < accepted    ? draft_id(c, b, i)
                                          : i == accepted ? last
                                                          : -1;
  if (threadIdx.x == 0) {
    c.num_accepted[b] = static_cast<int32_t>(accepted);
    c.status[b] = status;
  }
}

}  // namespace mtp
