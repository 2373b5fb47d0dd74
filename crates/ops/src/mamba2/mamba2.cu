// Mamba 2's selective state space. Columns of a state do not depend on each other: a block has SLICE of them, a thread a column.
// `steps` has the time step t, exp(g), g and dt/d(raw), [tokens][heads][4].
#include "dev.cuh"

#define SLICE 64u
// Tokens between two states that backward keeps.
#define CHUNK 64u

struct Heads {
    u32 count, groups, dim, state;
};

static __device__ inline u64 features(const Heads& heads) { return u64(heads.count) * heads.dim + 2ull * heads.groups * heads.state; }

// A thread a token and head. As in PyTorch, softplus is the identity beyond 20, and what is cut has no gradient.
KERNEL TYPED(mamba2_steps)(const act* dt, const float* a_log, const float* dt_bias, float low, float high, float* steps, u64 count, u32 heads) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float rate = -expf(a_log[i % heads]), x = widen(dt[i]) + dt_bias[i % heads];
    float step = x > 20.0f ? x : log1pf(expf(x)), slope = x > 20.0f ? 1.0f : 1.0f / (1.0f + expf(-x));
    float cut = step < low ? low : step > high ? high : step;
    steps[4 * i] = cut;
    steps[4 * i + 1] = expf(rate * cut);
    steps[4 * i + 2] = rate * cut;
    steps[4 * i + 3] = step < low || step > high ? 0.0f : slope;
}

// One token of a column: reads its state at `from`, writes it at `to`, both with `step` from row to row; returns what C reads.
static __device__ inline float advance(const float* from, u64 from_step, float* to, u64 to_step, const float* b, const float* c, float u, float decay,
                                       u32 rows) {
    float out = 0.0f;
    for (u32 i = 0; i < rows; i++) {
        float state = decay * from[i * from_step] + b[i] * u;
        to[i * to_step] = state;
        out += c[i] * state;
    }
    return out;
}

// B and C of a token and group into shared memory, B first.
static __device__ inline void load_rows(float* rows, const act* xbc, u64 token, u32 group, const Heads& heads) {
    __syncthreads();
    const act* b = xbc + token * features(heads) + u64(heads.count) * heads.dim + u64(group) * heads.state;
    for (u32 i = threadIdx.x; i < heads.state; i += blockDim.x) {
        rows[i] = widen(b[i]);
        rows[heads.state + i] = widen(b[u64(heads.groups) * heads.state + i]);
    }
    __syncthreads();
}

// A block a head, sequence and slice. `states` has where each sequence's states are, [heads][state][dim], or 0.
KERNEL TYPED(mamba2_forward)(const act* xbc, const float* steps, const float* d, const u32* ends, const u64* states, act* out, u32 count, u32 groups,
                             u32 dim, u32 width) {
    DYNAMIC_SHARED(float, state);
    Heads heads = {count, groups, dim, width};
    float* rows = state + width * SLICE;
    u32 head = blockIdx.x, j = blockIdx.z * SLICE + threadIdx.x;
    bool inside = j < dim;
    float* kept = states && inside ? reinterpret_cast<float*>(states[blockIdx.y]) + u64(head) * width * dim + j : nullptr;
    for (u32 i = 0; i < width; i++) state[i * SLICE + threadIdx.x] = kept ? kept[u64(i) * dim] : 0.0f;
    for (u64 token = ends[blockIdx.y]; token < ends[blockIdx.y + 1]; token++) {
        load_rows(rows, xbc, token, head / (count / groups), heads);
        const float* step = steps + (token * count + head) * 4;
        u64 column = u64(head) * dim + j;
        float x = inside ? widen(xbc[token * features(heads) + column]) : 0.0f;
        float* own = state + threadIdx.x;
        float y = advance(own, SLICE, own, SLICE, rows, rows + width, step[0] * x, step[1], width) + d[head] * x;
        if (inside) store(out + token * count * dim + column, y);
    }
    for (u32 i = 0; kept && i < width; i++) kept[u64(i) * dim] = state[i * SLICE + threadIdx.x];
}

