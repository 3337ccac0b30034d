// Reads and checks the operands of the FFI calls `jdistadam_peer_sum` and `jdistadam_peer_step` as
// a PeerCall, and passes it to the backend's RunPeer.
//
// peer_sum
//   operands  norm_scale f32[]; the gradients, one array per leaf; the received arrays.
//   results   the sums, f32, one array per leaf; sum_of_squares f32[], found_inf pred[], scratch
//             u32[number of tiles, 2].
// peer_step
//   operands  norm_scale f32[], coefficients f32[groups, kNumCoefficients], inv_scale f32[],
//             found_inf pred[]; the gradients (or the sums, with `summed`), one array per leaf;
//             the received arrays; main, mu, nu, one flat array each.
//   results   the whole new parameters, one array per leaf; main, mu, nu, aliased with their
//             operands; without `summed` the three results of the norm, as above.
// devices     local numbers of the devices that meet, in the order of the shards.
// site        differs between the calls of a program.
// limit_seconds   how long to wait for a device.
// sizes, runs     of each leaf's shard (peer.h).
// received        for each leaf 1 or 2 if this device has received its shard of the others'
//             gradients: one array from each, the next lower place first. Otherwise 0. With 2 its
//             own gradient is only this shard too, otherwise the whole one.
// groups, offsets, flags   as in ffi_adam.h.
#pragma once

#include <algorithm>
#include <string>

#include "adam_math.h"
#include "ffi_common.h"
#include "peer.h"

namespace jdistadam {

constexpr int64_t kMaxLimitSeconds = 7 * 24 * 3600;  // far from the overflow of a clock

struct PeerAttributes {  // in the order of their decoding below
  ffi::Span<const int64_t> devices;
  int64_t site, limit_seconds;
  ffi::Span<const int64_t> sizes, runs;
  ffi::Span<const int32_t> received;
  // Only for a step.
  ffi::Span<const int64_t> offsets = {};
  ffi::Span<const int32_t> groups = {};
  int32_t flags = 0;
  bool summed = false;
  bool is_step = false;  // otherwise a sum

  PeerWork work() const {
    return !is_step ? PeerWork::kSum : summed ? PeerWork::kStepOnSums : PeerWork::kStep;
  }
};

struct PeerSumAttributes {
  PeerAttributes all;
};

struct PeerStepAttributes {
  PeerAttributes all;
};

}  // namespace jdistadam

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jdistadam::PeerSumAttributes,
                                      StructMember<Span<const int64_t>>("devices"),
                                      StructMember<int64_t>("site"),
                                      StructMember<int64_t>("limit_seconds"),
                                      StructMember<Span<const int64_t>>("sizes"),
                                      StructMember<Span<const int64_t>>("runs"),
                                      StructMember<Span<const int32_t>>("received"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jdistadam::PeerStepAttributes, StructMember<Span<const int64_t>>("devices"),
    StructMember<int64_t>("site"), StructMember<int64_t>("limit_seconds"),
    StructMember<Span<const int64_t>>("sizes"), StructMember<Span<const int64_t>>("runs"),
    StructMember<Span<const int32_t>>("received"), StructMember<Span<const int64_t>>("offsets"),
    StructMember<Span<const int32_t>>("groups"), StructMember<int32_t>("flags"),
    StructMember<bool>("summed"));

