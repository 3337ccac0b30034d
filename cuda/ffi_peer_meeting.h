// Makes the devices of the process meet around a PeerCall.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "ffi_peer.h"
#include "meeting.h"

namespace jdistadam {

// The index of this device among those that meet; -1 if it is not one of them.
inline int PlaceOf(const PeerAttributes& a, int32_t ordinal) {
  const auto found = std::find(a.devices.begin(), a.devices.end(), int64_t{ordinal});
  return found == a.devices.end() ? -1 : int(found - a.devices.begin());
}

// What a device brings to a meeting: the addresses of its arrays, and data for the backend.
template <typename Extra>
struct PeerEntry {
  std::vector<const void*> grads;
  std::vector<void*> outs;
  Extra extra;
};

// Who meets, when and where; one object per call of one device.
template <typename Extra>
class PeerMeeting {
 public:
  using All = Meetings<PeerEntry<Extra>>;
  using Entries = typename All::Entries;

  PeerMeeting(const PeerAttributes& a, int64_t run, int32_t ordinal)
      : limit_(a.limit_seconds),
        who_{run, a.site, int(a.devices.size()), PlaceOf(a, ordinal)},
        visit_(TheMeetings().Visit(who_)) {}

  int me() const { return who_.me; }

  // Returns `error` of this device; if it is one, tells the others.
  ffi::Error Tell(ffi::Error error) {
    if (error.success() && me() < 0) error = Invalid("this device is not one of those that meet");
    if (error.failure()) TheMeetings().Fail(who_, error.message());
    return error;
  }

  // The n-th meeting (`stage`) of this call.
  ffi::Error Meet(int stage, PeerEntry<Extra> entry, std::chrono::seconds limit, Entries* entries) {
    std::string why;
    *entries = TheMeetings().Meet(who_, visit_, stage, std::move(entry), limit, &why);
    return *entries != nullptr ? ffi::Error::Success() : StateIsLost(why);
  }

  std::chrono::seconds limit() const { return limit_; }

  static ffi::Error StateIsLost(const std::string& why) {
    return ffi::Error::Internal("jdistadam: a step over peer memory was not finished: " + why +
                                " (places along the axis of the mesh). Parameters and state are "
                                "lost: start this process again and restore a checkpoint.");
  }

  // The arrays of all devices, leaf by leaf; sent gradients replace the devices' own arrays.
  static PeerArrays ArraysOf(const PeerCall& call, const Entries& entries, int me) {
    const int count = int(entries->size());
    PeerArrays arrays{count, me, {}, {}};
    const auto& first = entries->front();
    for (size_t l = 0; l < first.grads.size(); ++l)
      for (const auto& entry : *entries) arrays.grads.push_back(entry.grads[l]);
    for (size_t l = 0; l < first.outs.size(); ++l)
      for (const auto& entry : *entries) arrays.outs.push_back(entry.outs[l]);
    for (size_t l = 0; l < first.grads.size(); ++l) {
      const PeerLeaf& leaf = call.leaves[l];
      for (int k = 0; leaf.is_received && k < count; ++k)
        if (k != me) arrays.grads[l * count + k] = leaf.received[ReceivedIndex(count, me, k)];
    }
    return arrays;
  }

 private:
  static All& TheMeetings() {
    static auto* all = new All;  // outlives threads at exit
    return *all;
  }

  const std::chrono::seconds limit_;
  const Visitor who_;
  const int64_t visit_;
};

// The arrays of this device's call that others read or write.
template <typename Extra>
PeerEntry<Extra> EntryOf(const PeerCall& call, Extra extra) {
  PeerEntry<Extra> entry{{}, {}, extra};
  for (const PeerLeaf& leaf : call.leaves) {
    if (call.work != PeerWork::kStepOnSums) entry.grads.push_back(leaf.grad);
    if (call.work != PeerWork::kSum) entry.outs.push_back(leaf.out);
  }
  return entry;
}

}  // namespace jdistadam
