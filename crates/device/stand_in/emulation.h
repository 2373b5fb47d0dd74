// What CUDA has built in, for kernels that g++ compiles: threads of a block as fibers, barriers, warp intrinsics.
//
// A kernel runs block by block. A thread runs until it waits at a barrier or a warp intrinsic, or ends; then the next one runs.
#pragma once
#define TUNESMITH_EMULATION 1

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

// Static shared memory of one source lies in one section, so that it can be filled before each block. AddressSanitizer watches the
// ends of arrays only outside of sections: under it they are where they are.
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static
#define TUNESMITH_SHARED_RANGE nullptr, nullptr
#else
#ifndef TUNESMITH_SHARED
#define TUNESMITH_SHARED tunesmith_shared
#endif
#define TUNESMITH_TEXT(name) #name
#define TUNESMITH_TEXT_OF(name) TUNESMITH_TEXT(name)
#define TUNESMITH_JOINED(one, other) one##other
#define TUNESMITH_JOIN(one, other) TUNESMITH_JOINED(one, other)
// `used`: the compiler does not conclude that a place which no kernel writes is 0.
#define __shared__ static __attribute__((section(TUNESMITH_TEXT_OF(TUNESMITH_SHARED)), used))
#define TUNESMITH_SHARED_BEGIN TUNESMITH_JOIN(__start_, TUNESMITH_SHARED)
#define TUNESMITH_SHARED_END TUNESMITH_JOIN(__stop_, TUNESMITH_SHARED)
extern "C" char TUNESMITH_SHARED_BEGIN[] __attribute__((weak, visibility("hidden")));
extern "C" char TUNESMITH_SHARED_END[] __attribute__((weak, visibility("hidden")));
#define TUNESMITH_SHARED_RANGE TUNESMITH_SHARED_BEGIN, TUNESMITH_SHARED_END
#endif

struct Dimensions {
    unsigned x, y, z;
};

// Of the thread that runs.
extern Dimensions threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

// Where a thread waits: a barrier in the source.
struct Site {
    const char *file;
    int line;
};

constexpr unsigned LANES = 32;

// The block's dynamic shared memory.
void *dynamic_shared();
// Waits for all threads of the block that have not ended.
void block_barrier(Site site);
// Gives this lane's value to the lanes of `mask`, and waits for theirs; `all` gets 32 values, those of absent lanes 0.
void warp_exchange(uint32_t mask, uint64_t value, uint64_t *all, Site site);
// The same, for the value of lane `from` alone.
uint64_t warp_take(uint32_t mask, uint64_t value, unsigned from, Site site);
// The same in a whole warp, for what all lanes compute alike from the values. True for one lane, which gets them and computes;
// the others get in `result` what it gave to `warp_result`.
bool warp_first(uint64_t value, uint64_t *all, uint64_t &result, Site site);
void warp_result(uint64_t result);
// This thread's lane.
unsigned lane();
// What each lane of a warp gives: lane i's words are at i * GIVEN. They stay until the exchange after the next one.
constexpr unsigned GIVEN = 3;
const uint64_t *warp_gather(const uint64_t (&given)[GIVEN], Site site);
// Asynchronous copies: one is done when its thread waits for its group, and until then its place is filled with NaN. From null come
// zeros. Sizes and places are checked.
void copy_async(void *to, const void *from, unsigned bytes);
void copies_end();
void copies_wait(unsigned left);
// `ldmatrix.x4`, transposed or not.
void load_matrices(uint32_t (&out)[4], const char *row, bool transposed);

