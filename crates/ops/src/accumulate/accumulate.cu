// Sums of gradients in float32 or bfloat16, a thread a number.
#include "dev.cuh"

template <class T> static __device__ inline void add(T* sums, const float* grads, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) store(sums + i, widen(sums[i]) + grads[i]);
}

template <class T> static __device__ inline void take(T* sums, float* grads, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    grads[i] += widen(sums[i]);
    store(sums + i, 0.0f);
}

KERNEL accumulate_add_f32(float* sums, const float* grads, u64 count) { add(sums, grads, count); }
KERNEL accumulate_add_bf16(bf16* sums, const float* grads, u64 count) { add(sums, grads, count); }
KERNEL accumulate_take_f32(float* sums, float* grads, u64 count) { take(sums, grads, count); }
KERNEL accumulate_take_bf16(bf16* sums, float* grads, u64 count) { take(sums, grads, count); }

KERNEL accumulate_to_f32(const bf16* sums, float* floats, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) floats[i] = widen(sums[i]);
}
