// Turns the operands of the FFI calls `jdistadam_adam_squares` and `jdistadam_quantized_squares`
// into calls that take sums of squares (squares.h), and checks all of them.
//
// operands  segments s32[n, 2], then those of `jdistadam_adam` or `jdistadam_quantized`.
// results   sums f32[n, 3], partials f32[3, number of runs] (scratch), then the other call's.
// fine      for each leaf whether each of its elements is a run.
//
// mode is not that of an update, and there are no members.
#pragma once

#include "ffi_quantized.h"

namespace jdistadam {

using Segments = ffi::Buffer<ffi::S32, 2>;
using SumsResult = ffi::Result<ffi::Buffer<ffi::F32, 2>>;

struct AdamSquaresAttributes {  // in the order in which they are decoded below
  AdamAttributes adam;
  ffi::Span<const int32_t> fine;
};

struct QuantizedSquaresAttributes {
  QuantizedAttributes quantized;
  ffi::Span<const int32_t> fine;
};

}  // namespace jdistadam

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jdistadam::AdamSquaresAttributes, JDISTADAM_ADAM_MEMBERS,
                                      StructMember<Span<const int32_t>>("fine"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jdistadam::QuantizedSquaresAttributes,
                                      JDISTADAM_QUANTIZED_MEMBERS,
                                      StructMember<Span<const int32_t>>("fine"));

namespace jdistadam {

template <typename Leaves>
ffi::Error TakeSquares(const ffi::Span<const int32_t>& fine, const Leaves& leaves,
                       const Segments& segments, SumsResult sums, SumsResult partials,
                       AdamCall* adam) {
  SquaresCall& call = adam->squares;
  if (adam->mode == Mode::kUpdate) return Invalid("squares: mode must not be that of an update");
  if (fine.size() != leaves.size()) return Invalid("fine needs one entry a leaf");
  for (size_t i = 0; i < leaves.size(); ++i) {
    call.runs.push_back({call.num_runs, fine[i] != 0});
    call.num_runs += NumRuns(leaves[i].size, fine[i] != 0);
  }
  const auto asked = segments.dimensions(), made = sums->dimensions(),
             kept = partials->dimensions();
  if (asked[1] != 2) return Invalid("segments need 2 columns");
  if (asked[0] > INT32_MAX / kNumSquares) return Invalid("too many segments");
  if (made[0] != asked[0] || made[1] != kNumSquares)
    return Invalid("sums: expected one row of 3 for each segment");
  if (kept[0] != kNumSquares || size_t(kept[1]) != call.num_runs)
    return Invalid("partials: expected 3 rows of " + std::to_string(call.num_runs) + " runs");
  static float none[1];  // an array without elements may have no address
  call.partials = call.num_runs == 0 ? none : partials->typed_data();
  call.segments = segments.typed_data();
  call.num_segments = size_t(asked[0]);
  call.sums = sums->typed_data();
  return ffi::Error::Success();
}

template <typename Context>
ffi::Error AdamSquaresHandler(Segments segments, CoefficientRows coefficients,
                              FloatScalar inv_scale, BoolScalar found_inf, ffi::RemainingArgs args,
                              SumsResult sums, SumsResult partials, ffi::RemainingRets rets,
                              AdamSquaresAttributes attributes, Context context) {
  AdamCall call;
  if (coefficients.dimensions().size() != 2) return Invalid("members have no sums of squares");
  ffi::Error error =
      BuildCall(attributes.adam, coefficients, inv_scale, found_inf, args, rets, &call);
  if (error.success())
    error = TakeSquares(attributes.fine, call.leaves, segments, sums, partials, &call);
  return error.failure() ? error : Run(context, call);
}

template <typename Context>
ffi::Error QuantizedSquaresHandler(Segments segments, CoefficientRows coefficients,
                                   FloatScalar inv_scale, BoolScalar found_inf, Key key,
                                   CountScalar count, Parts parts, Blocks blocks,
                                   ffi::RemainingArgs args, SumsResult sums, SumsResult partials,
                                   ffi::RemainingRets rets, QuantizedSquaresAttributes attributes,
                                   Context context) {
  QuantizedCall call;
  ffi::Error error = BuildQuantizedCall(attributes.quantized, coefficients, inv_scale, found_inf,
                                        key, count, parts, blocks, args, rets, &call);
  if (error.success())
    error = TakeSquares(attributes.fine, call.leaves, segments, sums, partials, &call.adam);
  return error.failure() ? error : Run(context, call);
}

inline auto AdamSquaresBinding() {
  return ffi::Ffi::Bind()
      .Arg<Segments>()
      .Arg<CoefficientRows>()
      .Arg<FloatScalar>()  // inv_scale
      .Arg<BoolScalar>()   // found_inf
      .RemainingArgs()
      .Ret<ffi::Buffer<ffi::F32, 2>>()  // sums
      .Ret<ffi::Buffer<ffi::F32, 2>>()  // partials
      .RemainingRets()
      .Attrs<AdamSquaresAttributes>();
}

inline auto QuantizedSquaresBinding() {
  return ffi::Ffi::Bind()
      .Arg<Segments>()
      .Arg<CoefficientRows>()
      .Arg<FloatScalar>()  // inv_scale
      .Arg<BoolScalar>()   // found_inf
      .Arg<Key>()
      .Arg<CountScalar>()
      .Arg<Parts>()
      .Arg<Blocks>()
      .RemainingArgs()
      .Ret<ffi::Buffer<ffi::F32, 2>>()  // sums
      .Ret<ffi::Buffer<ffi::F32, 2>>()  // partials
      .RemainingRets()
      .Attrs<QuantizedSquaresAttributes>();
}

}  // namespace jdistadam