namespace jdistadam {

inline ffi::Error CheckPeerAttributes(const PeerAttributes& a) {
  const size_t count = a.sizes.size(), n = a.devices.size();
  if (n < 1 || n > kMaxPeers) return Invalid("devices: 1 to 8 can meet");
  if ((a.flags & ~kAllFlags) != 0) return Invalid("flags has unknown bits");
  if (a.limit_seconds < 1 || a.limit_seconds > kMaxLimitSeconds)
    return Invalid("limit_seconds must be positive, and at most a week");
  for (size_t i = 0; i < n; ++i) {
    if (std::find(a.devices.begin(), a.devices.begin() + i, a.devices[i]) != a.devices.begin() + i)
      return Invalid("devices: one stands there twice");
  }
  if (a.runs.size() != count || a.received.size() != count ||
      (a.is_step && (a.offsets.size() != count || a.groups.size() != count)))
    return Invalid("sizes, runs, received, offsets and groups need one entry a leaf");
  for (const int32_t received : a.received) {
    if (received < 0 || received > 2 || (received != 0 && a.summed))
      return Invalid("received: must be 0, 1 or 2, and 0 for sums");
  }
  int64_t end = 0;
  for (size_t i = 0; i < count; ++i) {
    const int64_t size = a.sizes[i], run = a.runs[i];
    if (size < 0 || size > INT64_MAX / int64_t(n) || run < 0 || (size == 0) != (run == 0) ||
        (size != 0 && size % run != 0))
      return Invalid("leaf " + std::to_string(i) + ": a shard is so many whole runs");
    if (!a.is_step) continue;
    if (a.offsets[i] < end || a.offsets[i] > INT64_MAX - size)
      return Invalid("leaf " + std::to_string(i) + ": offsets must ascend without overlap");
    end = a.offsets[i] + size;
  }
  return ffi::Error::Success();
}

// Reads arrays of operands or of results in order.
template <typename Buffers>
class Reader {
 public:
  explicit Reader(const Buffers& buffers) : buffers_(buffers) {}

  // The next array, with a float dtype and `elements` elements. The first of a kind sets `*dtype`;
  // the others must agree.
  ffi::Error Float(const char* name, size_t elements, bool is_first, Dtype* dtype, void** data) {
    const auto buffer = GetBuffer(buffers_, next_++);
    if (!buffer) return Invalid(std::string(name) + ": too few arrays");
    const auto type = DtypeOf(buffer->element_type());
    if (!type || *type == Dtype::kUint16)
      return Invalid(std::string(name) + ": dtype must be float32, bfloat16 or float16");
    if (!is_first && *type != *dtype)
      return Invalid(std::string(name) + ": dtypes differ between leaves");
    *dtype = *type;
    *data = buffer->untyped_data();
    return CheckSize(name, buffer->element_count(), elements);
  }

  // The same with a given dtype.
  ffi::Error Exactly(const char* name, ffi::DataType type, size_t elements, void** data) {
    const auto buffer = GetBuffer(buffers_, next_++);
    if (!buffer) return Invalid(std::string(name) + ": too few arrays");
    if (buffer->element_type() != type) return Invalid(std::string(name) + ": wrong dtype");
    *data = buffer->untyped_data();
    return CheckSize(name, buffer->element_count(), elements);
  }

  bool is_at_end() const { return next_ == buffers_.size(); }

 private:
  static ffi::Error CheckSize(const char* name, size_t got, size_t expected) {
    if (got == expected) return ffi::Error::Success();
    return Invalid(std::string(name) + ": has " + std::to_string(got) + " elements, expected " +
                   std::to_string(expected));
  }

