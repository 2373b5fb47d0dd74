// The gated delta rule. Columns of a state do not depend on each other: a block has SLICE of them, a thread a column. `normed` has
// q-hat and k-hat, [tokens][q, k][key heads][key_dim]; `gates` beta, exp(g), g and dg/da, [tokens][value heads][4].
#include "dev.cuh"

#define SLICE 64u
// Tokens between two states that backward keeps.
#define CHUNK 64u
#define NORM_EPS 1e-6f

struct Heads {
    u32 key, value, key_dim, value_dim;
};

static __device__ inline u64 features(const Heads& heads) { return 2ull * heads.key * heads.key_dim + u64(heads.value) * heads.value_dim; }

// normed = x / sqrt(sum x^2 + eps), of q over sqrt(key_dim) too; a block a token, q or k, and head
KERNEL TYPED(gated_delta_rule_norm)(const act* qkv, float* normed, u32 key, u32 value, u32 key_dim, u32 value_dim) {
    Heads heads = {key, value, key_dim, value_dim};
    u64 token = blockIdx.x / (2 * key);
    const act* x = qkv + token * features(heads) + u64(blockIdx.x % (2 * key)) * key_dim;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < key_dim; i += blockDim.x) sum += widen(x[i]) * widen(x[i]);
    float root = 1.0f / sqrtf(block_sum(sum) + NORM_EPS);
    if (blockIdx.x % (2 * key) < key) root /= sqrtf(float(key_dim));
    for (u32 i = threadIdx.x; i < key_dim; i += blockDim.x) normed[u64(blockIdx.x) * key_dim + i] = widen(x[i]) * root;
}

// A thread a token and value head. As in PyTorch, softplus is the identity beyond 20.
KERNEL TYPED(gated_delta_rule_gates)(const act* b, const act* a, const float* a_log, const float* dt_bias, float beta_max, float* gates, u64 count,
                                     u32 value) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float rate = -expf(a_log[i % value]), x = widen(a[i]) + dt_bias[i % value];
    float softplus = x > 20.0f ? x : log1pf(expf(x)), slope = x > 20.0f ? 1.0f : 1.0f / (1.0f + expf(-x));
    gates[4 * i] = beta_max / (1.0f + expf(-widen(b[i])));
    gates[4 * i + 1] = expf(rate * softplus);
    gates[4 * i + 2] = rate * softplus;
    gates[4 * i + 3] = rate * slope;
}

// One token of a column: reads its state at `from`, writes it at `to`, both with `step` from row to row; returns the output.
static __device__ inline float advance(const float* from, u64 from_step, float* to, u64 to_step, const float* q, const float* k, float v, float beta, float decay,
                                       u32 key_dim) {
    float found = 0.0f, out = 0.0f;
    for (u32 i = 0; i < key_dim; i++) found += k[i] * from[i * from_step];
    float u = beta * (v - decay * found);
    for (u32 i = 0; i < key_dim; i++) {
        float state = decay * from[i * from_step] + k[i] * u;
        to[i * to_step] = state;
        out += q[i] * state;
    }
    return out;
}

// q-hat and k-hat of a token and key head into shared memory, q first.
static __device__ inline void load_keys(float* keys, const float* normed, u64 token, u32 head, const Heads& heads) {
    __syncthreads();
    const float* row = normed + token * 2 * heads.key * heads.key_dim;
    for (u32 i = threadIdx.x; i < heads.key_dim; i += blockDim.x) {
        keys[i] = row[head * heads.key_dim + i];
        keys[heads.key_dim + i] = row[(heads.key + head) * heads.key_dim + i];
    }
    __syncthreads();
}

// A block a value head, sequence and slice. `states` has where each sequence's states are, [value heads][key_dim][value_dim], or 0.
KERNEL TYPED(gated_delta_rule_forward)(const act* qkv, const float* normed, const float* gates, const u32* ends, const u64* states, act* out, u32 key, u32 value,
                                       u32 key_dim, u32 value_dim) {
    DYNAMIC_SHARED(float, state);
    Heads heads = {key, value, key_dim, value_dim};
    float* keys = state + key_dim * SLICE;
    u32 head = blockIdx.x, j = blockIdx.z * SLICE + threadIdx.x;
    bool inside = j < value_dim;
    float* kept = states && inside ? reinterpret_cast<float*>(states[blockIdx.y]) + u64(head) * key_dim * value_dim + j : nullptr;
    for (u32 i = 0; i < key_dim; i++) state[i * SLICE + threadIdx.x] = kept ? kept[u64(i) * value_dim] : 0.0f;
    for (u64 token = ends[blockIdx.y]; token < ends[blockIdx.y + 1]; token++) {
        load_keys(keys, normed, token, head / (value / key), heads);
        const float* gate = gates + (token * value + head) * 4;
        u64 column = u64(head) * value_dim + j;
        float v = inside ? widen(qkv[token * features(heads) + 2ull * key * key_dim + column]) : 0.0f;
        float* own = state + threadIdx.x;
        float o = advance(own, SLICE, own, SLICE, keys, keys + key_dim, v, gate[0], gate[1], key_dim);
        if (inside) store(out + token * value * value_dim + column, o);
    }
    for (u32 i = 0; kept && i < key_dim; i++) kept[u64(i) * value_dim] = state[i * SLICE + threadIdx.x];
}

