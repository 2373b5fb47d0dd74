//! The operations of a decoder, each with its forward and its backward pass, on activations `[tokens, features]`.
//!
//! Each operation is a folder. `mod.rs` is its interface: formulas, shapes, assertions, the allocation of results, and
//! the only `match` on the [device](tunesmith_device::Device). `cpu.rs` has the kernels for the CPU, written once over
//! [`simd::Simd`]. `<op>.cu` has the kernels for GPUs, and `cuda.rs` launches them. `reference.rs` has the definition
//! in f64. Tests compare all of these at every SIMD level and on a GPU, and compare gradients with finite differences
//! ([`testing`]). `CONTRIBUTING.md` shows how to add an operation.
//!
//! In the tables below, `x[t, j]` is feature j of token t. `d` before a name is the gradient of the loss with respect
//! to it. Unless something else is said, an operand is an activation `[tokens, features]`. Batches have no padding:
//! `cu_seqlens` says where their sequences begin and end.
//!
//! | memory | |
//! |---|---|
//! | [`activation::Activation`] | an activation `[tokens, features]` on a device; on the CPU in panels of 16 tokens |
//! | [`activation::Pool`] | lends memory to activations, so that a training step allocates nothing once all buffers exist |
//! | [`Activation::gather`](activation::Activation::gather) | `y[i] = x[rows[i]]`, `[rows.len(), features]` |
//! | [`Activation::scatter`](activation::Activation::scatter) | `y[rows[i]] = x[i]`, other rows zero |
//! | [`floats::Floats`], [`FloatsMut`](floats::FloatsMut) | borrowed numbers `[n]` on a device: weights, trained values, gradients, optimizer state |
//!
//! | elementwise | |
//! |---|---|
//! | [`elementwise`] | `c x`, `x + y`, `x - y`, `a x + b y`; `y[t, j] + bias[j]`, `bias [features]`, and its gradient |
//! | [`feature_scale`] | `y[t, j] = gain[j] v[t, j]`, `gain [features]`: `DoRA`, (IA)³ |
//! | [`softcap`] | `cap * tanh(x / cap)` |
//! | [`clamp`] | `min(max(x, low), high)` |
//!
//! | products | |
//! |---|---|
//! | [`gemm::matmul`] | `out[t, m] = init + sum_k W[m, k] x[t, k]`; `W [m, k]` or transposed, floats or quantized; one or more terms |
//! | [`gemm::matmul_grouped`] | several such products, `out_i = init_i + W_i x_i`, as one parallel job: q, k and v; gate and up |
//! | [`gemm::outer`] | `dW[m, n] += sum_t y[t, m] x[t, n]`: a weight's gradient |
//! | [`block_diagonal`] | `out[t, b] = x[t, b] D_b`, `D [blocks, size, size]`, and `dD_b = sum_t x[t, b]^T d[t, b]`: OFT |
//! | [`low_rank::row_norms`] | the norm of each row of `W + s B A`, `[out_features]`; `A [rank, in]`, `B [out, rank]`: `DoRA` |
//!
//! | norm | |
//! |---|---|
//! | [`rms_norm`] | `x / sqrt(mean(x^2) + eps) * (weight + offset)`, in groups that share a `weight [dim]` or have their own |
//! | [`layer_norm`] | `(x - mean) / sqrt(var + eps) * weight + bias`, `weight` and `bias` `[features]` |
//! | [`group_norm`] | the same, with mean and variance over all places of a picture and the features of a group; forward only |
//!
//! | convolutions of a picture | |
//! |---|---|
//! | [`conv2d`] | `y[m] = bias[m] + sum over k, i, j of W[m, k, i, j] x[k]` at the places that the kernel sees; forward only |
//!
//! | rotary embedding | |
//! |---|---|
//! | [`rope::Rope`] | pair i of each head is rotated by the angle `position[t] * inv_freq[i]`; backward rotates the other way |
//!
//! | attention | |
//! |---|---|
//! | [`attention`] | `softmax(cap(scale q k^T)) v` per head, `q [rows, query * head_dim]`, `k` and `v` `[tokens, kv * …]` |
//! | [`attention::decode`] | the same for single queries over key-value caches: generation |
//! | [`latent_attention`] | multi-head latent attention of single queries over a cache of latents, with absorbed projections |
//! | [`latent_heads`] | the keys and values of all heads from a token's projections in multi-head latent attention |
//! | [`spans`] | where the sequences of a batch lie, and which keys their queries see |
//!
//! | recurrent mixers | |
//! |---|---|
//! | [`causal_conv1d`] | `y[t, c] = sum_j weight[c, kernel - 1 - j] x[t - j, c]` within each sequence, then SiLU if asked |
//! | [`gated_delta_rule`] | each head's state `[key_dim, value_dim]` decays and is corrected token by token |
//! | [`mamba2`] | each head's state `[state, dim]` decays and adds each token: `y = S'^T C + D x` |
//! | [`recurrence::State`] | such states of a text, kept from one pass to the next |
//!
//! | gated MLP | |
//! |---|---|
//! | [`gated_mlp`] | `act(gate) * up`: SiLU, GELU by erf or tanh, a sigmoid, or no function |
//! | [`feature_repeat`] | `y[t, f * times + i] = x[t, f]`: a head's gate for all of its features; the gradient's sums |
//! | [`pointwise`] | `act(x)` of a plain MLP: GELU by erf or tanh, `x sigmoid(1.702 x)`, SiLU, `ReLU`, its square; `tanh(x)` |
//! | [`gaussian_topk`] | `max(x - (mean + m std), 0)` with mean and deviation of each token's features |
//!
//! | several streams | |
//! |---|---|
//! | [`altup`] | streams side by side, `[tokens, streams * dim]`: `x_i + sum_j c[i, j] x_j`; `p_i + (1 + c[i]) (u - p_active)` |
//! | [`rms_match`] | `x rms(r) / rms(x)` |
//!
//! | experts | |
//! |---|---|
//! | [`route::route`] | the `k` largest of `softmax(logits)`, `logits [tokens, experts]`, and their weights |
//! | [`route::Routing`] | `x` of an expert's tokens; `out[t] += w[t, e] y_e[t]`; the gradients of both and of the logits |
//! | [`route::Routing::groups`] | the experts in use, in groups whose products are computed together |
//! | [`route::SigmoidGate`] | `y[t] * sigmoid(logit[t])`, `logits [tokens, 1]` |
//!
//! | embedding | |
//! |---|---|
//! | [`embedding`] | `x[t] = scale * table[tokens[t]]`, `table [vocabulary, features]`; `d_table[tokens[t]] += scale * dx[t]` |
//! | [`argmax`] | `argmax_j x[t, j]`, `[tokens]` |
//!
//! | loss | |
//! |---|---|
//! | [`loss`] | `logsumexp(l[t]) - l[t, target[t]]`, `l [tokens, vocabulary]`; label smoothing, z-loss; squared errors |
//! | [`loss::linear`] | the same of `l = softcap(W h)`, `h [tokens, hidden]`, with `dh` and `dW`, chunk by chunk |
//!
//! | dropout and noise | |
//! |---|---|
//! | [`dropout`] | `x / (1 - rate)` or 0; the mask is a function of seed, step, module, row, and feature |
//! | [`noise`] | `x + u`, `u` uniform in `±alpha / sqrt(length * features)`: `NEFTune` |
//!
//! | narrow | |
//! |---|---|
//! | [`narrow::Narrow`] | an activation rounded to bfloat16 or float16 and back |
//!
//! | quantization | |
//! |---|---|
//! | [`quant`] | matrices in NF4, FP4 and int8 as bitsandbytes stores them, in FP8, and in the formats of checkpoints: `table[code] * scale[block]` |
//!
//! | optimizers, on numbers `[n]` | |
//! |---|---|
//! | [`adamw`], [`adamw_8bit`], [`lion`], [`sgd`] | one step of values `[n]` by gradients `[n]`, with their state |
//! | [`accumulate`] | `s += g`, `s` in float32 or bfloat16: gradients of several passes |
//! | [`ema`] | `a + weight (x - a)`: a moving average |
//! | [`squares`] | `sum_i x[i]^2` in f64, for the gradient norm; on a GPU also the factor that clips by it |
//!
//! [`simd`] has the vector instructions, [`par`] shares work among threads, and [`peak`] measures what the machine can
//! do.
#![allow(clippy::inline_always, reason = "a kernel must be inlined into the function that enables its instructions")]
pub mod accumulate;
pub mod activation;
pub mod adamw;
pub mod adamw_8bit;
pub mod altup;
pub mod argmax;
pub mod attention;
pub mod block_diagonal;
pub mod causal_conv1d;
pub mod clamp;
pub mod conv2d;
mod cuda;
pub mod denormal;
pub mod dropout;
pub mod elementwise;
pub mod ema;
pub mod embedding;
pub mod factor;
pub mod feature_repeat;
pub mod feature_scale;
pub mod fp8;
pub mod gated_delta_rule;
pub mod gated_mlp;
pub mod gaussian_topk;
pub mod gemm;
pub mod group_norm;
#[cfg(test)]
mod halves_mixers_tests;
#[cfg(test)]
mod halves_tests;
pub mod latent_attention;
pub mod latent_heads;
pub mod layer_norm;
pub mod lion;
pub mod loss;
pub mod low_rank;
pub mod mamba2;
pub mod narrow;
pub mod noise;
pub mod par;
pub mod peak;
pub mod pointwise;
pub mod quant;
pub mod recurrence;
pub mod rms_match;
pub mod rms_norm;
pub mod rope;
pub mod route;
mod scratch;
pub mod sgd;
pub mod simd;
pub mod softcap;
pub mod spans;
pub mod squares;
pub mod testing;
mod upcoming;

/// Borrowed float32 numbers in a device's memory, from [`tunesmith_device`]: the operands that are not activations.
pub mod floats {
    pub use tunesmith_device::{Floats, FloatsMut};
}
