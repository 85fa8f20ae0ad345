// Dot products of activation rows with weight rows: the inner loops of entry and head_argmax on
// CPU. Included only by the per-instruction-set objects, like vec.h.
//
// Weights are read once, about in memory order; activations wait in the L1 cache. An element is a
// fixed chain of multiply-adds per vector lane, over all inputs in order, then a fixed sum of the
// lanes. Tiles and blocks only decide which elements run together, so a row gives the same bits in
// any batch.
#pragma once

#include "vec.h"

#if defined(__AMX_BF16__)
#include "tiles.h"
#endif

namespace mtp {
namespace {

#if defined(__AVX512BF16__)
constexpr bool kDotBf16 = true;
#else
constexpr bool kDotBf16 = false;
#endif
#if defined(__AMX_BF16__)
constexpr bool kAmx = true;
#else
constexpr bool kAmx = false;
#endif

template <typename T>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<Bf16> = true;

// What activations of model dtype T are multiplied as.
template <typename T>
struct ActivationOf {
  using Type = float;
};
#if defined(__AVX512BF16__)
template <>
struct ActivationOf<Bf16> {
  using Type = Bf16;
};
#endif
template <typename T>
using Activation = typename ActivationOf<T>::Type;

constexpr int kPanel = 16;              // weight rows side by side in a packed weight
constexpr int64_t kInputMultiple = 32;  // activation rows are padded with zeros to this
constexpr bool kManyRegisters = Vec::kLanes == 16;
constexpr int kTileRows = kManyRegisters ? 8 : 4;
constexpr int kTileCols = kManyRegisters ? 3 : 2;
constexpr int kPanelTileRows = kAmx ? 16 : kTileRows;
constexpr int kPanelTileCols = kDotBf16 ? 3 : kManyRegisters ? 2 : 1;
constexpr int64_t kPanelStep = kAmx ? 32 : 2;
constexpr int64_t kGroup = 24;          // weight rows whose sums wait for the next inputs
constexpr int64_t kChunkRows = 64;      // activation rows whose sums do
constexpr int64_t kBlockBytes = 16384;  // of activations: half of the L1 cache
constexpr int64_t kPanelBlock = 4096;   // inputs of packed weights that wait in the L2 cache
// Fetches into the L1 cache have few places to wait in.
constexpr int kToL2 = 2;

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t padded_inputs(int64_t n) {
  return (n + kInputMultiple - 1) / kInputMultiple * kInputMultiple;
}

// Activations are held as the tiles read them: a tile is [inputs/step][rows of the tile][step].
// kTileRows rows are a tile, those left over a tile of 4, then 2, 1. For AMX and packed weights
// kPanelTileRows are a tile, and those left over one.

// Calls tile<R>(first row) over all rows.
template <int R = kTileRows, typename Tile>
void for_tiles(int64_t rows, const Tile& tile, int64_t first = 0) {
  int64_t r = first;
  for (; r + R <= rows; r += R) tile.template operator()<R>(r);
  if constexpr (R > 1) {
    if (r < rows) for_tiles<R / 2>(rows, tile, r);
  }
}

// Rows of the tile that begins where `left` rows are left.
inline int64_t tile_rows(int64_t left, bool packed) {
  if (kAmx && packed) return min(left, kPanelTileRows);
  int64_t rows = kTileRows;
  while (rows > left) rows /= 2;
  return rows;
}

// What one step of a dot product multiplies: kStep weights of type W by kStep activations of X.
template <typename W, typename X>
struct Dot {
  static constexpr int kStep = Vec::kLanes;
  using Values = Vec;
  static Values values(const auto* x) { return load(x); }
  static Vec step(Values x, Values w, Vec sum) { return fma(x, w, sum); }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<Bf16, Bf16> {
  static constexpr int kStep = 32;
  using Values = __m512bh;
  static Values values(const Bf16* x) { return (__m512bh)_mm512_loadu_si512(x); }
  static Vec step(Values x, Values w, Vec sum) { return {_mm512_dpbf16_ps(sum.v, x, w)}; }
};
#endif

// Writes row `row` of `rows`, from n values, for weights of type T.
template <typename T>
void put_row(const float* from, int64_t n, int64_t row, int64_t rows, bool packed,
             Activation<T>* x) {
  const int64_t inputs = padded_inputs(n);
  const int64_t step = packed ? kPanelStep : Dot<T, Activation<T>>::kStep;
  int64_t first = 0, size = tile_rows(rows, packed);
  while (row >= first + size) {
    first += size;
    size = tile_rows(rows - first, packed);
  }
  Activation<T>* to = x + first * inputs + (row - first) * step;
  constexpr int64_t kAtOnce = 16 * kInputMultiple;
  for (int64_t k = 0; k < inputs; k += kAtOnce) {
    Activation<T> some[kAtOnce];
    const int64_t count = min(kAtOnce, inputs - k), given = min(count, n - k);
    for (int64_t i = 0; i < given; ++i) from_float(from[k + i], some[i]);
    for (int64_t i = given; i < count; ++i) some[i] = Activation<T>{};
    const auto spread = [&]<int64_t kStep>() {
      for (int64_t i = 0; i < count; i += kStep, to += size * kStep)
        __builtin_memcpy(to, some + i, kStep * sizeof(Activation<T>));
    };
    if (packed)
      spread.template operator()<kPanelStep>();
    else
      spread.template operator()<Dot<T, Activation<T>>::kStep>();
  }
}

// Weights to fetch ahead. Tiles of rows that use the same weights, `shares` of them, each fetch a
// part: together they are slower than the memory, and one that fetched for all would wait for it.
template <typename W>
struct Ahead {
  const W* from;  // nullptr: nothing
  int64_t shares;
};

template <typename W>
Ahead<W> ahead(const W* next, int64_t row, int64_t rows, int64_t n, int64_t together) {
  const int64_t shares = (rows + together - 1) / together;
  return {next + row / together * n / shares, shares};
}

// sums[c][r] += x[r] w[c] over n inputs, lane by lane.
template <int R, int C, typename W, typename X>
void dot_tile(const W* w, int64_t w_stride, Ahead<W> ahead, const X* x, int64_t n, Vec* sums,
              int64_t sums_stride) {
  using D = Dot<W, X>;
  Vec tile[C][R];
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < R; ++r) tile[c][r] = sums[c * sums_stride + r];
  const auto step = [&](const W* wk, int64_t wk_stride, const X* xk) {
    typename D::Values weights[C];
    for (int c = 0; c < C; ++c) weights[c] = D::values(wk + c * wk_stride);
    for (int r = 0; r < R; ++r) {
      const typename D::Values inputs = D::values(xk + r * D::kStep);
      for (int c = 0; c < C; ++c) tile[c][r] = D::step(inputs, weights[c], tile[c][r]);
    }
  };
  const int64_t ahead_step = D::kStep / ahead.shares;
  int64_t k = 0;
  for (; k + D::kStep <= n; k += D::kStep) {
    if (ahead.from) {
      for (int c = 0; c < C; ++c) __builtin_prefetch(ahead.from + c * w_stride, 0, kToL2);
      ahead.from += ahead_step;
    }
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

// out[t][i] = x[t] . w[i] for `rows` activation rows, at most kChunkRows, and `count` weight rows.
template <typename W, typename X>
void dot_rows(const W* w, int64_t w_stride, int64_t count, const X* x, int64_t rows, int64_t n,
              float* out, int64_t out_stride) {
  const int64_t inputs = padded_inputs(n);
  const int64_t fitting = kBlockBytes / static_cast<int64_t>(sizeof(X)) / min(rows, 16);
  const int64_t block = fitting / kInputMultiple * kInputMultiple;
  // One row of activations: several long streams of weights, which the processor fetches ahead by
  // itself. Few rows: one stream, in blocks, which it does not. Many: the fewer reads the better.
  const bool several = rows == 1 || rows >= kTileRows;
  Vec sums[kGroup * kChunkRows];
  for (int64_t first = 0; first < count; first += kGroup) {
    const int64_t group = min(kGroup, count - first);
    for (int64_t i = 0; i < group * rows; ++i) sums[i] = zero();
    for (int64_t k = 0; k < n; k += block) {
      const int64_t size = min(block, n - k);
      // Columns c, c + apart, c + 2 apart.
      const auto tiles = [&]<int C>(int64_t c, int64_t apart) {
        const W* here = w + (first + c) * w_stride + k;
        for_tiles(rows, [&]<int R>(int64_t r) {
          const W* next = here + group * w_stride;
          dot_tile<R, C>(here, apart * w_stride,
                         rows == 1 ? Ahead<W>{nullptr, 1} : ahead(next, r, rows, size, kTileRows),
                         x + r * inputs + k * R, size, sums + c * rows + r, apart * rows);
        });
      };
      const int64_t apart = several ? group / kTileCols : 0;
      for (int64_t c = 0; c < apart; ++c) tiles.template operator()<kTileCols>(c, apart);
      for (int64_t c = apart * kTileCols; c < group; ++c) tiles.template operator()<1>(c, 1);
    }
    for (int64_t c = 0; c < group; ++c)
      for (int64_t r = 0; r < rows; ++r) out[r * out_stride + first + c] = sum(sums[c * rows + r]);
  }
}

// out[r][0:16 C] += x[r] . panels over n inputs (even).
template <int R, int C, typename X>
void dot_panel_tile(const Bf16* w, int64_t panel_stride, Ahead<Bf16> ahead, const X* x, int64_t n,
                    float* out, int64_t out_stride) {
  constexpr int kVecs = kPanel / Vec::kLanes;
  Vec sums[R][C][kVecs];
  const auto each_sum = [&](const auto& f) {
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c)
        for (int v = 0; v < kVecs; ++v)
          f(out + r * out_stride + c * kPanel + v * Vec::kLanes, sums[r][c][v]);
  };
  each_sum([](const float* at, Vec& sum) { sum = load(at); });
  const int64_t ahead_step = 2 * kPanel / ahead.shares;
  for (int64_t k = 0; k < n; k += 2, x += 2 * R) {
    const Bf16* wk = w + k * kPanel;
    if (ahead.from) {
      for (int c = 0; c < C; ++c) __builtin_prefetch(ahead.from + c * panel_stride, 0, kToL2);
      ahead.from += ahead_step;
    }
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

#if defined(__AMX_BF16__)

// Calls f<0>() to f<N - 1>().
template <int N, typename F>
void for_each(const F& f) {
  if constexpr (N > 0) {
    for_each<N - 1>(f);
    f.template operator()<N - 1>();
  }
}

// The same by AMX, for `rows` activation rows, whose tiles begin at x + tile * 16 * inputs; over
// inputs [begin, begin + n). A tile of weights is 32 inputs of a panel as it lies in memory. An
// element is a sum of such tiles, in order; inside of one, the processor's own sum.
template <int A, int C>
void dot_panel_tiles(TileRegisters& registers, const Bf16* w, int64_t panel_stride,
                     Ahead<Bf16> ahead, const Bf16* x, int64_t inputs, int64_t rows, int64_t begin,
                     int64_t n, float* out, int64_t out_stride) {
  constexpr int kActivations = A * C, kWeights = kActivations + A;  // behind the sums
  constexpr int kRowBytes = 64, kTileWeights = kPanelStep * kPanel;
  const int64_t last = min(rows - (A - 1) * kPanelTileRows, kPanelTileRows);
  const auto rows_of = [&](int a) { return a < A - 1 ? kPanelTileRows : last; };
  TileShapes shapes;
  const auto shape = [&](int tile, int64_t tile_rows) {
    shapes.rows[tile] = static_cast<uint8_t>(tile_rows);
    shapes.row_bytes[tile] = kRowBytes;
  };
  for (int a = 0; a < A; ++a) {
    for (int c = 0; c < C; ++c) shape(a * C + c, rows_of(a));
    shape(kActivations + a, rows_of(a));
  }
  for (int c = 0; c < C; ++c) shape(kWeights + c, kPanelStep / 2);
  registers.shape(shapes);

  const auto out_of = [&](int a, int c) {
    return out + a * kPanelTileRows * out_stride + c * kPanel;
  };
  const int64_t out_bytes = out_stride * static_cast<int64_t>(sizeof(float));
  // Before the registers hold anything: a function that is called may use them.
  const int64_t whole = n / kPanelStep * kPanelStep;
  Bf16 tail[C][kTileWeights];
  for (int c = 0; c < C && whole < n; ++c) {
    // What follows in the panel is not to be multiplied, not even by zero.
    const int64_t count = (n - whole) * kPanel;
    const Bf16* from = w + c * panel_stride + whole * kPanel;
    for (int64_t i = 0; i < kTileWeights; ++i) tail[c][i] = i < count ? from[i] : Bf16{};
  }

  const auto step = [&](const Bf16* wk, int64_t wk_stride, int64_t k) {
    for_each<A>([&]<int a>() {
      load_tile<kActivations + a>(x + a * kPanelTileRows * inputs + k * rows_of(a), kRowBytes);
    });
    for_each<C>([&]<int c>() {
      load_tile<kWeights + c>(wk + c * wk_stride, kRowBytes);
      for_each<A>([&]<int a>() { multiply_tiles<a * C + c, kActivations + a, kWeights + c>(); });
    });
  };
  for_each<A * C>([&]<int i>() { load_tile<i>(out_of(i / C, i % C), out_bytes); });
  const int64_t ahead_step = kTileWeights / ahead.shares;
  for (int64_t k = 0; k < whole; k += kPanelStep) {
    if (ahead.from) {
      for (int c = 0; c < C; ++c)
        for (int64_t i = 0; i < ahead_step; i += 2 * kPanel)
          __builtin_prefetch(ahead.from + c * panel_stride + i, 0, kToL2);
      ahead.from += ahead_step;
    }
    step(w + k * kPanel, panel_stride, begin + k);
  }
  if (whole < n) step(tail[0], kTileWeights, begin + whole);
  for_each<A * C>([&]<int i>() { store_tile<i>(out_of(i / C, i % C), out_bytes); });
}

#endif

// out[t][i] = x[t] . row i of the panels, for `rows` activation rows and `count` panels; n is even,
// and less than a panel has where only some of its inputs count.
template <typename X>
void dot_panels(const Bf16* panels, int64_t panel_stride, int64_t count, const X* x, int64_t rows,
                int64_t n, float* out, int64_t out_stride) {
  const int64_t inputs = padded_inputs(n);
  // Panels are long streams, which the processor fetches ahead by itself, unless a block of them is
  // used again, by further tiles of rows.
  const bool once = rows <= kPanelTileRows;
  const int64_t block = once ? n : kPanelBlock;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < count * kPanel; ++i) out[r * out_stride + i] = 0;
#if defined(__AMX_BF16__)
  TileRegisters registers;
#endif
  const auto tiles = [&]<int C>(int64_t panel) {
    for (int64_t k = 0; k < n; k += block) {
      const Bf16* here = panels + panel * panel_stride + k * kPanel;
      const int64_t size = min(block, n - k);
      const auto ahead_of = [&](int64_t r, int64_t together) {
        const Bf16* next =
            k + size < n ? here + size * kPanel : panels + (panel + C) * panel_stride;
        return once ? Ahead<Bf16>{nullptr, 1} : ahead(next, r, rows, size * kPanel, together);
      };
      const auto out_of = [&](int64_t r) { return out + r * out_stride + panel * kPanel; };
#if defined(__AMX_BF16__)
      constexpr int64_t kTogether = 2 * kPanelTileRows;
      const auto some = [&]<int A>(int64_t r) {
        dot_panel_tiles<A, C>(registers, here, panel_stride, ahead_of(r, kTogether), x + r * inputs,
                              inputs, rows - r, k, size, out_of(r), out_stride);
      };
      for (int64_t r = 0; r < rows; r += kTogether) {
        if constexpr (C <= 2) {
          if (rows - r > kPanelTileRows) {
            some.template operator()<2>(r);
            continue;
          }
        }
        some.template operator()<1>(r);
      }
#else
      for_tiles(rows, [&]<int R>(int64_t r) {
        dot_panel_tile<R, C>(here, panel_stride, ahead_of(r, kTileRows), x + r * inputs + k * R,
                             size, out_of(r), out_stride);
      });
#endif
    }
  };
  int64_t panel = 0;
  const auto groups_of = [&]<int C>() {
    for (; panel + C <= count; panel += C) tiles.template operator()<C>(panel);
  };
  // Two tiles of rows and three panels are more than the eight registers of AMX.
  if (once || !kAmx) groups_of.template operator()<kPanelTileCols>();
  if constexpr (kAmx) groups_of.template operator()<2>();
  groups_of.template operator()<1>();
}

}  // namespace
}  // namespace mtp
