// Softmax attention, forward, backward, and of one new token a text: the scores of a tile of queries and a tile of keys
// live in a block's shared memory, those of all tokens nowhere (Dao et al., "FlashAttention-2", 2023).
//
// A block has 16 x 16 threads: thread (x, y) = (t % 16, t / 16). Of a tile's scores it has the R rows from R y on and
// the columns x, x + 16, x + 32, x + 48. So the 16 threads of one y, half a warp, have whole rows among them. Of what
// is summed it has the same rows, and four features from 64 n + 4 x on for each n < N. Where a head has more than 64 N
// features, the grid's z says which 64 N of them a block sums.
//
// The order in which a query's sums are made depends on its position, not on the other queries of its tile: tiles of
// keys begin at multiples of 64, and keys that a query does not see add zeros. So `attention_decode` gives the bits of
// the forward pass.
#include "dev.cuh"

#ifdef TUNESMITH_EMULATION
#define UNROLL
#else
#define UNROLL _Pragma("unroll")
#endif

enum : u32 {
    SIDE = 16,   // Threads in x and in y.
    THREADS = SIDE * SIDE,
    COLUMNS = 64,   // Columns of a tile of scores, and features that are summed at once.
    DEPTH = 32,     // Features of a dot product that are in shared memory at once.
    PAGE = 16,      // Positions of a page of the cache.
    DEPTH_PITCH = DEPTH / 4 + 1,
    WIDE_PITCH = COLUMNS / 4,
    SCORE_PITCH = COLUMNS / 4 + 1,
    TILE = 2 * COLUMNS * DEPTH_PITCH,
    SCORES = COLUMNS * SCORE_PITCH,
};

// Below every score, above minus infinity: a running maximum that starts here never gives inf - inf.
#define LOWEST (-1e30f)

struct alignas(16) Four {
    float at[4];
};

// Some rows of an activation: row `i` lies `i * stride` floats after `at`; those outside of `from..to` count as zeros.
struct Rows {
    const float* at;
    u64 stride;
    u32 from, to, features;

    __device__ const float* row(u32 i) const {
        return at + i * stride;
    }
    // Whether rows may be read four numbers at a time.
    __device__ bool aligned() const {
        return (((u64)at | stride * sizeof(float)) & 15) == 0 && features % 4 == 0;
    }
};

// Some positions of a cache, of which `pages` has the pages from number `first` on: position `i` lies
// `i % 16 * stride + offset` floats after its page's beginning.
struct Pages {
    const u64* pages;
    u32 first;
    u64 offset, stride;
    u32 from, to, features;

    __device__ const float* row(u32 i) const {
        return (const float*)pages[i / PAGE - first] + offset + i % PAGE * stride;
    }
    __device__ bool aligned() const {
        return ((offset | stride) & 3) == 0 && features % 4 == 0;
    }
};

// tile[i][j] = factor * x[first + i][column + j] for i < ROWS, j < WIDTH, in rows of `pitch` fours; zero outside of x.
template <u32 ROWS, u32 WIDTH, class X>
static __device__ inline void fill(Four* tile, u32 pitch, const X& x, u32 first, u32 column, float factor) {
    const bool aligned = x.aligned();
    for (u32 i = threadIdx.x; i < ROWS * WIDTH / 4; i += THREADS) {
        const u32 row = i / (WIDTH / 4), four = i % (WIDTH / 4), at = column + 4 * four;
        Four value = {{0.0f, 0.0f, 0.0f, 0.0f}};
        if (first + row >= x.from && first + row < x.to && at < x.features) {
            const float* from = x.row(first + row) + at;
            if (aligned) {
                value = *(const Four*)from;
            } else {
                UNROLL for (u32 e = 0; e < 4; e++) {
                    if (at + e < x.features) value.at[e] = from[e];
                }
            }
        }
        UNROLL for (u32 e = 0; e < 4; e++) value.at[e] *= factor;
        tile[row * pitch + four] = value;
    }
}

