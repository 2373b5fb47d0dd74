// Cross-entropy of logits [tokens, vocabulary] and its gradient: a block a token. A token's result is four numbers: its loss, the
// sum of its exponentials, their log-sum-exp, and 1 if its target has the largest logit.
#include "dev.cuh"

// logits[t, j] becomes exp(logits[t, j] - max); out[t] is the result
KERNEL loss_cross_entropy(float* logits, const u32* targets, float* out, u64 vocabulary) {
    float* row = logits + u64(blockIdx.x) * vocabulary;
    float picked = row[targets[blockIdx.x]];
    float most = -INFINITY;
    // All have read the target's logit before one writes it; shuffles order no memory, and a block may be one warp.
    __syncthreads();
    for (u64 j = threadIdx.x; j < vocabulary; j += blockDim.x) most = fmaxf(most, row[j]);
    most = block_max(most);
    float sum = 0.0f;
    for (u64 j = threadIdx.x; j < vocabulary; j += blockDim.x) {
        float value = expf(row[j] - most);
        row[j] = value;
        sum += value;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        float lse = logf(sum) + most;
        float* result = out + 4 * u64(blockIdx.x);
        result[0] = lse - picked;
        result[1] = sum;
        result[2] = lse;
        result[3] = picked == most ? 1.0f : 0.0f;
    }
}

// The exponentials become the gradient: scales[t] ((1 + 2 z lse) p - smoothing / vocabulary - (1 - smoothing) [j = target])
KERNEL loss_gradient(float* exponentials, const u32* targets, const float* scales, const float* losses, float smoothing, float z,
                     u64 vocabulary) {
    float* row = exponentials + u64(blockIdx.x) * vocabulary;
    const float* loss = losses + 4 * u64(blockIdx.x);
    float scale = scales[blockIdx.x];
    float slope = scale * (1.0f + 2.0f * z * loss[2]) / loss[1];
    float shift = scale * smoothing / float(vocabulary);
    u64 target = targets[blockIdx.x];
    for (u64 j = threadIdx.x; j < vocabulary; j += blockDim.x) {
        float value = row[j] * slope - shift;
        row[j] = j == target ? value - scale * (1.0f - smoothing) : value;
    }
}

// Squared errors of one number a token, whose targets are the bits of a float; the values become the gradient. A result's other
// three numbers stay as they are.
KERNEL loss_squared(float* values, const u32* targets, const float* scales, float* out, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float error = values[i] - __uint_as_float(targets[i]);
    values[i] = 2.0f * scales[i] * error;
    out[4 * i] = error * error;
}

// totals[0] += sum_t weights[t] losses[t] in double precision, without weights each once; totals[1] += how many are right. One block.
KERNEL loss_totals(const float* losses, const float* weights, u64 count, double* totals) {
    double total = 0.0, right = 0.0;
    for (u64 t = threadIdx.x; t < count; t += blockDim.x) {
        total += double(losses[4 * t]) * (weights ? double(weights[t]) : 1.0);
        right += double(losses[4 * t + 3]);
    }
    total = block_sum(total);
    right = block_sum(right);
    if (threadIdx.x == 0) {
        totals[0] += total;
        totals[1] += right;
    }
}
