//! `tunesmith bench`: speed of a shape on this machine, in training or with `--mode decode` in answering.
use super::atomic_lines;
use super::numbers::whole;
use super::terminal::{print, print_exact};
use crate::bench::bench_cache::MeasuredRate;
use crate::bench::decode_bench;
use crate::bench::kernels_bench::{self, KernelLine};
use crate::bench::ranks_bench::{self, RanksEngine, RanksLine};
use crate::bench::sweep::{self, Sweep};
use crate::bench::training::{self, Operands, TrainingOutcome, TrainingRequest};
use crate::config::{
    Bytes, Checkpointing, Config, ConfigValue as _, Dtype, Mode, Node, Quantization, Range, TargetModules,
};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::files::output::{Existing, OutputFile};
use crate::memory::human_bytes;
use crate::model::adapters::KINDS;
use crate::model::device::{describe, device};
use crate::ops::simd::{self, Level};
use crate::plan::memory::Breakdown;
use crate::plan::table;
use crate::telemetry::machine::MachineInfo;
use crate::train::autobatch::choose_batch;
use crate::words::count;
use std::fmt::Write as _;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
#[allow(clippy::struct_excessive_bools)] // flags
pub struct Args {
    /// Measure this shape: small, smollm2-135m, qwen2.5-0.5b, tinyllama-1.1b, or the path of a config.json
    #[arg(long, default_value = "smollm2-135m")]
    shape: String,
    /// Load the base model from this folder (default: random weights)
    #[arg(long, value_name = "DIR", conflicts_with = "shape")]
    model: Option<PathBuf>,
    /// Train with this mode: `lora` (every linear layer), `qlora` (on a base in NF4), another adapter's mode, or `full`; or
    /// generate with `decode`
    #[arg(long, default_value = "lora")]
    mode: String,
    /// Use rows of this many tokens (default: 512), or prompts with `decode` (default: 32)
    #[arg(long, value_parser = whole::<u64>(Range::within(2.0, 1_000_000.0)))]
    seq: Option<u64>,
    /// Train on this many rows a step (default: 2), or generate this many answers at once (default: 1, then 8)
    #[arg(long, value_parser = whole::<u64>(Range::within(1.0, 100_000.0)))]
    batch: Option<u64>,
    /// Measure this many steps after a warm-up step (default: 3), or tokens of an answer after the first (default: 64)
    #[arg(long, value_parser = whole::<u64>(Range::within(1.0, 1_000_000.0)))]
    steps: Option<u64>,
    /// Use adapters of this rank
    #[arg(long, default_value_t = 16, value_parser = whole::<u64>(Range::within(1.0, 65_536.0)))]
    rank: u64,
    /// Recompute activations in the backward pass instead of keeping them
    #[arg(long)]
    gradient_checkpointing: bool,
    /// Keep what blocks save for the backward pass in the host's memory, as `train.activation_offloading` does
    #[arg(long)]
    activation_offloading: bool,
    /// Keep the base's frozen weights in the host's memory, as `train.offload_param` does
    #[arg(long)]
    offload_param: bool,
    /// Measure from the first step on, without a warm-up step
    #[arg(long)]
    cold: bool,
    /// Keep the base and the activations in bfloat16, as `model.dtype: bfloat16` and `train.bf16` do
    #[arg(long)]
    bf16: bool,
    /// Keep the base in this type, as `model.dtype` does: `float32` or `bfloat16` (default: `bfloat16` with `--bf16`, else `float32`)
    #[arg(long, value_name = "TYPE")]
    dtype: Option<String>,
    /// Hold the base in these codes: nf4, fp4, int8 or fp8, as `model.quantization` does
    #[arg(long, value_name = "CODES")]
    quantization: Option<String>,
    /// With --mode decode and --quantization, hold the head in these codes too, as `gen.quantize_head` does
    #[arg(long, requires = "quantization")]
    quantize_head: bool,
    /// Give adapters to these modules only, such as `q_proj,k_proj,v_proj` (default: every linear layer)
    #[arg(long, value_delimiter = ',')]
    targets: Vec<String>,
    /// Process at most this many tokens in a pass, as `train.max_tokens_per_pass` does
    #[arg(long, value_parser = whole::<usize>(Range::at_least(1.0)))]
    max_tokens_per_pass: Option<usize>,
    /// Measure every way to cut a step of --batch rows, next to the automatic choice
    #[arg(long)]
    sweep: bool,
    /// With --sweep, use at most this much memory, such as 2GiB
    #[arg(long, value_name = "SIZE", requires = "sweep", allow_hyphen_values = true)]
    memory_budget: Option<String>,
    /// Train on rows `{input_ids, labels}` of this file (default: synthetic rows)
    #[arg(long, value_name = "FILE.jsonl")]
    data: Option<PathBuf>,
    /// Use this many threads (default: all cores)
    #[arg(long, value_parser = whole::<u64>(Range::within(1.0, 4096.0)))]
    threads: Option<u64>,
    /// Use at most this instruction set: `portable`, `avx2`, `avx512` or `amx`, on ARM `neon` (default: the best here)
    #[arg(long)]
    simd: Option<String>,
    /// Predict the memory of the steps, part by part, without running them
    #[arg(long)]
    predict: bool,
    /// Measure several numbers of ranks on this machine, such as 1,2,4, next to what `plan --scaling` predicts
    #[arg(long, value_delimiter = ',', allow_hyphen_values = true, conflicts_with_all = ["predict", "sweep", "model"], value_parser = whole::<u64>(Range::within(1.0, 256.0)))]
    ranks: Vec<u64>,
    /// Compute on this device: cpu, cuda, cuda:N, or auto, as `model.device` does
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Time each operation on rows of --seq tokens (default: 4096) of the shape's sizes
    #[arg(long, conflicts_with_all = ["predict", "sweep", "model", "ranks", "data", "dtype"])]
    kernels: bool,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
    /// Write the JSON object to this file as well
    #[arg(long, value_name = "FILE.json", conflicts_with = "sweep")]
    json_file: Option<PathBuf>,
    /// Replace an existing file
    #[arg(long, requires = "json_file")]
    overwrite: bool,
}