// sums[r][c] = sum over features of a_factor a[a_first + row r] * b_factor b[b_first + column c], one after the other.
template <u32 R, class A, class B>
static __device__ inline void scores(float (&sums)[R][4], const A& a, u32 a_first, float a_factor, const B& b,
                                     u32 b_first, float b_factor, Four* tile) {
    const u32 x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    Four* other = tile + COLUMNS * DEPTH_PITCH;
    UNROLL for (u32 r = 0; r < R; r++) {
        UNROLL for (u32 c = 0; c < 4; c++) sums[r][c] = 0.0f;
    }
    for (u32 at = 0; at < a.features; at += DEPTH) {
        __syncthreads();
        fill<R * SIDE, DEPTH>(tile, DEPTH_PITCH, a, a_first, at, a_factor);
        fill<COLUMNS, DEPTH>(other, DEPTH_PITCH, b, b_first, at, b_factor);
        __syncthreads();
        const u32 left = a.features - at, fours = left < DEPTH ? (left + 3) / 4 : DEPTH / 4;
        for (u32 four = 0; four < fours; four++) {
            Four ones[R], others[4];
            UNROLL for (u32 r = 0; r < R; r++) ones[r] = tile[(y * R + r) * DEPTH_PITCH + four];
            UNROLL for (u32 c = 0; c < 4; c++) others[c] = other[(x + SIDE * c) * DEPTH_PITCH + four];
            UNROLL for (u32 e = 0; e < 4; e++) {
                UNROLL for (u32 r = 0; r < R; r++) {
                    UNROLL for (u32 c = 0; c < 4; c++) sums[r][c] = fmaf(ones[r].at[e], others[c].at[e], sums[r][c]);
                }
            }
        }
    }
}

// Writes a thread's part of a tile of scores.
template <u32 R>
static __device__ inline void put(Four* matrix, const float (&part)[R][4]) {
    const u32 x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    UNROLL for (u32 r = 0; r < R; r++) {
        UNROLL for (u32 c = 0; c < 4; c++) {
            const u32 column = x + SIDE * c;
            matrix[(y * R + r) * SCORE_PITCH + column / 4].at[column % 4] = part[r][c];
        }
    }
}

// sums[r][feature] += sum over the tile's columns j, one after the other, of matrix[row r][j] * factor x[first +
// j][feature], for the features from `column` on. Columns from x.to - first on are zero in `matrix`. What was put there
// before is seen.
template <u32 R, u32 N, class X>
static __device__ inline void add_product(float (&sums)[R][4 * N], const Four* matrix, const X& x, u32 first,
                                          float factor, u32 column, Four* tile) {
    const u32 tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
    const u32 left = x.to - first, fours = left < COLUMNS ? (left + 3) / 4 : COLUMNS / 4;
    UNROLL for (u32 n = 0; n < N; n++) {
        if (column + n * COLUMNS < x.features) {
            __syncthreads();
            fill<COLUMNS, COLUMNS>(tile, WIDE_PITCH, x, first, column + n * COLUMNS, factor);
            __syncthreads();
            for (u32 four = 0; four < fours; four++) {
                Four weights[R];
                UNROLL for (u32 r = 0; r < R; r++) weights[r] = matrix[(ty * R + r) * SCORE_PITCH + four];
                UNROLL for (u32 e = 0; e < 4; e++) {
                    const Four values = tile[(four * 4 + e) * WIDE_PITCH + tx];
                    UNROLL for (u32 r = 0; r < R; r++) {
                        UNROLL for (u32 c = 0; c < 4; c++) {
                            sums[r][4 * n + c] = fmaf(weights[r].at[e], values.at[c], sums[r][4 * n + c]);
                        }
                    }
                }
            }
        }
    }
}

template <u32 R, u32 N>
static __device__ inline void clear(float (&sums)[R][4 * N]) {
    UNROLL for (u32 r = 0; r < R; r++) {
        UNROLL for (u32 i = 0; i < 4 * N; i++) sums[r][i] = 0.0f;
    }
}

// to[row][feature] = factors[r] * sums[r][feature] for the rows below `rows` and the features from `column` on.
template <u32 R, u32 N>
static __device__ inline void store(float* to, u64 stride, u32 rows, u32 features, u32 column,
                                    const float (&factors)[R], const float (&sums)[R][4 * N]) {
    const u32 x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    UNROLL for (u32 r = 0; r < R; r++) {
        UNROLL for (u32 i = 0; i < 4 * N; i++) {
            const u32 feature = column + i / 4 * COLUMNS + 4 * x + i % 4;
            if (y * R + r < rows && feature < features) to[(y * R + r) * stride + feature] = factors[r] * sums[r][i];
        }
    }
}

