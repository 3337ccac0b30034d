// The XLA FFI handlers of the CPU kernels.
#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include "ffi_backend.h"

namespace jdistadam {

static Threads ThreadsOf(ffi::ThreadPool& pool) {
  return {int(pool.num_threads()),
          [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); }};
}

template <typename Call>
using Kernel = void (*)(const Call&, const Threads&);

static constexpr std::tuple kKernels{&AdamCpu, &QuantizedCpu, &NormTilesCpu, &PartsCpu, &SumCpu};

// Called by the handlers, which are defined next to the code that reads their operands.
template <typename Call>
static ffi::Error Run(ffi::ThreadPool& pool, const Call& call) {
  std::get<Kernel<Call>>(kKernels)(call, ThreadsOf(pool));
  return ffi::Error::Success();
}

static ffi::Error Run(ffi::ThreadPool&, const NormCall& call) {
  NormCpu(call);
  return ffi::Error::Success();
}

static ffi::Error StartHostCopy(ffi::ThreadPool&, const HostCopy& copy, int32_t) {
  for (const HostCopy::Part& part : copy.parts) {
    copy.to_host ? std::memcpy(part.host, part.device, part.bytes)
                 : std::memcpy(part.device, part.host, part.bytes);
  }
  return ffi::Error::Success();
}

static ffi::Error WaitForHostCopy(ffi::ThreadPool&, const HostCopiedAttributes&, int32_t) {
  return ffi::Error::Success();
}

// Runs work() in its own thread. Afterwards XLA continues there, and flushes denormals: by POSIX a
// thread inherits the floating-point environment.
template <typename Work>
static ffi::Error InThread(Work work) {
  try {
    std::thread(std::move(work)).detach();
  } catch (const std::system_error& error) {
    return ffi::Error::Internal(std::string("jdistadam: no thread to step in: ") + error.what());
  }
  return ffi::Error::Success();
}

static void Complete(ffi::Promise promise, ffi::Error error) {
  error.success() ? promise.SetAvailable() : promise.SetError(std::move(error));
}

using CpuCopies = CopyBoard<char>;

static CpuCopies& CpuBoard() {
  static auto* board = new CpuCopies(/*is_in_order=*/false);  // outlives threads at exit
  return *board;
}

static CpuCopies& BoardOf(const ffi::ThreadPool&, const CopyVisitor&) { return CpuBoard(); }

// Reads the memory of other processes, by the kernel: for tests, and slower than threads.
class CpuBackend {
 public:
  CpuCopies& board() { return CpuBoard(); }
  void Use(const std::vector<int>&) {}
  template <typename Peers>
  std::string Show(const Peers&, const char*, size_t) {
    return "";
  }
  CopyAddress AddressOf(const char* pointer) { return {0, uint64_t(pointer)}; }
  char* Reach(CopyPeer&, const CopyAddress& address, size_t, std::string*) {
    return reinterpret_cast<char*>(address.offset);
  }
  void Learn(CopyPeer&, CopyMessage, MessageReader&) {}
  void PutExtra(MessageWriter*, const char&) {}
  bool GetExtra(CopyPeer&, MessageReader*, char*) { return true; }
  void Launch(const CpuCopies::JobPointer& job);
  std::function<bool()> UnderWay() {
    return [] { return false; };
  }
};

static CopyProcesses<CpuCopies, CpuBackend>& CpuProcesses() {
  static auto* processes = new CopyProcesses<CpuCopies, CpuBackend>;
  return *processes;
}

static auto& ProcessesOf(const ffi::ThreadPool&, const CopyGroup&) { return CpuProcesses(); }

// Returns why it could not.
static std::string Read(const CopyPiece& piece, pid_t pid) {
  for (size_t r = 0; r < piece.rows; ++r) {
    char* to = piece.to + r * piece.to_pitch;
    const char* from = piece.from + r * piece.from_pitch;
    if (pid == 0) {
      std::memcpy(to, from, piece.run);
      continue;
    }
    for (size_t done = 0; done < piece.run;) {
      const iovec here{to + done, piece.run - done};
      const iovec there{const_cast<char*>(from) + done, piece.run - done};
      const ssize_t count = process_vm_readv(pid, &here, 1, &there, 1, 0);
      if (count <= 0) return std::string("process_vm_readv: ") + std::strerror(errno);
      done += size_t(count);
    }
  }
  return "";
}

