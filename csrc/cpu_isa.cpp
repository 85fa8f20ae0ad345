#include "cpu_isa.h"

#include <atomic>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mtp {
namespace {

struct Row {
  CpuIsa isa;
  const char* name;
};

constexpr Row kRows[] = {
    {CpuIsa::scalar, "scalar"},
    {CpuIsa::avx2, "avx2"},
    {CpuIsa::avx512, "avx512"},
    {CpuIsa::avx512_bf16, "avx512_bf16"},
    // For packed weights; all else is as with avx512_bf16.
    {CpuIsa::amx, "amx"},
};

#if defined(MTP_EMULATE_AMX)
bool has_amx() { return true; }
#elif defined(__x86_64__) && defined(__linux__)
// Linux gives a process the tile registers when it asks for them; a sandbox may refuse.
bool has_amx() {
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kAmxBf16) || !(d & kAmxTile)) return false;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}
#else
bool has_amx() { return false; }
#endif

// Each level includes the ones below it; __builtin_cpu_supports also asks the operating system.
bool runs_here(CpuIsa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  switch (isa) {
    case CpuIsa::scalar:
      return true;
    case CpuIsa::avx2:
      return avx2;
    case CpuIsa::avx512:
      return avx512;
    case CpuIsa::avx512_bf16:
      return avx512 && __builtin_cpu_supports("avx512bf16");
    case CpuIsa::amx:
      return avx512 && __builtin_cpu_supports("avx512bf16") && has_amx();
  }
  return false;
#else
  return isa == CpuIsa::scalar;
#endif
}

CpuIsa widest() {
  CpuIsa best = CpuIsa::scalar;
  for (const Row& row : kRows) {
    if (runs_here(row.isa)) best = row.isa;
  }
  return best;
}

std::atomic<CpuIsa> in_use{widest()};

}  // namespace

std::vector<std::string> available_cpu_isas() {
  std::vector<std::string> names;
  for (const Row& row : kRows) {
    if (runs_here(row.isa)) names.emplace_back(row.name);
  }
  return names;
}

CpuIsa cpu_isa() { return in_use.load(std::memory_order_relaxed); }

std::string cpu_isa_name() { return kRows[static_cast<int>(cpu_isa())].name; }

void set_cpu_isa(const std::string& name) {
  std::string choices;
  for (const Row& row : kRows) {
    if (!runs_here(row.isa)) continue;
    if (name == row.name) {
      in_use.store(row.isa, std::memory_order_relaxed);
      return;
    }
    choices += (choices.empty() ? "" : ", ") + std::string(row.name);
  }
  throw std::invalid_argument("CPU ISA expected one of " + choices + ", got '" + name + "'");
}

}  // namespace mtp
