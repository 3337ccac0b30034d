// The XLA FFI handlers of the CPU kernels.
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "ffi_adam.h"
#include "ffi_compact.h"
#include "ffi_graph_node.h"
#include "ffi_keep.h"
#include "ffi_norm.h"
#include "ffi_peer.h"
#include "ffi_sum.h"

namespace jdistadam {
namespace {

Threads ThreadsOf(ffi::ThreadPool& pool) {
  return {int(pool.num_threads()),
          [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); }};
}

ffi::Error AdamHandler(ffi::ThreadPool pool, CoefficientRows coefficients, FloatScalar inv_scale,
                       BoolScalar found_inf, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       int32_t mode, bool nesterov, int32_t contributions,
                       ffi::Span<const int32_t> groups, int32_t flat,
                       ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> offsets) {
  AdamCall call;
  const AdamAttributes attributes{mode, nesterov, contributions, groups, flat, sizes, offsets};
  const ffi::Error error =
      BuildCall(attributes, coefficients, inv_scale, found_inf, args, rets, &call);
  if (error.success()) AdamCpu(call, ThreadsOf(pool));
  return error;
}

ffi::Error CompactHandler(ffi::ThreadPool pool, CoefficientRows coefficients, FloatScalar inv_scale,
                          BoolScalar found_inf, Key key, CountScalar count, Parts parts,
                          Blocks blocks, ffi::RemainingArgs args, ffi::RemainingRets rets,
                          int32_t mode, bool nesterov, int32_t contributions,
                          ffi::Span<const int32_t> groups, int32_t flat,
                          ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> offsets,
                          bool random, ffi::Span<const int32_t> ids,
                          ffi::Span<const int64_t> mu_offsets, ffi::Span<const int64_t> nu_offsets,
                          ffi::Span<const int64_t> cuts, ffi::Span<const int64_t> tables) {
  CompactCall call;
  const CompactAttributes attributes{
      {mode, nesterov, contributions, groups, flat, sizes, offsets, mu_offsets, nu_offsets},
      random,
      ids,
      cuts,
      tables};
  const ffi::Error error = BuildCompactCall(attributes, coefficients, inv_scale, found_inf, key,
                                            count, parts, blocks, args, rets, &call);
  if (error.success()) CompactCpu(call, ThreadsOf(pool));
  return error;
}

ffi::Error NormHandler(ffi::ThreadPool pool, FloatScalar inv_scale, ffi::RemainingArgs grads,
                       FloatResult sum_of_squares, BoolResult found_inf, TilesResult tiles) {
  NormCall call;
  const ffi::Error error = BuildNormCall(inv_scale, grads, sum_of_squares, found_inf, tiles, &call);
  if (error.success()) NormCpu(call, ThreadsOf(pool));
  return error;
}

ffi::Error SumHandler(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      int32_t contributions, int32_t flat, ffi::Span<const int64_t> sizes,
                      ffi::Span<const int64_t> offsets) {
  SumCall call;
  const ffi::Error error = BuildSumCall({contributions, flat, sizes, offsets}, args, rets, &call);
  if (error.success()) SumCpu(call, ThreadsOf(pool));
  return error;
}

ffi::Error KeepHandler(BoolScalar is_kept, IndexScalar index, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, int64_t parts, ffi::Span<const int64_t> rows) {
  KeepCall call;
  const ffi::Error error = BuildKeepCall(is_kept, index, args, rets, parts, rows, &call);
  if (error.success()) KeepCpu(call);
  return error;
}

// Runs work() in a thread of its own. XLA goes on there once it has ended, and flushes denormals:
// by POSIX a thread inherits the floating-point environment.
template <typename Work>
ffi::Error InThread(Work work) {
  try {
    std::thread(std::move(work)).detach();
  } catch (const std::system_error& error) {
    return ffi::Error::Internal(std::string("jdistadam: no thread to step in: ") + error.what());
  }
  return ffi::Error::Success();
}

void Complete(ffi::Promise promise, ffi::Error error) {
  error.success() ? promise.SetAvailable() : promise.SetError(std::move(error));
}

// Who waits for the others does so in a thread of its own, never in one of XLA's: that would be
// missing where a collective beside the step needs it.
//
// The second meeting: nobody reads or writes a peer's arrays after it. It has no limit: who has
// passed the first comes, and until then my arrays must not be released.
ffi::Future RunPeer(const PeerAttributes& a, ffi::Error error, PeerCall call, int64_t run,
                    int32_t ordinal) {
  using Meeting = PeerMeeting<char>;
  ffi::Promise promise;
  ffi::Future future(promise);
  Meeting meeting(a, run, ordinal);
  if (error = meeting.Tell(std::move(error)); error.success()) {
    error = meeting.Tell(InThread([promise, meeting, call = std::move(call)]() mutable {
      Meeting::Entries entries;
      ffi::Error error = meeting.Meet(0, EntryOf<char>(call, 0), meeting.limit(), &entries);
      if (error.success()) {
        PeerCpu(call, Meeting::ArraysOf(call, entries, meeting.me()), kOneThread);
        error = meeting.Meet(1, {}, Meeting::All::kNoLimit, &entries);
      }
      Complete(std::move(promise), std::move(error));
    }));
  }
  if (error.failure()) Complete(std::move(promise), std::move(error));
  return future;
}

ffi::Future PeerSumHandler(ffi::RunId run, int32_t ordinal, FloatScalar norm_scale,
                           ffi::RemainingArgs args, ffi::RemainingRets rets,
                           ffi::Span<const int64_t> devices, int64_t site, int64_t limit_seconds,
                           ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> runs,
                           ffi::Span<const int32_t> received) {
  PeerCall call;
  const PeerAttributes a{false,         false, false, false,    devices, site,
                         limit_seconds, sizes, runs,  received, {},      {}};
  call.norm_scale = norm_scale.typed_data();
  ffi::Error error = BuildPeerCall(a, args, rets, &call);
  return RunPeer(a, std::move(error), std::move(call), run.run_id, ordinal);
}

ffi::Future PeerStepHandler(ffi::RunId run, int32_t ordinal, FloatScalar norm_scale,
                            ffi::Buffer<ffi::F32, 2> coefficients, FloatScalar inv_scale,
                            BoolScalar found_inf, BoolScalar is_kept, ffi::RemainingArgs args,
                            ffi::RemainingRets rets, ffi::Span<const int64_t> devices, int64_t site,
                            int64_t limit_seconds, ffi::Span<const int64_t> sizes,
                            ffi::Span<const int64_t> runs, ffi::Span<const int32_t> received,
                            ffi::Span<const int64_t> offsets, ffi::Span<const int32_t> groups,
                            bool nesterov, bool summed, bool in_place) {
  PeerCall call;
  const PeerAttributes a{true,          summed, in_place, nesterov, devices, site,
                         limit_seconds, sizes,  runs,     received, offsets, groups};
  call.norm_scale = norm_scale.typed_data();
  ffi::Error error = BuildPeerCall(a, args, rets, &call);
  if (error.success()) error = SetScalars(coefficients, inv_scale, found_inf, is_kept, &call);
  return RunPeer(a, std::move(error), std::move(call), run.run_id, ordinal);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamPeerSum_cpu, PeerSumHandler,
                              ffi::Ffi::Bind() JDISTADAM_PEER_CONTEXT JDISTADAM_PEER_SUM_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamPeerStep_cpu, PeerStepHandler,
                              ffi::Ffi::Bind() JDISTADAM_PEER_CONTEXT JDISTADAM_PEER_STEP_BINDING);

extern "C" bool JdistadamCanReach_cpu(int, int) { return true; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamAdam_cpu, AdamHandler,
                              JDISTADAM_ADAM_BINDING(ffi::ThreadPool));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamCompact_cpu, CompactHandler,
                              JDISTADAM_COMPACT_BINDING(ffi::ThreadPool));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamNorm_cpu, NormHandler,
                              JDISTADAM_NORM_BINDING(ffi::ThreadPool));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamSum_cpu, SumHandler, JDISTADAM_SUM_BINDING(ffi::ThreadPool));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamKeep_cpu, KeepHandler,
                              ffi::Ffi::Bind() JDISTADAM_KEEP_BINDING);

XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamGraphNode_cpu, CheckPassed,
                              ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

}  // namespace jdistadam
