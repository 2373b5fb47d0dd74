// Numbers in 16 bits and back, a thread a number.
#include "dev.cuh"

KERNEL narrow_to_bf16(const float* x, bf16* out, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) out[i] = to_bf16(x[i]);
}

KERNEL narrow_to_f16(const float* x, f16* out, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) out[i] = to_f16(x[i]);
}

KERNEL narrow_from_bf16(const bf16* x, float* out, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) out[i] = widen(x[i]);
}

KERNEL narrow_from_f16(const f16* x, float* out, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) out[i] = widen(x[i]);
}
