// Sums of activations, number by number, and with a bias. Numbers that are multiplied by 0 are not read.
#include "dev.cuh"

// x[i] = factor x[i] + addend
KERNEL elementwise_map(float* x, float factor, float addend, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) x[i] = factor == 0.0f ? addend : factor * x[i] + addend;
}

// y[i] = a x[i] + b y[i], each product rounded as on the CPU
KERNEL elementwise_zip(float* y, const float* x, float a, float b, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) y[i] = b == 0.0f ? a * x[i] : __fadd_rn(__fmul_rn(a, x[i]), __fmul_rn(b, y[i]));
}

// y[t, j] += bias[j]
KERNEL elementwise_add_bias(float* y, const float* bias, u64 tokens, u64 features) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < tokens * features) y[i] += bias[i % features];
}

// sums[j] += sum_t dy[t, j]; a block has 32 features, 8 threads each
KERNEL elementwise_sum_tokens(const float* dy, float* sums, u64 tokens, u64 features) {
    u64 feature = u64(blockIdx.x) * WARP + threadIdx.x % WARP;
    float sum = 0.0f;
    if (feature < features)
        for (u64 t = threadIdx.x / WARP; t < tokens; t += blockDim.x / WARP) sum += dy[t * features + feature];
    sum = column_sum(sum);
    if (threadIdx.x < WARP && feature < features) sums[feature] += sum;
}
