// Reads and checks the operands of the FFI call `jdistadam_adam` as an AdamCall.
//
// operands  coefficients f32[..., groups, kNumCoefficients], inv_scale f32[], found_inf pred[],
//           then grads, params, mu, nu and (in Mode::kStepSplit) out: each either one array per
//           leaf, or one flat array.
// results   params (not in Mode::kUpdate), mu, nu, aliased with their operands; then out (not in
//           Mode::kStep; aliased in Mode::kStepSplit).
// mode, flags   see adam.h and adam_math.h.
// groups    one row of the coefficients per leaf; its length is the number of leaves.
// flat      bit k set: operand kind k (grads, params, mu, nu, out) is flat, and its leaf i is
//           elements [offsets[i], offsets[i] + sizes[i]).
// sizes, offsets   one entry per leaf if anything is flat, otherwise empty. Offsets ascend, and no
//           two leaves overlap.
// mu_offsets, nu_offsets   start of each leaf in a flat moment; empty: use `offsets`.
//
// Coefficients of more than two dimensions have rows for several members; their number is the
// product of the dimensions before the last two. Every array then holds that many leaves of equal
// size in sequence, and the m-th of them uses row m * groups + group. In such a call nothing is
// flat.
//
// kernels/adam.py builds these calls, but no arguments from Python may crash the process.
#pragma once

#include <optional>
#include <type_traits>
#include <utility>

#include "adam.h"
#include "adam_math.h"
#include "ffi_common.h"

namespace jdistadam {

using CoefficientRows = ffi::Buffer<ffi::F32>;

// Operand kinds, as bits of `flat`.
constexpr int kMuKind = 2, kNuKind = 3, kOutKind = 4;

struct AdamAttributes {  // in the order of their decoding below
  int32_t mode;
  int32_t flags;
  ffi::Span<const int32_t> groups;
  int32_t flat;
  ffi::Span<const int64_t> sizes, offsets;
  ffi::Span<const int64_t> mu_offsets, nu_offsets;

  const ffi::Span<const int64_t>& OffsetsOf(int kind) const {
    if (kind == kMuKind && mu_offsets.size() > 0) return mu_offsets;
    if (kind == kNuKind && nu_offsets.size() > 0) return nu_offsets;
    return offsets;
  }
};

}  // namespace jdistadam

// Calls with more attributes begin with the same ones.
#define JDISTADAM_ADAM_MEMBERS                                                                  \
  StructMember<int32_t>("mode"), StructMember<int32_t>("flags"),                                \
      StructMember<Span<const int32_t>>("groups"), StructMember<int32_t>("flat"),               \
      StructMember<Span<const int64_t>>("sizes"), StructMember<Span<const int64_t>>("offsets"), \
      StructMember<Span<const int64_t>>("mu_offsets"),                                          \
      StructMember<Span<const int64_t>>("nu_offsets")
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jdistadam::AdamAttributes, JDISTADAM_ADAM_MEMBERS);

namespace jdistadam {

// Whether an array may be anywhere in memory, or must have the address of an operand.
enum Place { kNew, kAliased };

// Reads the operand kinds in sequence into the leaves of an AdamCall.
class CallBuilder {
 public:
  CallBuilder(const AdamAttributes& attributes, bool moments_may_be_coded, AdamCall* call)
      : attributes_(attributes), may_be_coded_(moments_may_be_coded), call_(call) {
    call_->leaves.resize(attributes.groups.size());
  }

  // Takes the next arrays of `buffers` as operand kind `kind`. Leaves take their size from the
  // first kind; later kinds must agree. kAliased: the arrays must have the addresses that the
  // leaves already have.
  template <typename Buffers, typename Pointer>
  ffi::Error Take(const char* name, int kind, const Buffers& buffers, size_t* next, Dtype* dtype,
                  Pointer Leaf::* pointer, Place place = kNew) {
    const AdamAttributes& a = attributes_;
    const bool is_flat = (a.flat >> kind) & 1;
    const bool is_remainder = kind == kOutKind && call_->mode == Mode::kStepSplit;
    const bool may_be_coded = may_be_coded_ && (kind == kMuKind || kind == kNuKind);
    const Dtype operand = *dtype;
    const auto dtype_of = [=](ffi::DataType type) -> std::optional<Dtype> {
      if (may_be_coded && type == ffi::DataType::U8) return Dtype::kBlock8;
      if (may_be_coded && type == ffi::DataType::U16) return Dtype::kBlock16;
      if (!is_remainder) return FloatTypeOf(type);
      return type == ffi::DataType::U16 ? std::optional(Dtype::kUint16) : std::nullopt;
    };
    const auto size_of = [&](size_t i) -> std::optional<size_t> {
      if (a.sizes.size() > 0) return size_t(a.sizes[i]);
      return first_kind_ ? std::nullopt : std::optional(call_->leaves[i].size);
    };
    const auto start_of = [&](size_t i) { return size_t(a.OffsetsOf(kind)[i]); };
    const auto set = [&](size_t i, char* data, size_t size, size_t) {
      Leaf& leaf = call_->leaves[i];
      leaf.size = size;
      if (place == kAliased) return *dtype == operand && (size == 0 || leaf.*pointer == data);
      leaf.*pointer = data;
      return true;
    };
    const Kind read{name, is_flat, 1, is_remainder ? "uint16" : kFloats};
    const auto error = TakeLeaves(read, call_->leaves.size(), buffers, next, dtype, dtype_of,
                                  size_of, start_of, set);
    first_kind_ = false;
    return error;
  }

