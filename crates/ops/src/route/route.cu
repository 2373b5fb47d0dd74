// The gate of an expert that every token goes through. A thread has a token.
#include "dev.cuh"

// gates[t] = sigmoid(logits[t])
KERNEL TYPED(route_gates)(const act* logits, float* gates, u64 tokens) {
    u64 t = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (t < tokens) gates[t] = 1.0f / (1.0f + expf(-widen(logits[t])));
}

// The gradient of the logits; the gradient of a gate is sums[t] / gates[t].
KERNEL TYPED(route_gates_backward)(const float* gates, const float* sums, act* d_logits, u64 tokens) {
    u64 t = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (t >= tokens) return;
    float gate = gates[t];
    store(d_logits + t, gate == 0.0f ? 0.0f : sums[t] / gate * gate * (1.0f - gate));
}
