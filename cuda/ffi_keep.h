// Turns the operands of the FFI call `jdistadam_keep` into a KeepCall, checking everything.
//
// operands  is_kept pred[], index s32[], then the new shards, then the old parameters; all arrays
//           of one dtype.
// results   the shards, aliased with their operands.
// parts     into how many parts each parameter is cut.
// rows      for each leaf the number of elements of a shard that are behind one another.
#pragma once

#include "ffi_common.h"
#include "keep.h"

namespace jdistadam {

using IndexScalar = ffi::Buffer<ffi::S32, 0>;

struct KeepAttributes {  // in the order of their decoding below
  int64_t parts;
  ffi::Span<const int64_t> rows;
};

}  // namespace jdistadam

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jdistadam::KeepAttributes, StructMember<int64_t>("parts"),
                                      StructMember<Span<const int64_t>>("rows"));

namespace jdistadam {

inline ffi::Error BuildKeepCall(BoolScalar is_kept, IndexScalar index,
                                const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                const KeepAttributes& a, KeepCall* call) {
  const auto& [parts, rows] = a;
  const size_t count = rows.size();
  if (args.size() != 2 * count || rets.size() != count)
    return Invalid("expected a shard, a parameter and a result for each row size");
  if (parts < 1) return Invalid("parts must be at least 1");
  call->is_kept = is_kept.typed_data();
  call->index = index.typed_data();
  call->parts = size_t(parts);
  Dtype dtype = Dtype::kFloat32;
  for (size_t i = 0; i < count; ++i) {
    std::optional<ffi::AnyBuffer> shard, whole;
    if (auto error = TakeFloat("shards", args, i, &shard, &dtype); error.failure()) return error;
    const Dtype shard_dtype = dtype;
    if (auto error = TakeFloat("params", args, count + i, &whole, &dtype); error.failure())
      return error;
    const auto result = GetBuffer(rets, i);
    const size_t size = shard->element_count(), row = size_t(rows[i]);
    const std::string leaf = "leaf " + std::to_string(i);
    if (dtype != shard_dtype || !result || result->element_type() != shard->element_type())
      return Invalid(leaf + ": dtypes differ");
    if (size > 0 && DataOf(*result) != DataOf(*shard))
      return Invalid(leaf + ": the result is not aliased with its operand");
    if (rows[i] < 1 || size % row != 0 || whole->element_count() / call->parts != size ||
        whole->element_count() % call->parts != 0 || result->element_count() != size)
      return Invalid(leaf + ": shard and parameter do not fit");
    const size_t item = ItemSize(dtype);
    call->leaves.push_back({DataOf(*shard), DataOf(*whole), size * item, row * item});
  }
  return ffi::Error::Success();
}

template <typename Context>
ffi::Error KeepHandler(BoolScalar is_kept, IndexScalar index, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, KeepAttributes attributes, Context context) {
  KeepCall call;
  ffi::Error error = BuildKeepCall(is_kept, index, args, rets, attributes, &call);
  return error.failure() ? error : Run(context, call);
}

inline auto KeepBinding() {
  return ffi::Ffi::Bind()
      .Arg<BoolScalar>()   // is_kept
      .Arg<IndexScalar>()  // index
      .RemainingArgs()
      .RemainingRets()
      .Attrs<KeepAttributes>();
}

}  // namespace jdistadam
