// The gated delta rule and Mamba 2 in chunks of CHUNK tokens, as `recurrence/cpu/mod.rs` says. `keys` has queries and keys,
// [tokens][q, k][groups][rows]; `gates` of each token and head the scale, g, and two numbers that only its op reads,
// [tokens][heads][4]. `chunks` has the first token of each chunk, and behind the last chunk the number of tokens.
//
// A block has 16 x 16 threads: thread (x, y) = (t % 16, t / 16) has the rows y + 16 r and the columns x + 16 c of a product.
#include "dev.cuh"

#define CHUNK 64u
// Columns of a state in a block.
#define SLICE 32u
// What is summed over in shared memory at once, and its pitch.
#define DEPTH 32u
#define PITCH 65u
#define THREADS 256u

struct Shape {
    u32 heads, groups, rows, columns;

    __device__ u32 group_of(u32 head) const { return head / (heads / groups); }
    // Queries, or keys from `which` = 1, of a token.
    __device__ const float* row(const float* keys, u64 token, u32 which, u32 head) const {
        return keys + ((token * 2 + which) * groups + group_of(head)) * rows;
    }
};

// sums[r][c] += sum over k < depth of left[row, k] right[k, column].
template <u32 R, u32 C>
static __device__ inline void add_products(float (&sums)[R][C], const float* left, u32 row_step, u32 left_step, const float* right, u32 right_step,
                                           u32 column_step, u32 depth) {
    const u32 x = threadIdx.x % 16, y = threadIdx.x / 16;
    for (u32 k = 0; k < depth; k++) {
        float rows[R], columns[C];
        UNROLL for (u32 r = 0; r < R; r++) rows[r] = left[(y + 16 * r) * row_step + k * left_step];
        UNROLL for (u32 c = 0; c < C; c++) columns[c] = right[k * right_step + (x + 16 * c) * column_step];
        UNROLL for (u32 r = 0; r < R; r++) {
            UNROLL for (u32 c = 0; c < C; c++) sums[r][c] = fmaf(rows[r], columns[c], sums[r][c]);
        }
    }
}

template <u32 R, u32 C>
static __device__ inline void clear(float (&sums)[R][C]) {
    UNROLL for (u32 r = 0; r < R; r++) {
        UNROLL for (u32 c = 0; c < C; c++) sums[r][c] = 0.0f;
    }
}

// Calls `put(row, column, sum)` for each sum of a thread.
template <u32 R, u32 C, class F>
static __device__ inline void each(const float (&sums)[R][C], F put) {
    const u32 x = threadIdx.x % 16, y = threadIdx.x / 16;
    UNROLL for (u32 r = 0; r < R; r++) {
        UNROLL for (u32 c = 0; c < C; c++) put(y + 16 * r, x + 16 * c, sums[r][c]);
    }
}

// stage[k][column], for `wide` columns that `from(k, column)` gives: CHUNK at the most, DEPTH rows. Waits before and after.
template <class F>
static __device__ inline void fill(float* stage, u32 wide, F from) {
    __syncthreads();
    for (u32 i = threadIdx.x; i < DEPTH * wide; i += THREADS) {
        const u32 k = i / wide, column = i % wide;
        stage[k * PITCH + column] = from(k, column);
    }
    __syncthreads();
}

// As `fill`, from rows of `from(row, k)`: neighbours among threads take neighbours among k.
template <class F>
static __device__ inline void fill_turned(float* stage, F from) {
    __syncthreads();
    for (u32 i = threadIdx.x; i < DEPTH * CHUNK; i += THREADS) {
        const u32 k = i % DEPTH, row = i / DEPTH;
        stage[k * PITCH + row] = from(row, k);
    }
    __syncthreads();
}

// The gates of a chunk's tokens for one head, in shared memory; tokens behind the last have a scale of 0 and its decay.
struct Gates {
    float scale[CHUNK], behind[CHUNK], ahead[CHUNK];
    double sums[CHUNK];
    float whole;

