// The XLA FFI handlers of the CUDA kernels.
#include <map>
#include <set>

#include "copies_cuda.h"
#include "ffi_adam.h"
#include "ffi_copies.h"
#include "ffi_host_copy.h"
#include "ffi_norm.h"
#include "ffi_peer_meeting.h"
#include "ffi_quantized.h"
#include "ffi_squares.h"
#include "ffi_sum.h"
#include "host_copy_cuda.h"
#include "kernels_cuda.h"

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

// Called by the handlers, which are defined next to the code that reads their operands.

static ffi::Error Run(cudaStream_t stream, const AdamCall& call) {
  return LaunchError(AdamCuda(call, stream));
}

static ffi::Error Run(cudaStream_t stream, const QuantizedCall& call) {
  return LaunchError(QuantizedCuda(call, stream));
}

static ffi::Error Run(cudaStream_t stream, const NormTilesCall& call) {
  return LaunchError(NormTilesCuda(call, stream));
}

static ffi::Error Run(cudaStream_t stream, const NormCall& call) {
  return LaunchError(NormCuda(call, stream));
}

static ffi::Error Run(cudaStream_t stream, const SumCall& call) {
  return LaunchError(SumCuda(call, stream));
}

static ffi::Error StartHostCopy(cudaStream_t stream, const HostCopy& copy, int32_t ordinal) {
  return LaunchError(HostCopyStreams::Start(stream, copy, ordinal));
}

static ffi::Error WaitForHostCopy(cudaStream_t stream, const HostCopiedAttributes& a,
                                  int32_t ordinal) {
  return LaunchError(HostCopyStreams::Wait(stream, a.to_host, a.index, ordinal));
}

