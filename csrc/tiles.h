// AMX: eight registers ("tiles") of up to 16 rows of 64 bytes, and products of them. Included only
// by the objects for CPUs that have it. Assembly, since intrinsics do not take a register's number
// from a template, and those of GCC 12 do not say that they read memory.
//
// Run so far only as tests/amx_emulation does it, not yet on a machine that has AMX.
#pragma once

#include <cstdint>

namespace mtp {
namespace {

// The shapes of the registers, as ldtilecfg reads them.
struct TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

#if defined(MTP_EMULATE_AMX)
#include "emulated_tiles.h"  // of tests/amx_emulation
#else

inline void configure_tiles(const TileShapes& shapes) {
  __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
}
inline void release_tiles() { __asm__ volatile("tilerelease"); }

template <int Tile>
void load_tile(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(Tile) : "memory");
}

template <int Tile>
void store_tile(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1)" : : "r"(to), "r"(stride), "i"(Tile) : "memory");
}

// Sums[m][n] += X[m][2k] W[k][2n] + X[m][2k + 1] W[k][2n + 1] over all k; X and W of bf16, Sums of
// fp32.
template <int Sums, int X, int W>
void multiply_tiles() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(X), "i"(W));
}

#endif

// The registers of a thread from their first use to the end of this object's life. Until then the
// operating system saves them with the thread, and some processors run slower.
class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  ~TileRegisters() { release_tiles(); }

  // Registers are zero afterwards where the shapes have changed.
  void shape(const TileShapes& shapes) {
    if (__builtin_memcmp(&shapes, &shapes_, sizeof shapes) == 0) return;
    shapes_ = shapes;
    configure_tiles(shapes);
  }

 private:
  TileShapes shapes_;  // of no rows: never asked for
};

}  // namespace
}  // namespace mtp
