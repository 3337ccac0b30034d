// The FFI calls `jdistadam_copy_start` and `jdistadam_copy_wait`: copies.h.
//
// copy_start   operands: the sources; then arrays that are not read: they only fix the order.
//              results: the targets, which nobody may use before copy_wait.
// copy_wait    operands: the targets, the sources, and others that are not read. Results: the
//              targets, aliased.
// devices      numbers of the devices: group by group, and in each in the order of the parts. Local
//              numbers, or JAX's plus kOfProcesses if the devices are of several processes.
// per_group    how many devices copy among each other.
// channel      of a start: its number in the program, equal in all processes that run it.
// gathers      whether it is a gather; otherwise an exchange.
// in_place     of a gather: the sources are the targets, aliased.
// rows         of each source.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "copies.h"
#include "ffi_common.h"
#include "processes.h"

namespace jdistadam {

struct CopyStartAttributes {  // in the order of their decoding below
  ffi::Span<const int64_t> devices;
  int64_t per_group;
  bool gathers, in_place;
  ffi::Span<const int64_t> rows;
  int64_t channel;

  // XLA keeps the attributes of each call instruction of a program once, for all its devices.
  int64_t Call() const { return int64_t(reinterpret_cast<intptr_t>(rows.begin())); }
};

struct CopyWaitAttributes {
  ffi::Span<const int64_t> devices;
  int64_t per_group;
};

}  // namespace jdistadam

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jdistadam::CopyStartAttributes,
                                      StructMember<Span<const int64_t>>("devices"),
                                      StructMember<int64_t>("per_group"),
                                      StructMember<bool>("gathers"), StructMember<bool>("in_place"),
                                      StructMember<Span<const int64_t>>("rows"),
                                      StructMember<int64_t>("channel"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jdistadam::CopyWaitAttributes,
                                      StructMember<Span<const int64_t>>("devices"),
                                      StructMember<int64_t>("per_group"));

namespace jdistadam {

// Where a device is: the number of its group, the devices of this, and its place among them; -1 if
// it is in none.
struct CopyGroup {
  int64_t index = 0;
  ffi::Span<const int64_t> devices{nullptr, 0};
  int me = -1;
  const CopyClique* clique = nullptr;  // if some devices are of other processes

