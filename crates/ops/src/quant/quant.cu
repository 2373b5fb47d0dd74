// Numbers of 4 and 8 bits widened to float32, a thread a number.
#include "dev.cuh"

// out[i] = lookup[code] scale, of the numbers from `start` on; two codes a byte, the first in the high half. The scale of a block of
// 1 << shift numbers is scales[block], or, with codes of scales, lookup[16 + code] scales[block / outer] + offset.
KERNEL quant_widen_four(const u8* codes, const float* scales, const u8* nested, const float* lookup, u32 shift, u64 outer, float offset,
                        u64 start, float* out, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    u64 at = start + i, block = at >> shift;
    u8 pair = codes[at / 2];
    float scale = nested ? __fadd_rn(__fmul_rn(lookup[16 + nested[block]], scales[block / outer]), offset) : scales[block];
    out[i] = lookup[at % 2 ? pair & 15 : pair >> 4] * scale;
}

// out[i] = code scale[row] / 127
KERNEL quant_widen_eight(const u8* codes, const float* scales, u64 width, u64 start, float* out, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    u64 at = start + i;
    out[i] = float((signed char)codes[at]) * scales[at / width] * 7.874016e-3f;
}
