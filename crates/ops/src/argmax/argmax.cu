// A token's largest feature.
#include "dev.cuh"

// NaN is above all else.
static __device__ inline bool above(float value, float top) { return value > top || value != value; }

// out[t] = the first j with the largest x[t, j], or ~0 if one is NaN or the largest is infinite; a block a token
KERNEL argmax_rows(const float* x, u32* out, u64 features) {
    __shared__ float values[256];
    __shared__ u32 places[256];
    const float* row = x + u64(blockIdx.x) * features;
    float best = -INFINITY;
    u32 place = 0;
    for (u64 j = threadIdx.x; j < features; j += blockDim.x)
        if (above(row[j], best)) {
            best = row[j];
            place = u32(j);
        }
    values[threadIdx.x] = best;
    places[threadIdx.x] = place;
    __syncthreads();
    for (u32 half = 128; half > 0; half /= 2) {
        u32 other = threadIdx.x + half;
        if (threadIdx.x < half && other < blockDim.x) {
            bool better = above(values[other], values[threadIdx.x]);
            bool earlier = values[other] == values[threadIdx.x] && places[other] < places[threadIdx.x];
            if (better || earlier) {
                values[threadIdx.x] = values[other];
                places[threadIdx.x] = places[other];
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = fabsf(values[0]) < INFINITY ? places[0] : ~0u;
}
