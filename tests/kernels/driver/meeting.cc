// Meetings of devices (cuda/meeting.h), each device a thread, and a step over peer memory in them.
//
//   cd cuda
//   g++ -std=c++17 -O1 -g -fsanitize=thread -DJDISTADAM_NO_CLONES -I.
//       ../tests/kernels/driver/meeting.cc {adam,norm,peer}_cpu.cc -pthread -o /tmp/meeting
//   /tmp/meeting
//
// tests/kernels/test_driver.py does so. With --plant a device goes on without the second meeting of
// a step: the thread sanitizer must see it.

#include "meeting.h"

#include <atomic>
#include <cstdio>
#include <functional>
#include <thread>

#include "adam_math.h"
#include "peer.h"

namespace jdistadam {
namespace {

using std::chrono::seconds;
using Clock = std::chrono::steady_clock;
using M = Meetings<int64_t>;

std::atomic<int> failures{0};
bool planted = false;

void Expect(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("FAIL %s\n", what.c_str());
  ++failures;
}

// Runs device(0) ... device(count - 1) in threads of their own.
void OnDevices(int count, const std::function<void(int)>& device) {
  std::vector<std::thread> threads;
  for (int me = 0; me < count; ++me) threads.emplace_back([&device, me] { device(me); });
  for (auto& thread : threads) thread.join();
}

// A visit of a site with two meetings, as a handler makes it. Whether all were there, with the
// entries of this visit.
bool Visit(M* meetings, const Visitor& who, int64_t* visit) {
  *visit = meetings->Visit(who);
  for (int stage = 0; stage < 2; ++stage) {
    std::string why;
    const auto tag = [&](int64_t i) { return ((who.run * 100 + *visit) * 10 + stage) * 10 + i; };
    const auto entries = meetings->Meet(who, *visit, stage, tag(who.me), seconds(60), &why);
    if (!entries) return false;
    for (int i = 0; i < who.count; ++i) {
      if ((*entries)[i] != tag(i)) return false;
    }
  }
  return true;
}

void TestLoops() {
  M meetings;
  OnDevices(8, [&](int me) {
    for (int64_t run = 0; run < 20; ++run) {
      for (int64_t turn = 0; turn < 10; ++turn) {
        int64_t visit;
        Expect(Visit(&meetings, {run, 1, 8, me}, &visit), "loop: not the entries of this visit");
        Expect(visit == turn, "loop: visits are not counted");
      }
    }
  });
}

// Two executions of one program take turns on every device, in an order of its own.
void TestTwoExecutions() {
  M meetings;
  OnDevices(8, [&](int both) {
    const int me = both % 4, run = both / 4;
    for (int64_t turn = 0; turn < 200; ++turn) {
      int64_t visit;
      Expect(Visit(&meetings, {run, 1, 4, me}, &visit), "two executions: mixed up");
      Expect(visit == turn, "two executions: one counted the visits of the other");
    }
  });
}

// Device 2 comes after the limit of the others, or never; `says`: it fails by itself, at once.
void TestOneDoesNotCome(bool says, bool comes_late) {
  M meetings;
  const auto start = Clock::now();
  OnDevices(4, [&](int me) {
    const Visitor who{7, 3, 4, me};
    const int64_t visit = meetings.Visit(who);
    if (me == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(says ? 100 : 1500));
      if (says) return meetings.Fail(who, "wrong operands");
      if (!comes_late) return;
    }
    std::string why;
    const auto limit = seconds(says ? 60 : 1);
    Expect(meetings.Meet(who, visit, 0, me, limit, &why) == nullptr,
           "missing: a meeting all the same");
    const char* expected = says ? "the device at place 2 failed: wrong operands"
                                : "the devices at places 2 did not come within 1 s";
    Expect(why == expected, "missing: says " + why);
  });
  Expect(Clock::now() - start < seconds(10), "missing: waited on");
  if (!says && !comes_late) return;
  OnDevices(4, [&](int me) {  // all have heard of it: the same key is a fresh one
    int64_t visit;
    Expect(Visit(&meetings, {7, 3, 4, me}, &visit) && visit == 0, "a fresh start did not work");
  });
}

// While all have not heard of a failure, those who come again do not wait.
void TestNobodyWaitsAfterAFailure() {
  M meetings;
  meetings.Fail({7, 3, 2, 0}, "broken");
  meetings.Fail({7, 3, 2, -1}, "another reason, later");
  std::string why;
  Expect(!meetings.Meet({7, 3, 2, 1}, 5, 1, 0, M::kNoLimit, &why), "met one that had failed");
  Expect(why == "the device at place 0 failed: broken", "after a failure: says " + why);
  std::string other;
  Expect(meetings.Meet({7, 4, 1, 0}, 0, 0, 0, seconds(1), &other) != nullptr,
         "another site failed");
  Expect(meetings.Meet({8, 3, 1, 0}, 0, 0, 0, seconds(1), &other) != nullptr, "another run failed");
}

// Steps of 4 devices over shared memory. Each device changes its gradients between the steps, so
// that a peer that still reads them is a data race.
struct Device {
  std::vector<float> grad, main, mu, nu, out;
  std::vector<TileNorm> tiles;
  float squares = 0.0f;
  bool found_inf = false;
};

void TestSteps() {
  constexpr int n = 4, steps = 5;
  constexpr size_t run = 3, size = 7 * run;
  const float scale = 1.0f;
  const bool skip = false;
  const Coefficients row = {3e-3f,  0.87f, 0.13f, 0.9973f, 0.0027f, 1e-7f,
                            1e-10f, 0.13f, 0.34f, 0.43f,   0.008f,  0.021f};
  std::vector<Device> devices(n);
  for (Device& d : devices) {
    d.grad.resize(n * size), d.out.resize(n * size), d.tiles.resize(NumNormTiles(size));
    for (auto* array : {&d.main, &d.mu, &d.nu}) array->resize(size);
  }
  Meetings<Device*> meetings;
  OnDevices(n, [&](int me) {
    Device& d = devices[me];
    for (int64_t step = 0; step < steps; ++step) {
      for (size_t i = 0; i < n * size; ++i) d.grad[i] = float(i % 5) + float(step);
      const Visitor who{0, 0, n, me};
      const int64_t visit = meetings.Visit(who);
      std::string why;
      const auto all = meetings.Meet(who, visit, 0, &d, seconds(60), &why);
      if (!all) return Expect(false, why);
      PeerCall call{PeerWork::kStep,
                    0,
                    {Dtype::kFloat32, Dtype::kFloat32, Dtype::kFloat32},
                    reinterpret_cast<const float*>(&row),
                    &scale,
                    &skip,
                    {},
                    &scale,
                    d.tiles.size(),
                    d.tiles.data(),
                    &d.squares,
                    &d.found_inf};
      call.leaves.push_back({d.grad.data(), nullptr, d.main.data(), d.mu.data(), d.nu.data(),
                             d.out.data(), size, run, 0, 0, Dtype::kFloat32});
      PeerArrays arrays{n, me, {}, {}};
      for (Device* peer : *all) {
        arrays.grads.push_back(peer->grad.data());
        arrays.outs.push_back(peer->out.data());
      }
      PeerCpu(call, arrays, {1, [](std::function<void()> task) { task(); }});
      if (planted) continue;
      if (!meetings.Meet(who, visit, 1, nullptr, Meetings<Device*>::kNoLimit, &why))
        Expect(false, why);
    }
  });
  for (const Device& d : devices) Expect(d.out == devices[0].out, "steps: parameters differ");
  for (int me = 0; me < n; ++me) {
    for (size_t i = 0; i < size; ++i) {
      const size_t at = WholeIndex(size, run, n, me, i);
      Expect(devices[0].out[at] == devices[me].main[i] && devices[me].main[i] != 0.0f,
             "steps: a shard is at a wrong place");
    }
  }
}

}  // namespace
}  // namespace jdistadam

int main(int argc, char** argv) {
  using namespace jdistadam;
  planted = argc > 1 && std::string(argv[1]) == "--plant";
  if (planted) {  // often: threads that ran one after the other would show no race
    for (int i = 0; i < 100; ++i) TestSteps();
    return 0;
  }
  TestLoops();
  TestTwoExecutions();
  TestOneDoesNotCome(false, true);
  TestOneDoesNotCome(false, false);
  TestOneDoesNotCome(true, false);
  TestNobodyWaitsAfterAFailure();
  TestSteps();
  std::printf(failures == 0 ? "SUCCESS\n" : "%d FAILURES\n", failures.load());
  return failures == 0 ? 0 : 1;
}
