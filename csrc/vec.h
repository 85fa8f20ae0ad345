// Vectors per instruction set: Vec of fp32, Ints of as many 32-bit integers, Longs of as many
// 64-bit ones, Mask of as many booleans. Where two operations have the same name and one of them
// takes a Mask, lanes outside of it are zero. Included only by the objects that CMake compiles once
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

inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec floor(Vec x) { return {_mm512_floor_ps(x.v)}; }
// x 2^n for whole n, where both are normal numbers.
inline Vec times_exp2(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }

struct Ints {
  __m512i v;
};
inline Ints broadcast(uint32_t x) { return {_mm512_set1_epi32(static_cast<int32_t>(x))}; }
inline Ints load(const uint32_t* x) { return {_mm512_loadu_si512(x)}; }
// Integers are stored for scalar code, which Zen 4 does not forward from a 64-byte store.
inline void store_halves(void* to, __m512i x) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_castsi512_si256(x));
  _mm256_storeu_si256(static_cast<__m256i*>(to) + 1, _mm512_extracti64x4_epi64(x, 1));
}
inline void store(uint32_t* to, Ints x) { store_halves(to, x.v); }
inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints operator-(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline Ints operator^(Ints a, Ints b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline Ints operator&(Ints a, Ints b) { return {_mm512_and_si512(a.v, b.v)}; }
inline Ints operator|(Ints a, Ints b) { return {_mm512_or_si512(a.v, b.v)}; }
inline Ints operator>>(Ints a, int bits) {
  return {_mm512_srl_epi32(a.v, _mm_cvtsi32_si128(bits))};
}
inline Ints signs(Ints a) { return {_mm512_srai_epi32(a.v, 31)}; }  // 0 or ~0
inline Ints bits_of(Vec x) { return {_mm512_castps_si512(x.v)}; }
inline Vec as_floats(Ints x) { return {_mm512_castsi512_ps(x.v)}; }
inline Vec to_floats(Ints x) { return {_mm512_cvtepi32_ps(x.v)}; }  // of signed integers
inline Ints to_ints(Vec x) { return {_mm512_cvttps_epi32(x.v)}; }   // rounded towards zero

struct Mask {
  __mmask16 v;
};
inline Mask operator>(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
inline Mask operator>=(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
inline Mask operator<=(Ints a, Ints b) { return {_mm512_cmple_epu32_mask(a.v, b.v)}; }  // unsigned
inline Mask operator&(Mask a, Mask b) { return {_kand_mask16(a.v, b.v)}; }
inline bool any(Mask m) { return m.v != 0; }
inline Vec where(Mask m, Vec a) { return {_mm512_maskz_mov_ps(m.v, a.v)}; }
inline Ints where(Mask m, Ints a) { return {_mm512_maskz_mov_epi32(m.v, a.v)}; }
inline Vec where(Mask m, Vec a, Vec b) { return {_mm512_mask_mov_ps(b.v, m.v, a.v)}; }

struct Longs {
  __m512i v[2];
};
// Of numbers from 0 to 2^52, rounded down.
inline Longs truncated(Vec x) {
  return {_mm512_cvttps_epi64(_mm512_castps512_ps256(x.v)),
          _mm512_cvttps_epi64(_mm512_extractf32x8_ps(x.v, 1))};
}
inline Longs operator+(Longs a, Longs b) {
  return {_mm512_add_epi64(a.v[0], b.v[0]), _mm512_add_epi64(a.v[1], b.v[1])};
}
inline int64_t sum(Longs x) { return _mm512_reduce_add_epi64(_mm512_add_epi64(x.v[0], x.v[1])); }
inline void store(int64_t* to, Longs x) {
  store_halves(to, x.v[0]);
  store_halves(to + 8, x.v[1]);
}
inline Longs broadcast_longs(int64_t x) { return {_mm512_set1_epi64(x), _mm512_set1_epi64(x)}; }
inline Longs operator^(Longs a, Longs b) {
  return {_mm512_xor_si512(a.v[0], b.v[0]), _mm512_xor_si512(a.v[1], b.v[1])};
}
inline Longs high_words(Longs x) {
  return {_mm512_srli_epi64(x.v[0], 32), _mm512_srli_epi64(x.v[1], 32)};
}
// Products of the low words.
inline Longs multiply(Longs a, Longs b) {
  return {_mm512_mul_epu32(a.v[0], b.v[0]), _mm512_mul_epu32(a.v[1], b.v[1])};
}
// Lane i of the concatenated results: the low word of x[i % 4] in the lane whose number in `order`
// is i / 4.
inline Longs order() {
  return {_mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), _mm512_set_epi64(15, 11, 14, 10, 13, 9, 12, 8)};
}
inline void interleave(const Longs (&x)[4], Ints (&to)[4]) {
  for (int i = 0; i < 2; ++i) {
    const auto pair = [&](int j) {
      const __m512i second = _mm512_slli_epi64(x[j + 1].v[i], 32);
      return _mm512_mask_mov_epi32(x[j].v[i], 0xaaaa, second);
    };
    to[2 * i].v = _mm512_unpacklo_epi64(pair(0), pair(2));
    to[2 * i + 1].v = _mm512_unpackhi_epi64(pair(0), pair(2));
  }
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

inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec floor(Vec x) { return {_mm256_floor_ps(x.v)}; }
inline Vec times_exp2(Vec x, Vec n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n.v), 23);
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.v), exponent))};
}

