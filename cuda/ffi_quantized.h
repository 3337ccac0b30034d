// Reads and checks the operands of the FFI call `jdistadam_quantized` as a QuantizedCall.
//
// operands  as for `jdistadam_adam` (ffi_adam.h), but between found_inf and the arrays key u32[2],
//           count s32[], parts s32[leaves, 2] and blocks u32[n, 2]; mu and nu may be uint8 or
//           uint16. After the arrays come the scales f32 of each such moment: one array per leaf,
//           or a flat one if the moment is flat.
// results   as there; then the scales, aliased with their operands.
// random    whether to round stochastically.
// ids       for each leaf the number of the whole leaf to which it belongs.
// cuts      for each leaf the piece and the whole piece of its two cuts; empty: it is part
//           parts[i, 0] of contiguous parts of equal size.
// tables    for each leaf the row of `blocks` at which its table begins (quantized.h), or -1; may
//           be empty: none has one.
//
// A flat moment has the scales of leaf i at its offset / 128, which must divide.
#pragma once

#include <utility>

#include "ffi_adam.h"
#include "quantized.h"

namespace jdistadam {

using Key = ffi::Buffer<ffi::U32, 1>;
using CountScalar = ffi::Buffer<ffi::S32, 0>;
using Parts = ffi::Buffer<ffi::S32, 2>;
using Blocks = ffi::Buffer<ffi::U32, 2>;

struct QuantizedAttributes {  // in the order of their decoding below
  AdamAttributes adam;
  bool random;
  ffi::Span<const int32_t> ids;
  ffi::Span<const int64_t> cuts, tables;
};

}  // namespace jdistadam

#define JDISTADAM_QUANTIZED_MEMBERS                                                               \
  JDISTADAM_ADAM_MEMBERS, StructMember<bool>("random"), StructMember<Span<const int32_t>>("ids"), \
      StructMember<Span<const int64_t>>("cuts"), StructMember<Span<const int64_t>>("tables")
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jdistadam::QuantizedAttributes,
                                      JDISTADAM_QUANTIZED_MEMBERS);

