// The XLA FFI handlers of the CUDA kernels.
#include <map>
#include <set>
#include <tuple>

#include "ffi_backend.h"
#include "host_copy_cuda.h"
#include "kernels_cuda.h"
#include "processes_cuda.h"

namespace jdistadam {

static ffi::Error LaunchError(cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  const bool has_no_code =  // the last one where PTX is too new for the driver
      status == cudaErrorNoKernelImageForDevice || status == cudaErrorUnsupportedPtxVersion;
  return ffi::Error::Internal(
      std::string("jdistadam: launch failed: ") + cudaGetErrorString(status) +
      (has_no_code ? ". `jdistadam info` says for which GPUs this build has code; reinstall with "
                     "CUDAARCHS=native."
                   : ""));
}

template <typename Call>
using Kernel = cudaError_t (*)(const Call&, cudaStream_t);

static constexpr std::tuple kKernels{&AdamCuda, &QuantizedCuda, &NormTilesCuda,
                                     &NormCuda, &PartsCuda,     &SumCuda};

// Called by the handlers, which are defined next to the code that reads their operands.
template <typename Call>
static ffi::Error Run(cudaStream_t stream, const Call& call) {
  return LaunchError(std::get<Kernel<Call>>(kKernels)(call, stream));
}

static ffi::Error StartHostCopy(cudaStream_t stream, const HostCopy& copy, int32_t ordinal) {
  return LaunchError(HostCopyStreams::Start(stream, copy, ordinal));
}

static ffi::Error WaitForHostCopy(cudaStream_t stream, const HostCopiedAttributes& a,
                                  int32_t ordinal) {
  return LaunchError(HostCopyStreams::Wait(stream, a.to_host, a.index, ordinal));
}

// Lets the current device access all others of a call, once. XLA's allocator does this for its own
// memory; plain memory needs this call.
static cudaError_t ReachPeers(const std::vector<int>& devices, int32_t ordinal) {
  static std::mutex mutex;
  static auto* reached = new std::set<std::pair<int32_t, int>>;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const int peer : devices) {
    if (peer == ordinal || reached->count({ordinal, peer}) > 0) continue;
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
    } else if (error != cudaSuccess) {
      (void)cudaGetLastError();
      return error;
    }
    reached->insert({ordinal, peer});
  }
  return cudaSuccess;
}

static cudaError_t PrepareCopies(cudaStream_t stream, const std::vector<int>& ordinals,
                                 bool is_shared, int32_t ordinal, CopyEvents* events) {
  CopyReader* reader = nullptr;
  cudaError_t error = cudaSetDevice(ordinal);
  if (error == cudaSuccess) error = ReachPeers(ordinals, ordinal);
  if (error == cudaSuccess) error = CopyReader::Of(ordinal, &reader);
  if (error == cudaSuccess) error = events->Take(ordinal, is_shared);
  return error == cudaSuccess ? events->RecordReady(stream) : error;
}

static CudaCopies& BoardOf(cudaStream_t, const CopyVisitor&) { return CudaBoard(); }

static auto& ProcessesOf(cudaStream_t, const CopyGroup&) { return CudaProcesses(); }

// The CUDA devices of this process among those that copy.
static std::vector<int> OrdinalsOf(const CopyVisitor& who, const CopyStartAttributes& a) {
  if (who.clique == nullptr) return {a.devices.begin(), a.devices.end()};
  std::vector<int> ordinals;
  for (int p = 0; p < who.count; ++p)
    if (who.clique->processes[p] == kHere) ordinals.push_back(who.clique->ordinals[p]);
  return ordinals;
}

static ffi::Error IsOver(cudaStream_t, const CopyVisitor&, ffi::Error error) { return error; }

static ffi::Error StartCopies(cudaStream_t stream, const CopyVisitor& who,
                              const CopyStartAttributes& a, std::vector<CopyArray> arrays,
                              int32_t ordinal) {
  CopyEvents events;
  const auto status =
      PrepareCopies(stream, OrdinalsOf(who, a), who.clique != nullptr, ordinal, &events);
  if (status != cudaSuccess)
    return LeaveCopies(CudaBoard(), who, FailureOf(who.me, cudaGetErrorString(status)));
  if (who.clique != nullptr) CudaProcesses().backend().Uses(ordinal, stream);
  CudaCopyJob job;
  bool is_last = false;
  ffi::Error error = PostCopies(CudaBoard(), CudaProcesses(), who, a.gathers, std::move(arrays),
                                std::move(events), &job, &is_last);
  if (error.failure() || !is_last) return error;
  if (job->clique != nullptr) {
    CudaProcesses().backend().Launch(job);
  } else {
    for (int p = 0; p < job->count(); ++p) EnqueueFor(int32_t(a.devices[p]), job, p);
  }
  return error;
}

static ffi::Error WaitForCopies(cudaStream_t stream, const CopyVisitor& who,
                                const CudaCopyJob& job) {
  std::string why = job->WaitUntilIssued();
  if (why.empty()) {
    const int32_t ordinal = job->clique == nullptr ? 0 : job->clique->ordinals[who.me];
    cudaError_t status = cudaStreamWaitEvent(stream, job->posts[who.me].extra.kept.get(), 0);
    for (int p = 0; p < job->count() && status == cudaSuccess; ++p)
      status = cudaStreamWaitEvent(stream, job->posts[p].extra.ReadFor(ordinal), 0);
    if (status != cudaSuccess) why = FailureOf(who.me, cudaGetErrorString(status));
    if (why.empty() && job->clique != nullptr) CudaProcesses().HasWaited(job);
  }
  if (!why.empty()) return LeaveCopies(CudaBoard(), who, why, job);
  return ffi::Error::Success();
}

void StopCopies() {
  if (CudaBoard().IsForked()) return;
  CudaBoard().Stop();
  CopyReader::StopAll();
  CudaProcesses().Stop();
}

void AbandonCopies() {
  if (CudaBoard().IsForked()) return;
  for (const auto& [job, me] : CudaBoard().Abandon()) DrainCopies(*job, me);
}

void JoinProcesses(int me, const JoinedProcesses& joined) { CudaProcesses().Join(me, joined); }

void LeaveProcesses(const std::string& why) { CudaProcesses().Stop("left: " + why); }

bool ReachesProcess(int) { return MemoryDriver::Get() != nullptr; }

double LinkSpeed(int device, int peer) { return LinkProbe(device, peer).Measure(); }

bool CanReach(int device, int peer) {
  int can = device == peer;
  if (!can && cudaDeviceCanAccessPeer(&can, device, peer) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  return can != 0;
}

std::string NameOfDevice(int device) {
  char name[32] = "";
  if (cudaDeviceGetPCIBusId(name, sizeof name, device) != cudaSuccess) (void)cudaGetLastError();
  return name;
}

bool ReachesDevice(int device, const std::string& name) {
  int peer = -1;
  if (cudaDeviceGetByPCIBusId(&peer, name.c_str()) == cudaSuccess) return CanReach(device, peer);
  (void)cudaGetLastError();
  return true;
}

std::vector<NamedHandler> Handlers() { return HandlersOf<ffi::PlatformStream<cudaStream_t>>(); }

}  // namespace jdistadam
