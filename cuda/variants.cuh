// Variants of a kernel, and which of them a call launches.
//
// A kernel is a template of `Types`: its mode and the storage dtypes of the five arrays. A variant
// is one such type:
//
//   FixedTypes<mode, dtypes...>  All is constant: conversions have no branches, and weight decay is
//                                not cautious. These kernels are at the limit of registers for
//                                their occupancy; testing a flag would cost every call up to 2 %.
//   AnyTypes<mode>               Only the mode is constant; the others are arguments of the launch.
//                                In adam_cuda.cu that costs 5 % with float32 state and 30 % with
//                                bfloat16 state.
//
// Kernels derive their variants from these two, and add other constants. Dtypes are known only when
// a call runs, template arguments only at compile time. The search for a variant is therefore a
// chain of comparisons that the compiler generates from a list, one per variant. It runs on the
// host, once per call.
#pragma once

#include <cuda_runtime_api.h>

#include "adam.h"
#include "adam_math.h"

namespace jdistadam {

template <Mode kMode_>
struct AnyTypes {
  static constexpr Mode kMode = kMode_;
  static constexpr bool kMayBeCautious = true;
  Dtype grad, param, mu, nu, out;

  template <typename Step>
  __device__ explicit AnyTypes(const Step& step)
      : grad(step.dtypes.grad),
        param(step.dtypes.param),
        mu(step.dtypes.mu),
        nu(step.dtypes.nu),
        out(step.dtypes.out) {}
  static bool Fits(const AdamCall& call) { return call.mode == kMode; }
};

// With the same names. Mode::kStep has no out.
template <Mode kMode_, Dtype kGrad, Dtype kParam, Dtype kMu, Dtype kNu, Dtype kOut>
struct FixedTypes {
  static constexpr Mode kMode = kMode_;
  static constexpr Dtype grad = kGrad, param = kParam, mu = kMu, nu = kNu, out = kOut;
  static constexpr bool kMayBeCautious = false;

  template <typename Step>
  __device__ explicit FixedTypes(const Step&) {}
  static bool Fits(const AdamCall& call) {
    const Dtypes& t = call.dtypes;
    return call.mode == kMode && t.grad == grad && t.param == param && t.mu == mu && t.nu == nu &&
           (kMode == Mode::kStep || t.out == out) && (call.flags & kCautious) == 0;
  }
};

// A list of variants: a type without members that only carries its arguments.
template <typename... Variants>
struct List {};

// Joined<List<A>, List<B>, ...>::Type is List<A, B, ...>.
template <typename... Lists>
struct Joined;
template <typename... A, typename... B, typename... Rest>
struct Joined<List<A...>, List<B...>, Rest...> : Joined<List<A..., B...>, Rest...> {};
template <typename... A>
struct Joined<List<A...>> {
  using Type = List<A...>;
};

// launch(List<Variant>) with the first variant that fits: `||` ends the search there. An error if
// none fits, which an AnyTypes for each mode prevents.
template <typename... Variants, typename Call, typename Launch>
cudaError_t LaunchFirst(List<Variants...>, const Call& call, const Launch& launch) {
  cudaError_t error = cudaErrorInvalidValue;
  const auto try_one = [&](auto variant, bool fits) {
    if (fits) error = launch(variant);
    return fits;
  };
  (void)(try_one(List<Variants>{}, Variants::Fits(call)) || ...);
  return error;
}

}  // namespace jdistadam
