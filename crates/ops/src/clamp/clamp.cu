// min(max(x, low), high), a thread a number.
#include "dev.cuh"

KERNEL TYPED(clamp_forward)(const act* x, float low, float high, act* y, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float v = widen(x[i]);
    store(y + i, v < low ? low : v > high ? high : v);
}

// The gradient is zero where x lies beyond a bound
KERNEL TYPED(clamp_backward)(const act* x, float low, float high, act* gradient, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float v = widen(x[i]);
    if (v < low || v > high) store(gradient + i, 0.0f);
}
