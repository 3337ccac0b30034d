// Copies between GPUs (cuda/copies_cuda.h) whose streams are threads (fake/cuda_runtime.h):
// programs write sources, start, write other arrays, wait, and read targets. A copy or a program
// that does not wait for what it needs is a data race.
//
//   cd cuda
//   g++ -std=c++17 -O1 -g -fsanitize=thread -I. -I../tests/kernels/driver/fake
//       ../tests/kernels/driver/copies_cuda.cc -pthread -o /tmp/copies_cuda
//   /tmp/copies_cuda
//
// tests/kernels/test_driver.py does so. With --plant a program goes on before its sources were
// read.

#include "copies_cuda.h"

#include "expect.h"

namespace jdistadam {
namespace {

constexpr int kDevices = 3;
constexpr size_t kRun = 1 << 10;

void OnDevices(const std::function<void(int)>& device) {
  std::vector<std::thread> threads;
  for (int me = 0; me < kDevices; ++me) threads.emplace_back([&device, me] { device(me); });
  for (auto& thread : threads) thread.join();
}

cudaStream_t NewStream() {
  cudaStream_t stream = nullptr;
  (void)cudaStreamCreateWithFlags(&stream, 0);
  return stream;
}

// The arrays of one start on a device.
struct Arrays {
  explicit Arrays(bool is_gather)
      : is_gather(is_gather), source(kRun * (is_gather ? 1 : kDevices)), target(kRun * kDevices) {}
  std::vector<CopyArray> All() { return {{source.data(), target.data(), 1, kRun, kRun}}; }
  bool is_gather;
  std::vector<char> source, target;
};

// The calls of a device's program, as the handlers make them: ffi_copies.h and ffi_cuda.cc.
class Program {
 public:
  Program(int me, cudaStream_t stream) : me_(me), stream_(stream) {}

  std::string Start(int64_t execution, int64_t call, Arrays* arrays) {
    CopyReader* reader = nullptr;
    CopyEvents events;
    if (CopyReader::Of(me_, &reader) != cudaSuccess || events.Take(me_, false) != cudaSuccess ||
        events.RecordReady(stream_) != cudaSuccess)
      return "no events";
    const CopyVisitor who = Who(execution, call);
    for (const auto& job : CudaBoard().TakeAbandoned(who, arrays->All(), arrays->is_gather))
      DrainCopies(*job, me_);
    bool is_last = false;
    std::string why;
    const CudaCopyJob job = CudaBoard().Start(who, arrays->is_gather,
                                              {arrays->All(), std::move(events)}, &is_last, &why);
    if (job == nullptr) return Leave(who, nullptr, why);
    for (int p = 0; p < kDevices && is_last; ++p) {
      (void)CopyReader::Of(p, &reader);
      reader->Enqueue(job, p);
    }
    return "";
  }

  std::string Wait(int64_t execution, Arrays* arrays) {
    const CopyVisitor who = Who(execution, 0);
    std::string why;
    const CudaCopyJob job = CudaBoard().Finish(who, arrays->target.data(), &why);
    if (job == nullptr) return Leave(who, nullptr, why);
    why = job->WaitUntilIssued();
    if (!why.empty()) return Leave(who, job, why);
    (void)cudaStreamWaitEvent(stream_, job->posts[me_].extra.kept.get(), 0);
    for (int p = 0; p < kDevices; ++p)
      if (!planted || p == me_)
        (void)cudaStreamWaitEvent(stream_, job->posts[p].extra.ReadFor(me_), 0);
    return "";
  }

  std::string Leave(const CopyVisitor& who, const CudaCopyJob& waiting, std::string why) {
    for (const auto& job : CudaBoard().Leave(who, waiting, &why)) DrainCopies(*job, me_);
    return why;
  }

  // What a kernel does, in its turn.
  void Do(std::function<void()> work) { stream_->Do(std::move(work)); }

  // What the program has enqueued is done.
  void Finish() {
    cudaEvent_t end = nullptr;
    (void)cudaEventCreate(&end);
    (void)cudaEventRecord(end, stream_);
    (void)cudaEventSynchronize(end);
  }

