// Shared code of all FFI handlers: reading a variable number of arrays, and errors for wrong ones.
//
// Handlers are defined next to the code that reads their operands. They pass the resulting call to
// the backend's Run(context, call). The context is their last argument: a thread pool or a stream.
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

inline std::optional<Dtype> FloatTypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return Dtype::kFloat32;
    case ffi::DataType::BF16:
      return Dtype::kBfloat16;
    case ffi::DataType::F16:
      return Dtype::kFloat16;
    default:
      return std::nullopt;
  }
}
constexpr const char* kFloats = "float32, bfloat16 or float16";

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

// Whether each result has the address of the operand at its place.
inline ffi::Error CheckAliased(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets) {
  for (size_t i = 0; i < rets.size(); ++i) {
    const auto arg = GetBuffer(args, i), ret = GetBuffer(rets, i);
    if (!arg || !ret || DataOf(*arg) != DataOf(*ret))
      return Invalid("result " + std::to_string(i) + " of a copy is not aliased with its operand");
  }
  return ffi::Error::Success();
}

// A kind of operands or results, such as the gradients: one array per leaf, or a flat one.
struct Kind {
  const char* name;
  bool is_flat = false;
  size_t copies = 1;             // in each array, in sequence
  const char* dtypes = kFloats;  // in words: those that `dtype_of` accepts
};

// Reads and checks the next arrays of `buffers` (RemainingArgs or RemainingRets) as the leaves of
// one kind and dtype:
//
// dtype_of(type)  the Dtype of arrays of this type, or nullopt if they are wrong.
// size_of(i)      elements of leaf i in a copy, or nullopt to take its array's size; called for all
//                 leaves in a flat array.
// start_of(i)     the start of leaf i in a flat array.
// set(i, data, size, total)   takes leaf i of an array with `total` elements in a copy. False: a
//                 result does not have the address of its operand.
template <typename Buffers, typename DtypeFn, typename SizeFn, typename StartFn, typename SetFn>
ffi::Error TakeLeaves(const Kind& kind, size_t count, const Buffers& buffers, size_t* next,
                      Dtype* dtype, const DtypeFn& dtype_of, const SizeFn& size_of,
                      const StartFn& start_of, const SetFn& set) {
  const auto wrong = [&](const std::string& what) {
    return Invalid(std::string(kind.name) + ": " + what);
  };
  for (size_t array = 0; array < (kind.is_flat ? 1 : count); ++array) {
    const auto buffer = GetBuffer(buffers, (*next)++);
    if (!buffer) return wrong("too few arrays");
    const std::optional<Dtype> type = dtype_of(buffer->element_type());
    if (!type) return wrong(std::string("dtype must be ") + kind.dtypes);
    if (array > 0 && *type != *dtype) return wrong("dtypes differ between leaves");
    *dtype = *type;
    const size_t elements = buffer->element_count(), total = elements / kind.copies;
    if (total * kind.copies != elements)
      return wrong("does not divide by the number of contributions");
    for (size_t i = array; i < (kind.is_flat ? count : array + 1); ++i) {
      const size_t start = kind.is_flat ? start_of(i) : 0;
      const std::optional<size_t> expected = size_of(i);
      const size_t size = expected ? *expected : total;
      if (kind.is_flat && (start > total || size > total - start))
        return wrong("leaf " + std::to_string(i) + " ends beyond the flat array");
      if (!kind.is_flat && size != total) {
        return wrong("leaf " + std::to_string(i) + " has " + std::to_string(elements) +
                     " elements, expected " + std::to_string(size * kind.copies));
      }
      if (!set(i, DataOf(*buffer) + start * ItemSize(*type), size, total))
        return wrong("the result is not aliased with its operand");
    }
  }
  return ffi::Error::Success();
}

// Whether leaves in flat arrays are in order.
inline ffi::Error CheckOffsets(const ffi::Span<const int64_t>& sizes,
                               const ffi::Span<const int64_t>& offsets) {
  int64_t end = 0;
  for (size_t i = 0; i < offsets.size(); ++i) {
    if (sizes[i] < 0 || offsets[i] < 0) return Invalid("negative size or offset");
    if (offsets[i] < end)
      return Invalid("leaf " + std::to_string(i) + ": offsets must ascend without overlap");
    end = sizes[i] > INT64_MAX - offsets[i] ? INT64_MAX : offsets[i] + sizes[i];
  }
  return ffi::Error::Success();
}

}  // namespace jdistadam
