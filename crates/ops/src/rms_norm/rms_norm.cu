// RMSNorm over groups of `dim` features: a block a token and group.
#include "dev.cuh"

// rstd[t, g] = 1 / sqrt(mean(x^2) + eps)
KERNEL rms_norm_stats(const float* x, float* rstd, u64 dim, float eps) {
    const float* row = x + u64(blockIdx.x) * dim;
    float sum = 0.0f;
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x) sum += row[j] * row[j];
    sum = block_sum(sum);
    if (threadIdx.x == 0) rstd[blockIdx.x] = 1.0f / sqrtf(sum / float(dim) + eps);
}

// out = x rstd (weight + offset); a thread a number
KERNEL rms_norm_apply(const float* x, const float* rstd, const float* weight, float offset, float* out, u64 count, u64 dim) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) out[i] = x[i] * rstd[i / dim] * (weight[i % dim] + offset);
}

// dx = rstd (g - x rstd^2 mean(g x)), g = (weight + offset) dh; added to what is there if `add`
KERNEL rms_norm_backward(const float* x, const float* rstd, const float* weight, float offset, const float* dh, float* dx, i32 add, u64 dim) {
    u64 start = u64(blockIdx.x) * dim;
    float r = rstd[blockIdx.x], sum = 0.0f;
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x) sum += dh[start + j] * (weight[j] + offset) * x[start + j];
    float pull = block_sum(sum) * (-1.0f / float(dim)) * r * r;
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x) {
        float value = (x[start + j] * pull + dh[start + j] * (weight[j] + offset)) * r;
        dx[start + j] = add ? dx[start + j] + value : value;
    }
}

// dw[j] += sum over rows (tokens and groups) of dh x rstd; a block has 32 features
KERNEL rms_norm_backward_weight(const float* x, const float* rstd, const float* dh, float* dw, u64 rows, u64 dim) {
    u64 feature = u64(blockIdx.x) * WARP + threadIdx.x % WARP;
    float sum = 0.0f;
    if (feature < dim)
        for (u64 row = threadIdx.x / WARP; row < rows; row += blockDim.x / WARP)
            sum += x[row * dim + feature] * rstd[row] * dh[row * dim + feature];
    sum = column_sum(sum);
    if (threadIdx.x < WARP && feature < dim) dw[feature] += sum;
}
