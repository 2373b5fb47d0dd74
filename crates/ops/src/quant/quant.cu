// Matrices of 4 and 8 bits a number: coding and widening, to the bit as the CPU does both. Where it adds to a product, the two are rounded
// apart here too.
#include "dev.cuh"

// Four numbers that are written at once.
template <class T> struct alignas(4 * sizeof(T)) Quad {
    T at[4];
};

// to[i] = from[i] for i < count, rounded where T has fewer bits; four at once where they lie so.
template <class T> static __device__ inline void put(T* to, const float (&from)[4], u32 count) {
    if (count == 4 && reinterpret_cast<u64>(to) % sizeof(Quad<T>) == 0) {
        Quad<T> quad;
        for (u32 j = 0; j < 4; j++) store(quad.at + j, from[j]);
        *reinterpret_cast<Quad<T>*>(to) = quad;
    } else {
        for (u32 j = 0; j < count; j++) store(to + j, from[j]);
    }
}

static __device__ inline bool is_odd(float x) { return (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u; }

// The scale of a block: its own, or map[code] absmax + offset, an absmax for `size` codes.
static __device__ inline float scale_of(const float* scales, const u8* nested, const float* map, u64 size, float offset, u64 block) {
    if (!nested) return scales[block];
    return __fadd_rn(__fmul_rn(map[nested[block]], scales[block / size]), offset);
}

KERNEL quant_scales(const float* absmax, const u8* nested, const float* map, u64 size, float offset, u64 count, float* out) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) out[i] = scale_of(absmax, nested, map, size, offset, i);
}

// out[i] = table[code] scale, of number start + i; a thread has four. A block has 1 << shift numbers. Two codes a byte, the first in the
// high half.
template <class T>
static __device__ inline void widen_four(const u8* codes, const float* table, const float* scales, const u8* nested, const float* map, u64 size,
                                         float offset, u32 shift, u64 start, u64 count, T* out) {
    u64 i = 4 * (u64(blockIdx.x) * blockDim.x + threadIdx.x), at = start + i;
    if (i >= count) return;
    float values[4];
    u32 here = u32(min(u64(4), count - i));
    if (at % 4 == 0 && here == 4) {
        // All in one block, in two bytes.
        float scale = scale_of(scales, nested, map, size, offset, at >> shift);
        u8 first = codes[at / 2], second = codes[at / 2 + 1];
        values[0] = table[first >> 4] * scale;
        values[1] = table[first & 15] * scale;
        values[2] = table[second >> 4] * scale;
        values[3] = table[second & 15] * scale;
    } else {
        for (u32 j = 0; j < here; j++, at++) {
            u8 pair = codes[at / 2];
            values[j] = table[at % 2 ? pair & 15 : pair >> 4] * scale_of(scales, nested, map, size, offset, at >> shift);
        }
    }
    put(out + i, values, here);
}

KERNEL quant_widen_four_float(const u8* codes, const float* table, const float* scales, const u8* nested, const float* map, u64 size,
                              float offset, u32 shift, u64 start, u64 count, float* out) {
    widen_four(codes, table, scales, nested, map, size, offset, shift, start, count, out);
}

KERNEL quant_widen_four_f16(const u8* codes, const float* table, const float* scales, const u8* nested, const float* map, u64 size,
                            float offset, u32 shift, u64 start, u64 count, f16* out) {
    widen_four(codes, table, scales, nested, map, size, offset, shift, start, count, out);
}

KERNEL quant_widen_four_bf16(const u8* codes, const float* table, const float* scales, const u8* nested, const float* map, u64 size,
                             float offset, u32 shift, u64 start, u64 count, bf16* out) {
    widen_four(codes, table, scales, nested, map, size, offset, shift, start, count, out);
}

// The number of an FP8 code: sign, four bits of exponent with bias 7, three of fraction; no infinities.
static __device__ inline float of_fp8(u8 code) {
    u32 exponent = code >> 3 & 15, fraction = code & 7;
    if (exponent == 15 && fraction == 7) return NAN;
    float size = exponent ? __uint_as_float(((exponent + 120) << 23) | (fraction << 20)) : float(fraction) * (1.0f / 512.0f);
    return code & 0x80 ? -size : size;
}

