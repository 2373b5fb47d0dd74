// What Mamba 2 adds to `recurrence.cu`. `steps` has the time step t, g, and d(log t)/d(raw), [tokens][heads][4].
#include "dev.cuh"

struct Heads {
    u32 count, groups, dim, state;
};

static __device__ inline u64 features(const Heads& heads) { return u64(heads.count) * heads.dim + 2ull * heads.groups * heads.state; }

// A thread a token and head. As in PyTorch, softplus is the identity beyond 20, and what is cut has no gradient.
KERNEL TYPED(mamba2_steps)(const act* dt, const float* a_log, const float* dt_bias, float low, float high, float* steps, u64 count, u32 heads) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float rate = -expf(a_log[i % heads]), x = widen(dt[i]) + dt_bias[i % heads];
    float step = x > 20.0f ? x : log1pf(expf(x)), slope = x > 20.0f ? 1.0f : 1.0f / (1.0f + expf(-x));
    float cut = step < low ? low : step > high ? high : step;
    steps[4 * i] = cut;
    steps[4 * i + 1] = rate * cut;
    steps[4 * i + 2] = step < low || step > high || step <= 0.0f ? 0.0f : slope / step;
    steps[4 * i + 3] = 0.0f;
}

// C and B of each token and group, [tokens][C, B][groups][state]; a block a token, group, and C or B
KERNEL TYPED(mamba2_rows)(const act* xbc, float* rows, u32 count, u32 groups, u32 dim, u32 width) {
    Heads heads = {count, groups, dim, width};
    u64 token = blockIdx.x / (2 * groups);
    u32 which = blockIdx.x % (2 * groups) / groups, group = blockIdx.x % groups;
    const act* from = xbc + token * features(heads) + u64(count) * dim + ((1 - which) * groups + u64(group)) * width;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) rows[u64(blockIdx.x) * width + i] = widen(from[i]);
}

// From the gradients of B and C of a group's heads and slices to those of B and C; a block a token, group, and B or C
KERNEL TYPED(mamba2_rows_backward)(const float* d_rows, act* d_xbc, u32 slices, u32 count, u32 groups, u32 dim, u32 width) {
    Heads heads = {count, groups, dim, width};
    u64 token = blockIdx.x / (2 * groups);
    u32 which = blockIdx.x % (2 * groups) / groups, group = blockIdx.x % groups, parts = count / groups * slices;
    const float* from = d_rows + ((token * count * slices + u64(group) * parts) * 2 + 1 - which) * width;
    act* to = d_xbc + token * features(heads) + u64(count) * dim + u64(blockIdx.x % (2 * groups)) * width;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        float sum = 0.0f;
        for (u32 part = 0; part < parts; part++) sum += from[u64(part) * 2 * width + i];
        store(to + i, sum);
    }
}

// From the gradients of the logarithm of t and of g to those of dt and A_log, and that of D; a thread a token and head
KERNEL TYPED(mamba2_steps_backward)(const float* steps, const float* d_steps, act* d_dt, float* d_rate, float* d_d, u64 count,
                                    u32 slices) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float d_step = 0.0f, d_g = 0.0f, sum = 0.0f;
    for (u32 slice = 0; slice < slices; slice++) {
        const float* part = d_steps + (i * slices + slice) * 3;
        d_step += part[0];
        d_g += part[1];
        sum += part[2];
    }
    store(d_dt + i, (d_step + d_g * steps[4 * i + 1]) * steps[4 * i + 2]);
    d_rate[i] = d_g * steps[4 * i + 1];
    d_d[i] = sum;
}
