//! `tunesmith bench`: times real optimizer steps on random weights of a shape, and compares them with the machine's peak.
use half::bf16;
use serde::Serialize;
use std::io::BufRead as _;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;
use tunesmith_base::memory;
use tunesmith_comm::single::Single;
use tunesmith_config::arch::Arch;
use tunesmith_config::{Config, DeviceChoice, Dtype, Mode, Quantization};
use tunesmith_data::{Batch, Example, IGNORE, Split};
use tunesmith_device::{Array, Device as Where, gpu};
use tunesmith_model::device::{device, kernels};
use tunesmith_model::weights::WeightFiles;
use tunesmith_model::{Model, quantize};
use tunesmith_ops::activation::{Number, Pool};
use tunesmith_ops::elementwise;
use tunesmith_ops::gemm::{Init, Matrix, Store, Term, matmul};
use tunesmith_ops::peak;
use tunesmith_optim::{AdamW, Betas, Optimizer};
use tunesmith_parallel::optimizer::slots;
use tunesmith_plan::flops::{Costs, Flops};
use tunesmith_plan::memory::{Breakdown, CUDA_CONTEXT, Device, Job, Pass, Predictor, Storage};
use tunesmith_telemetry::machine::peak_bytes;
use tunesmith_train::memory_prediction;
use tunesmith_train::micro_batches;
use tunesmith_train::step::step;

/// Built-in shapes: hidden size, layers, heads, key/value heads, MLP width, vocabulary; tied embeddings; Qwen2 (biases on
/// q, k, v).
const SHAPES: [(&str, [usize; 6], bool, bool); 4] = [
    ("small", [384, 8, 6, 6, 1024, 8192], false, false),
    ("smollm2-135m", [576, 30, 9, 3, 1536, 49152], true, false),
    ("tinyllama-1.1b", [2048, 22, 32, 4, 5632, 32000], false, false),
    ("qwen2.5-0.5b", [896, 24, 14, 2, 4864, 151_936], true, true),
];

/// The settings of the benchmark.
#[derive(Debug, Clone)]
pub struct TrainingRequest {
    /// Name of a built-in shape, or path of a `config.json`.
    pub shape: String,
    /// A model folder to load instead of random weights.
    pub model: Option<PathBuf>,
    /// The training settings: mode, adapter, gradient checkpointing, tokens per pass.
    pub config: Config,
    /// Tokens of a synthetic row; all have a label.
    pub seq: usize,
    /// Rows of an optimizer step, over all micro-batches.
    pub batch: usize,
    /// Timed steps, after one warm-up step.
    pub steps: usize,
    /// Whether to skip the warm-up step.
    pub cold: bool,
    /// Rows `{input_ids, labels}` to use instead of synthetic ones.
    pub rows: Option<Vec<Example>>,
}

/// The result of the benchmark.
#[derive(Debug, Clone, Serialize)]
pub struct TrainingOutcome {
    /// The training mode: `lora`, `qlora`, another adapter's mode, or `full`.
    pub mode: &'static str,
    /// Seconds to read, initialize, or quantize the base.
    pub load_seconds: f64,
    /// Tokens per second over the timed steps, without padding.
    pub tokens_per_second: f64,
    /// Peak resident memory of the process, in bytes.
    pub peak_bytes: u64,
    /// The predicted memory, part by part.
    pub predicted: Breakdown,
    /// Useful floating-point operations per second, divided by `peak_flops`.
    pub flops_share: f64,
    /// The machine's peak with all operands in registers, in FLOP/s: of products in tiles or of bfloat16 dot products
    /// where the run uses them, of multiply-adds elsewhere; `gemm_peak` on a GPU.
    pub peak_flops: f64,
    /// Speed of the matrix product on a large case, in FLOP/s; see [`gemm_peak`].
    pub gemm_peak: f64,
    /// Useful floating-point operations per token ([`tunesmith_plan::flops`]), without recomputation.
    pub flops_per_token: f64,
    /// Floating-point operations per second, including recomputed blocks.
    pub flops_per_second: f64,
    /// Allocator calls per step, the mean of the timed steps.
    pub allocations: f64,
    /// Seconds that counting bytes adds to each allocator call.
    pub counting_seconds: f64,
    /// Mean seconds of a step by phase.
    pub phases: PhaseSeconds,
    /// Tokens of the timed steps.
    pub tokens: u64,
    /// Label tokens of the timed steps.
    pub label_tokens: u64,
    /// Mean loss of the last step.
    pub loss: f64,
    /// Vector instruction set in use.
    pub simd: String,
    /// Threads that shared the work.
    pub threads: usize,
}

