// Copies between the arrays of several devices of one process, concurrently with their programs.
//
// All devices of a program make the same copies. Each one *starts* them: it posts the addresses of
// its arrays, and goes on. When all have posted, every device sends its parts to the others. Later
// each one *waits* until its arrays have arrived, and its own have been read. Between the two the
// caller must not write its sources, nor use its targets.
//
//   exchange   source (rows, n, run), target (n - 1, rows, run): part q of the source of device p
//              goes to device q, whose target has the parts of all others, in their order
//   gather     source (rows, run), target (rows, n, run): the source of device p is part p of the
//              target of every device. In place: the source is that part of the own target
//
// Which starts meet is known from the execution (equal on all devices, different for each one), the
// call site in the program, and the number of the execution's visit to that site on the device. A
// wait knows its start by the execution and the address of its first target. Devices of several
// processes: processes.h.
//
// If a device cannot go on, its execution has failed on all devices, which *leave* it. Copies that
// not all devices have started are never made. The others end on all devices before a device
// returns its error and its arrays are released. If another call fails between start and wait, XLA
// tells nobody: others miss the device at their next copies. (XLA for GPUs gives them 10 s, and
// ends the process.) Such copies are *abandoned*: a later start that gets their memory waits until
// they are done.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
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

// The devices that copy among each other, if some are of other processes: processes.h.
struct CopyClique {
  int64_t run;                   // in place of an execution: negative, and equal in all processes
  std::vector<int64_t> devices;  // their numbers, which are those of JAX
  std::vector<int> processes;    // of each device; kHere for this process
  std::vector<int> ordinals;     // of those of this process
  mutable std::atomic<bool> has_died{false};  // one of the processes
};

constexpr int kHere = -1;

// Who starts copies: device `me` of `count`, in an execution, at a call site.
struct CopyVisitor {
  int64_t run, site;
  int count, me;
  const CopyClique* clique = nullptr;  // null if all devices are of this process
};

// What a device says when it cannot go on.
inline std::string FailureOf(int me, const std::string& why) {
  return (me < 0 ? "a device that was not asked" : "the device at place " + std::to_string(me)) +
         " failed: " + why;
}

// The copies of one visit to one start, on all devices.
template <typename Extra>
class CopyJob {
 public:
  struct Post {
    std::vector<CopyArray> arrays;
    Extra extra;
  };

  CopyJob(const CopyVisitor& who, int64_t visit, bool is_gather)
      : run(who.run),
        site(who.site),
        visit(visit),
        clique(who.clique),
        is_gather(is_gather),
        posts(who.count) {}

  int count() const { return int(posts.size()); }

  // Calls send(piece) for all that goes from one device to another.
  template <typename Send>
  void ForPieces(int from, int to, const Send& send) const {
    for (size_t i = 0; i < posts[from].arrays.size(); ++i) {
      const CopyArray& a = posts[from].arrays[i];
      const size_t run = a.run, part = a.rows * run, whole = run * size_t(count());
      char* target = posts[to].arrays[i].target;
      const bool is_there = !is_gather || a.source == a.target + from * run;
      if (part == 0 || (from == to && is_there)) continue;
      const size_t place = from < to ? from : from - 1;
      send(is_gather
               ? CopyPiece{a.source, target + from * run, a.rows, run, a.pitch, whole}
               : CopyPiece{a.source + to * run, target + place * part, a.rows, run, whole, run});
    }
  }

  // Whether a device's arrays here and others of its own share memory that is the target of one.
  bool Overlaps(int me, const std::vector<CopyArray>& others, bool others_gather) const {
    for (const CopyArray& mine : posts[me].arrays) {
      const Range source = SourceOf(mine, is_gather), target = TargetOf(mine, is_gather);
      for (const CopyArray& other : others) {
        const Range its_target = TargetOf(other, others_gather);
        if (Meet(target, its_target) || Meet(source, its_target) ||
            Meet(target, SourceOf(other, others_gather)))
          return true;
      }
    }
    return false;
  }

  // A device has enqueued all copies that it sends.
  void HasIssued(int me) { Settle(me, ""); }

  // A device could not, and what it had enqueued is done.
  void HasGivenUp(int me, const std::string& why) { Settle(me, why); }

  bool IsHere(int place) const { return clique == nullptr || clique->processes[place] == kHere; }

  // Whether a device's arrays have the sizes of those that others have posted.
  bool Fits(const CopyVisitor& who, const Post& post) const {
    if (who.count != count() || who.site != site) return false;
    for (int p = 0; p < count(); ++p) {
      const auto same = [](const CopyArray& a, const CopyArray& b) {
        return a.rows == b.rows && a.run == b.run && a.pitch == b.pitch;
      };
      const std::vector<CopyArray>& other = posts[p].arrays;
      if (has_posted[p] &&
          !std::equal(other.begin(), other.end(), post.arrays.begin(), post.arrays.end(), same))
        return false;
    }
    return true;
  }

  void Fail(const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (why_.empty()) why_ = why;
    changed_.notify_all();
  }

