// Lion's update, a thread a value.
#include "dev.cuh"

KERNEL lion_update(float* values, const float* grads, float* momentum, const float* found, float factor, float keep, float rate, float beta1, float rest1,
                   float beta2, float rest2, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    factor = factor_of(found, factor);
    if (i >= count || factor != factor) return;
    float grad = grads[i] * factor, m = momentum[i];
    float direction = beta1 * m + rest1 * grad;
    float sign = float(direction > 0.0f) - float(direction < 0.0f);
    values[i] = values[i] * keep - rate * sign;
    momentum[i] = beta2 * m + rest2 * grad;
}
