// AdamW's update with moments of a byte, rounded as bitsandbytes' kernel rounds: a block of threads is a block of moments.
#include "dev.cuh"

struct Step {
    float factor, beta1, rest1, beta2, rest2, epsilon, keep, pace, root;
};

// a b + c, rounded once
static __device__ inline float fused(float a, float b, float c) { return float(__dadd_rn(__dmul_rn(double(a), double(b)), double(c))); }

static __device__ inline void moments(const Step& step, float grad, float& m, float& v) {
    m = flush_denormal(fused(grad, step.rest1, __fmul_rn(m, step.beta1)));
    v = flush_denormal(fused(__fmul_rn(step.rest2, grad), grad, __fmul_rn(v, step.beta2)));
}

static __device__ inline float moved(const Step& step, float value, float m, float v) {
    float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), step.root), step.epsilon);
    return __fsub_rn(__fmul_rn(value, step.keep), __fmul_rn(step.pace, __fdiv_rn(m, denominator)));
}

// The number of bounds below the value: its code.
static __device__ inline u8 code(const float* bounds, float value) {
    u32 low = 0, high = 255;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (bounds[middle] < value) low = middle + 1;
        else high = middle;
    }
    return u8(low);
}

static __device__ inline float within(float value) { return value < -1.0f ? -1.0f : (value > 1.0f ? 1.0f : value); }

// maps: the values of the first map (256) and its bounds (255), then those of the second
KERNEL adamw_8bit_update(float* values, const float* grads, u8* codes1, u8* codes2, float* absmax1, float* absmax2, const float* maps,
                         const float* found, float factor, float beta1, float rest1, float beta2, float rest2, float epsilon, float keep,
                         float pace, float root, u64 count) {
    factor = factor_of(found, factor);
    if (factor != factor) return;
    Step step = {factor, beta1, rest1, beta2, rest2, epsilon, keep, pace, root};
    u64 i = u64(blockIdx.x) * 256 + threadIdx.x;
    bool there = i < count;
    float m = 0.0f, v = 0.0f;
    if (there) {
        m = __fmul_rn(maps[codes1[i]], absmax1[blockIdx.x]);
        v = __fmul_rn(maps[511 + codes2[i]], absmax2[blockIdx.x]);
        moments(step, __fmul_rn(grads[i], factor), m, v);
        values[i] = moved(step, values[i], m, v);
    }
    float most1 = block_max(fabsf(m)), most2 = block_max(fabsf(v));
    if (there) {
        codes1[i] = code(maps + 256, within(__fmul_rn(m, __fdiv_rn(1.0f, fmaxf(most1, 1e-38f)))));
        codes2[i] = code(maps + 767, within(__fmul_rn(v, __fdiv_rn(1.0f, fmaxf(most2, 1e-38f)))));
    }
    if (threadIdx.x == 0) {
        absmax1[blockIdx.x] = most1;
        absmax2[blockIdx.x] = most2;
    }
}

KERNEL adamw_8bit_small(float* values, const float* grads, float* exp_avg, float* exp_avg_sq, const float* found, float factor,
                        float beta1, float rest1, float beta2, float rest2, float epsilon, float keep, float pace, float root, u64 count) {
    factor = factor_of(found, factor);
    if (factor != factor) return;
    Step step = {factor, beta1, rest1, beta2, rest2, epsilon, keep, pace, root};
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float m = exp_avg[i], v = exp_avg_sq[i];
    moments(step, __fmul_rn(grads[i], factor), m, v);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    values[i] = moved(step, values[i], m, v);
}