/// Mean seconds of a step by phase.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct PhaseSeconds {
    /// Forward pass of the embedding and the blocks.
    pub forward: f64,
    /// Final norm, head, and loss, forward and backward.
    pub head: f64,
    /// Backward pass of the blocks, including recomputation.
    pub backward: f64,
    /// Gradient clipping and the optimizer.
    pub optimizer: f64,
    /// The whole step, with what the phases leave out.
    pub step: f64,
}

/// The architecture of a built-in shape, or of a `config.json`.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`] for an unknown name, [`tunesmith_base::Kind::Model`] for a file that does not describe a model.
pub fn shape(name: &str) -> Result<Arch> {
    if let Some((_, [hidden, layers, heads, kv, inner, vocabulary], tied, qwen)) =
        SHAPES.iter().find(|shape| shape.0 == name)
    {
        let text = serde_json::json!({
            "model_type": if *qwen { "qwen2" } else { "llama" }, "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": inner, "vocab_size": vocabulary,
            "tie_word_embeddings": tied, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "hidden_act": "silu",
        });
        return Arch::from_json(&text.to_string(), Path::new(name));
    }
    let path = Path::new(name);
    if path.exists() {
        let text = files::read_text(path, files::SMALL).map_err(|error| Error::io("read", path, &error))?;
        return Arch::from_json(&text, path);
    }
    let names: Vec<_> = SHAPES.iter().map(|shape| shape.0).collect();
    Err(Error::config(format!("no shape or file {name:?}")).hint(format!("shapes: {}", names.join(", "))))
}

/// Reads rows `{"input_ids": [...], "labels": [...]}`, one per line.
///
/// # Errors
/// [`tunesmith_base::Kind::Data`], naming the line.
pub fn read_rows(path: &Path) -> Result<Vec<Example>> {
    #[derive(serde::Deserialize)]
    struct Row {
        input_ids: Vec<u32>,
        labels: Vec<i32>,
    }
    let data = |error: &std::io::Error| Error::io("read", path, error).with_kind(tunesmith_base::Kind::Data);
    let file = files::open(path).map_err(|error| data(&error))?;
    let mut rows = Vec::new();
    for (index, line) in std::io::BufReader::new(file).lines().enumerate() {
        let line = line.map_err(|error| data(&error))?;
        let at = format!("{}:{}", path.display(), index + 1);
        let row: Row = serde_json::from_str(&line).map_err(|error| {
            let what = error.to_string();
            let what = what.split(" at line ").next().unwrap_or_default();
            Error::data(format!("{at}:{}: {what}", error.column())).with_source(error)
        })?;
        if row.input_ids.len() != row.labels.len() || row.input_ids.is_empty() {
            let (ids, labels) = (row.input_ids.len(), row.labels.len());
            return Err(Error::data(format!("{at}: {ids} input_ids and {labels} labels, expected the same number")));
        }
        rows.push(Example { input_ids: row.input_ids, labels: row.labels });
    }
    if rows.is_empty() {
        return Err(Error::data(format!("{}: no rows", path.display())));
    }
    Ok(rows)
}

/// What the products of a run multiply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operands {
    /// Float32 numbers.
    Float32,
    /// Float32 activations and bfloat16 weights.
    Mixed,
    /// Bfloat16 numbers.
    Bfloat16,
}

impl Operands {
    /// What most products of a run with this configuration multiply. Quantized codes, and weights that are trained, are
    /// multiplied in float32.
    pub fn of(config: &Config) -> Self {
        match (config.model.dtype, config.model.quantization) {
            _ if config.train.bf16 => Self::Bfloat16,
            (Dtype::Bfloat16, Quantization::Auto) if config.tuning.mode != Mode::Full => Self::Mixed,
            _ => Self::Float32,
        }
    }

    /// The processor's peak for these operands, in FLOP/s; see [`peak::flops`].
    fn peak(self, seconds: f64) -> f64 {
        match self {
            Self::Bfloat16 => peak::product_flops(seconds),
            Self::Mixed => peak::mixed_flops(seconds),
            Self::Float32 => peak::flops(seconds),
        }
    }
}

/// FLOP/s of the matrix product on `[1024, 2048] x [2048, 2048]`; the best of four runs.
///
/// A GPU's product is made larger until it takes a millisecond.
pub fn gemm_peak(device: Where, operands: Operands) -> f64 {
    let (mut tokens, mut size) = (1024, 2048);
    loop {
        let (rate, seconds) = product_rate(device, operands, tokens, size);
        if device == Where::Cpu || seconds > 1e-3 || size >= 8192 {
            return rate;
        }
        (tokens, size) = (4 * tokens.min(2048), 2 * size);
    }
}

