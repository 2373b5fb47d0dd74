// What every kernel of tunesmith includes: short names of types, 16-bit numbers, sums over a warp and a block.
//
// NVRTC compiles kernels with this as a header, without CUDA's own. The stand-in device compiles the same sources with g++, where
// crates/device/stand_in/emulation.h supplies what CUDA has built in. The threads of a block are a multiple of 32.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

#define KERNEL extern "C" __global__ void
#define WARP 32

#ifdef TUNESMITH_EMULATION
#define DYNAMIC_SHARED(type, name) type *name = reinterpret_cast<type *>(emulation::dynamic_shared())
#else
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
extern __shared__ __align__(16) unsigned char tunesmith_dynamic_shared[];
// `type* name`: the block's dynamic shared memory.
#define DYNAMIC_SHARED(type, name) type *name = reinterpret_cast<type *>(tunesmith_dynamic_shared)
#endif

// bfloat16: the upper half of a float32.
struct bf16 {
    u16 bits;
};

static __device__ inline float widen(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }

// To the nearest, ties to even; a NaN stays one.
static __device__ inline bf16 to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    bf16 out;
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        out.bits = u16((bits >> 16) | 0x40u);
    } else {
        out.bits = u16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
    return out;
}

// IEEE float16.
struct f16 {
    u16 bits;
};

#ifndef TUNESMITH_EMULATION
static __device__ inline float widen(f16 x) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
}

