// What tests of the CUDA layer run.
#include "dev.cuh"

// out[i] = x[i] + more, and the sum of a block's results to sums[block]; a number a thread
KERNEL testing_add(const float* x, float more, float* out, float* sums, u64 count) {
    DYNAMIC_SHARED(float, kept);
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    kept[threadIdx.x] = i < count ? x[i] + more : 0.0f;
    __syncthreads();
    // Through a neighbour's place, so that a missing barrier shows.
    float value = kept[blockDim.x - 1 - threadIdx.x];
    float sum = block_sum(value);
    if (i < count) out[i] = kept[threadIdx.x];
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// Both 16-bit forms of each of 32 floats; then the float of the second, plus 31 and the 11 lanes that 3 divides.
KERNEL testing_bits(float* floats, u32* words) {
    u32 i = threadIdx.x;
    words[i] = u32(to_bf16(floats[i]).bits) | u32(to_f16(floats[i]).bits) << 16;
    floats[i] = widen(to_f16(floats[i])) + warp_max(float(i)) + float(__popc(__ballot_sync(0xffffffffu, i % 3 == 0)));
}
