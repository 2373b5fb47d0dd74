// Rows of a table for tokens, and their gradients back.
#include "dev.cuh"

// out[t, j] = scale table[tokens[t], j]
template <class T>
static __device__ inline void embed(const T* table, const u32* tokens, act* out, float scale, u64 count, u64 features) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count * features) store(out + i, scale * widen(table[u64(tokens[i / features]) * features + i % features]));
}

KERNEL TYPED(embedding_f32)(const float* table, const u32* tokens, act* out, float scale, u64 count, u64 features) {
    embed(table, tokens, out, scale, count, features);
}

KERNEL TYPED(embedding_bf16)(const bf16* table, const u32* tokens, act* out, float scale, u64 count, u64 features) {
    embed(table, tokens, out, scale, count, features);
}

// Block b adds the gradients of the tokens at places[starts[b]..starts[b + 1]], which are all ids[b], in that order:
// d_table[ids[b], j] += scale dx[place, j]
KERNEL TYPED(embedding_backward)(const act* dx, const u32* ids, const u32* starts, const u32* places, float scale, float* d_table,
                          u64 features) {
    u64 id = ids[blockIdx.x];
    u32 start = starts[blockIdx.x], end = starts[blockIdx.x + 1];
    for (u64 j = threadIdx.x; j < features; j += blockDim.x) {
        float sum = d_table[id * features + j];
        for (u32 at = start; at < end; at++) sum += scale * widen(dx[u64(places[at]) * features + j]);
        d_table[id * features + j] = sum;
    }
}
