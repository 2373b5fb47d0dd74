// act(gate) up and its gradients, a thread a number. The act is SiLU, or GELU by tanh.
#include "dev.cuh"

struct Both {
    float value, slope;
};

static __device__ inline Both silu(float x) {
    float s = 1.0f / (1.0f + expf(-x));
    return {x * s, s * (1.0f + x * (1.0f - s))};
}

static __device__ inline Both gelu_tanh(float x) {
    const float root = 0.7978845608028654f, cube = 0.044715f;
    float square = x * x;
    float t = tanhf(root * (square * x * cube + x));
    float half = 0.5f * (1.0f + t);
    float inner = root * (3.0f * cube * square + 1.0f);
    return {x * half, half + 0.5f * x * ((1.0f - t * t) * inner)};
}

static __device__ inline Both act(i32 gelu, float x) { return gelu ? gelu_tanh(x) : silu(x); }

KERNEL gated_mlp_forward(const float* gate, const float* up, float* out, i32 gelu, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) out[i] = act(gelu, gate[i]).value * up[i];
}

KERNEL gated_mlp_backward(float* gate, float* up, const float* d_out, i32 gelu, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    Both both = act(gelu, gate[i]);
    gate[i] = d_out[i] * up[i] * both.slope;
    up[i] = d_out[i] * both.value;
}
