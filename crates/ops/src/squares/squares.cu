// Sums of squares in double precision: a block sums 16,384 numbers.
#include "dev.cuh"

KERNEL squares_sum(const float* x, double* sums, u64 count) {
    u64 start = u64(blockIdx.x) * 16384, end = start + 16384 < count ? start + 16384 : count;
    double sum = 0.0;
    for (u64 i = start + threadIdx.x; i < end; i += blockDim.x) sum += double(x[i]) * double(x[i]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
