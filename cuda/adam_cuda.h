// Adam on a CUDA device. See adam_cuda.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "adam.h"

namespace jdistadam {

// Enqueues the step on `stream`. Allocates nothing, waits for nothing.
cudaError_t AdamCuda(const AdamCall& call, cudaStream_t stream);

}  // namespace jdistadam