impl Args {
    /// The type of the base's matrices in memory: that of `--dtype`, or else bfloat16 with `--bf16`, or else float32.
    ///
    /// # Errors
    /// `--dtype` names no type.
    fn base_dtype(&self) -> Result<Dtype> {
        match self.dtype.as_deref() {
            None if self.bf16 => Ok(Dtype::Bfloat16),
            None | Some("float32") => Ok(Dtype::Float32),
            Some("bfloat16") => Ok(Dtype::Bfloat16),
            Some(other) => Err(Error::config(format!("--dtype {other:?}, expected float32 or bfloat16"))),
        }
    }

    /// Refuses flags that matter only for training if answers are measured (`--mode decode`).
    ///
    /// # Errors
    /// [`crate::Kind::Config`], naming the flag.
    fn refuse_what_trains(&self) -> Result<()> {
        let flags = [
            ("--gradient-checkpointing", self.gradient_checkpointing),
            ("--activation-offloading", self.activation_offloading),
            ("--offload-param", self.offload_param),
            ("--cold", self.cold),
            ("--targets", !self.targets.is_empty()),
            ("--max-tokens-per-pass", self.max_tokens_per_pass.is_some()),
            ("--sweep", self.sweep),
            ("--data", self.data.is_some()),
            ("--predict", self.predict),
            ("--ranks", !self.ranks.is_empty()),
        ];

        match flags.iter().find(|(_, given)| *given) {
            Some((flag, _)) => {
                Err(Error::config(format!("{flag} is about training, and --mode decode trains nothing"))
                    .hint(format!("leave out {flag}, or --mode decode")))
            }
            None => Ok(()),
        }
    }

    /// Prints the result, as JSON or as `text`, and writes the file that `--json-file` names.
    fn show<T: serde::Serialize + ?Sized>(&self, result: &T, text: &str) -> Result<()> {
        let json = serde_json::to_string(result)
            .map_err(|error| Error::config("cannot be written as JSON").caused_by(error))?
            + "\n";
        if let Some(file) = &self.json_file {
            atomic_lines::write(file, self.existing(), &json)?;
        }
        if self.json { print_exact(&json) } else { print(text) }
    }

    fn existing(&self) -> Existing {
        Existing::unless("--overwrite", self.overwrite)
    }