namespace jdistadam {

// Takes the next arrays of scales; in `buffers` of results they must have the operands' addresses.
template <typename Buffers>
ffi::Error TakeScales(const char* name, const AdamAttributes& a, int kind, const Buffers& buffers,
                      size_t* next, bool is_aliased, float* QuantizedLeaf::* pointer,
                      std::vector<QuantizedLeaf>* leaves) {
  const bool is_flat = (a.flat >> kind) & 1;
  const auto& offsets = a.OffsetsOf(kind);
  for (size_t i = 0; is_flat && i < leaves->size(); ++i) {
    if (offsets[i] % kBlockSize != 0)
      return Invalid("leaf " + std::to_string(i) + ": does not begin with a block");
  }
  const auto dtype_of = [](ffi::DataType type) {
    return type == ffi::DataType::F32 ? std::optional(Dtype::kFloat32) : std::nullopt;
  };
  const auto size_of = [&](size_t i) {
    return std::optional(((*leaves)[i].size + kBlockSize - 1) / kBlockSize);
  };
  const auto start_of = [&](size_t i) { return size_t(offsets[i]) / kBlockSize; };
  const auto set = [&](size_t i, char* data, size_t size, size_t) {
    float* scales = reinterpret_cast<float*>(data);
    if (is_aliased) return size == 0 || (*leaves)[i].*pointer == scales;
    (*leaves)[i].*pointer = scales;
    return true;
  };
  Dtype dtype = Dtype::kFloat32;
  return TakeLeaves({name, is_flat, 1, "float32"}, leaves->size(), buffers, next, &dtype, dtype_of,
                    size_of, start_of, set);
}

// Sets the position of a leaf in the whole leaf.
inline ffi::Error TakeOrigin(const QuantizedAttributes& a, const Blocks& blocks, size_t i,
                             QuantizedLeaf* leaf) {
  const std::string name = "leaf " + std::to_string(i);
  const uint64_t size = leaf->size;
  leaf->id = uint32_t(a.ids[i]);
  leaf->slot = uint32_t(i);
  for (int k = 0; k < 2; ++k) {
    leaf->cuts[k] = {size, size};
    if (k == 1 && a.cuts.size() == 0) leaf->cuts[k] = {UINT64_MAX, UINT64_MAX};  // no further cut
    if (a.cuts.size() == 0) continue;
    const int64_t piece = a.cuts[4 * i + 2 * k], whole_piece = a.cuts[4 * i + 2 * k + 1];
    if (piece < 0 || whole_piece < piece || (piece == 0 && size > 0))
      return Invalid(name + ": a piece must have elements, and not more than the whole one");
    if (uint64_t(piece) < size && piece % kBlockSize != 0)
      return Invalid(name + ": several pieces must be whole blocks");
    leaf->cuts[k] = {uint64_t(piece), uint64_t(whole_piece)};
  }
  if (a.tables.size() == 0 || a.tables[i] < 0) return ffi::Error::Success();
  const int64_t have = blocks.dimensions()[0], begin = a.tables[i];
  const uint64_t needed = (size + kBlockSize - 1) / kBlockSize;
  if (begin > have || needed > uint64_t(have - begin))
    return Invalid(name + ": its table ends beyond blocks");
  leaf->table = blocks.typed_data() + 2 * begin;
  return ffi::Error::Success();
}

inline ffi::Error BuildQuantizedCall(const QuantizedAttributes& a,
                                     const CoefficientRows& coefficients,
                                     const FloatScalar& inv_scale, const BoolScalar& found_inf,
                                     const Key& key, const CountScalar& count, const Parts& parts,
                                     const Blocks& blocks, const ffi::RemainingArgs& args,
                                     const ffi::RemainingRets& rets, QuantizedCall* call) {
  Rows rows;
  Taken taken;
  if (auto error = ReadRows(coefficients, &rows); error.failure()) return error;
  if (rows.members) return Invalid("members have no step with low precision");
  const size_t leaves = a.adam.groups.size();
  if (parts.element_count() != 2 * leaves || a.ids.size() != leaves)
    return Invalid("parts and ids need one entry a leaf");
  if (blocks.dimensions()[1] != 2) return Invalid("blocks need 2 columns");
  if (a.cuts.size() != 0 && a.cuts.size() != 4 * leaves) return Invalid("cuts need 4 a leaf");
  if (a.tables.size() != 0 && a.tables.size() != leaves)
    return Invalid("tables need one entry a leaf");
  if (key.element_count() != 2) return Invalid("key needs 2 elements");
  auto error = BuildLeaves(a.adam, coefficients, inv_scale, found_inf, args, rets,
                           /*moments_may_be_coded=*/true, rows, &taken, &call->adam);
  if (error.failure()) return error;
  call->is_stochastic = a.random;
  call->key = key.typed_data();
  call->count = count.typed_data();
  call->parts = parts.typed_data();
  for (size_t i = 0; i < leaves; ++i) {
    call->leaves.push_back({call->adam.leaves[i]});
    if (error = TakeOrigin(a, blocks, i, &call->leaves.back()); error.failure()) return error;
  }
  call->adam.leaves.clear();
  using Scales = float* QuantizedLeaf::*;
  const auto take = [&](const auto& buffers, size_t* next, bool aliased) {
    const std::pair<Dtype, std::pair<const char*, Scales>> moments[] = {
        {call->adam.dtypes.mu, {"mu_scales", &QuantizedLeaf::mu_scales}},
        {call->adam.dtypes.nu, {"nu_scales", &QuantizedLeaf::nu_scales}}};
    for (int k = 0; k < 2; ++k) {
      if (!IsCoded(moments[k].first)) continue;
      const auto& [name, pointer] = moments[k].second;
      auto failed =
          TakeScales(name, a.adam, kMuKind + k, buffers, next, aliased, pointer, &call->leaves);
      if (failed.failure()) return failed;
    }
    return ffi::Error::Success();
  };
  error = take(args, &taken.args, false);
  if (error.success()) error = take(rets, &taken.rets, true);
  if (error.failure()) return error;
  if (taken.args != args.size() || taken.rets != rets.size()) return Invalid("too many arrays");
  return ffi::Error::Success();
}

template <typename Context>
ffi::Error QuantizedHandler(CoefficientRows coefficients, FloatScalar inv_scale,
                            BoolScalar found_inf, Key key, CountScalar count, Parts parts,
                            Blocks blocks, ffi::RemainingArgs args, ffi::RemainingRets rets,
                            QuantizedAttributes attributes, Context context) {
  QuantizedCall call;
  ffi::Error error = BuildQuantizedCall(attributes, coefficients, inv_scale, found_inf, key, count,
                                        parts, blocks, args, rets, &call);
  return error.failure() ? error : Run(context, call);
}

inline auto QuantizedBinding() {
  return ffi::Ffi::Bind()
      .Arg<CoefficientRows>()
      .Arg<FloatScalar>()  // inv_scale
      .Arg<BoolScalar>()   // found_inf
      .Arg<Key>()
      .Arg<CountScalar>()
      .Arg<Parts>()
      .Arg<Blocks>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs<QuantizedAttributes>();
}

}  // namespace jdistadam
