// Copies between devices (cuda/copies.h), each device a thread, as the handlers of CPUs make them.
//
//   cd cuda
//   g++ -std=c++17 -O1 -g -fsanitize=thread -I. ../tests/kernels/driver/copies.cc -pthread
//       -o /tmp/copies
//   /tmp/copies
//
// tests/kernels/test_driver.py does so. With --plant a device that leaves does not wait until its
// copies are done: that must be seen.

#include "copies.h"

#include <sys/wait.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <thread>

#include "expect.h"

namespace jdistadam {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Board = CopyBoard<char>;

// Runs device(0) ... device(count - 1) in threads of their own.
void OnDevices(int count, const std::function<void(int)>& device) {
  std::vector<std::thread> threads;
  for (int me = 0; me < count; ++me) threads.emplace_back([&device, me] { device(me); });
  for (auto& thread : threads) thread.join();
}

// The memory of a device for an exchange of several arrays: a part of each for each device, and
// those of the others.
struct Memory {
  explicit Memory(int count, size_t run = 1 << 10) : source(count * run), target(source.size()) {}
  std::vector<CopyArray> Arrays(int count) {
    std::vector<CopyArray> arrays;
    const size_t quarter = source.size() / 4;
    for (const auto& [first, quarters] : {std::pair{0, 2}, {2, 1}, {3, 1}}) {
      const size_t begin = first * quarter, run = quarters * quarter / count;
      arrays.push_back({source.data() + begin, target.data() + begin, 1, run});
    }
    return arrays;
  }
  // Whether part p of each array has arrived from the device that sent `tag(p)`.
  template <typename Tag>
  bool HasArrived(int count, const Tag& tag) {
    for (const CopyArray& a : Arrays(count))
      for (size_t p = 0; p + 1 < size_t(count); ++p)
        if (a.target[p * a.run] != tag(p) || a.target[(p + 1) * a.run - 1] != tag(p)) return false;
    return true;
  }
  std::vector<char> source, target;
};

// The last one makes the copies of all, some time later.
Board::JobPointer Start(Board* board, const CopyVisitor& who, Memory* memory, std::string* why,
                        milliseconds late = milliseconds(0)) {
  bool is_last = false;
  const auto job = board->Start(who, false, {memory->Arrays(who.count), 0}, &is_last, why);
  if (job == nullptr || !is_last) return job;
  std::this_thread::sleep_for(late);
  for (int to = 0; to < who.count; ++to) {
    for (int from = 0; from < who.count; ++from) {
      job->ForPieces(from, to,
                     [](const CopyPiece& piece) { std::memcpy(piece.to, piece.from, piece.run); });
    }
    job->HasIssued(to);
  }
  return job;
}

CopyVisitor Who(int64_t execution, int64_t call, int count, int me) {
  return {0, execution, call, call, count, me};
}

bool Wait(Board* board, const CopyVisitor& who, Memory* memory, std::string* why) {
  const auto job = board->Finish(who, memory->target.data(), why);
  if (job != nullptr) *why = job->WaitUntilIssued();
  return job != nullptr && why->empty();
}

// Executions take turns on a device; each visits a site many times, twice before it waits.
void TestExecutions() {
  Board board(false);
  const int n = 4;
  OnDevices(n, [&](int me) {
    std::vector<Memory> all(4, Memory(n));  // of two executions, each with two visits
    for (int i = 0; i < 50; ++i) {
      std::string why;
      const auto tag = [i](int k, int place) { return char(16 * (i % 7) + 4 * k + place); };
      for (int k = 0; k < 4; ++k) {
        std::memset(all[k].source.data(), tag(k, me), all[k].source.size());
        Expect(Start(&board, Who(k % 2, 7, n, me), &all[k], &why) != nullptr, "a start failed");
      }
      for (int k = 0; k < 4; ++k) {
        Expect(Wait(&board, Who(k % 2, 7, n, me), &all[k], &why), "a wait failed: " + why);
        const auto sent = [&](size_t p) { return tag(k, int(p) < me ? int(p) : int(p) + 1); };
        Expect(all[k].HasArrived(n, sent), "not this visit's part");
      }
      for (int k = 0; k < 4; ++k)
        Expect(board.TakeAbandoned(Who(2, 7, n, me), all[k].Arrays(n), false).empty(),
               "copies that a device has waited for count as abandoned");
    }
  });
}

// The memory of a device that leaves is its own again, while others still have copies to make.
void TestLeaving() {
  Board board(false);
  const int n = 2;
  std::atomic<bool> has_started{false};
  std::vector<Memory> memory(n, Memory(n, 1 << 16));
  OnDevices(n, [&](int me) {
    const CopyVisitor who = Who(5, 1, n, me);
    std::string why;
    if (me == 1) {
      while (!has_started) std::this_thread::yield();
      (void)Start(&board, who, &memory[1], &why, milliseconds(100));
      Expect(!Wait(&board, who, &memory[1], &why) && Has(why, "place 0 failed: broken"), why);
      Expect(Start(&board, who, &memory[1], &why) == nullptr, "a start after a failure");
      return;
    }
    const auto job = Start(&board, who, &memory[0], &why);
    has_started = true;
    while (!job->has_posted[1]) std::this_thread::yield();
    why = FailureOf(0, "broken");
    const auto left = board.Leave(who, nullptr, &why);
    Expect(left.size() == 1, "a device left without its job");
    for (const auto& one : left)
      if (!planted) one->WaitUntilSettled(0, seconds(60));
    std::memset(memory[0].target.data(), 9, memory[0].target.size());
  });
  Expect(memory[0].target[0] == 9, "leaving: memory was written later");
}

// One that left between start and wait. What not all have started is never made; the rest is done
// before a later start may use its memory.
void TestAbandoned(bool all_start) {
  Board board(false);
  const int n = 2;
  std::vector<Memory> memory(n, Memory(n));
  Memory other(n);
  std::string why;
  Expect(Start(&board, Who(1, 1, n, 0), &memory[0], &why) != nullptr, "abandoned: no start");
  if (all_start) (void)Start(&board, Who(1, 1, n, 1), &memory[1], &why);
  Expect(board.Finish(Who(2, 0, n, 0), memory[0].target.data(), &why) == nullptr &&
             Has(why, "not started"),
         "a wait found the start of another execution");
  Expect(board.TakeAbandoned(Who(2, 1, n, 0), other.Arrays(n), false).empty(), "not its memory");
  Expect(board.TakeAbandoned(Who(1, 1, n, 0), memory[0].Arrays(n), false).empty(), "its own");
  auto arrays = memory[0].Arrays(n);
  arrays[0].target += 10;  // a part of it
  const auto left = board.TakeAbandoned(Who(2, 1, n, 0), arrays, false);
  Expect(left.size() == (all_start ? 1 : 0), "abandoned: not its job");
  const bool is_refused = all_start ? !Wait(&board, Who(1, 0, n, 1), &memory[1], &why)
                                    : Start(&board, Who(1, 1, n, 1), &memory[1], &why) == nullptr;
  Expect(is_refused && Has(why, "the device at place 0 failed: it left"), "abandoned: " + why);
  for (int me : {0, 1})
    Expect(Start(&board, Who(2, 1, n, me), &memory[me], &why) != nullptr,
           "abandoned: the next start");
  for (int me : {0, 1}) Expect(Wait(&board, Who(2, 0, n, me), &memory[me], &why), why);
}

void TestMissing() {
  Board board(false);
  Memory memory(3);
  std::string why;
  const auto job = Start(&board, Who(1, 1, 3, 0), &memory, &why);
  WaitLimitMs() = 1000;
  why = job->WaitUntilIssued();
  WaitLimitMs() = 60'000;
  Expect(Has(why, "within 1 s: place 1, place 2"), why);
  Expect(board.Leave(Who(1, 1, 3, 0), job, &why).empty(), "copies that not all have started");
  Expect(Start(&board, Who(1, 1, 3, 1), &memory, &why) == nullptr && Has(why, "place 1, place 2"),
         why);
}

// A clique has failed for good; executions that fail in between do not make it forgotten.
void TestManyFailures() {
  Board board(false);
  Memory memory(2);
  std::string why;
  const CopyClique clique{-5, {0, 1}, {kHere, kHere}, {0, 1}};
  board.Fail(CopyVisitor::ScopeOf(-5), "its first failure");
  for (int run = -500; run < 500; ++run) board.Fail({0, run}, "another failure");
  const CopyVisitor who{-5, 7, 1, 1, 2, 0, &clique};
  Expect(Start(&board, who, &memory, &why) == nullptr && Has(why, "its first"), why);
  Expect(Start(&board, Who(499, 1, 2, 0), &memory, &why) == nullptr && Has(why, "another"), why);
  Expect(Start(&board, Who(1000, 1, 2, 0), &memory, &why) != nullptr, "a good execution: " + why);
}

// Devices come to the calls of a program in different orders; two calls are of one traced helper.
void TestOrders() {
  Board board(false);
  const int n = 2, calls = 6;
  OnDevices(n, [&](int me) {
    std::vector<Memory> all(calls, Memory(n));
    for (int i = 0; i < 20; ++i) {
      std::string why;
      const auto order = [&](int k) { return me == 0 ? k : (k * 5 + i) % calls; };
      for (int k = 0; k < calls; ++k) {
        Memory& memory = all[order(k)];
        std::fill(memory.source.begin(), memory.source.end(), char(10 * order(k) + me));
        Expect(Start(&board, Who(i, 100 + order(k), n, me), &memory, &why) != nullptr, why);
      }
      for (int k = 0; k < calls; ++k) {
        Expect(Wait(&board, Who(i, 0, n, me), &all[k], &why), why);
        Expect(all[k].HasArrived(n, [&](size_t) { return char(10 * k + 1 - me); }),
               "the part of another call");
      }
    }
  });
}

// Between processes two calls of one channel are told apart by their order alone, if there is one.
void TestTwoCallsOfAChannel() {
  const CopyClique clique{-5, {0, 1}, {kHere, kHere}, {0, 1}};
  for (const bool is_in_order : {false, true}) {
    Board board(is_in_order);
    Memory first(2), second(2);
    std::string why;
    Expect(Start(&board, {-5, 7, 100, 1, 2, 0, &clique}, &first, &why) != nullptr, why);
    const auto job = Start(&board, {-5, 7, 200, 1, 2, 0, &clique}, &second, &why);
    Expect((job != nullptr) == is_in_order, "two calls of a channel");
    Expect(is_in_order ? job->name.visit == 1 : Has(why, "without jax.jit"), why);
  }
}

// An execution that failed does not fail another one with its number: what a program counts begins
// anew if it is compiled again.
void TestAnEqualNumber() {
  Board board(false);
  std::vector<Memory> memory(2, Memory(2));
  std::string why = "broken";
  for (int me : {0, 1}) (void)board.Leave(Who(3, 1, 2, me), nullptr, &why);
  for (int me : {0, 1})
    Expect(Start(&board, Who(3, 9, 2, me), &memory[me], &why) != nullptr,
           "an equal number: " + why);
  for (int me : {0, 1}) Expect(Wait(&board, Who(3, 0, 2, me), &memory[me], &why), why);
}

// After an error nothing is made of what not all have started; the rest is named.
void TestAbandonedAfterAnError() {
  Board board(false);
  std::vector<Memory> memory(4, Memory(2));
  std::string why;
  for (int me : {0, 1}) (void)Start(&board, Who(1, 1, 2, me), &memory[me], &why);
  (void)Start(&board, Who(1, 2, 2, 0), &memory[2], &why);
  const auto jobs = board.Abandon();
  Expect(jobs.size() == 2 && jobs[0].second == 0 && jobs[1].second == 1, "abandoned: other jobs");
  Expect(board.Abandon().empty(), "abandoned twice");
  for (int me : {0, 1})  // compiled again, it counts from its first number
    Expect(Start(&board, Who(1, 3, 2, me), &memory[me], &why) != nullptr,
           "abandoned: again: " + why);
}

void TestTheEnd() {
  Board board(false);
  const int n = 2;
  std::vector<Memory> memory(n, Memory(n));
  std::string why;
  const auto job = Start(&board, Who(1, 1, n, 0), &memory[0], &why);
  std::thread waiting(
      [&] { Expect(Has(job->WaitUntilIssued(), "ended"), "waits beyond the end"); });
  board.Stop();
  waiting.join();
  Board used(false);
  for (int me : {0, 1}) (void)Start(&used, Who(1, 1, n, me), &memory[me], &why);
  for (int me : {0, 1}) Expect(Wait(&used, Who(1, 0, n, me), &memory[me], &why), why);
  const auto begin = std::chrono::steady_clock::now();
  used.Stop();
  Expect(std::chrono::steady_clock::now() - begin < seconds(2), "the end waits for nothing");
  Expect(Start(&board, Who(2, 1, n, 0), &memory[0], &why) == nullptr && Has(why, "ended"),
         "a start after the end");
}

void TestFork() {
  Board board(false);
  Expect(!board.IsForked(), "forked before");
  const pid_t child = fork();
  if (child == 0) _exit(board.IsForked() ? 7 : 8);
  int status = 0;
  waitpid(child, &status, 0);
  Expect(WIFEXITED(status) && WEXITSTATUS(status) == 7, "a child is not told from its parent");
}

}  // namespace
}  // namespace jdistadam

int main(int argc, char** argv) {
  using namespace jdistadam;
  planted = argc > 1 && std::string(argv[1]) == "--plant";
  TestFork();
  TestExecutions();
  TestLeaving();
  TestAbandoned(false);
  TestAbandoned(true);
  TestOrders();
  TestTwoCallsOfAChannel();
  TestAnEqualNumber();
  TestAbandonedAfterAnError();
  TestMissing();
  TestManyFailures();
  TestTheEnd();
  std::printf(failures == 0 ? "SUCCESS\n" : "%d FAILURES\n", failures.load());
  return failures == 0 ? 0 : 1;
}
