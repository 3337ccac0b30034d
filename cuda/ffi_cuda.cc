// The XLA FFI handlers of the CUDA kernels.
#include "ffi_adam.h"
#include "ffi_graph_node.h"
#include "ffi_keep.h"
#include "ffi_norm.h"
#include "ffi_sum.h"
#include "kernels_cuda.h"

namespace jdistadam {
namespace {

ffi::Error LaunchError(cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jdistadam: launch failed: ") +
                              cudaGetErrorString(status));
}

ffi::Error AdamHandler(cudaStream_t stream, CoefficientRows coefficients, FloatScalar inv_scale,
                       BoolScalar found_inf, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       int32_t mode, bool nesterov, int32_t contributions,
                       ffi::Span<const int32_t> groups, int32_t flat,
                       ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> offsets) {
  AdamCall call;
  const AdamAttributes attributes{mode, nesterov, contributions, groups, flat, sizes, offsets};
  const ffi::Error error =
      BuildCall(attributes, coefficients, inv_scale, found_inf, args, rets, &call);
  return error.failure() ? error : LaunchError(AdamCuda(call, stream));
}

ffi::Error NormHandler(cudaStream_t stream, FloatScalar inv_scale, ffi::RemainingArgs grads,
                       FloatResult sum_of_squares, BoolResult found_inf, TilesResult tiles) {
  NormCall call;
  const ffi::Error error = BuildNormCall(inv_scale, grads, sum_of_squares, found_inf, tiles, &call);
  return error.failure() ? error : LaunchError(NormCuda(call, stream));
}

ffi::Error SumHandler(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      int32_t contributions, int32_t flat, ffi::Span<const int64_t> sizes,
                      ffi::Span<const int64_t> offsets) {
  SumCall call;
  const ffi::Error error = BuildSumCall({contributions, flat, sizes, offsets}, args, rets, &call);
  return error.failure() ? error : LaunchError(SumCuda(call, stream));
}

ffi::Error KeepHandler(cudaStream_t stream, BoolScalar is_kept, IndexScalar index,
                       ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t parts,
                       ffi::Span<const int64_t> rows) {
  KeepCall call;
  const ffi::Error error = BuildKeepCall(is_kept, index, args, rets, parts, rows, &call);
  return error.failure() ? error : LaunchError(KeepCuda(call, stream));
}

// Behind what a stream has captured so far, a node without work. Nothing if it captures nothing.
cudaError_t CaptureEmptyNode(cudaStream_t stream) {
  cudaStreamCaptureStatus capture;
  cudaGraph_t graph;
  cudaGraphNode_t node;
  const cudaGraphNode_t* before;
  size_t count;
#if CUDART_VERSION >= 13000
  cudaError_t error =
      cudaStreamGetCaptureInfo(stream, &capture, nullptr, &graph, &before, nullptr, &count);
#else  // without the data of edges
  cudaError_t error = cudaStreamGetCaptureInfo(stream, &capture, nullptr, &graph, &before, &count);
#endif
  if (error != cudaSuccess || capture != cudaStreamCaptureStatusActive) return error;
  error = cudaGraphAddEmptyNode(&node, graph, before, count);
  if (error != cudaSuccess) return error;
#if CUDART_VERSION >= 13000
  return cudaStreamUpdateCaptureDependencies(stream, &node, nullptr, 1,
                                             cudaStreamSetCaptureDependencies);
#else
  return cudaStreamUpdateCaptureDependencies(stream, &node, 1, cudaStreamSetCaptureDependencies);
#endif
}

// XLA refuses a capture that leaves no node.
ffi::Error GraphNodeHandler(cudaStream_t stream, ffi::AnyBuffer operand,
                            ffi::Result<ffi::AnyBuffer> result) {
  const ffi::Error error = CheckPassed(operand, result);
  return error.failure() ? error : LaunchError(CaptureEmptyNode(stream));
}

}  // namespace

// kCmdBufferCompatible: handlers only enqueue kernels, so XLA may capture them in a CUDA graph.
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamAdam_cuda, AdamHandler,
                              JDISTADAM_ADAM_BINDING(ffi::PlatformStream<cudaStream_t>),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamNorm_cuda, NormHandler,
                              JDISTADAM_NORM_BINDING(ffi::PlatformStream<cudaStream_t>),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamSum_cuda, SumHandler,
                              JDISTADAM_SUM_BINDING(ffi::PlatformStream<cudaStream_t>),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamKeep_cuda, KeepHandler,
                              ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  JDISTADAM_KEEP_BINDING,
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JdistadamGraphNode_cuda, GraphNodeHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jdistadam
