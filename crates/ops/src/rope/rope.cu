// The turn of rotary embeddings: a thread a pair.
#include "dev.cuh"

// Pair i of head h of token t has the features `offset + i step` and `apart` beyond; sign -1 turns backwards
KERNEL TYPED(rope_turn)(act* x, const float* cos, const float* sin, u64 tokens, u64 heads, u64 head_dim, u64 offset, u64 pairs, u64 step,
                 u64 apart, float sign) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= tokens * heads * pairs) return;
    u64 pair = i % pairs, head = i / pairs % heads, t = i / pairs / heads;
    act* first = x + (t * heads + head) * head_dim + offset + pair * step;
    float a = widen(first[0]), b = widen(first[apart]), c = cos[t * pairs + pair], s = sign * sin[t * pairs + pair];
    store(first, a * c - b * s);
    store(first + apart, b * c + a * s);
}
