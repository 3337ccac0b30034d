// The XLA FFI handlers of the CPU kernels.
#include "ffi_adam.h"
#include "ffi_graph_node.h"
#include "ffi_keep.h"
#include "ffi_norm.h"
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

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamAdam_cpu, AdamHandler,
                              JDISTADAM_ADAM_BINDING(ffi::ThreadPool));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamNorm_cpu, NormHandler,
                              JDISTADAM_NORM_BINDING(ffi::ThreadPool));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamSum_cpu, SumHandler, JDISTADAM_SUM_BINDING(ffi::ThreadPool));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamKeep_cpu, KeepHandler,
                              ffi::Ffi::Bind() JDISTADAM_KEEP_BINDING);

XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamGraphNode_cpu, CheckPassed,
                              ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

}  // namespace jdistadam
