// The turn of rotary embeddings: a thread a pair.
#include "dev.cuh"

// Pair i of head h of token t has the features `offset + i step` and `apart` beyond; sign -1 turns backwards
KERNEL rope_turn(float* x, const float* cos, const float* sin, u64 tokens, u64 heads, u64 head_dim, u64 offset, u64 pairs, u64 step,
                 u64 apart, float sign) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= tokens * heads * pairs) return;
    u64 pair = i % pairs, head = i / pairs % heads, t = i / pairs / heads;
    float* first = x + (t * heads + head) * head_dim + offset + pair * step;
    float a = first[0], b = first[apart], c = cos[t * pairs + pair], s = sign * sin[t * pairs + pair];
    first[0] = a * c - b * s;
    first[apart] = b * c + a * s;
}