struct Ints {
  __m256i v;
};
inline Ints broadcast(uint32_t x) { return {_mm256_set1_epi32(static_cast<int32_t>(x))}; }
inline Ints load(const uint32_t* x) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))};
}
inline void store(uint32_t* to, Ints x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x.v);
}
inline Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline Ints operator-(Ints a, Ints b) { return {_mm256_sub_epi32(a.v, b.v)}; }
inline Ints operator^(Ints a, Ints b) { return {_mm256_xor_si256(a.v, b.v)}; }
inline Ints operator&(Ints a, Ints b) { return {_mm256_and_si256(a.v, b.v)}; }
inline Ints operator|(Ints a, Ints b) { return {_mm256_or_si256(a.v, b.v)}; }
inline Ints operator>>(Ints a, int bits) {
  return {_mm256_srl_epi32(a.v, _mm_cvtsi32_si128(bits))};
}
inline Ints signs(Ints a) { return {_mm256_srai_epi32(a.v, 31)}; }
inline Ints bits_of(Vec x) { return {_mm256_castps_si256(x.v)}; }
inline Vec as_floats(Ints x) { return {_mm256_castsi256_ps(x.v)}; }
inline Vec to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.v)}; }
inline Ints to_ints(Vec x) { return {_mm256_cvttps_epi32(x.v)}; }

struct Mask {
  __m256i v;  // each lane 0 or ~0
};
inline Mask operator>(Vec a, Vec b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ))};
}
inline Mask operator>=(Vec a, Vec b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ))};
}
inline Mask operator<=(Ints a, Ints b) {
  return {_mm256_cmpeq_epi32(_mm256_min_epu32(a.v, b.v), a.v)};
}
inline Mask operator&(Mask a, Mask b) { return {_mm256_and_si256(a.v, b.v)}; }
inline bool any(Mask m) { return !_mm256_testz_si256(m.v, m.v); }
inline Ints where(Mask m, Ints a) { return {_mm256_and_si256(m.v, a.v)}; }
inline Vec where(Mask m, Vec a) { return as_floats(where(m, bits_of(a))); }
inline Vec where(Mask m, Vec a, Vec b) {
  return {_mm256_blendv_ps(b.v, a.v, _mm256_castsi256_ps(m.v))};
}

