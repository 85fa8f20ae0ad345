// The two stages of entry on CPU. Compiled once per instruction set, with MTP_ISA naming it.
#include "entry_cpu.h"
#include "vec.h"

namespace mtp {
namespace {

constexpr int kPanel = 16;

#if defined(__AVX512BF16__)
constexpr bool kDotBf16 = true;
#else
constexpr bool kDotBf16 = false;
#endif

int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

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
  float* scratch = new float[n];
  for (int64_t t = begin; t < end; ++t) {
    X* row = static_cast<X*>(p.normed) + t * p.normed_stride;
    X* embed_half = row + (p.hidden_first ? n : 0);
    X* hidden_half = row + (p.hidden_first ? 0 : n);
    const auto put = [&](X* half) {
      for (int64_t i = 0; i < n; ++i) from_float(scratch[i], half[i]);
    };

    int64_t source = t;
    bool zero_embedding = p.positions && integer_at(p.positions, p.positions_are_int64, t) == 0;
    if (p.ids) {
      const int64_t id = integer_at(p.ids, p.ids_are_int64, t);
      const bool known = id >= p.vocab_start && id - p.vocab_start < p.vocab_rows;
      zero_embedding = zero_embedding || !known;
      source = id - p.vocab_start;
    }
    if (zero_embedding) {
      for (int64_t i = 0; i < n; ++i) from_float(0.0f, embed_half[i]);
    } else {
      const T* embed = static_cast<const T*>(p.embeds) + source * p.embeds_stride;
      const T* enorm = static_cast<const T*>(p.enorm_weight);
      if (p.embed_norm_weight) {
        rms_norm(embed, static_cast<const T*>(p.embed_norm_weight), p.embed_norm_eps,
                 p.zero_centered, n, scratch);
        rms_norm(scratch, enorm, p.enorm_eps, p.zero_centered, n, scratch);
      } else {
        rms_norm(embed, enorm, p.enorm_eps, p.zero_centered, n, scratch);
      }
      put(embed_half);
    }
    rms_norm(static_cast<const T*>(p.hidden) + t * p.hidden_stride,
             static_cast<const T*>(p.hnorm_weight), p.hnorm_eps, p.zero_centered, n, scratch);
    put(hidden_half);
    for (int64_t i = 2 * n; i < p.normed_stride; ++i) from_float(0.0f, row[i]);
  }
  delete[] scratch;
}

// Stage 2: the projection.
//
// An output element is the sum, over blocks of kBlock inputs, of a dot product with one fixed
// order. Tiles only decide which elements run together, so a row gives the same bits in any batch.

constexpr int64_t kBlock = 2048;
constexpr bool kManyRegisters = Vec::kLanes == 16;
constexpr int kTileRows = 4;
constexpr int kTileCols = kManyRegisters ? 4 : 2;
constexpr int kPanelTileRows = kManyRegisters ? 8 : 4;
constexpr int kPanelTileCols = kManyRegisters ? 2 : 1;

// What one step of a dot product multiplies: kStep weights of type W by kStep normed values of X.
template <typename W, typename X>
struct Dot {
  static constexpr int kStep = Vec::kLanes;
  using Weights = Vec;
  static Weights weights(const W* w) { return load(w); }
  static Vec step(const X* x, Weights w, Vec sum) { return fma(load(x), w, sum); }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<Bf16, Bf16> {
  static constexpr int kStep = 32;
  using Weights = __m512i;
  static Weights weights(const Bf16* w) { return _mm512_loadu_si512(w); }
  static Vec step(const Bf16* x, Weights w, Vec sum) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_loadu_si512(x), (__m512bh)w)};
  }
};
#endif

// acc[r][c] += x[r] . w[c] over n inputs; rows of x are padded with zeros to a multiple of 32.
template <int R, int C, typename W, typename X>
void dot_tile(const W* w, int64_t w_stride, const X* x, int64_t x_stride, int64_t n, float* acc,
              int64_t acc_stride) {
  using D = Dot<W, X>;
  Vec sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sums[r][c] = zero();
  const auto step = [&](const W* wk, int64_t wk_stride, const X* xk) {
    typename D::Weights weights[C];
    for (int c = 0; c < C; ++c) weights[c] = D::weights(wk + c * wk_stride);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) sums[r][c] = D::step(xk + r * x_stride, weights[c], sums[r][c]);
  };
  int64_t k = 0;
  for (; k + D::kStep <= n; k += D::kStep) step(w + k, w_stride, x + k);
  if (k < n) {
    W tail[C][D::kStep] = {};
    for (int c = 0; c < C; ++c)
      for (int64_t i = k; i < n; ++i) tail[c][i - k] = w[c * w_stride + i];
    step(tail[0], D::kStep, x + k);
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r * acc_stride + c] += sum(sums[r][c]);
}

