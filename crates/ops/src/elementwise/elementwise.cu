// Sums of activations, number by number, and with a bias. Numbers that are multiplied by 0 are not read.
#include "dev.cuh"

// x[i] = factor x[i] + addend; a thread has a pack
KERNEL TYPED(elementwise_map)(act* x, float factor, float addend, u64 count) {
    u64 i = (u64(blockIdx.x) * blockDim.x + threadIdx.x) * Pack<act>::COUNT;
    if (i >= count) return;
    float values[Pack<act>::COUNT] = {};
    if (factor != 0.0f) load_pack(values, x, i, count);
    UNROLL for (u32 e = 0; e < Pack<act>::COUNT; e++) values[e] = factor * values[e] + addend;
    store_pack(x, i, count, values);
}

// y[i] = a x[i] + b y[i], each product rounded as on the CPU; a thread has a pack
KERNEL TYPED(elementwise_zip)(act* y, const act* x, float a, float b, u64 count) {
    u64 i = (u64(blockIdx.x) * blockDim.x + threadIdx.x) * Pack<act>::COUNT;
    if (i >= count) return;
    float xs[Pack<act>::COUNT], ys[Pack<act>::COUNT] = {};
    load_pack(xs, x, i, count);
    if (b != 0.0f) load_pack(ys, y, i, count);
    UNROLL for (u32 e = 0; e < Pack<act>::COUNT; e++) {
        float ax = __fmul_rn(a, xs[e]);
        ys[e] = b == 0.0f ? ax : __fadd_rn(ax, __fmul_rn(b, ys[e]));
    }
    store_pack(y, i, count, ys);
}

// y[t, j] += bias[j]; a thread has a pack
KERNEL TYPED(elementwise_add_bias)(act* y, const float* bias, u64 tokens, u64 features) {
    u64 i = (u64(blockIdx.x) * blockDim.x + threadIdx.x) * Pack<act>::COUNT, count = tokens * features;
    if (i >= count) return;
    float values[Pack<act>::COUNT];
    load_pack(values, y, i, count);
    u64 j = i % features;
    UNROLL for (u32 e = 0; e < Pack<act>::COUNT; e++) {
        values[e] += bias[j];
        if (++j == features) j = 0;
    }
    store_pack(y, i, count, values);
}

// sums[j] += sum_t dy[t, j]; a block has 32 features, 8 threads each
KERNEL TYPED(elementwise_sum_tokens)(const act* dy, float* sums, u64 tokens, u64 features) {
    u64 feature = u64(blockIdx.x) * WARP + threadIdx.x % WARP;
    float sum = 0.0f;
    if (feature < features)
        for (u64 t = threadIdx.x / WARP; t < tokens; t += blockDim.x / WARP) sum += widen(dy[t * features + feature]);
    sum = column_sum(sum);
    if (threadIdx.x < WARP && feature < features) sums[feature] += sum;
}
