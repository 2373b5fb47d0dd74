// Each feature several times, and the sums of their gradients: a thread a number of the result.
#include "dev.cuh"

KERNEL TYPED(feature_repeat_forward)(const act* x, act* y, u64 times, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) y[i] = x[i / times];
}

// In the order of the copies.
KERNEL TYPED(feature_repeat_backward)(const act* dy, act* dx, u64 times, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float sum = 0.0f;
    for (u64 copy = 0; copy < times; copy++) sum += widen(dy[i * times + copy]);
    store(dx + i, sum);
}
