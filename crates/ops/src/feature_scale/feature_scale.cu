// A factor for each feature.
#include "dev.cuh"

// out[t, j] = gain[j] v[t, j], added to what is there if `add`
KERNEL TYPED(feature_scale_times)(const act* v, const float* gain, act* out, i32 add, u64 tokens, u64 features) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= tokens * features) return;
    float value = gain[i % features] * widen(v[i]);
    store(out + i, add ? widen(out[i]) + value : value);
}

// d_magnitude[j] += sum_t dy[t, j] v[t, j] / norm[j]; a block has 32 features
KERNEL TYPED(feature_scale_backward)(const act* dy, const act* v, const float* norm, float* d_magnitude, u64 tokens, u64 features) {
    u64 feature = u64(blockIdx.x) * WARP + threadIdx.x % WARP;
    float sum = 0.0f;
    if (feature < features)
        for (u64 t = threadIdx.x / WARP; t < tokens; t += blockDim.x / WARP)
            sum += widen(dy[t * features + feature]) * widen(v[t * features + feature]);
    sum = column_sum(sum);
    if (threadIdx.x < WARP && feature < features) d_magnitude[feature] += sum / norm[feature];
}
