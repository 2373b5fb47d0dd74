// A cut at a quantile of a normal distribution with a row's mean and deviation: a block a row of `dim` features.
#include "dev.cuh"

struct Stats {
    float mean, deviation;
};

static __device__ inline Stats stats_of(const act* row, u64 dim) {
    float sum = 0.0f, squares = 0.0f;
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x) sum += widen(row[j]);
    float mean = block_sum(sum) / float(dim);
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x) {
        float off = widen(row[j]) - mean;
        squares += off * off;
    }
    return {mean, sqrtf(block_sum(squares) / float(dim))};
}

KERNEL TYPED(gaussian_topk_forward)(const act* x, act* out, float multiplier, u64 dim) {
    u64 start = u64(blockIdx.x) * dim;
    Stats stats = stats_of(x + start, dim);
    float cut = stats.mean + stats.deviation * multiplier;
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x) {
        float above = widen(x[start + j]) - cut;
        store(out + start + j, above < 0.0f ? 0.0f : above);
    }
}

// dx = g - (sum of g) (1 / dim + m (x - mean) / (dim std)), where g is dy of what is not cut
KERNEL TYPED(gaussian_topk_backward)(const act* x, act* dy, float multiplier, u64 dim) {
    u64 start = u64(blockIdx.x) * dim;
    Stats stats = stats_of(x + start, dim);
    float cut = stats.mean + stats.deviation * multiplier, sum = 0.0f;
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x)
        if (widen(x[start + j]) - cut > 0.0f) sum += widen(dy[start + j]);
    sum = block_sum(sum);
    float slope = stats.deviation > 0.0f ? multiplier / (stats.deviation * float(dim)) : 0.0f;
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x) {
        float value = widen(x[start + j]), kept = value - cut > 0.0f ? widen(dy[start + j]) : 0.0f;
        store(dy + start + j, kept - sum * ((value - stats.mean) * slope + 1.0f / float(dim)));
    }
}