// The running softmax of a tile of queries over the keys that they see. Rows from q.to on see none.
template <u32 R, u32 N>
struct Softmax {
    float most[R], total[R];   // The largest score so far, or the sink; the sum of exponentials relative to it.
    u32 first[R], end[R];      // The keys that each row sees.
    float sums[R][4 * N];

    // The softmax of a query begins at its sink; minus infinity is none.
    __device__ void begin(u32 r, float sink) {
        most[r] = fmaxf(sink, LOWEST);
        total[r] = expf(sink - most[r]);
    }

    template <class Keys>
    __device__ void run(const Rows& q, const Keys& k, const Keys& v, float scale, float cap, u32 column, Four* tile,
                        Four* matrix) {
        const u32 x = threadIdx.x % SIDE;
        clear<R, N>(sums);
        for (u32 key = k.from / COLUMNS * COLUMNS; key < k.to; key += COLUMNS) {
            float s[R][4];
            scores<R>(s, q, 0, scale, k, key, 1.0f, tile);
            UNROLL for (u32 r = 0; r < R; r++) {
                float top = most[r];
                UNROLL for (u32 c = 0; c < 4; c++) {
                    const u32 j = key + x + SIDE * c;
                    // `fmaf` is one rounding wherever the compiler inlines it; so a later subtraction cannot join it.
                    if (cap > 0.0f) s[r][c] = fmaf(cap, tanhf(s[r][c] * (1.0f / cap)), 0.0f);
                    if (j < first[r] || j >= end[r]) s[r][c] = -INFINITY;
                    top = fmaxf(top, s[r][c]);
                }
                UNROLL for (u32 lane = SIDE / 2; lane > 0; lane /= 2) {
                    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lane));
                }
                const float shrink = expf(most[r] - top);
                float sum = 0.0f;
                UNROLL for (u32 c = 0; c < 4; c++) {
                    s[r][c] = expf(s[r][c] - top);
                    sum += s[r][c];
                }
                UNROLL for (u32 lane = SIDE / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
                total[r] = fmaf(total[r], shrink, sum);
                most[r] = top;
                UNROLL for (u32 i = 0; i < 4 * N; i++) sums[r][i] *= shrink;
            }
            put<R>(matrix, s);
            add_product<R, N>(sums, matrix, v, key, 1.0f, column, tile);
        }
    }

    // Writes the mixed values.
    __device__ void finish(float* o, u64 stride, u32 rows, u32 features, u32 column) const {
        float inverse[R];
        UNROLL for (u32 r = 0; r < R; r++) inverse[r] = 1.0f / total[r];
        store<R, N>(o, stride, rows, features, column, inverse, sums);
    }
};

// A tile of queries: the first one's row, how many, the token of the sequence's first key, and the keys, counted from
// there, that any of them sees.
struct QueryTile {
    u32 row, queries, key_row, from, to;
};

// A tile of keys: the first one's token and its number in the sequence, how many, the row of the sequence's first
// query, and the queries, counted from there, between the first and the last that see any of the keys.
struct KeyTile {
    u32 token, key, keys, row, from, to;
};

// Rows of one head of an activation `[tokens, heads * features]`, from `first` on.
static __device__ inline Rows rows_of(const float* x, u64 first, u32 heads, u32 head, u32 features, u32 from, u32 to) {
    const u64 stride = (u64)heads * features;
    return {x + first * stride + (u64)head * features, stride, from, to, features};
}

