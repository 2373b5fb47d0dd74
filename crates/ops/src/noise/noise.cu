// NEFTune's noise: a function of the key, the row and the feature.
#include "dev.cuh"

// x[t, j] += bounds[t] u, u in -1..1 with 24 bits; rounded as on the CPU, product first
KERNEL TYPED(noise_add)(act* x, const float* bounds, u64 key, u64 first_row, u64 tokens, u64 features) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= tokens * features) return;
    u64 t = i / features;
    u64 bits = mix(mix(key + (first_row + t)) + i % features) >> 40;
    float u = float(bits) / 8388608.0f - 1.0f;
    store(x + i, __fadd_rn(widen(x[i]), __fmul_rn(bounds[t], u)));
}
