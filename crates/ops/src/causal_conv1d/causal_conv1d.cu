// A causal depthwise convolution over the tokens of each sequence. A thread has a number of [tokens, channels].
#include "dev.cuh"

static __device__ inline float convolved(const act* x, const float* weight, const float* bias, const u32* positions, u64 token, u64 channel, u64 channels,
                                         u32 kernel) {
    float z = bias ? bias[channel] : 0.0f;
    for (u32 tap = 0; tap < kernel && tap <= positions[token]; tap++)
        z += weight[channel * kernel + kernel - 1 - tap] * widen(x[(token - tap) * channels + channel]);
    return z;
}

KERNEL TYPED(causal_conv1d_forward)(const act* x, const float* weight, const float* bias, const u32* positions, act* out, u64 tokens, u64 channels,
                                    u32 kernel, i32 silu) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= tokens * channels) return;
    float z = convolved(x, weight, bias, positions, i / channels, i % channels, channels, kernel);
    store(out + i, silu ? z / (1.0f + expf(-z)) : z);
}

// dz = dy silu'(z), in its place
KERNEL TYPED(causal_conv1d_silu)(const act* x, const float* weight, const float* bias, const u32* positions, act* dz, u64 tokens, u64 channels,
                                 u32 kernel) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= tokens * channels) return;
    float z = convolved(x, weight, bias, positions, i / channels, i % channels, channels, kernel);
    float s = 1.0f / (1.0f + expf(-z));
    store(dz + i, widen(dz[i]) * (s * (1.0f + z * (1.0f - s))));
}

// dx[t, c] = sum_j weight[c, kernel - 1 - j] dz[t + j, c] over the tokens t + j of its sequence
KERNEL TYPED(causal_conv1d_input)(const act* dz, const float* weight, const u32* positions, act* dx, u64 tokens, u64 channels, u32 kernel) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= tokens * channels) return;
    u64 token = i / channels, channel = i % channels;
    float sum = 0.0f;
    for (u32 tap = 0; tap < kernel && token + tap < tokens && tap <= positions[token + tap]; tap++)
        sum += weight[channel * kernel + kernel - 1 - tap] * widen(dz[(token + tap) * channels + channel]);
    store(dx + i, sum);
}

// d_weight[c, kernel - 1 - j] += sum_t dz[t, c] x[t - j, c]; a block has 32 channels and one tap
KERNEL TYPED(causal_conv1d_weight)(const act* x, const act* dz, const u32* positions, float* d_weight, u64 tokens, u64 channels, u32 kernel) {
    u64 channel = u64(blockIdx.x) * WARP + threadIdx.x % WARP;
    u32 tap = blockIdx.y;
    float sum = 0.0f;
    if (channel < channels)
        for (u64 t = threadIdx.x / WARP; t < tokens; t += blockDim.x / WARP)
            if (tap <= positions[t]) sum += widen(dz[t * channels + channel]) * widen(x[(t - tap) * channels + channel]);
    sum = column_sum(sum);
    if (threadIdx.x < WARP && channel < channels) d_weight[channel * kernel + kernel - 1 - tap] += sum;
}