    /// What is measured: a built-in shape, a `config.json` or a model folder.
    fn name(&self) -> String {
        self.model.as_ref().map_or_else(|| self.shape.clone(), |dir| dir.display().to_string())
    }
}

fn show_ranks(args: &Args, lines: &[RanksLine]) -> Result<()> {
    let row = |line: &RanksLine| {
        let engine = match line.engine {
            RanksEngine::Threads => "threads",
            RanksEngine::Gloo => "gloo",
        };
        let link = line.link.map_or_else(String::new, |link| {
            format!("; {:.2} GB/s, {:.0} us", link.bandwidth / 1e9, link.latency * 1e6)
        });
        let off = 100.0 * (line.predicted / line.measured - 1.0);
        (
            format!("{} {engine}", line.ranks),
            format!(
                "{:.3} s a step, {:.0} tokens/s; predicted {:.3} s ({off:+.1} %); {:.3} s without talking; {} a rank{link}",
                line.measured,
                line.tokens_per_second,
                line.predicted,
                line.alone,
                count(line.threads, "thread")
            ),
        )
    };
    args.show(lines, &table(&lines.iter().map(row).collect::<Vec<_>>()))
}

/// Runs the command.
///
/// # Errors
/// Unknown shapes and modes, unreadable rows.
pub fn run(args: &Args) -> Result<()> {
    if let Some(file) = &args.json_file {
        let inputs: Vec<PathBuf> = args.model.iter().chain(&args.data).cloned().collect();
        // A file that cannot be written is reported before the measurement.
        drop(OutputFile::create(file, args.existing(), &inputs)?);
    }
    let mut config = Config::default();
    config.tuning.mode = match args.mode.as_str() {
        "qlora" => Mode::Lora,
        "full" => Mode::Full,
        "decode" => Mode::Freeze,
        other => {
            let known = KINDS.iter().find(|kind| kind.mode.as_str() == other);
            known.map(|kind| kind.mode).ok_or_else(|| {
                let kinds: Vec<_> = KINDS.iter().map(|kind| kind.mode.as_str()).collect();
                let kinds = kinds.join(", ");
                Error::config(format!("--mode {other:?}, expected {kinds}, qlora, full or decode"))
            })?
        }
    };
    if args.mode == "qlora" {
        config.model.quantization = Quantization::Nf4;
    }
    if let Some(word) = &args.quantization {
        config.model.quantization = Quantization::from_node(&Node::Str(word.clone()))
            .map_err(|_| Error::config(format!("--quantization {word:?}, expected nf4, fp4, int8 or fp8")))?;
    }
    if args.quantize_head && args.mode != "decode" {
        return Err(Error::config("--quantize-head is about answers, and this mode trains")
            .hint("add --mode decode, or leave out --quantize-head"));
    }
    config.generation.quantize_head = args.quantize_head;
    if !args.targets.is_empty() {
        config.tuning.lora.target_modules = TargetModules::List(args.targets.clone());
    }
    config.tuning.lora.r = args.rank as usize;
    config.model.device = args
        .device
        .parse()
        .map_err(|expected: String| Error::config(format!("--device {:?}, expected {expected}", args.device)))?;
    config.train.bf16 = args.bf16;
    config.model.dtype = args.base_dtype()?;
    config.train.gradient_checkpointing = args.gradient_checkpointing.into();
    config.train.activation_offloading = args.activation_offloading;
    config.train.offload_param = args.offload_param;
    config.train.max_tokens_per_pass = args.max_tokens_per_pass.or(config.train.max_tokens_per_pass);
    if let Some(name) = &args.simd {
        let names = || Level::ALL.iter().map(|level| level.name()).collect::<Vec<_>>().join(", ");
        let wanted = Level::ALL.iter().find(|level| level.name() == name);
        let wanted = wanted.ok_or_else(|| Error::config(format!("--simd {name:?}, expected one of {}", names())))?;
        simd::force(*wanted);
    }
    let threads = args.threads.map_or(0, |threads| threads as usize);
    let pool = crate::ops::par::pool(threads)?;
    if args.kernels {
        let (arch, tokens) = (training::shape(&args.shape)?, args.seq.unwrap_or(4096) as usize);
        let device = device(config.model.device)?;
        let lines = pool.install(|| kernels_bench::measure(device, &arch, tokens, args.bf16))?;
        return show_kernels(args, &lines, &describe(device));
    }
    if args.mode == "decode" {
        args.refuse_what_trains()?;
        let request = decode_bench::DecodeRequest {
            shape: args.shape.clone(),
            model: args.model.clone(),
            config,
            batches: args.batch.map_or_else(|| vec![1, 8], |batch| vec![batch as usize]),
            prompt: args.seq.unwrap_or(32) as usize,
            tokens: args.steps.unwrap_or(64) as usize,
        };
        return decode(args, &request, &pool.install(|| decode_bench::run(&request))?);
    }
    let rows = args.data.as_deref().map(training::read_rows).transpose()?;
    let request = TrainingRequest {
        shape: args.shape.clone(),
        model: args.model.clone(),
        config,
        seq: args.seq.unwrap_or(512) as usize,
        batch: args.batch.unwrap_or(2) as usize,
        steps: args.steps.unwrap_or(3) as usize,
        cold: args.cold,
        rows,
    };
    if !args.ranks.is_empty() {
        let worlds: Vec<usize> = args.ranks.iter().map(|&ranks| ranks as usize).collect();
        return show_ranks(args, &ranks_bench::run(&request, &worlds)?);
    }
    if args.predict {
        return show_prediction(args, &training::predict(&request)?);
    }
    if args.sweep {
        let mut request = request;
        if !args.gradient_checkpointing {
            request.config.train.gradient_checkpointing = Checkpointing::Auto;
        }
        let budget = args.memory_budget.as_deref().map(|text| {
            let refuse = || Error::config(format!("--memory-budget {text:?}, expected bytes, such as 2GiB"));
            Bytes::parse(text).ok_or_else(refuse)
        });
        let budget = budget.transpose()?.map(|bytes| bytes.0);
        let found = pool.install(|| sweep::run(&request, budget))?;
        return print(&show_sweep(&found));
    }
    let outcome = pool.install(|| training::run(&request))?;
    let on_cpu = device(request.config.model.device)? == Device::Cpu;
    let rate = MeasuredRate {
        processor: MachineInfo::detect().processor,
        threads: outcome.threads,
        simd: outcome.simd.clone(),
        shape: args.name(),
        mode: outcome.mode.to_owned(),
        flops_per_token: outcome.flops_per_token,
        flops: outcome.flops_per_second,
    };
    // `plan` predicts with the processor's rates.
    if on_cpu {
        rate.keep();
    }
    args.show(&outcome, &show(&request, &outcome))
}

