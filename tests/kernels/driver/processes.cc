// Copies between processes (cuda/processes.h), each of which is here an object with its own board.
//
//   cd cuda
//   g++ -std=c++17 -O1 -g -fsanitize=thread -I. ../tests/kernels/driver/processes.cc -pthread
//       -o /tmp/processes
//   /tmp/processes
//
// tests/kernels/test_driver.py does so. With --plant a device says that it has read its parts
// before it does: that must be seen.

#include "processes.h"

#include <cstdio>
#include <functional>
#include <thread>

#include "expect.h"

namespace jdistadam {
namespace {

using std::chrono::seconds;
using Board = CopyBoard<char>;

constexpr int kDevices = 2;  // of a process

// All processes have the same memory.
class Backend {
 public:
  Board& board() { return board_; }
  void Use(const std::vector<int>&) {}
  template <typename Peers>
  std::string Show(const Peers&, const char*, size_t) {
    return "";
  }
  CopyAddress AddressOf(const char* pointer) { return {0, uint64_t(pointer)}; }
  char* Reach(CopyPeer&, const CopyAddress& at, size_t bytes, std::string* why) {
    if (bytes <= most_bytes) return reinterpret_cast<char*>(at.offset);
    *why = "arrays in memory that is not known";
    return nullptr;
  }
  void Learn(CopyPeer&, CopyMessage, MessageReader&) {}
  void PutExtra(MessageWriter*, const char&) {}
  bool GetExtra(CopyPeer&, MessageReader*, char*) { return opens_events; }
  std::function<bool()> UnderWay() {
    return [this] { return num_waits-- > 0; };
  }

  void Launch(const Board::JobPointer& job) {
    for (int to = 0; to < job->count(); ++to) {
      if (!job->IsHere(to)) continue;
      if (planted) job->HasIssued(to);
      for (int from = 0; from < job->count(); ++from)
        job->ForPieces(from, to, [](const CopyPiece& x) { std::memcpy(x.to, x.from, x.run); });
      if (!planted) job->HasIssued(to);
    }
  }

  // What it cannot do.
  size_t most_bytes = SIZE_MAX;
  bool opens_events = true;
  std::atomic<int> num_waits{0};  // how often something is under way after a death

 private:
  Board board_{true};
};

// Processes with sockets between every two. One that is not joined has sockets alone.
struct Run {
  explicit Run(int count, int num_joined) : processes(num_joined), sockets(count) {
    for (int i = 0; i < count; ++i)
      for (int k = i + 1; k < count; ++k) {
        int pair[2];
        Expect(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, "no sockets");
        sockets[i][k] = pair[0], sockets[k][i] = pair[1];
      }
    for (int i = 0; i < count * kDevices; ++i) numbers.push_back(kOfProcesses + i);
    for (int i = 0; i < num_joined; ++i) {
      JoinedProcesses joined{{}, {}, 1e6};
      for (int d = 0; d < count * kDevices; ++d)
        joined.devices.push_back({kOfProcesses + d, d / kDevices, d % kDevices});
      for (const auto& [k, fd] : sockets[i]) joined.sockets.push_back({k, fd, pid_t(1000 + k)});
      processes[i].Join(i, joined);
    }
  }
  ~Run() {
    for (auto& process : processes) process.Stop();
  }

  std::vector<CopyProcesses<Board, Backend>> processes;
  std::vector<std::map<int, int>> sockets;  // by process and the other one
  std::vector<int64_t> numbers;
};

// A device of a process, as the handlers use it.
class Device {
 public:
  Device(Run* run, int place)
      : process_(run->processes[place / kDevices]),
        clique_(process_.CliqueOf(run->numbers)),
        place_(place) {}

  // Sends part i of each half of `source` to device i. Returns why it cannot.
  std::string Start(int64_t execution, std::vector<char>* source, std::vector<char>* target,
                    int64_t channel = 1) {
    const int count = int(clique_->devices.size());
    who_ = {clique_->group, execution, place_ + 100 * channel, channel, count, place_, clique_};
    const size_t half = source->size() / 2, run = half / size_t(count);
    const std::vector<CopyArray> arrays{
        {source->data(), target->data(), 1, run, 0},
        {source->data() + half, target->data() + run * size_t(count - 1), 1, run, 0}};
    std::string why = process_.Show(who_, false, arrays);
    bool is_last = false;
    const auto start = [&] {
      return process_.backend().board().Start(who_, false, {arrays, 0}, &is_last, &why);
    };
    const auto job = process_.Post(who_, start);
    if (job != nullptr && is_last) process_.backend().Launch(job);
    return why;
  }

