// Sums of squares in double precision: a block sums 16,384 numbers.
#include "dev.cuh"

template <class T> static __device__ inline void sum_block(const T* x, double* sums, u64 count) {
    u64 start = u64(blockIdx.x) * 16384, end = start + 16384 < count ? start + 16384 : count;
    double sum = 0.0;
    for (u64 i = start + threadIdx.x; i < end; i += blockDim.x) sum += double(widen(x[i])) * double(widen(x[i]));
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

KERNEL squares_sum(const float* x, double* sums, u64 count) { sum_block(x, sums, count); }
KERNEL squares_sum_bf16(const bf16* x, double* sums, u64 count) { sum_block(x, sums, count); }
