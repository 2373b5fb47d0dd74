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

// found: the norm sqrt(sum of sums) / scale, and both totals; factor: min(1, most / (norm + 1e-6)) / scale, without `most` 1 / scale,
// and NaN where the norm or the losses are not finite. One block.
KERNEL squares_verdict(const double* sums, u64 count, const double* totals, double other, double most, double scale, float* factor,
                       double* found) {
    double total = 0.0;
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) total += sums[i];
    total = block_sum(total);
    if (threadIdx.x > 0) return;
    double norm = sqrt(total) / scale, loss = totals[0] + other;
    // NaN and infinities are no numbers once they are multiplied by zero.
    bool finite = norm * 0.0 == 0.0 && loss * 0.0 == 0.0;
    double clip = most > 0.0 ? most / (norm + 1e-6) : 1.0;
    float least = clip < 1.0 ? float(clip) : 1.0f;
    *factor = finite ? least / float(scale) : NAN;
    found[0] = norm;
    found[1] = totals[0];
    found[2] = totals[1];
}
