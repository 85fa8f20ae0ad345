// Dot products of activation rows with weight rows: the inner loops of entry and head_argmax on
// CPU. Included only by the per-instruction-set objects, like vec.h.
//
// Weights are read once, about in memory order; activations wait in the L1 cache. An element is a
// fixed chain of multiply-adds per vector lane, over all inputs in order, then a fixed sum of the
// lanes. Tiles and blocks only decide which elements run together, so a row gives the same bits in
// any batch.
#pragma once

#include "vec.h"

namespace mtp {
namespace {

#if defined(__AVX512BF16__)
constexpr bool kDotBf16 = true;
#else
constexpr bool kDotBf16 = false;
#endif

template <typename T>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<Bf16> = true;

constexpr int kPanel = 16;              // weight rows side by side in a packed weight
constexpr int64_t kInputMultiple = 32;  // activation rows are padded with zeros to this
constexpr bool kManyRegisters = Vec::kLanes == 16;
constexpr int kTileRows = kManyRegisters ? 8 : 4;
constexpr int kTileCols = kManyRegisters ? 3 : 2;
constexpr int kPanelTileCols = kDotBf16 ? 3 : kManyRegisters ? 2 : 1;
constexpr int64_t kGroup = 24;          // weight rows whose sums wait for the next block of inputs
constexpr int64_t kChunkRows = 64;      // activation rows whose sums do
constexpr int64_t kBlockBytes = 16384;  // of activations, half of the L1 cache

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t padded_inputs(int64_t n) {
  return (n + kInputMultiple - 1) / kInputMultiple * kInputMultiple;
}

// Activations are held as the tiles read them. kTileRows rows are a tile, those left over a tile of
// 4, then 2, 1; a tile is [inputs/step][rows of the tile][step].

// Calls tile<R>(first row) over all rows.
template <int R = kTileRows, typename Tile>
void for_tiles(int64_t rows, const Tile& tile, int64_t first = 0) {
  int64_t r = first;
  for (; r + R <= rows; r += R) tile.template operator()<R>(r);
  if constexpr (R > 1) {
    if (r < rows) for_tiles<R / 2>(rows, tile, r);
  }
}

// Writes row `row` of `rows`, from n values.
template <typename X>
void put_row(const float* from, int64_t n, int64_t row, int64_t rows, int64_t step, X* x) {
  const int64_t inputs = padded_inputs(n);
  for_tiles(rows, [&]<int R>(int64_t first) {
    if (row < first || row >= first + R) return;
    X* to = x + first * inputs + (row - first) * step;
    for (int64_t k = 0; k < inputs; ++k)
      from_float(k < n ? from[k] : 0.0f, to[k / step * R * step + k % step]);
  });
}

// What one step of a dot product multiplies: kStep weights of type W by kStep activations of X.
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

// sums[c][r] += x[r] w[c] over n inputs, lane by lane. Fetches what comes next, in rows like w's.
template <int R, int C, typename W, typename X>
void dot_tile(const W* w, int64_t w_stride, const W* next, const X* x, int64_t n, Vec* sums,
              int64_t sums_stride) {
  using D = Dot<W, X>;
  Vec tile[C][R];
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < R; ++r) tile[c][r] = sums[c * sums_stride + r];
  const auto step = [&](const W* wk, int64_t wk_stride, const X* xk) {
    typename D::Weights weights[C];
    for (int c = 0; c < C; ++c) weights[c] = D::weights(wk + c * wk_stride);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) tile[c][r] = D::step(xk + r * D::kStep, weights[c], tile[c][r]);
  };
  int64_t k = 0;
  for (; k + D::kStep <= n; k += D::kStep) {
    for (int c = 0; c < C; ++c) __builtin_prefetch(next + c * w_stride + k);
    step(w + k, w_stride, x + k * R);
  }
  if (k < n) {
    W tail[C][D::kStep] = {};
    for (int c = 0; c < C; ++c)
      for (int64_t i = k; i < n; ++i) tail[c][i - k] = w[c * w_stride + i];
    step(tail[0], D::kStep, x + k * R);
  }
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < R; ++r) sums[c * sums_stride + r] = tile[c][r];
}

