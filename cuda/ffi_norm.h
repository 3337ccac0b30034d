// Reads and checks the operands of the FFI calls for the global norm.
//
// jdistadam_norm_tiles   operands  inv_scale f32[], then the gradients, all of one dtype.
//                        results   u32[number of tiles, 2].
// jdistadam_norm         operands  u32[number of tiles, 2], of one or more such calls.
//                        results   sum_of_squares f32[], found_inf pred[].
#pragma once

#include "ffi_common.h"
#include "norm.h"

namespace jdistadam {

using Tiles = ffi::Buffer<ffi::U32, 2>;

inline ffi::Error BuildNormTilesCall(FloatScalar inv_scale, const ffi::RemainingArgs& grads,
                                     ffi::Result<Tiles> tiles, NormTilesCall* call) {
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
  const auto shape = tiles->dimensions();
  if (size_t(shape[0]) != call->num_tiles || shape[1] != 2)
    return Invalid("result: expected " + std::to_string(call->num_tiles) + " tiles of 2 words");
  call->inv_scale = inv_scale.typed_data();
  call->tiles = reinterpret_cast<TileNorm*>(tiles->typed_data());
  return ffi::Error::Success();
}

template <typename Context>
ffi::Error NormTilesHandler(FloatScalar inv_scale, ffi::RemainingArgs grads,
                            ffi::Result<Tiles> tiles, Context context) {
  NormTilesCall call;
  ffi::Error error = BuildNormTilesCall(inv_scale, grads, tiles, &call);
  return error.failure() ? error : Run(context, call);
}

template <typename Context>
ffi::Error NormHandler(Tiles tiles, ffi::Result<ffi::Buffer<ffi::F32, 0>> sum_of_squares,
                       ffi::Result<ffi::Buffer<ffi::PRED, 0>> found_inf, Context context) {
  const auto shape = tiles.dimensions();
  if (shape[1] != 2) return Invalid("tiles: expected 2 words, got " + std::to_string(shape[1]));
  return Run(context,
             NormCall{reinterpret_cast<const TileNorm*>(tiles.typed_data()), size_t(shape[0]),
                      sum_of_squares->typed_data(), found_inf->typed_data()});
}

inline auto NormTilesBinding() {
  return ffi::Ffi::Bind()
      .Arg<FloatScalar>()  // inv_scale
      .RemainingArgs()
      .Ret<Tiles>();
}

inline auto NormBinding() {
  return ffi::Ffi::Bind()
      .Arg<Tiles>()
      .Ret<ffi::Buffer<ffi::F32, 0>>()    // sum_of_squares
      .Ret<ffi::Buffer<ffi::PRED, 0>>();  // found_inf
}

}  // namespace jdistadam
