// The stages of verify on CPU. Compiled once per instruction set, with MTP_ISA naming it. Names are
// those of the reference, mtp_kernels/ops/verify.py.
#include "exact.h"
#include "verify_cpu.h"

namespace mtp {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr float kLowest = -__FLT_MAX__;
constexpr float kGreedyBelow = 1e-5f;
constexpr int kOne = 40;           // a block's heaviest lane weighs 2^40
constexpr float kWhole = 0x1p52f;  // what a residual of the whole distribution weighs
constexpr int32_t kNotFinite = 1, kNothingAllowed = 2;  // bits of status

static_assert(kBlock % kChunk == 0 && kChunk % (4 * Vec::kLanes) == 0);

int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t at(const IntArray& values, int64_t i) {
  return values.are_int64 ? static_cast<const int64_t*>(values.data)[i]
                          : static_cast<const int32_t*>(values.data)[i];
}

int64_t first_row(const VerifyParams& p, int64_t b) { return at(p.cu_rows, b); }

int64_t given_drafts(const VerifyParams& p, int64_t b) {
  return at(p.cu_rows, b + 1) - at(p.cu_rows, b) - 1;
}

int64_t draft_id(const VerifyParams& p, int64_t b, int64_t i) {
  return at(p.draft_ids, b * p.draft_ids_stride + i);
}

bool is_token(const VerifyParams& p, int64_t id) { return id >= 0 && id < p.vocab; }

int64_t lanes_of(const VerifyParams& p, int64_t block) {
  return min(kBlock, p.vocab - block * kBlock);
}

// A request's filters; off: 0, 1, 0.
struct Cuts {
  int64_t top_k;
  float top_p;
  float min_p;

  bool any() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};

Cuts cuts_of(const VerifyParams& p, int64_t b) {
  const int64_t top_k = p.top_k.data ? at(p.top_k, b) : 0;
  return {top_k < p.vocab ? top_k : 0, p.top_p ? p.top_p[b] : 1, p.min_p ? p.min_p[b] : 0};
}

float first(Vec x) {
  float lanes[Vec::kLanes];
  store(lanes, x);
  return lanes[0];
}

uint32_t first(Ints x) {
  uint32_t lanes[Vec::kLanes];
  store(lanes, x);
  return lanes[0];
}

// Bias, penalties and mask.

bool is_penalised(const VerifyParams& p, int64_t b) {
  if (!p.penalty_rows.data) return false;
  const int64_t state = at(p.penalty_rows, b);
  const bool is_neutral =
      p.repetition_penalty[b] == 1 && p.frequency_penalty[b] == 0 && p.presence_penalty[b] == 0;
  return state >= 0 && state < p.penalty_states && !is_neutral;
}

const int32_t* mask_of(const VerifyParams& p, const Law& law) {
  return p.allowed_mask + (first_row(p, law.request) + law.index) * p.allowed_mask_stride;
}

bool bit(const int32_t* words, int64_t i) {
  return (static_cast<uint32_t>(words[i / 32]) >> (i % 32)) & 1;
}

// Whether lanes [begin, end) may differ from the row in memory.
bool is_touched(const VerifyParams& p, const Law& law, int64_t begin, int64_t end) {
  if (law.is_penalised) return true;
  for (int64_t m = 0; m < p.biases; ++m) {
    const int64_t id = p.bias_ids[law.request * p.bias_ids_stride + m];
    if (id >= begin && id < end) return true;
  }
  if (!p.allowed_mask) return false;
  const int32_t* mask = mask_of(p, law);
  int32_t all = -1;
  for (int64_t word = begin / 32; word * 32 < end; ++word) all &= mask[word];
  return all != -1;
}

// to = the row's lanes [begin, end) after bias, penalties and mask.
template <typename T>
void edit(const VerifyParams& p, const Law& law, const T* row, int64_t begin, int64_t end,
          float* to) {
  const int64_t b = law.request, n = end - begin;
  for (int64_t i = 0; i < n; ++i) to[i] = to_float(row[begin + i]);
  for (int64_t m = 0; m < p.biases; ++m) {
    const int64_t id = p.bias_ids[b * p.bias_ids_stride + m];
    if (id >= begin && id < end) to[id - begin] += p.bias_values[b * p.bias_values_stride + m];
  }
  if (law.is_penalised) {
    const int64_t state = at(p.penalty_rows, b);
    const int32_t* prompt = p.prompt_mask + state * p.prompt_mask_stride;
    int32_t counts[kBlock];
    for (int64_t i = 0; i < n; ++i)
      counts[i] = p.output_counts[state * p.output_counts_stride + begin + i];
    for (int64_t i = 0; i < law.index; ++i) {
      const int64_t draft = draft_id(p, b, i);
      if (draft >= begin && draft < end) ++counts[draft - begin];
    }
    const float repetition = p.repetition_penalty[b], relief = 1 / repetition;
    const float frequency = p.frequency_penalty[b], presence = p.presence_penalty[b];
    for (int64_t i = 0; i < n; ++i) {
      const bool generated = counts[i] > 0;
      if (generated || bit(prompt, begin + i)) to[i] *= to[i] > 0 ? relief : repetition;
      to[i] -= frequency * static_cast<float>(counts[i]);
      to[i] -= presence * static_cast<float>(generated);
    }
  }
  if (p.allowed_mask) {
    const int32_t* mask = mask_of(p, law);
    for (int64_t i = 0; i < n; ++i)
      if (!bit(mask, begin + i)) to[i] = -kInfinity;
  }
}

// Calls f(lanes) with lanes [begin, end) of the row, at most a block: where they lie, unless
// edited.
template <typename F>
void with_lanes(const VerifyParams& p, const Law& law, int64_t begin, int64_t end, F f) {
  const auto of_type = [&](const auto* row) {
    if (law.is_edited && is_touched(p, law, begin, end)) {
      float lanes[kBlock];
      edit(p, law, row, begin, end, lanes);
      f(static_cast<const float*>(lanes));
    } else {
      f(row + begin);
    }
  };
  switch (law.dtype) {
    case DType::bf16:
      return of_type(static_cast<const Bf16*>(law.logits));
    case DType::fp16:
      return of_type(static_cast<const Half*>(law.logits));
    case DType::fp32:
      return of_type(static_cast<const float*>(law.logits));
  }
}

template <typename F>
void with_block(const VerifyParams& p, const Law& law, int64_t block, F f) {
  with_lanes(p, law, block * kBlock, block * kBlock + lanes_of(p, block), f);
}

// x[i:i + kLanes], -inf from n on.
template <typename T>
Vec lanes_at(const T* x, int64_t i, int64_t n) {
  if (i + Vec::kLanes <= n) return load(x + i);
  float tail[Vec::kLanes];
  for (int64_t j = 0; j < Vec::kLanes; ++j) tail[j] = i + j < n ? to_float(x[i + j]) : -kInfinity;
  return load(tail);
}

// The scan.

// Integers in the order of the floats that they are the bits of; the function is its own inverse.
// NaNs lie beyond the infinities, and the key of -inf is the complement of the key of inf.
template <typename Key>
Key ordered(Key bits) {
  constexpr int kSign = 8 * sizeof(Key) - 1;
  return static_cast<Key>(bits ^ ((bits >> kSign) & static_cast<Key>(~(Key{1} << kSign))));
}

template <typename T>
struct Keys {
  using Key = int16_t;
  static Key bits(T x) { return static_cast<Key>(x.bits); }
  static float value(Key key) { return to_float(T{static_cast<uint16_t>(ordered(key))}); }
};
template <>
struct Keys<float> {
  using Key = int32_t;
  static Key bits(float x) { return __builtin_bit_cast(Key, x); }
  static float value(Key key) { return __builtin_bit_cast(float, ordered(key)); }
};

template <typename T>
struct Extremes {
  using Key = typename Keys<T>::Key;
  Key lowest = static_cast<Key>(~(Key{1} << (8 * sizeof(Key) - 1)));
  Key highest = static_cast<Key>(~lowest);