 private:
  const AdamAttributes& attributes_;
  const bool may_be_coded_;
  AdamCall* call_;
  bool first_kind_ = true;
};

inline ffi::Error CheckAttributes(const AdamAttributes& a, int64_t num_groups) {
  if ((a.flags & ~kAllFlags) != 0) return Invalid("flags has unknown bits");
  if (a.mode < 0 || a.mode > 3) return Invalid("mode must be 0, 1, 2 or 3");
  if (a.flat < 0 || a.flat > 31) return Invalid("flat must be between 0 and 31");
  const size_t count = a.groups.size();
  const bool sized = a.sizes.size() == count && a.offsets.size() == count;
  const bool unsized = a.sizes.size() == 0 && a.offsets.size() == 0;
  if (!sized && (!unsized || a.flat != 0))
    return Invalid("sizes and offsets need one entry a leaf");
  for (size_t i = 0; i < count; ++i) {
    if (a.groups[i] < 0 || a.groups[i] >= num_groups)
      return Invalid("a group has no row of coefficients");
  }
  for (const auto* offsets : {&a.mu_offsets, &a.nu_offsets}) {
    if (offsets->size() != 0 && (!sized || offsets->size() != count))
      return Invalid("offsets of a moment need one entry a leaf, beside sizes");
  }
  for (const auto* offsets : {&a.offsets, &a.mu_offsets, &a.nu_offsets}) {
    if (auto error = CheckOffsets(a.sizes, *offsets); error.failure()) return error;
  }
  return ffi::Error::Success();
}

// How many rows of coefficients each member has, and the number of members.
struct Rows {
  int64_t groups;
  std::optional<int64_t> members;  // none: each array is one leaf
};

inline ffi::Error ReadRows(const CoefficientRows& coefficients, Rows* rows) {
  const auto dims = coefficients.dimensions();
  if (dims.size() < 2 || dims.back() != kNumCoefficients)
    return Invalid("coefficients need " + std::to_string(kNumCoefficients) + " columns");
  rows->groups = dims[dims.size() - 2];
  if (dims.size() == 2) return ffi::Error::Success();
  int64_t members = 1;
  for (size_t i = 0; i + 2 < dims.size(); ++i) {
    // Leaf::group counts rows in 32 bits. Checked at each factor, so no product overflows.
    if (dims[i] > INT32_MAX || (members *= dims[i]) > INT32_MAX)
      return Invalid("coefficients have rows for too many members");
  }
  if (rows->groups > INT32_MAX || members * rows->groups > INT32_MAX)
    return Invalid("coefficients have too many rows");
  rows->members = members;
  return ffi::Error::Success();
}

// Replaces every leaf by one leaf per member. Leaves out empty ones.
inline ffi::Error CutIntoMembers(size_t members, int32_t groups, AdamCall* call) {
  constexpr size_t kMaxParts = size_t{1} << 24;  // a table of 1 GiB on the host
  const Dtypes& t = call->dtypes;
  std::vector<Leaf> parts;
  for (size_t i = 0; i < call->leaves.size(); ++i) {
    const Leaf& leaf = call->leaves[i];
    if (leaf.size == 0) continue;
    if (members == 0 || leaf.size % members != 0) {
      return Invalid("leaf " + std::to_string(i) + " does not divide into " +
                     std::to_string(members) + " members");
    }
    if (members > kMaxParts - parts.size()) return Invalid("too many members");
    const size_t size = leaf.size / members;
    const auto at = [size](auto* base, size_t m, Dtype dtype) {
      using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(base)>>,
                                      const char, char>;
      return base == nullptr ? base : static_cast<Byte*>(base) + m * size * ItemSize(dtype);
    };
    for (size_t m = 0; m < members; ++m) {
      parts.push_back({at(leaf.grad, m, t.grad), at(leaf.param, m, t.param), at(leaf.mu, m, t.mu),
                       at(leaf.nu, m, t.nu), at(leaf.out, m, t.out), size,
                       leaf.group + int32_t(m) * groups});
    }
  }
  call->leaves = std::move(parts);
  return ffi::Error::Success();
}

// The number of arrays read.
struct Taken {
  size_t args = 0, rets = 0;
};

// Everything but the members; does not check the total number of arrays.
inline ffi::Error BuildLeaves(const AdamAttributes& attributes, const CoefficientRows& coefficients,
                              const FloatScalar& inv_scale, const BoolScalar& found_inf,
                              const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                              bool moments_may_be_coded, const Rows& rows, Taken* taken,
                              AdamCall* call) {
  if (auto error = CheckAttributes(attributes, rows.groups); error.failure()) return error;
  call->mode = static_cast<Mode>(attributes.mode);
  call->flags = attributes.flags;
  call->coefficients = coefficients.typed_data();
  call->inv_scale = inv_scale.typed_data();
  call->found_inf = found_inf.typed_data();

  CallBuilder builder(attributes, moments_may_be_coded, call);
  for (size_t i = 0; i < call->leaves.size(); ++i) call->leaves[i].group = attributes.groups[i];
  Dtypes& t = call->dtypes;
  t.out = Dtype::kFloat32;
  const bool split = call->mode == Mode::kStepSplit;
  size_t &arg = taken->args, &ret = taken->rets;
  ffi::Error e = builder.Take("grads", 0, args, &arg, &t.grad, &Leaf::grad);
  if (e.success()) e = builder.Take("params", 1, args, &arg, &t.param, &Leaf::param);
  if (e.success()) e = builder.Take("mu", 2, args, &arg, &t.mu, &Leaf::mu);
  if (e.success()) e = builder.Take("nu", 3, args, &arg, &t.nu, &Leaf::nu);
  if (e.success() && split) {
    e = builder.Take("out", 4, args, &arg, &t.out, &Leaf::out);
    if (e.success() && t.param != Dtype::kBfloat16)
      e = Invalid("params: dtype must be bfloat16 beside remainders");
  }
  if (e.success() && call->mode != Mode::kUpdate)
    e = builder.Take("params", 1, rets, &ret, &t.param, &Leaf::param, kAliased);
  if (e.success()) e = builder.Take("mu", 2, rets, &ret, &t.mu, &Leaf::mu, kAliased);
  if (e.success()) e = builder.Take("nu", 3, rets, &ret, &t.nu, &Leaf::nu, kAliased);
  if (e.success() && call->mode != Mode::kStep)
    e = builder.Take("out", 4, rets, &ret, &t.out, &Leaf::out, split ? kAliased : kNew);
  return e;
}

inline ffi::Error BuildCall(const AdamAttributes& attributes, const CoefficientRows& coefficients,
                            const FloatScalar& inv_scale, const BoolScalar& found_inf,
                            const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                            AdamCall* call) {
  Rows rows;
  if (auto error = ReadRows(coefficients, &rows); error.failure()) return error;
  Taken taken;
  auto error = BuildLeaves(attributes, coefficients, inv_scale, found_inf, args, rets,
                           /*moments_may_be_coded=*/false, rows, &taken, call);
  if (error.failure()) return error;
  if (rows.members && attributes.flat != 0)
    return Invalid("with several members nothing may be flat");
  if (taken.args != args.size() || taken.rets != rets.size()) return Invalid("too many arrays");
  if (rows.members) return CutIntoMembers(size_t(*rows.members), int32_t(rows.groups), call);
  return ffi::Error::Success();
}

template <typename Context>
ffi::Error AdamHandler(CoefficientRows coefficients, FloatScalar inv_scale, BoolScalar found_inf,
                       ffi::RemainingArgs args, ffi::RemainingRets rets, AdamAttributes attributes,
                       Context context) {
  AdamCall call;
  ffi::Error error = BuildCall(attributes, coefficients, inv_scale, found_inf, args, rets, &call);
  return error.failure() ? error : Run(context, call);
}

inline auto AdamBinding() {
  return ffi::Ffi::Bind()
      .Arg<CoefficientRows>()
      .Arg<FloatScalar>()  // inv_scale
      .Arg<BoolScalar>()   // found_inf
      .RemainingArgs()
      .RemainingRets()
      .Attrs<AdamAttributes>();
}

}  // namespace jdistadam
