// The FFI call `jdistadam_graph_node` gives its operand back, where it is, and computes nothing.
//
// operand   any array.
// result    the same, aliased.
//
// What it is for: kernels/adam.py, graph_nodes.
#pragma once

#include "ffi_common.h"

namespace jdistadam {

inline ffi::Error CheckPassed(const ffi::AnyBuffer& operand, ffi::Result<ffi::AnyBuffer> result) {
  if (operand.element_type() != result->element_type() ||
      operand.element_count() != result->element_count())
    return Invalid("graph node: the result is not of the operand's type");
  if (operand.element_count() > 0 && operand.untyped_data() != result->untyped_data())
    return Invalid("graph node: the result is not aliased with its operand");
  return ffi::Error::Success();
}

}  // namespace jdistadam
