// Turns the operands of the FFI call `jdistadam_adam` into an AdamCall, checking everything.
//
// operands  coefficients f32[groups, kNumCoefficients], inv_scale f32[], found_inf pred[],
//           then grads, params, mu and nu: each either one array a leaf, or one flat array.
// results   params (not in Mode::kUpdate), mu and nu, aliased with their operands; then out (not
//           in Mode::kStep), one array a leaf or flat.
// mode, nesterov   see adam.h and adam_math.h.
// groups    one row of the coefficients for each leaf; its length is the number of leaves.
// flat      bit k set: operand kind k (grads, params, mu, nu, out) is flat, leaf i of it being
//           elements [offsets[i], offsets[i] + sizes[i]).
// sizes, offsets   one entry a leaf when anything is flat, else empty.
//
// Python builds these calls (kernel.py), but nothing that Python passes may crash the process.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "adam.h"
#include "adam_math.h"
#include "xla/ffi/api/ffi.h"

namespace jdistadam {

namespace ffi = xla::ffi;
using Coefficients2d = ffi::Buffer<ffi::F32, 2>;
using FloatScalar = ffi::Buffer<ffi::F32, 0>;
using BoolScalar = ffi::Buffer<ffi::PRED, 0>;

struct AdamAttributes {
  int32_t mode;
  bool nesterov;
  ffi::Span<const int32_t> groups;
  int32_t flat;
  ffi::Span<const int64_t> sizes, offsets;
};

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
    default:
      return std::nullopt;
  }
}

// Reads the operand kinds one after another into the leaves of an AdamCall.
class CallBuilder {
 public:
  CallBuilder(const AdamAttributes& attributes, AdamCall* call)
      : attributes_(attributes), call_(call) {
    call_->leaves.resize(attributes.groups.size());
  }

  // Takes the next arrays of `buffers` (RemainingArgs or RemainingRets) as operand kind `kind`.
  // Leaves take their size from the first kind, later kinds must agree.
  template <typename Buffers, typename Pointer>
  ffi::Error Take(const char* name, int kind, const Buffers& buffers, size_t* next, Dtype* dtype,
                  Pointer Leaf::* pointer) {
    const size_t count = call_->leaves.size();
    const bool flat = (attributes_.flat >> kind) & 1;
    for (size_t i = 0; i < (flat ? 1 : count); ++i) {
      const auto buffer = Get(buffers, (*next)++);
      if (!buffer) return Invalid(std::string(name) + ": too few arrays");
      const auto type = DtypeOf(buffer->element_type());
      if (!type) return Invalid(std::string(name) + ": dtype must be float32, bfloat16 or float16");
      if (i > 0 && *type != *dtype)
        return Invalid(std::string(name) + ": dtypes differ between leaves");
      *dtype = *type;
      const auto error =
          flat ? Slice(name, *buffer, *type, pointer) : Whole(name, i, *buffer, pointer);
      if (error.failure()) return error;
    }
    first_kind_ = false;
    return ffi::Error::Success();
  }

  // Checks that result arrays lie where the operands already taken lie.
  template <typename Buffers>
  ffi::Error TakeAliased(const char* name, int kind, const Buffers& rets, size_t* next, Dtype dtype,
                         void* Leaf::* pointer) {
    AdamCall results = *call_;
    Dtype result_dtype = dtype;
    CallBuilder builder(attributes_, &results);
    builder.first_kind_ = first_kind_;
    for (size_t i = 0; i < call_->leaves.size(); ++i) results.leaves[i] = call_->leaves[i];
    const auto error = builder.Take(name, kind, rets, next, &result_dtype, pointer);
    if (error.failure()) return error;
    for (size_t i = 0; i < results.leaves.size(); ++i) {
      const bool empty = results.leaves[i].size == 0;
      if (result_dtype != dtype ||
          (!empty && results.leaves[i].*pointer != call_->leaves[i].*pointer)) {
        return Invalid(std::string(name) + ": the result is not aliased with its operand");
      }
    }
    return ffi::Error::Success();
  }

 private:
  static std::optional<ffi::AnyBuffer> Get(const ffi::RemainingArgs& args, size_t i) {
    const auto buffer = args.get<ffi::AnyBuffer>(i);
    return buffer.has_value() ? std::optional(buffer.value()) : std::nullopt;
  }
  static std::optional<ffi::AnyBuffer> Get(const ffi::RemainingRets& rets, size_t i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return std::nullopt;
    ffi::Result<ffi::AnyBuffer> result = buffer.value();  // const access came with later headers
    return *result;
  }

  template <typename Pointer>
  ffi::Error Whole(const char* name, size_t i, const ffi::AnyBuffer& buffer,
                   Pointer Leaf::* pointer) {
    Leaf& leaf = call_->leaves[i];
    const size_t size = buffer.element_count();
    const bool sized = attributes_.sizes.size() > 0;
    const size_t expected = sized ? size_t(attributes_.sizes[i]) : first_kind_ ? size : leaf.size;
    if (size != expected) {
      return Invalid(std::string(name) + ": leaf " + std::to_string(i) + " has " +
                     std::to_string(size) + " elements, expected " + std::to_string(expected));
    }
    leaf.size = size;
    leaf.*pointer = buffer.untyped_data();
    return ffi::Error::Success();
  }