  const Buffers& buffers_;
  size_t next_ = 0;
};

#define JDISTADAM_RETURN_IF_ERROR(expression) \
  if (ffi::Error error_ = (expression); error_.failure()) return error_

// The three results of the norm.
inline ffi::Error ReadNorm(Reader<ffi::RemainingRets>* results, PeerCall* call) {
  void* data[3];
  JDISTADAM_RETURN_IF_ERROR(results->Exactly("sum_of_squares", ffi::DataType::F32, 1, &data[0]));
  JDISTADAM_RETURN_IF_ERROR(results->Exactly("found_inf", ffi::DataType::PRED, 1, &data[1]));
  JDISTADAM_RETURN_IF_ERROR(
      results->Exactly("scratch", ffi::DataType::U32, 2 * call->num_tiles, &data[2]));
  call->sum_of_squares = static_cast<float*>(data[0]);
  call->norm_found_inf = static_cast<bool*>(data[1]);
  call->tiles = static_cast<TileNorm*>(data[2]);
  return ffi::Error::Success();
}

// One flat array of the state: an operand and its aliased result.
template <typename Set>
ffi::Error ReadFlat(const char* name, const PeerAttributes& a, const ffi::RemainingArgs& args,
                    const ffi::RemainingRets& rets, size_t arg, size_t ret, Dtype* dtype,
                    const Set& set) {
  const auto in = GetBuffer(args, arg), out = GetBuffer(rets, ret);
  if (!in || !out) return Invalid(std::string(name) + ": too few arrays");
  const auto type = DtypeOf(in->element_type());
  if (!type || *type == Dtype::kUint16 || in->element_type() != out->element_type())
    return Invalid(std::string(name) + ": dtype must be float32, bfloat16 or float16");
  *dtype = *type;
  if (in->element_count() != out->element_count() ||
      (in->element_count() > 0 && in->untyped_data() != out->untyped_data()))
    return Invalid(std::string(name) + ": the result is not aliased with its operand");
  for (size_t i = 0; i < a.sizes.size(); ++i) {
    if (size_t(a.offsets[i]) + size_t(a.sizes[i]) > in->element_count())
      return Invalid(std::string(name) + ": leaf " + std::to_string(i) + " ends beyond it");
    set(i, DataOf(*in) + size_t(a.offsets[i]) * ItemSize(*type));
  }
  return ffi::Error::Success();
}

inline ffi::Error ReadState(const PeerAttributes& a, const ffi::RemainingArgs& args,
                            const ffi::RemainingRets& rets, size_t first, PeerCall* call) {
  const size_t count = a.sizes.size();  // of results before those of the state
  Dtype main = Dtype::kFloat32;
  JDISTADAM_RETURN_IF_ERROR(ReadFlat(
      "main", a, args, rets, first, count, &main,
      [&](size_t i, char* data) { call->leaves[i].main = reinterpret_cast<float*>(data); }));
  if (main != Dtype::kFloat32) return Invalid("main: dtype must be float32");
  JDISTADAM_RETURN_IF_ERROR(ReadFlat("mu", a, args, rets, first + 1, count + 1, &call->dtypes.mu,
                                     [&](size_t i, char* data) { call->leaves[i].mu = data; }));
  return ReadFlat("nu", a, args, rets, first + 2, count + 2, &call->dtypes.nu,
                  [&](size_t i, char* data) { call->leaves[i].nu = data; });
}

inline ffi::Error BuildPeerCall(const PeerAttributes& a, const ffi::RemainingArgs& args,
                                const ffi::RemainingRets& rets, PeerCall* call) {
  JDISTADAM_RETURN_IF_ERROR(CheckPeerAttributes(a));
  const size_t count = a.sizes.size(), n = a.devices.size();
  call->work = a.work();
  call->flags = a.flags;
  call->num_tiles = 0;
  call->leaves.assign(count, {});
  Reader<ffi::RemainingArgs> operands(args);
  Reader<ffi::RemainingRets> results(rets);
  for (size_t i = 0; i < count; ++i) {
    PeerLeaf& leaf = call->leaves[i];
    leaf.size = size_t(a.sizes[i]), leaf.run = size_t(a.runs[i]);
    leaf.first_tile = call->num_tiles;
    call->num_tiles += NumNormTiles(leaf.size);
    if (a.is_step) leaf.group = a.groups[i];
    leaf.is_received = a.received[i] != 0;
    leaf.is_shard = a.received[i] == 2;
    void* data;
    const size_t size = leaf.size * (a.summed || leaf.is_shard ? 1 : n);
    JDISTADAM_RETURN_IF_ERROR(operands.Float("grads", size, i == 0, &call->dtypes.grad, &data));
    a.summed ? void(leaf.sum = static_cast<float*>(data)) : void(leaf.grad = data);
  }
  if (a.summed && count > 0 && call->dtypes.grad != Dtype::kFloat32)
    return Invalid("sums: dtype must be float32");
  size_t num_grads = count;
  for (size_t i = 0; i < count; ++i) {
    PeerLeaf& leaf = call->leaves[i];
    for (size_t k = 0; leaf.is_received && k + 1 < n; ++k, ++num_grads) {
      void* data;
      JDISTADAM_RETURN_IF_ERROR(
          operands.Float("received", leaf.size, false, &call->dtypes.grad, &data));
      leaf.received[k] = data;
    }
  }
  for (size_t i = 0; i < count; ++i) {
    PeerLeaf& leaf = call->leaves[i];
    void* data;
    if (a.is_step) {
      JDISTADAM_RETURN_IF_ERROR(
          results.Float("params", leaf.size * n, true, &leaf.out_dtype, &leaf.out));
    } else {
      JDISTADAM_RETURN_IF_ERROR(results.Exactly("sums", ffi::DataType::F32, leaf.size, &data));
      leaf.sum = static_cast<float*>(data);
    }
  }
  if (a.is_step) {
    JDISTADAM_RETURN_IF_ERROR(ReadState(a, args, rets, num_grads, call));
    if (args.size() != num_grads + 3) return Invalid("too many operands");
    void* skipped;
    for (int k = 0; k < 3; ++k) {  // checked by ReadState
      Dtype dtype;
      const auto buffer = GetBuffer(rets, count + k);
      JDISTADAM_RETURN_IF_ERROR(
          results.Float("state", buffer->element_count(), true, &dtype, &skipped));
    }
  } else if (!operands.is_at_end()) {
    return Invalid("too many operands");
  }
  if (call->work != PeerWork::kStepOnSums) JDISTADAM_RETURN_IF_ERROR(ReadNorm(&results, call));
  return results.is_at_end() ? ffi::Error::Success() : Invalid("too many results");
}

// Sets the scalars of a step.
inline ffi::Error SetScalars(ffi::Buffer<ffi::F32, 2> coefficients, FloatScalar inv_scale,
                             BoolScalar found_inf, PeerCall* call) {
  const auto dims = coefficients.dimensions();
  if (dims[1] != kNumCoefficients)
    return Invalid("coefficients need " + std::to_string(kNumCoefficients) + " columns");
  for (const PeerLeaf& leaf : call->leaves) {
    if (leaf.group < 0 || leaf.group >= dims[0])
      return Invalid("a group has no row of coefficients");
  }
  call->coefficients = coefficients.typed_data();
  call->inv_scale = inv_scale.typed_data();
  call->found_inf = found_inf.typed_data();
  return ffi::Error::Success();
}

template <typename Context>
auto PeerSumHandler(FloatScalar norm_scale, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    PeerSumAttributes attributes, ffi::RunId run, int32_t ordinal,
                    Context context) {
  PeerCall call;
  call.coefficients = nullptr;
  call.norm_scale = norm_scale.typed_data();
  ffi::Error error = BuildPeerCall(attributes.all, args, rets, &call);
  return RunPeer(context, attributes.all, std::move(error), std::move(call), run.run_id, ordinal);
}

template <typename Context>
auto PeerStepHandler(FloatScalar norm_scale, ffi::Buffer<ffi::F32, 2> coefficients,
                     FloatScalar inv_scale, BoolScalar found_inf, ffi::RemainingArgs args,
                     ffi::RemainingRets rets, PeerStepAttributes attributes, ffi::RunId run,
                     int32_t ordinal, Context context) {
  PeerCall call;
  call.norm_scale = norm_scale.typed_data();
  attributes.all.is_step = true;
  ffi::Error error = BuildPeerCall(attributes.all, args, rets, &call);
  if (error.success()) error = SetScalars(coefficients, inv_scale, found_inf, &call);
  return RunPeer(context, attributes.all, std::move(error), std::move(call), run.run_id, ordinal);
}

inline auto PeerSumBinding() {
  return ffi::Ffi::Bind()
      .Arg<FloatScalar>()  // norm_scale
      .RemainingArgs()
      .RemainingRets()
      .Attrs<PeerSumAttributes>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::DeviceOrdinal>();
}

inline auto PeerStepBinding() {
  return ffi::Ffi::Bind()
      .Arg<FloatScalar>()               // norm_scale
      .Arg<ffi::Buffer<ffi::F32, 2>>()  // coefficients
      .Arg<FloatScalar>()               // inv_scale
      .Arg<BoolScalar>()                // found_inf
      .RemainingArgs()
      .RemainingRets()
      .Attrs<PeerStepAttributes>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::DeviceOrdinal>();
}

}  // namespace jdistadam