// A block a head and slice, and every gridDim.y-th sequence. `checkpoints` gets the states before tokens whose number CHUNK divides,
// [tokens / CHUNK][heads][slices][state][SLICE]; `history` those of a chunk, [blocks][CHUNK + 1][state][SLICE]. Of each token, head
// and slice, `d_rows` gets the gradients of B and C, [2][state], and `d_steps` those of t (without its decay), g and D.
KERNEL TYPED(mamba2_backward)(const act* xbc, const float* steps, const float* d, const u32* ends, u32 sequences, const act* dy, act* d_xbc,
                              float* checkpoints, float* history, float* d_rows, float* d_steps, u32 count, u32 groups, u32 dim, u32 width) {
    DYNAMIC_SHARED(float, d_state);
    Heads heads = {count, groups, dim, width};
    u32 head = blockIdx.x, j = blockIdx.z * SLICE + threadIdx.x, own = head * gridDim.z + blockIdx.z, all = count * gridDim.z;
    bool inside = j < dim;
    float *rows = d_state + width * SLICE, *columns = rows + 2 * width;
    u64 floats = u64(width) * SLICE, column = u64(head) * dim + j;
    history += (u64(blockIdx.y) * all + own) * (CHUNK + 1) * floats;
    for (u32 sequence = blockIdx.y; sequence < sequences; sequence += gridDim.y) {
        u64 start = ends[sequence], end = ends[sequence + 1];
        float* mine = d_state + threadIdx.x;
        for (u32 i = 0; i < width; i++) mine[i * SLICE] = 0.0f;
        for (u64 token = start; token < end; token++) {
            if (token % CHUNK == 0 && token > start) {
                float* to = checkpoints + (token / CHUNK * all + own) * floats + threadIdx.x;
                for (u32 i = 0; i < width; i++) to[i * SLICE] = mine[i * SLICE];
            }
            load_rows(rows, xbc, token, head / (count / groups), heads);
            const float* step = steps + (token * count + head) * 4;
            float x = inside ? widen(xbc[token * features(heads) + column]) : 0.0f;
            advance(mine, SLICE, mine, SLICE, rows, rows + width, step[0] * x, step[1], width);
        }
        for (u32 i = 0; i < width; i++) mine[i * SLICE] = 0.0f;
        for (u64 chunk_end = end; chunk_end > start;) {
            u64 first = (chunk_end - 1) / CHUNK * CHUNK;
            bool from_zero = first <= start;
            if (from_zero) first = start;
            const float* kept = checkpoints + (first / CHUNK * all + own) * floats + threadIdx.x;
            for (u32 i = 0; i < width; i++) history[i * SLICE + threadIdx.x] = from_zero ? 0.0f : kept[i * SLICE];
            for (u64 token = first; token < chunk_end; token++) {
                load_rows(rows, xbc, token, head / (count / groups), heads);
                const float* step = steps + (token * count + head) * 4;
                float x = inside ? widen(xbc[token * features(heads) + column]) : 0.0f;
                float* from = history + (token - first) * floats + threadIdx.x;
                advance(from, SLICE, from + floats, SLICE, rows, rows + width, step[0] * x, step[1], width);
            }
            for (u64 token = chunk_end; token-- > first;) {
                load_rows(rows, xbc, token, head / (count / groups), heads);
                const float *before = history + (token - first) * floats, *behind = before + floats;
                const float *step = steps + (token * count + head) * 4, *b = rows, *c = rows + width;
                float x = inside ? widen(xbc[token * features(heads) + column]) : 0.0f;
                float d_out = inside ? widen(dy[token * count * dim + column]) : 0.0f;
                float du = 0.0f, d_g = 0.0f;
                // The gradient of the state behind the token; the decayed one replaces it below, when all threads have read it.
                for (u32 i = 0; i < width; i++) {
                    float ds = mine[i * SLICE] + c[i] * d_out;
                    mine[i * SLICE] = ds;
                    du += b[i] * ds;
                    d_g += ds * step[1] * before[i * SLICE + threadIdx.x];
                }
                if (inside) store(d_xbc + token * features(heads) + column, step[0] * du + d[head] * d_out);
                columns[threadIdx.x] = d_out;
                columns[SLICE + threadIdx.x] = step[0] * x;
                float d_step = block_sum(du * x);
                __syncthreads();
                d_g = block_sum(d_g);
                __syncthreads();
                float d_d = block_sum(d_out * x);
                __syncthreads();
                if (threadIdx.x == 0) {
                    float* to = d_steps + (token * all + own) * 3;
                    to[0] = d_step;
                    to[1] = d_g;
                    to[2] = d_d;
                }
                // Rows: a warp sums over their columns.
                float* to = d_rows + (token * all + own) * 2 * width;
                for (u32 i = threadIdx.x / WARP; i < width; i += SLICE / WARP) {
                    float db = 0.0f, dc = 0.0f;
                    for (u32 at = threadIdx.x % WARP; at < SLICE; at += WARP) {
                        db += d_state[i * SLICE + at] * columns[SLICE + at];
                        dc += behind[i * SLICE + at] * columns[at];
                    }
                    db = warp_sum(db);
                    dc = warp_sum(dc);
                    if (threadIdx.x % WARP == 0) {
                        to[i] = db;
                        to[width + i] = dc;
                    }
                }
                __syncthreads();
                for (u32 i = 0; i < width; i++) mine[i * SLICE] *= step[1];
            }
            chunk_end = first;
        }
    }
}

// From the gradients of B and C of a group's heads and slices to those of B and C; a block a token, group, and B or C
KERNEL TYPED(mamba2_rows_backward)(const float* d_rows, act* d_xbc, u32 slices, u32 count, u32 groups, u32 dim, u32 width) {
    Heads heads = {count, groups, dim, width};
    u64 token = blockIdx.x / (2 * groups);
    u32 which = blockIdx.x % (2 * groups) / groups, group = blockIdx.x % groups, parts = count / groups * slices;
    const float* from = d_rows + ((token * count * slices + u64(group) * parts) * 2 + which) * width;
    act* to = d_xbc + token * features(heads) + u64(count) * dim + u64(blockIdx.x % (2 * groups)) * width;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        float sum = 0.0f;
        for (u32 part = 0; part < parts; part++) sum += from[u64(part) * 2 * width + i];
        store(to + i, sum);
    }
}

// From the gradients of t and g to those of dt and A_log, and that of D; a thread a token and head
KERNEL TYPED(mamba2_steps_backward)(const float* steps, const float* d_steps, const float* a_log, act* d_dt, float* d_rate, float* d_d, u64 count,
                                    u32 slices, u32 heads) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float d_step = 0.0f, d_g = 0.0f, sum = 0.0f;
    for (u32 slice = 0; slice < slices; slice++) {
        const float* part = d_steps + (i * slices + slice) * 3;
        d_step += part[0];
        d_g += part[1];
        sum += part[2];
    }
    store(d_dt + i, (d_step - expf(a_log[i % heads]) * d_g) * steps[4 * i + 3]);
    d_rate[i] = d_g * steps[4 * i + 2];
    d_d[i] = sum;
}
