// The numbers of the arithmetic that has the same bits on every backend, for exact.h and exact.cuh;
// mtp_kernels/ops/_exact.py says what and why.
#pragma once

#include "params.h"

namespace mtp {

// Streams of random words.
enum class Purpose : uint32_t { target = 0, accept = 1, draft = 2 };

template <int kCount>
struct Coefficients {
  float values[kCount];
};

MTP_HOST_DEVICE constexpr Coefficients<6> exp2_coefficients() {
  return {{0.6931471824645996f, 0.24022650718688965f, 0.055503278970718384f, 0.009618003852665424f,
           0.001340026967227459f, 0.00015476297994609922f}};
}
MTP_HOST_DEVICE constexpr Coefficients<8> log_coefficients() {
  return {{0.3333333134651184f, -0.2500081956386566f, 0.20001226663589478f, -0.16623356938362122f,
           0.14201757311820984f, -0.13160179555416107f, 0.1276157945394516f,
           -0.07634507119655609f}};
}

constexpr float kLog2E = 1.4426950216293335f;
constexpr float kLn2High = 0.693359375f;
constexpr float kLn2Low = -0.00021219444170128554f;
constexpr float kSqrt2 = 1.4142135381698608f;
constexpr float kLowestExponent = -64.0f;

}  // namespace mtp
