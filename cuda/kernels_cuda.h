// The kernels on a CUDA device. Each enqueues its work on `stream`; none allocates or waits.
#pragma once

#include <cuda_runtime_api.h>

#include "adam.h"
#include "norm.h"
#include "parts.h"
#include "quantized.h"
#include "squares.h"
#include "sum.h"

namespace jdistadam {

cudaError_t AdamCuda(const AdamCall& call, cudaStream_t stream);
cudaError_t QuantizedCuda(const QuantizedCall& call, cudaStream_t stream);
// The second half of sums of squares, behind the kernel that made the partials.
cudaError_t SumSegmentsCuda(const SquaresCall& call, cudaStream_t stream);
cudaError_t NormTilesCuda(const NormTilesCall& call, cudaStream_t stream);
cudaError_t NormCuda(const NormCall& call, cudaStream_t stream);
cudaError_t PartsCuda(const PartsCall& call, cudaStream_t stream);
cudaError_t SumCuda(const SumCall& call, cudaStream_t stream);

}  // namespace jdistadam