// acc[r][0:16*C] += x[r] . panels over n inputs (even).
template <int R, int C, typename X>
void dot_panels(const Bf16* w, int64_t panel_stride, const X* x, int64_t x_stride, int64_t n,
                float* acc, int64_t acc_stride) {
  constexpr int kVecs = kPanel / Vec::kLanes;
  Vec sums[R][C][kVecs];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      for (int v = 0; v < kVecs; ++v) sums[r][c][v] = zero();
  for (int64_t k = 0; k < n; k += 2) {
    const Bf16* wk = w + k * kPanel;
    if constexpr (kDotBf16) {
#if defined(__AVX512BF16__)
      __m512i weights[C];
      for (int c = 0; c < C; ++c) weights[c] = _mm512_loadu_si512(wk + c * panel_stride);
      for (int r = 0; r < R; ++r) {
        int32_t pair;
        __builtin_memcpy(&pair, x + r * x_stride + k, sizeof pair);
        const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
        for (int c = 0; c < C; ++c)
          sums[r][c][0].v = _mm512_dpbf16_ps(sums[r][c][0].v, both, (__m512bh)weights[c]);
      }
#endif
    } else {
      for (int c = 0; c < C; ++c)
        for (int v = 0; v < kVecs; ++v) {
          Vec first, second;
          load_pairs(wk + c * panel_stride + v * 2 * Vec::kLanes, first, second);
          for (int r = 0; r < R; ++r) {
            Vec& sum = sums[r][c][v];
            sum = fma(broadcast(x[r * x_stride + k]), first, sum);
            sum = fma(broadcast(x[r * x_stride + k + 1]), second, sum);
          }
        }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      for (int v = 0; v < kVecs; ++v) {
        float* to = acc + r * acc_stride + c * kPanel + v * Vec::kLanes;
        store(to, load(to) + sums[r][c][v]);
      }
}

// Calls tile<R>(first row) over all rows, R at a time, then half as many.
template <int R, typename Tile>
void for_rows(int64_t rows, const Tile& tile, int64_t first = 0) {
  int64_t r = first;
  for (; r + R <= rows; r += R) tile.template operator()<R>(r);
  if constexpr (R > 1) {
    if (r < rows) for_rows<R / 2>(rows, tile, r);
  }
}

template <typename T>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<Bf16> = true;

template <typename T, typename X>
void project_panels(const EntryParams& p, int64_t begin, int64_t end) {
  const int64_t inputs = 2 * p.hidden_size;
  const X* x = static_cast<const X*>(p.normed);
  const T* w = static_cast<const T*>(p.proj_weight);
  const T* bias = static_cast<const T*>(p.proj_bias);
  T* out = static_cast<T*>(p.out);
  // Columns done together. Few rows: weights stream past once, rows stay in cache. Many rows: a
  // block of the rows is reused for 64 columns.
  constexpr int64_t kGroupPanels = 4;
  const int64_t group = p.rows > 16 ? kGroupPanels : p.packed ? kPanelTileCols : 1;
  constexpr int64_t kAccStride = kGroupPanels * kPanel;
  float* acc = new float[p.rows * kAccStride];

  for (int64_t panel = begin; panel < end; panel += group) {
    const int64_t panels = min(group, end - panel);
    const int64_t col0 = panel * kPanel;
    const int64_t cols = min(panels * kPanel, p.out_features - col0);
    for (int64_t i = 0; i < p.rows * kAccStride; ++i) acc[i] = 0;

    for (int64_t k = 0; k < inputs; k += kBlock) {
      const int64_t n = min(kBlock, inputs - k);
      if constexpr (kIsBf16<T>) {
        if (p.packed) {
          const int64_t panel_stride = kPanel * inputs;
          const Bf16* first = static_cast<const Bf16*>(p.proj_weight) + panel * panel_stride;
          const auto tiles = [&]<int C>(int64_t i) {
            for_rows<kPanelTileRows>(p.rows, [&]<int R>(int64_t r) {
              dot_panels<R, C>(first + i * panel_stride + k * kPanel, panel_stride,
                               x + r * p.normed_stride + k, p.normed_stride, n,
                               acc + r * kAccStride + i * kPanel, kAccStride);
            });
          };
          int64_t i = 0;
          for (; i + kPanelTileCols <= panels; i += kPanelTileCols)
            tiles.template operator()<kPanelTileCols>(i);
          for (; i < panels; ++i) tiles.template operator()<1>(i);
          continue;
        }
      }
      int64_t c = 0;
      for (; c + kTileCols <= cols; c += kTileCols)
        for_rows<kTileRows>(p.rows, [&]<int R>(int64_t r) {
          dot_tile<R, kTileCols>(w + (col0 + c) * p.proj_stride + k, p.proj_stride,
                                 x + r * p.normed_stride + k, p.normed_stride, n,
                                 acc + r * kAccStride + c, kAccStride);
        });
      for (; c < cols; ++c)
        for_rows<kTileRows>(p.rows, [&]<int R>(int64_t r) {
          dot_tile<R, 1>(w + (col0 + c) * p.proj_stride + k, p.proj_stride,
                         x + r * p.normed_stride + k, p.normed_stride, n, acc + r * kAccStride + c,
                         kAccStride);
        });
    }
    for (int64_t r = 0; r < p.rows; ++r)
      for (int64_t c = 0; c < cols; ++c) {
        const float value = acc[r * kAccStride + c] + (bias ? to_float(bias[col0 + c]) : 0.0f);
        from_float(value, out[r * p.out_features + col0 + c]);
      }
  }
  delete[] acc;
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
