// Host side of the entry_hidden op on CPU; contract and reference: mtp_kernels/ops/entry_hidden.py.
#include <vector>

#include "entry_cpu_host.h"

namespace mtp {
namespace {

Tensor entry_hidden_cpu(Tensor hidden, std::vector<Tensor> hnorm_weights,
                        std::vector<Tensor> proj_weights, double hnorm_eps, int64_t gamma_offset,
                        bool hidden_first) {
  const Expect expect("entry_hidden", hidden);
  expect_model_dtype(expect, "hidden", hidden);
  expect.that(hidden.dim() == 2 && hidden.size(1) >= 1, "hidden expected shape [T, H >= 1], got ",
              shape_name(hidden.sizes()));
  expect.unit_stride("hidden", hidden);
  check_gamma_offset(expect, gamma_offset);
  expect.that(!proj_weights.empty(), "proj_weights expected one per layer, got none");
  expect.that(hnorm_weights.size() == proj_weights.size(), "hnorm_weights expected ",
              proj_weights.size(), ", one for each of proj_weights, got ", hnorm_weights.size());
  const ScalarType dtype = hidden.scalar_type();
  const int64_t rows = hidden.size(0), size = hidden.size(1);

  std::vector<HiddenLayer> layers;
  for (size_t i = 0; i < proj_weights.size(); ++i) {
    std::string norm_name = "hnorm_weights[", proj_name = "proj_weights[";
    norm_name += std::to_string(i) + "]";
    proj_name += std::to_string(i) + "]";
    const Norm hnorm = check_norm(expect, norm_name.c_str(), hnorm_weights[i], "hnorm_eps",
                                  hnorm_eps, gamma_offset, dtype, size);
    const Weight weight =
        check_half(expect, proj_name.c_str(), proj_weights[i], dtype, size, !hidden_first);
    layers.push_back({hnorm, weight, nullptr});
    const int64_t wanted = layers[0].weight.out_features;
    expect.that(weight.out_features == wanted, proj_name, " expected H_out = ", wanted, ", got ",
                weight.out_features);
  }
  const int64_t num_layers = static_cast<int64_t>(layers.size());
  const int64_t out_features = layers[0].weight.out_features;
  Tensor out = empty(hidden, {num_layers, rows, out_features}, ScalarType::Float);
  if (rows == 0 || out_features == 0) return out;

  const DType kind = float_dtype(hidden);
  Tensor normed = normed_workspace(hidden, kind, num_layers, rows, size);
  std::vector<Projection> projections;
  for (int64_t i = 0; i < num_layers; ++i) {
    layers[i].normed = torch::stable::select(normed, 0, i).mutable_data_ptr();
    void* part = static_cast<float*>(out.mutable_data_ptr()) + i * rows * out_features;
    projections.push_back({.rows = rows,
                           .inputs = size,
                           .dtype = kind,
                           .normed = layers[i].normed,
                           .weight = layers[i].weight,
                           .out = part,
                           .out_is_fp32 = true});
  }
  const EntryHiddenParams p{
      rows, size, kind, hidden.const_data_ptr(), hidden.stride(0), layers.data(), num_layers};
  torch::stable::parallel_for(
      0, rows, row_grain(num_layers * size),
      [&](int64_t begin, int64_t end) { entry_cpu_kernels().norm_hidden(p, begin, end); });
  project(projections.data(), num_layers);
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(mtp_kernels, CPU, m) {
  m.impl("entry_hidden", TORCH_BOX(&entry_hidden_cpu));
}

}  // namespace
}  // namespace mtp
