// What all FFI handlers share: reading a variable number of arrays, and errors for wrong ones.
//
// A handler stands beside the reading of its operands and hands the call that it has read to the
// backend's Run(context, call). The context is its last argument: a thread pool or a stream.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "dtype.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jdistadam {

namespace ffi = xla::ffi;
using FloatScalar = ffi::Buffer<ffi::F32, 0>;
using BoolScalar = ffi::Buffer<ffi::PRED, 0>;

inline ffi::Error Invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("jdistadam: " + message);
}

inline std::optional<Dtype> DtypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return Dtype::kFloat32;
    case ffi::DataType::BF16:
      return Dtype::kBfloat16;
    case ffi::DataType::F16:
      return Dtype::kFloat16;
    case ffi::DataType::U16:
      return Dtype::kUint16;
    default:
      return std::nullopt;
  }
}

inline std::optional<ffi::AnyBuffer> GetBuffer(const ffi::RemainingArgs& args, size_t i) {
  const auto buffer = args.get<ffi::AnyBuffer>(i);
  return buffer.has_value() ? std::optional(buffer.value()) : std::nullopt;
}

inline std::optional<ffi::AnyBuffer> GetBuffer(const ffi::RemainingRets& rets, size_t i) {
  auto buffer = rets.get<ffi::AnyBuffer>(i);
  if (!buffer.has_value()) return std::nullopt;
  ffi::Result<ffi::AnyBuffer> result = buffer.value();  // const access came with later headers
  return *result;
}

inline char* DataOf(const ffi::AnyBuffer& buffer) {
  return static_cast<char*>(buffer.untyped_data());
}

// The dtype of buffer `i`, which must be a float and, but for the first, equal `*dtype`.
template <typename Buffers>
ffi::Error TakeFloat(const char* name, const Buffers& buffers, size_t i,
                     std::optional<ffi::AnyBuffer>* buffer, Dtype* dtype) {
  *buffer = GetBuffer(buffers, i);
  if (!*buffer) return Invalid(std::string(name) + ": too few arrays");
  const auto type = DtypeOf((*buffer)->element_type());
  if (!type || *type == Dtype::kUint16)
    return Invalid(std::string(name) + ": dtype must be float32, bfloat16 or float16");
  if (i > 0 && *type != *dtype)
    return Invalid(std::string(name) + ": dtypes differ between leaves");
  *dtype = *type;
  return ffi::Error::Success();
}

}  // namespace jdistadam
