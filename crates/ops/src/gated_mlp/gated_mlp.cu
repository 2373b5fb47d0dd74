// act(gate) up and its gradients, a thread a pack. The act is SiLU (0), GELU by tanh (1), a sigmoid (2), none (3),
// that of gpt-oss (4): gate and up cut at a limit, and one added to up; or GELU by erf (5).
#include "dev.cuh"

struct Both {
    float value, slope;
};

static __device__ inline Both silu(float x) {
    float s = 1.0f / (1.0f + expf(-x));
    return {x * s, s * (1.0f + x * (1.0f - s))};
}

static __device__ inline Both gelu(float x) {
    float cdf = 0.5f * erfcf(-0.70710678f * x);
    return {x * cdf, cdf + x * 0.39894228f * expf(-0.5f * x * x)};
}

static __device__ inline Both gelu_tanh(float x) {
    const float root = 0.7978845608028654f, cube = 0.044715f;
    float square = x * x;
    float t = tanhf(root * (square * x * cube + x));
    float half = 0.5f * (1.0f + t);
    float inner = root * (3.0f * cube * square + 1.0f);
    return {x * half, half + 0.5f * x * ((1.0f - t * t) * inner)};
}

static __device__ inline Both sigmoid(float x) {
    float s = 1.0f / (1.0f + expf(-x));
    return {s, s * (1.0f - s)};
}

static __device__ inline Both clamped(float x, float alpha, float limit) {
    x = fminf(x, limit);
    float s = 1.0f / (1.0f + expf(-alpha * x));
    return {x * s, s * (1.0f + alpha * x * (1.0f - s))};
}

static __device__ inline Both activate(i32 gate, float x, float alpha, float limit) {
    switch (gate) {
    case 0: return silu(x);
    case 1: return gelu_tanh(x);
    case 2: return sigmoid(x);
    case 3: return {x, 1.0f};
    case 5: return gelu(x);
    default: return clamped(x, alpha, limit);
    }
}

// What multiplies the gate.
static __device__ inline float factor(i32 function, float up, float limit) { return function == 4 ? 1.0f + fminf(fmaxf(up, -limit), limit) : up; }

KERNEL TYPED(gated_mlp_forward)(const act* gate, const act* up, act* out, i32 function, float alpha, float limit, u64 count) {
    u64 i = (u64(blockIdx.x) * blockDim.x + threadIdx.x) * Pack<act>::COUNT;
    if (i >= count) return;
    float gates[Pack<act>::COUNT], ups[Pack<act>::COUNT];
    load_pack(gates, gate, i, count);
    load_pack(ups, up, i, count);
    UNROLL for (u32 e = 0; e < Pack<act>::COUNT; e++) ups[e] = activate(function, gates[e], alpha, limit).value * factor(function, ups[e], limit);
    store_pack(out, i, count, ups);
}

KERNEL TYPED(gated_mlp_backward)(act* gate, act* up, const act* d_out, i32 function, float alpha, float limit, u64 count) {
    u64 i = (u64(blockIdx.x) * blockDim.x + threadIdx.x) * Pack<act>::COUNT;
    if (i >= count) return;
    float gates[Pack<act>::COUNT], ups[Pack<act>::COUNT], slopes[Pack<act>::COUNT];
    load_pack(gates, gate, i, count);
    load_pack(ups, up, i, count);
    load_pack(slopes, d_out, i, count);
    UNROLL for (u32 e = 0; e < Pack<act>::COUNT; e++) {
        Both both = activate(function, gates[e], alpha, limit);
        bool cut = function == 4 && gates[e] > limit, up_cut = function == 4 && fabsf(ups[e]) > limit;
        gates[e] = cut ? 0.0f : slopes[e] * factor(function, ups[e], limit) * both.slope;
        ups[e] = up_cut ? 0.0f : slopes[e] * both.value;
    }
    store_pack(gate, i, count, gates);
    store_pack(up, i, count, ups);
}
