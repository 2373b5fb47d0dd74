//! `tunesmith bench --mode decode`: generation speed on random weights of a shape, compared with the memory bandwidth.
//!
//! Each decoding step reads every weight once, whatever the batch size. So the bandwidth limits the steps per second.
use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;

use super::training::{base, wait};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::Arch;
use tunesmith_config::{Config, Mode, Quantization, TargetModules};
use tunesmith_device::{Array, Device};
use tunesmith_eval::{Go, Settings, Watcher, generate};
use tunesmith_model::Model;
use tunesmith_model::device::kernels;
use tunesmith_model::stack::Stack;
use tunesmith_model::weights::WeightFiles;
use tunesmith_ops::peak;
use tunesmith_telemetry::machine::peak_bytes;

/// The settings of the benchmark.
#[derive(Debug, Clone)]
pub struct DecodeRequest {
    /// Name of a built-in shape, or path of a `config.json`.
    pub shape: String,
    /// A model folder whose weights are used, in the place of random ones of `shape`.
    pub model: Option<PathBuf>,
    /// The configuration, for the type of the weights.
    pub config: Config,
    /// Batch sizes; each is one run.
    pub batches: Vec<usize>,
    /// Length of each prompt, in tokens.
    pub prompt: usize,
    /// Generated tokens of each sequence, after the first.
    pub tokens: usize,
}

/// The result of one batch size.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct DecodeRun {
    /// Sequences that are generated together.
    pub batch: usize,
    /// Generated tokens per second of all sequences, while all of them are answered: from the last one's first token to the end of the
    /// first one.
    pub tokens_per_second: f64,
    /// Prompt tokens per second, all sequences together.
    pub prompt_tokens_per_second: f64,
    /// Bytes of weights read per second, divided by the memory bandwidth.
    pub bandwidth_share: f64,
}

/// The result of the benchmark.
#[derive(Debug, Clone, Serialize)]
pub struct DecodeOutcome {
    /// One run for each batch size.
    pub runs: Vec<DecodeRun>,
    /// Memory bandwidth in bytes per second: read by all threads; of a GPU, read and written by a copy.
    pub read_bandwidth: f64,
    /// Bytes of weights that a decoding step reads.
    pub weight_bytes: f64,
    /// Peak memory of the process, in bytes.
    pub peak_bytes: u64,
    /// Vector instruction set in use.
    pub simd: String,
    /// Threads that shared the work.
    pub threads: usize,
}

/// Measures generation while all sequences are being answered: from the first token of the last one until the first of them
/// ends. Before that, prompts that a pass has no room for are read while other sequences are answered.
struct Clock {
    /// The length of each answer.
    lengths: Vec<usize>,
    /// The length of a whole one.
    most: usize,
    /// When the last sequence had its first token.
    first: Option<Instant>,
    /// Tokens since then, and when the last of them came.
    tokens: usize,
    last: Instant,
    /// The sequence that got the last token. Within a step, the numbers of sequences rise.
    text: usize,
    ended: bool,
}

impl Watcher for Clock {
    fn token(&mut self, text: usize, tokens: &[u32]) -> Result<Go> {
        self.ended |= text <= self.text && self.lengths.contains(&self.most);
        (self.text, self.lengths[text]) = (text, tokens.len());
        if self.ended {
            return Ok(Go::On);
        }
        if self.first.is_some() {
            (self.tokens, self.last) = (self.tokens + 1, Instant::now());
        } else if !self.lengths.contains(&0) {
            self.last = Instant::now();
            self.first = Some(self.last);
        }
        Ok(Go::On)
    }
}

/// Bytes of the matrices that one token is multiplied with. `block` and `head` are the bytes of a number in the blocks
/// and in the head. Of the experts, only those that a token is routed to count.
fn weight_bytes(arch: &Arch, block: f64, head: f64) -> f64 {
    let of = |linear: &tunesmith_config::arch::LinearSpec| (linear.in_features * linear.out_features) as f64;
    // The modules of the blocks, and the head, which is a matrix of its own or the embedding.
    let linears: f64 = arch.linear_modules().iter().filter(|linear| !linear.is_head()).map(of).sum();
    block * linears + head * (arch.vocab_size * arch.hidden_size) as f64
}

