// Copies between rows of activations, row-major [tokens, features]. A thread has one number.
#include "dev.cuh"

// out[i, j] = x[rows[i], j]
KERNEL activation_gather(const float* x, const u32* rows, float* out, u64 count, u64 features) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count * features) return;
    out[i] = x[u64(rows[i / features]) * features + i % features];
}

// out[rows[i], j] = x[i, j]; no row comes twice
KERNEL activation_scatter(const float* x, const u32* rows, float* out, u64 count, u64 features) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count * features) return;
    out[u64(rows[i / features]) * features + i % features] = x[i];
}

// out[rows[i], j] += factors[i] x[i, j]; no row comes twice. Without factors each is 1.
KERNEL activation_scatter_add(const float* x, const u32* rows, const float* factors, float* out, u64 count, u64 features) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count * features) return;
    float factor = factors ? factors[i / features] : 1.0f;
    out[u64(rows[i / features]) * features + i % features] += factor * x[i];
}

// to[t, to_first + j] = from[t, from_first + j] for j below width
KERNEL activation_columns(const float* from, u64 from_features, u64 from_first, float* to, u64 to_features, u64 to_first,
                          u64 tokens, u64 width) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= tokens * width) return;
    to[i / width * to_features + to_first + i % width] = from[i / width * from_features + from_first + i % width];
}

// x[t, j] *= factors[t]
KERNEL activation_times(float* x, const float* factors, u64 tokens, u64 features) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < tokens * features) x[i] *= factors[i / features];
}

// out[t] = sum_j x[t, j] y[t, j]; a block a token
KERNEL activation_dot(const float* x, const float* y, float* out, u64 features) {
    u64 row = u64(blockIdx.x) * features;
    float sum = 0.0f;
    for (u64 j = threadIdx.x; j < features; j += blockDim.x) sum += x[row + j] * y[row + j];
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
