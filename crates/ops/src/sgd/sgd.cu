// Stochastic gradient descent, a thread a value. Without a momentum, `buffer` is null.
#include "dev.cuh"

KERNEL sgd_update(float* values, const float* grads, float* buffer, const float* found, float factor, float rate, float momentum, float fresh, float decay,
                  i32 nesterov, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    factor = factor_of(found, factor);
    if (i >= count || factor != factor) return;
    float grad = grads[i] * factor + decay * values[i];
    if (buffer) {
        float velocity = flush_denormal(momentum * buffer[i] + fresh * grad);
        buffer[i] = velocity;
        grad = nesterov ? grad + momentum * velocity : velocity;
    }
    values[i] -= rate * grad;
}