// A block for each tile of 64 queries (x), query head (y), and 64 N features of values (z).
template <u32 N>
static __device__ inline void forward(const float* q, const float* k, const float* v, const float* sinks, float* o,
                                      float* lse, const u32* first, const u32* end, const QueryTile* tiles, u32 heads,
                                      u32 kv_heads, u32 head_dim, u32 v_head_dim, float scale, float cap, Four* tile,
                                      Four* matrix) {
    const QueryTile at = tiles[blockIdx.x];
    const u32 head = blockIdx.y, kv = head / (heads / kv_heads), column = blockIdx.z * N * COLUMNS;
    const u32 x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    Softmax<4, N> softmax;
    UNROLL for (u32 r = 0; r < 4; r++) {
        const bool used = y * 4 + r < at.queries;
        softmax.first[r] = used ? first[at.row + y * 4 + r] : 0;
        softmax.end[r] = used ? end[at.row + y * 4 + r] : 0;
        softmax.begin(r, sinks ? sinks[head] : -INFINITY);
    }
    const Rows queries = rows_of(q, at.row, heads, head, head_dim, 0, at.queries);
    const Rows keys = rows_of(k, at.key_row, kv_heads, kv, head_dim, at.from, at.to);
    const Rows values = rows_of(v, at.key_row, kv_heads, kv, v_head_dim, at.from, at.to);
    softmax.run(queries, keys, values, scale, cap, column, tile, matrix);
    const u64 stride = (u64)heads * v_head_dim;
    softmax.finish(o + at.row * stride + (u64)head * v_head_dim, stride, at.queries, v_head_dim, column);
    UNROLL for (u32 r = 0; r < 4; r++) {
        const u32 query = y * 4 + r;
        if (blockIdx.z == 0 && x == 0 && query < at.queries) {
            lse[(u64)(at.row + query) * heads + head] = softmax.most[r] + logf(softmax.total[r]);
        }
    }
}

KERNEL __launch_bounds__(THREADS, 2) attention_forward_64(
    const float* q, const float* k, const float* v, const float* sinks, float* o, float* lse, const u32* first,
    const u32* end, const QueryTile* tiles, u32 heads, u32 kv_heads, u32 head_dim, u32 v_head_dim, float scale,
    float cap) {
    __shared__ Four tile[TILE];
    __shared__ Four matrix[SCORES];
    forward<1>(q, k, v, sinks, o, lse, first, end, tiles, heads, kv_heads, head_dim, v_head_dim, scale, cap, tile,
               matrix);
}

KERNEL __launch_bounds__(THREADS, 2) attention_forward_128(
    const float* q, const float* k, const float* v, const float* sinks, float* o, float* lse, const u32* first,
    const u32* end, const QueryTile* tiles, u32 heads, u32 kv_heads, u32 head_dim, u32 v_head_dim, float scale,
    float cap) {
    __shared__ Four tile[TILE];
    __shared__ Four matrix[SCORES];
    forward<2>(q, k, v, sinks, o, lse, first, end, tiles, heads, kv_heads, head_dim, v_head_dim, scale, cap, tile,
               matrix);
}

KERNEL attention_forward_256(const float* q, const float* k, const float* v, const float* sinks, float* o,
                                    float* lse, const u32* first, const u32* end, const QueryTile* tiles, u32 heads,
                                    u32 kv_heads, u32 head_dim, u32 v_head_dim, float scale, float cap) {
    __shared__ Four tile[TILE];
    __shared__ Four matrix[SCORES];
    forward<4>(q, k, v, sinks, o, lse, first, end, tiles, heads, kv_heads, head_dim, v_head_dim, scale, cap, tile,
               matrix);
}

// What a text's cache has: the place of its first page among `pages` and that page's number, and the keys that the
// newest token sees.
struct Text {
    u32 pages, first, from, to;
};

