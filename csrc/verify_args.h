// The verify op's arguments, checked and turned into VerifyParams; for the CPU and CUDA host code.
// The argument order is that of the schema, which is mtp_kernels/ops/verify.py; `_check` there says
// the same in Python.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <utility>

#include "common.h"
#include "verify.h"

namespace mtp {

struct VerifyArgs {
  Tensor logits, draft_ids, cu_rows, positions, temperature, seeds;
  OptionalTensor top_k, top_p, min_p, draft_logits, draft_rows;
  std::string draft_kind;
  OptionalTensor allowed_mask, bias_ids, bias_values, penalty_rows, output_counts, prompt_mask,
      presence_penalty, frequency_penalty, repetition_penalty, synthetic_rates;
  std::string method, stream;
};

template <typename Value, size_t kChoices>
Value one_of(const char* name, const std::string& got,
             const std::pair<const char*, Value> (&choices)[kChoices]) {
  for (const auto& [choice, value] : choices)
    if (got == choice) return value;
  std::string names;
  for (const auto& [choice, value] : choices)
    names += (names.empty() ? "" : ", ") + std::string(choice);
  fail("verify: ", name, " expected one of ", names, ", got '", got, "'");
}

inline void expect_matrix(const Expect& expect, const char* name, const Tensor& x,
                          std::initializer_list<ScalarType> dtypes, int64_t columns) {
  expect.device(name, x);
  expect.dtype(name, x, dtypes);
  if (x.dim() != 2 || x.size(1) != columns)
    fail("verify: ", name, " expected shape [rows, ", columns, "], got ", shape_name(x.sizes()));
  expect.unit_stride(name, x);
}

inline IntArray int_array(const Tensor& x) {
  return {x.const_data_ptr(), x.scalar_type() == ScalarType::Long};
}

template <typename T>
const T* pointer(const OptionalTensor& x) {
  return static_cast<const T*>(data_or_null(x));
}

// Everything but the outputs is filled in.
inline VerifyParams check_verify(const VerifyArgs& a) {
  VerifyParams p{};
  const Expect expect("verify", a.logits);
  const auto floats = {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float};
  const auto ints = {ScalarType::Int, ScalarType::Long};

  p.method = one_of<Method>("method", a.method,
                            {{"standard", Method::standard},
                             {"block", Method::block},
                             {"coupled", Method::coupled},
                             {"synthetic", Method::synthetic}});
  p.stream =
      one_of<Purpose>("stream", a.stream, {{"target", Purpose::target}, {"draft", Purpose::draft}});
  p.draft_kind = one_of<DraftKind>("draft_kind", a.draft_kind,
                                   {{"logits", DraftKind::logits},
                                    {"filtered_logits", DraftKind::filtered_logits},
                                    {"probs", DraftKind::probs}});
  expect.dtype("logits", a.logits, floats);
  if (a.logits.dim() != 2 || a.logits.size(1) < 1)
    fail("verify: logits expected shape [R, V >= 1], got ", shape_name(a.logits.sizes()));
  expect.unit_stride("logits", a.logits);
  const int64_t rows = p.rows = a.logits.size(0);
  const int64_t vocab = p.vocab = a.logits.size(1);
  const int64_t words = (vocab + 31) / 32;
  p.logits = a.logits.const_data_ptr();
  p.logits_stride = a.logits.stride(0);
  p.logits_dtype = float_dtype(a.logits);

  if (a.draft_ids.dim() != 2)
    fail("verify: draft_ids expected [B, K], got ", shape_name(a.draft_ids.sizes()));
  const int64_t requests = p.requests = a.draft_ids.size(0);
  const int64_t drafts = p.drafts = a.draft_ids.size(1);
  expect.tensor("draft_ids", a.draft_ids, ints, {requests, drafts});
  expect.tensor("cu_rows", a.cu_rows, ints, {requests + 1});
  expect.tensor("positions", a.positions, ints, {rows});
  expect.tensor("temperature", a.temperature, {ScalarType::Float}, {requests});
  expect.tensor("seeds", a.seeds, {ScalarType::Long}, {requests});
  p.draft_ids = int_array(a.draft_ids);
  p.draft_ids_stride = a.draft_ids.stride(0);
  p.cu_rows = int_array(a.cu_rows);
  p.positions = int_array(a.positions);
  p.temperature = static_cast<const float*>(a.temperature.const_data_ptr());
  p.seeds = static_cast<const int64_t*>(a.seeds.const_data_ptr());

  const auto per_request = [&](const char* name, const OptionalTensor& x) {
    if (x) expect.tensor(name, *x, {ScalarType::Float}, {requests});
    return pointer<float>(x);
  };
  if (a.top_k) {
    expect.tensor("top_k", *a.top_k, ints, {requests});
    p.top_k = int_array(*a.top_k);
  }
  p.top_p = per_request("top_p", a.top_p);
  p.min_p = per_request("min_p", a.min_p);
  p.presence_penalty = per_request("presence_penalty", a.presence_penalty);
  p.frequency_penalty = per_request("frequency_penalty", a.frequency_penalty);
  p.repetition_penalty = per_request("repetition_penalty", a.repetition_penalty);

  if (a.draft_logits) {
    expect_matrix(expect, "draft_logits", *a.draft_logits, floats, vocab);
    p.draft_logits = a.draft_logits->const_data_ptr();
    p.draft_logits_rows = a.draft_logits->size(0);
    p.draft_logits_stride = a.draft_logits->stride(0);
    p.draft_logits_dtype = float_dtype(*a.draft_logits);
  }
  if (a.draft_rows) {
    expect.tensor("draft_rows", *a.draft_rows, ints, {requests, drafts});
    p.draft_rows = int_array(*a.draft_rows);
    p.draft_rows_stride = a.draft_rows->stride(0);
  }
  if (a.allowed_mask) {
    expect.tensor("allowed_mask", *a.allowed_mask, {ScalarType::Int}, {rows, words});
    p.allowed_mask = pointer<int32_t>(a.allowed_mask);
    p.allowed_mask_stride = a.allowed_mask->stride(0);
  }
  if (a.bias_ids.has_value() != a.bias_values.has_value())
    fail("verify: bias_ids and bias_values expected both or neither");
  if (a.bias_ids) {
    if (a.bias_ids->dim() != 2)
      fail("verify: bias_ids expected [B, M], got ", shape_name(a.bias_ids->sizes()));
    p.biases = a.bias_ids->size(1);
    expect.tensor("bias_ids", *a.bias_ids, {ScalarType::Int}, {requests, p.biases});
    expect.tensor("bias_values", *a.bias_values, {ScalarType::Float}, {requests, p.biases});
    p.bias_ids = pointer<int32_t>(a.bias_ids);
    p.bias_ids_stride = a.bias_ids->stride(0);
    p.bias_values = pointer<float>(a.bias_values);
    p.bias_values_stride = a.bias_values->stride(0);
  }

  const std::array<std::pair<const char*, bool>, 6> penalties = {{
      {"penalty_rows", a.penalty_rows.has_value()},
      {"output_counts", a.output_counts.has_value()},
      {"prompt_mask", a.prompt_mask.has_value()},
      {"presence_penalty", a.presence_penalty.has_value()},
      {"frequency_penalty", a.frequency_penalty.has_value()},
      {"repetition_penalty", a.repetition_penalty.has_value()},
  }};
  const auto given = std::count_if(penalties.begin(), penalties.end(),
                                   [](const auto& penalty) { return penalty.second; });
  if (given != 0 && given != static_cast<ptrdiff_t>(penalties.size())) {
    std::string all, missing;
    for (const auto& [name, is_given] : penalties) {
      all += (all.empty() ? "" : ", ") + std::string(name);
      if (!is_given) missing += (missing.empty() ? "" : ", ") + std::string(name);
    }
    fail("verify: penalties expected all of ", all, ", got no ", missing);
  }
  if (given != 0) {
    expect.tensor("penalty_rows", *a.penalty_rows, ints, {requests});
    expect_matrix(expect, "output_counts", *a.output_counts, {ScalarType::Int}, vocab);
    p.penalty_states = a.output_counts->size(0);
    expect.tensor("prompt_mask", *a.prompt_mask, {ScalarType::Int}, {p.penalty_states, words});
    p.penalty_rows = int_array(*a.penalty_rows);
    p.output_counts = pointer<int32_t>(a.output_counts);
    p.output_counts_stride = a.output_counts->stride(0);
    p.prompt_mask = pointer<int32_t>(a.prompt_mask);
    p.prompt_mask_stride = a.prompt_mask->stride(0);
  }

  if (a.synthetic_rates.has_value() != (p.method == Method::synthetic))
    fail("verify: synthetic_rates expected exactly with method \"synthetic\"");
  if (a.synthetic_rates) {
    expect.tensor("synthetic_rates", *a.synthetic_rates, {ScalarType::Float}, {drafts});
    p.synthetic_rates = pointer<float>(a.synthetic_rates);
  }
  return p;
}

// The op. run(parameters, logits) fills the outputs.
template <auto run>
std::tuple<Tensor, Tensor, Tensor> verify_op(
    Tensor logits, Tensor draft_ids, Tensor cu_rows, Tensor positions, Tensor temperature,
    Tensor seeds, OptionalTensor top_k, OptionalTensor top_p, OptionalTensor min_p,
    OptionalTensor draft_logits, OptionalTensor draft_rows, StringHandle draft_kind,
    OptionalTensor allowed_mask, OptionalTensor bias_ids, OptionalTensor bias_values,
    OptionalTensor penalty_rows, OptionalTensor output_counts, OptionalTensor prompt_mask,
    OptionalTensor presence_penalty, OptionalTensor frequency_penalty,
    OptionalTensor repetition_penalty, OptionalTensor synthetic_rates, StringHandle method,
    StringHandle stream) {
  VerifyParams p = check_verify({logits,
                                 draft_ids,
                                 cu_rows,
                                 positions,
                                 temperature,
                                 seeds,
                                 top_k,
                                 top_p,
                                 min_p,
                                 draft_logits,
                                 draft_rows,
                                 take_string(draft_kind),
                                 allowed_mask,
                                 bias_ids,
                                 bias_values,
                                 penalty_rows,
                                 output_counts,
                                 prompt_mask,
                                 presence_penalty,
                                 frequency_penalty,
                                 repetition_penalty,
                                 synthetic_rates,
                                 take_string(method),
                                 take_string(stream)});
  Tensor token_ids = empty(logits, {p.requests, p.drafts + 1}, ScalarType::Long);
  Tensor num_accepted = empty(logits, {p.requests}, ScalarType::Int);
  Tensor status = empty(logits, {p.requests}, ScalarType::Int);
  p.token_ids = static_cast<int64_t*>(token_ids.mutable_data_ptr());
  p.num_accepted = static_cast<int32_t*>(num_accepted.mutable_data_ptr());
  p.status = static_cast<int32_t*>(status.mutable_data_ptr());
  run(p, logits);
  return {token_ids, num_accepted, status};
}

}  // namespace mtp
