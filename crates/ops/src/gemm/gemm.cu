// What products need beside cublasLt: biases, matrices with strides, bfloat16 widened.
#include "dev.cuh"

// out[t, m] = bias[m]
KERNEL gemm_bias(const float* bias, float* out, u64 tokens, u64 rows) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < tokens * rows) out[i] = bias[i % rows];
}

KERNEL gemm_widen(const bf16* from, float* to, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) to[i] = widen(from[i]);
}

KERNEL gemm_round(const float* from, bf16* to, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) to[i] = to_bf16(from[i]);
}

// packed[m, k] = matrix[m row + k col]
KERNEL gemm_pack(const float* matrix, float* packed, u64 rows, u64 depth, u64 row, u64 col) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < rows * depth) packed[i] = matrix[i / depth * row + i % depth * col];
}

// out[m row + n col] += sums[m, n]
KERNEL gemm_unpack_add(const float* sums, float* out, u64 rows, u64 cols, u64 row, u64 col) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < rows * cols) out[i / cols * row + i % cols * col] += sums[i];
}