/// FLOP/s of the fastest of several products, and its seconds.
fn product_rate(device: Where, operands: Operands, tokens: usize, size: usize) -> (f64, f64) {
    let pool = Pool::on(device);
    if operands == Operands::Bfloat16 {
        pool.set_number(Number::Bf16);
    }
    pool.set_splits(true);
    let (mut x, mut y) = (pool.act(tokens, size), pool.act(tokens, size));
    elementwise::fill(&mut x, 0.5);
    let (wide, halves);
    let weight = if operands == Operands::Float32 {
        wide = Array::of(device, &vec![0.5f32; size * size]);
        Store::F32(wide.view())
    } else {
        halves = Array::of(device, &vec![bf16::from_f32(0.5); size * size]);
        Store::Bf16(halves.view())
    };
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        wait(device);
        let start = Instant::now();
        matmul(&mut y, Init::Zero, &[Term { matrix: Matrix::rows(weight, size), x: &x }]);
        wait(device);
        best = best.min(start.elapsed().as_secs_f64());
    }
    ((2 * tokens * size * size) as f64 / best, best)
}

/// Waits until a device has finished its work.
pub(crate) fn wait(device: Where) {
    if let Where::Cuda(ordinal) = device {
        gpu::synchronize(ordinal);
    }
}

/// Floating-point operations of the batches.
fn flops(costs: &Costs, batches: &[Batch]) -> Flops {
    let one = |batch: &Batch| {
        let lengths = batch.cu_seqlens.windows(2).map(|ends| ends[1] - ends[0]);
        costs.of(lengths, batch.label_tokens() as f64)
    };
    batches.iter().map(one).fold(Flops::default(), |sum, more| sum + more)
}

/// The architecture to measure, and the weight files of a model folder; without a folder there are none, and weights
/// are random.
///
/// # Errors
/// The shape is unknown, or the folder has no model.
pub(super) fn base(model: Option<&Path>, shape_name: &str) -> Result<(Arch, Option<WeightFiles>)> {
    match model {
        None => Ok((shape(shape_name)?, None)),
        Some(dir) => {
            let arch = Arch::from_dir(dir)?;
            let weights = WeightFiles::open_model(dir, &arch, &arch.tensors())?;
            Ok((arch, Some(weights)))
        }
    }
}

/// The benchmark as a job for memory prediction; it saves nothing.
fn job<'a>(request: &TrainingRequest, arch: &'a Arch, weights: Option<&WeightFiles>) -> Result<Job<'a>> {
    let mut job = memory_prediction::job(&request.config, arch, Storage::F32, weights)?;
    job.base.through_f32 = weights.is_none();
    job.optimizer.saving = 0;
    Ok(job)
}

fn split(request: &TrainingRequest, arch: &Arch) -> Result<Split> {
    Split::from_examples(&rows(request, arch.vocab_size))
}

/// The batches of a step; each is one forward and backward pass.
fn passes(request: &TrainingRequest, split: &Split, step: usize) -> Result<Vec<Batch>> {
    let row = |row| vec![(step * request.batch + row) % split.len()];
    micro_batches::batches(
        split,
        &vec![(0..request.batch).map(row).collect()],
        request.config.train.max_tokens_per_pass,
    )
}

/// Predicts the memory of the largest pass, part by part, without running it.
///
/// # Errors
/// As [`run`].
pub fn predict(request: &TrainingRequest) -> Result<Breakdown> {
    let (arch, weights) = base(request.model.as_deref(), &request.shape)?;
    let on = match request.config.model.device {
        DeviceChoice::Cpu => Device::Cpu,
        DeviceChoice::Auto | DeviceChoice::Cuda(_) => memory_prediction::kind(device(request.config.model.device)?),
    };
    let predictor = Predictor::new(job(request, &arch, weights.as_ref())?, on);
    let split = split(request, &arch)?;
    let mut most = Breakdown::default();
    for step in 0..=request.steps {
        for batch in passes(request, &split, step)? {
            let mut one = predictor.predict(&pass_of(&batch));
            if on == Device::Gpu {
                // The measurement covers what this program allocated on the GPU, without CUDA's own memory.
                one.program = one.program.saturating_sub(CUDA_CONTEXT);
            }
            most = if one.total() > most.total() { one } else { most };
        }
    }
    Ok(most)
}