namespace {

// Two events of one device at one call site, created once and recorded in every call. "Ready": all
// earlier work of the stream is done, so peers may read my gradients and write my parameters.
// "Done": my kernel is done. An event is recorded again only after the peers have enqueued their
// waits for it. For "ready" they do so before the second meeting, which I pass before my next call.
// For "done" they do so before the next call's first meeting, which I pass before I record it.
struct PeerEvents {
  cudaEvent_t ready = nullptr, done = nullptr;
  cudaError_t status = cudaSuccess;  // of the launch, in the second meeting
};

cudaError_t EventsOf(int64_t site, int32_t ordinal, PeerEvents* events) {
  static std::mutex mutex;
  static auto* all = new std::map<std::pair<int64_t, int32_t>, PeerEvents>;
  const std::lock_guard<std::mutex> lock(mutex);
  PeerEvents& found = (*all)[{site, ordinal}];
  for (cudaEvent_t* event : {&found.ready, &found.done}) {
    if (*event != nullptr) continue;
    const cudaError_t error = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
    if (error != cudaSuccess) return error;
  }
  *events = found;
  return cudaSuccess;
}

// Lets the current device access all others of a call, once. XLA's allocator does this for its own
// memory; plain memory needs this call.
cudaError_t ReachPeers(const ffi::Span<const int64_t>& devices, int32_t ordinal) {
  static std::mutex mutex;
  static auto* reached = new std::set<std::pair<int32_t, int64_t>>;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const int64_t peer : devices) {
    if (peer == ordinal || reached->count({ordinal, peer}) > 0) continue;
    const cudaError_t error = cudaDeviceEnablePeerAccess(int(peer), 0);
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

// Tests add delays after waits, or omit the waits: tests/kernels/driver/peer_waits.cu.
#ifndef JDISTADAM_WAIT_FOR_PEERS
#define JDISTADAM_WAIT_FOR_PEERS WaitForPeers
#endif

cudaError_t WaitForPeers(cudaStream_t stream, const PeerMeeting<PeerEvents>::Entries& entries,
                         int me, cudaEvent_t PeerEvents::* event) {
  for (int i = 0; i < int(entries->size()); ++i) {
    if (i == me) continue;
    const cudaError_t error = cudaStreamWaitEvent(stream, (*entries)[i].extra.*event, 0);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// The steps that can fail on one device alone, before it meets the others.
cudaError_t Prepare(cudaStream_t stream, const PeerAttributes& a, int32_t ordinal,
                    PeerEvents* events) {
  if (auto error = cudaSetDevice(ordinal); error != cudaSuccess) return error;
  if (auto error = EventsOf(a.site, ordinal, events); error != cudaSuccess) return error;
  if (auto error = ReachPeers(a.devices, ordinal); error != cudaSuccess) return error;
  return cudaEventRecord(events->ready, stream);
}

// The kernel after all "ready", then "done". After a failure, none of it may still run when peers
// are told: they release arrays that it writes.
cudaError_t Enqueue(cudaStream_t stream, const PeerCall& call, const PeerEvents& events,
                    const PeerMeeting<PeerEvents>::Entries& entries, int me) {
  cudaError_t error = JDISTADAM_WAIT_FOR_PEERS(stream, entries, me, &PeerEvents::ready);
  if (error == cudaSuccess)
    error = PeerCuda(call, PeerMeeting<PeerEvents>::ArraysOf(call, entries, me), stream);
  const cudaError_t recorded = cudaEventRecord(events.done, stream);
  if (error == cudaSuccess) error = recorded;
  if (error != cudaSuccess) (void)cudaStreamSynchronize(stream);
  return error;
}

}  // namespace

// My stream: "ready"; wait for all "ready"; the kernel; "done"; wait for all "done". After that no
// peer reads my gradients or writes my parameters.
static ffi::Error RunPeer(cudaStream_t stream, const PeerAttributes& a, ffi::Error error,
                          const PeerCall& call, int64_t run, int32_t ordinal) {
  using Meeting = PeerMeeting<PeerEvents>;
  Meeting meeting(a, run, ordinal);
  PeerEvents events;
  if (error.success() && meeting.me() >= 0)
    error = LaunchError(Prepare(stream, a, ordinal, &events));
  if (error = meeting.Tell(std::move(error)); error.failure()) return error;
  Meeting::Entries entries, after;
  error = meeting.Meet(0, EntryOf(call, events), meeting.limit(), &entries);
  if (error.failure()) return error;
  events.status = Enqueue(stream, call, events, entries, meeting.me());
  // A device that does not come now hangs inside CUDA: memory cannot be waited for, as the
  // message says.
  error = meeting.Meet(1, {{}, {}, events}, meeting.limit(), &after);
  if (error.failure()) return error;
  const cudaError_t waited =
      JDISTADAM_WAIT_FOR_PEERS(stream, entries, meeting.me(), &PeerEvents::done);
  for (size_t i = 0; i < after->size(); ++i) {
    if (const cudaError_t status = (*after)[i].extra.status; status != cudaSuccess)
      return Meeting::StateIsLost("the device at place " + std::to_string(i) +
                                  " failed: " + cudaGetErrorString(status));
  }
  return LaunchError(waited);
}

static cudaError_t PrepareCopies(cudaStream_t stream, const CopyStartAttributes& a, int32_t ordinal,
                                 CopyEvents* events) {
  CopySender* sender = nullptr;
  cudaError_t error = cudaSetDevice(ordinal);
  if (error == cudaSuccess) error = ReachPeers(a.devices, ordinal);
  if (error == cudaSuccess) error = CopySender::Of(ordinal, &sender);
  if (error == cudaSuccess) error = events->Take(ordinal);
  return error == cudaSuccess ? cudaEventRecord(events->ready.get(), stream) : error;
}

static CudaCopies& BoardOf(cudaStream_t, const CopyVisitor&) { return CudaBoard(); }

static ffi::Error WaitIsOver(cudaStream_t, const CopyVisitor&, ffi::Error error) { return error; }

static ffi::Error StartCopies(cudaStream_t stream, const CopyVisitor& who,
                              const CopyStartAttributes& a, std::vector<CopyArray> arrays,
                              int32_t ordinal) {
  CopyEvents events;
  if (const auto status = PrepareCopies(stream, a, ordinal, &events); status != cudaSuccess)
    return LeaveCopies(CudaBoard(), who, FailureOf(who.me, cudaGetErrorString(status)));
  CudaCopyJob job;
  ffi::Error error =
      PostCopies(CudaBoard(), who, a.gathers, std::move(arrays), std::move(events), &job);
  for (int p = 0; job != nullptr && p < job->count(); ++p) {
    CopySender* sender = nullptr;
    (void)CopySender::Of(int32_t(a.devices[p]), &sender);  // made by the start of that device
    sender->Send(job, p);
  }
  return error;
}

static ffi::Error WaitForCopies(cudaStream_t stream, const CopyVisitor& who, const CudaCopyJob& job,
                                std::chrono::seconds limit) {
  std::string why = job->WaitUntilIssued(limit);
  if (why.empty() && !job->has_waited[who.me]) {
    job->has_waited[who.me] = true;
    cudaError_t status = cudaStreamWaitEvent(stream, job->posts[who.me].extra.kept.get(), 0);
    for (int p = 0; p < job->count() && status == cudaSuccess; ++p)
      status = cudaStreamWaitEvent(stream, job->posts[p].extra.sent.get(), 0);
    if (status != cudaSuccess) why = FailureOf(who.me, cudaGetErrorString(status));
  }
  if (!why.empty()) return LeaveCopies(CudaBoard(), who, why, job);
  return ffi::Error::Success();
}

extern "C" void JdistadamStopCopies_cuda() {
  if (CudaBoard().IsForked()) return;
  CudaBoard().Stop();
  CopySender::StopAll();
}

extern "C" double JdistadamLinkSpeed_cuda(int device, int peer) {
  return LinkProbe(device, peer).Measure();
}

extern "C" bool JdistadamCanReach_cuda(int device, int peer) {
  int can = device == peer;
  if (!can && cudaDeviceCanAccessPeer(&can, device, peer) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  return can != 0;
}

using Stream = ffi::PlatformStream<cudaStream_t>;
// Handlers only enqueue kernels, so XLA may capture them in a CUDA graph.
#define JDISTADAM_CAPTURABLE {ffi::Traits::kCmdBufferCompatible}
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamAdam_cuda, AdamHandler<cudaStream_t>,
                              AdamBinding().Ctx<Stream>(), JDISTADAM_CAPTURABLE);
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamQuantized_cuda, QuantizedHandler<cudaStream_t>,
                              QuantizedBinding().Ctx<Stream>(), JDISTADAM_CAPTURABLE);
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamAdamSquares_cuda, AdamSquaresHandler<cudaStream_t>,
                              AdamSquaresBinding().Ctx<Stream>(), JDISTADAM_CAPTURABLE);
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamQuantizedSquares_cuda, QuantizedSquaresHandler<cudaStream_t>,
                              QuantizedSquaresBinding().Ctx<Stream>(), JDISTADAM_CAPTURABLE);
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamNormTiles_cuda, NormTilesHandler<cudaStream_t>,
                              NormTilesBinding().Ctx<Stream>(), JDISTADAM_CAPTURABLE);
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamNorm_cuda, NormHandler<cudaStream_t>,
                              NormBinding().Ctx<Stream>(), JDISTADAM_CAPTURABLE);
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamSum_cuda, SumHandler<cudaStream_t>,
                              SumBinding().Ctx<Stream>(), JDISTADAM_CAPTURABLE);
// Not for CUDA graphs: copies run in streams of their own.
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamHostCopy_cuda, HostCopyHandler<cudaStream_t>,
                              HostCopyBinding().Ctx<Stream>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamHostCopied_cuda, HostCopiedHandler<cudaStream_t>,
                              HostCopiedBinding().Ctx<Stream>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamSumParts_cuda, SumPartsHandler<cudaStream_t>,
                              SumPartsBinding().Ctx<Stream>(), JDISTADAM_CAPTURABLE);
// Not for CUDA graphs: copies run in streams of their own.
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamCopyStart_cuda, CopyStartHandler<cudaStream_t>,
                              CopyStartBinding().Ctx<Stream>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamCopyWait_cuda, CopyWaitHandler<cudaStream_t>,
                              CopyWaitBinding().Ctx<Stream>());
// Not for CUDA graphs: in every call these handlers wait for other devices' host threads.
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamPeerSum_cuda, PeerSumHandler<cudaStream_t>,
                              PeerSumBinding().Ctx<Stream>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamPeerStep_cuda, PeerStepHandler<cudaStream_t>,
                              PeerStepBinding().Ctx<Stream>());

}  // namespace jdistadam
