// Arithmetic that has the same bits on every backend, a vector at a time: random words, exp2, log,
// exponential variates. mtp_kernels/ops/_exact.py says what and why; the names are the same.
// Included only by the per-instruction-set objects, like vec.h.
#pragma once

#include "exact_constants.h"
#include "vec.h"

namespace mtp {
namespace {

constexpr auto kExp2 = exp2_coefficients();
constexpr auto kLog = log_coefficients();

// Functions of several vectors go through them step by step: the steps of one depend on each other,
// and the processor does not look far enough ahead to find the next vector's.

template <int kCoefficients, int kCount>
inline void polynomial(const Coefficients<kCoefficients>& coefficients, float unit,
                       const Vec (&x)[kCount], Vec (&total)[kCount]) {
  for (Vec& t : total) t = broadcast(coefficients.values[kCoefficients - 1] * unit);
  for (int i = kCoefficients - 2; i >= 0; --i) {
    for (int j = 0; j < kCount; ++j) total[j] = total[j] * x[j];
    for (Vec& t : total) t = t + broadcast(coefficients.values[i] * unit);
  }
}

// y = 2^(y + kScale) for y <= 0; below 2^-64 it is held there. The unit multiplies every term by a
// power of two, which changes no rounding.
template <int kScale, int kCount>
inline void exp2(Vec (&y)[kCount]) {
  constexpr float unit = static_cast<float>(int64_t{1} << kScale);
  Vec n[kCount], total[kCount];
  for (Vec& v : y) v = max(v, broadcast(kLowestExponent));
  for (int j = 0; j < kCount; ++j) n[j] = floor(y[j] + broadcast(0.5f));
  for (int j = 0; j < kCount; ++j) y[j] = y[j] - n[j];
  polynomial(kExp2, unit, y, total);
  for (int j = 0; j < kCount; ++j) y[j] = broadcast(unit) + y[j] * total[j];
  for (int j = 0; j < kCount; ++j) y[j] = times_exp2(y[j], n[j]);
}

template <int kScale>
inline Vec exp2(Vec y) {
  Vec one[] = {y};
  exp2<kScale>(one);
  return one[0];
}

// Natural logarithm of a normal number > 0.
inline Vec log(Vec x) {
  const Ints bits = bits_of(x);
  const Vec mantissa = as_floats((bits & broadcast(0x7fffffu)) | broadcast(0x3f800000u));
  const Mask large = mantissa > broadcast(kSqrt2);
  const Vec exponent = to_floats((bits >> 23) - broadcast(127u)) + where(large, broadcast(1.0f));
  const Vec s = where(large, mantissa * broadcast(0.5f), mantissa) - broadcast(1.0f);
  const Vec square = s * s;
  const Vec argument[] = {s};
  Vec q[1];
  polynomial(kLog, 1.0f, argument, q);
  const Vec tail = (s * square) * q[0] - broadcast(0.5f) * square;
  return (s + (tail + exponent * broadcast(kLn2Low))) + exponent * broadcast(kLn2High);
}

// A standard exponential variate from one random word.
inline Vec exponential(Ints word) {
  const Ints flipped = word ^ signs(word);  // the complement of a word from the upper half
  const Vec u = (to_floats(flipped) + broadcast(0.5f)) * broadcast(0x1p-32f);
  const Vec rest = broadcast(1.0f) - u;
  const Mask lower = word <= broadcast(0x7fffffffu);
  const Vec lost = where(lower, (broadcast(1.0f) - rest) - u);
  return zero() - (log(where(lower, rest, u)) + lost);
}

// Philox4x32-10, one counter per lane: the low words of the results. High words hold waste, which
// the products do not look at.
struct Words {
  Longs x[4];
};

inline Words philox(uint64_t seed, uint64_t position, uint32_t purpose, Longs lane) {
  Longs c0 = lane, c1 = broadcast_longs(purpose);
  Longs c2 = broadcast_longs(static_cast<int64_t>(position));
  Longs c3 = high_words(c2);
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Longs a = multiply(c0, broadcast_longs(0xD2511F53));
    const Longs b = multiply(c2, broadcast_longs(0xCD9E8D57));
    c0 = high_words(b) ^ c1 ^ broadcast_longs(key0);
    c1 = b;
    c2 = high_words(a) ^ c3 ^ broadcast_longs(key1);
    c3 = a;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

inline void philox(uint64_t seed, uint64_t position, uint32_t purpose, uint32_t lane,
                   uint32_t (&words)[4]) {
  const Words all = philox(seed, position, purpose, broadcast_longs(lane));
  for (int i = 0; i < 4; ++i) {
    int64_t lanes[Vec::kLanes];
    store(lanes, all.x[i]);
    words[i] = static_cast<uint32_t>(lanes[0]);
  }
}

// A float64 in [0, 1), a multiple of 2^-53.
inline double uniform(uint32_t high, uint32_t low) {
  const uint64_t bits = (static_cast<uint64_t>(high) << 21) | (low >> 11);
  return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace
}  // namespace mtp