// A block a value head and slice, and every gridDim.y-th sequence. `checkpoints` gets the states before tokens whose number CHUNK
// divides, [tokens / CHUNK][value heads][slices][key_dim][SLICE]; `history` those of a chunk, [blocks][CHUNK + 1][key_dim][SLICE].
// Of each token, value head and slice, `d_keys` gets the gradients of q-hat and k-hat, [2][key_dim], and `d_gates` those of beta and g.
KERNEL TYPED(gated_delta_rule_backward)(const act* qkv, const float* normed, const float* gates, const u32* ends, u32 sequences, const act* dy, act* d_qkv,
                                        float* checkpoints, float* history, float* d_keys, float* d_gates, u32 key, u32 value, u32 key_dim,
                                        u32 value_dim) {
    DYNAMIC_SHARED(float, d_state);
    Heads heads = {key, value, key_dim, value_dim};
    u32 head = blockIdx.x, j = blockIdx.z * SLICE + threadIdx.x, own = head * gridDim.z + blockIdx.z, all = value * gridDim.z;
    bool inside = j < value_dim;
    float *keys = d_state + key_dim * SLICE, *columns = keys + 2 * key_dim;
    u64 floats = u64(key_dim) * SLICE;
    history += (u64(blockIdx.y) * all + own) * (CHUNK + 1) * floats;
    u64 column = u64(head) * value_dim + j, v_at = 2ull * key * key_dim + column;
    for (u32 sequence = blockIdx.y; sequence < sequences; sequence += gridDim.y) {
        u64 start = ends[sequence], end = ends[sequence + 1];
        float* mine = d_state + threadIdx.x;
        for (u32 i = 0; i < key_dim; i++) mine[i * SLICE] = 0.0f;
        for (u64 token = start; token < end; token++) {
            if (token % CHUNK == 0 && token > start) {
                float* to = checkpoints + (token / CHUNK * all + own) * floats + threadIdx.x;
                for (u32 i = 0; i < key_dim; i++) to[i * SLICE] = mine[i * SLICE];
            }
            load_keys(keys, normed, token, head / (value / key), heads);
            const float* gate = gates + (token * value + head) * 4;
            float v = inside ? widen(qkv[token * features(heads) + v_at]) : 0.0f;
            advance(mine, SLICE, mine, SLICE, keys, keys + key_dim, v, gate[0], gate[1], key_dim);
        }
        for (u32 i = 0; i < key_dim; i++) mine[i * SLICE] = 0.0f;
        for (u64 chunk_end = end; chunk_end > start;) {
            u64 first = (chunk_end - 1) / CHUNK * CHUNK;
            bool from_zero = first <= start;
            if (from_zero) first = start;
            const float* kept = checkpoints + (first / CHUNK * all + own) * floats + threadIdx.x;
            for (u32 i = 0; i < key_dim; i++) history[i * SLICE + threadIdx.x] = from_zero ? 0.0f : kept[i * SLICE];
            for (u64 token = first; token < chunk_end; token++) {
                load_keys(keys, normed, token, head / (value / key), heads);
                const float* gate = gates + (token * value + head) * 4;
                float v = inside ? widen(qkv[token * features(heads) + v_at]) : 0.0f;
                float* from = history + (token - first) * floats + threadIdx.x;
                advance(from, SLICE, from + floats, SLICE, keys, keys + key_dim, v, gate[0], gate[1], key_dim);
            }
            for (u64 token = chunk_end; token-- > first;) {
                load_keys(keys, normed, token, head / (value / key), heads);
                const float *before = history + (token - first) * floats, *behind = before + floats;
                const float *gate = gates + (token * value + head) * 4, *q = keys, *k = keys + key_dim;
                float beta = gate[0], decay = gate[1], found = 0.0f, du = 0.0f;
                float v = inside ? widen(qkv[token * features(heads) + v_at]) : 0.0f;
                float d_out = inside ? widen(dy[token * value * value_dim + column]) : 0.0f;
                for (u32 i = 0; i < key_dim; i++) {
                    found += k[i] * before[i * SLICE + threadIdx.x];
                    float d = mine[i * SLICE] + q[i] * d_out;
                    mine[i * SLICE] = d;
                    du += k[i] * d;
                }
                float missing = v - decay * found, c = beta * du;
                if (inside) store(d_qkv + token * features(heads) + v_at, c);
                columns[threadIdx.x] = d_out;
                columns[SLICE + threadIdx.x] = beta * missing;
                columns[2 * SLICE + threadIdx.x] = c;
                float d_beta = block_sum(du * missing);
                __syncthreads();
                // Rows: a warp sums over their columns.
                float* to = d_keys + (token * all + own) * 2 * key_dim;
                for (u32 i = threadIdx.x / WARP; i < key_dim; i += SLICE / WARP) {
                    float dq = 0.0f, dk = 0.0f;
                    for (u32 at = threadIdx.x % WARP; at < SLICE; at += WARP) {
                        dq += behind[i * SLICE + at] * columns[at];
                        dk += d_state[i * SLICE + at] * columns[SLICE + at] - decay * before[i * SLICE + at] * columns[2 * SLICE + at];
                    }
                    dq = warp_sum(dq);
                    dk = warp_sum(dk);
                    if (threadIdx.x % WARP == 0) {
                        to[i] = dq;
                        to[key_dim + i] = dk;
                    }
                }
                __syncthreads();
                float d_g = 0.0f;
                for (u32 i = 0; i < key_dim; i++) {
                    float stayed = decay * before[i * SLICE + threadIdx.x], d = mine[i * SLICE] - k[i] * c;
                    d_g += d * stayed;
                    mine[i * SLICE] = decay * d;
                }
                d_g = block_sum(d_g);
                if (threadIdx.x == 0) {
                    d_gates[(token * all + own) * 2] = d_beta;
                    d_gates[(token * all + own) * 2 + 1] = d_g;
                }
            }
            chunk_end = first;
        }
    }
}

