// RMSNorm over groups of `dim` features: a block a token and group. `weights` is dim, or groups * dim where each group has its own.
#include "dev.cuh"

// rstd[t, g] = 1 / sqrt(mean(x^2) + eps)
KERNEL TYPED(rms_norm_stats)(const act* x, float* rstd, u64 dim, float eps) {
    const act* row = x + u64(blockIdx.x) * dim;
    float sum = 0.0f;
    for (u64 j = threadIdx.x * Pack<act>::COUNT; j < dim; j += blockDim.x * Pack<act>::COUNT) {
        float values[Pack<act>::COUNT];
        load_pack(values, row, j, dim);
        UNROLL for (u32 e = 0; e < Pack<act>::COUNT; e++) sum += values[e] * values[e];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) rstd[blockIdx.x] = 1.0f / sqrtf(sum / float(dim) + eps);
}

// out = x rstd (weight + offset)
KERNEL TYPED(rms_norm_apply)(const act* x, const float* rstd, const float* weight, u64 weights, float offset, act* out, u64 dim) {
    u64 start = u64(blockIdx.x) * dim;
    weight += start % weights;
    float r = rstd[blockIdx.x];
    for (u64 j = threadIdx.x * Pack<act>::COUNT; j < dim; j += blockDim.x * Pack<act>::COUNT) {
        float values[Pack<act>::COUNT];
        load_pack(values, x + start, j, dim);
        UNROLL for (u32 e = 0; e < Pack<act>::COUNT; e++) {
            if (j + e < dim) values[e] = values[e] * r * (weight[j + e] + offset);
        }
        store_pack(out + start, j, dim, values);
    }
}

// dx = rstd (g - x rstd^2 mean(g x)), g = (weight + offset) dh; added to what is there if `add`
KERNEL TYPED(rms_norm_backward)(const act* x, const float* rstd, const float* weight, u64 weights, float offset, const act* dh, act* dx,
                                i32 add, u64 dim) {
    u64 start = u64(blockIdx.x) * dim;
    weight += start % weights;
    float r = rstd[blockIdx.x], sum = 0.0f;
    float xs[Pack<act>::COUNT], gs[Pack<act>::COUNT], sums[Pack<act>::COUNT];
    for (u64 j = threadIdx.x * Pack<act>::COUNT; j < dim; j += blockDim.x * Pack<act>::COUNT) {
        load_pack(xs, x + start, j, dim);
        load_pack(gs, dh + start, j, dim);
        UNROLL for (u32 e = 0; e < Pack<act>::COUNT; e++) {
            if (j + e < dim) sum += gs[e] * (weight[j + e] + offset) * xs[e];
        }
    }
    float pull = block_sum(sum) * (-1.0f / float(dim)) * r * r;
    for (u64 j = threadIdx.x * Pack<act>::COUNT; j < dim; j += blockDim.x * Pack<act>::COUNT) {
        load_pack(xs, x + start, j, dim);
        load_pack(gs, dh + start, j, dim);
        UNROLL for (u32 e = 0; e < Pack<act>::COUNT; e++) sums[e] = 0.0f;
        if (add) load_pack(sums, dx + start, j, dim);
        UNROLL for (u32 e = 0; e < Pack<act>::COUNT; e++) {
            if (j + e < dim) sums[e] += (xs[e] * pull + gs[e] * (weight[j + e] + offset)) * r;
        }
        store_pack(dx + start, j, dim, sums);
    }
}

// dw[j] += sum over rows of `weights` features of dh x rstd; a block has 32 features
KERNEL TYPED(rms_norm_backward_weight)(const act* x, const float* rstd, const act* dh, float* dw, u64 rows, u64 weights, u64 dim) {
    u64 feature = u64(blockIdx.x) * WARP + threadIdx.x % WARP;
    float sum = 0.0f;
    if (feature < weights)
        for (u64 row = threadIdx.x / WARP; row < rows; row += blockDim.x / WARP) {
            u64 at = row * weights + feature;
            sum += widen(x[at]) * rstd[at / dim] * widen(dh[at]);
        }
    sum = column_sum(sum);
    if (threadIdx.x < WARP && feature < weights) dw[feature] += sum;
}