static __device__ inline f16 to_f16(float x) {
    f16 out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
    return out;
}
#else
static __device__ inline float widen(f16 x) {
    u32 sign = u32(x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31u, fraction = x.bits & 1023u;
    if (exponent == 31u) return __uint_as_float(sign | 0x7f800000u | (fraction << 13));
    if (exponent != 0u) return __uint_as_float(sign | ((exponent + 112u) << 23) | (fraction << 13));
    float small = float(fraction) * __uint_as_float(0x33800000u); // 2^-24
    return sign ? -small : small;
}

// To the nearest, ties to even; beyond the largest, infinity; a NaN stays one.
static __device__ inline f16 to_f16(float x) {
    u32 bits = __float_as_uint(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    f16 out;
    if (size > 0x7f800000u) {
        out.bits = u16(sign | 0x7e00u | ((size >> 13) & 1023u));
    } else if (size >= 0x477ff000u) { // 65520 and more round to infinity
        out.bits = u16(sign | 0x7c00u);
    } else if (size >= 0x38800000u) { // normal from 2^-14 on
        u32 rounded = size + 0xfffu + ((size >> 13) & 1u);
        out.bits = u16(sign | ((rounded - 0x38000000u) >> 13));
    } else {
        // In multiples of 2^-24: adding 2^-1 * 2^... lets the hardware round to even.
        float magic = __uint_as_float(0x3f000000u); // 0.5, whose last place is 2^-24
        out.bits = u16(sign | (__float_as_uint(__uint_as_float(size) + magic) - 0x3f000000u));
    }
    return out;
}
#endif

static __device__ inline float widen(float x) { return x; }

// Rounds where the place has 16 bits.
static __device__ inline void store(float* place, float x) { *place = x; }
static __device__ inline void store(bf16* place, float x) { *place = to_bf16(x); }
static __device__ inline void store(f16* place, float x) { *place = to_f16(x); }

#ifdef TUNESMITH_EMULATION
#define UNROLL
#else
#define UNROLL _Pragma("unroll")
#endif

// As many numbers as fill 16 bytes: what a thread reads and writes at once.
template <class T> struct alignas(16) Pack {
    enum : u32 { COUNT = 16 / sizeof(T) };
    T at[COUNT];
};

// values[e] = from[i + e] where i + e < count, else 0.
template <class T> static __device__ inline void load_pack(float (&values)[Pack<T>::COUNT], const T* from, u64 i, u64 count) {
    if (i + Pack<T>::COUNT <= count && (reinterpret_cast<u64>(from + i) & 15) == 0) {
        Pack<T> pack = *reinterpret_cast<const Pack<T>*>(from + i);
        UNROLL for (u32 e = 0; e < Pack<T>::COUNT; e++) values[e] = widen(pack.at[e]);
    } else {
        UNROLL for (u32 e = 0; e < Pack<T>::COUNT; e++) values[e] = i + e < count ? widen(from[i + e]) : 0.0f;
    }
}

// to[i + e] = values[e] where i + e < count, rounded where it has 16 bits.
template <class T> static __device__ inline void store_pack(T* to, u64 i, u64 count, const float (&values)[Pack<T>::COUNT]) {
    if (i + Pack<T>::COUNT <= count && (reinterpret_cast<u64>(to + i) & 15) == 0) {
        Pack<T> pack;
        UNROLL for (u32 e = 0; e < Pack<T>::COUNT; e++) store(pack.at + e, values[e]);
        *reinterpret_cast<Pack<T>*>(to + i) = pack;
    } else {
        UNROLL for (u32 e = 0; e < Pack<T>::COUNT; e++) {
            if (i + e < count) store(to + i + e, values[e]);
        }
    }
}

// Of kernels for each type of activations, `act`, the name is written TYPED(name) and ends with the type: name_float, name_f16, name_bf16.
// NVRTC compiles their source once for each type that a run has; the stand-in for all three.
#ifndef TUNESMITH_EMULATION
#define TYPED_AS(name, type) name##_##type
#define TYPED_BY(name, type) TYPED_AS(name, type)
#define TYPED(name) TYPED_BY(name, act)
#endif

// The sum, or the largest, over the 32 lanes of a warp, which all call it; every lane gets it. The order of additions is fixed.
#ifdef TUNESMITH_EMULATION
static inline float warp_sum(float x) { return emulation::warp_tree(x, [](float a, float b) { return a + b; }); }
static inline double warp_sum(double x) { return emulation::warp_tree(x, [](double a, double b) { return a + b; }); }
static inline float warp_max(float x) { return emulation::warp_tree(x, [](float a, float b) { return fmaxf(a, b); }); }
#else
static __device__ inline float warp_sum(float x) {
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

static __device__ inline double warp_sum(double x) {
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

static __device__ inline float warp_max(float x) {
    for (int step = WARP / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}
#endif

// The same over the threads of a block, which all call it; every thread gets it.
static __device__ inline float block_sum(float x) {
    __shared__ float parts[WARP];
    x = warp_sum(x);
    u32 thread = threadIdx.x, warps = blockDim.x / WARP;
    if (warps == 1) return x;
    __syncthreads();
    if (thread % WARP == 0) parts[thread / WARP] = x;
    __syncthreads();
    float total = parts[0];
    for (u32 warp = 1; warp < warps; warp++) total += parts[warp];
    return total;
}

static __device__ inline double block_sum(double x) {
    __shared__ double parts[WARP];
    x = warp_sum(x);
    u32 thread = threadIdx.x, warps = blockDim.x / WARP;
    if (warps == 1) return x;
    __syncthreads();
    if (thread % WARP == 0) parts[thread / WARP] = x;
    __syncthreads();
    double total = parts[0];
    for (u32 warp = 1; warp < warps; warp++) total += parts[warp];
    return total;
}

static __device__ inline float block_max(float x) {
    __shared__ float parts[WARP];
    x = warp_max(x);
    u32 thread = threadIdx.x, warps = blockDim.x / WARP;
    if (warps == 1) return x;
    __syncthreads();
    if (thread % WARP == 0) parts[thread / WARP] = x;
    __syncthreads();
    float most = parts[0];
    for (u32 warp = 1; warp < warps; warp++) most = fmaxf(most, parts[warp]);
    return most;
}

// In a block whose threads stand as rows of 32: the sum over the threads of each column, which those of the first row get.
static __device__ inline float column_sum(float x) {
    __shared__ float parts[WARP][WARP + 1];
    u32 column = threadIdx.x % WARP, row = threadIdx.x / WARP, rows = blockDim.x / WARP;
    __syncthreads();
    parts[row][column] = x;
    __syncthreads();
    if (row > 0) return 0.0f;
    for (u32 other = 1; other < rows; other++) x += parts[other][column];
    return x;
}

// What an update multiplies gradients by: found on the GPU before it, or known to the host. NaN: nothing is updated.
static __device__ inline float factor_of(const float* found, float known) { return found ? *found : known; }

// A moment of an optimizer, or 0 where it is subnormal: the same bits as `denormal::flush_denormal` gives.
static __device__ inline float flush_denormal(float value) { return fabsf(value) < 1.17549435e-38f ? 0.0f : value; }

// SplitMix64's finalizer (Steele, Lea and Flood, 2014): the same bits as `dropout::mix` gives.
static __device__ inline u64 mix(u64 z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
