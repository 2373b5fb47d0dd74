// GroupNorm over all rows and the `size` features of a group. stats[g] = (mean, rstd).
#include "dev.cuh"

// mean, and rstd = 1 / sqrt(mean((x - mean)^2) + eps); a block a group
KERNEL TYPED(group_norm_stats)(const act* x, float* stats, u64 rows, u64 dim, u64 size, float eps) {
    u64 first = u64(blockIdx.x) * size;
    double sum = 0.0, squares = 0.0, count = double(rows * size);
    for (u64 i = threadIdx.x; i < rows * size; i += blockDim.x) sum += widen(x[i / size * dim + first + i % size]);
    double mean = block_sum(sum) / count;
    for (u64 i = threadIdx.x; i < rows * size; i += blockDim.x) {
        double apart = widen(x[i / size * dim + first + i % size]) - mean;
        squares += apart * apart;
    }
    squares = block_sum(squares);
    if (threadIdx.x == 0) {
        stats[2 * u64(blockIdx.x)] = float(mean);
        stats[2 * u64(blockIdx.x) + 1] = float(1.0 / sqrt(squares / count + double(eps)));
    }
}

// out = (x - mean) rstd weight + bias; a thread a number
KERNEL TYPED(group_norm_apply)(const act* x, const float* stats, const float* weight, const float* bias, act* out, u64 count, u64 dim, u64 size) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    u64 feature = i % dim;
    const float* of = stats + feature / size * 2;
    store(out + i, (widen(x[i]) - of[0]) * of[1] * weight[feature] + bias[feature]);
}
