// What the entry ops do on CPU. Compiled once per instruction set, with MTP_ISA naming it.
#include "dot.h"
#include "entry_cpu.h"

namespace mtp {
namespace {

int64_t integer_at(const IntArray& values, int64_t i) {
  return values.are_int64 ? static_cast<const int64_t*>(values.data)[i]
                          : static_cast<const int32_t*>(values.data)[i];
}

// The row of token t, nullptr where its embedding is zero.
template <typename T>
const T* find_row(const Lookup& lookup, int64_t t) {
  if (lookup.positions.data && integer_at(lookup.positions, t) == 0) return nullptr;
  int64_t row = t;
  if (lookup.ids.data) {
    const int64_t id = integer_at(lookup.ids, t);
    if (id < lookup.vocab_start || id - lookup.vocab_start >= lookup.vocab_rows) return nullptr;
    row = id - lookup.vocab_start;
  }
  return static_cast<const T*>(lookup.table) + row * lookup.stride;
}

// Stage 1: the norms of one row.

template <typename T>
float rounded(float x) {
  T y;
  from_float(x, y);
  return to_float(y);
}

// 1 / sqrt(mean square). Zero for an all-zero row, which stays zero also with eps 0.
template <typename From>
float norm_scale(const From* from, float eps, int64_t n) {
  Vec squares = zero();
  int64_t i = 0;
  for (; i + Vec::kLanes <= n; i += Vec::kLanes) {
    const Vec x = load(from + i);
    squares = fma(x, x, squares);
  }
  float total = sum(squares);
  for (; i < n; ++i) total += to_float(from[i]) * to_float(from[i]);
  const float mean = total / static_cast<float>(n) + eps;
  return mean == 0 ? 0.0f : 1.0f / __builtin_sqrtf(mean);
}

// to = from scaled and times the gain, rounded to T, as fp32.
template <typename T, typename From>
void apply_norm(const From* from, float scale, const Norm& norm, int64_t n, float* to) {
  const T* weight = static_cast<const T*>(norm.weight);
  for (int64_t i = 0; i < n; ++i) {
    const float x = to_float(from[i]) * scale;
    // Where the unfused model rounds: RMSNorm casts back before the gain, the zero-centred (Gemma)
    // form after it.
    to[i] = norm.zero_centered ? rounded<T>(x * (1.0f + to_float(weight[i])))
                               : rounded<T>(rounded<T>(x) * to_float(weight[i]));
  }
}

template <typename T, typename From>
void rms_norm(const From* from, const Norm& norm, int64_t n, float* to) {
  apply_norm<T>(from, norm_scale(from, norm.eps, n), norm, n, to);
}

template <typename T>
void norm_embedding(const Embedding& embedding, int64_t t, int64_t n, float* to) {
  const T* row = find_row<T>(embedding.lookup, t);
  if (!row) {
    for (int64_t i = 0; i < n; ++i) to[i] = 0;
  } else if (embedding.embed_norm.weight) {
    rms_norm<T>(row, embedding.embed_norm, n, to);
    rms_norm<T>(to, embedding.enorm, n, to);
  } else {
    rms_norm<T>(row, embedding.enorm, n, to);
  }
}

template <typename T>
void norm_rows(const EntryParams& p, int64_t begin, int64_t end) {
  const int64_t n = p.hidden_size, inputs = p.hidden ? 2 * n : n;
  float* row = new float[inputs];
  float* embed_half = row + (p.hidden && p.hidden_first ? n : 0);
  float* hidden_half = row + (p.hidden_first ? 0 : n);
  for (int64_t t = begin; t < end; ++t) {
    norm_embedding<T>(p.embedding, t, n, embed_half);
    if (p.hidden)
      rms_norm<T>(static_cast<const T*>(p.hidden) + t * p.hidden_stride, p.hnorm, n, hidden_half);
    put_row<T>(row, inputs, t, p.rows, p.proj.packed, static_cast<Activation<T>*>(p.normed));
  }
  delete[] row;
}

template <typename T>
void norm_hidden(const EntryHiddenParams& p, int64_t begin, int64_t end) {
  const int64_t n = p.hidden_size;
  float* row = new float[n];
  for (int64_t t = begin; t < end; ++t) {
    const T* from = static_cast<const T*>(p.hidden) + t * p.hidden_stride;
    const float scale = norm_scale(from, p.layers[0].hnorm.eps, n);
    for (int64_t i = 0; i < p.num_layers; ++i) {
      const HiddenLayer& layer = p.layers[i];
      apply_norm<T>(from, scale, layer.hnorm, n, row);
      put_row<T>(row, n, t, p.rows, layer.weight.packed, static_cast<Activation<T>*>(layer.normed));
    }
  }
  delete[] row;
}

// Stage 2: the projection.

template <typename T>
void project_panels(const Projection& p, int64_t begin, int64_t end) {
  const Activation<T>* x = static_cast<const Activation<T>*>(p.normed);
  const T* w = static_cast<const T*>(p.weight.data);
  const T* bias = static_cast<const T*>(p.bias);
  // Outputs done together: their fp32 sums should stay in the cache.
  constexpr int64_t kGroupPanels = 6;
  constexpr int64_t kSumsStride = kGroupPanels * kPanel;
  float* sums = new float[p.rows * kSumsStride];

  for (int64_t panel = begin; panel < end; panel += kGroupPanels) {
    const int64_t panels = min(kGroupPanels, end - panel);
    const int64_t col0 = panel * kPanel;
    const int64_t cols = min(panels * kPanel, p.weight.out_features - col0);
    if constexpr (kIsBf16<T>) {
      if (p.weight.packed)
        dot_panels(w + panel * p.weight.stride, p.weight.stride, panels, x, p.rows, p.inputs, sums,
                   kSumsStride);
    }
    for (int64_t r = 0; r < p.rows && !p.weight.packed; r += kChunkRows)
      dot_rows(w + col0 * p.weight.stride, p.weight.stride, cols, x + r * padded_inputs(p.inputs),
               min(kChunkRows, p.rows - r), p.inputs, sums + r * kSumsStride, kSumsStride);
    const auto finish = [&](auto* out) {
      for (int64_t r = 0; r < p.rows; ++r)
        for (int64_t c = 0; c < cols; ++c) {
          float value = sums[r * kSumsStride + c];
          if (p.hidden_part) value += p.hidden_part[r * p.hidden_part_stride + col0 + c];
          value += bias ? to_float(bias[col0 + c]) : 0.0f;
          from_float(value, out[r * p.weight.out_features + col0 + c]);
        }
    };
    if (p.out_is_fp32) {
      finish(static_cast<float*>(p.out));
    } else {
      finish(static_cast<T*>(p.out));
    }
  }
  delete[] sums;
}

// Instead of both stages: embeddings that are projected already.

template <typename T>
void look_up(const EntryLookupParams& p, int64_t begin, int64_t end) {
  const T* bias = static_cast<const T*>(p.bias);
  for (int64_t t = begin; t < end; ++t) {
    const T* row = find_row<T>(p.lookup, t);
    T* out = static_cast<T*>(p.out) + t * p.out_features;
    for (int64_t i = 0; i < p.out_features; ++i) {
      const float embed_part = row ? to_float(row[i]) : 0.0f;
      const float value = p.hidden_part[t * p.hidden_part_stride + i] + embed_part;
      from_float(value + (bias ? to_float(bias[i]) : 0.0f), out[i]);
    }
  }
}

bool normed_is_bf16(DType dtype) { return kDotBf16 && dtype == DType::bf16; }

// f<T>() for the model dtype T.
template <typename F>
void for_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::bf16:
      return f.template operator()<Bf16>();
    case DType::fp16:
      return f.template operator()<Half>();
    case DType::fp32:
      return f.template operator()<float>();
  }
}

void norm_rows_any(const EntryParams& p, int64_t begin, int64_t end) {
  for_dtype(p.dtype, [&]<typename T>() { norm_rows<T>(p, begin, end); });
}

void norm_hidden_any(const EntryHiddenParams& p, int64_t begin, int64_t end) {
  for_dtype(p.dtype, [&]<typename T>() { norm_hidden<T>(p, begin, end); });
}

void project_panels_any(const Projection& p, int64_t begin, int64_t end) {
  for_dtype(p.dtype, [&]<typename T>() { project_panels<T>(p, begin, end); });
}

void look_up_any(const EntryLookupParams& p, int64_t begin, int64_t end) {
  for_dtype(p.dtype, [&]<typename T>() { look_up<T>(p, begin, end); });
}

}  // namespace

#define MTP_JOIN(a, b) a##b
#define MTP_NAME(isa) MTP_JOIN(entry_cpu_, isa)
const EntryCpuKernels MTP_NAME(MTP_ISA) = {norm_rows_any, norm_hidden_any, project_panels_any,
                                           look_up_any, normed_is_bf16};

}  // namespace mtp
