// Dropout: the mask is a function of the key, the row and the feature.
#include "dev.cuh"

// out[t, j] = 0 where the mask drops it, else x[t, j] scale; token t is row first_row + rows[t] of the step, or first_row + t
KERNEL TYPED(dropout_apply)(const act* x, const u32* rows, act* out, u64 key, u64 first_row, u64 threshold, float scale, u64 tokens,
                            u64 features) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= tokens * features) return;
    u64 t = i / features;
    u64 row = mix(key + (first_row + (rows ? u64(rows[t]) : t)));
    store(out + i, (mix(row + i % features) >> 32) < threshold ? 0.0f : widen(x[i]) * scale);
}