  std::string Wait(std::vector<char>* target) {
    std::string why;
    const auto job = process_.backend().board().Finish(who_, target->data(), &why);
    if (job == nullptr) return Leave(why);
    why = job->WaitUntilIssued();
    if (why.empty()) process_.HasWaited(job);
    return why.empty() ? why : Leave(why, job);
  }

  // Returns when nothing writes its arrays any more, which must be soon.
  std::string Leave(std::string why, const Board::JobPointer& waiting = nullptr) {
    for (const auto& job : process_.backend().board().Leave(who_, waiting, &why))
      Expect(job->WaitUntilSettled(place_, seconds(20)), "copies that nobody makes");
    return why;
  }

 private:
  CopyProcesses<Board, Backend>& process_;
  const CopyClique* clique_;
  const int place_;
  CopyVisitor who_{};
};

void OnDevices(Run* run, const std::function<void(int, Device*)>& use) {
  std::vector<std::thread> threads;
  for (int place = 0; place < int(run->processes.size()) * kDevices; ++place)
    threads.emplace_back([&use, run, place] {
      Device device(run, place);
      use(place, &device);
    });
  for (auto& thread : threads) thread.join();
}

void TestExecutions() {
  Run run(3, 3);
  const int n = 3 * kDevices, part = 1 << 12;
  OnDevices(&run, [&](int me, Device* device) {
    std::vector<char> sources[2], targets[2];
    for (int k : {0, 1}) sources[k].resize(n * part), targets[k].resize((n - 1) * part);
    for (int i = 0; i < 40; ++i) {
      const auto tag = [i](int k, int place) { return char(20 * (i % 5) + 10 * k + place); };
      for (int k : {0, 1}) {  // two are on their way
        std::fill(sources[k].begin(), sources[k].end(), tag(k, me));
        const std::string why = device->Start(i, &sources[k], &targets[k]);
        Expect(why.empty(), "a start failed: " + why);
      }
      for (int k : {0, 1}) {
        const std::string why = device->Wait(&targets[k]);
        Expect(why.empty(), "a wait failed: " + why);
        for (int p = 0; p < 2 * (n - 1); ++p) {
          const int from = p % (n - 1);
          Expect(targets[k][(p + 1) * part / 2 - 1] == tag(k, from < me ? from : from + 1),
                 "another's part");
        }
      }
    }
  });
}

// All processes know at once if the starts of one have another size.
void TestOtherStarts() {
  Run run(2, 2);
  std::atomic<int> num_failed{0};
  OnDevices(&run, [&](int me, Device* device) {
    const size_t size = 1024 * (me < kDevices ? 8 : 4);
    std::vector<std::vector<char>> memory(2, std::vector<char>(size));
    std::string why = device->Start(1, &memory[0], &memory[1]);
    if (why.empty()) why = device->Wait(&memory[1]);
    if (Has(why, "not those of the other devices")) ++num_failed;
  });
  Expect(num_failed == 2 * kDevices, "starts that differ were not seen by all");
}

// Programs have other run ids in each process, as far apart whenever they run. Processes that run
// two programs in another order know it; calls of another channel never come.
void TestOtherPrograms(bool is_channel) {
  Run run(2, 2);
  std::atomic<int> num_failed{0};
  OnDevices(&run, [&](int me, Device* device) {
    std::vector<std::vector<char>> memory(2, std::vector<char>(4096));
    const int64_t first = me < kDevices ? 1000 : -7000, second = me < kDevices ? 500'000 : 90'000;
    std::string why;
    for (int i = 0; i < 20 && why.empty(); ++i) {
      why = device->Start((i % 2 ? second : first) + i / 2, &memory[0], &memory[1]);
      if (why.empty()) why = device->Wait(&memory[1]);
    }
    for (int i = 0; i < 3 && why.empty(); ++i) {  // some processes compile a program again
      why = device->Start((me < kDevices ? first + 10 : 777) + i, &memory[0], &memory[1]);
      if (why.empty()) why = device->Wait(&memory[1]);
    }
    Expect(why.empty(), "programs in order: " + why);
    if (is_channel) WaitLimitMs() = 1000;
    const bool is_other = me < kDevices;
    const int64_t next = is_other && !is_channel ? second : first;
    why = device->Start(next + 13, &memory[0], &memory[1], is_other && is_channel ? 2 : 1);
    if (why.empty()) why = device->Wait(&memory[1]);
    const bool names_other = Has(why, "(process 0)") || Has(why, "(process 1)");
    if (names_other && Has(why, is_channel ? "did not come within" : "in another order"))
      ++num_failed;
  });
  WaitLimitMs() = 60'000;
  Expect(num_failed == 2 * kDevices, "other programs: " + std::to_string(num_failed));
}

// A process that cannot use what another one posts fails the clique in both, with one reason. Both
// live on, and still hear each other.
void TestRefused(const char* expected, const std::function<void(Backend*)>& plant) {
  const int n = 2 * kDevices;
  // It outlives the process that sends: this one may have heard of all starts before the refusal.
  std::vector<std::vector<char>> memory(2 * n, std::vector<char>(4096));
  Run run(2, 2);
  plant(&run.processes[1].backend());
  OnDevices(&run, [&](int me, Device* device) {
    for (int i = 1; i < 3; ++i) {
      std::string why = device->Start(i, &memory[me], &memory[n + me]);
      if (why.empty()) why = device->Wait(&memory[n + me]);
      Expect(Has(why, "process 0 (pid 1000) has posted ") && Has(why, expected),
             "refused, at place " + std::to_string(me) + ": " + why);
    }
  });
}

// A process outlives another one, even if a GPU waits for its copies for a while.
void TestAfterADeath() {
  Run run(2, 1);
  run.processes[0].backend().num_waits = 3;
  close(run.sockets[1][0]);
  const auto limit = std::chrono::steady_clock::now() + seconds(20);
  while (run.processes[0].backend().num_waits >= 0 && std::chrono::steady_clock::now() < limit)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  Expect(run.processes[0].backend().num_waits < 0, "nobody asks what is under way");
}

// What happens to devices that wait for a process, after act(its socket to this one).
void TestBroken(const char* expected, const std::function<void(int)>& act) {
  Run run(2, 1);
  OnDevices(&run, [&](int me, Device* device) {
    std::vector<char> source(4096), target(3072);
    std::string why = device->Start(1, &source, &target);
    if (me == 0) act(run.sockets[1][0]);
    if (why.empty()) why = device->Wait(&target);
    Expect(Has(why, expected), why);
    why = device->Start(2, &source, &target);
    Expect(Has(why, expected), "the next start: " + why);
  });
}

void Send(int fd, CopyMessage kind, const std::string& body) {
  CopyPeer peer(fd, 0, 0);
  Expect(!peer.Send(kind, body), "a message is left");
}

// A process that ends, as programs do, has sent all that others wait for. Their next start fails.
void TestTheEnd() {
  Run run(2, 2);
  const int n = 2 * kDevices;
  std::vector<std::vector<char>> memory(2 * n, std::vector<char>(4096));
  std::vector<Device> devices;
  for (int me = 0; me < n; ++me) devices.emplace_back(&run, me);
  for (int me = 0; me < n; ++me)
    Expect(devices[me].Start(1, &memory[me], &memory[n + me]).empty(), "the end: no start");
  for (int me = kDevices; me < n; ++me)
    Expect(devices[me].Wait(&memory[n + me]).empty(), "the end: no copies");
  run.processes[1].Stop();
  for (int me = 0; me < kDevices; ++me) {
    const std::string why = devices[me].Wait(&memory[n + me]);
    Expect(why.empty(), "after the end: " + why);
  }
  for (int me = 0; me < kDevices; ++me) {  // the other one may hear of the end after this start
    std::string why = devices[me].Start(2, &memory[me], &memory[n + me]);
    if (why.empty()) why = devices[me].Wait(&memory[n + me]);
    Expect(Has(why, "process 1 (pid 1001) has ended"), "after the end: a start: " + why);
  }
}

// A process that has heard of all starts waits for copies. One that has failed meanwhile says that
// it makes none.
void TestStartsAfterAFailure() {
  Run run(2, 1);
  const auto* clique = run.processes[0].CliqueOf(run.numbers);
  run.processes[0].backend().board().Fail(CopyVisitor::ScopeOf(clique->group), "broken");
  std::vector<char> source(4096), target(3072);
  MessageWriter post;
  const CopyName name{clique->group, 1, 1, 0};
  post.PutAll(run.numbers).Put(kDevices).Put(name).Put(int64_t{1}).Put(false);
  post.Put(uint64_t{1}).Put(CopyAddress{0, uint64_t(target.data())});
  post.Put(uint64_t{1}).Put(uint64_t{1024});
  Send(run.sockets[1][0], CopyMessage::kPost, post.Put(uint64_t{0}).bytes);
  CopyPeer peer(run.sockets[1][0], 0, 0);
  std::set<int> given_up;
  pollfd ready{peer.fd(), POLLIN, 0};
  while (given_up.size() < kDevices && poll(&ready, 1, 10'000) > 0 &&
         peer.Receive([&](CopyMessage kind, MessageReader& reader) -> std::string {
           if (kind != CopyMessage::kIssued)
             return (void)reader.Get<int64_t>(), (void)reader.GetText(), "";
           const auto of = reader.Get<CopyName>();
           Expect(!(of < name) && !(name < of), "another start");
           given_up.insert(reader.Get<int>());
           Expect(reader.GetText() == "broken", "another reason");
           return "";
         })) {
  }
  Expect(given_up == std::set<int>{0, 1}, "a process does not say that it makes no copies");
}

}  // namespace
}  // namespace jdistadam

int main(int argc, char** argv) {
  using namespace jdistadam;
  planted = argc > 1 && std::string(argv[1]) == "--plant";
  TestExecutions();
  TestOtherStarts();
  TestOtherPrograms(false);
  TestOtherPrograms(true);
  TestTheEnd();
  TestStartsAfterAFailure();
  TestAfterADeath();
  TestRefused("events that cannot be opened", [](Backend* x) { x->opens_events = false; });
  TestRefused("memory that is not known", [](Backend* x) { x->most_bytes = 4 * 512 - 1; });
  TestBroken("process 1 (pid 1001) has died", [](int fd) { close(fd); });
  TestBroken("has sent a message of an unknown kind",
             [](int fd) { Send(fd, CopyMessage(77), "something"); });
  TestBroken("has sent a message of a wrong size",
             [](int fd) { Send(fd, CopyMessage::kFailed, "short"); });
  TestBroken("has sent copies of devices that are not its own", [](int fd) {
    const std::vector<int64_t> numbers{kOfProcesses, kOfProcesses + 1};
    Send(fd, CopyMessage::kPost, MessageWriter().PutAll(numbers).Put(0).bytes);
  });
  TestBroken("has sent copies of devices that are not its own", [](int fd) {
    std::vector<int64_t> numbers(kMaxCopyDevices + 1, kOfProcesses);  // too many
    numbers[0] = kOfProcesses + kDevices;
    MessageWriter post;
    post.PutAll(numbers)
        .Put(0)
        .Put(CopyName{-1, 0, 0, 0})
        .Put(int64_t{0})
        .Put(false)
        .Put(uint64_t{0});
    Send(fd, CopyMessage::kPost, post.bytes);
  });
  TestBroken("has sent copies of devices that are not its own", [](int fd) {
    std::vector<int64_t> numbers;
    for (int i = 0; i < 2 * kDevices; ++i) numbers.push_back(kOfProcesses + i);
    MessageWriter post;  // neither a gather nor an exchange
    post.PutAll(numbers).Put(kDevices).Put(CopyName{-1, 0, 0, 0}).Put(int64_t{0}).Put(uint8_t{2});
    Send(fd, CopyMessage::kPost, post.Put(uint64_t{0}).bytes);
  });
  std::printf(failures == 0 ? "SUCCESS\n" : "%d FAILURES\n", failures.load());
  return failures == 0 ? 0 : 1;
}