// The code of the nearest number, ties to even; beyond the largest, the largest.
static __device__ inline u8 to_fp8(float x) {
    u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80;
    float size = fabsf(x);
    if (!(size == size)) return u8(sign | 0x7f);
    size = fminf(size, 448.0f);
    if (size < 0.015625f) return u8(sign | u32(rintf(size * 512.0f)));
    bits = __float_as_uint(size);
    return u8(sign | (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3)));
}

// out[i] = code scale / 127, or the FP8 number of the code times the scale, of number start + i; a thread has four
template <class T>
static __device__ inline void widen_eight(const u8* codes, const float* scales, u64 width, i32 fp8, u64 start, u64 count, T* out) {
    u64 i = 4 * (u64(blockIdx.x) * blockDim.x + threadIdx.x), at = start + i;
    if (i >= count) return;
    u64 row = at / width, left = width - at % width;
    u32 here = u32(min(u64(4), count - i));
    float values[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 j = 0; j < here; j++) {
        values[j] = fp8 ? of_fp8(codes[at + j]) * scales[row]
                        : float(static_cast<signed char>(codes[at + j])) * scales[row] * 7.874016e-3f;
        if (--left == 0) {
            row++;
            left = width;
        }
    }
    put(out + i, values, here);
}

KERNEL quant_widen_eight_float(const u8* codes, const float* scales, u64 width, i32 fp8, u64 start, u64 count, float* out) {
    widen_eight(codes, scales, width, fp8, start, count, out);
}

KERNEL quant_widen_eight_f16(const u8* codes, const float* scales, u64 width, i32 fp8, u64 start, u64 count, f16* out) {
    widen_eight(codes, scales, width, fp8, start, count, out);
}

KERNEL quant_widen_eight_bf16(const u8* codes, const float* scales, u64 width, i32 fp8, u64 start, u64 count, bf16* out) {
    widen_eight(codes, scales, width, fp8, start, count, out);
}

// out[i] = (code - zero) scale of number start + i, a scale and a zero for each tile of high x wide numbers, `across` tiles side by side; or
// column c has tile groups[c] of its row. Kind 0: FP8, without zeros; 1: signed bytes, 128 less than their codes; 2: 4 bits, the first in
// the high half. A thread has four.
template <class T>
static __device__ inline void widen_tiles(const u8* codes, const float* scales, const u8* zeros, float zero, const u32* groups, u64 width,
                                          u64 high, u64 wide, u64 across, u32 kind, u64 start, u64 count, T* out) {
    u64 i = 4 * (u64(blockIdx.x) * blockDim.x + threadIdx.x), at = start + i;
    if (i >= count) return;
    u64 row = at / width, column = at % width;
    u32 here = u32(min(u64(4), count - i));
    float values[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 j = 0; j < here; j++, at++) {
        u64 tile = row / high * across + (groups ? u64(groups[column]) : column / wide);
        float from = zeros ? float(zeros[tile]) : zero, code;
        if (kind == 0) {
            code = of_fp8(codes[at]);
        } else if (kind == 1) {
            code = float(static_cast<signed char>(codes[at])) - (from - 128.0f);
        } else {
            u8 pair = codes[at / 2];
            code = float(at % 2 ? pair & 15 : pair >> 4) - from;
        }
        values[j] = code * scales[tile];
        if (++column == width) {
            row++;
            column = 0;
        }
    }
    put(out + i, values, here);
}

KERNEL quant_widen_tiles_float(const u8* codes, const float* scales, const u8* zeros, float zero, const u32* groups, u64 width, u64 high, u64 wide,
                               u64 across, u32 kind, u64 start, u64 count, float* out) {
    widen_tiles(codes, scales, zeros, zero, groups, width, high, wide, across, kind, start, count, out);
}

KERNEL quant_widen_tiles_f16(const u8* codes, const float* scales, const u8* zeros, float zero, const u32* groups, u64 width, u64 high, u64 wide,
                             u64 across, u32 kind, u64 start, u64 count, f16* out) {
    widen_tiles(codes, scales, zeros, zero, groups, width, high, wide, across, kind, start, count, out);
}

KERNEL quant_widen_tiles_bf16(const u8* codes, const float* scales, const u8* zeros, float zero, const u32* groups, u64 width, u64 high, u64 wide,
                              u64 across, u32 kind, u64 start, u64 count, bf16* out) {
    widen_tiles(codes, scales, zeros, zero, groups, width, high, wide, across, kind, start, count, out);
}

