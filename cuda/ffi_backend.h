// What the Python module (module.cc) needs of its backend, ffi_cpu.cc or ffi_cuda.cc.
#pragma once

#include <string>
#include <vector>

#include "ffi_adam.h"
#include "ffi_copies.h"
#include "ffi_host_copy.h"
#include "ffi_norm.h"
#include "ffi_parts.h"
#include "ffi_quantized.h"
#include "ffi_squares.h"
#include "ffi_sum.h"
#include "processes.h"

namespace jdistadam {

// A handler and the name by which programs call it.
struct NamedHandler {
  const char* name;
  XLA_FFI_Handler* handler;
};

std::vector<NamedHandler> Handlers();
// Whether a device can read and write the memory of another device of this process.
bool CanReach(int device, int peer);
// GB/s of a copy from a device to another one, measured now; 0 if it could not be measured, and -1
// if it brings other values.
double LinkSpeed(int device, int peer);
// Ends the threads that make copies between devices, or wait for them. No copy starts afterwards.
void StopCopies();
// After an error of a program: ends what its devices have started and nobody waits for.
void AbandonCopies();
// Whether devices of this process can write the memory of another one.
bool ReachesProcess(int pid);
// The name of a device in all processes of a host, and whether a device of this process can access
// the memory of one with such a name. Unknown if this process does not see it: a trial tells.
std::string NameOfDevice(int device);
bool ReachesDevice(int device, const std::string& name);
// Connects this process with others of its host: processes.h. Takes the descriptors.
void JoinProcesses(int me, const JoinedProcesses& joined);
// Ends that: the sockets, and the thread that listens to them. Others hear why.
void LeaveProcesses(const std::string& why);

// The function that XLA calls. It decodes the operands and passes them to `kHandler`.
template <typename Context, auto kBinding, auto kHandler, ffi::Traits... kTraits>
XLA_FFI_Error* CallFromXla(XLA_FFI_CallFrame* call_frame) {
  static auto* handler = kBinding().template Ctx<Context>().To(kHandler, {kTraits...}).release();
  return handler->Call(call_frame);
}

// All handlers. `Context` is their last argument.
template <typename Context>
std::vector<NamedHandler> HandlersOf() {
  using C = typename ffi::CtxDecoding<Context>::Type;
  // Only enqueue kernels, so XLA may capture them in a CUDA graph. Copies have their own streams.
  constexpr auto kCapturable = ffi::Traits::kCmdBufferCompatible;
  return {
      {"jdistadam_adam", CallFromXla<Context, AdamBinding, AdamHandler<C>, kCapturable>},
      {"jdistadam_quantized",
       CallFromXla<Context, QuantizedBinding, QuantizedHandler<C>, kCapturable>},
      {"jdistadam_adam_squares",
       CallFromXla<Context, AdamSquaresBinding, AdamSquaresHandler<C>, kCapturable>},
      {"jdistadam_quantized_squares",
       CallFromXla<Context, QuantizedSquaresBinding, QuantizedSquaresHandler<C>, kCapturable>},
      {"jdistadam_norm_tiles",
       CallFromXla<Context, NormTilesBinding, NormTilesHandler<C>, kCapturable>},
      {"jdistadam_norm", CallFromXla<Context, NormBinding, NormHandler<C>, kCapturable>},
      {"jdistadam_sum", CallFromXla<Context, SumBinding, SumHandler<C>, kCapturable>},
      {"jdistadam_sum_parts",
       CallFromXla<Context, SumPartsBinding, SumPartsHandler<C>, kCapturable>},
      {"jdistadam_step_parts",
       CallFromXla<Context, StepPartsBinding, StepPartsHandler<C>, kCapturable>},
      {"jdistadam_host_copy", CallFromXla<Context, HostCopyBinding, HostCopyHandler<C>>},
      {"jdistadam_host_copied", CallFromXla<Context, HostCopiedBinding, HostCopiedHandler<C>>},
      {"jdistadam_copy_start", CallFromXla<Context, CopyStartBinding, CopyStartHandler<C>>},
      {"jdistadam_copy_wait", CallFromXla<Context, CopyWaitBinding, CopyWaitHandler<C>>},
  };
}

}  // namespace jdistadam