    __device__ void load(const float* gates, u64 first, u32 count, u32 head, u32 heads) {
        __syncthreads();
        for (u32 t = threadIdx.x; t < CHUNK; t += THREADS) {
            const float* gate = gates + ((first + t) * heads + head) * 4;
            scale[t] = t < count ? gate[0] : 0.0f;
            sums[t] = t < count ? gate[1] : 0.0f;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            for (u32 t = 1; t < CHUNK; t++) sums[t] += sums[t - 1];
            whole = expf(float(sums[CHUNK - 1]));
        }
        __syncthreads();
        for (u32 t = threadIdx.x; t < CHUNK; t += THREADS) {
            behind[t] = expf(float(sums[t]));
            ahead[t] = expf(float(sums[CHUNK - 1] - sums[t]));
        }
        __syncthreads();
    }
    // What is left at `i` of what `j` wrote, for `j <= i`.
    __device__ float decay(u32 i, u32 j) const { return expf(float(sums[i] - sums[j])); }
};

// Of each chunk and head `A`, `M` and the inverse of `1 + L`, all [tokens][heads][CHUNK], `M` and the inverse where the rule
// corrects. A block a head and chunk.
KERNEL TYPED(recurrence_pairs)(const float* keys, const float* gates, const u32* chunks, float* attention, float* m, float* inverse, u32 heads, u32 groups,
                        u32 rows, u32 corrects) {
    DYNAMIC_SHARED(float, stage);
    __shared__ Gates gate;
    const Shape shape = {heads, groups, rows, 0};
    float *others = stage + DEPTH * PITCH, *lower = others + DEPTH * PITCH;
    const u32 head = blockIdx.x, count = chunks[blockIdx.y + 1] - chunks[blockIdx.y];
    const u64 first = chunks[blockIdx.y];
    gate.load(gates, first, count, head, heads);
    const auto row = [&](u32 which, u32 token, u32 k) { return token < count && k < rows ? shape.row(keys, first + token, which, head)[k] : 0.0f; };
    for (u32 which = 0; which <= (corrects ? 1 : 0); which++) {
        float sums[4][4];
        clear(sums);
        for (u32 k0 = 0; k0 < rows; k0 += DEPTH) {
            fill_turned(stage, [&](u32 token, u32 k) { return row(which, token, k0 + k); });
            fill_turned(others, [&](u32 token, u32 k) { return row(1, token, k0 + k); });
            add_products(sums, stage, 1, PITCH, others, PITCH, 1, DEPTH);
        }
        float* to = which == 0 ? attention : m;
        each(sums, [&](u32 i, u32 j, float sum) {
            const float value = j + which <= i && i < count ? sum * gate.decay(i, j) : 0.0f;
            if (i < count) to[((first + i) * heads + head) * CHUNK + j] = value;
            if (which == 1) lower[i * PITCH + j] = gate.scale[i] * value;
        });
    }
    if (!corrects) return;
    // A column a thread, by forward substitution.
    float* solved = lower + CHUNK * PITCH;
    __syncthreads();
    for (u32 j = threadIdx.x; j < CHUNK; j += THREADS) {
        for (u32 i = 0; i < CHUNK; i++) {
            float sum = i == j ? 1.0f : 0.0f;
            for (u32 l = j; l < i; l++) sum -= lower[i * PITCH + l] * solved[l * PITCH + j];
            solved[i * PITCH + j] = sum;
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < count * CHUNK; i += THREADS) inverse[((first + i / CHUNK) * heads + head) * CHUNK + i % CHUNK] = solved[i / CHUNK * PITCH + i % CHUNK];
}

// state[row][column] = whole state + sum_t factors[t] x[t][row] y[t][column], `x` from `from(t, row)`; `state` is [rows][SLICE].
template <class F>
static __device__ inline void write_state(float* state, u32 rows, float whole, const float* factors, float sign, const float* y, float* stage, F from) {
    for (u32 row0 = 0; row0 < rows; row0 += CHUNK) {
        float sums[4][2];
        clear(sums);
        for (u32 t0 = 0; t0 < CHUNK; t0 += DEPTH) {
            fill(stage, CHUNK, [&](u32 t, u32 row) { return row0 + row < rows ? sign * factors[t0 + t] * from(t0 + t, row0 + row) : 0.0f; });
            add_products(sums, stage, 1, PITCH, y + t0 * SLICE, SLICE, 1, DEPTH);
        }
        each(sums, [&](u32 row, u32 column, float sum) {
            if (row0 + row < rows) {
                float* place = state + (row0 + row) * SLICE + column;
                *place = whole * *place + sum;
            }
        });
    }
    __syncthreads();
}

// sums[token][column] = sum_row x[token][row] state[row][column].
template <class F>
static __device__ inline void read_state(float (&sums)[4][2], const float* state, u32 rows, float* stage, F from) {
    clear(sums);
    for (u32 k0 = 0; k0 < rows; k0 += DEPTH) {
        fill_turned(stage, [&](u32 token, u32 k) { return k0 + k < rows ? from(token, k0 + k) : 0.0f; });
        add_products(sums, stage, 1, PITCH, state + k0 * SLICE, SLICE, 1, rows - k0 < DEPTH ? rows - k0 : DEPTH);
    }
}

// sums[i][column] += sum_j pairs[i][j] y[j][column], `pairs` from `from(i, j)`; turned: pairs[j][i].
template <class F>
static __device__ inline void mix(float (&sums)[4][2], const float* y, float* stage, F from) {
    for (u32 j0 = 0; j0 < CHUNK; j0 += DEPTH) {
        fill_turned(stage, [&](u32 i, u32 j) { return from(i, j0 + j); });
        add_products(sums, stage, 1, PITCH, y + j0 * SLICE, SLICE, 1, DEPTH);
    }
}

// A block a head, sequence and slice. `sequences` has the number of each sequence's first chunk, and that behind the last one's.
// `states` has where each sequence's states are, [heads][rows][columns], or 0. Where given, `checkpoints` gets the states before
// chunks but the first of a sequence, that of a chunk from token t on at t / CHUNK - 1, [tokens / CHUNK][heads][slices][rows][SLICE], and `u` u, [tokens][heads * columns].
KERNEL TYPED(recurrence_forward)(const act* x, u32 width, u32 values, const float* keys, const float* gates, const u32* chunks, const u32* sequences,
                                 const float* attention, const float* inverse, const float* through, const u64* states, act* out, float* checkpoints,
                                 float* u_out, u32 heads, u32 groups, u32 rows, u32 columns, u32 corrects) {
    DYNAMIC_SHARED(float, state);
    __shared__ Gates gate;
    const Shape shape = {heads, groups, rows, columns};
    float *u = state + rows * SLICE, *rest = u + CHUNK * SLICE, *stage = rest + CHUNK * SLICE;
    const u32 head = blockIdx.x, column0 = blockIdx.z * SLICE, slices = gridDim.z;
    float* kept = states ? reinterpret_cast<float*>(states[blockIdx.y]) + u64(head) * rows * columns + column0 : nullptr;
    for (u32 i = threadIdx.x; i < rows * SLICE; i += THREADS)
        state[i] = kept && column0 + i % SLICE < columns ? kept[u64(i / SLICE) * columns + i % SLICE] : 0.0f;
    for (u32 chunk = sequences[blockIdx.y]; chunk < sequences[blockIdx.y + 1]; chunk++) {
        const u64 first = chunks[chunk];
        const u32 count = chunks[chunk + 1] - chunks[chunk];
        gate.load(gates, first, count, head, heads);
        const auto key = [&](u32 which) {
            return [&, which](u32 token, u32 k) { return token < count ? shape.row(keys, first + token, which, head)[k] : 0.0f; };
        };
        const auto pair = [&](const float* pairs) {
            return [&, pairs](u32 i, u32 j) { return i < count ? pairs[((first + i) * heads + head) * CHUNK + j] : 0.0f; };
        };
        const auto there = [&](u32 token, u32 column) { return token < count && column0 + column < columns; };
        const auto value = [&](u32 token, u32 column) {
            return there(token, column) ? widen(x[(first + token) * width + values + u64(head) * columns + column0 + column]) : 0.0f;
        };
        if (checkpoints && chunk > sequences[blockIdx.y]) {
            float* to = checkpoints + (((first / CHUNK - 1) * heads + head) * slices + blockIdx.z) * rows * SLICE;
            for (u32 i = threadIdx.x; i < rows * SLICE; i += THREADS) to[i] = state[i];
        }
        float sums[4][2];
        if (corrects) {
            read_state(sums, state, rows, stage, key(1));
            each(sums, [&](u32 t, u32 column, float sum) { rest[t * SLICE + column] = gate.scale[t] * (value(t, column) - gate.behind[t] * sum); });
            clear(sums);
            mix(sums, rest, stage, pair(inverse));
            each(sums, [&](u32 t, u32 column, float sum) { u[t * SLICE + column] = sum; });
        } else {
            clear(sums);
            each(sums, [&](u32 t, u32 column, float) { u[t * SLICE + column] = gate.scale[t] * value(t, column); });
        }
        __syncthreads();
        if (u_out) {
            for (u32 i = threadIdx.x; i < CHUNK * SLICE; i += THREADS) {
                if (there(i / SLICE, i % SLICE)) u_out[(first + i / SLICE) * heads * columns + u64(head) * columns + column0 + i % SLICE] = u[i];
            }
        }
        if (out) {
            read_state(sums, state, rows, stage, key(0));
            UNROLL for (u32 r = 0; r < 4; r++) {
                UNROLL for (u32 c = 0; c < 2; c++) sums[r][c] *= gate.behind[threadIdx.x / 16 + 16 * r];
            }
            mix(sums, u, stage, pair(attention));
            each(sums, [&](u32 t, u32 column, float sum) {
                if (through) sum += through[head] * value(t, column);
                if (there(t, column)) store(out + (first + t) * heads * columns + u64(head) * columns + column0 + column, sum);
            });
        }
        write_state(state, rows, gate.whole, gate.ahead, 1.0f, u, stage, key(1));
    }
    for (u32 i = threadIdx.x; kept && i < rows * SLICE; i += THREADS)
        if (column0 + i % SLICE < columns) kept[u64(i / SLICE) * columns + i % SLICE] = state[i];
}

// A block a head, sequence and slice, with what `recurrence_forward` kept. `d_x` gets the gradient of values. Of each token, head and
// slice, `d_keys` gets that of queries and keys, [2][rows], and `d_gates` those of the scale's logarithm, of g, and of D.
KERNEL TYPED(recurrence_backward)(const act* x, u32 width, u32 values, const float* keys, const float* gates, const u32* chunks, const u32* sequences,
                                  const float* attention, const float* m, const float* inverse, const float* through, const act* dy,
                                  const float* checkpoints, const float* u_in, act* d_x, float* d_keys, float* d_gates, u32 heads, u32 groups,
                                  u32 rows, u32 columns, u32 corrects) {
    DYNAMIC_SHARED(float, d_state);
    __shared__ Gates gate;
    __shared__ float d_scale[CHUNK], d_through[CHUNK], d_behind[CHUNK], d_ahead[CHUNK];
    const Shape shape = {heads, groups, rows, columns};
    float *u = d_state + rows * SLICE, *d_out = u + CHUNK * SLICE, *z = d_out + CHUNK * SLICE, *stage = z + CHUNK * SLICE;
    float *pairs = stage + DEPTH * PITCH, *d_decays = pairs + CHUNK * PITCH;
    const u32 head = blockIdx.x, column0 = blockIdx.z * SLICE, slices = gridDim.z;
    const u32 lane = threadIdx.x % 16, line = threadIdx.x / 16;
    for (u32 i = threadIdx.x; i < rows * SLICE; i += THREADS) d_state[i] = 0.0f;
    for (u32 chunk = sequences[blockIdx.y + 1]; chunk-- > sequences[blockIdx.y];) {
        const u64 first = chunks[chunk];
        const u32 count = chunks[chunk + 1] - chunks[chunk];
        const float* before = chunk > sequences[blockIdx.y] ? checkpoints + (((first / CHUNK - 1) * heads + head) * slices + blockIdx.z) * rows * SLICE : nullptr;
        gate.load(gates, first, count, head, heads);
        const auto key = [&](u32 which) {
            return [&, which](u32 token, u32 k) { return token < count ? shape.row(keys, first + token, which, head)[k] : 0.0f; };
        };
        const auto turned = [&](const float* pairs) {
            return [&, pairs](u32 j, u32 i) { return i < count && j < count ? pairs[((first + i) * heads + head) * CHUNK + j] : 0.0f; };
        };
        const auto there = [&](u32 token, u32 column) { return token < count && column0 + column < columns; };
        const auto at = [&](u32 token, u32 column) { return (first + token) * heads * columns + u64(head) * columns + column0 + column; };
        const auto value_at = [&](u32 token, u32 column) { return (first + token) * width + values + u64(head) * columns + column0 + column; };
        for (u32 i = threadIdx.x; i < CHUNK * SLICE; i += THREADS) {
            const bool inside = there(i / SLICE, i % SLICE);
            u[i] = inside ? u_in[at(i / SLICE, i % SLICE)] : 0.0f;
            d_out[i] = inside ? widen(dy[at(i / SLICE, i % SLICE)]) : 0.0f;
        }
        // du and z.
        float sums[4][2];
        read_state(sums, d_state, rows, stage, key(1));
        UNROLL for (u32 r = 0; r < 4; r++) {
            UNROLL for (u32 c = 0; c < 2; c++) sums[r][c] *= gate.ahead[line + 16 * r];
        }
        mix(sums, d_out, stage, turned(attention));
        each(sums, [&](u32 t, u32 column, float sum) { z[t * SLICE + column] = sum; });
        if (corrects) {
            clear(sums);
            mix(sums, z, stage, turned(inverse));
            __syncthreads();
            each(sums, [&](u32 t, u32 column, float sum) { z[t * SLICE + column] = sum; });
        }
        __syncthreads();
        // A token a thread: the gradients of scale and D; then c in the place of z, and those of values.
        for (u32 t = threadIdx.x; t < CHUNK; t += THREADS) {
            float scale = 0.0f, of_through = 0.0f;
            for (u32 column = 0; column < SLICE; column++) {
                const float c = gate.scale[t] * z[t * SLICE + column], d = d_out[t * SLICE + column];
                scale += z[t * SLICE + column] * u[t * SLICE + column];
                z[t * SLICE + column] = c;
                if (there(t, column)) {
                    if (through) of_through += d * widen(x[value_at(t, column)]);
                    store(d_x + value_at(t, column), through ? c + through[head] * d : c);
                }
            }
            d_scale[t] = scale;
            d_through[t] = of_through;
            d_behind[t] = d_ahead[t] = 0.0f;
        }
        __syncthreads();
        float whole = 0.0f;
        for (u32 i = threadIdx.x; before && i < rows * SLICE; i += THREADS) whole += d_state[i] * before[i];
        whole = gate.whole * block_sum(whole);
        for (u32 which = 0; which <= (corrects ? 1 : 0); which++) {
            // dA or dM, with their decays.
            const float *left = which == 0 ? d_out : z, sign = which == 0 ? 1.0f : -1.0f;
            float products[4][4];
            clear(products);
            add_products(products, left, SLICE, 1, u, 1, SLICE, SLICE);
            __syncthreads();
            each(products, [&](u32 i, u32 j, float sum) {
                const bool counts = j + which <= i && i < count;
                pairs[i * PITCH + j] = counts ? sign * sum * gate.decay(i, j) : 0.0f;
                const float weight = j < i && i < count ? (which == 0 ? attention : m)[((first + i) * heads + head) * CHUNK + j] : 0.0f;
                // What a decay has: A and M have it already.
                const float change = sign * sum * weight;
                d_decays[i * CHUNK + j] = which == 0 ? change : d_decays[i * CHUNK + j] + change;
            });
            __syncthreads();
            // dq or, of the keys that read, dk; then dk of the keys that were read. By 64 rows of them.
            for (u32 side = 0; side < 2; side++) {
                const bool reads = side == 0;
                // The gradient is one of queries, or of keys.
                const u32 to = reads && which == 0 ? 0 : 1;
                float* d_factors = reads ? d_behind : d_ahead;
                for (u32 row0 = 0; row0 < rows; row0 += CHUNK) {
                    float read[4][4];
                    clear(read);
                    // From the state before the chunk, or behind it.
                    const float* from = reads ? before : which == 0 ? d_state : nullptr;
                    if (from) {
                        const u32 many = rows - row0 < CHUNK ? rows - row0 : CHUNK;
                        fill(stage, CHUNK, [&](u32 k, u32 row) { return row < many ? from[(row0 + row) * SLICE + k] : 0.0f; });
                        add_products(read, reads ? left : u, SLICE, 1, stage, PITCH, 1, SLICE);
                        const float* factors = reads ? gate.behind : gate.ahead;
                        UNROLL for (u32 r = 0; r < 4; r++) {
                            const u32 t = line + 16 * r;
                            float dot = 0.0f;
                            UNROLL for (u32 c = 0; c < 4; c++) {
                                const u32 row = row0 + lane + 16 * c;
                                read[r][c] *= sign * factors[t];
                                if (row < rows) dot += read[r][c] * key(to)(t, row);
                            }
                            // Sixteen threads of half a warp have a token's rows.
                            UNROLL for (u32 step = 8; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
                            if (lane == 0) d_factors[t] += dot;
                        }
                    }
                    for (u32 t0 = 0; t0 < CHUNK; t0 += DEPTH) {
                        const u32 others = reads || which == 1 ? 1 : 0;
                        fill(stage, CHUNK, [&](u32 t, u32 row) { return row0 + row < rows ? key(others)(t0 + t, row0 + row) : 0.0f; });
                        if (reads) add_products(read, pairs + t0, PITCH, 1, stage, PITCH, 1, DEPTH);
                        else add_products(read, pairs + t0 * PITCH, 1, PITCH, stage, PITCH, 1, DEPTH);
                    }
                    each(read, [&](u32 t, u32 row, float sum) {
                        if (t >= count || row0 + row >= rows) return;
                        float* place = d_keys + ((((first + t) * heads + head) * slices + blockIdx.z) * 2 + to) * rows + row0 + row;
                        *place = which == 1 ? *place + sum : sum;
                    });
                }
            }
        }
        // The gradient of the state before the chunk.
        if (before) {
            write_state(d_state, rows, gate.whole, gate.behind, 1.0f, d_out, stage, key(0));
            if (corrects) write_state(d_state, rows, 1.0f, gate.behind, -1.0f, z, stage, key(1));
        }
        __syncthreads();
        // A decay is in what crosses its token: pairs on both sides of it, what reads the state, and what is kept.
        for (u32 t = threadIdx.x; t < CHUNK; t += THREADS) {
            float sum = 0.0f;
            for (u32 i = t; i < count; i++) {
                for (u32 j = 0; j < t; j++) sum += d_decays[i * CHUNK + j];
                sum += d_behind[i];
            }
            for (u32 j = 0; j < t; j++) sum += d_ahead[j];
            if (t >= count) continue;
            float* to = d_gates + (((first + t) * heads + head) * slices + blockIdx.z) * 3;
            to[0] = d_scale[t];
            to[1] = sum + (before ? whole : 0.0f);
            to[2] = d_through[t];
        }
    }
}
