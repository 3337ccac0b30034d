// The Python module of one backend: `_cpu` or `_cuda`, the same source compiled twice.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "ffi_backend.h"

namespace nb = nanobind;

NB_MODULE(JDISTADAM_MODULE, m) {
  m.doc() =
      "Compiled kernels of jdistadam. Private: jdistadam.kernels.native loads and registers them.";
  // The FFI version of these headers; a jaxlib accepts modules built with its own or older ones.
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("build_info") = JDISTADAM_BUILD_INFO;
  m.def("can_reach", &jdistadam::CanReach);
  m.def("link_speed", &jdistadam::LinkSpeed, nb::call_guard<nb::gil_scoped_release>());
  m.def("set_wait_limit", [](double seconds) {
    jdistadam::WaitLimitMs() = std::max<int64_t>(1, int64_t(seconds * 1000));
  });
  m.def("stop_copies", &jdistadam::StopCopies, nb::call_guard<nb::gil_scoped_release>());
  m.def("abandon_copies", &jdistadam::AbandonCopies, nb::call_guard<nb::gil_scoped_release>());
  m.def("reaches_process", &jdistadam::ReachesProcess);
  m.def("name_of_device", &jdistadam::NameOfDevice);
  m.def("reaches_device", &jdistadam::ReachesDevice);
  m.def("join_processes",
        [](int me, const std::vector<std::tuple<int64_t, int, int>>& devices,
           const std::vector<std::tuple<int, int, int>>& sockets, double grace_seconds) {
          jdistadam::JoinedProcesses joined{{}, {}, grace_seconds};
          for (const auto& [number, process, ordinal] : devices)
            joined.devices.push_back({number, process, ordinal});
          for (const auto& [process, pid, fd] : sockets)
            joined.sockets.push_back({process, fd, pid});
          jdistadam::JoinProcesses(me, joined);
        });
  m.def("leave_processes", &jdistadam::LeaveProcesses, nb::call_guard<nb::gil_scoped_release>());
  m.def("handlers", [] {
    nb::dict handlers;
    for (const auto& [name, handler] : jdistadam::Handlers())
      handlers[name] = nb::capsule(reinterpret_cast<void*>(handler));
    return handlers;
  });
}
