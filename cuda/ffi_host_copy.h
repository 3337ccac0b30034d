// The FFI calls `jdistadam_host_copy` and `jdistadam_host_copied`: parts of arrays in host memory,
// copied to arrays on the device or back, concurrently with later calls of the program.
//
// A program starts copies, continues, and waits where it needs them: on a GPU each direction has a
// stream of its own. The caller must not touch the part on either side between the two calls, and
// passes all arrays of the copy to the second one, so that they are not freed before.
//
// host_copy    operands: whole arrays on the host; to the host, then the parts on the device; then
//              arrays that are not read: they only fix the order of the program.
//              results to the device: the parts, and an array without content, on which other calls
//              can depend. To the host: the arrays on the host, aliased with the operands.
// host_copied  operands: arrays of the copy, at least the parts. Results: the first ones, aliased.
// offsets      the start of each part in its array, in bytes.
// to_host      the direction.
// index        connects the two calls, for each direction. If several copies share one, the second
//              call waits for the last of them that started. It also waits for all copies of the
//              same direction that started earlier.
#pragma once

#include <string>

#include "ffi_common.h"
#include "host_copy.h"

namespace jdistadam {

struct HostCopyAttributes {  // in the order of their decoding below
  int32_t index;
  ffi::Span<const int64_t> offsets;
  bool to_host;
};

struct HostCopiedAttributes {
  int32_t index;
  bool to_host;
};

}  // namespace jdistadam

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jdistadam::HostCopyAttributes,
                                      StructMember<int32_t>("index"),
                                      StructMember<Span<const int64_t>>("offsets"),
                                      StructMember<bool>("to_host"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jdistadam::HostCopiedAttributes,
                                      StructMember<int32_t>("index"),
                                      StructMember<bool>("to_host"));

namespace jdistadam {

inline ffi::Error BuildHostCopy(const HostCopyAttributes& a, const ffi::RemainingArgs& args,
                                const ffi::RemainingRets& rets, HostCopy* copy) {
  const size_t count = a.offsets.size();
  if (args.size() < (a.to_host ? 2 * count : count) || rets.size() != count + (a.to_host ? 0 : 1))
    return Invalid("a copy has too few arrays");
  if (a.to_host) {
    if (auto error = CheckAliased(args, rets); error.failure()) return error;
  }
  copy->index = a.index;
  copy->to_host = a.to_host;
  for (size_t i = 0; i < count; ++i) {
    const auto whole = GetBuffer(args, i);
    const auto part = a.to_host ? GetBuffer(args, count + i) : GetBuffer(rets, i);
    if (!whole || !part) return Invalid("a copy has too few arrays");
    const size_t total = whole->size_bytes(), bytes = part->size_bytes();
    if (a.offsets[i] < 0 || size_t(a.offsets[i]) > total || bytes > total - size_t(a.offsets[i]))
      return Invalid("part " + std::to_string(i) + " of a copy ends beyond its array");
    if (bytes > 0) copy->parts.push_back({DataOf(*whole) + a.offsets[i], DataOf(*part), bytes});
  }
  return ffi::Error::Success();
}

template <typename Context>
ffi::Error HostCopyHandler(ffi::RemainingArgs args, ffi::RemainingRets rets,
                           HostCopyAttributes attributes, int32_t ordinal, Context context) {
  HostCopy copy;
  const ffi::Error error = BuildHostCopy(attributes, args, rets, &copy);
  return error.failure() ? error : StartHostCopy(context, copy, ordinal);
}

template <typename Context>
ffi::Error HostCopiedHandler(ffi::RemainingArgs args, ffi::RemainingRets rets,
                             HostCopiedAttributes a, int32_t ordinal, Context context) {
  const ffi::Error error = CheckAliased(args, rets);
  return error.failure() ? error : WaitForHostCopy(context, a, ordinal);
}

inline auto HostCopyBinding() {
  return ffi::Ffi::Bind()
      .RemainingArgs()
      .RemainingRets()
      .Attrs<HostCopyAttributes>()
      .Ctx<ffi::DeviceOrdinal>();
}

inline auto HostCopiedBinding() {
  return ffi::Ffi::Bind()
      .RemainingArgs()
      .RemainingRets()
      .Attrs<HostCopiedAttributes>()
      .Ctx<ffi::DeviceOrdinal>();
}

}  // namespace jdistadam