fn show_kernels(args: &Args, lines: &[KernelLine], device: &str) -> Result<()> {
    let row = |line: &KernelLine| {
        let rate = |count: f64| count / line.seconds;
        let mut text = format!("{:.3} ms, {:.1} GB/s", 1e3 * line.seconds, rate(line.bytes) / 1e9);
        if line.operations > 0.0 {
            let _ = write!(text, ", {:.2} TFLOP/s", rate(line.operations) / 1e12);
        }
        (format!("{} {}", line.name, line.shape), text)
    };
    args.show(lines, &format!("operations on {device}\n{}", table(&lines.iter().map(row).collect::<Vec<_>>())))
}

fn show_prediction(args: &Args, predicted: &Breakdown) -> Result<()> {
    let parts = predicted.parts().into_iter().filter(|(_, bytes)| *bytes > 0).chain([("all", predicted.total())]);
    let rows: Vec<_> = parts.map(|(name, bytes)| (name.to_owned(), human_bytes(bytes))).collect();
    args.show(&serde_json::json!({ "predicted": predicted, "total": predicted.total() }), &table(&rows))
}

fn decode(args: &Args, request: &decode_bench::DecodeRequest, outcome: &decode_bench::DecodeOutcome) -> Result<()> {
    let giga = |bytes: f64| bytes / 1e9;
    let mut text = format!(
        "{} decode, prompts of {}, {} an answer, {}, {}\n",
        args.name(),
        count(request.prompt, "token"),
        count(request.tokens, "token"),
        count(outcome.threads, "thread"),
        outcome.simd
    );
    for run in &outcome.runs {
        let _ = writeln!(
            text,
            "  {:>10.1} tokens/s at batch {} ({:.0} tokens/s in prompts): {:.1} % of the memory's bandwidth",
            run.tokens_per_second,
            run.batch,
            run.prompt_tokens_per_second,
            100.0 * run.bandwidth_share
        );
    }
    let _ = writeln!(text, "  {:>10.1} GB/s read from memory at most", giga(outcome.read_bandwidth));
    let _ = writeln!(text, "  {:>10.3} GB of weights read for each step", giga(outcome.weight_bytes));
    let _ = writeln!(text, "  {:>10.0} MiB peak memory", outcome.peak_bytes as f64 / (1 << 20) as f64);
    args.show(outcome, &text)
}