/// Runs and times the steps. The FMA peak is measured before and after them; the higher one counts.
///
/// # Errors
/// [`tunesmith_base::Kind::Data`]: a row has a token outside the vocabulary.
pub fn run(request: &TrainingRequest) -> Result<TrainingOutcome> {
    let config = &request.config;
    let (arch, weights) = base(request.model.as_deref(), &request.shape)?;
    let (costs, predicted) = (Costs::new(&job(request, &arch, weights.as_ref())?), predict(request)?);
    let loading = Instant::now();
    let mut model = Model::load(&arch, weights.as_ref(), config)?;
    let load_seconds = loading.elapsed().as_secs_f64();
    let split = split(request, &arch)?;
    let betas = Betas { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 };
    let mut optimizer = Optimizer::new(Box::new(AdamW(betas)), slots(&model.params.specs), model.params.values());
    let first = if request.cold { Vec::new() } else { passes(request, &split, 0)? };
    let warm = step(&mut model, &mut optimizer, &Single, &first, 1e-4, 1.0)?;
    let device = model.device();
    wait(device);
    let operands = Operands::of(config);
    let registers = || operands.peak(0.3);
    let peak_before = registers();
    model.phases = tunesmith_model::Phases::default();
    let (mut tokens, mut label_tokens, mut done, mut loss) = (0, 0, Flops::default(), warm.loss);
    let mut spent = 0.0;
    let calls = memory::calls();
    for index in 1..=request.steps {
        let batches = passes(request, &split, index)?;
        let start = Instant::now();
        let stats = step(&mut model, &mut optimizer, &Single, &batches, 1e-4, 1.0)?;
        wait(device);
        spent += start.elapsed().as_secs_f64();
        (tokens, label_tokens, loss) = (tokens + stats.tokens, label_tokens + stats.label_tokens, stats.loss);
        done += flops(&costs, &batches);
    }
    let allocations = (memory::calls() - calls) as f64 / request.steps as f64;
    let (peak_bytes, gemm_peak) = (peak_bytes(device), gemm_peak(device, operands));
    // The peak of a GPU's cores is not measured: that of its matrix products stands for it.
    let peak_flops = if device == Where::Cpu { registers().max(peak_before) } else { gemm_peak };
    let per_step = |seconds: f64| seconds / request.steps as f64;
    let phases = model.phases;
    let (forward, head, backward) =
        (phases.forward.as_secs_f64(), phases.head.as_secs_f64(), phases.backward.as_secs_f64());
    let quantized = quantize::resolve(&arch, config, weights.as_ref())?.is_some();
    Ok(TrainingOutcome {
        mode: if quantized { "qlora" } else { config.tuning.mode.as_str() },
        load_seconds,
        tokens_per_second: tokens as f64 / spent,
        peak_bytes,
        predicted,
        flops_share: done.useful / spent / peak_flops,
        peak_flops,
        gemm_peak,
        flops_per_token: done.useful / tokens as f64,
        flops_per_second: done.total() / spent,
        allocations,
        counting_seconds: memory::cost(),
        phases: PhaseSeconds {
            forward: per_step(forward),
            head: per_step(head),
            backward: per_step(backward),
            optimizer: per_step(spent - forward - head - backward),
            step: per_step(spent),
        },
        tokens,
        label_tokens,
        loss,
        simd: kernels(device, config)?,
        threads: tunesmith_ops::par::threads(),
    })
}

fn pass_of(batch: &Batch) -> Pass {
    let longest = batch.cu_seqlens.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(1);
    Pass { tokens: batch.tokens.len() as u64, longest: longest as u64, labelled: batch.label_tokens() as u64 }
}

/// The rows of the request, or synthetic ones if it has none.
pub fn rows(request: &TrainingRequest, vocabulary: usize) -> Vec<Example> {
    request.rows.clone().unwrap_or_else(|| synthetic(request, vocabulary))
}

/// Rows of arbitrary tokens, all with a label.
fn synthetic(request: &TrainingRequest, vocabulary: usize) -> Vec<Example> {
    let row = |row: usize| {
        let token = |at: usize| ((row * 7919 + at * 104_729 + at * at * 31) % vocabulary) as u32;
        let input_ids: Vec<u32> = (0..request.seq).map(token).collect();
        let labels = input_ids.iter().map(|&id| i32::try_from(id).unwrap_or(IGNORE)).collect();
        Example { input_ids, labels }
    };
    (0..request.batch.max(4)).map(row).collect()
}
