// Arithmetic that has the same bits on every backend: random words, exp2, log, exponential
// variates. mtp_kernels/ops/_exact.py says what and why; the names are the same.
//
// A product that something is added to is __fmul_rn, which no compiler fuses with the sum.
#pragma once

#include "exact_constants.h"

namespace mtp {

template <int kCount>
__device__ inline float polynomial(const Coefficients<kCount>& coefficients, float x) {
  float total = coefficients.values[kCount - 1];
#pragma unroll
  for (int i = kCount - 2; i >= 0; --i) total = __fmul_rn(total, x) + coefficients.values[i];
  return total;
}

// 2^(y + kScale) for y <= 0, or NaN; below 2^-64 it is held there.
template <int kScale>
__device__ inline float exp2_exact(float y) {
  constexpr auto coefficients = exp2_coefficients();
  constexpr float kUnits = 12582912.0f + kScale;  // 1.5 * 2^23: the last bits of a sum are units
  y = fmaxf(y, kLowestExponent);
  const float n = __fadd_rd(y + 0.5f, kUnits);  // holds the floor of y + 1/2
  const float r = y - (n - kUnits);
  const float mantissa = 1.0f + __fmul_rn(r, polynomial(coefficients, r));
  return __uint_as_float(__float_as_uint(mantissa) + (__float_as_uint(n) << 23));
}

// Natural logarithm of a normal number > 0.
__device__ inline float log_exact(float x) {
  constexpr auto coefficients = log_coefficients();
  const unsigned bits = __float_as_uint(x);
  const float mantissa = __uint_as_float((bits & 0x7fffffu) | 0x3f800000u);
  const bool large = mantissa > kSqrt2;
  const float exponent = static_cast<float>(static_cast<int>(bits >> 23) - 127 + large);
  const float s = (large ? mantissa * 0.5f : mantissa) - 1.0f;
  const float square = s * s;
  const float tail = __fmul_rn(s * square, polynomial(coefficients, s)) - __fmul_rn(0.5f, square);
  return (s + (tail + __fmul_rn(exponent, kLn2Low))) + __fmul_rn(exponent, kLn2High);
}

// A standard exponential variate from one random word.
__device__ inline float exponential(unsigned word) {
  const bool upper = word >= 0x80000000u;
  const auto halved = static_cast<float>(static_cast<int>(upper ? ~word : word));
  const float u = __fmul_rn(halved + 0.5f, 0x1p-32f);
  const float rest = 1.0f - u;
  return -(log_exact(upper ? u : rest) + (upper ? 0.0f : (1.0f - rest) - u));
}

struct Words {
  unsigned x[4];
};

// Philox4x32-10.
__device__ inline Words philox(uint64_t seed, uint64_t position, Purpose purpose, unsigned lane) {
  unsigned c0 = lane, c1 = static_cast<unsigned>(purpose);
  unsigned c2 = static_cast<unsigned>(position), c3 = static_cast<unsigned>(position >> 32);
  unsigned key0 = static_cast<unsigned>(seed), key1 = static_cast<unsigned>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(c0) * 0xD2511F53u;
    const uint64_t b = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<unsigned>(b >> 32) ^ c1 ^ key0;
    c1 = static_cast<unsigned>(b);
    c2 = static_cast<unsigned>(a >> 32) ^ c3 ^ key1;
    c3 = static_cast<unsigned>(a);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// A float64 in [0, 1), a multiple of 2^-53, from two random words.
__device__ inline double uniform(unsigned high, unsigned low) {
  const uint64_t bits = (static_cast<uint64_t>(high) << 21) | (low >> 11);
  return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace mtp
