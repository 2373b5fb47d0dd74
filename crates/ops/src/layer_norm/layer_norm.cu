// LayerNorm over the `dim` features of a token: a block a token. stats[t] = (mean, rstd).
#include "dev.cuh"

// mean, and rstd = 1 / sqrt(mean((x - mean)^2) + eps)
KERNEL TYPED(layer_norm_stats)(const act* x, float* stats, u64 dim, float eps) {
    const act* row = x + u64(blockIdx.x) * dim;
    float sum = 0.0f, squares = 0.0f;
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x) sum += widen(row[j]);
    float mean = block_sum(sum) / float(dim);
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x) squares += (widen(row[j]) - mean) * (widen(row[j]) - mean);
    squares = block_sum(squares);
    if (threadIdx.x == 0) {
        stats[2 * u64(blockIdx.x)] = mean;
        stats[2 * u64(blockIdx.x) + 1] = 1.0f / sqrtf(squares / float(dim) + eps);
    }
}

// out = (x - mean) rstd weight + bias; a thread a number
KERNEL TYPED(layer_norm_apply)(const act* x, const float* stats, const float* weight, const float* bias, act* out, u64 count, u64 dim) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const float* of = stats + i / dim * 2;
    store(out + i, (widen(x[i]) - of[0]) * of[1] * weight[i % dim] + bias[i % dim]);
}

// dx = rstd (g - mean(g) - y mean(g y)), g = weight dh, y = (x - mean) rstd; added to what is there if `add`
KERNEL TYPED(layer_norm_backward)(const act* x, const float* stats, const float* weight, const act* dh, act* dx, i32 add, u64 dim) {
    u64 start = u64(blockIdx.x) * dim;
    float mean = stats[2 * u64(blockIdx.x)], r = stats[2 * u64(blockIdx.x) + 1], sum = 0.0f, product = 0.0f;
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x) {
        float g = weight[j] * widen(dh[start + j]);
        sum += g;
        product += g * (widen(x[start + j]) - mean) * r;
    }
    sum = block_sum(sum) / float(dim);
    product = block_sum(product) / float(dim);
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x) {
        float value = r * (weight[j] * widen(dh[start + j]) - sum - (widen(x[start + j]) - mean) * r * product);
        store(dx + start + j, add ? widen(dx[start + j]) + value : value);
    }
}

// dw[j] += sum over tokens of dh (x - mean) rstd; a block has 32 features
KERNEL TYPED(layer_norm_backward_weight)(const act* x, const float* stats, const act* dh, float* dw, u64 rows, u64 dim) {
    u64 feature = u64(blockIdx.x) * WARP + threadIdx.x % WARP;
    float sum = 0.0f;
    if (feature < dim)
        for (u64 row = threadIdx.x / WARP; row < rows; row += blockDim.x / WARP)
            sum += (widen(x[row * dim + feature]) - stats[2 * row]) * stats[2 * row + 1] * widen(dh[row * dim + feature]);
    sum = column_sum(sum);
    if (threadIdx.x < WARP && feature < dim) dw[feature] += sum;
}
