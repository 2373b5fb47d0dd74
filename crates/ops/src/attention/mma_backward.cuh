// The gradients on tensor cores (Dao, "FlashAttention-2", 2023), without atomic sums: one kernel makes dq, by tiles of
// queries, another one dk and dv, by tiles of keys. Both make the scores afresh. The next tile comes meanwhile.

#define BACKWARD_OPERANDS                                                                                             \
    const act *q, const act *k, const act *v, const act *d_o, const float *lse, const float *delta
#define BACKWARD_NUMBERS u32 heads, u32 kv_heads, u32 head_dim, u32 v_head_dim, float scale, float cap
#define QUERIES_PARAMETERS                                                                                            \
    BACKWARD_OPERANDS, act *dq, const u32 *first, const u32 *end, const QueryTile *tiles, BACKWARD_NUMBERS
#define QUERIES_ARGUMENTS                                                                                             \
    q, k, v, d_o, lse, delta, dq, first, end, tiles, heads, kv_heads, head_dim, v_head_dim, scale, cap
#define KEYS_PARAMETERS                                                                                               \
    BACKWARD_OPERANDS, act *dk, act *dv, const u32 *first, const u32 *end, const KeyTile *tiles, BACKWARD_NUMBERS
#define KEYS_ARGUMENTS                                                                                                \
    q, k, v, d_o, lse, delta, dk, dv, first, end, tiles, heads, kv_heads, head_dim, v_head_dim, scale, cap

// The weight of a key whose product with the query is `product`; `less` is the query's log-sum-exp times log2(e). Then
// `slope` is the derivative of the capped score with respect to the product times `scale`.
static __device__ inline float weight_of(float product, const Exponent& how, float less, float& slope) {
    slope = 1.0f;
    if (how.cap > 0.0f) {
        const float t = tanhf(product * (how.scale / how.cap));
        slope = 1.0f - t * t;
        product = how.cap * t;
    }
    return power_of_two(fmaf(product, how.factor, -less));
}

// dq. A block for each tile of 64 M queries (x) and query head (y).
template <class T, u32 D, u32 V, u32 M, u32 KEYS>
static __device__ inline void mma_queries(const T* q, const T* k, const T* v, const T* d_o, const float* lse,
                                          const float* delta, T* dq, const u32* first, const u32* end,
                                          const QueryTile* tiles, u32 heads, u32 kv_heads, u32 head_dim,
                                          u32 v_head_dim, float scale, float cap) {
    enum : u32 { QUERIES = 16 * M * WARPS, N = KEYS / 8, STAGE = KEYS * (Tile<D>::PITCH + Tile<V>::PITCH) };
    DYNAMIC_SHARED(unsigned char, memory);
    const Shared queries = shared_place(memory), slopes = queries + QUERIES * Tile<D>::PITCH,
                 stages = slopes + QUERIES * Tile<V>::PITCH;
    const QueryTile at = tiles[blockIdx.x];
    const u32 head = blockIdx.y, kv = head / (heads / kv_heads), row = threadIdx.x / WARP * 16 * M;
    const HeadRows<T> k_rows(k, at.key_row, kv_heads, kv, head_dim, at.from, at.to);
    const HeadRows<T> v_rows(v, at.key_row, kv_heads, kv, v_head_dim, at.from, at.to);
    const auto copy_stage = [&](u32 key, u32 odd) {
        copy_tile<KEYS, D>(stages + odd * STAGE, k_rows, key);
        copy_tile<KEYS, V>(stages + odd * STAGE + KEYS * Tile<D>::PITCH, v_rows, key);
        end_copies();
    };
    copy_tile<QUERIES, D>(queries, HeadRows<T>(q, at.row, heads, head, head_dim, 0, at.queries), 0);
    copy_tile<QUERIES, V>(slopes, HeadRows<T>(d_o, at.row, heads, head, v_head_dim, 0, at.queries), 0);
    u32 key = at.from / KEYS * KEYS, odd = 0;
    copy_stage(key, odd);

    const Sight<M> sight(first + at.row, end + at.row, row, at.queries);
    const Exponent how(scale, cap);
    float less[M][2], deltas[M][2], factors[M][2];
    UNROLL for (u32 m = 0; m < M; m++) {
        UNROLL for (u32 half = 0; half < 2; half++) {
            const u32 query = row + 16 * m + 8 * half + threadIdx.x % WARP / 4;
            const u64 place = (u64)(at.row + query) * heads + head;
            less[m][half] = query < at.queries ? lse[place] * LOG2_E : 0.0f;
            deltas[m][half] = query < at.queries ? delta[place] : 0.0f;
            factors[m][half] = scale;
        }
    }
    float sums[M][D / 8][4];
    clear<M, D / 8>(sums);
    for (; key < at.to; key += KEYS, odd ^= 1) {
        wait_copies<0>();
        __syncthreads();   // This stage is there, and all have done with the other one.
        if (key + KEYS < at.to) copy_stage(key + KEYS, odd ^ 1);
        if (!sight.some(key, KEYS)) continue;
        const Shared keys = stages + odd * STAGE, values = keys + KEYS * Tile<D>::PITCH;
        const bool whole = sight.whole(key, KEYS);
        float scores[M][N][4], gains[M][N][4];
        dot_products<T, D, M, N>(scores, queries, row, keys);
        dot_products<T, V, M, N>(gains, slopes, row, values);
        UNROLL for (u32 m = 0; m < M; m++) {
            UNROLL for (u32 n = 0; n < N; n++) {
                UNROLL for (u32 e = 0; e < 4; e++) {
                    const u32 j = key + 8 * n + threadIdx.x % 4 * 2 + e % 2;
                    float slope;
                    const float weight = weight_of(scores[m][n][e], how, less[m][e / 2], slope);
                    const bool hidden = !whole && sight.hidden(m, e / 2, j);
                    scores[m][n][e] = hidden ? 0.0f : weight * (gains[m][n][e] - deltas[m][e / 2]) * slope;
                }
            }
        }
        add_mixed<T, D, M, N>(sums, scores, keys);
    }
    const u64 stride = (u64)heads * head_dim;
    write_rows<T, D, M>(dq + at.row * stride + (u64)head * head_dim, stride, row, at.queries, head_dim, factors, sums);
}

