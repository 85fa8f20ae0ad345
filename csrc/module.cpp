// Python module mtp_kernels._C: importing it registers the compiled ops; build_info() tells how it
// was built and what it runs on.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_isa.h"
#include "verify_cpu.h"

namespace py = pybind11;

namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "gcc " __VERSION__;
#endif

py::dict build_info() {
  py::dict info;
  info["version"] = MTP_VERSION;
  info["torch_headers"] = MTP_TORCH_VERSION;
  info["torch_target"] = py::str("{}.{}").format((TORCH_TARGET_VERSION >> 56) & 0xff,
                                                 (TORCH_TARGET_VERSION >> 48) & 0xff);
  info["compiler"] = kCompiler;
  info["build_type"] = MTP_BUILD_TYPE;
  info["cuda_compiled"] = static_cast<bool>(MTP_CUDA_COMPILED);
  info["cuda"] = static_cast<bool>(MTP_CUDA_LINKED);
  info["cuda_archs"] = MTP_CUDA_COMPILED ? MTP_CUDA_ARCHS : "";
  info["cpu_isas"] = mtp::available_cpu_isas();
  info["cpu_isa"] = mtp::cpu_isa_name();
  return info;
}

std::array<uint32_t, 4> philox(int64_t seed, int64_t position, uint32_t purpose, uint32_t lane) {
  std::array<uint32_t, 4> words;
  mtp::verify_cpu_kernels().philox(static_cast<uint64_t>(seed), static_cast<uint64_t>(position),
                                   purpose, lane, words.data());
  return words;
}

std::vector<uint32_t> exact(const std::string& function, const std::vector<uint32_t>& bits) {
  const mtp::VerifyCpuKernels& kernels = mtp::verify_cpu_kernels();
  const auto compute = function == "exp2"          ? kernels.exp2
                       : function == "log"         ? kernels.log
                       : function == "exponential" ? kernels.exponential
                                                   : nullptr;
  if (!compute)
    throw std::invalid_argument("function expected exp2, log or exponential, got '" + function +
                                "'");
  std::vector<uint32_t> results(bits.size());
  compute(bits.data(), static_cast<int64_t>(bits.size()), results.data());
  return results;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("build_info", &build_info,
        "How this extension was built: version, torch_headers, torch_target (oldest torch it runs "
        "on), compiler, build_type, cuda_compiled, cuda (linked in), cuda_archs; and what it found "
        "at run time: cpu_isas, cpu_isa (the one in use).");
  m.def("set_cpu_isa", &mtp::set_cpu_isa, py::arg("name"),
        "Use a narrower CPU instruction set, one of build_info()['cpu_isas'].");
  m.def("philox", &philox, py::arg("seed"), py::arg("position"), py::arg("purpose"),
        py::arg("lane"), "For the tests: four words of ops/_exact.py's philox, by the ISA in use.");
  m.def("exact", &exact, py::arg("function"), py::arg("bits"),
        "For the tests: exp2, log or exponential of ops/_exact.py, by the ISA in use; floats as "
        "their bits.");
}