  // A loop over integers, which compilers turn into two or three operations per vector.
  void add(const T* x, int64_t n) {
    Key low = lowest, high = highest;
    for (int64_t i = 0; i < n; ++i) {
      const Key key = ordered(Keys<T>::bits(x[i]));
      low = key < low ? key : low;
      high = key > high ? key : high;
    }
    lowest = low;
    highest = high;
  }
};

// Key of +inf.
template <typename T>
constexpr typename Keys<T>::Key kInfinityKey = 0x7f80;
template <>
constexpr int16_t kInfinityKey<Half> = 0x7c00;
template <>
constexpr int32_t kInfinityKey<float> = 0x7f800000;

template <typename T>
float highest_finite(const T* x, int64_t n) {
  float highest = -kInfinity;
  for (int64_t i = 0; i < n; ++i) {
    const float value = to_float(x[i]);
    if (value > highest && value < kInfinity) highest = value;
  }
  return highest;
}

// Calls f(begin, end) for what may hold a lane of at least `least` among a block's n lanes.
template <typename F>
void spans(const float* chunks, float least, int64_t n, F f) {
  if (!chunks) return f(0, n);
  for (int64_t i = 0; i < n; i += kChunk)
    if (chunks[i / kChunk] >= least) f(i, min(i + kChunk, n));
}

const float* chunks_of(const Law& law, int64_t block) {
  return law.chunks ? law.chunks + block * (kBlock / kChunk) : nullptr;
}

uint64_t seed_of(const VerifyParams& p, const Law& law) {
  return static_cast<uint64_t>(p.seeds[law.request]);
}

// Of the token that the row decides.
uint64_t position_of(const VerifyParams& p, const Law& law) {
  return static_cast<uint64_t>(at(p.positions, first_row(p, law.request) + law.index)) + 1;
}

// Vectors that are computed together (csrc/exact.h).
constexpr int kTogether = 4;

// Fills in the block's weight: the sum over the lanes from `cut` up.
template <typename T>
void weigh(const T* x, int64_t n, const float* chunks, const Law& law, float cut, Block& block) {
  const Vec highest = broadcast(block.highest), scale = broadcast(law.scale);
  Longs total = truncated(zero());
  spans(chunks, cut, n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kTogether * Vec::kLanes) {
      Vec values[kTogether], weights[kTogether];
      for (int k = 0; k < kTogether; ++k) {
        // Memory is read ahead while this block is computed.
        if (!chunks) __builtin_prefetch(x + i + k * Vec::kLanes + kBlock);
        values[k] = lanes_at(x, i + k * Vec::kLanes, n);
        weights[k] = (values[k] - highest) * scale;
      }
      exp2<kOne>(weights);
      for (int k = 0; k < kTogether; ++k) {
        if (chunks) weights[k] = where(values[k] >= broadcast(cut), weights[k]);
        total = total + truncated(weights[k]);
      }
    }
  });
  block.weight = sum(total);
}