  template <typename Pointer>
  ffi::Error Slice(const char* name, const ffi::AnyBuffer& buffer, Dtype dtype,
                   Pointer Leaf::* pointer) {
    const int64_t total = int64_t(buffer.element_count());
    for (size_t i = 0; i < call_->leaves.size(); ++i) {
      const int64_t size = attributes_.sizes[i], offset = attributes_.offsets[i];
      if (offset > total || size > total - offset) {
        return Invalid(std::string(name) + ": leaf " + std::to_string(i) +
                       " ends beyond the flat array");
      }
      call_->leaves[i].size = size_t(size);
      call_->leaves[i].*pointer =
          static_cast<char*>(buffer.untyped_data()) + offset * ItemSize(dtype);
    }
    return ffi::Error::Success();
  }

  const AdamAttributes& attributes_;
  AdamCall* call_;
  bool first_kind_ = true;
};

inline ffi::Error CheckAttributes(const AdamAttributes& a, int64_t num_groups) {
  if (a.mode < 0 || a.mode > 2) return Invalid("mode must be 0, 1 or 2");
  const size_t count = a.groups.size();
  const bool sized = a.sizes.size() == count && a.offsets.size() == count;
  const bool unsized = a.sizes.size() == 0 && a.offsets.size() == 0;
  if (!sized && (!unsized || a.flat != 0))
    return Invalid("sizes and offsets need one entry a leaf");
  for (size_t i = 0; i < count; ++i) {
    if (a.groups[i] < 0 || a.groups[i] >= num_groups)
      return Invalid("a group has no row of coefficients");
    if (a.sizes.size() > 0 && (a.sizes[i] < 0 || a.offsets[i] < 0))
      return Invalid("negative size or offset");
  }
  return ffi::Error::Success();
}

inline ffi::Error BuildCall(const AdamAttributes& attributes, const Coefficients2d& coefficients,
                            const FloatScalar& inv_scale, const BoolScalar& found_inf,
                            const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                            AdamCall* call) {
  if (coefficients.dimensions()[1] != kNumCoefficients) {
    return Invalid("coefficients need " + std::to_string(kNumCoefficients) + " columns");
  }
  if (auto error = CheckAttributes(attributes, coefficients.dimensions()[0]); error.failure())
    return error;
  call->mode = static_cast<Mode>(attributes.mode);
  call->nesterov = attributes.nesterov;
  call->coefficients = coefficients.typed_data();
  call->inv_scale = inv_scale.typed_data();
  call->found_inf = found_inf.typed_data();

  CallBuilder builder(attributes, call);
  for (size_t i = 0; i < call->leaves.size(); ++i) call->leaves[i].group = attributes.groups[i];
  Dtypes& t = call->dtypes;
  t.out = Dtype::kFloat32;
  size_t arg = 0, ret = 0;
  if (auto e = builder.Take("grads", 0, args, &arg, &t.grad, &Leaf::grad); e.failure()) return e;
  if (auto e = builder.Take("params", 1, args, &arg, &t.param, &Leaf::param); e.failure()) return e;
  if (auto e = builder.Take("mu", 2, args, &arg, &t.mu, &Leaf::mu); e.failure()) return e;
  if (auto e = builder.Take("nu", 3, args, &arg, &t.nu, &Leaf::nu); e.failure()) return e;
  if (call->mode != Mode::kUpdate) {
    if (auto e = builder.TakeAliased("params", 1, rets, &ret, t.param, &Leaf::param); e.failure())
      return e;
  }
  if (auto e = builder.TakeAliased("mu", 2, rets, &ret, t.mu, &Leaf::mu); e.failure()) return e;
  if (auto e = builder.TakeAliased("nu", 3, rets, &ret, t.nu, &Leaf::nu); e.failure()) return e;
  if (call->mode != Mode::kStep) {
    if (auto e = builder.Take("out", 4, rets, &ret, &t.out, &Leaf::out); e.failure()) return e;
  }
  if (arg != args.size() || ret != rets.size()) return Invalid("too many arrays");
  return ffi::Error::Success();
}

// The binding that both backends share; they differ only in their execution context.
#define JDISTADAM_ADAM_BINDING(context)                \
  ::xla::ffi::Ffi::Bind()                              \
      .Ctx<context>()                                  \
      .Arg<::jdistadam::Coefficients2d>()              \
      .Arg<::jdistadam::FloatScalar>() /* inv_scale */ \
      .Arg<::jdistadam::BoolScalar>()  /* found_inf */ \
      .RemainingArgs()                                 \
      .RemainingRets()                                 \
      .Attr<int32_t>("mode")                           \
      .Attr<bool>("nesterov")                          \
      .Attr<::xla::ffi::Span<const int32_t>>("groups") \
      .Attr<int32_t>("flat")                           \
      .Attr<::xla::ffi::Span<const int64_t>>("sizes")  \
      .Attr<::xla::ffi::Span<const int64_t>>("offsets")

}  // namespace jdistadam
