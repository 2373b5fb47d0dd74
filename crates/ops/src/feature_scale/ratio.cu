// Quotients, number by number.
#include "dev.cuh"

KERNEL feature_scale_ratio(const float* above, const float* below, float* out, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) out[i] = above[i] / below[i];
}