// Fills in the winner of the block's race among the lanes from `cut` up, the first of several.
template <typename T>
void race(const VerifyParams& p, const T* x, int64_t first_lane, int64_t n, const float* chunks,
          const Law& law, float cut, Block& block) {
  const uint64_t seed = seed_of(p, law), position = position_of(p, law);
  const Vec highest = broadcast(block.highest), scale = broadcast(law.scale);
  float best = 0;
  int64_t winner = 0;
  spans(chunks, cut, n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += 4 * Vec::kLanes) {
      const Longs counters = broadcast_longs((first_lane + i) / 4) + order();
      const Words random = philox(seed, position, static_cast<uint32_t>(p.stream), counters);
      Ints words[4];
      interleave(random.x, words);
      Vec values[4], fractions[4];
      for (int k = 0; k < 4; ++k) {
        if (!chunks) __builtin_prefetch(x + i + k * Vec::kLanes + kBlock);
        values[k] = lanes_at(x, i + k * Vec::kLanes, n);
        fractions[k] = (values[k] - highest) * scale;
      }
      exp2<0>(fractions);
      for (int k = 0; k < 4; ++k) {
        fractions[k] = where(values[k] >= broadcast(cut), fractions[k]);
        // A score is a fraction over an exponential variate, which is above the uniform one that it
        // is made from: most lanes lose without a logarithm. The slack is for rounding.
        const Vec uniforms = to_floats(words[k] >> 1) * broadcast(0x1p-31f);
        const Vec slack = broadcast(1 + 0x1p-16f);
        if (!any(fractions[k] * slack > uniforms * broadcast(best))) continue;
        float scores[Vec::kLanes];
        store(scores, fractions[k] / exponential(words[k]));
        for (int j = 0; j < Vec::kLanes; ++j) {
          if (!(scores[j] > best)) continue;
          best = scores[j];
          winner = i + k * Vec::kLanes + j;
        }
      }
    }
  });
  block.best = best;
  block.winner = static_cast<int32_t>(winner);
}

// What the law needs of a block, of the lanes from `cut` up.
template <typename T>
void measure(const VerifyParams& p, const Law& law, int64_t block, const T* x, float cut) {
  const int64_t n = lanes_of(p, block);
  const float* chunks = chunks_of(law, block);
  Block& to = law.blocks[block];
  if (law.need == Need::weights) weigh(x, n, chunks, law, cut, to);
  if (law.need == Need::race) race(p, x, block * kBlock, n, chunks, law, cut, to);
}

void scan_block(const VerifyParams& p, const Law& law, int64_t block) {
  with_block(p, law, block, [&]<typename T>(const T* x) {
    const int64_t n = lanes_of(p, block);
    Extremes<T> extremes;
    if (law.chunks) {
      float* chunks = law.chunks + block * (kBlock / kChunk);
      for (int64_t i = 0; i < n; i += kChunk) {
        Extremes<T> chunk;
        chunk.add(x + i, min(kChunk, n - i));
        chunks[i / kChunk] = Keys<T>::value(chunk.highest);
        if (chunk.lowest < extremes.lowest) extremes.lowest = chunk.lowest;
        if (chunk.highest > extremes.highest) extremes.highest = chunk.highest;
      }
    } else {
      extremes.add(x, n);
    }
    Block& to = law.blocks[block];
    constexpr auto infinity = kInfinityKey<T>;
    // The key of -0.0 is -1.
    to.is_finite =
        extremes.highest < infinity && extremes.lowest >= (law.is_probs ? -1 : ~infinity);
    to.highest = to.is_finite ? Keys<T>::value(extremes.highest) : highest_finite(x, n);
    to.weight = 0;
    to.best = 0;
    to.winner = 0;
    // With filters it is known only after the scan which lanes count.
    if (to.is_finite && to.highest > -kInfinity && !law.chunks) measure(p, law, block, x, kLowest);
  });
}

void scan(const VerifyParams& p, const VerifyWorkspace& w, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) scan_block(p, *w.laws[i / w.blocks], i % w.blocks);
}

// The filters.

// Calls f(x, begin, end, n) with lanes x[begin:end] of x[:n], at most a chunk; every lane of at
// least `least` is among them.
struct RowLanes {
  const VerifyParams& p;
  const Law& law;
  int64_t blocks;

