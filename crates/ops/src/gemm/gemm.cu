// What products need beside cublasLt: biases, matrices with strides.
#include "dev.cuh"

// out[t, m] = bias[m]
KERNEL TYPED(gemm_bias)(const float* bias, act* out, u64 tokens, u64 rows) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < tokens * rows) store(out + i, bias[i % rows]);
}

// out[t, m] = addend[t, m] + sums[t, m] rows[m] columns[t], without an addend if that is null; a thread has a pack of sums
KERNEL TYPED(gemm_scale)(const bf16* sums, const float* rows, const float* columns, const act* addend, act* out, u64 tokens, u64 width) {
    u64 i = (u64(blockIdx.x) * blockDim.x + threadIdx.x) * Pack<bf16>::COUNT, count = tokens * width;
    if (i >= count) return;
    float values[Pack<bf16>::COUNT];
    load_pack(values, sums, i, count);
    // A pack is within a row: `width` is a multiple of 16.
    u64 t = i / width, m = i % width;
    float column = columns[t];
    UNROLL for (u32 e = 0; e < Pack<bf16>::COUNT; e++) {
        float value = values[e] * (rows[m + e] * column);
        store(out + i + e, addend ? widen(addend[i + e]) + value : value);
    }
}

// packed[m, k] = matrix[m row + k col]
KERNEL TYPED(gemm_pack)(const act* matrix, act* packed, u64 rows, u64 depth, u64 row, u64 col) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < rows * depth) packed[i] = matrix[i / depth * row + i % depth * col];
}

// out[m row + n col] += sums[m, n]
KERNEL TYPED(gemm_unpack_add)(const float* sums, act* out, u64 rows, u64 cols, u64 row, u64 col) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < rows * cols) {
        act* place = out + i / cols * row + i % cols * col;
        store(place, widen(*place) + sums[i]);
    }
}
