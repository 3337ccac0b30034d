// Reads and checks the operands of the FFI calls `jdistadam_sum_parts` and `jdistadam_step_parts`
// as a PartsCall (parts.h).
//
// sum_parts    operands: norm_scale f32[]; the device's own gradient of each leaf, whole; what it
//              received of each.
//              results: the sum of each leaf, f32; tiles u32[number of tiles, 2] of the norm.
// step_parts   operands: norm_scale f32[], coefficients f32[groups, kNumCoefficients], inv_scale
//              f32[], found_inf pred[]; own gradients and what was received, or (`summed`) the sums
//              of each leaf; main f32, mu, nu, one flat array each.
//              results: the new parameter of each leaf; main, mu, nu, aliased with their operands;
//              tiles of the norm, not written with `summed`.
// devices      local numbers of the devices, group by group; in each in the order of the shards.
// per_group    how many devices have parts of a gradient.
// rows, sizes  of each shard: runs, and elements.
// whole        whether new parameters are whole leaves, of which this shard is written.
// groups, offsets, mu_offsets, nu_offsets, flags   as in ffi_adam.h.
#pragma once

#include <algorithm>
#include <string>

#include "adam_math.h"
#include "ffi_common.h"
#include "ffi_copies.h"
#include "parts.h"

namespace jdistadam {

struct SumPartsAttributes {  // in the order of their decoding below
  ffi::Span<const int64_t> devices;
  int64_t per_group;
  ffi::Span<const int64_t> rows, sizes;
};

struct StepPartsAttributes {
  ffi::Span<const int64_t> devices;
  int64_t per_group;
  ffi::Span<const int64_t> rows, sizes;
  ffi::Span<const int64_t> offsets, mu_offsets, nu_offsets;
  ffi::Span<const int32_t> groups;
  int32_t flags;
  bool summed, whole;
};

}  // namespace jdistadam

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jdistadam::SumPartsAttributes,
                                      StructMember<Span<const int64_t>>("devices"),
                                      StructMember<int64_t>("per_group"),
                                      StructMember<Span<const int64_t>>("rows"),
                                      StructMember<Span<const int64_t>>("sizes"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jdistadam::StepPartsAttributes, StructMember<Span<const int64_t>>("devices"),
    StructMember<int64_t>("per_group"), StructMember<Span<const int64_t>>("rows"),
    StructMember<Span<const int64_t>>("sizes"), StructMember<Span<const int64_t>>("offsets"),
    StructMember<Span<const int64_t>>("mu_offsets"),
    StructMember<Span<const int64_t>>("nu_offsets"), StructMember<Span<const int32_t>>("groups"),
    StructMember<int32_t>("flags"), StructMember<bool>("summed"), StructMember<bool>("whole"));

namespace jdistadam {

// Reads operands or results in sequence: a kind after the other.
class PartsReader {
 public:
  PartsReader(const ffi::Span<const int64_t>& sizes, PartsCall* call)
      : sizes_(sizes), call_(call) {}

  // One array of each leaf, with `copies` shards.
  template <typename Buffers, typename Pointer>
  ffi::Error Each(const char* name, const Buffers& buffers, size_t* next, Dtype* dtype,
                  Pointer PartsLeaf::* pointer, size_t copies) {
    const auto set = [&](size_t i, char* data, size_t, size_t) {
      call_->leaves[i].*pointer = reinterpret_cast<Pointer>(data);
      return true;
    };
    return Take({name, false, copies}, buffers, next, dtype, sizes_, set);
  }

  // A flat array with all leaves; as a result it must have the address of its operand.
  template <typename Buffers, typename Pointer>
  ffi::Error Flat(const char* name, const Buffers& buffers, size_t* next, Dtype* dtype,
                  Pointer PartsLeaf::* pointer, const ffi::Span<const int64_t>& offsets,
                  bool is_result) {
    const auto set = [&](size_t i, char* data, size_t size, size_t) {
      Pointer& known = call_->leaves[i].*pointer;
      if (is_result) return size == 0 || reinterpret_cast<char*>(known) == data;
      known = reinterpret_cast<Pointer>(data);
      return true;
    };
    return Take({name, true}, buffers, next, dtype, offsets, set);
  }

 private:
  template <typename Buffers, typename Set>
  ffi::Error Take(const Kind& kind, const Buffers& buffers, size_t* next, Dtype* dtype,
                  const ffi::Span<const int64_t>& offsets, const Set& set) {
    return TakeLeaves(
        kind, call_->leaves.size(), buffers, next, dtype, FloatTypeOf,
        [&](size_t i) { return std::optional(size_t(sizes_[i])); },
        [&](size_t i) { return size_t(offsets[i]); }, set);
  }

