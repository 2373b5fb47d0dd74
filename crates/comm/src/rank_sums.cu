// Sums over ranks, a thread a number.
#include "dev.cuh"

// own[i] += the other ranks' numbers, from the first rank to the last. `others` is [size - 1, stride]: the other ranks in order.
KERNEL rank_sums(float* own, const float* others, u64 stride, u32 rank, u32 size, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float mine = own[i];
    float sum = rank == 0 ? mine : others[i];
    for (u32 other = 1; other < size; other++) sum += other == rank ? mine : others[(other < rank ? other : other - 1) * stride + i];
    own[i] = sum;
}
