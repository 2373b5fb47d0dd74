// Tensor cores and asynchronous copies: each instruction of PTX behind one function, beside what it does in plain C++
// for the stand-in. All threads of a warp call a function at once.

// A place in shared memory, in bytes.
#ifdef TUNESMITH_EMULATION
typedef char* Shared;
#else
typedef u32 Shared;
#endif

static __device__ inline Shared shared_place(void* place) {
#ifdef TUNESMITH_EMULATION
    return static_cast<char*>(place);
#else
    u64 narrow;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(narrow) : "l"(place));
    return u32(narrow);
#endif
}

// Begins to copy 16 bytes to shared memory; zeros if there are none. Both places are multiples of 16.
static __device__ inline void copy_async(Shared to, const void* from, bool there) {
#ifdef TUNESMITH_EMULATION
    emulation::copy_async(to, there ? from : nullptr, 16);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16u : 0u) : "memory");
#endif
}

// As `copy_async`, of 4 bytes.
static __device__ inline void copy_word_async(Shared to, const void* from, bool there) {
#ifdef TUNESMITH_EMULATION
    emulation::copy_async(to, there ? from : nullptr, 4);
#else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4u : 0u) : "memory");
#endif
}

// Ends a group: of all copies that this thread has begun since the last group.
static __device__ inline void end_copies() {
#ifdef TUNESMITH_EMULATION
    emulation::copies_end();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until this thread's groups but for the last N are there.
template <u32 N>
static __device__ inline void wait_copies() {
#ifdef TUNESMITH_EMULATION
    emulation::copies_wait(N);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// Four matrices of 8 x 8 numbers: `row` is, in lane l, where row l % 8 of matrix l / 8 begins. Lane l gets of each
// matrix the numbers (l / 4, l % 4 * 2) and the next one of that row.
static __device__ inline void load_matrices(u32 (&out)[4], Shared row) {
#ifdef TUNESMITH_EMULATION
    emulation::load_matrices(out, row, false);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(row)
                 : "memory");
#endif
}

// As `load_matrices`, each matrix transposed: lane l gets (l % 4 * 2, l / 4) and the next one of that column.
static __device__ inline void load_transposed(u32 (&out)[4], Shared row) {
#ifdef TUNESMITH_EMULATION
    emulation::load_matrices(out, row, true);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(row)
                 : "memory");
#endif
}

// sums [16 x 8] += a [16 x 16] b [16 x 8]. Lane l has, with g = l / 4 and t = l % 4 * 2, pairs of numbers that follow
// each other: a: (g, t), (g + 8, t), (g, t + 8), (g + 8, t + 8); b, along its columns: (t, g), (t + 8, g);
// sums: (g, t), (g, t + 1), (g + 8, t), (g + 8, t + 1).
#ifdef TUNESMITH_EMULATION
template <class T>
static inline void multiply(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const auto widened = [](u16 bits) { return widen(T{bits}); };
    emulation::multiply(sums, a, b0, b1, widened);
}
#else
template <class T>
static __device__ inline void multiply(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1);

template <>
__device__ inline void multiply<bf16>(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void multiply<f16>(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// 2 to the x; within some 2^-22 of it.
static __device__ inline float power_of_two(float x) {
#ifdef TUNESMITH_EMULATION
    return exp2f(x);
#else
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
#endif
}

// Two numbers, rounded, the first in the lower half.
template <class T>
static __device__ inline u32 pair_of(float low, float high);

template <>
__device__ inline u32 pair_of<bf16>(float low, float high) {
#ifdef TUNESMITH_EMULATION
    return u32(to_bf16(low).bits) | u32(to_bf16(high).bits) << 16;
#else
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#endif
}

template <>
__device__ inline u32 pair_of<f16>(float low, float high) {
#ifdef TUNESMITH_EMULATION
    return u32(to_f16(low).bits) | u32(to_f16(high).bits) << 16;
#else
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#endif
}
