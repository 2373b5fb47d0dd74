// The gradients of softmax attention without tensor cores.
#include "dev.cuh"
#include "simt.cuh"
#include "tiles.cuh"

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
static __device__ inline void backward_queries(const act* q, const act* k, const act* v, const act* d_o,
                                               const float* lse, const float* delta, act* dq, const u32* first,
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
    store_tile<4, N>(dq + at.row * stride + (u64)head * head_dim, stride, at.queries, head_dim, column, factors, sums);
}

KERNEL __launch_bounds__(THREADS, 2) TYPED(attention_backward_queries_64)(
    const act* q, const act* k, const act* v, const act* d_o, const float* lse, const float* delta, act* dq, const u32* first, const u32* end, const QueryTile* tiles, u32 heads, u32 kv_heads, u32 head_dim, u32
    v_head_dim, float scale, float cap) {
    __shared__ Four tile[TILE];
    __shared__ Four matrix[SCORES];
    backward_queries<1>(q, k, v, d_o, lse, delta, dq, first, end, tiles, heads, kv_heads, head_dim, v_head_dim, scale,
                        cap, tile, matrix);
}

KERNEL TYPED(attention_backward_queries_128)(const act* q, const act* k, const act* v, const act* d_o,
                                             const float* lse, const float* delta, act* dq, const u32* first,
                                             const u32* end, const QueryTile* tiles, u32 heads, u32 kv_heads,
                                             u32 head_dim, u32 v_head_dim, float scale, float cap) {
    __shared__ Four tile[TILE];
    __shared__ Four matrix[SCORES];
    backward_queries<2>(q, k, v, d_o, lse, delta, dq, first, end, tiles, heads, kv_heads, head_dim, v_head_dim, scale,
                        cap, tile, matrix);
}

KERNEL TYPED(attention_backward_queries_256)(const act* q, const act* k, const act* v, const act* d_o,
                                             const float* lse, const float* delta, act* dq, const u32* first,
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
static __device__ inline void backward_keys(const act* q, const act* k, const act* v, const act* d_o,
                                            const float* lse, const float* delta, act* dk, act* dv,
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
    store_tile<R, N>(dk + at.token * k_stride + (u64)kv * head_dim, k_stride, at.keys, head_dim, column, factors, k_sums);
    store_tile<R, N>(dv + at.token * v_stride + (u64)kv * v_head_dim, v_stride, at.keys, v_head_dim, column, factors,
                v_sums);
}

KERNEL TYPED(attention_backward_keys_64)(
    const act* q, const act* k, const act* v, const act* d_o, const float* lse, const float* delta, act* dk, act* dv, const u32* first, const u32* end, const KeyTile* tiles, u32 heads, u32 kv_heads, u32 head_dim,
    u32 v_head_dim, float scale, float cap) {
    __shared__ Four tile[TILE];
    __shared__ Four matrix[SCORES];
    backward_keys<4, 1>(q, k, v, d_o, lse, delta, dk, dv, first, end, tiles, heads, kv_heads, head_dim, v_head_dim,
                        scale, cap, tile, matrix);
}

KERNEL TYPED(attention_backward_keys_128)(const act* q, const act* k, const act* v, const act* d_o,
                                          const float* lse, const float* delta, act* dk, act* dv, const u32* first,
                                          const u32* end, const KeyTile* tiles, u32 heads, u32 kv_heads, u32 head_dim,
                                          u32 v_head_dim, float scale, float cap) {
    __shared__ Four tile[TILE];
    __shared__ Four matrix[SCORES];
    backward_keys<4, 2>(q, k, v, d_o, lse, delta, dk, dv, first, end, tiles, heads, kv_heads, head_dim, v_head_dim,
                        scale, cap, tile, matrix);
}

KERNEL TYPED(attention_backward_keys_256)(const act* q, const act* k, const act* v, const act* d_o,
                                          const float* lse, const float* delta, act* dk, act* dv, const u32* first,
                                          const u32* end, const KeyTile* tiles, u32 heads, u32 kv_heads, u32 head_dim,
                                          u32 v_head_dim, float scale, float cap) {
    __shared__ Four tile[TILE];
    __shared__ Four matrix[SCORES];
    backward_keys<2, 4>(q, k, v, d_o, lse, delta, dk, dv, first, end, tiles, heads, kv_heads, head_dim, v_head_dim,
                        scale, cap, tile, matrix);
}