// Makes the copies into the arrays of all devices of this process.
void CpuBackend::Launch(const CpuCopies::JobPointer& job) {
  for (int to = 0; to < job->count(); ++to) {
    if (!job->IsHere(to)) continue;
    std::string why;
    for (int from = 0; from < job->count(); ++from) {  // its own part too, if it gathers
      const bool is_here = job->IsHere(from);
      const pid_t pid = is_here ? 0 : CpuProcesses().peer(job->clique->processes[from]).pid;
      job->ForPieces(from, to, [&](const CopyPiece& piece) {
        if (why.empty()) why = Read(piece, pid);
      });
    }
    if (!why.empty()) why = FailureOf(to, why);
    if (!why.empty()) CpuBoard().Fail(job->scope, why);
    why.empty() ? job->HasIssued(to) : job->HasGivenUp(to, why);
  }
}

// What reads and writes the arrays of devices here is in this process, and does not wait for
// others: it ends by itself.
static void DrainCopies(CpuCopies::Job& job, int) {
  for (int p = 0; p < job.count(); ++p)
    if (job.IsHere(p)) job.WaitUntilSettled(p, std::chrono::hours(24));
}

static ffi::Future IsOver(ffi::ThreadPool&, const CopyVisitor&, ffi::Error error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  Complete(std::move(promise), std::move(error));
  return future;
}

// Counts the threads in which devices wait for copies, so that none is left when Python ends.
class CopyWaiters {
 public:
  static void Add(int change) {
    const std::lock_guard<std::mutex> lock(Mutex());
    Count() += change;
    Changed().notify_all();
  }

  // A thread goes on with its program after the wait: one that never ends must not keep Python.
  static void WaitForNone() {
    std::unique_lock<std::mutex> lock(Mutex());
    Changed().wait_for(lock, std::chrono::seconds(60), [] { return Count() == 0; });
  }

 private:
  static std::mutex& Mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::condition_variable& Changed() {
    static auto* changed = new std::condition_variable;
    return *changed;
  }
  static int& Count() {
    static int count = 0;
    return count;
  }
};

// The last device that comes makes the copies of all. The others wait in threads of their own,
// never in one of XLA's: XLA would lack that thread for a collective concurrent with the step.
static ffi::Future StartCopies(ffi::ThreadPool& pool, const CopyVisitor& who,
                               const CopyStartAttributes& a, std::vector<CopyArray> arrays,
                               int32_t) {
  CpuCopies::JobPointer job;
  bool is_last = false;
  ffi::Error error = PostCopies(CpuBoard(), CpuProcesses(), who, a.gathers, std::move(arrays),
                                char{0}, &job, &is_last);
  if (error.failure()) return IsOver(pool, who, std::move(error));
  if (is_last) CpuProcesses().backend().Launch(job);
  if (job->IsIssued()) return IsOver(pool, who, ffi::Error::Success());
  ffi::Promise promise;
  ffi::Future future(promise);
  CopyWaiters::Add(1);
  error = InThread([promise, job, who]() mutable {
    const std::string why = job->WaitUntilIssued();
    Complete(std::move(promise),
             why.empty() ? ffi::Error::Success() : LeaveCopies(CpuBoard(), who, why, job));
    CopyWaiters::Add(-1);
  });
  if (error.failure()) {
    CopyWaiters::Add(-1);
    const std::string why = FailureOf(who.me, error.message());
    Complete(std::move(promise), LeaveCopies(CpuBoard(), who, why, job));
  }
  return future;
}

static ffi::Error WaitForCopies(ffi::ThreadPool&, const CopyVisitor&,
                                const CpuCopies::JobPointer& job) {
  CpuProcesses().HasWaited(job);
  return ffi::Error::Success();
}

void StopCopies() {
  if (CpuBoard().IsForked()) return;
  CpuBoard().Stop();
  CopyWaiters::WaitForNone();
  CpuProcesses().Stop();
}

void AbandonCopies() {}  // no start is over before its copies are

void JoinProcesses(int me, const JoinedProcesses& joined) { CpuProcesses().Join(me, joined); }

// Systems may allow it between processes of one program alone, or not at all.
bool ReachesProcess(int pid) {
  char byte = 0;
  const iovec here{&byte, 1}, nowhere{reinterpret_cast<void*>(1), 1};
  return process_vm_readv(pid, &here, 1, &nowhere, 1, 0) >= 0 || errno == EFAULT;
}

void LeaveProcesses(const std::string& why) { CpuProcesses().Stop("left: " + why); }

std::string NameOfDevice(int) { return ""; }

bool ReachesDevice(int, const std::string&) { return true; }

double LinkSpeed(int, int) { return 0; }

bool CanReach(int, int) { return true; }

std::vector<NamedHandler> Handlers() { return HandlersOf<ffi::ThreadPool>(); }

}  // namespace jdistadam
