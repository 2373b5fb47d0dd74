// cap tanh(x / cap), a thread a number.
#include "dev.cuh"

KERNEL softcap_forward(float* x, float cap, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) x[i] = cap * tanhf(x[i] / cap);
}

// gradient[i] *= 1 - (capped[i] / cap)^2
KERNEL softcap_backward(const float* capped, float cap, float* gradient, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float t = capped[i] / cap;
    gradient[i] *= 1.0f - t * t;
}
