// Devices of one process that wait for each other inside a call.
//
// All devices of a program run the same calls, each from its own host thread. In a meeting every
// device passes an entry (pointers, events) and receives those of all others. Only host threads
// wait here, never a device.
//
// A meeting is identified by its execution (equal on all devices, different for each execution), by
// its call site in the program, and by the number of the execution's visit to that site: a loop
// visits one site many times.
//
// A device that cannot continue says so (Fail), and one that takes too long has failed. Then all
// meetings of this execution at this site fail, for waiting devices and for later ones, until every
// device has been told.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace jdistadam {

// Who comes to meetings: device `me` of `count`, in an execution, at a call site.
struct Visitor {
  int64_t run, site;
  int count, me;
};

template <typename Entry>
class Meetings {
 public:
  using Entries = std::shared_ptr<const std::vector<Entry>>;
  static constexpr std::chrono::seconds kNoLimit = std::chrono::seconds::max();

  // The number of the visit to this site in the execution. Executions may take turns on a device.
  int64_t Visit(const Visitor& who) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& runs = visits_[{who.site, who.me}];
    const auto found = std::find_if(runs.begin(), runs.end(),
                                    [&](const auto& known) { return known.first == who.run; });
    if (found != runs.end()) return ++found->second;
    if (runs.size() == kMaxRuns) runs.pop_front();
    runs.emplace_back(who.run, 0);
    return 0;
  }

  // Waits until all devices have come to the `stage`-th meeting of a visit, and returns their
  // entries in order. Null if one has failed, or has not come within `limit`; then it is null for
  // all, and `*why` names the device.
  Entries Meet(const Visitor& who, int64_t visit, int stage, Entry entry,
               std::chrono::seconds limit, std::string* why) {
    std::unique_lock<std::mutex> lock(mutex_);
    const Site site{who.run, who.site};
    const Key key{site, {visit, stage}};
    auto& open = open_[key];
    if (!open) open = std::make_shared<Meeting>(who.count);
    const std::shared_ptr<Meeting> meeting = open;
    if (meeting->has_come[who.me]) RecordFailure(site, Place(who.me) + " came twice");
    if (!HasFailed(site)) {
      (*meeting->entries)[who.me] = std::move(entry);
      meeting->has_come[who.me] = true;
      if (++meeting->num_come == who.count) {
        open_.erase(key);
        meeting->changed.notify_all();
      }
      const auto over = [&] { return meeting->num_come == who.count || HasFailed(site); };
      if (limit == kNoLimit) {
        meeting->changed.wait(lock, over);
      } else if (!meeting->changed.wait_for(lock, limit, over)) {
        RecordFailure(site, Missing(*meeting) + " did not come within " +
                                std::to_string(limit.count()) + " s");
      }
      if (meeting->num_come == who.count) return meeting->entries;
    }
    *why = failures_[site].why;
    HearOfFailure(who);
    return nullptr;
  }

  // For a device that cannot continue: nobody waits for it.
  void Fail(const Visitor& who, const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    RecordFailure({who.run, who.site}, Place(who.me) + " failed: " + why);
    HearOfFailure(who);
  }

 private:
  using Site = std::pair<int64_t, int64_t>;              // execution, site
  using Key = std::pair<Site, std::pair<int64_t, int>>;  // with visit, stage
  static constexpr size_t kMaxRuns = 64;                 // more than any backend keeps in flight

  struct Meeting {
    explicit Meeting(int count)
        : entries(std::make_shared<std::vector<Entry>>(count)), has_come(count, false) {}
    std::shared_ptr<std::vector<Entry>> entries;
    std::vector<bool> has_come;
    int num_come = 0;
    std::condition_variable changed;
  };
  struct Failure {
    std::string why;
    std::vector<int> heard_by;
  };

  static std::string Place(int me) {
    return me < 0 ? "a device that was not asked" : "the device at place " + std::to_string(me);
  }

  static std::string Missing(const Meeting& meeting) {
    std::string places;
    for (size_t i = 0; i < meeting.has_come.size(); ++i) {
      if (!meeting.has_come[i]) places += (places.empty() ? "" : ", ") + std::to_string(i);
    }
    return "the devices at places " + places;
  }

  // The rest is called with mutex_ held.
  bool HasFailed(const Site& site) const { return failures_.count(site) > 0; }

  // The first reason is kept.
  void RecordFailure(const Site& site, const std::string& why) {
    failures_.insert({site, {why, {}}});
    for (auto it = open_.lower_bound({site, {INT64_MIN, 0}});
         it != open_.end() && it->first.first == site; ++it)
      it->second->changed.notify_all();
  }

  // Forgets a failure, and the visits of its devices, when all have been told.
  void HearOfFailure(const Visitor& who) {
    const Site site{who.run, who.site};
    std::vector<int>& heard = failures_[site].heard_by;
    if (who.me >= 0 && std::find(heard.begin(), heard.end(), who.me) == heard.end())
      heard.push_back(who.me);
    if (int(heard.size()) < who.count) return;
    failures_.erase(site);
    const auto first = open_.lower_bound({site, {INT64_MIN, 0}});
    auto last = first;
    while (last != open_.end() && last->first.first == site) ++last;
    open_.erase(first, last);
    for (int i = 0; i < who.count; ++i) {
      auto& runs = visits_[{who.site, i}];
      runs.erase(std::remove_if(runs.begin(), runs.end(),
                                [&](const auto& known) { return known.first == who.run; }),
                 runs.end());
    }
  }

  std::mutex mutex_;  // guards all below, and the contents of a Meeting
  std::map<Key, std::shared_ptr<Meeting>> open_;
  std::map<Site, Failure> failures_;
  std::map<std::pair<int64_t, int>, std::deque<std::pair<int64_t, int64_t>>> visits_;
};

}  // namespace jdistadam
