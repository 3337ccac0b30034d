// Copies between the arrays of several devices of one process, concurrently with their programs.
//
// All devices of a program make the same copies. Each one *starts* them: it posts the addresses of
// its arrays, and goes on. When all have posted, every device reads its parts from the others'
// arrays. Later each one *waits* until its arrays have arrived, and its own have been read. Between
// the two the caller must not write its sources, nor use its targets.
//
//   exchange   source (rows, n, run), target (n - 1, rows, run): part q of the source of device p
//              goes to device q, whose target has the parts of all others, in their order
//   gather     source (rows, run), target (rows, n, run): the source of device p is part p of the
//              target of every device. In place: the source is that part of the own target
//
// The life of copies; who does it; what ends it:
//
//   start     the program of a device posts its arrays on the board. The first post with a name
//             makes a job, the last one launches it.
//   issue     GPUs: a thread of the device enqueues its copies. CPUs: the last device that comes
//             makes those of all of its process. Each device then settles: issued, or given up.
//   wait      the program of a device, until all have issued; the GPU itself waits for the copies.
//             On CPUs the start is not over before that: XLA frees no array under a copy.
//   end       the job ends with its last holder: devices that have not waited, threads that issue
//             it, other processes that have not waited (processes.h).
//
// Starts that meet have one *name*: CopyName. It never depends on who comes first. A wait knows its
// start by the execution and the address of its first target.
//
// Who writes what: a device writes its own targets alone, so no failure writes into the arrays of
// another device or process. If a device cannot go on, its execution has failed on all devices,
// which *leave* it. Copies that not all devices have started are never made. The others end on all
// devices before a device returns its error and its arrays are released. If another call fails
// between start and wait on a GPU, XLA tells nobody, and releases the targets. Such copies are
// *abandoned*: a train step or an evaluation ends them before its error leaves
// (CopyBoard::Abandon), and so does a later start that gets their memory. What runs in between in
// one's own program, after an error of one's own, may lose a write: that window is left. Other
// devices miss the device at their next copies.
//
// A wait on the host for another device ends after WaitLimit, with an error that names who was
// missing; or, if copies may still write memory that would be released, with the end of the
// process. Nothing ends the wait of a GPU for that of another process that lives (processes.h: one
// that died).
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

