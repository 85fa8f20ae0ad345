// The instructions of csrc/tiles.h in plain C++, after Intel's Software Developer's Manual,
// volume 2. What they would fault on ends the process. Included by csrc/tiles.h, inside of its
// namespace.

constexpr int kRegisters = 8, kMaxRows = 16, kMaxRowBytes = 64;

struct EmulatedTiles {
  bool configured;
  TileShapes shapes;
  unsigned char bytes[kRegisters][kMaxRows][kMaxRowBytes];
};
thread_local EmulatedTiles emulated{};

inline void expect_tile(bool holds, const char* what) {
  if (holds) return;
  __builtin_printf("emulated AMX: expected %s\n", what);
  __builtin_abort();
}

inline void configure_tiles(const TileShapes& shapes) {
  expect_tile(shapes.palette == 1 && shapes.start_row == 0, "palette 1 and start_row 0");
  for (uint8_t byte : shapes.reserved) expect_tile(byte == 0, "reserved bytes to be 0");
  for (int i = 0; i < 16; ++i) {
    const int rows = shapes.rows[i], row_bytes = shapes.row_bytes[i];
    expect_tile(rows <= kMaxRows && row_bytes <= kMaxRowBytes, "at most 16 rows of 64 bytes");
    expect_tile((rows == 0) == (row_bytes == 0), "neither rows nor bytes, or both");
    expect_tile(i < kRegisters || rows == 0, "8 registers");
  }
  emulated = {true, shapes, {}};
}

inline void release_tiles() { emulated = {}; }

template <int Tile>
void use_tile() {
  static_assert(Tile >= 0 && Tile < kRegisters);
  expect_tile(emulated.configured && emulated.shapes.rows[Tile] > 0, "a register with a shape");
}

template <int Tile>
void load_tile(const void* from, int64_t stride) {
  use_tile<Tile>();
  for (int r = 0; r < emulated.shapes.rows[Tile]; ++r)
    __builtin_memcpy(emulated.bytes[Tile][r], static_cast<const char*>(from) + r * stride,
                     emulated.shapes.row_bytes[Tile]);
}

template <int Tile>
void store_tile(void* to, int64_t stride) {
  use_tile<Tile>();
  for (int r = 0; r < emulated.shapes.rows[Tile]; ++r)
    __builtin_memcpy(static_cast<char*>(to) + r * stride, emulated.bytes[Tile][r],
                     emulated.shapes.row_bytes[Tile]);
}

// Subnormal numbers count as zero, as operands and as results.
inline float flushed(float x) {
  constexpr float kSmallestNormal = 0x1p-126f;
  return __builtin_fabsf(x) < kSmallestNormal ? __builtin_copysignf(0.0f, x) : x;
}

// Half 0 or 1 of a pair of bf16, as fp32.
inline float half_of(const unsigned char* pair, int half) {
  uint16_t bits;
  __builtin_memcpy(&bits, pair + 2 * half, sizeof bits);
  return flushed(__builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16));
}

template <int Sums, int X, int W>
void multiply_tiles() {
  use_tile<Sums>();
  use_tile<X>();
  use_tile<W>();
  static_assert(Sums != X && Sums != W && X != W);
  const TileShapes& shapes = emulated.shapes;
  const int rows = shapes.rows[Sums], pairs = shapes.row_bytes[X] / 4;
  const int cols = shapes.row_bytes[Sums] / 4;
  expect_tile(shapes.rows[X] == rows && shapes.rows[W] == pairs &&
                  shapes.row_bytes[W] == shapes.row_bytes[Sums],
              "shapes that can be multiplied");
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < cols; ++n) {
      // Two chains of fused multiply-adds, which begin anew in each instruction.
      float halves[2] = {};
      for (int k = 0; k < pairs; ++k)
        for (int half = 0; half < 2; ++half)
          halves[half] =
              flushed(__builtin_fmaf(half_of(emulated.bytes[X][m] + 4 * k, half),
                                     half_of(emulated.bytes[W][k] + 4 * n, half), halves[half]));
      float sum;
      unsigned char* at = emulated.bytes[Sums][m] + 4 * n;
      __builtin_memcpy(&sum, at, sizeof sum);
      sum = flushed(flushed(sum) + flushed(halves[0] + halves[1]));
      __builtin_memcpy(at, &sum, sizeof sum);
    }
}