// dk and dv. A block for each tile of 64 M keys (x) and key head (y), of which it makes both or, where registers do not
// suffice, one. The query heads of a key head come one after the other.
template <class T, u32 D, u32 V, u32 M, u32 QUERIES, bool DK, bool DV>
static __device__ inline void mma_keys(const T* q, const T* k, const T* v, const T* d_o, const float* lse,
                                       const float* delta, T* dk, T* dv, const u32* first, const u32* end,
                                       const KeyTile* tiles, u32 heads, u32 kv_heads, u32 head_dim, u32 v_head_dim,
                                       float scale, float cap) {
    enum : u32 {
        KEYS = 16 * M * WARPS,
        N = QUERIES / 8,
        SLOPES = QUERIES * Tile<D>::PITCH,
        NUMBERS = SLOPES + QUERIES * Tile<V>::PITCH,
        STAGE = NUMBERS + QUERIES * 16,
        STAGES = KEYS * (Tile<D>::PITCH + Tile<V>::PITCH),
    };
    DYNAMIC_SHARED(unsigned char, memory);
    const Shared keys = shared_place(memory), values = keys + KEYS * Tile<D>::PITCH, stages = keys + STAGES;
    const KeyTile at = tiles[blockIdx.x];
    const u32 kv = blockIdx.y, group = heads / kv_heads, row = threadIdx.x / WARP * 16 * M;
    const u32 per_head = (at.to - at.from + QUERIES - 1) / QUERIES, count = group * per_head;
    const auto copy_stage = [&](u32 i) {
        const u32 head = kv * group + i / per_head, query = at.from + i % per_head * QUERIES;
        const Shared stage = stages + i % 2 * STAGE;
        copy_tile<QUERIES, D>(stage, HeadRows<T>(q, at.row, heads, head, head_dim, at.from, at.to), query);
        copy_tile<QUERIES, V>(stage + SLOPES, HeadRows<T>(d_o, at.row, heads, head, v_head_dim, at.from, at.to), query);
        // A number a thread. A query that is not there sees no key.
        const u32 which = threadIdx.x / QUERIES, one = threadIdx.x % QUERIES;
        if (which < 4) {
            const bool there = query + one < at.to;
            const u64 token = there ? at.row + query + one : at.row;
            const float* sum = (which == 0 ? lse : delta) + token * heads + head;
            const u32* key = (which == 2 ? first : end) + token;
            const void* from = which < 2 ? (const void*)sum : (const void*)key;
            copy_word_async(stage + NUMBERS + threadIdx.x * 4, from, there);
        }
        end_copies();
    };
    copy_tile<KEYS, D>(keys, HeadRows<T>(k, at.token, kv_heads, kv, head_dim, 0, at.keys), 0);
    if (DK) copy_tile<KEYS, V>(values, HeadRows<T>(v, at.token, kv_heads, kv, v_head_dim, 0, at.keys), 0);
    if (count > 0) copy_stage(0);

    const Exponent how(scale, cap);
    const u32 g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    float k_sums[M][D / 8][4], v_sums[M][V / 8][4];
    if (DK) clear<M, D / 8>(k_sums);
    if (DV) clear<M, V / 8>(v_sums);
    for (u32 i = 0; i < count; i++) {
        wait_copies<0>();
        __syncthreads();   // This stage is there, and all have done with the other one.
        if (i + 1 < count) copy_stage(i + 1);
        const Shared queries = stages + i % 2 * STAGE, slopes = queries + SLOPES;
        const float* numbers = (const float*)(memory + (STAGES + i % 2 * STAGE + NUMBERS));
        const u32* firsts = (const u32*)numbers + 2 * QUERIES;
        const u32* ends = firsts + QUERIES;
        const u32 lane = threadIdx.x % QUERIES, key = at.key + row, behind = key + 16 * M;
        static_assert(QUERIES <= WARP, "a lane for each query");
        if (!__any_sync(0xffffffffu, firsts[lane] < behind && ends[lane] > key)) continue;
        const bool whole = __all_sync(0xffffffffu, firsts[lane] <= key && ends[lane] >= behind);
        float weights[M][N][4], gains[M][N][4];
        dot_products<T, D, M, N>(weights, keys, row, queries);
        if (DK) dot_products<T, V, M, N>(gains, values, row, slopes);
        UNROLL for (u32 n = 0; n < N; n++) {
            UNROLL for (u32 e = 0; e < 2; e++) {
                const u32 one = 8 * n + 2 * t + e;
                const float less = numbers[one] * LOG2_E, back = DK ? numbers[QUERIES + one] : 0.0f;
                const u32 from = firsts[one], seen = ends[one] - from;
                UNROLL for (u32 m = 0; m < M; m++) {
                    UNROLL for (u32 half = 0; half < 2; half++) {
                        float slope;
                        float& place = weights[m][n][2 * half + e];
                        const float weight = weight_of(place, how, less, slope);
                        const bool hidden = !whole && key + 16 * m + 8 * half + g - from >= seen;
                        place = hidden ? 0.0f : weight;
                        if (DK) {
                            float& gain = gains[m][n][2 * half + e];
                            gain = hidden ? 0.0f : weight * (gain - back) * slope;
                        }
                    }
                }
            }
        }
        if (DV) add_mixed<T, V, M, N>(v_sums, weights, slopes);
        if (DK) add_mixed<T, D, M, N>(k_sums, gains, queries);
    }
    wait_copies<0>();
    float factors[M][2];
    const u64 k_stride = (u64)kv_heads * head_dim, v_stride = (u64)kv_heads * v_head_dim;
    if (DK) {
        UNROLL for (u32 m = 0; m < M; m++) factors[m][0] = factors[m][1] = scale;
        write_rows<T, D, M>(dk + at.token * k_stride + (u64)kv * head_dim, k_stride, row, at.keys, head_dim, factors, k_sums);
    }
    if (DV) {
        UNROLL for (u32 m = 0; m < M; m++) factors[m][0] = factors[m][1] = 1.0f;
        write_rows<T, V, M>(dv + at.token * v_stride + (u64)kv * v_head_dim, v_stride, row, at.keys, v_head_dim, factors, v_sums);
    }
}

// [`mma_queries`]. For float32 there is none.
template <u32 D, u32 V, u32 M, u32 KEYS, class T>
static __device__ inline void backward_queries(QUERIES_PARAMETERS) {
    if constexpr (sizeof(T) == 2) mma_queries<T, D, V, M, KEYS>(QUERIES_ARGUMENTS);
}

// [`mma_keys`], which makes both gradients at once, or the grid's z says which: 0 is dv.
template <u32 D, u32 V, u32 M, u32 QUERIES, bool BOTH, class T>
static __device__ inline void backward_keys(KEYS_PARAMETERS) {
    if constexpr (sizeof(T) == 2) {
        if constexpr (BOTH) {
            mma_keys<T, D, V, M, QUERIES, true, true>(KEYS_ARGUMENTS);
        } else if (blockIdx.z == 0) {
            mma_keys<T, D, V, M, QUERIES, false, true>(KEYS_ARGUMENTS);
        } else {
            mma_keys<T, D, V, M, QUERIES, true, false>(KEYS_ARGUMENTS);
        }
    }
}
