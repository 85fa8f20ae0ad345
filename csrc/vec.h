// One fp32 vector type per instruction set. Included only by the objects that CMake compiles once
// per instruction set: everything here has internal linkage, and no header with inline functions is
// pulled in, so that no other object can end up with code for a wider machine.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace mtp {
namespace {

struct Bf16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

[[maybe_unused]] inline float bits_to_float(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}
[[maybe_unused]] inline uint32_t float_to_bits(float x) { return __builtin_bit_cast(uint32_t, x); }

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) { return bits_to_float(static_cast<uint32_t>(x.bits) << 16); }
[[maybe_unused]] inline float to_float(Half x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t rest = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  if ((x.bits & 0x7c00) == 0x7c00) return bits_to_float(sign | 0x7f800000 | rest);
  // The exponent is off by 127 - 15; the product also normalises subnormals.
  const float scaled = bits_to_float(rest) * bits_to_float(0x77800000);
  return bits_to_float(sign | float_to_bits(scaled));
#endif
}

// Round to nearest even.
inline void from_float(float x, float& to) { to = x; }
inline void from_float(float x, Bf16& to) {
  const uint32_t bits = float_to_bits(x);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  to.bits = nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
[[maybe_unused]] inline void from_float(float x, Half& to) {
#if defined(__F16C__)
  to.bits = static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  const uint32_t bits = float_to_bits(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    to.bits = sign | 0x7e00;
  } else if (magnitude >= 0x47800000) {  // 65536 and above
    to.bits = sign | 0x7c00;
  } else if (magnitude < 0x38800000) {  // subnormal: adding 0.5 makes the FPU round at 2^-24
    const float shifted = bits_to_float(magnitude) + 0.5f;
    to.bits = sign | static_cast<uint16_t>(float_to_bits(shifted) - float_to_bits(0.5f));
  } else {
    const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    to.bits = sign | static_cast<uint16_t>((rounded >> 13) - (112u << 10));
  }
#endif
}

#if defined(__AVX512F__)

struct Vec {
  static constexpr int kLanes = 16;
  __m512 v;
};
inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* x) { return {_mm512_loadu_ps(x)}; }
inline Vec load(const Bf16* x) {
  const __m512i wide =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline Vec load(const Half* x) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)))};
}
inline void store(float* to, Vec x) { _mm512_storeu_ps(to, x.v); }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline float sum(Vec x) { return _mm512_reduce_add_ps(x.v); }
// kLanes pairs (2i, 2i+1) of bf16, split into their first and second elements.
inline void load_pairs(const Bf16* x, Vec& first, Vec& second) {
  const __m512i pairs = _mm512_loadu_si512(x);
  first.v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  second.v = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)));
}

#elif defined(__AVX2__)

struct Vec {
  static constexpr int kLanes = 8;
  __m256 v;
};
inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
inline Vec load(const float* x) { return {_mm256_loadu_ps(x)}; }
inline Vec load(const Bf16* x) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
inline Vec load(const Half* x) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)))};
}
inline void store(float* to, Vec x) { _mm256_storeu_ps(to, x.v); }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline float sum(Vec x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline void load_pairs(const Bf16* x, Vec& first, Vec& second) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  first.v = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  second.v = _mm256_castsi256_ps(
      _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000))));
}

#else

struct Vec {
  static constexpr int kLanes = 8;
  float v[kLanes];
};
inline Vec broadcast(float x) { return {{x, x, x, x, x, x, x, x}}; }
inline Vec zero() { return broadcast(0); }
template <typename T>
inline Vec load(const T* x) {
  Vec y;
  for (int i = 0; i < Vec::kLanes; ++i) y.v[i] = to_float(x[i]);
  return y;
}
inline void store(float* to, Vec x) {
  for (int i = 0; i < Vec::kLanes; ++i) to[i] = x.v[i];
}
inline Vec operator+(Vec a, Vec b) {
  for (int i = 0; i < Vec::kLanes; ++i) a.v[i] += b.v[i];
  return a;
}
inline Vec operator*(Vec a, Vec b) {
  for (int i = 0; i < Vec::kLanes; ++i) a.v[i] *= b.v[i];
  return a;
}
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline float sum(Vec x) {
  return ((x.v[0] + x.v[4]) + (x.v[2] + x.v[6])) + ((x.v[1] + x.v[5]) + (x.v[3] + x.v[7]));
}
inline void load_pairs(const Bf16* x, Vec& first, Vec& second) {
  for (int i = 0; i < Vec::kLanes; ++i) {
    first.v[i] = to_float(x[2 * i]);
    second.v[i] = to_float(x[2 * i + 1]);
  }
}

#endif

}  // namespace
}  // namespace mtp
