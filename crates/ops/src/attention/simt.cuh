// What the attention kernels share that need no tensor cores: they take activations of any type and heads of any size,
// and multiply in float32. The scores of a tile of queries and a tile of keys live in a block's shared memory, those of
// all tokens nowhere (Dao et al., "FlashAttention-2", 2023).
//
// A block has 16 x 16 threads: thread (x, y) = (t % 16, t / 16). Of a tile's scores it has the R rows from R y on and
// the columns x, x + 16, x + 32, x + 48. So the 16 threads of one y, half a warp, have whole rows among them. Of what
// is summed it has the same rows, and four features from 64 n + 4 x on for each n < N. Where a head has more than 64 N
// features, the grid's z says which 64 N of them a block sums.

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

// As many numbers of an activation.
struct alignas(4 * sizeof(act)) FourActs {
    act at[4];
};

// Some rows of an activation: row `i` lies `i * stride` numbers after `at`; those outside of `from..to` count as zeros.
struct Rows {
    const act* at;
    u64 stride;
    u32 from, to, features;

    __device__ const act* row(u32 i) const {
        return at + i * stride;
    }
    // Whether rows may be read four numbers at a time.
    __device__ bool aligned() const {
        return (((u64)at | stride * sizeof(act)) & (sizeof(FourActs) - 1)) == 0 && features % 4 == 0;
    }
};

// Some positions of a cache, of which `pages` has the pages from number `first` on: position `i` lies
// `i % 16 * stride + offset` numbers after its page's beginning.
struct Pages {
    const u64* pages;
    u32 first;
    u64 offset, stride;
    u32 from, to, features;

    __device__ const act* row(u32 i) const {
        return (const act*)pages[i / PAGE - first] + offset + i % PAGE * stride;
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
            const act* from = x.row(first + row) + at;
            if (aligned) {
                const FourActs four_acts = *(const FourActs*)from;
                UNROLL for (u32 e = 0; e < 4; e++) value.at[e] = widen(four_acts.at[e]);
            } else {
                UNROLL for (u32 e = 0; e < 4; e++) {
                    if (at + e < x.features) value.at[e] = widen(from[e]);
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
static __device__ inline void store_tile(act* to, u64 stride, u32 rows, u32 features, u32 column,
                                    const float (&factors)[R], const float (&sums)[R][4 * N]) {
    const u32 x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    UNROLL for (u32 r = 0; r < R; r++) {
        act* row = to + (y * R + r) * stride;
        UNROLL for (u32 i = 0; i < 4 * N; i++) {
            const u32 feature = column + i / 4 * COLUMNS + 4 * x + i % 4;
            if (y * R + r < rows && feature < features) store(row + feature, factors[r] * sums[r][i]);
        }
    }
}

// Rows of one head of an activation `[tokens, heads * features]`, from `first` on.
static __device__ inline Rows rows_of(const act* x, u64 first, u32 heads, u32 head, u32 features, u32 from, u32 to) {
    const u64 stride = (u64)heads * features;
    return {x + first * stride + (u64)head * features, stride, from, to, features};
}
