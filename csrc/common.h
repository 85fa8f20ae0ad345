// What the host side of every op shares: argument checks with one message format.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "params.h"

namespace mtp {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::ComplexFloat:
      return "complex64";
    default:
      return "dtype number " + std::to_string(static_cast<int>(dtype));
  }
}

// Of a tensor whose dtype has been checked to be one of the three.
inline DType float_dtype(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16:
      return DType::bf16;
    case ScalarType::Half:
      return DType::fp16;
    default:
      return DType::fp32;
  }
}

inline const void* data_or_null(const OptionalTensor& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

// Uninitialised, contiguous, on the other's device. torch::stable::new_empty is the same, but looks
// its op up by name, which takes longer than many a call of ours.
inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  std::array<int64_t, 3> strides{};
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= sizes.begin()[i]) strides[i] = stride;
  int32_t type = 0, index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  const auto number = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle tensor = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(),
                                                  strides.data(), number, type, index, &tensor));
  return Tensor(tensor);
}

// A `str` argument. TORCH_BOX converts a std::string too, but in torch 2.13 leaks it.
inline std::string take_string(StringHandle handle) {
  size_t length = 0;
  const char* data = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  std::string text(data, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return text;
}

inline std::string device_name(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  return "another device";
}

// Written only where a check has failed: "[2, 3]".
template <typename Sizes>
struct ShapeName {
  Sizes sizes;

  friend std::ostream& operator<<(std::ostream& out, const ShapeName& name) {
    const char* separator = "[";
    for (int64_t size : name.sizes) {
      out << separator << size;
      separator = ", ";
    }
    return out << (name.sizes.size() ? "]" : "[]");
  }
};

template <typename Sizes>
ShapeName<Sizes> shape_name(Sizes sizes) {
  return {sizes};
}

// Checks arguments of one op call against its first tensor; mtp_kernels/ops/_declare.py says the
// same in Python.
class Expect {
 public:
  Expect(const char* op, const Tensor& first)
      : op_(op), is_cpu_(first.is_cpu()), index_(is_cpu_ ? -1 : first.get_device_index()) {}

  template <typename... Parts>
  void that(bool ok, const Parts&... parts) const {
    if (!ok) fail(op_, ": ", parts...);
  }

  void device(const char* name, const Tensor& tensor) const {
    if (!tensor.defined()) fail(op_, ": ", name, " expected a tensor, got None");
    if (tensor.is_cpu() == is_cpu_ && (is_cpu_ || tensor.get_device_index() == index_)) return;
    const std::string wanted = is_cpu_ ? "cpu" : "cuda:" + std::to_string(index_);
    fail(op_, ": ", name, " expected device ", wanted, ", got ", device_name(tensor));
  }

  void dtype(const char* name, const Tensor& tensor, std::initializer_list<ScalarType> any) const {
    const ScalarType got = tensor.scalar_type();
    if (std::find(any.begin(), any.end(), got) != any.end()) return;
    std::string wanted;
    for (ScalarType dtype : any) wanted += (wanted.empty() ? "" : " or ") + dtype_name(dtype);
    fail(op_, ": ", name, " expected dtype ", wanted, ", got ", dtype_name(got));
  }

  void shape(const char* name, const Tensor& tensor, std::initializer_list<int64_t> wanted) const {
    const auto got = tensor.sizes();
    if (std::equal(got.begin(), got.end(), wanted.begin(), wanted.end())) return;
    fail(op_, ": ", name, " expected shape ", shape_name(wanted), ", got ", shape_name(got));
  }

  // Rows may be strided, their elements not.
  void unit_stride(const char* name, const Tensor& tensor) const {
    const int64_t last = tensor.dim() - 1;
    if (last < 0 || tensor.size(last) <= 1 || tensor.stride(last) == 1) return;
    fail(op_, ": ", name, " expected last stride 1, got ", tensor.stride(last));
  }

  void tensor(const char* name, const Tensor& tensor, std::initializer_list<ScalarType> any,
              std::initializer_list<int64_t> wanted) const {
    device(name, tensor);
    dtype(name, tensor, any);
    shape(name, tensor, wanted);
    unit_stride(name, tensor);
  }

 private:
  const char* op_;
  bool is_cpu_;
  int32_t index_;  // of a CUDA device
};

}  // namespace mtp
