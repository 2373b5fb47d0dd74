//! `tunesmith bench --mode decode`: tokens per second of answers on random weights of a shape, beside what the memory allows:
//! each token's step reads every weight once, however many texts go on in it.
use std::time::Instant;

use serde::Serialize;

use super::training::shape;
use tunesmith_base::error::Result;
use tunesmith_config::arch::Arch;
use tunesmith_config::{Config, Mode};
use tunesmith_eval::{Go, Settings, Watcher, generate};
use tunesmith_model::Model;
use tunesmith_ops::{peak, simd};
use tunesmith_telemetry::machine::peak_bytes;

/// What to run.
#[derive(Debug, Clone)]
pub struct Request {
    /// A name of a known shape, or the path of a `config.json`.
    pub shape: String,
    /// How weights are kept.
    pub config: Config,
    /// How many texts go on side by side, a run for each.
    pub batches: Vec<usize>,
    /// Tokens of a prompt.
    pub prompt: usize,
    /// Tokens of an answer, after the first.
    pub tokens: usize,
}

/// One run.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Run {
    /// Texts side by side.
    pub batch: usize,
    /// Tokens of all answers per second, the first of each and the prompts not counted.
    pub tokens_per_second: f64,
    /// Tokens of the prompts per second.
    pub prompt_tokens_per_second: f64,
    /// Bytes of weights read per second over the memory's bandwidth.
    pub bandwidth_share: f64,
}

/// What was measured.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// A run for each number of texts.
    pub runs: Vec<Run>,
    /// Bytes per second that all threads read from memory.
    pub read_bandwidth: f64,
    /// Bytes of the weights that a step reads.
    pub weight_bytes: f64,
    /// The most memory the process held.
    pub peak_bytes: u64,
    /// Instruction set.
    pub simd: &'static str,
    /// Threads.
    pub threads: usize,
}

/// Notes when the first and the last token of the first text came.
struct Clock {
    first: Option<Instant>,
    last: Instant,
}

impl Watcher for Clock {
    fn token(&mut self, _: usize, _: &[u32]) -> Result<Go> {
        self.last = Instant::now();
        self.first.get_or_insert(self.last);
        Ok(Go::On)
    }
}

/// Bytes of every matrix that a token passes; of experts, those that a token is given to.
fn weight_bytes(arch: &Arch, each: f64) -> f64 {
    let of = |linear: &tunesmith_config::arch::LinearSpec| (linear.in_features * linear.out_features) as f64;
    // Modules of blocks, and the head, which is among them or is the embedding.
    let linears: f64 = arch.linear_modules().iter().filter(|linear| linear.layer.is_some()).map(of).sum();
    each * (linears + (arch.vocab_size * arch.hidden_size) as f64)
}

/// Runs each number of texts, after a short run that warms up.
///
/// # Errors
/// Unknown shapes.
pub fn run(request: &Request) -> Result<Outcome> {
    let arch = shape(&request.shape)?;
    let mut config = request.config.clone();
    config.tuning.mode = Mode::Freeze;
    config.tuning.freeze.trainable_patterns = vec!["model.norm.weight".to_owned()];
    let model = Model::load(&arch, None, &config)?;
    let narrow = config.model.dtype == tunesmith_config::Dtype::Bfloat16;
    let weight_bytes = weight_bytes(&arch, if narrow { 2.0 } else { 4.0 });
    let bandwidth_before = peak::read_bandwidth(0.5);
    let prompt = |text: usize| -> Vec<u32> {
        (0..request.prompt).map(|at| ((text * 7919 + at * 104_729 + at * at * 31) % arch.vocab_size) as u32).collect()
    };
    let mut measured = Vec::new();
    for &batch in &request.batches {
        let prompts: Vec<Vec<u32>> = (0..batch).map(prompt).collect();
        generate(&model, &prompts, &Settings::greedy(4, usize::MAX, Vec::new()), &mut Clock::new())?;
        let (began, mut clock) = (Instant::now(), Clock::new());
        generate(&model, &prompts, &Settings::greedy(request.tokens + 1, usize::MAX, Vec::new()), &mut clock)?;
        let first = clock.first.unwrap_or(began);
        let (reading, writing) = ((first - began).as_secs_f64(), (clock.last - first).as_secs_f64());
        measured.push((batch, reading, writing));
    }
    let read_bandwidth = peak::read_bandwidth(0.5).max(bandwidth_before);
    let of = |(batch, reading, writing): (usize, f64, f64)| Run {
        batch,
        tokens_per_second: (batch * request.tokens) as f64 / writing,
        prompt_tokens_per_second: (batch * request.prompt) as f64 / reading,
        bandwidth_share: weight_bytes * request.tokens as f64 / writing / read_bandwidth,
    };
    Ok(Outcome {
        runs: measured.into_iter().map(of).collect(),
        read_bandwidth,
        weight_bytes,
        peak_bytes: peak_bytes(),
        simd: simd::level().name(),
        threads: rayon::current_num_threads(),
    })
}

impl Clock {
    fn new() -> Self {
        Self { first: None, last: Instant::now() }
    }
}
