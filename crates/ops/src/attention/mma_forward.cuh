// The forward pass on tensor cores (Dao, "FlashAttention-2", 2023). A block for each tile of 64 M queries (x) and query
// head (y). Keys of a tile come while the last tile's values are mixed, values while scores are made.

#define FORWARD_PARAMETERS                                                                                            \
    const act *q, const act *k, const act *v, const float *sinks, act *o, float *lse, const u32 *first,              \
        const u32 *end, const QueryTile *tiles, u32 heads, u32 kv_heads, u32 head_dim, u32 v_head_dim, float scale,  \
        float cap
#define FORWARD_ARGUMENTS                                                                                             \
    q, k, v, sinks, o, lse, first, end, tiles, heads, kv_heads, head_dim, v_head_dim, scale, cap

// The running softmax of a thread's rows, of whose sums it has those over its own columns.
template <u32 M, u32 N>
struct RunningSoftmax {
    float most[M][2], total[M][2];

    __device__ void begin(float least) {
        UNROLL for (u32 m = 0; m < M; m++) {
            UNROLL for (u32 half = 0; half < 2; half++) {
                most[m][half] = least;
                total[m][half] = 0.0f;
            }
        }
    }

    // Makes weights of the scores of the keys from `key` on, and `shrink`, what earlier sums are multiplied by.
    __device__ void next(float (&scores)[M][N][4], float (&shrink)[M][2], const Exponent& how, const Sight<M>& sight,
                         u32 key) {
        if (how.cap > 0.0f) {
            const float inner = how.scale / how.cap;
            UNROLL for (u32 m = 0; m < M; m++) {
                UNROLL for (u32 n = 0; n < N; n++) {
                    UNROLL for (u32 e = 0; e < 4; e++) scores[m][n][e] = how.cap * tanhf(scores[m][n][e] * inner);
                }
            }
        }
        if (!sight.whole(key, 8 * N)) {
            const u32 column = key + threadIdx.x % 4 * 2;
            UNROLL for (u32 m = 0; m < M; m++) {
                UNROLL for (u32 n = 0; n < N; n++) {
                    UNROLL for (u32 e = 0; e < 4; e++) {
                        if (sight.hidden(m, e / 2, column + 8 * n + e % 2)) scores[m][n][e] = -INFINITY;
                    }
                }
            }
        }
        UNROLL for (u32 m = 0; m < M; m++) {
            UNROLL for (u32 half = 0; half < 2; half++) {
                float top = most[m][half];
                UNROLL for (u32 n = 0; n < N; n++) {
                    top = fmaxf(top, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
                }
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
                shrink[m][half] = power_of_two((most[m][half] - top) * how.factor);
                most[m][half] = top;
                const float less = top * how.factor;
                float sum = 0.0f;
                UNROLL for (u32 n = 0; n < N; n++) {
                    UNROLL for (u32 e = 2 * half; e < 2 * half + 2; e++) {
                        scores[m][n][e] = power_of_two(fmaf(scores[m][n][e], how.factor, -less));
                        sum += scores[m][n][e];
                    }
                }
                total[m][half] = fmaf(total[m][half], shrink[m][half], sum);
            }
        }
    }

    // The sums over all columns, the sink's part among them, which is a score like the others.
    __device__ void end(const Exponent& how, float sink) {
        UNROLL for (u32 m = 0; m < M; m++) {
            UNROLL for (u32 half = 0; half < 2; half++) {
                float sum = total[m][half];
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                total[m][half] = sum + power_of_two((sink - most[m][half]) * how.factor);
            }
        }
    }
};

// Heads of up to D features, values of up to V, V <= D, and tiles of so many keys.
template <class T, u32 D, u32 V, u32 M, u32 KEYS>
static __device__ inline void mma_forward(const T* q, const T* k, const T* v, const float* sinks, T* o, float* lse,
                                          const u32* first, const u32* end, const QueryTile* tiles, u32 heads,
                                          u32 kv_heads, u32 head_dim, u32 v_head_dim, float scale, float cap) {
    enum : u32 { QUERIES = 16 * M * WARPS, N = KEYS / 8 };
    DYNAMIC_SHARED(unsigned char, memory);
    const Shared queries = shared_place(memory), keys = queries + QUERIES * Tile<D>::PITCH,
                 values = keys + KEYS * Tile<D>::PITCH;
    const QueryTile at = tiles[blockIdx.x];
    const u32 head = blockIdx.y, kv = head / (heads / kv_heads), row = threadIdx.x / WARP * 16 * M;
    const HeadRows<T> k_rows(k, at.key_row, kv_heads, kv, head_dim, at.from, at.to);
    const HeadRows<T> v_rows(v, at.key_row, kv_heads, kv, v_head_dim, at.from, at.to);
    copy_tile<QUERIES, D>(queries, HeadRows<T>(q, at.row, heads, head, head_dim, 0, at.queries), 0);
    u32 key = at.from / KEYS * KEYS;
    copy_tile<KEYS, D>(keys, k_rows, key);
    end_copies();

    const Sight<M> sight(first + at.row, end + at.row, row, at.queries);
    const Exponent how(scale, cap);
    const float sink = sinks ? sinks[head] / how.natural : -INFINITY;
    RunningSoftmax<M, N> softmax;
    softmax.begin(fmaxf(sink, LEAST));
    float sums[M][V / 8][4];
    clear<M, V / 8>(sums);
    for (; key < at.to; key += KEYS) {
        wait_copies<0>();
        __syncthreads();   // The keys are there, and all have done with the last values.
        copy_tile<KEYS, V>(values, v_rows, key);
        end_copies();
        const bool some = sight.some(key, KEYS);
        float scores[M][N][4];
        if (some) dot_products<T, D, M, N>(scores, queries, row, keys);
        wait_copies<0>();
        __syncthreads();   // The values are there, and all have done with the keys.
        if (key + KEYS < at.to) copy_tile<KEYS, D>(keys, k_rows, key + KEYS);
        end_copies();
        if (!some) continue;
        float shrink[M][2];
        softmax.next(scores, shrink, how, sight, key);
        UNROLL for (u32 m = 0; m < M; m++) {
            UNROLL for (u32 n = 0; n < V / 8; n++) {
                UNROLL for (u32 e = 0; e < 4; e++) sums[m][n][e] *= shrink[m][e / 2];
            }
        }
        add_mixed<T, V, M, N>(sums, scores, values);
    }

    softmax.end(how, sink);
    float inverse[M][2];
    UNROLL for (u32 m = 0; m < M; m++) {
        UNROLL for (u32 half = 0; half < 2; half++) {
            inverse[m][half] = 1.0f / softmax.total[m][half];
            const u32 query = row + 16 * m + 8 * half + threadIdx.x % WARP / 4;
            if (threadIdx.x % 4 == 0 && query < at.queries) {
                lse[(u64)(at.row + query) * heads + head] =
                    fmaf(softmax.most[m][half], how.natural, logf(softmax.total[m][half]));
            }
        }
    }
    const u64 stride = (u64)heads * v_head_dim;
    write_rows<T, V, M>(o + at.row * stride + (u64)head * v_head_dim, stride, row, at.queries, v_head_dim, inverse, sums);
}

// [`mma_forward`]. For float32 there is none.
template <u32 D, u32 V, u32 M, u32 KEYS, class T>
static __device__ inline void forward(const T* q, const T* k, const T* v, const float* sinks, T* o, float* lse,
                                      const u32* first, const u32* end, const QueryTile* tiles, u32 heads,
                                      u32 kv_heads, u32 head_dim, u32 v_head_dim, float scale, float cap) {
    if constexpr (sizeof(T) == 2) mma_forward<T, D, V, M, KEYS>(FORWARD_ARGUMENTS);
}