 private:
  CopyVisitor Who(int64_t execution, int64_t call) const {
    return {0, execution, call, call, kDevices, me_};
  }

  const int me_;
  cudaStream_t stream_;
};

std::vector<cudaStream_t> Streams() {
  std::vector<cudaStream_t> streams;
  for (int me = 0; me < kDevices; ++me) streams.push_back(NewStream());
  return streams;
}

// A gather and an exchange in flight together, again and again with the same arrays.
void TestPrograms(const std::vector<cudaStream_t>& streams) {
  OnDevices([&](int me) {
    Program program(me, streams[me]);
    Arrays gather(true), exchange(false);
    std::atomic<int> wrong{0};
    for (int i = 0; i < 60; ++i) {
      const auto tag = [i](int place) { return char(10 * (i % 12) + place); };
      program.Do([&, mine = tag(me)] {
        std::fill(gather.source.begin(), gather.source.end(), mine);
        std::fill(exchange.source.begin(), exchange.source.end(), mine);
      });
      for (const auto& [call, arrays] : {std::pair{1, &gather}, {2, &exchange}})
        Expect(program.Start(i, call, arrays).empty(), "a start failed");
      for (Arrays* arrays : {&gather, &exchange})
        Expect(program.Wait(i, arrays).empty(), "a wait failed");
      program.Do([&, me, tag] {
        for (int p = 0; p < kDevices; ++p)
          wrong += gather.target[size_t(p) * kRun] != tag(p) ||
                   gather.target[(size_t(p) + 1) * kRun - 1] != tag(p);
        for (int p = 0; p + 1 < kDevices; ++p)
          wrong += exchange.target[size_t(p) * kRun] != tag(p < me ? p : p + 1);
      });
    }
    program.Finish();
    Expect(wrong == 0, "another's part");
  });
}

// A copy that cannot be enqueued fails the execution on all devices; the next one is right.
void TestAFailure(const std::vector<cudaStream_t>& streams) {
  std::atomic<int> left{2}, failed{0};
  FakeFailure() = [&] { return left-- == 0 ? cudaErrorUnknown : cudaSuccess; };
  OnDevices([&](int me) {
    Program program(me, streams[me]);
    Arrays arrays(true);
    std::string why = program.Start(1000, 1, &arrays);
    if (why.empty()) why = program.Wait(1000, &arrays);
    failed += Has(why, "a planted error");
    std::fill(arrays.target.begin(), arrays.target.end(), 0);  // its memory is that of another one
    program.Finish();
  });
  FakeFailure() = [] { return cudaSuccess; };
  Expect(failed == kDevices, "a failure that some devices do not know");
}

// One device leaves between start and wait, and tells nobody, as XLA does. After its error has
// ended what it started, its memory is that of new arrays.
void TestAbandoned(const std::vector<cudaStream_t>& streams) {
  std::atomic<int> started{0};
  OnDevices([&](int me) {
    Program program(me, streams[me]);
    Arrays arrays(false);
    Expect(program.Start(2000, 1, &arrays).empty(), "abandoned: a start failed");
    for (++started; started < kDevices;) std::this_thread::yield();
    if (me == 0) {
      for (const auto& [job, place] : CudaBoard().Abandon()) DrainCopies(*job, place);
      for (++started; started < 2 * kDevices;) std::this_thread::yield();
    } else {
      while (started == kDevices) std::this_thread::yield();
      (void)program.Wait(2000, &arrays);
      ++started;
    }
    program.Finish();
    std::fill(arrays.target.begin(), arrays.target.end(), 0);
  });
}

}  // namespace
}  // namespace jdistadam

int main(int argc, char** argv) {
  using namespace jdistadam;
  planted = argc > 1 && std::string(argv[1]) == "--plant";
  const auto streams = Streams();
  TestPrograms(streams);
  TestAFailure(streams);
  TestAbandoned(streams);
  TestPrograms(streams);
  CopyReader::StopAll();
  std::printf(failures == 0 ? "SUCCESS\n" : "%d FAILURES\n", failures.load());
  std::fflush(stdout);
  _exit(failures == 0 ? 0 : 1);  // streams are not ended
}
