// The head_argmax op's arguments, checked and turned into HeadArgmaxParams. The argument order is
// that of the schema, which is mtp_kernels/ops/head_argmax.py; `_check` there says the same in
// Python.
#pragma once

#include <string>

#include "common.h"
#include "head_argmax.h"

namespace mtp {

struct HeadArgmaxArgs {
  Tensor hidden, head_weight;
  std::optional<int64_t> vocab_size;
  int64_t vocab_start;
  OptionalTensor id_map, temperature, seeds, positions;
  std::string stream;
};

// Everything but `inputs`, `values` and `ids` is filled in.
inline HeadArgmaxParams check_head_argmax(const HeadArgmaxArgs& a) {
  constexpr int64_t kPanel = 16;  // weight rows of one panel of a packed weight
  const Expect expect("head_argmax", a.hidden);
  const auto ints = {ScalarType::Int, ScalarType::Long};
  expect.dtype("hidden", a.hidden, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
  if (a.hidden.dim() != 2 || a.hidden.size(1) < 1)
    fail("head_argmax: hidden expected shape [T, H >= 1], got ", shape_name(a.hidden.sizes()));
  expect.unit_stride("hidden", a.hidden);
  const int64_t rows = a.hidden.size(0), size = a.hidden.size(1);

  const Tensor& weight = a.head_weight;
  expect.device("head_weight", weight);
  expect.dtype("head_weight", weight, {a.hidden.scalar_type()});
  const bool packed = weight.dim() == 4;
  const bool fits =
      packed ? 2 * weight.size(1) == size && weight.size(2) == kPanel && weight.size(3) == 2
             : weight.dim() == 2 && weight.size(1) == size;
  if (!fits || weight.size(0) < 1)
    fail("head_argmax: head_weight expected shape [V >= 1, ", size, "] or packed [V/16, ", size / 2,
         ", 16, 2], got ", shape_name(weight.sizes()));
  if (packed) {
    expect.dtype("packed head_weight", weight, {ScalarType::BFloat16});
    if (!weight.is_contiguous())
      fail("head_argmax: packed head_weight expected a contiguous tensor");
  } else {
    expect.unit_stride("head_weight", weight);
  }
  const int64_t weight_rows = weight.size(0) * (packed ? kPanel : 1);

  if (a.vocab_size && (*a.vocab_size < 0 || *a.vocab_size > weight_rows))
    fail("head_argmax: vocab_size expected a number in [0, ", weight_rows, "], got ",
         *a.vocab_size);
  const int64_t last_start = kNoiseIds - weight_rows;
  if (a.vocab_start < 0 || a.vocab_start > last_start)
    fail("head_argmax: vocab_start expected a number in [0, ", last_start, "], got ",
         a.vocab_start);
  if (a.id_map) {
    expect.tensor("id_map", *a.id_map, ints, {weight_rows});
    if (a.vocab_start != 0)
      fail("head_argmax: vocab_start expected 0 with id_map, got ", a.vocab_start);
  }
  const int given = a.temperature.has_value() + a.seeds.has_value() + a.positions.has_value();
  if (given != 0 && given != 3)
    fail("head_argmax: expected all of temperature, seeds and positions or none, got ", given,
         " of them");
  if (given) {
    expect.tensor("temperature", *a.temperature, {ScalarType::Float}, {rows});
    expect.tensor("seeds", *a.seeds, {ScalarType::Long}, {rows});
    expect.tensor("positions", *a.positions, ints, {rows});
  }
  if (a.stream != "draft" && a.stream != "target")
    fail("head_argmax: stream expected one of target, draft, got '", a.stream, "'");

  const auto int_array = [](const OptionalTensor& x) {
    return IntArray{data_or_null(x), x && x->scalar_type() == ScalarType::Long};
  };
  HeadArgmaxParams p{};
  p.rows = rows;
  p.hidden_size = size;
  p.weight_rows = weight_rows;
  p.slices = (weight_rows + kSlice - 1) / kSlice;
  p.dtype = float_dtype(a.hidden);
  p.hidden = a.hidden.const_data_ptr();
  p.hidden_stride = a.hidden.stride(0);
  p.weight = weight.const_data_ptr();
  p.weight_stride = weight.stride(0);
  p.packed = packed;
  p.vocab_size = a.vocab_size.value_or(weight_rows);
  p.vocab_start = a.vocab_start;
  p.id_map = int_array(a.id_map);
  p.temperature = static_cast<const float*>(data_or_null(a.temperature));
  p.seeds = static_cast<const int64_t*>(data_or_null(a.seeds));
  p.positions = int_array(a.positions);
  p.purpose = a.stream == "target" ? 0 : 2;  // as numbered in mtp_kernels/ops/_exact.py
  return p;
}

}  // namespace mtp
