// What the gated delta rule adds to `recurrence.cu`. `normed` has q-hat and k-hat, [tokens][q, k][key heads][key_dim]; `gates` beta, g,
// d(log beta)/db and dg/da, [tokens][value heads][4].
#include "dev.cuh"

#define NORM_EPS 1e-6f

struct Heads {
    u32 key, value, key_dim, value_dim;
};

static __device__ inline u64 features(const Heads& heads) { return 2ull * heads.key * heads.key_dim + u64(heads.value) * heads.value_dim; }

// normed = x / sqrt(sum x^2 + eps), of q over sqrt(key_dim) too; a block a token, q or k, and head
KERNEL TYPED(gated_delta_rule_norm)(const act* qkv, float* normed, u32 key, u32 value, u32 key_dim, u32 value_dim) {
    Heads heads = {key, value, key_dim, value_dim};
    u64 token = blockIdx.x / (2 * key);
    const act* x = qkv + token * features(heads) + u64(blockIdx.x % (2 * key)) * key_dim;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < key_dim; i += blockDim.x) sum += widen(x[i]) * widen(x[i]);
    float root = 1.0f / sqrtf(block_sum(sum) + NORM_EPS);
    if (blockIdx.x % (2 * key) < key) root /= sqrtf(float(key_dim));
    for (u32 i = threadIdx.x; i < key_dim; i += blockDim.x) normed[u64(blockIdx.x) * key_dim + i] = widen(x[i]) * root;
}

// A thread a token and value head. As in PyTorch, softplus is the identity beyond 20.
KERNEL TYPED(gated_delta_rule_gates)(const act* b, const act* a, const float* a_log, const float* dt_bias, float beta_max, float* gates, u64 count,
                                     u32 value) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float rate = -expf(a_log[i % value]), x = widen(a[i]) + dt_bias[i % value];
    float softplus = x > 20.0f ? x : log1pf(expf(x)), slope = x > 20.0f ? 1.0f : 1.0f / (1.0f + expf(-x));
    float share = 1.0f / (1.0f + expf(-widen(b[i])));
    gates[4 * i] = beta_max * share;
    gates[4 * i + 1] = rate * softplus;
    gates[4 * i + 2] = 1.0f - share;
    gates[4 * i + 3] = rate * slope;
}

// From the gradients of q-hat and k-hat of a key head's value heads and slices to those of q and k; a block a token, q or k, and head
KERNEL TYPED(gated_delta_rule_norm_backward)(const act* qkv, const float* d_keys, act* d_qkv, u32 slices, u32 key, u32 value, u32 key_dim,
                                             u32 value_dim) {
    DYNAMIC_SHARED(float, d);
    Heads heads = {key, value, key_dim, value_dim};
    u64 token = blockIdx.x / (2 * key);
    u32 which = blockIdx.x % (2 * key) / key, head = blockIdx.x % key, parts = value / key * slices;
    const act* x = qkv + token * features(heads) + u64(blockIdx.x % (2 * key)) * key_dim;
    const float* from = d_keys + ((token * value * slices + head * parts) * 2 + which) * key_dim;
    float scale = which == 0 ? 1.0f / sqrtf(float(key_dim)) : 1.0f, squares = 0.0f, dot = 0.0f;
    for (u32 i = threadIdx.x; i < key_dim; i += blockDim.x) {
        float sum = 0.0f;
        for (u32 part = 0; part < parts; part++) sum += from[u64(part) * 2 * key_dim + i];
        d[i] = sum * scale;
        squares += widen(x[i]) * widen(x[i]);
        dot += widen(x[i]) * d[i];
    }
    float root = 1.0f / sqrtf(block_sum(squares) + NORM_EPS);
    dot = block_sum(dot) * root * root;
    for (u32 i = threadIdx.x; i < key_dim; i += blockDim.x)
        store(d_qkv + token * features(heads) + u64(blockIdx.x % (2 * key)) * key_dim + i, root * (d[i] - widen(x[i]) * dot));
}

// From the gradients of beta's logarithm and of g to those of b, a and A_log; a thread a token and value head
KERNEL TYPED(gated_delta_rule_gates_backward)(const float* gates, const float* d_gates, act* d_b, act* d_a, float* d_rate, u64 count, u32 slices) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float d_beta = 0.0f, d_g = 0.0f;
    for (u32 slice = 0; slice < slices; slice++) {
        d_beta += d_gates[(i * slices + slice) * 3];
        d_g += d_gates[(i * slices + slice) * 3 + 1];
    }
    store(d_b + i, d_beta * gates[4 * i + 2]);
    store(d_a + i, d_g * gates[4 * i + 3]);
    d_rate[i] = d_g * gates[4 * i + 1];
}