  const ffi::Span<const int64_t>& sizes_;
  PartsCall* call_;
};

template <typename Attributes>
ffi::Error BeginPartsCall(const Attributes& a, int me, FloatScalar norm_scale, PartsCall* call) {
  const size_t n = a.devices.size(), count = a.sizes.size();
  if (n < 1 || n > kMaxCopyDevices || me < 0) return Invalid("devices: this one is not among them");
  if (count < 1 || a.rows.size() != count) return Invalid("rows and sizes need one entry a leaf");
  call->count = int32_t(n), call->me = me;
  call->norm_scale = norm_scale.typed_data();
  call->leaves.assign(count, {});
  for (size_t i = 0; i < count; ++i) {
    if (a.sizes[i] < 1 || a.sizes[i] > INT64_MAX / int64_t(n) || a.rows[i] < 1 ||
        a.sizes[i] % a.rows[i] != 0)
      return Invalid("leaf " + std::to_string(i) + ": a shard is so many whole runs");
    PartsLeaf& leaf = call->leaves[i];
    leaf.size = size_t(a.sizes[i]), leaf.run = leaf.size / size_t(a.rows[i]);
    leaf.first_tile = call->num_tiles;
    call->num_tiles += NumNormTiles(leaf.size);
  }
  return ffi::Error::Success();
}

inline ffi::Error ReadParts(PartsReader* reader, const ffi::RemainingArgs& args, size_t* next,
                            PartsCall* call) {
  Dtype received = Dtype::kFloat32;
  auto error =
      reader->Each("grads", args, next, &call->dtypes.grad, &PartsLeaf::own, size_t(call->count));
  if (error.success() && call->count > 1)
    error = reader->Each("received", args, next, &received, &PartsLeaf::received,
                         size_t(call->count - 1));
  if (error.success() && call->count > 1 && received != call->dtypes.grad)
    error = Invalid("received: must have the dtype of grads");
  return error;
}

inline ffi::Error ReadTiles(const ffi::RemainingRets& rets, size_t next, PartsCall* call) {
  const auto tiles = GetBuffer(rets, next);
  if (!tiles || tiles->element_type() != ffi::DataType::U32 ||
      tiles->element_count() != 2 * call->num_tiles || rets.size() != next + 1)
    return Invalid("tiles: the last result must have two u32 a tile");
  call->tiles = reinterpret_cast<TileNorm*>(DataOf(*tiles));
  return ffi::Error::Success();
}

inline ffi::Error BuildSumOfParts(const SumPartsAttributes& a, FloatScalar norm_scale,
                                  const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                  int me, PartsCall* call) {
  call->work = PartsWork::kSum;
  ffi::Error error = BeginPartsCall(a, me, norm_scale, call);
  PartsReader reader(a.sizes, call);
  size_t arg = 0, ret = 0;
  Dtype sums = Dtype::kFloat32;
  if (error.success()) error = ReadParts(&reader, args, &arg, call);
  if (error.success()) error = reader.Each("sums", rets, &ret, &sums, &PartsLeaf::sum, 1);
  if (error.success() && sums != Dtype::kFloat32) error = Invalid("sums: dtype must be float32");
  if (error.success() && arg != args.size()) error = Invalid("too many operands");
  return error.failure() ? error : ReadTiles(rets, ret, call);
}

inline ffi::Error CheckStepParts(const StepPartsAttributes& a, int64_t num_groups) {
  const size_t count = a.sizes.size();
  if ((a.flags & ~kAllFlags) != 0) return Invalid("flags has unknown bits");
  for (const auto* offsets : {&a.offsets, &a.mu_offsets, &a.nu_offsets}) {
    if (offsets->size() != count) return Invalid("offsets need one entry a leaf");
    if (auto error = CheckOffsets(a.sizes, *offsets); error.failure()) return error;
  }
  if (a.groups.size() != count) return Invalid("groups need one entry a leaf");
  for (const int32_t group : a.groups) {
    if (group < 0 || group >= num_groups) return Invalid("a group has no row of coefficients");
  }
  return ffi::Error::Success();
}

// main, mu and nu, as operands or as results.
template <typename Buffers>
ffi::Error ReadFlatState(PartsReader* reader, const StepPartsAttributes& a, const Buffers& buffers,
                         size_t* next, PartsCall* call, bool is_result) {
  Dtype main = Dtype::kFloat32, mu = Dtype::kFloat32, nu = Dtype::kFloat32;
  auto error = reader->Flat("main", buffers, next, &main, &PartsLeaf::main, a.offsets, is_result);
  if (error.success())
    error = reader->Flat("mu", buffers, next, &mu, &PartsLeaf::mu, a.mu_offsets, is_result);
  if (error.success())
    error = reader->Flat("nu", buffers, next, &nu, &PartsLeaf::nu, a.nu_offsets, is_result);
  if (error.success() && main != Dtype::kFloat32) error = Invalid("main: dtype must be float32");
  if (error.success() && is_result && (mu != call->dtypes.mu || nu != call->dtypes.nu))
    error = Invalid("mu, nu: a result does not have the dtype of its operand");
  call->dtypes.mu = mu, call->dtypes.nu = nu;
  return error;
}

inline ffi::Error BuildStepOnParts(const StepPartsAttributes& a, FloatScalar norm_scale,
                                   ffi::Buffer<ffi::F32, 2> coefficients,
                                   const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                   int me, PartsCall* call) {
  const auto dims = coefficients.dimensions();
  if (dims[1] != kNumCoefficients)
    return Invalid("coefficients need " + std::to_string(kNumCoefficients) + " columns");
  call->work = a.summed ? PartsWork::kStepOnSums : PartsWork::kStep;
  call->is_out_whole = a.whole;
  call->flags = a.flags;
  ffi::Error error = BeginPartsCall(a, me, norm_scale, call);
  if (error.success()) error = CheckStepParts(a, dims[0]);
  if (error.failure()) return error;
  for (size_t i = 0; i < call->leaves.size(); ++i) call->leaves[i].group = a.groups[i];
  PartsReader reader(a.sizes, call);
  size_t arg = 0, ret = 0;
  error = a.summed ? reader.Each("sums", args, &arg, &call->dtypes.grad, &PartsLeaf::sum, 1)
                   : ReadParts(&reader, args, &arg, call);
  if (error.success() && a.summed && call->dtypes.grad != Dtype::kFloat32)
    error = Invalid("sums: dtype must be float32");
  if (error.success()) error = ReadFlatState(&reader, a, args, &arg, call, /*is_result=*/false);
  if (error.success() && arg != args.size()) error = Invalid("too many operands");
  if (error.success())
    error = reader.Each("params", rets, &ret, &call->dtypes.out, &PartsLeaf::out,
                        a.whole ? a.devices.size() : 1);
  if (error.success()) error = ReadFlatState(&reader, a, rets, &ret, call, /*is_result=*/true);
  return error.failure() ? error : ReadTiles(rets, ret, call);
}

template <typename Context>
ffi::Error SumPartsHandler(FloatScalar norm_scale, ffi::RemainingArgs args, ffi::RemainingRets rets,
                           SumPartsAttributes a, int32_t ordinal, Context context) {
  PartsCall call = {};
  const CopyGroup group = FindGroup(context, a.devices, a.per_group, ordinal);
  a.devices = group.devices;
  const ffi::Error error = BuildSumOfParts(a, norm_scale, args, rets, group.me, &call);
  return error.failure() ? error : Run(context, call);
}

template <typename Context>
ffi::Error StepPartsHandler(FloatScalar norm_scale, ffi::Buffer<ffi::F32, 2> coefficients,
                            FloatScalar inv_scale, BoolScalar found_inf, ffi::RemainingArgs args,
                            ffi::RemainingRets rets, StepPartsAttributes a, int32_t ordinal,
                            Context context) {
  PartsCall call = {};
  call.coefficients = coefficients.typed_data();
  call.inv_scale = inv_scale.typed_data();
  call.found_inf = found_inf.typed_data();
  const CopyGroup group = FindGroup(context, a.devices, a.per_group, ordinal);
  a.devices = group.devices;
  const ffi::Error error =
      BuildStepOnParts(a, norm_scale, coefficients, args, rets, group.me, &call);
  return error.failure() ? error : Run(context, call);
}

inline auto SumPartsBinding() {
  return ffi::Ffi::Bind()
      .Arg<FloatScalar>()  // norm_scale
      .RemainingArgs()
      .RemainingRets()
      .Attrs<SumPartsAttributes>()
      .Ctx<ffi::DeviceOrdinal>();
}

inline auto StepPartsBinding() {
  return ffi::Ffi::Bind()
      .Arg<FloatScalar>()               // norm_scale
      .Arg<ffi::Buffer<ffi::F32, 2>>()  // coefficients
      .Arg<FloatScalar>()               // inv_scale
      .Arg<BoolScalar>()                // found_inf
      .RemainingArgs()
      .RemainingRets()
      .Attrs<StepPartsAttributes>()
      .Ctx<ffi::DeviceOrdinal>();
}

}  // namespace jdistadam