  template <typename F>
  void each(float least, F f) const {
    for (int64_t block = 0; block < blocks; ++block) {
      if (!(law.blocks[block].highest >= least)) continue;
      with_block(p, law, block, [&](const auto* x) {
        const int64_t n = lanes_of(p, block);
        spans(chunks_of(law, block), least, n,
              [&](int64_t begin, int64_t end) { f(x, begin, end, n); });
      });
    }
  }
};

struct ChunkMaxima {
  const float* chunks;
  int64_t n;

  template <typename F>
  void each(float, F f) const {
    for (int64_t i = 0; i < n; i += kChunk) f(chunks, i, min(i + kChunk, n), n);
  }
};

// How much of a law the lanes above a cut may hold: a count of lanes, or a share of the weight.
struct Limit {
  double amount;
  bool is_share;
};

// Finds the cut of one filter: the lowest of the lanes from a floor up, such that the lanes above
// it hold less than the limit. A radix select: lanes are added up in buckets, then those of the
// bucket where the limit is reached in finer ones. No sort, no memory, few passes over the row, and
// all but the first skip most lanes.
template <typename Lanes>
class Selection {
 public:
  Selection(const Lanes& lanes, const Law& law, Limit limit)
      : lanes_(lanes), law_(law), limit_(limit) {}

  // `floor` if all lanes above it hold less than the limit.
  float from(float floor) {
    // First equal steps of the weights' exponents, each of which holds few lanes at any
    // temperature. The last one is all lanes of weight 0.
    histogram(floor, law_.highest, kBuckets, [](Vec, Vec exponent) { return steps_of(exponent); });
    int64_t total = 0;
    for (int64_t mass : masses_) total += mass;
    target_ = limit_.is_share ? limit_.amount * static_cast<double>(total) : limit_.amount;
    if (static_cast<double>(total) < target_) return floor;
    const uint32_t step = static_cast<uint32_t>(bucket_of_limit());

    // Then the floats' keys, from the step's highest down.
    const int32_t floor_key = key_of(floor);
    int32_t high = highest_key_from(step, floor_key);
    int32_t low = step + 1 < kBuckets ? highest_key_from(step + 1, floor_key - 1) + 1 : floor_key;
    for (;;) {
      const uint32_t width = static_cast<uint32_t>(high) - static_cast<uint32_t>(low);
      const int shift = width >> kBits ? 32 - kBits - __builtin_clz(width) : 0;
      histogram(Keys<float>::value(low), Keys<float>::value(high), (width >> shift) + 1,
                [&](Vec value, Vec) {
                  const Ints bits = bits_of(value + zero());
                  const Ints key = bits ^ (signs(bits) >> 1);
                  return (broadcast(static_cast<uint32_t>(high)) - key) >> shift;
                });
      high = static_cast<int32_t>(static_cast<uint32_t>(high) -
                                  (static_cast<uint32_t>(bucket_of_limit()) << shift));
      if (shift == 0) return Keys<float>::value(high);
      const int32_t bucket_low = high - static_cast<int32_t>((1u << shift) - 1);
      if (bucket_low > low) low = bucket_low;
    }
  }

 private:
  static constexpr int kBits = 11;
  static constexpr uint32_t kBuckets = 1 << kBits;

  static int32_t key_of(float x) { return ordered(Keys<float>::bits(x + 0.0f)); }  // -0.0 is 0.0

  static Ints steps_of(Vec exponent) {
    constexpr float kSteps = static_cast<float>(kBuckets - 1) / (kOne + 1);
    return to_ints(min(exponent * broadcast(-kSteps), broadcast(static_cast<float>(kBuckets - 1))));
  }

  // The highest key whose step is not before this one; `low` if there is none above it.
  int32_t highest_key_from(uint32_t step, int32_t low) const {
    int64_t begin = low, end = key_of(law_.highest);
    while (begin < end) {
      const int64_t middle = begin + (end - begin + 1) / 2;
      const float value = Keys<float>::value(static_cast<int32_t>(middle));
      if (first(steps_of(broadcast((value - law_.highest) * law_.scale))) >= step)
        begin = middle;
      else
        end = middle - 1;
    }
    return static_cast<int32_t>(begin);
  }

  // Adds up the lanes from `least` to `most` in buckets_of(lanes, exponents of their weights).
  template <typename BucketsOf>
  void histogram(float least, float most, uint32_t buckets, BucketsOf buckets_of) {
    for (uint32_t i = 0; i < buckets; ++i) masses_[i] = 0;
    const Vec highest = broadcast(law_.highest), scale = broadcast(law_.scale);
    lanes_.each(least, [&](const auto* x, int64_t begin, int64_t end, int64_t n) {
      uint32_t to[kChunk];
      int64_t amounts[kChunk];
      int64_t count = 0;
      for (int64_t i = begin; i < end; i += Vec::kLanes) {
        const Vec value = lanes_at(x, i, n);
        const Mask inside = (value >= broadcast(least)) & (broadcast(most) >= value);
        if (!any(inside)) continue;
        const Vec exponent = (value - highest) * scale;
        const Vec amount = limit_.is_share ? exp2<kOne>(exponent) : broadcast(1.0f);
        store(to + count, where(inside, buckets_of(value, exponent)));
        store(amounts + count, truncated(where(inside, amount)));
        count += Vec::kLanes;
      }
      for (int64_t i = 0; i < count; ++i) masses_[to[i]] += amounts[i];
    });
  }

