// Copies between rows of activations, row-major [tokens, features]. A thread has one number.
#include "dev.cuh"

// out[i, j] = x[rows[i], j]
KERNEL TYPED(activation_gather)(const act* x, const u32* rows, act* out, u64 count, u64 features) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count * features) return;
    out[i] = x[u64(rows[i / features]) * features + i % features];
}

// out[rows[i], j] = x[i, j]; no row comes twice
KERNEL TYPED(activation_scatter)(const act* x, const u32* rows, act* out, u64 count, u64 features) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count * features) return;
    out[u64(rows[i / features]) * features + i % features] = x[i];
}

// out[rows[i], j] += factors[i] x[i, j]; no row comes twice. Without factors each is 1.
KERNEL TYPED(activation_scatter_add)(const act* x, const u32* rows, const float* factors, act* out, u64 count, u64 features) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count * features) return;
    float factor = factors ? factors[i / features] : 1.0f;
    act* place = out + u64(rows[i / features]) * features + i % features;
    store(place, widen(*place) + factor * widen(x[i]));
}

// to[t, to_first + j] = from[t, from_first + j] for j below width
KERNEL TYPED(activation_columns)(const act* from, u64 from_features, u64 from_first, act* to, u64 to_features, u64 to_first,
                                 u64 tokens, u64 width) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= tokens * width) return;
    to[i / width * to_features + to_first + i % width] = from[i / width * from_features + from_first + i % width];
}

// x[t, j] *= factors[t]
KERNEL TYPED(activation_times)(act* x, const float* factors, u64 tokens, u64 features) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < tokens * features) store(x + i, widen(x[i]) * factors[i / features]);
}

// out[t] = sum_j x[t, j] y[t, j]; a block a token
KERNEL TYPED(activation_dot)(const act* x, const act* y, float* out, u64 features) {
    u64 row = u64(blockIdx.x) * features;
    float sum = 0.0f;
    for (u64 j = threadIdx.x; j < features; j += blockDim.x) sum += widen(x[row + j]) * widen(y[row + j]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

template <class T> static __device__ inline void convert(const T* from, act* to, u64 from_first, u64 to_first, u64 count) {
    // A thread has a pack of the wider type.
    const u32 N = sizeof(T) > sizeof(act) ? u32(Pack<T>::COUNT) : u32(Pack<act>::COUNT);
    u64 i = (u64(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    if (i >= count) return;
    from += from_first + i;
    to += to_first + i;
    if (i + N <= count && (reinterpret_cast<u64>(from) % (N * sizeof(T)) | reinterpret_cast<u64>(to) % (N * sizeof(act))) == 0) {
        struct alignas(N * sizeof(T)) From {
            T at[N];
        } read = *reinterpret_cast<const From*>(from);
        struct alignas(N * sizeof(act)) To {
            act at[N];
        } write;
        UNROLL for (u32 e = 0; e < N; e++) store(write.at + e, widen(read.at[e]));
        *reinterpret_cast<To*>(to) = write;
    } else {
        for (u32 e = 0; e < N && i + e < count; e++) store(to + e, widen(from[e]));
    }
}

// to[to_first + i] = from[from_first + i], rounded where `act` has fewer bits
KERNEL TYPED(activation_from_float)(const float* from, act* to, u64 from_first, u64 to_first, u64 count) {
    convert(from, to, from_first, to_first, count);
}

KERNEL TYPED(activation_from_f16)(const f16* from, act* to, u64 from_first, u64 to_first, u64 count) {
    convert(from, to, from_first, to_first, count);
}

KERNEL TYPED(activation_from_bf16)(const bf16* from, act* to, u64 from_first, u64 to_first, u64 count) {
    convert(from, to, from_first, to_first, count);
}