// From the gradients of q-hat and k-hat of a key head's value heads and slices to those of q and k; a block a token, q or k, and head
KERNEL TYPED(gated_delta_rule_norm_backward)(const act* qkv, const float* d_keys, act* d_qkv, u32 slices, u32 key, u32 value, u32 key_dim,
                                             u32 value_dim) {
    DYNAMIC_SHARED(float, d);
    Heads heads = {key, value, key_dim, value_dim};
    u64 token = blockIdx.x / (2 * key);
    u32 which = blockIdx.x % (2 * key) / key, head = blockIdx.x % key, parts = value / key * slices;
    const act* x = qkv + token * features(heads) + u64(blockIdx.x % (2 * key)) * key_dim;
    const float* from = d_keys + ((token * value * slices + head * parts) * 2 + which) * key_dim;
    float scale = which == 0 ? 1.0f / sqrtf(float(key_dim)) : 1.0f, squares = 0.0f, dot = 0.0f;
    for (u32 i = threadIdx.x; i < key_dim; i += blockDim.x) {
        float sum = 0.0f;
        for (u32 part = 0; part < parts; part++) sum += from[u64(part) * 2 * key_dim + i];
        d[i] = sum * scale;
        squares += widen(x[i]) * widen(x[i]);
        dot += widen(x[i]) * d[i];
    }
    float root = 1.0f / sqrtf(block_sum(squares) + NORM_EPS);
    dot = block_sum(dot) * root * root;
    for (u32 i = threadIdx.x; i < key_dim; i += blockDim.x)
        store(d_qkv + token * features(heads) + u64(blockIdx.x % (2 * key)) * key_dim + i, root * (d[i] - widen(x[i]) * dot));
}

// From the gradients of beta and g to those of b, a and A_log; a thread a token and value head
KERNEL TYPED(gated_delta_rule_gates_backward)(const float* gates, const float* d_gates, float beta_max, act* d_b, act* d_a, float* d_rate, u64 count,
                                              u32 slices) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float d_beta = 0.0f, d_g = 0.0f, beta = gates[4 * i];
    for (u32 slice = 0; slice < slices; slice++) {
        d_beta += d_gates[(i * slices + slice) * 2];
        d_g += d_gates[(i * slices + slice) * 2 + 1];
    }
    store(d_b + i, d_beta * beta * (1.0f - beta / beta_max));
    store(d_a + i, d_g * gates[4 * i + 3]);
    d_rate[i] = d_g * gates[4 * i + 2];
}
