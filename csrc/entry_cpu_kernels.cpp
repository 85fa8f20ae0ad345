// The two stages of entry on CPU. Compiled once per instruction set, with MTP_ISA naming it.
#include "dot.h"
#include "entry_cpu.h"

namespace mtp {
namespace {

int64_t integer_at(const void* values, bool are_int64, int64_t i) {
  return are_int64 ? static_cast<const int64_t*>(values)[i]
                   : static_cast<const int32_t*>(values)[i];
}

// Stage 1: both norms of one row.

template <typename T>
float rounded(float x) {
  T y;
  from_float(x, y);
  return to_float(y);
}

// to = rmsnorm(from) rounded to T, as fp32. An all-zero row stays zero, also with eps 0.
template <typename T, typename From>
void rms_norm(const From* from, const T* weight, float eps, bool zero_centered, int64_t n,
              float* to) {
  Vec squares = zero();
  int64_t i = 0;
  for (; i + Vec::kLanes <= n; i += Vec::kLanes) {
    const Vec x = load(from + i);
    squares = fma(x, x, squares);
  }
  float total = sum(squares);
  for (; i < n; ++i) total += to_float(from[i]) * to_float(from[i]);
  const float mean = total / static_cast<float>(n) + eps;
  const float scale = mean == 0 ? 0.0f : 1.0f / __builtin_sqrtf(mean);
  for (i = 0; i < n; ++i) {
    const float x = to_float(from[i]) * scale;
    // Where the unfused model rounds: RMSNorm casts back before the gain, the zero-centred (Gemma)
    // form after it.
    to[i] = zero_centered ? rounded<T>(x * (1.0f + to_float(weight[i])))
                          : rounded<T>(rounded<T>(x) * to_float(weight[i]));
  }
}

template <typename T, typename X>
void norm_rows(const EntryParams& p, int64_t begin, int64_t end) {
  const int64_t n = p.hidden_size;
  const int64_t step = p.packed ? 2 : Dot<T, X>::kStep;
  float* row = new float[2 * n];
  float* embed_half = row + (p.hidden_first ? n : 0);
  float* hidden_half = row + (p.hidden_first ? 0 : n);
  for (int64_t t = begin; t < end; ++t) {
    int64_t source = t;
    bool zero_embedding = p.positions && integer_at(p.positions, p.positions_are_int64, t) == 0;
    if (p.ids) {
      const int64_t id = integer_at(p.ids, p.ids_are_int64, t);
      const bool known = id >= p.vocab_start && id - p.vocab_start < p.vocab_rows;
      zero_embedding = zero_embedding || !known;
      source = id - p.vocab_start;
    }
    if (zero_embedding) {
      for (int64_t i = 0; i < n; ++i) embed_half[i] = 0;
    } else {
      const T* embed = static_cast<const T*>(p.embeds) + source * p.embeds_stride;
      const T* enorm = static_cast<const T*>(p.enorm_weight);
      if (p.embed_norm_weight) {
        rms_norm(embed, static_cast<const T*>(p.embed_norm_weight), p.embed_norm_eps,
                 p.zero_centered, n, embed_half);
        rms_norm(embed_half, enorm, p.enorm_eps, p.zero_centered, n, embed_half);
      } else {
        rms_norm(embed, enorm, p.enorm_eps, p.zero_centered, n, embed_half);
      }
    }
    rms_norm(static_cast<const T*>(p.hidden) + t * p.hidden_stride,
             static_cast<const T*>(p.hnorm_weight), p.hnorm_eps, p.zero_centered, n, hidden_half);
    put_row(row, 2 * n, t, p.rows, step, static_cast<X*>(p.normed));
  }
  delete[] row;
}

// Stage 2: the projection.

template <typename T, typename X>
void project_panels(const EntryParams& p, int64_t begin, int64_t end) {
  const int64_t inputs = 2 * p.hidden_size;
  const X* x = static_cast<const X*>(p.normed);
  const T* w = static_cast<const T*>(p.proj_weight);
  const T* bias = static_cast<const T*>(p.proj_bias);
  T* out = static_cast<T*>(p.out);
  // Outputs done together: their fp32 sums should stay in the cache.
  constexpr int64_t kGroupPanels = 6;
  constexpr int64_t kSumsStride = kGroupPanels * kPanel;
  float* sums = new float[p.rows * kSumsStride];

  for (int64_t panel = begin; panel < end; panel += kGroupPanels) {
    const int64_t panels = min(kGroupPanels, end - panel);
    const int64_t col0 = panel * kPanel;
    const int64_t cols = min(panels * kPanel, p.out_features - col0);
    if constexpr (kIsBf16<T>) {
      if (p.packed) dot_panels(w + col0 * inputs, panels, x, p.rows, inputs, sums, kSumsStride);
    }
    for (int64_t r = 0; r < p.rows && !p.packed; r += kChunkRows)
      dot_rows(w + col0 * p.proj_stride, p.proj_stride, cols, x + r * padded_inputs(inputs),
               min(kChunkRows, p.rows - r), inputs, sums + r * kSumsStride, kSumsStride);
    for (int64_t r = 0; r < p.rows; ++r)
      for (int64_t c = 0; c < cols; ++c) {
        const float value = sums[r * kSumsStride + c] + (bias ? to_float(bias[col0 + c]) : 0.0f);
        from_float(value, out[r * p.out_features + col0 + c]);
      }
  }
  delete[] sums;
}

#if defined(__AVX512BF16__)
using Bf16Normed = Bf16;
#else
using Bf16Normed = float;
#endif

bool normed_is_bf16(DType dtype) { return kDotBf16 && dtype == DType::bf16; }

void norm_rows_any(const EntryParams& p, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case DType::bf16:
      return norm_rows<Bf16, Bf16Normed>(p, begin, end);
    case DType::fp16:
      return norm_rows<Half, float>(p, begin, end);
    case DType::fp32:
      return norm_rows<float, float>(p, begin, end);
  }
}

void project_panels_any(const EntryParams& p, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case DType::bf16:
      return project_panels<Bf16, Bf16Normed>(p, begin, end);
    case DType::fp16:
      return project_panels<Half, float>(p, begin, end);
    case DType::fp32:
      return project_panels<float, float>(p, begin, end);
  }
}

}  // namespace

#define MTP_JOIN(a, b) a##b
#define MTP_NAME(isa) MTP_JOIN(entry_cpu_, isa)
const EntryCpuKernels MTP_NAME(MTP_ISA) = {norm_rows_any, project_panels_any, normed_is_bf16};

}  // namespace mtp