// The newest token of each text over the text's cache. A block for each text (x), 16 query heads of a key head (y), and
// 256 features of values (z). A page is `[16][kv heads][head_dim]` keys and `[16][kv heads][v_head_dim]` values.
KERNEL __launch_bounds__(THREADS, 2) attention_decode(
    const float* q, const float* sinks, float* o, const u64* pages, const Text* texts, u32 heads, u32 kv_heads, u32
    head_dim, u32 v_head_dim, float scale, float cap) {
    __shared__ Four tile[TILE];
    __shared__ Four matrix[SCORES];
    const Text at = texts[blockIdx.x];
    const u32 group = heads / kv_heads, parts = (group + SIDE - 1) / SIDE;
    const u32 kv = blockIdx.y / parts, part = blockIdx.y % parts * SIDE, column = blockIdx.z * 4 * COLUMNS;
    const u32 head = kv * group + part, count = group - part < SIDE ? group - part : SIDE, y = threadIdx.x / SIDE;
    Softmax<1, 4> softmax;
    softmax.first[0] = y < count ? at.from : 0;
    softmax.end[0] = y < count ? at.to : 0;
    softmax.begin(0, y < count && sinks ? sinks[head + y] : -INFINITY);
    const u64 row = (u64)blockIdx.x * heads + head, key_stride = (u64)kv_heads * head_dim,
              stride = (u64)kv_heads * v_head_dim;
    const Rows queries = {q + row * head_dim, head_dim, 0, count, head_dim};
    const Pages keys = {pages + at.pages, at.first, (u64)kv * head_dim, key_stride, at.from, at.to, head_dim};
    const u64 behind = PAGE * key_stride + (u64)kv * v_head_dim;
    const Pages values = {pages + at.pages, at.first, behind, stride, at.from, at.to, v_head_dim};
    softmax.run(queries, keys, values, scale, cap, column, tile, matrix);
    softmax.finish(o + row * v_head_dim, v_head_dim, count, v_head_dim, column);
}

