// AdamW's update, a thread a value.
#include "dev.cuh"

KERNEL adamw_update(float* values, const float* grads, float* m, float* v, const float* found, float factor, float beta1, float rest1, float beta2,
                    float rest2, float epsilon, float keep, float pace, float root, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    factor = factor_of(found, factor);
    if (i >= count || factor != factor) return;
    float grad = grads[i] * factor;
    float first = flush_denormal(beta1 * m[i] + rest1 * grad);
    float second = flush_denormal(beta2 * v[i] + rest2 * grad * grad);
    m[i] = first;
    v[i] = second;
    values[i] = values[i] * keep - pace * (first / (sqrtf(second) / root + epsilon));
}