fn show_sweep(sweep: &Sweep) -> String {
    let found = &sweep.found;
    let mut lines = choose_batch::lines(sweep.budget, &found.passes, &found.reasons, &found.sizes);
    lines.push("steps of the same rows, split in other ways (the choice first; equal splits once):".to_owned());
    for tried in &sweep.tried {
        let speed = tried.tokens_per_second.map_or("does not fit".to_owned(), |speed| format!("{speed:.1} tokens/s"));
        lines.push(format!("  {speed:>16}  {:>10}  {}", human_bytes(tried.bytes), tried.sizes));
    }
    if let Some((rival, [choice, other])) = sweep.rival().zip(sweep.duel) {
        lines.push("the choice and the fastest of the others once more, in turns:".to_owned());
        for (speed, sizes) in [(choice, &found.sizes), (other, &rival.sizes)] {
            lines.push(format!("  {speed:>7.1} tokens/s  {sizes}"));
        }
    }
    lines.push(format!("the choice has {:.1} % of the best way's speed", 100.0 * sweep.ratio()));
    lines.join("\n") + "\n"
}

fn show(request: &TrainingRequest, outcome: &TrainingOutcome) -> String {
    let giga = |flops: f64| flops / 1e9;
    let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
    let phases = &outcome.phases;
    let share = |seconds: f64| 100.0 * seconds / phases.step;
    let mut text = format!(
        "{} {}, {} in {} ({} labelled), {}, {}\n",
        request.model.as_ref().map_or_else(|| request.shape.clone(), |dir| dir.display().to_string()),
        outcome.mode,
        count(outcome.tokens, "token"),
        count(request.steps, "step"),
        outcome.label_tokens,
        count(outcome.threads, "thread"),
        outcome.simd
    );
    let what = match outcome.simd.as_str() {
        "amx_bf16" => "bfloat16 products in tiles",
        "avx512_bf16" => "bfloat16 dot products",
        "amx" if Operands::of(&request.config) == Operands::Mixed => "float32 products in tiles",
        _ => "multiply-adds",
    };
    let _ = writeln!(text, "  {:>10.1} tokens/s", outcome.tokens_per_second);
    let _ = writeln!(text, "  {:>10.1} s to load the base", outcome.load_seconds);
    let (predicted, peak) = (outcome.predicted.total(), outcome.peak_bytes);
    let off = 100.0 * (predicted as f64 / peak.max(1) as f64 - 1.0);
    let _ = writeln!(text, "  {:>10.0} MiB peak memory ({:.0} MiB predicted, {off:+.1} %)", mib(peak), mib(predicted));
    let _ = writeln!(
        text,
        "  {:>10.1} GFLOP/s useful: {:.1} % of the peak of {what} ({:.0} GFLOP/s), {:.1} % of the GEMM peak ({:.0} GFLOP/s)",
        giga(outcome.flops_share * outcome.peak_flops),
        100.0 * outcome.flops_share,
        giga(outcome.peak_flops),
        100.0 * outcome.flops_share * outcome.peak_flops / outcome.gemm_peak,
        giga(outcome.gemm_peak)
    );
    let _ = writeln!(
        text,
        "  {:>10.0} calls of the allocator a step, {:.1} ns to count each: {:.3} % of a step",
        outcome.allocations,
        1e9 * outcome.counting_seconds,
        100.0 * outcome.allocations * outcome.counting_seconds / phases.step
    );
    let _ = writeln!(text, "  {:>10.3} s a step", phases.step);
    for (name, seconds) in [
        ("forward", phases.forward),
        ("head + loss", phases.head),
        ("backward", phases.backward),
        ("optimizer", phases.optimizer),
    ] {
        let _ = writeln!(text, "  {seconds:>10.3} s {name} ({:.1} %)", share(seconds));
    }
    text
}