// out[t][i] = x[t] . w[i] for `rows` activation rows and `count` weight rows.
template <typename W, typename X>
void dot_rows(const W* w, int64_t w_stride, int64_t count, const X* x, int64_t rows, int64_t n,
              float* out, int64_t out_stride) {
  const int64_t inputs = padded_inputs(n);
  // One stream of weights where memory is the limit, few reads of activations where they are.
  const int64_t cols = rows < kTileRows ? 1 : kTileCols;
  Vec sums[kGroup * kChunkRows];
  for (int64_t first = 0; first < count; first += kGroup) {
    const int64_t group = min(kGroup, count - first);
    for (int64_t row = 0; row < rows; row += kChunkRows) {
      const int64_t chunk = min(kChunkRows, rows - row);
      const int64_t fitting = kBlockBytes / static_cast<int64_t>(sizeof(X)) / min(chunk, 16);
      const int64_t block = fitting / kInputMultiple * kInputMultiple;
      for (int64_t i = 0; i < group * chunk; ++i) sums[i] = zero();
      for (int64_t k = 0; k < n; k += block) {
        const auto tiles = [&]<int C>(int64_t c) {
          const W* here = w + (first + c) * w_stride + k;
          const W* next = c + cols < group ? here + cols * w_stride
                          : k + block < n  ? w + first * w_stride + k + block
                                           : w + (first + group) * w_stride;
          for_tiles(chunk, [&]<int R>(int64_t r) {
            dot_tile<R, C>(here, w_stride, next, x + (row + r) * inputs + k * R, min(block, n - k),
                           sums + c * chunk + r, chunk);
            next = here;  // once is enough
          });
        };
        int64_t c = 0;
        if (cols == kTileCols)
          for (; c + kTileCols <= group; c += kTileCols) tiles.template operator()<kTileCols>(c);
        for (; c < group; ++c) tiles.template operator()<1>(c);
      }
      for (int64_t c = 0; c < group; ++c)
        for (int64_t r = 0; r < chunk; ++r)
          out[(row + r) * out_stride + first + c] = sum(sums[c * chunk + r]);
    }
  }
}

// out[r][0:16 C] += x[r] . panels over n inputs (even).
template <int R, int C, typename X>
void dot_panel_tile(const Bf16* w, int64_t panel_stride, const X* x, int64_t n, float* out,
                    int64_t out_stride) {
  constexpr int kVecs = kPanel / Vec::kLanes;
  Vec sums[R][C][kVecs];
  const auto each_sum = [&](const auto& f) {
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c)
        for (int v = 0; v < kVecs; ++v)
          f(out + r * out_stride + c * kPanel + v * Vec::kLanes, sums[r][c][v]);
  };
  each_sum([](const float* at, Vec& sum) { sum = load(at); });
  for (int64_t k = 0; k < n; k += 2, x += 2 * R) {
    const Bf16* wk = w + k * kPanel;
    if constexpr (kDotBf16) {
#if defined(__AVX512BF16__)
      __m512i weights[C];
      for (int c = 0; c < C; ++c) weights[c] = _mm512_loadu_si512(wk + c * panel_stride);
      for (int r = 0; r < R; ++r) {
        int32_t pair;
        __builtin_memcpy(&pair, x + 2 * r, sizeof pair);
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
            sum = fma(broadcast(x[2 * r]), first, sum);
            sum = fma(broadcast(x[2 * r + 1]), second, sum);
          }
        }
    }
  }
  each_sum([](float* at, Vec& sum) { store(at, sum); });
}

// out[t][i] = x[t] . row i of the panels, for `rows` activation rows and `count` panels.
template <typename X>
void dot_panels(const Bf16* panels, int64_t count, const X* x, int64_t rows, int64_t n, float* out,
                int64_t out_stride) {
  const int64_t inputs = padded_inputs(n);
  const int64_t panel_stride = kPanel * n;
  // A block of the weights waits in a cache for further tiles of rows.
  const int64_t block = rows <= kTileRows ? n : 512;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < count * kPanel; ++i) out[r * out_stride + i] = 0;
  const auto tiles = [&]<int C>(int64_t panel) {
    for (int64_t k = 0; k < n; k += block)
      for_tiles(rows, [&]<int R>(int64_t r) {
        dot_panel_tile<R, C>(panels + panel * panel_stride + k * kPanel, panel_stride,
                             x + r * inputs + k * R, min(block, n - k),
                             out + r * out_stride + panel * kPanel, out_stride);
      });
  };
  int64_t panel = 0;
  for (; panel + kPanelTileCols <= count; panel += kPanelTileCols)
    tiles.template operator()<kPanelTileCols>(panel);
  for (; panel < count; ++panel) tiles.template operator()<1>(panel);
}

}  // namespace
}  // namespace mtp