// delta[i] = sum over features of o[i] * d_o[i], for each query and head. A warp each.
KERNEL attention_delta(const float* o, const float* d_o, float* delta, u64 count, u32 features) {
    const u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (i >= count) return;
    float sum = 0.0f;
    for (u32 feature = threadIdx.x % WARP; feature < features; feature += WARP) {
        sum = fmaf(o[i * features + feature], d_o[i * features + feature], sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) delta[i] = sum;
}

// d_sinks[head] -= sum over queries of exp(sink - lse) * delta: a sink is a key whose value is zero. A block a head.
KERNEL attention_sinks(const float* sinks, const float* lse, const float* delta, const u32* end, float* d_sinks,
                              u64 rows, u32 heads) {
    const u32 head = blockIdx.x;
    float sum = 0.0f;
    for (u64 row = threadIdx.x; row < rows; row += blockDim.x) {
        // A row that no sequence has sees nothing.
        if (end[row] > 0) sum = fmaf(expf(sinks[head] - lse[row * heads + head]), delta[row * heads + head], sum);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) d_sinks[head] -= sum;
}

// The probability of a score, and what the derivative with respect to the probability is multiplied by to be that with
// respect to the uncapped score.
static __device__ inline float probability(float score, float cap, float lse, float& slope) {
    slope = 1.0f;
    if (cap > 0.0f) {
        const float t = tanhf(score * (1.0f / cap));
        slope = 1.0f - t * t;
        score = cap * t;
    }
    return expf(score - lse);
}

// dq. Blocks as in `forward`, z for 64 N features of a query.
template <u32 N>
static __device__ inline void backward_queries(const float* q, const float* k, const float* v, const float* d_o,
                                               const float* lse, const float* delta, float* dq, const u32* first,
                                               const u32* end, const QueryTile* tiles, u32 heads, u32 kv_heads,
                                               u32 head_dim, u32 v_head_dim, float scale, float cap, Four* tile,
                                               Four* matrix) {
    const QueryTile at = tiles[blockIdx.x];
    const u32 head = blockIdx.y, kv = head / (heads / kv_heads), column = blockIdx.z * N * COLUMNS;
    const u32 x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    const Rows queries = rows_of(q, at.row, heads, head, head_dim, 0, at.queries);
    const Rows slopes = rows_of(d_o, at.row, heads, head, v_head_dim, 0, at.queries);
    const Rows keys = rows_of(k, at.key_row, kv_heads, kv, head_dim, at.from, at.to);
    const Rows values = rows_of(v, at.key_row, kv_heads, kv, v_head_dim, at.from, at.to);
    u32 firsts[4], ends[4];
    float lses[4], deltas[4], factors[4];
    UNROLL for (u32 r = 0; r < 4; r++) {
        const bool used = y * 4 + r < at.queries;
        const u64 row = at.row + y * 4 + r;
        firsts[r] = used ? first[row] : 0;
        ends[r] = used ? end[row] : 0;
        lses[r] = used ? lse[row * heads + head] : 0.0f;
        deltas[r] = used ? delta[row * heads + head] : 0.0f;
        factors[r] = scale;
    }
    float sums[4][4 * N];
    clear<4, N>(sums);
    for (u32 key = at.from / COLUMNS * COLUMNS; key < at.to; key += COLUMNS) {
        float s[4][4], ds[4][4];
        scores<4>(s, queries, 0, scale, keys, key, 1.0f, tile);
        scores<4>(ds, slopes, 0, 1.0f, values, key, 1.0f, tile);
        UNROLL for (u32 r = 0; r < 4; r++) {
            UNROLL for (u32 c = 0; c < 4; c++) {
                const u32 j = key + x + SIDE * c;
                float slope;
                const float p = probability(s[r][c], cap, lses[r], slope);
                ds[r][c] = j < firsts[r] || j >= ends[r] ? 0.0f : p * (ds[r][c] - deltas[r]) * slope;
            }
        }
        put<4>(matrix, ds);
        add_product<4, N>(sums, matrix, keys, key, 1.0f, column, tile);
    }
    const u64 stride = (u64)heads * head_dim;
    store<4, N>(dq + at.row * stride + (u64)head * head_dim, stride, at.queries, head_dim, column, factors, sums);
}

KERNEL __launch_bounds__(THREADS, 2) attention_backward_queries_64(
    const float* q, const float* k, const float* v, const float* d_o, const float* lse, const float* delta, float*
    dq, const u32* first, const u32* end, const QueryTile* tiles, u32 heads, u32 kv_heads, u32 head_dim, u32
    v_head_dim, float scale, float cap) {
    __shared__ Four tile[TILE];
    __shared__ Four matrix[SCORES];
    backward_queries<1>(q, k, v, d_o, lse, delta, dq, first, end, tiles, heads, kv_heads, head_dim, v_head_dim, scale,
                        cap, tile, matrix);
}

KERNEL attention_backward_queries_128(const float* q, const float* k, const float* v, const float* d_o,
                                             const float* lse, const float* delta, float* dq, const u32* first,
                                             const u32* end, const QueryTile* tiles, u32 heads, u32 kv_heads,
                                             u32 head_dim, u32 v_head_dim, float scale, float cap) {
    __shared__ Four tile[TILE];
    __shared__ Four matrix[SCORES];
    backward_queries<2>(q, k, v, d_o, lse, delta, dq, first, end, tiles, heads, kv_heads, head_dim, v_head_dim, scale,
                        cap, tile, matrix);
}

KERNEL attention_backward_queries_256(const float* q, const float* k, const float* v, const float* d_o,
                                             const float* lse, const float* delta, float* dq, const u32* first,
                                             const u32* end, const QueryTile* tiles, u32 heads, u32 kv_heads,
                                             u32 head_dim, u32 v_head_dim, float scale, float cap) {
    __shared__ Four tile[TILE];
    __shared__ Four matrix[SCORES];
    backward_queries<4>(q, k, v, d_o, lse, delta, dq, first, end, tiles, heads, kv_heads, head_dim, v_head_dim, scale,
                        cap, tile, matrix);
}

// dk and dv: rows are keys, columns are queries. A block for each tile of 16 R keys (x), key head (y), and 64 N
// features (z). The query heads of a key head come one after the other.
template <u32 R, u32 N>
static __device__ inline void backward_keys(const float* q, const float* k, const float* v, const float* d_o,
                                            const float* lse, const float* delta, float* dk, float* dv,
                                            const u32* first, const u32* end, const KeyTile* tiles, u32 heads,
                                            u32 kv_heads, u32 head_dim, u32 v_head_dim, float scale, float cap,
                                            Four* tile, Four* matrix) {
    const KeyTile at = tiles[blockIdx.x];
    const u32 kv = blockIdx.y, group = heads / kv_heads, column = blockIdx.z * N * COLUMNS;
    const u32 x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    const Rows keys = rows_of(k, at.token, kv_heads, kv, head_dim, 0, at.keys);
    const Rows values = rows_of(v, at.token, kv_heads, kv, v_head_dim, 0, at.keys);
    float k_sums[R][4 * N], v_sums[R][4 * N], factors[R];
    clear<R, N>(k_sums);
    clear<R, N>(v_sums);
    UNROLL for (u32 r = 0; r < R; r++) factors[r] = 1.0f;
    for (u32 head = kv * group; head < (kv + 1) * group; head++) {
        const Rows queries = rows_of(q, at.row, heads, head, head_dim, at.from, at.to);
        const Rows slopes = rows_of(d_o, at.row, heads, head, v_head_dim, at.from, at.to);
        for (u32 query = at.from; query < at.to; query += COLUMNS) {
            float p[R][4], ds[R][4];
            scores<R>(p, keys, 0, 1.0f, queries, query, scale, tile);
            scores<R>(ds, values, 0, 1.0f, slopes, query, 1.0f, tile);
            UNROLL for (u32 c = 0; c < 4; c++) {
                const u32 i = query + x + SIDE * c;
                const bool used = i < at.to;
                const u64 row = at.row + i;
                const u32 from = used ? first[row] : 0, to = used ? end[row] : 0;
                const float sum = used ? lse[row * heads + head] : 0.0f, less = used ? delta[row * heads + head] : 0.0f;
                UNROLL for (u32 r = 0; r < R; r++) {
                    const u32 j = at.key + y * R + r;
                    const bool hidden = j < from || j >= to;
                    float slope;
                    const float probable = probability(p[r][c], cap, sum, slope);
                    p[r][c] = hidden ? 0.0f : probable;
                    ds[r][c] = hidden ? 0.0f : probable * (ds[r][c] - less) * slope;
                }
            }
            put<R>(matrix, p);
            add_product<R, N>(v_sums, matrix, slopes, query, 1.0f, column, tile);
            __syncthreads();
            put<R>(matrix, ds);
            add_product<R, N>(k_sums, matrix, queries, query, scale, column, tile);
        }
    }
    const u64 k_stride = (u64)kv_heads * head_dim, v_stride = (u64)kv_heads * v_head_dim;
    store<R, N>(dk + at.token * k_stride + (u64)kv * head_dim, k_stride, at.keys, head_dim, column, factors, k_sums);
    store<R, N>(dv + at.token * v_stride + (u64)kv * v_head_dim, v_stride, at.keys, v_head_dim, column, factors,
                v_sums);
}

KERNEL __launch_bounds__(THREADS, 2) attention_backward_keys_64(
    const float* q, const float* k, const float* v, const float* d_o, const float* lse, const float* delta, float*
    dk, float* dv, const u32* first, const u32* end, const KeyTile* tiles, u32 heads, u32 kv_heads, u32 head_dim,
    u32 v_head_dim, float scale, float cap) {
    __shared__ Four tile[TILE];
    __shared__ Four matrix[SCORES];
    backward_keys<4, 1>(q, k, v, d_o, lse, delta, dk, dv, first, end, tiles, heads, kv_heads, head_dim, v_head_dim,
                        scale, cap, tile, matrix);
}

KERNEL attention_backward_keys_128(const float* q, const float* k, const float* v, const float* d_o,
                                          const float* lse, const float* delta, float* dk, float* dv, const u32* first,
                                          const u32* end, const KeyTile* tiles, u32 heads, u32 kv_heads, u32 head_dim,
                                          u32 v_head_dim, float scale, float cap) {
    __shared__ Four tile[TILE];
    __shared__ Four matrix[SCORES];
    backward_keys<4, 2>(q, k, v, d_o, lse, delta, dk, dv, first, end, tiles, heads, kv_heads, head_dim, v_head_dim,
                        scale, cap, tile, matrix);
}

KERNEL attention_backward_keys_256(const float* q, const float* k, const float* v, const float* d_o,
                                          const float* lse, const float* delta, float* dk, float* dv, const u32* first,
                                          const u32* end, const KeyTile* tiles, u32 heads, u32 kv_heads, u32 head_dim,
                                          u32 v_head_dim, float scale, float cap) {
    __shared__ Four tile[TILE];
    __shared__ Four matrix[SCORES];
    backward_keys<2, 4>(q, k, v, d_o, lse, delta, dk, dv, first, end, tiles, heads, kv_heads, head_dim, v_head_dim,
                        scale, cap, tile, matrix);
}