  // The first bucket with which those above no longer hold less than the limit.
  int64_t bucket_of_limit() {
    int64_t bucket = 0;
    while (static_cast<double>(above_ + masses_[bucket]) < target_) above_ += masses_[bucket++];
    return bucket;
  }

  const Lanes& lanes_;
  const Law& law_;
  const Limit limit_;
  double target_ = 0;
  int64_t above_ = 0;
  int64_t masses_[kBuckets];
};

// The lowest logit that min_p, then top_k, then top_p keep.
float cut_of(const VerifyParams& p, const VerifyWorkspace& w, const Law& law) {
  const Cuts cuts = cuts_of(p, law.request);
  const RowLanes row{p, law, w.blocks};
  float cut = kLowest;
  if (cuts.min_p > 0) {
    const float lowest =
        law.highest + first(log(broadcast(cuts.min_p))) * p.temperature[law.request];
    if (lowest > cut) cut = lowest;
  }
  if (cuts.top_k > 0) {
    const Limit limit{static_cast<double>(cuts.top_k), false};
    // Each chunk has a lane as high as its maximum, so k chunks have k lanes.
    cut = Selection(ChunkMaxima{law.chunks, w.chunks}, law, limit).from(cut);
    cut = Selection(row, law, limit).from(cut);
  }
  if (cuts.top_p < 1) cut = Selection(row, law, {static_cast<double>(cuts.top_p), true}).from(cut);
  return cut;
}

// Laws.

int64_t first_lane_of(const VerifyParams& p, const Law& law, int64_t block, float wanted) {
  int64_t lane = -1;
  with_block(p, law, block, [&](const auto* x) {
    const int64_t n = lanes_of(p, block);
    for (int64_t i = 0; i < n && lane < 0; i += Vec::kLanes) {
      if (!any(lanes_at(x, i, n) >= broadcast(wanted))) continue;
      for (int64_t j = i; j < min(i + Vec::kLanes, n) && lane < 0; ++j)
        if (to_float(x[j]) == wanted) lane = j;
    }
  });
  return block * kBlock + lane;
}

// A block's or lane's weight in the unit of the row.
int64_t mass_of(int64_t weight, float scale) {
  return static_cast<int64_t>(static_cast<double>(weight) * static_cast<double>(scale));
}

// Completes a law whose blocks have been scanned.
void settle(const VerifyParams& p, const VerifyWorkspace& w, Law& law) {
  bool is_finite = true;
  int64_t best = 0;
  for (int64_t block = 0; block < w.blocks; ++block) {
    is_finite = is_finite && law.blocks[block].is_finite;
    if (law.blocks[block].highest > law.blocks[best].highest) best = block;
  }
  law.highest = law.blocks[best].highest;
  const bool is_empty = law.highest == -kInfinity;
  law.status = (is_finite ? 0 : kNotFinite) + (is_empty ? kNothingAllowed : 0);
  law.point = -1;
  if (law.is_greedy || law.status != 0) {
    law.point = is_empty ? 0 : first_lane_of(p, law, best, law.highest);
    return;
  }
  law.cut = law.chunks ? cut_of(p, w, law) : kLowest;
  law.total = 0;
  for (int64_t begin = 0; begin < w.blocks; begin += Vec::kLanes) {
    const int64_t end = min(begin + Vec::kLanes, w.blocks);
    float scales[Vec::kLanes] = {};
    for (int64_t i = begin; i < end; ++i)
      scales[i - begin] = (law.blocks[i].highest - law.highest) * law.scale;
    store(scales, exp2<0>(load(scales)));
    for (int64_t i = begin; i < end; ++i) {
      Block& block = law.blocks[i];
      const bool is_kept = block.highest >= law.cut;
      if (is_kept && law.chunks)
        with_block(p, law, i, [&](const auto* x) { measure(p, law, i, x, law.cut); });
      block.scale = is_kept ? scales[i - begin] : 0;
      block.mass = mass_of(block.weight, block.scale);
      law.total += block.mass;
    }
  }
}

float lane_at(const VerifyParams& p, const Law& law, int64_t token) {
  float value = 0;
  with_lanes(p, law, token, token + 1, [&](const auto* x) { value = to_float(x[0]); });
  return value;
}

int64_t weight_of(const VerifyParams& p, const Law& law, int64_t token) {
  const float value = lane_at(p, law, token);
  if (!(value >= law.cut)) return 0;
  const float highest = law.blocks[token / kBlock].highest;
  return static_cast<int64_t>(first(exp2<kOne>(broadcast((value - highest) * law.scale))));
}

double probability(const VerifyParams& p, const Law& law, int64_t token) {
  if (law.point >= 0) return law.point == token ? 1 : 0;
  const int64_t mass = mass_of(weight_of(p, law, token), law.blocks[token / kBlock].scale);
  return static_cast<double>(mass) / static_cast<double>(law.total);
}

