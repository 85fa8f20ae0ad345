// The entry op's arguments, checked and turned into EntryParams; for the CPU and CUDA host code.
// The argument order is that of the schema, which is mtp_kernels/ops/entry.py.
#pragma once

#include <algorithm>
#include <cmath>

#include "common.h"
#include "entry.h"

namespace mtp {

constexpr int64_t kPanel = 16;  // output features of one panel of a packed projection

struct EntryArgs {
  Tensor hidden, enorm_weight, hnorm_weight, proj_weight;
  OptionalTensor input_ids, embed_weight, inputs_embeds, proj_bias, positions, embed_norm_weight;
  double enorm_eps, hnorm_eps, embed_norm_eps;
  int64_t gamma_offset;
  bool hidden_first, zero_at_position_0;
  int64_t vocab_start;
  bool strict_ids;
};

// [T] values, one per row of hidden; a single row may come without its T axis.
inline void expect_per_row(const Expect& expect, const char* name, const Tensor& tensor,
                           int64_t rows, bool single) {
  expect.device(name, tensor);
  expect.dtype(name, tensor, {ScalarType::Int, ScalarType::Long});
  if (single && tensor.dim() == 0) return;
  expect.shape(name, tensor, {rows});
  expect.unit_stride(name, tensor);
}

inline void expect_eps(const char* name, double eps) {
  if (!(std::isfinite(eps) && eps >= 0))
    fail("entry: ", name, " expected a finite number >= 0, got ", eps);
}

// Everything but `normed`, `normed_stride` and `out` is filled in.
inline EntryParams check_entry(const EntryArgs& a) {
  const Expect expect("entry", a.hidden);
  expect.dtype("hidden", a.hidden, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
  const int64_t dim = a.hidden.dim();
  if (dim != 1 && dim != 2)
    fail("entry: hidden expected shape [T, H] or [H], got ", shape_name(a.hidden.sizes()));
  if (a.hidden.size(dim - 1) < 1)
    fail("entry: hidden expected H >= 1, got ", shape_name(a.hidden.sizes()));
  expect.unit_stride("hidden", a.hidden);
  const bool single = dim == 1;
  const ScalarType dtype = a.hidden.scalar_type();
  const int64_t rows = single ? 1 : a.hidden.size(0);
  const int64_t hidden_size = a.hidden.size(dim - 1);

  expect.tensor("enorm_weight", a.enorm_weight, {dtype}, {hidden_size});
  expect.tensor("hnorm_weight", a.hnorm_weight, {dtype}, {hidden_size});

  expect.device("proj_weight", a.proj_weight);
  expect.dtype("proj_weight", a.proj_weight, {dtype});
  const bool packed = a.proj_weight.dim() == 4;
  const bool proj_fits = packed
                             ? a.proj_weight.size(1) == hidden_size &&
                                   a.proj_weight.size(2) == kPanel && a.proj_weight.size(3) == 2
                             : a.proj_weight.dim() == 2 && a.proj_weight.size(1) == 2 * hidden_size;
  if (!proj_fits)
    fail("entry: proj_weight expected shape [H_out, ", 2 * hidden_size, "] or packed [H_out/16, ",
         hidden_size, ", 16, 2], got ", shape_name(a.proj_weight.sizes()));
  if (packed) {
    expect.dtype("packed proj_weight", a.proj_weight, {ScalarType::BFloat16});
    if (!a.proj_weight.is_contiguous())
      fail("entry: packed proj_weight expected a contiguous tensor");
  } else {
    expect.unit_stride("proj_weight", a.proj_weight);
  }
  const int64_t out_features = a.proj_weight.size(0) * (packed ? kPanel : 1);
  if (a.proj_bias) expect.tensor("proj_bias", *a.proj_bias, {dtype}, {out_features});

  if (a.input_ids.has_value() == a.inputs_embeds.has_value())
    fail("entry: expected exactly one of input_ids and inputs_embeds, got ",
         a.input_ids ? "both" : "neither");
  if (a.input_ids.has_value() != a.embed_weight.has_value())
    fail("entry: embed_weight expected ", a.input_ids ? "a table for input_ids" : "None", ", got ",
         a.input_ids ? "None" : "a table beside inputs_embeds");
  if (a.input_ids) {
    expect_per_row(expect, "input_ids", *a.input_ids, rows, single);
    const Tensor& table = *a.embed_weight;
    expect.device("embed_weight", table);
    expect.dtype("embed_weight", table, {dtype});
    if (table.dim() != 2 || table.size(0) < 1 || table.size(1) != hidden_size)
      fail("entry: embed_weight expected shape [V >= 1, ", hidden_size, "], got ",
           shape_name(table.sizes()));
    expect.unit_stride("embed_weight", table);
  } else if (single && a.inputs_embeds->dim() == 1) {
    expect.tensor("inputs_embeds", *a.inputs_embeds, {dtype}, {hidden_size});
  } else {
    expect.tensor("inputs_embeds", *a.inputs_embeds, {dtype}, {rows, hidden_size});
  }
  if (a.embed_norm_weight)
    expect.tensor("embed_norm_weight", *a.embed_norm_weight, {dtype}, {hidden_size});
  if (a.positions) expect_per_row(expect, "positions", *a.positions, rows, single);
  if (a.zero_at_position_0 && !a.positions)
    fail("entry: positions expected a tensor with zero_at_position_0, got None");
  expect_eps("enorm_eps", a.enorm_eps);
  expect_eps("hnorm_eps", a.hnorm_eps);
  expect_eps("embed_norm_eps", a.embed_norm_eps);
  if (a.vocab_start < 0)  // id - vocab_start must not overflow
    fail("entry: vocab_start expected a number >= 0, got ", a.vocab_start);
  if (a.gamma_offset != 0 && a.gamma_offset != 1)
    fail("entry: gamma_offset expected 0 or 1, got ", a.gamma_offset);

  const Tensor& embeds = a.input_ids ? *a.embed_weight : *a.inputs_embeds;
  const bool masks = a.zero_at_position_0;
  EntryParams p{};
  p.rows = rows;
  p.hidden_size = hidden_size;
  p.out_features = out_features;
  p.dtype = float_dtype(a.hidden);
  p.hidden = a.hidden.const_data_ptr();
  p.hidden_stride = single ? hidden_size : a.hidden.stride(0);
  p.embeds = embeds.const_data_ptr();
  p.embeds_stride = embeds.dim() == 1 ? hidden_size : embeds.stride(0);
  p.ids = data_or_null(a.input_ids);
  p.ids_are_int64 = a.input_ids && a.input_ids->scalar_type() == ScalarType::Long;
  p.vocab_start = a.vocab_start;
  p.vocab_rows = a.input_ids ? embeds.size(0) : 0;
  p.positions = masks ? a.positions->const_data_ptr() : nullptr;
  p.positions_are_int64 = masks && a.positions->scalar_type() == ScalarType::Long;
  p.enorm_weight = a.enorm_weight.const_data_ptr();
  p.hnorm_weight = a.hnorm_weight.const_data_ptr();
  p.embed_norm_weight = data_or_null(a.embed_norm_weight);
  p.enorm_eps = static_cast<float>(a.enorm_eps);
  p.hnorm_eps = static_cast<float>(a.hnorm_eps);
  p.embed_norm_eps = static_cast<float>(a.embed_norm_eps);
  p.zero_centered = a.gamma_offset == 1;
  p.hidden_first = a.hidden_first;
  p.proj_weight = a.proj_weight.const_data_ptr();
  p.proj_stride = packed ? 0 : a.proj_weight.stride(0);
  p.packed = packed;
  p.proj_bias = data_or_null(a.proj_bias);
  return p;
}

}  // namespace mtp
