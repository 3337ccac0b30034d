// The XLA FFI handler of the CUDA kernel.
#include "adam_cuda.h"
#include "ffi_adam.h"

namespace jdistadam {
namespace {

ffi::Error AdamHandler(cudaStream_t stream, Coefficients2d coefficients, FloatScalar inv_scale,
                       BoolScalar found_inf, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       int32_t mode, bool nesterov, ffi::Span<const int32_t> groups, int32_t flat,
                       ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> offsets) {
  AdamCall call;
  const AdamAttributes attributes{mode, nesterov, groups, flat, sizes, offsets};
  const ffi::Error error =
      BuildCall(attributes, coefficients, inv_scale, found_inf, args, rets, &call);
  if (error.failure()) return error;
  if (const cudaError_t status = AdamCuda(call, stream); status != cudaSuccess) {
    return ffi::Error::Internal(std::string("jdistadam: launch failed: ") +
                                cudaGetErrorString(status));
  }
  return ffi::Error::Success();
}

}  // namespace

// kCmdBufferCompatible: the handler only enqueues kernels, so XLA may capture it in a CUDA graph.
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamAdam_cuda, AdamHandler,
                              JDISTADAM_ADAM_BINDING(ffi::PlatformStream<cudaStream_t>),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jdistadam