void weights_of(const VerifyParams& p, const Law& law, int64_t block, int64_t* to) {
  const Vec highest = broadcast(law.blocks[block].highest), scale = broadcast(law.scale);
  with_block(p, law, block, [&](const auto* x) {
    const int64_t n = lanes_of(p, block);
    for (int64_t i = 0; i < n; i += Vec::kLanes) {
      const Vec value = lanes_at(x, i, n);
      const Vec weights = exp2<kOne>((value - highest) * scale);
      store(to + i, truncated(where(value >= broadcast(law.cut), weights)));
    }
  });
}

// What `kept` times a lane's probability is to its fraction.
float factor_of(const Law& law, int64_t block, double kept) {
  if (law.point >= 0) return law.point / kBlock == block ? static_cast<float>(kept) : 0;
  return static_cast<float>(kept * static_cast<double>(law.blocks[block].scale) *
                            static_cast<double>(int64_t{1} << kOne) /
                            static_cast<double>(law.total));
}

// `kept` times each lane's probability, to[kBlock].
void probabilities(const VerifyParams& p, const Law& law, int64_t block, double kept, float* to) {
  const int64_t n = lanes_of(p, block);
  const float factor = factor_of(law, block, kept);
  if (law.point >= 0 || factor == 0) {
    for (int64_t i = 0; i < kBlock; ++i) to[i] = 0;
    if (factor != 0) to[law.point % kBlock] = factor;
    return;
  }
  const Vec highest = broadcast(law.blocks[block].highest), scale = broadcast(law.scale);
  with_block(p, law, block, [&](const auto* x) {
    for (int64_t i = 0; i < n; i += Vec::kLanes) {
      const Vec value = lanes_at(x, i, n);
      const Vec fractions = where(value >= broadcast(law.cut), exp2<0>((value - highest) * scale));
      store(to + i, fractions * broadcast(factor));
    }
  });
}

// What a draft was sampled from. Without a law it is certain ("one-hot").
struct Draft {
  int64_t token;
  Law* law;  // its logits are probabilities where law->is_probs
};

Draft draft_of(const VerifyParams& p, const VerifyWorkspace& w, int64_t b, int64_t i) {
  const int64_t row =
      p.draft_rows.data ? at(p.draft_rows, b * p.draft_rows_stride + i) : b * p.drafts + i;
  const bool has_row = p.draft_logits && row >= 0 && row < p.draft_logits_rows;
  return {draft_id(p, b, i), has_row ? &w.drafts[b * p.drafts + i] : nullptr};
}

double probability(const VerifyParams& p, const Draft& q) {
  if (!q.law) return 1;
  return q.law->is_probs ? lane_at(p, *q.law, q.token) : probability(p, *q.law, q.token);
}

// Residuals: `max(kept p - q, 0)`, what a rejected draft is replaced from. Without a q: p itself.

// The weights of a block's lanes, to[kBlock]; returns their sum. Not for a one-hot q.
int64_t residual_weights(const VerifyParams& p, const Law& law, const Law& q, double kept,
                         int64_t block, int64_t* to) {
  const int64_t n = lanes_of(p, block);
  int64_t padded = (n + Vec::kLanes - 1) / Vec::kLanes * Vec::kLanes;
  if (factor_of(law, block, kept) < 1 / kWhole) {  // all of them round to 0
    for (int64_t i = 0; i < padded; ++i) to[i] = 0;
    return 0;
  }
  float ours[kBlock], theirs[kBlock];
  probabilities(p, law, block, kept, ours);
  if (q.is_probs) {
    with_block(p, q, block, [&](const auto* x) {
      // The maximum is for the padding: probabilities are not negative.
      for (int64_t i = 0; i < n; i += Vec::kLanes)
        store(theirs + i, max(lanes_at(x, i, n), zero()));
    });
  } else {
    probabilities(p, q, block, 1, theirs);
  }
  Longs total = truncated(zero());
  for (int64_t i = 0; i < padded; i += Vec::kLanes) {
    const Vec left = max(load(ours + i) - load(theirs + i), zero());
    const Longs weights = truncated(left * broadcast(kWhole));
    store(to + i, weights);
    total = total + weights;
  }
  return sum(total);
}

// Fills in the masses of all blocks; returns their sum.
int64_t residual_masses(const VerifyParams& p, const VerifyWorkspace& w, const Law& law,
                        const Draft* q, double kept, int64_t* masses) {
  int64_t total = 0;
  for (int64_t i = 0; i < w.blocks; ++i) {
    const Block& block = law.blocks[i];
    if (q && q->law) {
      int64_t weights[kBlock];
      masses[i] = residual_weights(p, law, *q->law, kept, i, weights);
    } else if (q && q->token / kBlock == i) {
      masses[i] = mass_of(block.weight - weight_of(p, law, q->token), block.scale);
    } else {
      masses[i] = block.mass;
    }
    total += masses[i];
  }
  return total;
}

double residual_mass(const VerifyParams& p, const VerifyWorkspace& w, const Law& law,
                     const Draft& q, double kept) {
  if (!q.law) return kept * (1 - probability(p, law, q.token));
  int64_t* masses = w.residual_masses + law.request * w.blocks;
  return static_cast<double>(residual_masses(p, w, law, &q, kept, masses)) /
         static_cast<double>(kWhole);
}