  CopyVisitor Visitor(int64_t execution, int64_t call, int64_t channel) const {
    const int64_t group = clique == nullptr ? index : clique->group;
    return {group, execution, call, channel, int(devices.size()), me, clique};
  }
};

template <typename Context>
CopyGroup FindGroup(const Context& context, const ffi::Span<const int64_t>& devices,
                    int64_t per_group, int32_t ordinal) {
  CopyGroup group;
  auto& processes = ProcessesOf(context, group);
  const bool is_shared = devices.size() > 0 && devices[0] >= kOfProcesses;
  const int64_t number = is_shared ? processes.NumberOf(ordinal) : ordinal;
  const int64_t count = int64_t(devices.size());
  if (per_group < 1 || count % per_group != 0) return group;
  const int64_t found = std::find(devices.begin(), devices.end(), number) - devices.begin();
  group.index = found < count ? found / per_group : 0;
  group.devices = {devices.begin() + group.index * per_group, size_t(per_group)};
  if (found < count && number >= 0) group.me = int(found % per_group);
  if (is_shared) group.clique = processes.CliqueOf({group.devices.begin(), group.devices.end()});
  return group;
}

inline ffi::Error ReadCopies(const CopyStartAttributes& a, const ffi::RemainingArgs& args,
                             const ffi::RemainingRets& rets, int me,
                             std::vector<CopyArray>* arrays) {
  const size_t n = size_t(std::max<int64_t>(a.per_group, 0)), count = a.rows.size();
  if (n < 1 || n > kMaxCopyDevices) return Invalid("devices: too many, or none");
  if (me < 0) return Invalid("this device is not one of those that copy");
  if (count < 1 || args.size() < count || rets.size() != count)
    return Invalid("copies need a source, a target and rows for each array");
  for (size_t i = 0; i < count; ++i) {
    const auto source = GetBuffer(args, i), target = GetBuffer(rets, i);
    if (!source || !target) return Invalid("copies have too few arrays");
    if (a.rows[i] < 1 || a.rows[i] > INT64_MAX / int64_t(n))
      return Invalid("array " + std::to_string(i) + " of copies has no or too many rows");
    const size_t from = source->size_bytes(), to = target->size_bytes(), rows = size_t(a.rows[i]);
    const size_t parts = a.gathers && !a.in_place ? rows : rows * n, run = from / parts;
    const size_t expected = a.in_place ? from : a.gathers ? from * n : from / n * (n - 1);
    if (from % parts != 0 || to != expected || (a.in_place && !a.gathers))
      return Invalid("array " + std::to_string(i) + " of copies has a wrong size");
    if (a.in_place && DataOf(*source) != DataOf(*target))
      return Invalid("array " + std::to_string(i) + " of copies is not aliased with its operand");
    char* first = DataOf(*source) + (a.in_place ? size_t(me) * run : 0);
    arrays->push_back({first, DataOf(*target), rows, run, a.in_place ? n * run : run});
  }
  return ffi::Error::Success();
}

inline ffi::Error CopiesAreLost(const std::string& why) {
  return ffi::Error::Internal("jdistadam: copies between devices were not finished: " + why +
                              " (places along the axis of the mesh). Parameters and state are "
                              "lost: restore a checkpoint.");
}

// A device returns its error: first, all copies to and from its arrays are done, on all devices.
template <typename Board>
ffi::Error LeaveCopies(Board& board, const CopyVisitor& who, std::string why,
                       const typename Board::JobPointer& waiting = nullptr) {
  for (const auto& job : board.Leave(who, waiting, &why)) DrainCopies(*job, who.me);
  return CopiesAreLost(why);
}

// Posts a start. `*is_last`: all have come, and the caller launches the job.
template <typename Board, typename Processes, typename Extra>
ffi::Error PostCopies(Board& board, Processes& processes, const CopyVisitor& who, bool gathers,
                      std::vector<CopyArray> arrays, Extra extra, typename Board::JobPointer* job,
                      bool* is_last) {
  for (const auto& left : board.TakeAbandoned(who, arrays, gathers)) DrainCopies(*left, who.me);
  std::string why;
  const auto start = [&] {
    return board.Start(who, gathers, {std::move(arrays), std::move(extra)}, is_last, &why);
  };
  if (who.clique == nullptr) {
    *job = start();
  } else if (why = processes.Show(who, gathers, arrays); why.empty()) {
    *job = processes.Post(who, start);
  } else {
    why = FailureOf(who.me, why);
  }
  return *job == nullptr ? LeaveCopies(board, who, why) : ffi::Error::Success();
}

inline ffi::Error ProcessIsForked() {
  return ffi::Error::Internal(
      "jdistadam: copies between devices cannot start in a process that was forked from one with "
      "devices. Start it with the method \"spawn\" of multiprocessing.");
}

template <typename Context>
auto CopyStartHandler(ffi::RemainingArgs args, ffi::RemainingRets rets, CopyStartAttributes a,
                      ffi::RunId run, int32_t ordinal, Context context) {
  if (BoardOf(context, CopyVisitor{}).IsForked())
    return IsOver(context, CopyVisitor{}, ProcessIsForked());
  const CopyGroup group = FindGroup(context, a.devices, a.per_group, ordinal);
  const CopyVisitor who = group.Visitor(run.run_id, a.Call(), a.channel);
  a.devices = group.devices;
  auto& board = BoardOf(context, who);
  std::vector<CopyArray> arrays;
  ffi::Error error = ReadCopies(a, args, rets, who.me, &arrays);
  if (error.failure())
    return IsOver(context, who, LeaveCopies(board, who, FailureOf(who.me, error.message())));
  return StartCopies(context, who, a, std::move(arrays), ordinal);
}

template <typename Context>
ffi::Error CopyWaitHandler(ffi::RemainingArgs args, ffi::RemainingRets rets, CopyWaitAttributes a,
                           ffi::RunId run, int32_t ordinal, Context context) {
  if (BoardOf(context, CopyVisitor{}).IsForked()) return ProcessIsForked();
  const CopyGroup group = FindGroup(context, a.devices, a.per_group, ordinal);
  const CopyVisitor who = group.Visitor(run.run_id, 0, 0);
  auto& board = BoardOf(context, who);
  std::string why;
  ffi::Error error =
      rets.size() < 1 ? Invalid("a wait for copies needs targets") : CheckAliased(args, rets);
  if (error.failure()) why = FailureOf(who.me, error.message());
  const auto job = why.empty() ? board.Finish(who, DataOf(*GetBuffer(rets, 0)), &why) : nullptr;
  if (job == nullptr) return LeaveCopies(board, who, why);
  return WaitForCopies(context, who, job);
}

inline auto CopyStartBinding() {
  return ffi::Ffi::Bind()
      .RemainingArgs()
      .RemainingRets()
      .Attrs<CopyStartAttributes>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::DeviceOrdinal>();
}

inline auto CopyWaitBinding() {
  return ffi::Ffi::Bind()
      .RemainingArgs()
      .RemainingRets()
      .Attrs<CopyWaitAttributes>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::DeviceOrdinal>();
}

}  // namespace jdistadam
