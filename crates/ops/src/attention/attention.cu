// Softmax attention without tensor cores: forward, and of one new token a text; also the sums that both ways of the
// backward pass begin with.
//
// The order in which a query's sums are made depends on its position, not on the other queries of its tile: tiles of
// keys begin at multiples of 64, and keys that a query does not see add zeros. So `attention_decode` gives the bits of
// the forward pass.
#include "dev.cuh"
#include "simt.cuh"
#include "tiles.cuh"

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
    __device__ void finish(act* o, u64 stride, u32 rows, u32 features, u32 column) const {
        float inverse[R];
        UNROLL for (u32 r = 0; r < R; r++) inverse[r] = 1.0f / total[r];
        store_tile<R, N>(o, stride, rows, features, column, inverse, sums);
    }
};

// A block for each tile of 64 queries (x), query head (y), and 64 N features of values (z).
template <u32 N>
static __device__ inline void forward(const act* q, const act* k, const act* v, const float* sinks, act* o,
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

KERNEL __launch_bounds__(THREADS, 2) TYPED(attention_forward_64)(
    const act* q, const act* k, const act* v, const float* sinks, act* o, float* lse, const u32* first,
    const u32* end, const QueryTile* tiles, u32 heads, u32 kv_heads, u32 head_dim, u32 v_head_dim, float scale,
    float cap) {
    __shared__ Four tile[TILE];
    __shared__ Four matrix[SCORES];
    forward<1>(q, k, v, sinks, o, lse, first, end, tiles, heads, kv_heads, head_dim, v_head_dim, scale, cap, tile,
               matrix);
}

KERNEL __launch_bounds__(THREADS, 2) TYPED(attention_forward_128)(
    const act* q, const act* k, const act* v, const float* sinks, act* o, float* lse, const u32* first,
    const u32* end, const QueryTile* tiles, u32 heads, u32 kv_heads, u32 head_dim, u32 v_head_dim, float scale,
    float cap) {
    __shared__ Four tile[TILE];
    __shared__ Four matrix[SCORES];
    forward<2>(q, k, v, sinks, o, lse, first, end, tiles, heads, kv_heads, head_dim, v_head_dim, scale, cap, tile,
               matrix);
}

KERNEL TYPED(attention_forward_256)(const act* q, const act* k, const act* v, const float* sinks, act* o,
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
KERNEL __launch_bounds__(THREADS, 2) TYPED(attention_decode)(
    const act* q, const float* sinks, act* o, const u64* pages, const Text* texts, u32 heads, u32 kv_heads, u32
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
KERNEL TYPED(attention_delta)(const act* o, const act* d_o, float* delta, u64 count, u32 features) {
    const u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (i >= count) return;
    float sum = 0.0f;
    for (u32 feature = threadIdx.x % WARP; feature < features; feature += WARP) {
        const u64 place = i * features + feature;
        sum = fmaf(widen(o[place]), widen(d_o[place]), sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) delta[i] = sum;
}

// d_sinks[head] -= sum over queries of exp(sink - lse) * delta: a sink is a key whose value is zero. A block a head.
KERNEL TYPED(attention_sinks)(const float* sinks, const float* lse, const float* delta, const u32* end, float* d_sinks,
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