  // Whether all devices have enqueued their copies; waits a while if asked to.
  bool IsIssued(std::chrono::milliseconds limit = {}) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto is_settled = [&] { return !why_.empty() || num_settled_ == count(); };
    return changed_.wait_for(lock, limit, is_settled) && why_.empty();
  }

  // Waits until all devices have enqueued their copies. Returns why they have not; "" if they have.
  std::string WaitUntilIssued(std::chrono::seconds limit) {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool came =
        changed_.wait_for(lock, limit, [&] { return !why_.empty() || num_settled_ == count(); });
    if (!came) {
      std::string places;
      for (int i = 0; i < count(); ++i)
        if (!has_posted[i]) places += " " + std::to_string(i);
      const std::string within = "within " + std::to_string(limit.count()) + " s";
      why_ = places.empty() ? "copies were not enqueued " + within
                            : "devices did not come " + within + ": places" + places;
      changed_.notify_all();
    }
    return why_;
  }

  // Waits until each device has enqueued its copies or has given up. All have started them.
  void WaitUntilSettled() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return num_settled_ == count(); });
  }

  const int64_t run, site, visit;
  const CopyClique* const clique;
  const bool is_gather;
  std::function<void(int me, const std::string& why)> tell;  // other processes; guarded like posts
  std::vector<Post> posts;  // by place; guarded by the board until all have come
  std::atomic<bool> has_posted[kMaxCopyDevices] = {};
  int num_posted = 0;  // guarded by the board

 private:
  using Range = std::pair<const char*, size_t>;  // its start and its bytes

  Range SourceOf(const CopyArray& a, bool gathers) const {
    return {a.source, a.rows * a.run * (gathers ? 1 : count())};
  }
  Range TargetOf(const CopyArray& a, bool gathers) const {
    return {a.target, a.rows * a.run * (gathers ? count() : count() - 1)};
  }
  static bool Meet(const Range& a, const Range& b) {
    return a.second > 0 && b.second > 0 && a.first < b.first + b.second &&
           b.first < a.first + a.second;
  }

  void Settle(int me, const std::string& why) {
    if (tell && IsHere(me)) tell(me, why);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (why_.empty()) why_ = why;
    ++num_settled_;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  int num_settled_ = 0;
  std::string why_;
};

// All jobs that are not finished.
template <typename Extra>
class CopyBoard {
 public:
  using Job = CopyJob<Extra>;
  using JobPointer = std::shared_ptr<Job>;
  using Jobs = std::vector<JobPointer>;

  // A child that fork() made has neither the threads nor the devices of its parent. Its lock may be
  // held by a thread that the child lacks, so it calls nothing else here.
  bool IsForked() const { return getpid() != pid_; }

  // Tells other processes of the first failure of a clique; set before it starts copies.
  std::function<void(int64_t run, const std::string& why)> tell_failure;

