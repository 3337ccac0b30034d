// Reads and checks the operands of the FFI call `jdistadam_sum` as a SumCall.
//
// operands  the inputs, all of one dtype: one array per leaf, or one flat array.
// results   the outputs, likewise. Gaps of a flat output become zero.
// contributions    each input holds this many in sequence.
// flat             bit 0: the inputs are flat; bit 1: the outputs are.
// sizes, offsets   one entry per leaf: elements, and start in the flat arrays. Offsets ascend, and
//                  no two leaves overlap.
#pragma once

#include "ffi_common.h"
#include "pairwise.h"
#include "sum.h"

namespace jdistadam {

struct SumAttributes {  // in the order of their decoding below
  int32_t contributions, flat;
  ffi::Span<const int64_t> sizes, offsets;
};

}  // namespace jdistadam

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jdistadam::SumAttributes,
                                      StructMember<int32_t>("contributions"),
                                      StructMember<int32_t>("flat"),
                                      StructMember<Span<const int64_t>>("sizes"),
                                      StructMember<Span<const int64_t>>("offsets"));

namespace jdistadam {

inline ffi::Error CheckSumAttributes(const SumAttributes& a) {
  if (a.contributions < 1 || a.contributions > kMaxContributions)
    return Invalid("contributions must be between 1 and " + std::to_string(kMaxContributions));
  if (a.flat < 0 || a.flat > 3) return Invalid("flat must be 0, 1, 2 or 3");
  if (a.sizes.size() != a.offsets.size()) return Invalid("sizes and offsets need one entry a leaf");
  return CheckOffsets(a.sizes, a.offsets);
}

// Takes one side of all leaves: set(leaf, data, total).
template <typename Buffers, typename Set>
ffi::Error TakeSide(const Kind& kind, const SumAttributes& a, const Buffers& buffers, Dtype* dtype,
                    const Set& set) {
  size_t next = 0;
  const auto error = TakeLeaves(
      kind, a.sizes.size(), buffers, &next, dtype, FloatTypeOf,
      [&](size_t i) { return std::optional(size_t(a.sizes[i])); },
      [&](size_t i) { return size_t(a.offsets[i]); },
      [&](size_t i, char* data, size_t, size_t total) {
        set(i, data, total);
        return true;
      });
  if (error.failure()) return error;
  if (next != buffers.size()) return Invalid(std::string(kind.name) + ": too many arrays");
  return ffi::Error::Success();
}

// Leaves of zeros for the gaps between leaves.
inline void FillGaps(const SumAttributes& a, char* out, size_t total, SumCall* call) {
  size_t end = 0;
  const auto fill = [&](size_t begin) {
    if (begin > end)
      call->leaves.push_back({nullptr, out + end * ItemSize(call->out), begin - end});
  };
  for (size_t i = 0; i < a.sizes.size(); ++i) {
    fill(size_t(a.offsets[i]));
    end = size_t(a.offsets[i] + a.sizes[i]);
  }
  fill(total);
}

inline ffi::Error BuildSumCall(const SumAttributes& a, const ffi::RemainingArgs& args,
                               const ffi::RemainingRets& rets, SumCall* call) {
  if (auto error = CheckSumAttributes(a); error.failure()) return error;
  const bool flat_in = a.flat & 1, flat_out = a.flat & 2;
  call->in = call->out = Dtype::kFloat32;
  call->contributions = a.contributions;
  call->stride = 0;
  call->leaves.resize(a.sizes.size());
  for (size_t i = 0; i < a.sizes.size(); ++i) call->leaves[i].size = size_t(a.sizes[i]);
  auto error = TakeSide({"inputs", flat_in, size_t(a.contributions)}, a, args, &call->in,
                        [&](size_t leaf, const char* data, size_t total) {
                          call->leaves[leaf].in = data;
                          if (flat_in) call->stride = total;
                        });
  if (error.failure()) return error;
  error = TakeSide({"outputs", flat_out}, a, rets, &call->out,
                   [&](size_t leaf, char* data, size_t) { call->leaves[leaf].out = data; });
  if (error.failure()) return error;
  if (flat_out) {
    const auto buffer = GetBuffer(rets, 0);  // checked by TakeSide
    FillGaps(a, DataOf(*buffer), buffer->element_count(), call);
  }
  return ffi::Error::Success();
}

template <typename Context>
ffi::Error SumHandler(ffi::RemainingArgs args, ffi::RemainingRets rets, SumAttributes attributes,
                      Context context) {
  SumCall call;
  ffi::Error error = BuildSumCall(attributes, args, rets, &call);
  return error.failure() ? error : Run(context, call);
}

inline auto SumBinding() {
  return ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs<SumAttributes>();
}

}  // namespace jdistadam
