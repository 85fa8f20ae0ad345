// Host side of the head_argmax op on CPU; contract and reference: mtp_kernels/ops/head_argmax.py.
#include "head_argmax_cpu.h"

#include <algorithm>
#include <tuple>

#include "cpu_isa.h"
#include "head_argmax_args.h"

namespace mtp {
namespace {

const HeadArgmaxCpuKernels& kernels() {
  switch (cpu_isa()) {
#if defined(__x86_64__)
    case CpuIsa::amx:
      return head_argmax_cpu_amx;
    case CpuIsa::avx512_bf16:
      return head_argmax_cpu_avx512_bf16;
    case CpuIsa::avx512:
      return head_argmax_cpu_avx512;
    case CpuIsa::avx2:
      return head_argmax_cpu_avx2;
#endif
    default:
      return head_argmax_cpu_scalar;
  }
}

std::tuple<Tensor, Tensor> head_argmax_cpu(Tensor hidden, Tensor head_weight,
                                           std::optional<int64_t> vocab_size, int64_t vocab_start,
                                           OptionalTensor id_map, OptionalTensor temperature,
                                           OptionalTensor seeds, OptionalTensor positions,
                                           StringHandle stream) {
  HeadArgmaxParams p = check_head_argmax({hidden, head_weight, vocab_size, vocab_start, id_map,
                                          temperature, seeds, positions, take_string(stream)});
  Tensor values = empty(hidden, {p.slices, p.rows}, ScalarType::Float);
  Tensor ids = empty(hidden, {p.slices, p.rows}, ScalarType::Long);
  if (p.rows == 0) return {values, ids};

  const HeadArgmaxCpuKernels& k = kernels();
  Tensor inputs = empty(hidden, {k.inputs_bytes(p)}, ScalarType::Byte);
  p.inputs = inputs.mutable_data_ptr();
  p.values = static_cast<float*>(values.mutable_data_ptr());
  p.ids = static_cast<int64_t*>(ids.mutable_data_ptr());

  // Grains: about 10 us of work, below which a second thread costs more than it saves.
  torch::stable::parallel_for(0, p.rows, std::max<int64_t>(1, 32768 / p.hidden_size),
                              [&](int64_t begin, int64_t end) { k.lay_out(p, begin, end); });
  const int64_t slice_work = kSlice * p.hidden_size * std::min<int64_t>(p.rows, 16);
  torch::stable::parallel_for(0, p.slices, std::max<int64_t>(1, (1 << 18) / slice_work),
                              [&](int64_t begin, int64_t end) { k.slices(p, begin, end); });
  return {values, ids};
}

STABLE_TORCH_LIBRARY_IMPL(mtp_kernels, CPU, m) {
  m.impl("head_argmax", TORCH_BOX(&head_argmax_cpu));
}

}  // namespace
}  // namespace mtp