// Rows of `width` numbers in FP8, a block a row: the scale is the largest magnitude over 448. `odd`, if any, becomes 1 where a number is
// not finite.
template <class T>
static __device__ inline void code_fp8(const T* values, u64 len, u64 width, u8* codes, float* scales, u32* odd) {
    u64 start = u64(blockIdx.x) * width, count = min(width, len - start);
    float most = 0.0f;
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) {
        float x = widen(values[start + i]);
        most = fmaxf(most, fabsf(x));
        if (odd && is_odd(x)) *odd = 1;
    }
    float scale = __fdiv_rn(block_max(most), 448.0f);
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    for (u64 i = threadIdx.x; i < count; i += blockDim.x)
        codes[start + i] = scale > 0.0f ? to_fp8(__fdiv_rn(widen(values[start + i]), scale)) : u8(0);
}

KERNEL quant_code_fp8_float(const float* values, u64 len, u64 width, u8* codes, float* scales, u32* odd) {
    code_fp8(values, len, width, codes, scales, odd);
}

KERNEL quant_code_fp8_f16(const f16* values, u64 len, u64 width, u8* codes, float* scales, u32* odd) {
    code_fp8(values, len, width, codes, scales, odd);
}

KERNEL quant_code_fp8_bf16(const bf16* values, u64 len, u64 width, u8* codes, float* scales, u32* odd) {
    code_fp8(values, len, width, codes, scales, odd);
}

// The transpose of a matrix [rows, width] in FP8, coded by its own rows: a block has 32 columns, 8 threads each.
KERNEL quant_turn_fp8(const u8* codes, const float* scales, u64 rows, u64 width, u8* to, float* to_scales) {
    __shared__ float parts[WARP][WARP + 1];
    u32 lane = threadIdx.x % WARP, first = threadIdx.x / WARP, step = blockDim.x / WARP;
    u64 column = u64(blockIdx.x) * WARP + lane;
    bool inside = column < width;
    float most = 0.0f;
    if (inside)
        for (u64 row = first; row < rows; row += step) most = fmaxf(most, fabsf(of_fp8(codes[row * width + column]) * scales[row]));
    parts[first][lane] = most;
    __syncthreads();
    for (u32 other = 0; other < step; other++) most = fmaxf(most, parts[other][lane]);
    if (!inside) return;
    float scale = __fdiv_rn(most, 448.0f);
    if (first == 0) to_scales[column] = scale;
    for (u64 row = first; row < rows; row += step) {
        float x = of_fp8(codes[row * width + column]) * scales[row];
        to[column * rows + row] = scale > 0.0f ? to_fp8(__fdiv_rn(x, scale)) : u8(0);
    }
}

// The code of a number in -1..1, by how many bounds are below it.
static __device__ inline u8 code_of(float x, const float* bounds, const u8* order) {
    u32 below = 0;
    for (u32 i = 0; i < 15; i++) below += bounds[i] < x;
    return order[below];
}

// A warp a block of numbers: its scale, and two codes a byte. The last block may be shorter: its numbers are divided by the scale, others
// multiplied by its inverse. *odd becomes 1 where a number is NaN or infinite.
KERNEL quant_code_four(const float* values, u64 len, u64 block, const float* bounds, const u8* order, u8* codes, float* scales, u32* odd) {
    u64 index = u64(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP, start = index * block;
    u32 lane = threadIdx.x % WARP;
    if (start >= len) return;
    u64 count = min(block, len - start);
    const float* from = values + start;
    float most = 0.0f;
    for (u64 i = lane; i < count; i += WARP) {
        most = fmaxf(most, fabsf(from[i]));
        if (is_odd(from[i])) *odd = 1;
    }
    most = warp_max(most);
    bool whole = count == block;
    float least = fmaxf(most, 1e-38f), inverse = __fdiv_rn(1.0f, least);
    if (lane == 0) scales[index] = whole ? most : least;
    for (u64 i = 2 * lane; i < count; i += 2 * WARP) {
        float high = from[i], low = i + 1 < count ? from[i + 1] : 0.0f;
        high = whole ? __fmul_rn(high, inverse) : __fdiv_rn(high, least);
        low = whole ? __fmul_rn(low, inverse) : __fdiv_rn(low, least);
        codes[(start + i) / 2] = u8(code_of(high, bounds, order) << 4 | code_of(low, bounds, order));
    }
}

// A block of threads a row: its scale and its codes. *odd becomes 1 where a number is NaN or infinite.
KERNEL quant_code_eight(const float* values, u64 len, u64 width, u8* codes, float* scales, u32* odd) {
    u64 start = u64(blockIdx.x) * width, count = min(width, len - start);
    float most = 0.0f;
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) {
        most = fmaxf(most, fabsf(values[start + i]));
        if (is_odd(values[start + i])) *odd = 1;
    }
    most = block_max(most);
    if (threadIdx.x == 0) scales[blockIdx.x] = most;
    float factor = __fdiv_rn(127.0f, most);
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) {
        // A row of zeros: 0 times infinity is NaN, and that becomes 0.
        float code = rintf(__fmul_rn(values[start + i], factor));
        code = code == code ? fminf(fmaxf(code, -128.0f), 127.0f) : 0.0f;
        codes[start + i] = u8(i32(code));
    }
}

