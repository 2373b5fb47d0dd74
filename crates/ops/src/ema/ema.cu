// A moving average, rounded as torch.lerp rounds it; a thread a number.
#include "dev.cuh"

KERNEL ema_update(float* averages, const float* values, float weight, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float average = averages[i], value = values[i], way = value - average;
    averages[i] = weight < 0.5f ? average + weight * way : value - way * (1.0f - weight);
}