/// Memory bandwidth in bytes per second: for the CPU, what its threads read; for a GPU, what a copy reads and writes.
fn bandwidth(device: Device) -> f64 {
    if device == Device::Cpu {
        return peak::read_bandwidth(0.5);
    }
    let (mut count, mut rate) = (1 << 20, 0.0f64);
    loop {
        let (from, mut to) = (Array::<f32>::zeros(device, count), Array::<f32>::zeros(device, count));
        let mut best = f64::INFINITY;
        for _ in 0..8 {
            wait(device);
            let began = Instant::now();
            to.view_mut().copy_from(from.view());
            wait(device);
            best = best.min(began.elapsed().as_secs_f64());
        }
        rate = rate.max(8.0 * count as f64 / best);
        // Large enough for the time of a launch not to matter.
        if best > 1e-3 || count >= 1 << 28 {
            return rate;
        }
        count *= 4;
    }
}

/// Measures each batch size after a short warm-up run.
///
/// # Errors
/// The shape is unknown, or the model cannot be loaded, or its bytes are of a format whose reading is not counted here.
pub fn run(request: &DecodeRequest) -> Result<DecodeOutcome> {
    let (arch, weights) = base(request.model.as_deref(), &request.shape)?;
    let mut config = request.config.clone();
    // A model trains something: the least that a quantized base allows.
    config.tuning.mode = Mode::Lora;
    config.tuning.lora.r = 1;
    let first = arch.linear_modules().into_iter().find(|module| !module.is_head());
    config.tuning.lora.target_modules = TargetModules::List(first.map(|module| module.name).into_iter().collect());
    if let Some(stored) = weights.as_ref().and_then(WeightFiles::quantization) {
        let of_bitsandbytes = weights.as_ref().and_then(WeightFiles::bitsandbytes).map(|it| it.quantization);
        config.model.quantization = of_bitsandbytes.ok_or_else(|| {
            Error::config(format!("--mode decode: not yet: a base that is stored as {}", stored.name()))
                .hint("measure its shape: --shape DIR/config.json, with --quantization")
        })?;
    }
    let model = Model::load_for_inference(&arch, weights.as_ref(), &config, &Stack::default())?;
    let narrow = config.model.dtype == tunesmith_config::Dtype::Bfloat16;
    let each = if narrow { 2.0 } else { 4.0 };
    // In 4 bits also the scales, one for each 64 numbers: nested they are bytes, rearranged for the CPU they are floats.
    let scale = if model.device() == Device::Cpu { 4.0 } else { 1.0 };
    let coded = match config.model.quantization {
        Quantization::Nf4 | Quantization::Fp4 => 0.5 + scale / 64.0,
        Quantization::Int8 | Quantization::Fp8 => 1.0,
        _ => each,
    };
    let weight_bytes = weight_bytes(&arch, coded, if config.generation.quantize_head { coded } else { each });
    let bandwidth_before = bandwidth(model.device());
    let prompt = |text: usize| -> Vec<u32> {
        (0..request.prompt).map(|at| ((text * 7919 + at * 104_729 + at * at * 31) % arch.vocab_size) as u32).collect()
    };
    let mut measured = Vec::new();
    for &batch in &request.batches {
        let prompts: Vec<Vec<u32>> = (0..batch).map(prompt).collect();
        let settings =
            |tokens: usize| Settings { batch_size: Some(batch), ..Settings::greedy(tokens, usize::MAX, Vec::new()) };
        generate(&model, &prompts, &settings(4), &mut Clock::new(batch, 4))?;
        let (began, mut clock) = (Instant::now(), Clock::new(batch, request.tokens + 1));
        generate(&model, &prompts, &settings(request.tokens + 1), &mut clock)?;
        let first = clock.first.filter(|_| clock.tokens > 0).ok_or_else(|| {
            let error = format!("--steps {}: the first sequences end before all prompts are read", request.tokens);
            Error::config(error).hint("take more steps, a shorter --seq, or a smaller --batch")
        })?;
        let (reading, writing) = ((first - began).as_secs_f64(), (clock.last - first).as_secs_f64());
        measured.push((batch, reading, clock.tokens as f64, writing));
    }
    let read_bandwidth = bandwidth(model.device()).max(bandwidth_before);
    let of = |(batch, reading, tokens, writing): (usize, f64, f64, f64)| DecodeRun {
        batch,
        tokens_per_second: tokens / writing,
        prompt_tokens_per_second: (batch * request.prompt) as f64 / reading,
        bandwidth_share: weight_bytes * tokens / batch as f64 / writing / read_bandwidth,
    };
    Ok(DecodeOutcome {
        runs: measured.into_iter().map(of).collect(),
        read_bandwidth,
        weight_bytes,
        peak_bytes: peak_bytes(model.device()),
        simd: kernels(model.device(), &config)?,
        threads: tunesmith_ops::par::threads(),
    })
}

impl Clock {
    fn new(sequences: usize, most: usize) -> Self {
        let (lengths, last) = (vec![0; sequences], Instant::now());
        Self { lengths, most, first: None, tokens: 0, last, text: 0, ended: false }
    }
}
