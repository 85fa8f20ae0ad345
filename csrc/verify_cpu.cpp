// Host side of the verify op on CPU; contract and reference: mtp_kernels/ops/verify.py.
#include "verify_cpu.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "cpu_isa.h"
#include "verify_args.h"

namespace mtp {

const VerifyCpuKernels& verify_cpu_kernels() {
  switch (cpu_isa()) {
#if defined(__x86_64__)
    case CpuIsa::amx:
    case CpuIsa::avx512_bf16:
      return verify_cpu_avx512_bf16;
    case CpuIsa::avx512:
      return verify_cpu_avx512;
    case CpuIsa::avx2:
      return verify_cpu_avx2;
#endif
    default:
      return verify_cpu_scalar;
  }
}

namespace {

int64_t at(const IntArray& values, int64_t i) {
  return values.are_int64 ? static_cast<const int64_t*>(values.data)[i]
                          : static_cast<const int32_t*>(values.data)[i];
}

void check_cu_rows(const VerifyParams& p) {
  int64_t start = at(p.cu_rows, 0);
  if (start != 0) fail("verify: cu_rows expected to start at 0, got ", start);
  for (int64_t b = 0; b < p.requests; ++b) {
    const int64_t end = at(p.cu_rows, b + 1);
    if (end <= start || end > start + p.drafts + 1)
      fail("verify: cu_rows expected 1 to ", p.drafts + 1, " rows per request, got ", end - start,
           " for request ", b);
    start = end;
  }
  if (start > p.rows)
    fail("verify: cu_rows expected to end within the ", p.rows, " rows of logits, got ", start);
}

template <typename Inside>
void check_values(const char* name, const char* wanted, const float* values, int64_t n,
                  Inside inside) {
  for (int64_t i = 0; values && i < n; ++i) {
    const float got = values[i];
    if (inside(got)) continue;
    if (std::isnan(got))
      fail("verify: ", name, " expected ", wanted, ", got nan at index ", i);
    else
      fail("verify: ", name, " expected ", wanted, ", got ", got, " at index ", i);
  }
}

void check_values(const VerifyParams& p) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const int64_t b = p.requests;
  const auto share = [](float x) { return x >= 0 && x <= 1; };
  const auto finite = [](float x) { return std::isfinite(x); };
  check_cu_rows(p);
  check_values("temperature", "a finite number >= 0", p.temperature, b,
               [](float x) { return x >= 0 && x < infinity; });
  check_values("synthetic_rates", "a number in [0, 1]", p.synthetic_rates, p.drafts, share);
  for (int64_t i = 0; p.top_k.data && i < b; ++i)
    if (at(p.top_k, i) < 0)
      fail("verify: top_k expected a number >= 0, got ", static_cast<double>(at(p.top_k, i)),
           " at index ", i);
  check_values("top_p", "a number in (0, 1]", p.top_p, b, [](float x) { return x > 0 && x <= 1; });
  check_values("min_p", "a number in [0, 1]", p.min_p, b, share);
  check_values("presence_penalty", "a finite number", p.presence_penalty, b, finite);
  check_values("frequency_penalty", "a finite number", p.frequency_penalty, b, finite);
  check_values("repetition_penalty", "a finite number > 0", p.repetition_penalty, b,
               [](float x) { return x > 0 && x < infinity; });
}

// Lanes of the scan that take about 10 us, below which a second thread costs more than it saves.
int64_t grain_lanes(Method method) { return method == Method::coupled ? 1 << 14 : 1 << 16; }

void run(const VerifyParams& p, const Tensor&) {
  check_values(p);
  const VerifyCpuKernels& k = verify_cpu_kernels();
  const int64_t rows = at(p.cu_rows, p.requests);
  const int64_t draft_laws = p.draft_logits ? p.requests * p.drafts : 0;
  VerifyWorkspace w{};
  w.blocks = (p.vocab + kBlock - 1) / kBlock;
  w.chunks = (p.vocab + kChunk - 1) / kChunk;

  // Left uninitialised: every element is written before it is read.
  const std::unique_ptr<Progress[]> progress(new Progress[p.requests]);
  const std::unique_ptr<Law[]> laws(new Law[rows + draft_laws]);
  const std::unique_ptr<Block[]> blocks(new Block[(rows + draft_laws) * w.blocks]);
  const std::unique_ptr<float[]> maxima(new float[has_filters(p) ? p.requests * 2 * w.chunks : 0]);
  const std::unique_ptr<int64_t[]> masses(new int64_t[p.requests * w.blocks]);
  const std::unique_ptr<int64_t[]> active(new int64_t[p.requests]);
  const std::unique_ptr<Law*[]> scanned(new Law*[2 * p.requests]);
  w.progress = progress.get();
  w.targets = laws.get();
  w.drafts = laws.get() + rows;
  w.target_blocks = blocks.get();
  w.draft_blocks = blocks.get() + rows * w.blocks;
  w.chunk_maxima = maxima.get();
  w.residual_masses = masses.get();
  w.active = active.get();
  w.laws = scanned.get();

  const int64_t scan_grain =
      std::max<int64_t>(1, grain_lanes(p.method) / std::min(p.vocab, kBlock));
  const int64_t judge_grain = has_filters(p) || p.draft_logits ? 1 : 8;
  for (int64_t i = 0;; ++i) {
    k.plan(p, w, i);
    if (w.num_active == 0) return;
    torch::stable::parallel_for(0, w.num_laws * w.blocks, scan_grain,
                                [&](int64_t begin, int64_t end) { k.scan(p, w, begin, end); });
    torch::stable::parallel_for(0, w.num_active, judge_grain,
                                [&](int64_t begin, int64_t end) { k.judge(p, w, i, begin, end); });
  }
}

STABLE_TORCH_LIBRARY_IMPL(mtp_kernels, CPU, m) { m.impl("verify", TORCH_BOX(&verify_op<&run>)); }

}  // namespace
}  // namespace mtp
