// Streams side by side, [tokens, streams * dim]. Sums over streams and features are in a fixed order.
#include "dev.cuh"

// out[t, i, f] = x[t, i, f] + sum over j of c[t, i, j] x[t, j, f]; c[t, j, i] if `turned`
KERNEL TYPED(altup_mix)(const act* x, const act* coefs, act* out, i32 turned, u64 streams, u64 dim, u64 count) {
    u64 at = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= count) return;
    u64 token = at / (streams * dim), stream = at / dim % streams, feature = at % dim;
    const act* row = x + token * streams * dim + feature;
    const act* weights = coefs + token * streams * streams;
    float sum = widen(x[at]);
    for (u64 from = 0; from < streams; from++)
        sum += widen(weights[turned ? from * streams + stream : stream * streams + from]) * widen(row[from * dim]);
    store(out + at, sum);
}

// out[t, i, j] = sum over f of d[t, i, f] x[t, j, f]: a block each
KERNEL TYPED(altup_products)(const act* d, const act* x, act* out, u64 streams, u64 dim) {
    u64 token = blockIdx.x / (streams * streams), to = blockIdx.x / streams % streams, from = blockIdx.x % streams;
    d += (token * streams + to) * dim;
    x += (token * streams + from) * dim;
    float sum = 0.0f;
    for (u64 f = threadIdx.x; f < dim; f += blockDim.x) sum += widen(d[f]) * widen(x[f]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) store(out + blockIdx.x, sum);
}

// p[t, i, f] += (1 + c[t, i]) (u[t, f] - p[t, active, f]): a thread has a feature of all streams
KERNEL TYPED(altup_correct)(act* p, const act* u, const act* coefs, u64 streams, u64 dim, u64 active, u64 count) {
    u64 at = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= count) return;
    u64 token = at / dim;
    act* row = p + token * streams * dim + at % dim;
    float change = widen(u[at]) - widen(row[active * dim]);
    for (u64 stream = 0; stream < streams; stream++) {
        act* place = row + stream * dim;
        store(place, widen(*place) + (1.0f + widen(coefs[token * streams + stream])) * change);
    }
}

// out[t, i] = sum over f of d[t, i, f] (u[t, f] - p[t, f]): a block each
KERNEL TYPED(altup_changes)(const act* d, const act* u, const act* p, act* out, u64 streams, u64 dim) {
    u64 token = blockIdx.x / streams;
    d += u64(blockIdx.x) * dim;
    u += token * dim;
    p += token * dim;
    float sum = 0.0f;
    for (u64 f = threadIdx.x; f < dim; f += blockDim.x) sum += widen(d[f]) * (widen(u[f]) - widen(p[f]));
    sum = block_sum(sum);
    if (threadIdx.x == 0) store(out + blockIdx.x, sum);
}

// du[t, f] = sum over i of (1 + c[t, i]) d[t, i, f], which the active stream of d loses
KERNEL TYPED(altup_correct_backward)(act* d, const act* coefs, act* du, u64 streams, u64 dim, u64 active, u64 count) {
    u64 at = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= count) return;
    u64 token = at / dim;
    act* row = d + token * streams * dim + at % dim;
    float sum = 0.0f;
    for (u64 stream = 0; stream < streams; stream++) sum += (1.0f + widen(coefs[token * streams + stream])) * widen(row[stream * dim]);
    store(du + at, sum);
    store(row + active * dim, widen(row[active * dim]) - sum);
}

// y[t, i, f] += x[t, f] for i in first..end; y has `width` features
KERNEL TYPED(altup_add)(act* y, const act* x, u64 width, u64 dim, u64 first, u64 end, u64 count) {
    u64 at = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= count) return;
    act* row = y + at / dim * width + at % dim;
    for (u64 stream = first; stream < end; stream++) store(row + stream * dim, widen(row[stream * dim]) + widen(x[at]));
}

// out[t, f] = sum over i in first..end of y[t, i, f]
KERNEL TYPED(altup_sum)(const act* y, act* out, u64 width, u64 dim, u64 first, u64 end, u64 count) {
    u64 at = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const act* row = y + at / dim * width + at % dim;
    float sum = 0.0f;
    for (u64 stream = first; stream < end; stream++) sum += widen(row[stream * dim]);
    store(out + at, sum);
}
