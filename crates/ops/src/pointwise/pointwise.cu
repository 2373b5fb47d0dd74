// f(x) and f'(x) dy, a thread a number. The function: 0 GELU by erf, 1 GELU by tanh, 2 x sigmoid(1.702 x), 3 SiLU, 4 ReLU, 5 its square,
// 6 tanh.
#include "dev.cuh"

struct Both {
    float value, slope;
};

// x sigmoid(factor x)
static __device__ inline Both swish(float x, float factor) {
    float s = 1.0f / (1.0f + expf(-factor * x));
    return {x * s, s * (1.0f + factor * x * (1.0f - s))};
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

static __device__ inline Both both(i32 function, float x) {
    switch (function) {
        case 0: return gelu(x);
        case 1: return gelu_tanh(x);
        case 2: return swish(x, 1.702f);
        case 3: return swish(x, 1.0f);
        case 4: return {x > 0.0f ? x : 0.0f, x > 0.0f ? 1.0f : 0.0f};
        case 5: return x > 0.0f ? Both{x * x, 2.0f * x} : Both{0.0f, 0.0f};
        default: {
            float t = tanhf(x);
            return {t, 1.0f - t * t};
        }
    }
}

KERNEL TYPED(pointwise_forward)(const act* x, act* out, i32 function, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) store(out + i, both(function, widen(x[i])).value);
}

KERNEL TYPED(pointwise_backward)(act* x, const act* d_out, i32 function, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) store(x + i, widen(d_out[i]) * both(function, widen(x[i])).slope);
}