  // Posts the arrays of a device. `*is_last`: all have come. Null with `*why` if the execution
  // failed.
  JobPointer Start(const CopyVisitor& who, bool is_gather, typename Job::Post post, bool* is_last,
                   std::string* why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_stopped_) FailLocked(who.run, kStopped);
    if (HasFailed(who.run, why)) return nullptr;
    is_used_ = true;
    const JobPointer job = PostLocked(who, Visit(who), is_gather, std::move(post), is_last, why);
    if (job == nullptr) return nullptr;
    started_[{who.me, who.run, job->posts[who.me].arrays.front().target}] = job;
    return job;
  }

  // The same for a device of another process, which says how many starts came before this one.
  JobPointer StartElsewhere(const CopyVisitor& who, int64_t visit, bool is_gather,
                            typename Job::Post post, bool* is_last, std::string* why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (HasFailed(who.run, why)) return nullptr;
    return PostLocked(who, visit, is_gather, std::move(post), is_last, why);
  }

  // The job that a device started, by its first target. Null with `*why` if the execution failed.
  JobPointer Finish(const CopyVisitor& who, const char* target, std::string* why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (HasFailed(who.run, why)) return nullptr;
    const auto found = started_.find({who.me, who.run, target});
    if (found == started_.end()) {
      *why = FailureOf(who.me,
                       "a wait for copies that were not started, or whose target moved: "
                       "both must be in one program, under jax.jit");
      return nullptr;
    }
    const JobPointer job = found->second;
    started_.erase(found);
    return job;
  }

  // A device cannot go on: nobody waits for it in this execution.
  void Fail(int64_t run, const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    FailLocked(run, why);
  }

  // A device leaves its execution, which failed. Returns those of its jobs that all have started,
  // `waiting` too if it is one. `*why` becomes the first reason.
  Jobs Leave(const CopyVisitor& who, const JobPointer& waiting, std::string* why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    FailLocked(who.run, *why);
    *why = failures_[who.run];
    Jobs jobs = Take(who.me, [&](int64_t run, const Job&) { return run == who.run; });
    if (waiting != nullptr && waiting->num_posted == waiting->count()) jobs.push_back(waiting);
    return jobs;
  }

  // The jobs that a device abandoned and all have started: their memory is that of new arrays, so
  // that their executions have ended on this device. Those that not all have started never will.
  Jobs TakeAbandoned(const CopyVisitor& who, const std::vector<CopyArray>& arrays, bool is_gather) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::set<int64_t> runs;
    for (auto it = started_.lower_bound({who.me, INT64_MIN, nullptr});
         it != started_.end() && std::get<0>(it->first) == who.me; ++it) {
      const int64_t run = std::get<1>(it->first);
      if (run != who.run && it->second->Overlaps(who.me, arrays, is_gather)) runs.insert(run);
    }
    for (const int64_t run : runs)
      FailLocked(run, FailureOf(who.me, "it left the program between start and wait"));
    return Take(who.me, [&](int64_t run, const Job&) { return runs.count(run) > 0; });
  }

  // Python ends: nothing starts from here on, and nobody waits for a device. Executions that are
  // under way, and go on, may end before.
  void Stop() {
    for (int i = 0, idle = 0; is_used_ && i < 500 && idle < 5; ++i) {  // 5 s at most
      idle = IsIdle() ? idle + 1 : 0;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    is_stopped_ = true;
    while (!gathering_.empty()) FailLocked(gathering_.begin()->first.run, kStopped);
  }

 private:
  struct Key {
    int64_t run, site, visit;
    bool operator<(const Key& other) const {
      return std::tie(run, site, visit) < std::tie(other.run, other.site, other.visit);
    }
  };
  static constexpr size_t kMaxRuns = 64;  // more than any backend keeps in flight
  static constexpr const char* kStopped = "Python has ended, or is about to";

  // Whether nobody waits; those that abandoned their copies do not.
  bool IsIdle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& entry : started_)
      if (failures_.count(std::get<1>(entry.first)) == 0) return false;
    return gathering_.empty();
  }

  // Takes the entries of a device that are asked for. Returns their jobs that all have started.
  template <typename IsIt>
  Jobs Take(int me, const IsIt& is_it) {
    Jobs jobs;
    auto it = started_.lower_bound({me, INT64_MIN, nullptr});
    while (it != started_.end() && std::get<0>(it->first) == me) {
      const JobPointer& job = it->second;
      if (!is_it(std::get<1>(it->first), *job)) {
        ++it;
        continue;
      }
      if (job->num_posted == job->count()) jobs.push_back(job);
      it = started_.erase(it);
    }
    return jobs;
  }

  JobPointer PostLocked(const CopyVisitor& who, int64_t visit, bool is_gather,
                        typename Job::Post post, bool* is_last, std::string* why) {
    const Key key{who.run, SiteOf(who), visit};
    JobPointer& open = gathering_[key];
    if (!open) open = std::make_shared<Job>(who, visit, is_gather);
    const JobPointer job = open;
    if (!job->Fits(who, post) || job->is_gather != is_gather) {
      FailLocked(who.run, FailureOf(who.me, "its copies are not those of the other devices"));
      *why = failures_[who.run];
      return nullptr;
    }
    job->posts[who.me] = std::move(post);
    job->has_posted[who.me] = true;
    *is_last = ++job->num_posted == who.count;
    if (*is_last) gathering_.erase(key);
    return job;
  }

  // Starts between processes meet by their number alone; an execution has another one in each. No
  // call site of one process is negative: its many executions would push that number out.
  static int64_t SiteOf(const CopyVisitor& who) { return who.clique == nullptr ? who.site : -1; }

  bool HasFailed(int64_t run, std::string* why) const {
    const auto failed = failures_.find(run);
    if (failed != failures_.end()) *why = failed->second;
    return failed != failures_.end();
  }

  void FailLocked(int64_t run, const std::string& why) {
    if (run < 0 && tell_failure && failures_.count(run) == 0) tell_failure(run, why);
    failures_.insert({run, why});
    const auto oldest = failures_.lower_bound(0);  // of executions; those of cliques are for good
    if (size_t(std::distance(oldest, failures_.end())) > kMaxRuns) failures_.erase(oldest);
    auto it = gathering_.lower_bound({run, INT64_MIN, INT64_MIN});
    while (it != gathering_.end() && it->first.run == run) {
      it->second->Fail(why);
      it = gathering_.erase(it);
    }
  }

  int64_t Visit(const CopyVisitor& who) {
    auto& runs = visits_[{SiteOf(who), who.me}];
    for (auto& known : runs)
      if (known.first == who.run) return ++known.second;
    if (runs.size() == kMaxRuns) runs.pop_front();
    runs.emplace_back(who.run, 0);
    return 0;
  }

  const pid_t pid_ = getpid();
  std::mutex mutex_;
  bool is_stopped_ = false;
  std::atomic<bool> is_used_{false};
  std::map<Key, JobPointer> gathering_;  // not all devices have come
  // By place, run and first target: what a device has started and not waited for.
  std::map<std::tuple<int, int64_t, const char*>, JobPointer> started_;
  std::map<int64_t, std::string> failures_;  // by execution
  std::map<std::pair<int64_t, int>, std::deque<std::pair<int64_t, int64_t>>> visits_;
};

}  // namespace jdistadam
