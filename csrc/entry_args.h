// The arguments of the entry ops, checked and turned into parameters; for the CPU and CUDA host
// code. Checks of the same name, with the same messages, are in mtp_kernels/ops/entry.py.
#pragma once

#include <algorithm>
#include <cmath>

#include "common.h"
#include "entry.h"

namespace mtp {

constexpr int64_t kPanel = 16;  // output features of one panel of a packed projection

// How many tokens; `single`: one, which may come without its T axis.
struct Rows {
  int64_t count;
  bool single = false;
};

struct LookupArgs {
  OptionalTensor input_ids, positions;
  bool zero_at_position_0;
  int64_t vocab_start;
};

struct EmbeddingArgs {
  LookupArgs lookup;
  OptionalTensor embed_weight, inputs_embeds, embed_norm_weight;
  Tensor enorm_weight;
  double enorm_eps, embed_norm_eps;
};

struct EntryArgs {
  Tensor hidden, hnorm_weight, proj_weight;
  OptionalTensor proj_bias;
  EmbeddingArgs embedding;
  double hnorm_eps;
  int64_t gamma_offset;
  bool hidden_first;
};

inline void expect_model_dtype(const Expect& expect, const char* name, const Tensor& tensor) {
  expect.dtype(name, tensor, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
}

// [T] integers.
inline IntArray check_per_row(const Expect& expect, const char* name, const Tensor& tensor,
                              Rows rows) {
  expect.device(name, tensor);
  expect.dtype(name, tensor, {ScalarType::Int, ScalarType::Long});
  if (!(rows.single && tensor.dim() == 0)) {
    expect.shape(name, tensor, {rows.count});
    expect.unit_stride(name, tensor);
  }
  return {tensor.const_data_ptr(), tensor.scalar_type() == ScalarType::Long};
}

inline void check_gamma_offset(const Expect& expect, int64_t gamma_offset) {
  expect.that(gamma_offset == 0 || gamma_offset == 1, "gamma_offset expected 0 or 1, got ",
              gamma_offset);
}

inline Norm check_norm(const Expect& expect, const char* name, const OptionalTensor& weight,
                       const char* eps_name, double eps, int64_t gamma_offset, ScalarType dtype,
                       int64_t size) {
  if (weight) expect.tensor(name, *weight, {dtype}, {size});
  expect.that(std::isfinite(eps) && eps >= 0, eps_name, " expected a finite number >= 0, got ",
              eps);
  return {data_or_null(weight), static_cast<float>(eps), gamma_offset == 1};
}

inline Weight check_projection(const Expect& expect, const char* name, const Tensor& weight,
                               ScalarType dtype, int64_t size) {
  expect.device(name, weight);
  expect.dtype(name, weight, {dtype});
  const bool packed = weight.dim() == 4;
  const bool fits = packed
                        ? weight.size(1) == size && weight.size(2) == kPanel && weight.size(3) == 2
                        : weight.dim() == 2 && weight.size(1) == 2 * size;
  expect.that(fits, name, " expected shape [H_out, ", 2 * size, "] or packed [H_out/16, ", size,
              ", 16, 2], got ", shape_name(weight.sizes()));
  if (packed) {
    expect.dtype((std::string("packed ") + name).c_str(), weight, {ScalarType::BFloat16});
    expect.that(weight.is_contiguous(), "packed ", name, " expected a contiguous tensor");
  } else {
    expect.unit_stride(name, weight);
  }
  return {weight.const_data_ptr(), weight.size(0) * (packed ? kPanel : 1),
          packed ? kPanel * 2 * size : weight.stride(0), packed};
}

// The half of a projection that multiplies the hidden state, or the embedding.
inline Weight check_half(const Expect& expect, const char* name, const Tensor& weight,
                         ScalarType dtype, int64_t size, bool second) {
  Weight half = check_projection(expect, name, weight, dtype, size);
  // Inputs are packed in pairs.
  expect.that(!half.packed || size % 2 == 0, "packed ", name, " expected an even H, got ", size);
  const int64_t element = dtype == ScalarType::Float ? 4 : 2;
  if (second)
    half.data = static_cast<const char*>(half.data) + size * (half.packed ? kPanel : 1) * element;
  return half;
}

// `table`: [V, columns] with input_ids, else [T, columns].
inline Lookup check_lookup(const Expect& expect, const LookupArgs& a, const char* name,
                           const Tensor& table, ScalarType dtype, int64_t columns, Rows rows) {
  Lookup lookup{};
  if (a.input_ids) {
    lookup.ids = check_per_row(expect, "input_ids", *a.input_ids, rows);
    expect.device(name, table);
    expect.dtype(name, table, {dtype});
    expect.that(table.dim() == 2 && table.size(0) >= 1 && table.size(1) == columns, name,
                " expected shape [V >= 1, ", columns, "], got ", shape_name(table.sizes()));
    expect.unit_stride(name, table);
    lookup.vocab_rows = table.size(0);
  } else if (rows.single && table.dim() == 1) {
    expect.tensor(name, table, {dtype}, {columns});
  } else {
    expect.tensor(name, table, {dtype}, {rows.count, columns});
  }
  if (a.positions) {
    const IntArray positions = check_per_row(expect, "positions", *a.positions, rows);
    if (a.zero_at_position_0) lookup.positions = positions;
  }
  expect.that(a.positions || !a.zero_at_position_0,
              "positions expected a tensor with zero_at_position_0, got None");
  // id - vocab_start must not overflow
  expect.that(a.vocab_start >= 0, "vocab_start expected a number >= 0, got ", a.vocab_start);
  lookup.table = table.const_data_ptr();
  lookup.stride = table.dim() == 1 ? columns : table.stride(0);
  lookup.vocab_start = a.vocab_start;
  return lookup;
}

inline Embedding check_embedding(const Expect& expect, const EmbeddingArgs& a, int64_t gamma_offset,
                                 ScalarType dtype, int64_t size, Rows rows) {
  Embedding embedding{};
  embedding.enorm = check_norm(expect, "enorm_weight", a.enorm_weight, "enorm_eps", a.enorm_eps,
                               gamma_offset, dtype, size);
  embedding.embed_norm = check_norm(expect, "embed_norm_weight", a.embed_norm_weight,
                                    "embed_norm_eps", a.embed_norm_eps, gamma_offset, dtype, size);
  const bool has_ids = a.lookup.input_ids.has_value();
  expect.that(has_ids != a.inputs_embeds.has_value(),
              "expected exactly one of input_ids and inputs_embeds, got ",
              has_ids ? "both" : "neither");
  expect.that(
      has_ids == a.embed_weight.has_value(), "embed_weight expected ",
      has_ids ? "a table for input_ids, got None" : "None, got a table beside inputs_embeds");
  embedding.lookup = check_lookup(expect, a.lookup, has_ids ? "embed_weight" : "inputs_embeds",
                                  has_ids ? *a.embed_weight : *a.inputs_embeds, dtype, size, rows);
  return embedding;
}

// Of entry_embed and entry_lookup.
inline Rows check_hidden_part(const Expect& expect, const Tensor& hidden_part) {
  expect.dtype("hidden_part", hidden_part, {ScalarType::Float});
  expect.that(hidden_part.dim() == 2, "hidden_part expected shape [T, H_out], got ",
              shape_name(hidden_part.sizes()));
  expect.unit_stride("hidden_part", hidden_part);
  return {hidden_part.size(0)};
}

// Everything but `normed`, `normed_stride` and `out` is filled in.
inline EntryParams check_entry(const EntryArgs& a) {
  const Expect expect("entry", a.hidden);
  expect_model_dtype(expect, "hidden", a.hidden);
  const int64_t dim = a.hidden.dim();
  expect.that(dim == 1 || dim == 2, "hidden expected shape [T, H] or [H], got ",
              shape_name(a.hidden.sizes()));
  expect.that(a.hidden.size(dim - 1) >= 1, "hidden expected H >= 1, got ",
              shape_name(a.hidden.sizes()));
  expect.unit_stride("hidden", a.hidden);
  check_gamma_offset(expect, a.gamma_offset);
  const ScalarType dtype = a.hidden.scalar_type();
  const int64_t size = a.hidden.size(dim - 1);
  const Rows rows{dim == 1 ? 1 : a.hidden.size(0), dim == 1};

  EntryParams p{};
  p.rows = rows.count;
  p.hidden_size = size;
  p.dtype = float_dtype(a.hidden);
  p.hidden = a.hidden.const_data_ptr();
  p.hidden_stride = rows.single ? size : a.hidden.stride(0);
  p.hidden_first = a.hidden_first;
  p.embedding = check_embedding(expect, a.embedding, a.gamma_offset, dtype, size, rows);
  p.hnorm = check_norm(expect, "hnorm_weight", a.hnorm_weight, "hnorm_eps", a.hnorm_eps,
                       a.gamma_offset, dtype, size);
  p.proj = check_projection(expect, "proj_weight", a.proj_weight, dtype, size);
  if (a.proj_bias) expect.tensor("proj_bias", *a.proj_bias, {dtype}, {p.proj.out_features});
  p.proj_bias = data_or_null(a.proj_bias);
  return p;
}

}  // namespace mtp
