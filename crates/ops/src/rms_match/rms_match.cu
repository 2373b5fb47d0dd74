// Rows brought to the root mean square of others: a block a row of `dim` features.
#include "dev.cuh"

// out = x rms(r) / rms(x)
KERNEL TYPED(rms_match_forward)(const act* x, const act* r, act* out, float floor, u64 dim) {
    u64 start = u64(blockIdx.x) * dim;
    float own = 0.0f, target = 0.0f;
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x) {
        float a = widen(x[start + j]), b = widen(r[start + j]);
        own += a * a;
        target += b * b;
    }
    own = sqrtf(fmaxf(block_sum(own) / float(dim), floor));
    target = sqrtf(block_sum(target) / float(dim));
    float factor = target / own;
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x) store(out + start + j, widen(x[start + j]) * factor);
}

// dx = dy t / n - x <dy, x> t / (dim n^3), the last for rows above the floor; dr += r <dy, x> / (n dim t)
KERNEL TYPED(rms_match_backward)(const act* x, const act* r, const act* dy, act* dx, act* dr, float floor, u64 dim) {
    u64 start = u64(blockIdx.x) * dim;
    float own = 0.0f, target = 0.0f, along = 0.0f;
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x) {
        float a = widen(x[start + j]), b = widen(r[start + j]);
        own += a * a;
        target += b * b;
        along += widen(dy[start + j]) * a;
    }
    float mean = block_sum(own) / float(dim);
    own = sqrtf(fmaxf(mean, floor));
    target = sqrtf(block_sum(target) / float(dim));
    along = block_sum(along);
    float factor = target / own;
    float pull = mean >= floor ? along * target / (float(dim) * own * own * own) : 0.0f;
    float size = target > 0.0f ? along / (own * float(dim) * target) : 0.0f;
    for (u64 j = threadIdx.x; j < dim; j += blockDim.x) {
        u64 at = start + j;
        store(dx + at, widen(dy[at]) * factor - widen(x[at]) * pull);
        store(dr + at, widen(dr[at]) + widen(r[at]) * size);
    }
}