// How long a device waits on the host for others; for all waits of the process.
inline std::atomic<int64_t>& WaitLimitMs() {
  static std::atomic<int64_t> limit{300'000};
  return limit;
}

inline std::chrono::milliseconds WaitLimit() { return std::chrono::milliseconds(WaitLimitMs()); }

inline std::string WithinLimit() {
  return "within " + std::to_string((WaitLimitMs() + 999) / 1000) + " s";
}

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

// Which start: equal on all devices that meet in it, different for all other starts.
//
//   group       which devices. Between processes negative: a hash of their numbers
//   execution   XLA's run id: a hash of the compiled program, plus how often it has run; all
//               devices of a process have the same. Other processes may have another hash, of the
//               lines from which they traced the program. So GPUs of several processes, which run
//               programs in order, count those that copy among each other, and compare how far
//               their run ids are apart: one number for each program (CopyBoard::RunTogether)
//   call        the instruction of the program. In one process the address of its attributes, which
//               is one for all devices, and differs where a compiler has inlined or unrolled what
//               was traced once. Between processes its channel, which JAX counts in each program
//   visit       how often the device has come to it in this execution: in a loop
struct CopyName {
  int64_t group, execution, call, visit;

  bool operator<(const CopyName& other) const { return AsTuple() < other.AsTuple(); }

 private:
  std::tuple<int64_t, int64_t, int64_t, int64_t> AsTuple() const {
    return {group, execution, call, visit};
  }
};

// The devices that copy among each other, if some are of other processes: processes.h.
struct CopyClique {
  int64_t group;                              // negative, and equal in all processes
  std::vector<int64_t> devices;               // their numbers, which are those of JAX
  std::vector<int> processes;                 // of each device; kHere for this process
  std::vector<int> ordinals;                  // of those of this process
  mutable std::atomic<bool> has_died{false};  // one of the processes
};

constexpr int kHere = -1;

// What fails together: an execution; between processes a clique, for good.
using CopyScope = std::pair<int64_t, int64_t>;

// Who starts copies: device `me` of `count`, by a call of an execution.
struct CopyVisitor {
  int64_t group, execution;
  int64_t call;     // the address of its attributes
  int64_t channel;  // of the call
  int count, me;
  const CopyClique* clique = nullptr;  // null if all devices are of this process

  CopyScope Scope() const { return clique == nullptr ? CopyScope{0, execution} : ScopeOf(group); }
  static CopyScope ScopeOf(int64_t clique) { return {clique, 0}; }
  std::pair<int64_t, int> Device() const { return {group, me}; }
};

// What a device says when it cannot go on.
inline std::string FailureOf(int me, const std::string& why) {
  return (me < 0 ? "a device that was not asked" : "the device at place " + std::to_string(me)) +
         " failed: " + why;
}

// The copies of one start, on all devices.
template <typename Extra>
class CopyJob {
 public:
  struct Post {
    std::vector<CopyArray> arrays;
    Extra extra;
    int64_t execution = 0;  // of the process, filled in by the board
  };

  CopyJob(const CopyVisitor& who, const CopyName& name, bool is_gather)
      : name(name),
        scope(who.Scope()),
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

  // A device has enqueued all copies into its arrays.
  void HasIssued(int me) { Settle(me, ""); }

  // A device could not, and what it had enqueued is done.
  void HasGivenUp(int me, const std::string& why) { Settle(me, why); }

  bool IsHere(int place) const { return clique == nullptr || clique->processes[place] == kHere; }

  // Whether a device's arrays have the sizes of those that others have posted.
  bool Fits(const CopyVisitor& who, const Post& post) const {
    if (who.count != count()) return false;
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
  std::string WaitUntilIssued() {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool came = changed_.wait_for(lock, WaitLimit(),
                                        [&] { return !why_.empty() || num_settled_ == count(); });
    if (!came) {
      why_ = Missing(has_posted, "devices did not come ");
      if (why_.empty()) why_ = Missing(has_settled_, "copies were not enqueued ");
      changed_.notify_all();
    }
    return why_;
  }

  // Waits until a device has enqueued its copies or has given up: all have started them. False if
  // it has not.
  bool WaitUntilSettled(int me, std::chrono::milliseconds limit) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, limit, [&] { return has_settled_[me].load(); });
  }

  // A place along the axis of the mesh, with the process that it belongs to.
  std::string NameOf(int place) const {
    return "place " + std::to_string(place) +
           (IsHere(place) ? "" : " (process " + std::to_string(clique->processes[place]) + ")");
  }

  const CopyName name;
  const CopyScope scope;
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
    if (!has_settled_[me].exchange(true)) ++num_settled_;
    changed_.notify_all();
  }

  // Who is missing; "" if nobody is.
  std::string Missing(const std::atomic<bool>* have, const std::string& what) const {
    std::string places;
    for (int i = 0; i < count(); ++i)
      if (!have[i]) places += (places.empty() ? "" : ", ") + NameOf(i);
    return places.empty() ? "" : what + WithinLimit() + ": " + places;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> has_settled_[kMaxCopyDevices] = {};
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

  // Whether every device makes its calls in the order of the program, as GPUs do. CPUs make those
  // that do not need each other in any order.
  explicit CopyBoard(bool is_in_order) : is_in_order_(is_in_order) {}

  // A child that fork() made has neither the threads nor the devices of its parent. Its lock may be
  // held by a thread that the child lacks, so it calls nothing else here.
  bool IsForked() const { return getpid() != pid_; }

  // Tells other processes of the first failure of a clique; set before it starts copies.
  std::function<void(int64_t group, const std::string& why)> tell_failure;

  // Posts the arrays of a device. `*is_last`: all have come. Null with `*why` if the execution
  // failed.
  JobPointer Start(const CopyVisitor& who, bool is_gather, typename Job::Post post, bool* is_last,
                   std::string* why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_stopped_) FailLocked(who.Scope(), kStopped);
    if (HasFailed(who, why)) return nullptr;
    is_used_ = true;
    bool is_clear = true;
    const CopyName name = NameOf(who, &is_clear);
    if (!is_clear) {
      *why = Refuse(who,
                    "a function that copies and is compiled once is called several times in a "
                    "program of several processes, whose CPU devices call it in any order: call it "
                    "without jax.jit, and give jax.checkpoint a function for each call");
      return nullptr;
    }
    const JobPointer job = PostLocked(who, name, is_gather, std::move(post), is_last, why);
    if (job == nullptr) return nullptr;
    started_[{who.Device(), who.execution, job->posts[who.me].arrays.front().target}] = job;
    return job;
  }

  // The same for a device of another process, which says the name of its start.
  JobPointer StartElsewhere(const CopyVisitor& who, const CopyName& name, bool is_gather,
                            typename Job::Post post, bool* is_last, std::string* why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (HasFailed(who, why)) return nullptr;
    return PostLocked(who, name, is_gather, std::move(post), is_last, why);
  }

  // The job that a device started, by its first target. Null with `*why` if the execution failed.
  JobPointer Finish(const CopyVisitor& who, const char* target, std::string* why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (HasFailed(who, why)) return nullptr;
    const auto found = started_.find({who.Device(), who.execution, target});
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

  // A device cannot go on: nobody waits for it.
  void Fail(const CopyScope& scope, const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    FailLocked(scope, why);
  }

  // A device leaves its execution, which failed. Returns those of its jobs that all have started,
  // `waiting` too if it is one. `*why` becomes the first reason.
  Jobs Leave(const CopyVisitor& who, const JobPointer& waiting, std::string* why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    FailLocked(who.Scope(), *why);
    Failure& failure = failures_[who.Scope()];
    *why = failure.why;
    failure.left.insert(who.Device());
    Jobs jobs = Take(who.Device(), [&](int64_t execution) { return execution == who.execution; });
    if (waiting != nullptr && waiting->num_posted == waiting->count()) jobs.push_back(waiting);
    return jobs;
  }

  // The jobs that a device abandoned and all have started: their memory is that of new arrays, so
  // that their executions have ended on this device. Those that not all have started never will.
  Jobs TakeAbandoned(const CopyVisitor& who, const std::vector<CopyArray>& arrays, bool is_gather) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::map<int64_t, CopyScope> left;  // by execution
    for (auto it = started_.lower_bound({who.Device(), INT64_MIN, nullptr});
         it != started_.end() && std::get<0>(it->first) == who.Device(); ++it) {
      const int64_t execution = std::get<1>(it->first);
      if (execution != who.execution && it->second->Overlaps(who.me, arrays, is_gather))
        left[execution] = it->second->scope;
    }
    for (const auto& [execution, scope] : left) FailLocked(scope, FailureOf(who.me, kLeft));
    return Take(who.Device(), [&](int64_t execution) { return left.count(execution) > 0; });
  }

  // After an error of a program: whatever devices here have started and not waited for has no one
  // who waits. Returns the jobs that all have started, each with the place of a device here.
  std::vector<std::pair<JobPointer, int>> Abandon() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::pair<JobPointer, int>> jobs;
    for (const auto& [key, job] : started_) {
      const int me = std::get<0>(key).second;
      FailLocked(job->scope, FailureOf(me, kLeft));
      if (job->num_posted == job->count()) jobs.push_back({job, me});
    }
    started_.clear();
    failures_.erase(failures_.lower_bound({0, INT64_MIN}),
                    failures_.end());  // their numbers return
    return jobs;
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
    while (!gathering_.empty()) FailLocked(gathering_.begin()->second->scope, kStopped);
  }

 private:
  using Device = std::pair<int64_t, int>;  // its group, and its place there

  struct Failure {
    std::string why;
    std::set<Device> left;  // if they come again, then in another execution of the same number
  };

  struct Visits {
    int64_t execution, call, count;
  };

  // By group and place, and by the last run id of each program: how far theirs and mine are apart.
  class Distances {
   public:
    // Whether it is as before, or the program is new.
    bool Note(int64_t group, int place, int32_t run, int32_t apart) {
      auto it = last_.upper_bound({group, place, run});
      bool is_so = true;
      if (it != last_.begin()) {
        const auto [known_group, known_place, before] = (--it)->first;
        const bool is_program =
            known_group == group && known_place == place && int64_t{run} - before <= kMostBetween;
        is_so = !is_program || it->second == apart;
        if (is_program) last_.erase(it);
      }
      last_[{group, place, run}] = apart;
      return is_so;
    }

   private:
    std::map<std::tuple<int64_t, int, int32_t>, int32_t> last_;
  };

  static constexpr size_t kMaxRuns = 64;        // more than any backend keeps in flight
  static constexpr int64_t kMostBetween = 256;  // executions of a program that copy nothing
  static constexpr const char* kStopped = "Python has ended, or is about to";
  static constexpr const char* kLeft = "it left the program between start and wait";

  // Whether nobody waits; those that abandoned their copies do not.
  bool IsIdle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [key, job] : started_)
      if (failures_.count(job->scope) == 0) return false;
    return gathering_.empty();
  }

  // Takes the entries of a device that are asked for. Returns their jobs that all have started.
  template <typename IsIt>
  Jobs Take(const Device& device, const IsIt& is_it) {
    Jobs jobs;
    auto it = started_.lower_bound({device, INT64_MIN, nullptr});
    while (it != started_.end() && std::get<0>(it->first) == device) {
      const JobPointer& job = it->second;
      if (!is_it(std::get<1>(it->first))) {
        ++it;
        continue;
      }
      if (job->num_posted == job->count()) jobs.push_back(job);
      it = started_.erase(it);
    }
    return jobs;
  }

  JobPointer PostLocked(const CopyVisitor& who, const CopyName& name, bool is_gather,
                        typename Job::Post post, bool* is_last, std::string* why) {
    JobPointer& open = gathering_[name];
    if (!open) open = std::make_shared<Job>(who, name, is_gather);
    const JobPointer job = open;
    if (!job->Fits(who, post) || job->is_gather != is_gather || job->has_posted[who.me]) {
      *why = Refuse(who, "its copies are not those of the other devices");
      return nullptr;
    }
    post.execution = who.execution;
    job->posts[who.me] = std::move(post);
    if (job->num_posted + 1 == who.count && !RunTogether(*job, why)) {
      *why = Refuse(who, *why);  // as one that not all have started: nobody makes its copies
      return nullptr;
    }
    job->has_posted[who.me] = true;
    *is_last = ++job->num_posted == who.count;
    if (*is_last) gathering_.erase(name);
    return job;
  }

  std::string Refuse(const CopyVisitor& who, const std::string& why) {
    FailLocked(who.Scope(), FailureOf(who.me, why));
    return failures_[who.Scope()].why;
  }

  bool HasFailed(const CopyVisitor& who, std::string* why) const {
    const auto failed = failures_.find(who.Scope());
    if (failed == failures_.end()) return false;
    if (who.clique == nullptr && failed->second.left.count(who.Device()) > 0) return false;
    *why = failed->second.why;
    return true;
  }

  void FailLocked(const CopyScope& scope, const std::string& why) {
    const bool is_clique = scope.first < 0;
    if (is_clique && tell_failure && failures_.count(scope) == 0) tell_failure(scope.first, why);
    failures_.insert({scope, {why, {}}});
    auto other = failures_.lower_bound({0, INT64_MIN});  // those of cliques are for good
    if (size_t(std::distance(other, failures_.end())) > kMaxRuns)
      failures_.erase(other->first == scope ? std::next(other) : other);
    for (auto& [of, runs] : visits_)  // another execution with its number begins anew
      for (size_t i = 0; i < runs.size() && !is_clique; ++i)
        if (runs[i].execution == scope.second) runs.erase(runs.begin() + ptrdiff_t(i--));
    for (auto it = gathering_.begin(); it != gathering_.end();) {
      if (it->second->scope == scope) {
        it->second->Fail(why);
        it = gathering_.erase(it);
      } else {
        ++it;
      }
    }
  }

  // Whether all processes run one program. Whenever it runs, their run ids are as far apart, until
  // one of them compiles it again.
  bool RunTogether(const Job& job, std::string* why) {
    if (job.clique == nullptr) return true;
    int here = 0;
    while (!job.IsHere(here)) ++here;
    const auto mine = int32_t(job.posts[here].execution);
    for (int p = 0; p < job.count(); ++p) {
      const auto theirs = int32_t(job.posts[p].execution);
      const auto apart = int32_t(uint32_t(theirs) - uint32_t(mine));
      const bool knows_mine = apart_from_mine_.Note(job.name.group, p, mine, apart);
      const bool knows_theirs = apart_from_theirs_.Note(job.name.group, p, theirs, apart);
      if (knows_mine || knows_theirs || job.IsHere(p)) continue;
      *why = "programs that are not those of " + job.NameOf(p) + ", or are run in another order";
      return false;
    }
    return true;
  }

  // The name of a device's next start. `*is_clear` unless two calls have one channel, and nothing
  // tells which of them other processes call first.
  CopyName NameOf(const CopyVisitor& who, bool* is_clear) {
    const bool is_shared = who.clique != nullptr, is_counted = is_shared && is_in_order_;
    if (is_counted) {
      auto& [last, count] = executions_[who.Device()];
      if (count == 0 || last != who.execution) last = who.execution, ++count;
    }
    const int64_t execution = is_counted ? executions_[who.Device()].second : who.execution;
    const int64_t call = is_shared ? who.channel : who.call;
    auto& runs = visits_[{who.Device(), call}];
    for (Visits& known : runs) {
      if (known.execution != execution) continue;
      *is_clear = is_in_order_ || !is_shared || known.call == who.call;
      return {who.group, execution, call, ++known.count};
    }
    if (runs.size() == kMaxRuns) runs.pop_front();
    runs.push_back({execution, who.call, 0});
    return {who.group, execution, call, 0};
  }

  const bool is_in_order_;
  const pid_t pid_ = getpid();
  std::mutex mutex_;
  bool is_stopped_ = false;
  std::atomic<bool> is_used_{false};
  std::map<CopyName, JobPointer> gathering_;  // not all devices have come
  // By device, execution and first target: what a device has started and not waited for.
  std::map<std::tuple<Device, int64_t, const char*>, JobPointer> started_;
  std::map<CopyScope, Failure> failures_;
  std::map<std::pair<Device, int64_t>, std::deque<Visits>> visits_;
  std::map<Device, std::pair<int64_t, int64_t>> executions_;  // the last one, and their number
  Distances apart_from_mine_, apart_from_theirs_;
};

}  // namespace jdistadam
