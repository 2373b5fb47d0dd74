// Keys and values of multi-head latent attention and their gradients: a thread a feature of a token's heads.
#include "dev.cuh"

// k[t, h] = [kv[t, h, ..nope], k_rot[t]], v[t, h] = kv[t, h, nope..]
KERNEL TYPED(latent_heads_forward)(const act* kv, const act* k_rot, act* k, act* v, u64 tokens, u64 heads, u64 nope, u64 rope, u64 value) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x, width = nope + rope + value;
    if (i >= tokens * heads * width) return;
    u64 feature = i % width, row = i / width;
    if (feature < nope) k[row * (nope + rope) + feature] = kv[row * (nope + value) + feature];
    else if (feature < nope + rope) k[row * (nope + rope) + feature] = k_rot[row / heads * rope + feature - nope];
    else v[row * value + feature - nope - rope] = kv[row * (nope + value) + feature - rope];
}

// d_kv[t, h] = [dk[t, h, ..nope], dv[t, h]]
KERNEL TYPED(latent_heads_backward)(const act* dk, const act* dv, act* d_kv, u64 rows, u64 nope, u64 rope, u64 value) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x, width = nope + value;
    if (i >= rows * width) return;
    u64 feature = i % width, row = i / width;
    d_kv[i] = feature < nope ? dk[row * (nope + rope) + feature] : dv[row * value + feature - nope];
}

// d_k_rot[t] = sum over h of dk[t, h, nope..], in the order of the heads
KERNEL TYPED(latent_heads_sum)(const act* dk, act* d_k_rot, u64 tokens, u64 heads, u64 nope, u64 rope) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= tokens * rope) return;
    u64 feature = i % rope, token = i / rope;
    float sum = 0.0f;
    for (u64 head = 0; head < heads; head++) sum += widen(dk[(token * heads + head) * (nope + rope) + nope + feature]);
    store(d_k_rot + i, sum);
}
