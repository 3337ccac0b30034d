// Reads and checks the operands of the FFI call `jdistadam_norm` as a NormCall.
//
// operands  inv_scale f32[], then the gradients, all of one dtype.
// results   sum_of_squares f32[], found_inf pred[], scratch u32[number of tiles, 2].
#pragma once

#include "ffi_common.h"
#include "norm.h"

namespace jdistadam {

using FloatResult = ffi::Result<ffi::Buffer<ffi::F32, 0>>;
using BoolResult = ffi::Result<ffi::Buffer<ffi::PRED, 0>>;
using TilesResult = ffi::Result<ffi::Buffer<ffi::U32, 2>>;

inline ffi::Error BuildNormCall(FloatScalar inv_scale, const ffi::RemainingArgs& grads,
                                FloatResult sum_of_squares, BoolResult found_inf, TilesResult tiles,
                                NormCall* call) {
  call->dtype = Dtype::kFloat32;
  call->num_tiles = 0;
  size_t next = 0;
  const auto any_size = [](size_t) -> std::optional<size_t> { return std::nullopt; };
  const auto add = [&](size_t, const char* data, size_t size, size_t) {
    call->leaves.push_back({data, size, call->num_tiles});
    call->num_tiles += NumNormTiles(size);
    return true;
  };
  const auto error = TakeLeaves(
      {"grads"}, grads.size(), grads, &next, &call->dtype, FloatTypeOf, any_size,
      [](size_t) { return size_t{0}; }, add);
  if (error.failure()) return error;
  const auto scratch = tiles->dimensions();
  if (size_t(scratch[0]) != call->num_tiles || scratch[1] != 2)
    return Invalid("scratch: expected " + std::to_string(call->num_tiles) + " tiles of 2 words");
  call->inv_scale = inv_scale.typed_data();
  call->tiles = reinterpret_cast<TileNorm*>(tiles->typed_data());
  call->sum_of_squares = sum_of_squares->typed_data();
  call->found_inf = found_inf->typed_data();
  return ffi::Error::Success();
}

template <typename Context>
ffi::Error NormHandler(FloatScalar inv_scale, ffi::RemainingArgs grads, FloatResult sum_of_squares,
                       BoolResult found_inf, TilesResult tiles, Context context) {
  NormCall call;
  ffi::Error error = BuildNormCall(inv_scale, grads, sum_of_squares, found_inf, tiles, &call);
  return error.failure() ? error : Run(context, call);
}

inline auto NormBinding() {
  return ffi::Ffi::Bind()
      .Arg<FloatScalar>()  // inv_scale
      .RemainingArgs()
      .Ret<ffi::Buffer<ffi::F32, 0>>()   // sum_of_squares
      .Ret<ffi::Buffer<ffi::PRED, 0>>()  // found_inf
      .Ret<ffi::Buffer<ffi::U32, 2>>();  // scratch
}

}  // namespace jdistadam