struct Longs {
  __m256i v[2];
};
// AVX2 cannot convert to 64 bits; the mantissa of x + 2^52 is x, and 2^52 itself is its carry.
inline __m256i to_longs(__m128 whole) {
  const __m256d offset = _mm256_set1_pd(0x1p52);
  const __m256d shifted = _mm256_add_pd(_mm256_cvtps_pd(whole), offset);
  return _mm256_sub_epi64(_mm256_castpd_si256(shifted), _mm256_castpd_si256(offset));
}
inline Longs truncated(Vec x) {
  const Vec whole = floor(x);
  return {to_longs(_mm256_castps256_ps128(whole.v)), to_longs(_mm256_extractf128_ps(whole.v, 1))};
}
inline Longs operator+(Longs a, Longs b) {
  return {_mm256_add_epi64(a.v[0], b.v[0]), _mm256_add_epi64(a.v[1], b.v[1])};
}
inline void store(int64_t* to, Longs x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x.v[0]);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 4), x.v[1]);
}
inline Longs broadcast_longs(int64_t x) { return {_mm256_set1_epi64x(x), _mm256_set1_epi64x(x)}; }
inline Longs operator^(Longs a, Longs b) {
  return {_mm256_xor_si256(a.v[0], b.v[0]), _mm256_xor_si256(a.v[1], b.v[1])};
}
inline Longs high_words(Longs x) {
  return {_mm256_srli_epi64(x.v[0], 32), _mm256_srli_epi64(x.v[1], 32)};
}
inline Longs multiply(Longs a, Longs b) {
  return {_mm256_mul_epu32(a.v[0], b.v[0]), _mm256_mul_epu32(a.v[1], b.v[1])};
}
inline Longs order() { return {_mm256_set_epi64x(3, 1, 2, 0), _mm256_set_epi64x(7, 5, 6, 4)}; }
inline void interleave(const Longs (&x)[4], Ints (&to)[4]) {
  for (int i = 0; i < 2; ++i) {
    const auto pair = [&](int j) {
      const __m256i second = _mm256_slli_epi64(x[j + 1].v[i], 32);
      return _mm256_blend_epi32(x[j].v[i], second, 0xaa);
    };
    to[2 * i].v = _mm256_unpacklo_epi64(pair(0), pair(2));
    to[2 * i + 1].v = _mm256_unpackhi_epi64(pair(0), pair(2));
  }
}
inline int64_t sum(Longs x) {
  int64_t lanes[Vec::kLanes];
  store(lanes, x);
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
         ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

#else

struct Vec {
  static constexpr int kLanes = 8;
  float v[kLanes];
};
inline Vec broadcast(float x) { return {{x, x, x, x, x, x, x, x}}; }
inline Vec zero() { return broadcast(0.0f); }
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

template <typename To, typename F>
inline To each_lane(F f) {
  To to;
  for (int i = 0; i < Vec::kLanes; ++i) to.v[i] = f(i);
  return to;
}
inline Vec operator-(Vec a, Vec b) {
  return each_lane<Vec>([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec operator/(Vec a, Vec b) {
  return each_lane<Vec>([&](int i) { return a.v[i] / b.v[i]; });
}
inline Vec max(Vec a, Vec b) {
  return each_lane<Vec>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec min(Vec a, Vec b) {
  return each_lane<Vec>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
// Of numbers below 2^31, which is where floorf would be a call per lane.
inline Vec floor(Vec x) {
  return each_lane<Vec>([&](int i) {
    const float whole = static_cast<float>(static_cast<int32_t>(x.v[i]));
    return whole > x.v[i] ? whole - 1 : whole;
  });
}
inline Vec times_exp2(Vec x, Vec n) {
  return each_lane<Vec>([&](int i) {
    const uint32_t exponent = static_cast<uint32_t>(static_cast<int32_t>(n.v[i])) << 23;
    return bits_to_float(float_to_bits(x.v[i]) + exponent);
  });
}

struct Ints {
  uint32_t v[Vec::kLanes];
};
inline Ints broadcast(uint32_t x) { return {{x, x, x, x, x, x, x, x}}; }
inline Ints load(const uint32_t* x) {
  return each_lane<Ints>([&](int i) { return x[i]; });
}
inline void store(uint32_t* to, Ints x) {
  for (int i = 0; i < Vec::kLanes; ++i) to[i] = x.v[i];
}
inline Ints operator+(Ints a, Ints b) {
  return each_lane<Ints>([&](int i) { return a.v[i] + b.v[i]; });
}
inline Ints operator-(Ints a, Ints b) {
  return each_lane<Ints>([&](int i) { return a.v[i] - b.v[i]; });
}
inline Ints operator^(Ints a, Ints b) {
  return each_lane<Ints>([&](int i) { return a.v[i] ^ b.v[i]; });
}
inline Ints operator&(Ints a, Ints b) {
  return each_lane<Ints>([&](int i) { return a.v[i] & b.v[i]; });
}
inline Ints operator|(Ints a, Ints b) {
  return each_lane<Ints>([&](int i) { return a.v[i] | b.v[i]; });
}
inline Ints operator>>(Ints a, int bits) {
  return each_lane<Ints>([&](int i) { return a.v[i] >> bits; });
}
inline Ints signs(Ints a) {
  return each_lane<Ints>([&](int i) { return 0u - (a.v[i] >> 31); });
}
inline Ints bits_of(Vec x) {
  return each_lane<Ints>([&](int i) { return float_to_bits(x.v[i]); });
}
inline Vec as_floats(Ints x) {
  return each_lane<Vec>([&](int i) { return bits_to_float(x.v[i]); });
}
inline Vec to_floats(Ints x) {
  return each_lane<Vec>([&](int i) { return static_cast<float>(static_cast<int32_t>(x.v[i])); });
}
inline Ints to_ints(Vec x) {
  return each_lane<Ints>(
      [&](int i) { return static_cast<uint32_t>(static_cast<int32_t>(x.v[i])); });
}

struct Mask {
  bool v[Vec::kLanes];
};
inline Mask operator>(Vec a, Vec b) {
  return each_lane<Mask>([&](int i) { return a.v[i] > b.v[i]; });
}
inline Mask operator>=(Vec a, Vec b) {
  return each_lane<Mask>([&](int i) { return a.v[i] >= b.v[i]; });
}
inline Mask operator<=(Ints a, Ints b) {
  return each_lane<Mask>([&](int i) { return a.v[i] <= b.v[i]; });
}
inline Mask operator&(Mask a, Mask b) {
  return each_lane<Mask>([&](int i) { return a.v[i] && b.v[i]; });
}
inline bool any(Mask m) {
  bool found = false;
  for (bool lane : m.v) found |= lane;
  return found;
}
inline Vec where(Mask m, Vec a, Vec b) {
  return each_lane<Vec>([&](int i) { return m.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec where(Mask m, Vec a) { return where(m, a, zero()); }
inline Ints where(Mask m, Ints a) {
  return each_lane<Ints>([&](int i) { return m.v[i] ? a.v[i] : 0u; });
}

struct Longs {
  int64_t v[Vec::kLanes];
};
inline Longs truncated(Vec x) {
  return each_lane<Longs>([&](int i) { return static_cast<int64_t>(x.v[i]); });
}
inline Longs operator+(Longs a, Longs b) {
  return each_lane<Longs>([&](int i) { return a.v[i] + b.v[i]; });
}
inline void store(int64_t* to, Longs x) {
  for (int i = 0; i < Vec::kLanes; ++i) to[i] = x.v[i];
}
inline Longs broadcast_longs(int64_t x) {
  return each_lane<Longs>([&](int) { return x; });
}
inline Longs operator^(Longs a, Longs b) {
  return each_lane<Longs>([&](int i) { return a.v[i] ^ b.v[i]; });
}
inline Longs high_words(Longs x) {
  return each_lane<Longs>([&](int i) { return x.v[i] >> 32 & 0xffffffff; });
}
inline Longs multiply(Longs a, Longs b) {
  return each_lane<Longs>([&](int i) {
    const uint64_t first = static_cast<uint32_t>(a.v[i]), second = static_cast<uint32_t>(b.v[i]);
    return static_cast<int64_t>(first * second);
  });
}
inline Longs order() {
  return each_lane<Longs>([&](int i) { return i; });
}
inline void interleave(const Longs (&x)[4], Ints (&to)[4]) {
  for (int i = 0; i < 4 * Vec::kLanes; ++i)
    to[i / Vec::kLanes].v[i % Vec::kLanes] = static_cast<uint32_t>(x[i % 4].v[i / 4]);
}
inline int64_t sum(Longs x) {
  int64_t total = 0;
  for (int64_t lane : x.v) total += lane;
  return total;
}

#endif

}  // namespace
}  // namespace mtp