int64_t place(const int64_t* weights, int64_t total, double uniform) {
  const int64_t at = min(static_cast<int64_t>(uniform * static_cast<double>(total)), total - 1);
  int64_t i = 0;
  for (int64_t up_to = weights[0]; up_to <= at; up_to += weights[i]) ++i;
  return i;
}

// A token of the residual, of the law itself where that is empty.
int64_t draw(const VerifyParams& p, const VerifyWorkspace& w, const Law& law, const Draft* q,
             double kept) {
  if (law.point >= 0) return law.point;
  int64_t* masses = w.residual_masses + law.request * w.blocks;
  int64_t total = residual_masses(p, w, law, q, kept, masses);
  if (total == 0) {
    q = nullptr;
    total = residual_masses(p, w, law, q, kept, masses);
  }
  uint32_t random[4];
  philox(seed_of(p, law), position_of(p, law), static_cast<uint32_t>(p.stream), 0, random);
  const int64_t block = place(masses, total, uniform(random[0], random[1]));
  int64_t weights[kBlock];
  if (q && q->law) {
    total = residual_weights(p, law, *q->law, kept, block, weights);
  } else {
    weights_of(p, law, block, weights);
    total = law.blocks[block].weight;
    if (q && q->token / kBlock == block) {
      int64_t& rejected = weights[q->token % kBlock];
      total -= rejected;
      rejected = 0;
    }
  }
  return block * kBlock + place(weights, total, uniform(random[2], random[3]));
}

// Decisions.

// Whether draft i's coin falls on its side, which it does with probability ours / theirs. Coins are
// numbered within the round, which is known by the request's first row.
bool accepts(const VerifyParams& p, const Law& first_row, int64_t i, double ours, double theirs) {
  uint32_t random[4];
  philox(seed_of(p, first_row), position_of(p, first_row), static_cast<uint32_t>(Purpose::accept),
         static_cast<uint32_t>(i), random);
  return uniform(random[0], random[1]) * theirs < ours;
}

int64_t winner_of(const VerifyWorkspace& w, const Law& law) {
  if (law.point >= 0) return law.point;
  float best = -1;
  int64_t token = 0;
  for (int64_t block = 0; block < w.blocks; ++block) {
    const float score = law.blocks[block].best * law.blocks[block].scale;
    if (!(score > best)) continue;
    best = score;
    token = block * kBlock + law.blocks[block].winner;
  }
  return token;
}

void finish(const VerifyParams& p, const VerifyWorkspace& w, int64_t b, int64_t accepted,
            int64_t token) {
  int64_t* to = p.token_ids + b * (p.drafts + 1);
  for (int64_t i = 0; i <= p.drafts; ++i)
    to[i] = i < accepted ? draft_id(p, b, i) : i == accepted ? token : -1;
  p.num_accepted[b] = static_cast<int32_t>(accepted);
  p.status[b] = w.targets[first_row(p, b) + accepted].status;
  w.progress[b].is_done = true;
}

// One step of Algorithm 2 of Sun et al.: whether the block up to row i is accepted, then draft i.
void judge_block(const VerifyParams& p, const VerifyWorkspace& w, int64_t b, int64_t i,
                 const Draft* draft) {
  Progress& progress = w.progress[b];
  const Law* rows = w.targets + first_row(p, b);
  const double kept = progress.kept;
  if (i > 0) {
    double passing = kept;
    if (draft && kept < 1) {
      const double left = residual_mass(p, w, rows[i], *draft, kept);
      passing = left / (left + (1 - kept));
    }
    if (accepts(p, rows[0], i - 1, passing, 1)) {
      progress.accepted = i;
      progress.kept_there = kept;
    }
  }
  if (draft) {
    const double ours = probability(p, rows[i], draft->token), theirs = probability(p, *draft);
    const double ratio = kept * ours / theirs;
    progress.kept = theirs > 0 ? (ratio < 1 ? ratio : 1) : kept * ours > 0;
    return;
  }
  const int64_t accepted = progress.accepted;
  const Law& law = rows[accepted];
  if (accepted == i) return finish(p, w, b, i, draw(p, w, law, nullptr, 1));
  const Draft rejected = draft_of(p, w, b, accepted);
  finish(p, w, b, accepted, draw(p, w, law, &rejected, progress.kept_there));
}

void judge_request(const VerifyParams& p, const VerifyWorkspace& w, int64_t b, int64_t i) {
  Law* rows = w.targets + first_row(p, b);
  Law& law = rows[i];
  settle(p, w, law);
  Draft given{};
  const Draft* draft = nullptr;  // if it can be judged
  if (i < given_drafts(p, b) && is_token(p, draft_id(p, b, i))) {
    given = draft_of(p, w, b, i);
    if (given.law) settle(p, w, *given.law);
    if (law.status == 0 && !(given.law && given.law->status != 0)) draft = &given;
  }
  switch (p.method) {
    case Method::standard:
      if (draft &&
          accepts(p, rows[0], i, probability(p, law, draft->token), probability(p, *draft)))
        return;
      return finish(p, w, b, i, draw(p, w, law, draft, 1));
    case Method::block:
      return judge_block(p, w, b, i, draft);
    case Method::coupled: {
      const int64_t winner = winner_of(w, law);
      if (draft && draft->token == winner) return;
      return finish(p, w, b, i, winner);
    }
    case Method::synthetic:
      if (draft && accepts(p, rows[0], i, p.synthetic_rates[i], 1)) return;
      return finish(p, w, b, i, draw(p, w, law, draft, 1));
  }
}

