// What the attention kernels with tensor cores share: tiles of rows in shared memory, and products of them.
//
// A block has four warps. A warp has 16 M rows of a tile of scores: with g = lane / 4 and t = lane % 4, each thread has
// of 16 rows and 8 columns those of rows g and g + 8 and columns 2 t and 2 t + 1, as `multiply` gives them.

#define WARPS 4
#define MMA_THREADS (WARPS * WARP)
#define LOG2_E 1.4426950408889634f
// Below every score, above minus infinity: a running maximum that starts here never gives inf - inf.
#define LEAST (-1e30f)

// A tile of rows of D 16-bit numbers. A row's chunks of 16 bytes lie so that the same chunk of eight rows in a row is in
// eight different groups of banks: turned by the row's number, or behind a chunk that is left free.
template <u32 D>
struct Tile {
    enum : u32 { TURNED = D % 64 == 0, PITCH = TURNED ? 2 * D : 2 * D + 16 };

    static __device__ u32 at(u32 row, u32 chunk) {
        return row * PITCH + (TURNED ? chunk ^ (row & 7) : chunk) * 16;
    }
};

// Where a lane begins to read 16 x 16 numbers: its row among the 16, and its chunk among the two.
template <u32 D>
struct Corner {
    u32 line, chunk;

    __device__ Corner(u32 row, u32 half) {
        line = row * Tile<D>::PITCH;
        chunk = Tile<D>::TURNED ? half ^ (row & 7) : half;
    }
    // The numbers from (row, 16 * column) on, of rows that are a multiple of 8.
    __device__ Shared at(Shared tile, u32 row, u32 column) const {
        const u32 there = Tile<D>::TURNED ? (2 * column) ^ chunk : 2 * column + chunk;
        return tile + (line + row * Tile<D>::PITCH + there * 16);
    }
};

// Begins at the matrices (0, 0), (8, 0), (0, 8), (8, 8): a left operand's order, and a right one's that is transposed.
template <u32 D>
static __device__ inline Corner<D> down_first() {
    return Corner<D>(threadIdx.x % 16, threadIdx.x % WARP / 16);
}

// Begins at the matrices (0, 0), (0, 8), (8, 0), (8, 8): a right operand's order whose columns are the tile's rows.
template <u32 D>
static __device__ inline Corner<D> across_first() {
    return Corner<D>(threadIdx.x % WARP / 16 * 8 + threadIdx.x % 8, threadIdx.x % 16 / 8);
}

// Rows of one head of an activation `[tokens, heads * features]`: row `i` lies `i * stride` numbers after `at`; those
// outside of `from..to` count as zeros.
template <class T>
struct HeadRows {
    const T* at;
    u64 stride;
    u32 from, to, features;

    __device__ HeadRows(const T* x, u64 first, u32 heads, u32 head, u32 features, u32 from, u32 to)
        : at(x + first * heads * features + (u64)head * features), stride((u64)heads * features), from(from), to(to),
          features(features) {}
};

// Begins to copy the rows from `first` on; features behind the last are zeros.
template <u32 ROWS, u32 D, class T>
static __device__ inline void copy_tile(Shared tile, const HeadRows<T>& x, u32 first) {
    UNROLL for (u32 i = threadIdx.x; i < ROWS * D / 8; i += MMA_THREADS) {
        const u32 row = i / (D / 8), chunk = i % (D / 8);
        const bool there = first + row >= x.from && first + row < x.to && chunk * 8 < x.features;
        copy_async(tile + Tile<D>::at(row, chunk), x.at + (there ? (first + row) * x.stride + chunk * 8 : 0), there);
    }
}

template <u32 M, u32 N>
static __device__ inline void clear(float (&sums)[M][N][4]) {
    UNROLL for (u32 m = 0; m < M; m++) {
        UNROLL for (u32 n = 0; n < N; n++) {
            UNROLL for (u32 e = 0; e < 4; e++) sums[m][n][e] = 0.0f;
        }
    }
}

// scores[row][column] = <left[row], right[column]> for this warp's rows, from `row` on, and all 8 N rows of `right`.
template <class T, u32 D, u32 M, u32 N>
static __device__ inline void dot_products(float (&scores)[M][N][4], Shared left, u32 row, Shared right) {
    const Corner<D> down = down_first<D>(), across = across_first<D>();
    clear<M, N>(scores);
    UNROLL for (u32 k = 0; k < D / 16; k++) {
        u32 rows[M][4];
        UNROLL for (u32 m = 0; m < M; m++) load_matrices(rows[m], down.at(left, row + 16 * m, k));
        UNROLL for (u32 n = 0; n < N; n += 2) {
            u32 columns[4];
            load_matrices(columns, across.at(right, 8 * n, k));
            UNROLL for (u32 m = 0; m < M; m++) {
                multiply<T>(scores[m][n], rows[m], columns[0], columns[1]);
                multiply<T>(scores[m][n + 1], rows[m], columns[2], columns[3]);
            }
        }
    }
}