template <class T> uint64_t bits_of(T value) {
    static_assert(sizeof(T) <= 8, "a value of up to 8 bytes");
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <class T> T of_bits(uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

// What a butterfly of shuffles computes, to the bit: lane i combines with lane i ^ 16, then ^ 8, and so on.
template <class T, class F> T warp_tree(T value, F combine) {
    uint64_t all[LANES], result;
    if (!warp_first(bits_of(value), all, result, {"dev.cuh", 0})) return of_bits<T>(result);
    T values[LANES];
    for (unsigned i = 0; i < LANES; i++) values[i] = of_bits<T>(all[i]);
    for (unsigned step = LANES / 2; step > 0; step /= 2)
        for (unsigned i = 0; i < step; i++) values[i] = combine(values[i], values[i + step]);
    warp_result(bits_of(values[0]));
    return values[0];
}

template <class T> T shuffle(uint32_t mask, T value, unsigned from, Site site) {
    return of_bits<T>(warp_take(mask, bits_of(value), from % LANES, site));
}

// `mma.m16n8k16` of 16-bit numbers, which `widen` makes floats.
template <class W> void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, W widen) {
    auto joined = [](uint32_t low, uint32_t high) { return uint64_t(low) | uint64_t(high) << 32; };
    const uint64_t *all = warp_gather({joined(a[0], a[1]), joined(a[2], a[3]), joined(b0, b1)}, {"mma", 0});
    unsigned group = lane() / 4, pair = lane() % 4;
    for (unsigned k = 0; k < 16; k++) {
        unsigned half = k / 8, from = k % 8 / 2, shift = k % 2 * 16;
        uint64_t rows = all[(group * 4 + from) * GIVEN + half];
        float low = widen(uint16_t(rows >> shift)), high = widen(uint16_t(rows >> (32 + shift)));
        for (unsigned column = 0; column < 2; column++) {
            uint64_t columns = all[((pair * 2 + column) * 4 + from) * GIVEN + 2];
            float factor = widen(uint16_t(columns >> (half * 32 + shift)));
            sums[column] = fmaf(low, factor, sums[column]);
            sums[2 + column] = fmaf(high, factor, sums[2 + column]);
        }
    }
}

// A kernel with its arguments, which every thread calls.
using Body = std::function<void()>;

struct Call {
    Body body;
    // The arguments that are pointers, without null.
    std::vector<uint64_t> addresses;
};

using Bind = Call (*)(void **arguments);

template <class T> void note_address(std::vector<uint64_t> &addresses, const T &argument) {
    if constexpr (std::is_pointer_v<T>)
        if (argument) addresses.push_back(reinterpret_cast<uint64_t>(argument));
}

template <class F> struct Binder;
template <class... A> struct Binder<void (*)(A...)> {
    template <void (*KERNEL_FUNCTION)(A...), size_t... I> static Call make(void **arguments, std::index_sequence<I...>) {
        std::tuple<std::remove_cv_t<A>...> copied(*static_cast<std::remove_cv_t<A> *>(arguments[I])...);
        Call call{[copied] { std::apply(KERNEL_FUNCTION, copied); }, {}};
        (note_address(call.addresses, std::get<I>(copied)), ...);
        return call;
    }
    template <void (*KERNEL_FUNCTION)(A...)> static Call bind(void **arguments) {
        return make<KERNEL_FUNCTION>(arguments, std::index_sequence_for<A...>{});
    }
};

// Makes a kernel known by its name, with the static shared memory of its source.
struct Registration {
    Registration(const char *name, Bind bind, char *shared, char *shared_end);
};

// The kernel of that name; null if there is none.
Bind find(const char *name);

// Runs a kernel that is known by its name.
void run(const char *name, Dimensions grid, Dimensions block, size_t shared, const Body &body);

} // namespace emulation

#define TUNESMITH_REGISTER(kernel) \
    static emulation::Registration register_##kernel(#kernel, &emulation::Binder<decltype(&kernel)>::bind<&kernel>, TUNESMITH_SHARED_RANGE);

#define TUNESMITH_SITE emulation::Site{__FILE__, __LINE__}
#define __syncthreads() emulation::block_barrier(TUNESMITH_SITE)
#define __syncwarp(...) emulation::warp_take(0xffffffffu, 0, 0, TUNESMITH_SITE)
#define __shfl_sync(mask, value, from) emulation::shuffle(mask, value, unsigned(from), TUNESMITH_SITE)
#define __shfl_xor_sync(mask, value, step) \
    emulation::shuffle(mask, value, emulation::lane() ^ unsigned(step), TUNESMITH_SITE)
#define __shfl_down_sync(mask, value, step) \
    emulation::shuffle(mask, value, emulation::lane() + unsigned(step) < 32 ? emulation::lane() + unsigned(step) : emulation::lane(), TUNESMITH_SITE)
#define __shfl_up_sync(mask, value, step) \
    emulation::shuffle(mask, value, emulation::lane() >= unsigned(step) ? emulation::lane() - unsigned(step) : emulation::lane(), TUNESMITH_SITE)

static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    uint64_t all[emulation::LANES];
    emulation::warp_exchange(mask, predicate != 0, all, {"__ballot_sync", 0});
    unsigned votes = 0;
    for (unsigned i = 0; i < emulation::LANES; i++) votes |= unsigned(all[i] != 0) << i;
    return votes & mask;
}
static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

static inline float __uint_as_float(uint32_t bits) { return emulation::of_bits<float>(bits); }
static inline float __int_as_float(int bits) { return emulation::of_bits<float>(uint32_t(bits)); }
static inline uint32_t __float_as_uint(float x) { return uint32_t(emulation::bits_of(x)); }
static inline int __float_as_int(float x) { return int(__float_as_uint(x)); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
#define __expf(x) expf(x)
#define __logf(x) logf(x)
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __fmul_rn(float x, float y) { volatile float product = x * y; return product; }
static inline float __fadd_rn(float x, float y) { volatile float sum = x + y; return sum; }
static inline float __fsub_rn(float x, float y) { volatile float difference = x - y; return difference; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fsqrt_rn(float x) { return std::sqrt(x); }
static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static inline double __dmul_rn(double x, double y) { volatile double product = x * y; return product; }
static inline double __dadd_rn(double x, double y) { volatile double sum = x + y; return sum; }
static inline uint64_t __umul64hi(uint64_t x, uint64_t y) { return uint64_t((unsigned __int128)x * y >> 64); }
template <class T> static inline T __ldg(const T *place) { return *place; }
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }

template <class T> static inline T atomicAdd(T *place, T more) {
    T before = *place;
    *place = before + more;
    return before;
}
template <class T> static inline T atomicMax(T *place, T other) {
    T before = *place;
    if (before < other) *place = other;
    return before;
}
template <class T> static inline T atomicCAS(T *place, T expected, T value) {
    T before = *place;
    if (before == expected) *place = value;
    return before;
}
static inline void __threadfence() {}
