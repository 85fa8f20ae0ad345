// The two stages of head_argmax on CPU. Compiled once per instruction set, with MTP_ISA naming it.
#include "dot.h"
#include "exact.h"
#include "head_argmax_cpu.h"

namespace mtp {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();

int64_t at(const IntArray& values, int64_t i) {
  return values.are_int64 ? static_cast<const int64_t*>(values.data)[i]
                          : static_cast<const int32_t*>(values.data)[i];
}

int64_t id_of(const HeadArgmaxParams& p, int64_t row) {
  return p.id_map.data ? at(p.id_map, row) : p.vocab_start + row;
}

template <typename T>
void lay_out(const HeadArgmaxParams& p, int64_t begin, int64_t end) {
  float* row = new float[p.hidden_size];
  for (int64_t t = begin; t < end; ++t) {
    const T* from = static_cast<const T*>(p.hidden) + t * p.hidden_stride;
    for (int64_t i = 0; i < p.hidden_size; ++i) row[i] = to_float(from[i]);
    put_row<T>(row, p.hidden_size, t, p.rows, p.packed, static_cast<Activation<T>*>(p.inputs));
  }
  delete[] row;
}

// noise[i] = log(E) of the token of weight row `row + i`, for i below 4 kLanes.
void noise_of(const HeadArgmaxParams& p, int64_t t, int64_t row, float* noise) {
  constexpr int kCount = 4 * Vec::kLanes;
  const uint64_t seed = p.seeds[t], position = at(p.positions, t) + 1;
  Ints words[4];
  if (!p.id_map.data && (p.vocab_start + row) % 4 == 0) {
    const Longs lanes = broadcast_longs((p.vocab_start + row) / 4) + order();
    interleave(philox(seed, position, p.purpose, lanes).x, words);
  } else {
    // Every token has a counter of its own, of which one word is used.
    for (int k = 0; k < 4; ++k) {
      int64_t ids[Vec::kLanes] = {}, counters[Vec::kLanes], results[4][Vec::kLanes];
      for (int j = 0; j < Vec::kLanes; ++j) {
        const int64_t i = row + k * Vec::kLanes + j;
        if (i < p.vocab_size) ids[j] = id_of(p, i);
        counters[j] = ids[j] >> 2;
      }
      Longs lanes;
      __builtin_memcpy(&lanes, counters, sizeof lanes);
      const Words random = philox(seed, position, p.purpose, lanes);
      for (int w = 0; w < 4; ++w) store(results[w], random.x[w]);
      uint32_t chosen[Vec::kLanes];
      for (int j = 0; j < Vec::kLanes; ++j)
        chosen[j] = static_cast<uint32_t>(results[ids[j] & 3][j]);
      words[k] = load(chosen);
    }
  }
  for (int k = 0; k < 4; ++k) store(noise + k * Vec::kLanes, log(exponential(words[k])));
  static_assert(kSlice % kCount == 0);
}

// The winner among logits [count] of the weight rows from `row` on, of activation row t.
template <typename T>
void choose(const HeadArgmaxParams& p, int64_t t, int64_t row, int64_t count, float* logits,
            float& best, int64_t& best_id) {
  for (int64_t i = 0; i < count; ++i) {  // as the unfused head writes it
    T logit;
    from_float(logits[i], logit);
    logits[i] = to_float(logit);
  }
  if (p.temperature && !(p.temperature[t] < kGreedyBelow)) {
    const float scale = 1 / p.temperature[t];
    float noise[4 * Vec::kLanes];
    for (int64_t i = 0; i < count; ++i) {
      if (i % (4 * Vec::kLanes) == 0) noise_of(p, t, row + i, noise);
      logits[i] = logits[i] * scale - noise[i % (4 * Vec::kLanes)];
    }
  }
  for (int64_t i = count; i % Vec::kLanes; ++i) logits[i] = kMinusInfinity;
  Vec highest = broadcast(kMinusInfinity);  // NaN is not higher
  for (int64_t i = 0; i < count; i += Vec::kLanes) highest = max(load(logits + i), highest);
  float lanes[Vec::kLanes];
  store(lanes, highest);
  best = lanes[0];
  for (float lane : lanes) best = lane > best ? lane : best;
  best_id = kNoId;
  for (int64_t i = 0; i < count; ++i) {
    if (logits[i] != best) continue;
    const int64_t id = id_of(p, row + i);
    best_id = id < best_id ? id : best_id;
    if (!p.id_map.data) break;  // ids ascend
  }
}

template <typename T>
void slices(const HeadArgmaxParams& p, int64_t begin, int64_t end) {
  const Activation<T>* x = static_cast<const Activation<T>*>(p.inputs);
  const T* weight = static_cast<const T*>(p.weight);
  float* logits = new float[min(p.rows, kChunkRows) * kSlice];
  for (int64_t slice = begin; slice < end; ++slice) {
    const int64_t row = slice * kSlice;
    const int64_t end_row = min(row + kSlice, p.vocab_size);
    const int64_t count = end_row > row ? end_row - row : 0;  // the rest is padding
    for (int64_t first = 0; first < p.rows; first += kChunkRows) {
      const int64_t rows = min(kChunkRows, p.rows - first);
      const Activation<T>* chunk = x + first * padded_inputs(p.hidden_size);
      if (count > 0) {
        if constexpr (kIsBf16<T>) {
          if (p.packed)
            dot_panels(weight + row * p.hidden_size, kPanel * p.hidden_size,
                       (count + kPanel - 1) / kPanel, chunk, rows, p.hidden_size, logits, kSlice);
        }
        if (!p.packed)
          dot_rows(weight + row * p.weight_stride, p.weight_stride, count, chunk, rows,
                   p.hidden_size, logits, kSlice);
      }
      for (int64_t t = first; t < first + rows; ++t) {
        const int64_t to = slice * p.rows + t;
        choose<T>(p, t, row, count, logits + (t - first) * kSlice, p.values[to], p.ids[to]);
      }
    }
  }
  delete[] logits;
}

template <typename F>
auto with_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::bf16:
      return f.template operator()<Bf16>();
    case DType::fp16:
      return f.template operator()<Half>();
    default:
      return f.template operator()<float>();
  }
}

void lay_out_any(const HeadArgmaxParams& p, int64_t begin, int64_t end) {
  with_dtype(p.dtype, [&]<typename T>() { lay_out<T>(p, begin, end); });
}

int64_t inputs_bytes_any(const HeadArgmaxParams& p) {
  return with_dtype(p.dtype, [&]<typename T>() {
    return p.rows * padded_inputs(p.hidden_size) * static_cast<int64_t>(sizeof(Activation<T>));
  });
}

void slices_any(const HeadArgmaxParams& p, int64_t begin, int64_t end) {
  with_dtype(p.dtype, [&]<typename T>() { slices<T>(p, begin, end); });
}

}  // namespace

#define MTP_JOIN(a, b) a##b
#define MTP_NAME(isa) MTP_JOIN(head_argmax_cpu_, isa)
const HeadArgmaxCpuKernels MTP_NAME(MTP_ISA) = {lay_out_any, inputs_bytes_any, slices_any};

}  // namespace mtp
