// Devices of one process that wait for each other inside of a call.
//
// All devices of a program run the same calls, each from a host thread of its own. In a meeting
// every one of them hands over an entry (pointers, events) and gets those of all others. Only host
// threads wait here, never a device.
//
// A meeting is known by the execution it belongs to (equal on all devices, different for each
// execution), by its call site in the program, and by how often this execution has come there: a
// loop comes to one site many times.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace jdistadam {

template <typename Entry>
class Meetings {
 public:
  using Key = std::tuple<int64_t, int64_t, int64_t, int>;  // execution, site, visit, stage
  using Entries = std::shared_ptr<const std::vector<Entry>>;

  // Which visit of a site this is in an execution, for device `me`.
  int64_t Visit(int64_t run, int64_t site, int me) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& last = visits_[{site, me}];
    last = last.first == run ? std::pair(run, last.second + 1) : std::pair(run, int64_t{0});
    return last.second;
  }

  // Waits until all `count` devices have come, and returns what they brought, in their order. Null
  // after `limit`, then for all of them; `*missing` names who did not come.
  Entries Meet(const Key& key, int count, int me, Entry entry, std::chrono::seconds limit,
               std::string* missing) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto& open = open_[key];
    if (!open) open = std::make_shared<Meeting>(count);
    const std::shared_ptr<Meeting> meeting = open;
    (*meeting->entries)[me] = std::move(entry);
    meeting->has_come[me] = true;
    if (++meeting->num_come == count) {
      open_.erase(key);
      meeting->changed.notify_all();
    }
    const auto over = [&] { return meeting->num_come == count || meeting->has_failed; };
    if (!meeting->changed.wait_for(lock, limit, over)) {
      meeting->has_failed = true;  // whoever comes now finds a new meeting, and waits in vain too
      open_.erase(key);
      meeting->changed.notify_all();
    }
    if (!meeting->has_failed) return meeting->entries;
    for (int i = 0; i < count; ++i) {
      if (!meeting->has_come[i]) *missing += (missing->empty() ? "" : ", ") + std::to_string(i);
    }
    return nullptr;
  }

 private:
  struct Meeting {
    explicit Meeting(int count)
        : entries(std::make_shared<std::vector<Entry>>(count)), has_come(count, false) {}
    std::shared_ptr<std::vector<Entry>> entries;
    std::vector<bool> has_come;
    int num_come = 0;
    bool has_failed = false;
    std::condition_variable changed;
  };

  std::mutex mutex_;
  std::map<Key, std::shared_ptr<Meeting>> open_;                             // guarded by mutex_
  std::map<std::pair<int64_t, int>, std::pair<int64_t, int64_t>> visits_;  // guarded by mutex_
};

}  // namespace jdistadam
