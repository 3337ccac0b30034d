// A step of Adam over the memory of several devices of one process: the interface between the
// kernels and the FFI handlers.
//
// Every device owns one shard of each leaf. It reads this shard of the gradients of all devices,
// in place or from its own arrays if the others have sent it, adds them in float32, updates its
// part of the state, and writes the new parameters into the arrays of all devices:
//
//   sum    <- grad of device 0 + ... + grad of device n - 1       pairwise (pairwise.h), float32
//   main, mu, nu <- Adam of sum * inv_scale                       adam_math.h
//   out of every device <- main, rounded
//
// A leaf of shape (rows, n * d, inner) is cut along its middle dimension: shard `me` is `rows` runs
// of run = d * inner elements, each of them run `me` of n contiguous runs in the leaf. Flat arrays
// of the state hold the runs without gaps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dtype.h"
#include "norm.h"
#include "parallel.h"
#include "sum.h"

namespace jdistadam {

constexpr int kMaxPeers = 8;

// The parts of a step that a call performs.
enum class PeerWork {
  kSum,         // sum <- gradients; and their norm
  kStep,        // the whole step; and the norm of the gradients, for callers that want it
  kStepOnSums,  // the step on the result of kSum; the norm was taken in between
};

// One leaf as one device sees it. Null if a call does not use it.
struct PeerLeaf {
  const void* grad;  // the gradient of this device
  float* sum;        // this device's shard of the sum, without gaps
  float* main;
  void* mu;
  void* nu;
  void* out;    // the whole new parameter of this device
  size_t size;  // elements of a shard
  size_t run;
  size_t first_tile;  // of the norm: tiles of all leaves before
  int32_t group;      // row of the coefficients
  Dtype out_dtype;
  // Whether this shard of the others' gradients is in arrays of this device, and in which:
  // ReceivedIndex gives the sender.
  bool is_received;
  bool is_shard;  // whether `grad` is only this shard, too
  const void* received[kMaxPeers - 1];
};

struct PeerDtypes {
  Dtype grad, mu, nu;
};

// The pointers are device memory in the CUDA kernels. `tiles` and later fields are for the norm,
// which kStepOnSums does not take.
struct PeerCall {
  PeerWork work;
  int32_t flags;  // of adam_math.h
  PeerDtypes dtypes;
  const float* coefficients;
  const float* inv_scale;
  const bool* found_inf;
  std::vector<PeerLeaf> leaves;
  const float* norm_scale;  // multiplies the sums before they are squared
  size_t num_tiles;
  TileNorm* tiles;
  float* sum_of_squares;
  bool* norm_found_inf;
};

// The addresses of the arrays of all devices: leaf by leaf, in a leaf device by device.
struct PeerArrays {
  int count;  // of devices
  int me;
  std::vector<const void*> grads;  // empty in kStepOnSums
  std::vector<void*> outs;         // empty in kSum
};

// The index of device `from` among the received arrays: the next lower place comes first.
JDISTADAM_INLINE int ReceivedIndex(int count, int me, int from) {
  return (me - from + count) % count - 1;
}

void PeerCpu(const PeerCall& call, const PeerArrays& arrays, const Threads& threads);

}  // namespace jdistadam
