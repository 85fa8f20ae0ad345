// What the host sides of the entry ops on CPU share.
#pragma once

#include "entry_args.h"
#include "entry_cpu.h"

namespace mtp {

// Grains: about 10 us of work, below which a second thread costs more than it saves.
inline int64_t row_grain(int64_t elements) { return std::max<int64_t>(1, 65536 / elements); }

inline void check_ids(const char* op, const Lookup& lookup, int64_t rows) {
  for (int64_t t = 0; t < rows; ++t) {
    const int64_t id = lookup.ids.are_int64 ? static_cast<const int64_t*>(lookup.ids.data)[t]
                                            : static_cast<const int32_t*>(lookup.ids.data)[t];
    if (id < lookup.vocab_start || id - lookup.vocab_start >= lookup.vocab_rows)
      fail(op, ": input_ids expected ids in [", lookup.vocab_start, ", ",
           lookup.vocab_start + lookup.vocab_rows, "), got ", id, " at row ", t);
  }
}

// `count` normed activations [rows, inputs], inputs padded.
inline Tensor normed_workspace(const Tensor& like, DType dtype, int64_t count, int64_t rows,
                               int64_t inputs) {
  const int64_t stride = (inputs + kNormedMultiple - 1) / kNormedMultiple * kNormedMultiple;
  const bool is_bf16 = entry_cpu_kernels().normed_is_bf16(dtype);
  return empty(like, {count, rows, stride}, is_bf16 ? ScalarType::BFloat16 : ScalarType::Float);
}

// `count` projections of the same sizes, in one parallel loop.
inline void project(const Projection* projections, int64_t count) {
  const Projection& p = projections[0];
  const int64_t panels = (p.weight.out_features + kPanel - 1) / kPanel;
  const int64_t panel_work = kPanel * p.inputs * std::min<int64_t>(p.rows, 16);
  const auto some = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin / panels; i * panels < end; ++i)
      entry_cpu_kernels().project_panels(projections[i], std::max<int64_t>(0, begin - i * panels),
                                         std::min(panels, end - i * panels));
  };
  const int64_t grain = std::max<int64_t>(1, (1 << 18) / panel_work);
  torch::stable::parallel_for(0, count * panels, grain, some);
}

// entry and entry_embed. `out`: [T, H_out], or [H_out] of the only row.
inline void norm_and_project(EntryParams p, const Tensor& out) {
  if (p.rows == 0 || p.proj.out_features == 0) return;
  const int64_t inputs = p.hidden ? 2 * p.hidden_size : p.hidden_size;
  Tensor normed = normed_workspace(out, p.dtype, 1, p.rows, inputs);
  p.normed = normed.mutable_data_ptr();
  torch::stable::parallel_for(0, p.rows, row_grain(inputs), [&](int64_t begin, int64_t end) {
    entry_cpu_kernels().norm_rows(p, begin, end);
  });
  const Projection projection{.rows = p.rows,
                              .inputs = inputs,
                              .dtype = p.dtype,
                              .normed = p.normed,
                              .weight = p.proj,
                              .hidden_part = p.hidden_part,
                              .hidden_part_stride = p.hidden_part_stride,
                              .bias = p.proj_bias,
                              .out = out.mutable_data_ptr()};
  project(&projection, 1);
}

}  // namespace mtp
