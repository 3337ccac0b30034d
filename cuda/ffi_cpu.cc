// The XLA FFI handler of the CPU kernel.
#include "ffi_adam.h"

namespace jdistadam {
namespace {

ffi::Error AdamHandler(ffi::ThreadPool pool, Coefficients2d coefficients, FloatScalar inv_scale,
                       BoolScalar found_inf, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       int32_t mode, bool nesterov, ffi::Span<const int32_t> groups, int32_t flat,
                       ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> offsets) {
  AdamCall call;
  const AdamAttributes attributes{mode, nesterov, groups, flat, sizes, offsets};
  const ffi::Error error =
      BuildCall(attributes, coefficients, inv_scale, found_inf, args, rets, &call);
  if (error.failure()) return error;
  AdamCpu(call, int(pool.num_threads()),
          [&](std::function<void()> task) { pool.Schedule(std::move(task)); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamAdam_cpu, AdamHandler,
                              JDISTADAM_ADAM_BINDING(ffi::ThreadPool));

}  // namespace jdistadam