// The lowest level of PyTorch's sum: a warp adds `step` rows of 32 numbers, a lane each.
KERNEL quant_sum_chunks(const float* values, u64 step, u64 chunks, float* parts) {
    u64 chunk = u64(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    u32 lane = threadIdx.x % WARP;
    if (chunk >= chunks) return;
    const float* from = values + chunk * step * WARP + lane;
    float sum = 0.0f;
    for (u64 row = 0; row < step; row++) sum += from[row * WARP];
    parts[chunk * WARP + lane] = sum;
}

// The levels above, by one warp: each adds 1 << power sums of the one below. Then what is left over, and the lanes.
KERNEL quant_sum(const float* values, u64 len, const float* parts, u32 power, float* out) {
    __shared__ float lanes[WARP];
    u32 lane = threadIdx.x;
    u64 step = u64(1) << power, size = len / WARP, chunks = size >> power, mask = step - 1;
    float level0 = 0.0f, level1 = 0.0f, level2 = 0.0f, level3 = 0.0f;
    for (u64 chunk = 0; chunk < chunks; chunk++) {
        u64 at = (chunk + 1) * step;
        level1 += parts[chunk * WARP + lane];
        if (at & (mask << power)) continue;
        level2 += level1;
        level1 = 0.0f;
        if (at & (mask << (2 * power))) continue;
        level3 += level2;
        level2 = 0.0f;
    }
    for (u64 row = chunks * step; row < size; row++) level0 += values[row * WARP + lane];
    float sum = ((level0 + level1) + level2) + level3;
    // Vectors of eight that fill no row go to the first of its four.
    for (u64 first = size * WARP; first + 8 <= len; first += 8)
        if (lane < 8) sum += values[first + lane];
    lanes[lane] = sum;
    __syncthreads();
    if (lane > 0) return;
    float total = 0.0f;
    if (len >= 8) {
        for (u64 i = len / 8 * 8; i < len; i++) total += values[i];
        for (u32 i = 0; i < 8; i++) total += ((lanes[i] + lanes[i + 8]) + lanes[i + 16]) + lanes[i + 24];
    } else {
        float rows[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        u64 first = len / 4 * 4;
        for (u64 i = 0; i < first; i++) rows[i] += values[i];
        for (u64 i = first; i < len; i++) rows[0] += values[i];
        total = ((rows[0] + rows[1]) + rows[2]) + rows[3];
    }
    *out = total;
}

// A block of 256 threads for 256 scales: for each the code whose value is nearest to (scale - offset) / absmax. bitsandbytes finds it by the
// middle of one of 65,536 cells.
KERNEL quant_code_scales(const float* scales, u64 count, float offset, const float* bounds, u8* codes, float* absmax) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    float x = i < count ? __fsub_rn(scales[i], offset) : 0.0f;
    float most = block_max(fabsf(x));
    if (threadIdx.x == 0) absmax[blockIdx.x] = most;
    if (i >= count) return;
    u32 low = 0;
    if (most > 0.0f) {
        x = __fmul_rn(x, __fdiv_rn(1.0f, most));
        float place = __fadd_rn(__fmul_rn(__fmul_rn(__fadd_rn(x, 1.0f), 0.5f), 65535.0f), 0.5f);
        double cell = double(u32(fminf(fmaxf(place, 0.0f), 65535.0f)));
        float middle = float(__dadd_rn(2.0 * cell / 65535.0, -1.0));
        for (u32 high = 255; low < high;) {
            u32 at = (low + high) / 2;
            if (bounds[at] < middle) {
                low = at + 1;
            } else {
                high = at;
            }
        }
    }
    codes[i] = u8(low);
}
