// Products with a block-diagonal matrix.
#include "dev.cuh"

// out[t, b, j] = sum_i x[t, b, i] D_b[i, j], or with D_b^T; a thread a number. The last of `matrices` counts for all further blocks.
KERNEL TYPED(block_diagonal_times)(const float* matrices, const act* x, act* out, u64 count, u64 size, i32 transposed, i32 adds,
                                   u64 tokens, u64 features) {
    u64 at = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= tokens * features) return;
    u64 feature = at % features, block = feature / size, j = feature % size;
    const act* row = x + at / features * features + block * size;
    const float* matrix = matrices + (block < count ? block : count - 1) * size * size;
    u64 step = transposed ? 1 : size, first = transposed ? j * size : j;
    float sum = adds ? widen(out[at]) : 0.0f;
    for (u64 i = 0; i < size; i++) sum += widen(row[i]) * matrix[first + i * step];
    store(out + at, sum);
}

// out[b, i, j] = sum_t x[t, b, i] d[t, b, j]; a thread a number
KERNEL TYPED(block_diagonal_outer)(const act* x, const act* d, float* out, u64 size, u64 tokens, u64 features) {
    u64 at = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= features * size) return;
    u64 j = at % size, i = at / size % size, block = at / size / size;
    const act *left = x + block * size + i, *right = d + block * size + j;
    float sum = 0.0f;
    for (u64 t = 0; t < tokens; t++) sum += widen(left[t * features]) * widen(right[t * features]);
    out[at] = sum;
}
