// The kernels on a CUDA device. Each enqueues its work on `stream`; none allocates or waits.
#pragma once

#include <cuda_runtime_api.h>

#include "adam.h"
#include "keep.h"
#include "norm.h"
#include "sum.h"

namespace jdistadam {

cudaError_t AdamCuda(const AdamCall& call, cudaStream_t stream);
cudaError_t NormCuda(const NormCall& call, cudaStream_t stream);
cudaError_t SumCuda(const SumCall& call, cudaStream_t stream);
cudaError_t KeepCuda(const KeepCall& call, cudaStream_t stream);

}  // namespace jdistadam
