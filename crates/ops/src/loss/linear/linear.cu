// The corrections of a chunk's gradient: a block a token.
#include "dev.cuh"

// d[t, j] = d[t, j] scale / sum[t] - scale W[target[t], j]; h[t, j] *= scale / sum[t] where there is h
template <class T>
static __device__ inline void correct(const T* weight, float* d, act* h, const float* losses, const u32* targets, float scale, u64 hidden) {
    u64 row = u64(blockIdx.x) * hidden;
    float factor = scale / losses[4 * u64(blockIdx.x) + 1];
    const T* picked = weight + u64(targets[blockIdx.x]) * hidden;
    for (u64 j = threadIdx.x; j < hidden; j += blockDim.x) {
        d[row + j] = d[row + j] * factor - scale * widen(picked[j]);
        if (h) store(h + row + j, widen(h[row + j]) * factor);
    }
}

KERNEL TYPED(loss_linear_correct_f32)(const float* weight, float* d, act* h, const float* losses, const u32* targets, float scale,
                                      u64 hidden) {
    correct(weight, d, h, losses, targets, scale, hidden);
}

KERNEL TYPED(loss_linear_correct_bf16)(const bf16* weight, float* d, act* h, const float* losses, const u32* targets, float scale,
                                       u64 hidden) {
    correct(weight, d, h, losses, targets, scale, hidden);
}

// columns[t, i] = d[t, ids[i]]
KERNEL TYPED(loss_linear_pick)(const act* d, const u32* ids, act* columns, u64 tokens, u64 features, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < tokens * count) columns[i] = d[i / count * features + ids[i % count]];
}
