// Copies between the arrays of several devices of one process, concurrently with their programs.
//
// All devices of a program make the same copies. Each one *starts* them: it posts the addresses of
// its arrays, and goes on. When all have posted, every device sends its parts to the others. Later
// each one *waits*: until its arrays have arrived, and its own have been read. Between the two the
// caller must not write its sources, nor use its targets.
//
//   exchange   source (rows, n, run), target (n - 1, rows, run): part q of the source of device p goes
//              to device q, whose target has the parts of all other devices, in their order
//   gather     source (rows, run), target (rows, n, run): the source of device p is part p of the
//              target of every device. In place: the source is that part of the own target
//
// Which starts meet is known from the execution (equal on all devices, different for each one), the
// call site in the program, and the number of the execution's visit to that site on the device. A
// wait knows its start by the address of its first target.
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
#include <tuple>
#include <utility>
#include <vector>

namespace jdistadam {

constexpr int kMaxCopyDevices = 64;

// An array of one device; `run` in bytes, and from one run of a gather's source to the next.
struct CopyArray {
  char* source;
  char* target;
  size_t rows, run, pitch;
};

// The bytes that go from one device to another: `rows` pieces of `run` bytes.
struct CopyPiece {
  const char* from;
  char* to;
  size_t rows, run, from_pitch, to_pitch;
};

// The copies of one visit to one start, on all devices.
template <typename Extra>
class CopyJob {
 public:
  struct Post {
    std::vector<CopyArray> arrays;
    Extra extra;
  };

  CopyJob(int count, bool is_gather) : posts(count), is_gather_(is_gather) {}

  int count() const { return int(posts.size()); }

  // Calls send(piece) for all that goes from one device to another.
  template <typename Send>
  void ForPieces(int from, int to, const Send& send) const {
    for (size_t i = 0; i < posts[from].arrays.size(); ++i) {
      const CopyArray& a = posts[from].arrays[i];
      const size_t run = a.run, part = a.rows * run, whole = run * size_t(count());
      char* target = posts[to].arrays[i].target;
      const bool is_there = !is_gather_ || a.source == a.target + from * run;
      if (part == 0 || (from == to && is_there)) continue;
      const size_t place = from < to ? from : from - 1;
      send(is_gather_ ? CopyPiece{a.source, target + from * run, a.rows, run, a.pitch, whole}
                      : CopyPiece{a.source + to * run, target + place * part, a.rows, run, whole, run});
    }
  }

  // A device has enqueued all copies that it sends.
  void HasIssued() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (++num_issued_ == count()) changed_.notify_all();
  }

  void Fail(const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (why_.empty()) why_ = why;
    changed_.notify_all();
  }

  bool IsIssued() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return why_.empty() && num_issued_ == count();
  }

  // Waits until all devices have enqueued their copies. Returns why they have not; "" if they have.
  std::string WaitUntilIssued(std::chrono::seconds limit) {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool came = changed_.wait_for(
        lock, limit, [&] { return !why_.empty() || num_issued_ == count(); });
    if (!came) {
      why_ = "devices did not come within " + std::to_string(limit.count()) + " s: places";
      for (int i = 0; i < count(); ++i)
        if (!has_posted[i]) why_ += " " + std::to_string(i);
      changed_.notify_all();
    }
    return why_;
  }

  std::vector<Post> posts;           // by place; guarded by the board until all have come
  bool has_posted[kMaxCopyDevices] = {};
  bool has_waited[kMaxCopyDevices] = {};  // each is of one device alone
  int num_posted = 0;

 private:
  const bool is_gather_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_issued_ = 0;
  std::string why_;
};

// Who starts copies: device `me` of `count`, in an execution, at a call site.
struct CopyVisitor {
  int64_t run, site;
  int count, me;
};

// All jobs that are not finished.
template <typename Extra>
class CopyBoard {
 public:
  using Job = CopyJob<Extra>;
  using JobPointer = std::shared_ptr<Job>;

  // Posts the arrays of a device. `*is_last`: all have come. Null with `*why` if the execution failed.
  JobPointer Start(const CopyVisitor& who, bool is_gather, typename Job::Post post, bool* is_last,
                   std::string* why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto failed = failures_.find(who.run); failed != failures_.end()) {
      *why = failed->second;
      return nullptr;
    }
    const Key key{who.run, who.site, Visit(who)};
    JobPointer& open = gathering_[key];
    if (!open) open = std::make_shared<Job>(who.count, is_gather);
    const JobPointer job = open;
    for (const CopyArray& array : post.arrays) started_[{who.me, array.target}] = job;
    job->posts[who.me] = std::move(post);
    job->has_posted[who.me] = true;
    *is_last = ++job->num_posted == who.count;
    if (*is_last) gathering_.erase(key);
    return job;
  }

  // The job that a device started with this target; null if there is none.
  JobPointer Finish(int me, const char* target) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = started_.find({me, target});
    if (found == started_.end()) return nullptr;
    const JobPointer job = found->second;
    started_.erase(found);
    return job;
  }

  // A device cannot go on: nobody waits for it in this execution.
  void Fail(int64_t run, const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failures_.size() >= kMaxRuns) failures_.erase(failures_.begin());
    failures_.insert({run, why});
    for (auto it = gathering_.begin(); it != gathering_.end();) {
      if (it->first.run != run) {
        ++it;
        continue;
      }
      it->second->Fail(why);
      it = gathering_.erase(it);
    }
  }

 private:
  struct Key {
    int64_t run, site, visit;
    bool operator<(const Key& other) const {
      return std::tie(run, site, visit) < std::tie(other.run, other.site, other.visit);
    }
  };
  static constexpr size_t kMaxRuns = 64;  // more than any backend keeps in flight

  int64_t Visit(const CopyVisitor& who) {
    auto& runs = visits_[{who.site, who.me}];
    for (auto& known : runs)
      if (known.first == who.run) return ++known.second;
    if (runs.size() == kMaxRuns) runs.pop_front();
    runs.emplace_back(who.run, 0);
    return 0;
  }

  std::mutex mutex_;
  std::map<Key, JobPointer> gathering_;                       // not all devices have come
  std::map<std::pair<int, const char*>, JobPointer> started_;  // by place and target
  std::map<int64_t, std::string> failures_;                   // by execution
  std::map<std::pair<int64_t, int>, std::deque<std::pair<int64_t, int64_t>>> visits_;
};

}  // namespace jdistadam