void judge(const VerifyParams& p, const VerifyWorkspace& w, int64_t i, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) judge_request(p, w, w.active[k], i);
}

// Planning.

int64_t bytes_of(DType dtype) { return dtype == DType::fp32 ? 4 : 2; }

Law law_of(const VerifyParams& p, int64_t b, int64_t i) {
  Law law{};
  law.request = b;
  law.index = i;
  law.is_greedy = p.temperature[b] < kGreedyBelow;
  law.scale = law.is_greedy ? 1 : kLog2E / p.temperature[b];
  return law;
}

Law target_of(const VerifyParams& p, int64_t b, int64_t i) {
  Law law = law_of(p, b, i);
  law.dtype = p.logits_dtype;
  law.logits = static_cast<const char*>(p.logits) +
               (first_row(p, b) + i) * p.logits_stride * bytes_of(law.dtype);
  law.is_penalised = is_penalised(p, b);
  law.is_edited = law.is_penalised || p.biases > 0 || p.allowed_mask;
  law.need = law.is_greedy                 ? Need::nothing
             : p.method == Method::coupled ? Need::race
                                           : Need::weights;
  return law;
}

Law draft_law_of(const VerifyParams& p, int64_t b, int64_t i) {
  const int64_t row =
      p.draft_rows.data ? at(p.draft_rows, b * p.draft_rows_stride + i) : b * p.drafts + i;
  Law law = law_of(p, b, i);
  law.dtype = p.draft_logits_dtype;
  law.logits =
      static_cast<const char*>(p.draft_logits) + row * p.draft_logits_stride * bytes_of(law.dtype);
  law.is_probs = p.draft_kind == DraftKind::probs;
  law.is_greedy = law.is_greedy && !law.is_probs;
  // Coupled drafts are judged without their law.
  law.need =
      law.is_greedy || law.is_probs || p.method == Method::coupled ? Need::nothing : Need::weights;
  return law;
}

void plan(const VerifyParams& p, VerifyWorkspace& w, int64_t i) {
  if (i == 0) {
    w.num_active = p.requests;
    for (int64_t b = 0; b < p.requests; ++b) {
      w.active[b] = b;
      w.progress[b] = {false, 0, 1, 1};
    }
  }
  int64_t num_active = 0;
  w.num_laws = 0;
  for (int64_t k = 0; k < w.num_active; ++k) {
    const int64_t b = w.active[k];
    if (w.progress[b].is_done) continue;
    w.active[num_active++] = b;
    const bool has_cuts = cuts_of(p, b).any();
    const auto add = [&](Law& law, Block* blocks, bool is_filtered) {
      law.blocks = blocks;
      if (is_filtered && law.need != Need::nothing)
        law.chunks = w.chunk_maxima + w.num_laws * w.chunks;
      w.laws[w.num_laws++] = &law;
    };
    const int64_t row = first_row(p, b) + i;
    w.targets[row] = target_of(p, b, i);
    add(w.targets[row], w.target_blocks + row * w.blocks, has_cuts);
    if (i == given_drafts(p, b) || !is_token(p, draft_id(p, b, i))) continue;
    if (Law* law = draft_of(p, w, b, i).law) {
      *law = draft_law_of(p, b, i);
      add(*law, w.draft_blocks + (b * p.drafts + i) * w.blocks,
          has_cuts && p.draft_kind == DraftKind::filtered_logits);
    }
  }
  w.num_active = num_active;
}

// For the tests.

void philox_of(uint64_t seed, uint64_t position, uint32_t purpose, uint32_t lane, uint32_t* to) {
  uint32_t words[4];
  philox(seed, position, purpose, lane, words);
  for (int i = 0; i < 4; ++i) to[i] = words[i];
}

template <typename F>
void map(const uint32_t* from, int64_t n, uint32_t* to, F f) {
  for (int64_t i = 0; i < n; ++i) to[i] = first(bits_of(f(broadcast(from[i]))));
}

void exp2_of(const uint32_t* from, int64_t n, uint32_t* to) {
  map(from, n, to, [](Ints x) { return exp2<0>(as_floats(x)); });
}
void log_of(const uint32_t* from, int64_t n, uint32_t* to) {
  map(from, n, to, [](Ints x) { return log(as_floats(x)); });
}
void exponential_of(const uint32_t* from, int64_t n, uint32_t* to) {
  map(from, n, to, exponential);
}

}  // namespace

#define MTP_JOIN(a, b) a##b
#define MTP_NAME(isa) MTP_JOIN(verify_cpu_, isa)
const VerifyCpuKernels MTP_NAME(MTP_ISA) = {plan,    scan,   judge,         philox_of,
                                            exp2_of, log_of, exponential_of};

}  // namespace mtp
