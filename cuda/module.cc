// The Python module of one backend: `_cpu` or `_cuda`, the same source compiled twice.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "processes.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;

// JdistadamAdam_cpu and so on: the backends name their handlers after the module.
#define JDISTADAM_JOIN_(kernel, module) Jdistadam##kernel##module
#define JDISTADAM_JOIN(kernel, module) JDISTADAM_JOIN_(kernel, module)
#define JDISTADAM_HANDLER(kernel) JDISTADAM_JOIN(kernel, JDISTADAM_MODULE)

extern "C" {
XLA_FFI_Error* JDISTADAM_HANDLER(Adam)(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JDISTADAM_HANDLER(Quantized)(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JDISTADAM_HANDLER(AdamSquares)(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JDISTADAM_HANDLER(QuantizedSquares)(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JDISTADAM_HANDLER(NormTiles)(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JDISTADAM_HANDLER(Norm)(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JDISTADAM_HANDLER(Sum)(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JDISTADAM_HANDLER(HostCopy)(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JDISTADAM_HANDLER(HostCopied)(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JDISTADAM_HANDLER(CopyStart)(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JDISTADAM_HANDLER(CopyWait)(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JDISTADAM_HANDLER(SumParts)(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JDISTADAM_HANDLER(StepParts)(XLA_FFI_CallFrame* call_frame);
bool JDISTADAM_HANDLER(CanReach)(int device, int peer);
bool JDISTADAM_HANDLER(ReachesProcess)(int pid);
double JDISTADAM_HANDLER(LinkSpeed)(int device, int peer);
void JDISTADAM_HANDLER(StopCopies)();
void JDISTADAM_HANDLER(JoinProcesses)(int me, const jdistadam::JoinedProcesses& joined);
}

NB_MODULE(JDISTADAM_MODULE, m) {
  m.doc() =
      "Compiled kernels of jdistadam. Private: jdistadam.kernels.native loads and registers them.";
  // The FFI version of these headers; a jaxlib accepts modules built with its own or older ones.
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("build_info") = JDISTADAM_BUILD_INFO;
  // Whether a device can read and write the memory of another device of this process.
  m.def("can_reach", &JDISTADAM_HANDLER(CanReach));
  // GB/s of a copy from a device to another one, measured now; 0 if it could not be measured.
  m.def("link_speed", &JDISTADAM_HANDLER(LinkSpeed), nb::call_guard<nb::gil_scoped_release>());
  // Ends the threads that make copies between devices, or wait for them. No copy starts afterwards.
  m.def("stop_copies", &JDISTADAM_HANDLER(StopCopies), nb::call_guard<nb::gil_scoped_release>());
  // Whether devices of this process can write the memory of another one.
  m.def("reaches_process", &JDISTADAM_HANDLER(ReachesProcess));
  // Connects this process with others of its host: processes.h. Takes the descriptors.
  m.def("join_processes",
        [](int me, const std::vector<std::tuple<int64_t, int, int>>& devices,
           const std::vector<std::tuple<int, int, int>>& sockets, double grace_seconds) {
          jdistadam::JoinedProcesses joined{{}, {}, grace_seconds};
          for (const auto& [number, process, ordinal] : devices)
            joined.devices.push_back({number, process, ordinal});
          for (const auto& [process, pid, fd] : sockets)
            joined.sockets.push_back({process, fd, pid});
          JDISTADAM_HANDLER(JoinProcesses)(me, joined);
        });
  m.def("handlers", [] {
    nb::dict handlers;
    handlers["jdistadam_adam"] = nb::capsule(reinterpret_cast<void*>(JDISTADAM_HANDLER(Adam)));
    handlers["jdistadam_quantized"] =
        nb::capsule(reinterpret_cast<void*>(JDISTADAM_HANDLER(Quantized)));
    handlers["jdistadam_adam_squares"] =
        nb::capsule(reinterpret_cast<void*>(JDISTADAM_HANDLER(AdamSquares)));
    handlers["jdistadam_quantized_squares"] =
        nb::capsule(reinterpret_cast<void*>(JDISTADAM_HANDLER(QuantizedSquares)));
    handlers["jdistadam_norm_tiles"] =
        nb::capsule(reinterpret_cast<void*>(JDISTADAM_HANDLER(NormTiles)));
    handlers["jdistadam_norm"] = nb::capsule(reinterpret_cast<void*>(JDISTADAM_HANDLER(Norm)));
    handlers["jdistadam_sum"] = nb::capsule(reinterpret_cast<void*>(JDISTADAM_HANDLER(Sum)));
    handlers["jdistadam_host_copy"] =
        nb::capsule(reinterpret_cast<void*>(JDISTADAM_HANDLER(HostCopy)));
    handlers["jdistadam_host_copied"] =
        nb::capsule(reinterpret_cast<void*>(JDISTADAM_HANDLER(HostCopied)));
    handlers["jdistadam_copy_start"] =
        nb::capsule(reinterpret_cast<void*>(JDISTADAM_HANDLER(CopyStart)));
    handlers["jdistadam_copy_wait"] =
        nb::capsule(reinterpret_cast<void*>(JDISTADAM_HANDLER(CopyWait)));
    handlers["jdistadam_sum_parts"] =
        nb::capsule(reinterpret_cast<void*>(JDISTADAM_HANDLER(SumParts)));
    handlers["jdistadam_step_parts"] =
        nb::capsule(reinterpret_cast<void*>(JDISTADAM_HANDLER(StepParts)));
    return handlers;
  });
}
