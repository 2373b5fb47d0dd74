// LayerNorm over the `dim` features of a token: a block a token. stats[t] = (mean, rstd).
#include "dev.cuh"

// mean, and rstd = 1 / sqrt(mean((x - mean)^2) + eps)
KERNEL layer_norm_stats(const float* x, float* stats, u64 dim, float eps) {
    const float* row = x + u64(blockIdx.x) * dim;
    float sum = 0.0f, squares = 0.0f;
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x) sum += row[j];
    float mean = block_sum(sum) / float(dim);
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x) squares += (row[j] - mean) * (row[j] - mean);
    squares = block_sum(squares);
    if (threadIdx.x == 0) {
        stats[2 * u64(blockIdx.x)] = mean;
        stats[2 * u64(blockIdx.x) + 1] = 1.0f / sqrtf(squares / float(dim) + eps);
    }
}

// out = (x - mean) rstd weight + bias; a thread a number
KERNEL layer_norm_apply(const float* x, const float* stats, const float* weight, const float* bias, float* out, u64 count, u64 dim) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const float* of = stats + i / dim * 2;
    out[i] = (x[i] - of[0]) * of[1] * weight[i % dim] + bias[i % dim];
}

// dx = rstd (g - mean(g) - y mean(g y)), g = weight dh, y = (x - mean) rstd; added to what is there if `add`
KERNEL layer_norm_backward(const float* x, const float* stats, const float* weight, const float* dh, float* dx, i32 add, u64 dim) {
    u64 start = u64(blockIdx.x) * dim;
    float mean = stats[2 * u64(blockIdx.x)], r = stats[2 * u64(blockIdx.x) + 1], sum = 0.0f, product = 0.0f;
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x) {
        float g = weight[j] * dh[start + j];
        sum += g;
        product += g * (x[start + j] - mean) * r;
    }
    sum = block_sum(sum) / float(dim);
    product = block_sum(product) / float(dim);
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x) {
        float value = r * (weight[j] * dh[start + j] - sum - (x[start + j] - mean) * r * product);
        dx[start + j] = add ? dx[start + j] + value : value;
    }
}

// dw[j] += sum over tokens of dh (x - mean) rstd; a block has 32 features
KERNEL layer_norm_backward_weight(const float* x, const float* stats, const float* dh, float* dw, u64 rows, u64 dim) {
    u64 feature = u64(blockIdx.x) * WARP + threadIdx.x % WARP;
    float sum = 0.0f;
    if (feature < dim)
        for (u64 row = threadIdx.x / WARP; row < rows; row += blockDim.x / WARP)
            sum += (x[row * dim + feature] - stats[2 * row]) * stats[2 * row + 1] * dh[row * dim + feature];
    sum = column_sum(sum);
    if (threadIdx.x < WARP && feature < dim) dw[feature] += sum;
}
