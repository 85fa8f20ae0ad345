// The CPU instruction sets a kernel may be compiled for, and which one is in use.
#pragma once

#include <string>
#include <vector>

namespace mtp {

enum class CpuIsa { scalar, avx2, avx512, avx512_bf16, amx };

// The instruction sets this binary has and this machine runs, narrowest first.
std::vector<std::string> available_cpu_isas();

std::string cpu_isa_name();
CpuIsa cpu_isa();

// Chooses among available_cpu_isas(); throws std::invalid_argument naming them otherwise.
void set_cpu_isa(const std::string& name);

}  // namespace mtp