// sums[row][feature] += sum over columns of weights[row][column], rounded, * x[column][feature].
template <class T, u32 D, u32 M, u32 N>
static __device__ inline void add_mixed(float (&sums)[M][D / 8][4], const float (&weights)[M][N][4], Shared x) {
    const Corner<D> down = down_first<D>();
    UNROLL for (u32 k = 0; k < N / 2; k++) {
        u32 rows[M][4];
        UNROLL for (u32 m = 0; m < M; m++) {
            UNROLL for (u32 i = 0; i < 4; i++) {
                const float(&part)[4] = weights[m][2 * k + i / 2];
                rows[m][i] = pair_of<T>(part[i % 2 * 2], part[i % 2 * 2 + 1]);
            }
        }
        UNROLL for (u32 n = 0; n < D / 8; n += 2) {
            u32 columns[4];
            load_transposed(columns, down.at(x, 16 * k, n / 2));
            UNROLL for (u32 m = 0; m < M; m++) {
                multiply<T>(sums[m][n], rows[m], columns[0], columns[1]);
                multiply<T>(sums[m][n + 1], rows[m], columns[2], columns[3]);
            }
        }
    }
}

// to[row][feature] = factors[row] * sums[row][feature] for this warp's rows, from `row` on, that are below `rows`.
template <class T, u32 D, u32 M>
static __device__ inline void write_rows(T* to, u64 stride, u32 row, u32 rows, u32 features,
                                         const float (&factors)[M][2], const float (&sums)[M][D / 8][4]) {
    const u32 g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    UNROLL for (u32 m = 0; m < M; m++) {
        UNROLL for (u32 half = 0; half < 2; half++) {
            const u32 i = row + 16 * m + 8 * half + g;
            if (i >= rows) continue;
            UNROLL for (u32 n = 0; n < D / 8; n++) {
                const float(&part)[4] = sums[m][n];
                const float factor = factors[m][half];
                const u32 pair = pair_of<T>(factor * part[2 * half], factor * part[2 * half + 1]);
                if (8 * n < features) *(u32*)(to + i * stride + 8 * n + 2 * t) = pair;
            }
        }
    }
}

// The least and the largest over the lanes of a warp.
static __device__ inline u32 warp_least(u32 x) {
    UNROLL for (u32 step = WARP / 2; step > 0; step /= 2) {
        const u32 other = __shfl_xor_sync(0xffffffffu, x, step);
        x = other < x ? other : x;
    }
    return x;
}

static __device__ inline u32 warp_most(u32 x) {
    return ~warp_least(~x);
}

// The keys that a thread's rows see, those that some row of its warp sees, and those that every row does.
template <u32 M>
struct Sight {
    u32 first[M][2], count[M][2];
    u32 any_from, any_to, all_from, all_to;

    // Of the queries from `row` on; those from `queries` on are not there.
    __device__ Sight(const u32* firsts, const u32* ends, u32 row, u32 queries) {
        any_from = all_to = 0xffffffffu;
        any_to = all_from = 0;
        UNROLL for (u32 m = 0; m < M; m++) {
            UNROLL for (u32 half = 0; half < 2; half++) {
                const u32 i = row + 16 * m + 8 * half + threadIdx.x % WARP / 4;
                const u32 from = i < queries ? firsts[i] : 0, to = i < queries ? ends[i] : 0;
                first[m][half] = from;
                count[m][half] = to - from;
                if (i < queries) {
                    any_from = from < any_from ? from : any_from;
                    any_to = to > any_to ? to : any_to;
                    all_from = from > all_from ? from : all_from;
                    all_to = to < all_to ? to : all_to;
                }
            }
        }
        any_from = warp_least(any_from);
        any_to = warp_most(any_to);
        all_from = warp_most(all_from);
        all_to = warp_least(all_to);
    }
    __device__ bool some(u32 key, u32 keys) const { return key < any_to && key + keys > any_from; }
    __device__ bool whole(u32 key, u32 keys) const { return key >= all_from && key + keys <= all_to; }
    __device__ bool hidden(u32 m, u32 half, u32 key) const { return key - first[m][half] >= count[m][half]; }
};

// How scores become powers of two: of a product s of a query and a key, exp(score) = 2^(factor * capped(s)).
struct Exponent {
    float scale, cap;   // A cap of 0 is none.
    float factor;       // On what `capped` gives, for a power of two.
    float natural;      // The same, for one of e.

    __device__ Exponent(float scale, float cap)
        : scale(scale), cap(cap), factor((cap > 0.0f ? 1.0f : scale) * LOG2_E), natural(cap > 0.0f ? 1.0f : scale) {}
};
