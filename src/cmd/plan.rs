//! `tunesmith plan`: predicts the memory and time of a run on each rank, by strategy, before anything is downloaded.
use super::args::{ConfigArgs, check_model_folder};
use super::numbers::{number, whole};
use super::plan_report::{Report, Time, show};
use super::{run_plan, scaling, terminal};
use crate::bench::bench_cache::MeasuredRate;
use crate::config::arch::{Arch, ScoreHead, TensorSpec};
use crate::config::vision::VisionArch;
use crate::config::{
    Auto, Bytes, Config, DeviceChoice, ModelConfig, Range, Resolved, Task, is_hub_name, refuse_gguf, shape,
};
use crate::data;
use crate::error::{Error, Result};
use crate::files;
use crate::hub::{self, NoProgress, Part};
use crate::model::targets::{self, Targets};
use crate::model::{adapters, device};
use crate::plan::flops::Costs;
use crate::plan::memory::{CUDA_CONTEXT, Device, Predictor, Storage};
use crate::plan::strategies::{self, Batch, Machine, Row, Strategy};
use crate::plan::{self, grouped, human_bytes};
use crate::telemetry::machine;
use crate::train::autobatch::batch_plan::BatchRequest;
use crate::train::features;
use crate::train::memory_prediction::{self, OptimizerState};
use crate::train::shown_pictures::ShownPictures;
use crate::train::trainable;
use crate::train::vision::{Seer, Sight, names_encoder};
use crate::words::count;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Predict the memory and time of a run
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// Plan for this model: a folder, a config.json, or OWNER/NAME on the hub; its weights are not needed (default: the
    /// configuration's)
    #[arg(long, value_name = "DIR|FILE|OWNER/NAME")]
    model: Option<String>,
    /// Plan for this many ranks, with one device each (default: 1)
    #[arg(long, visible_alias = "ranks", value_name = "N", value_parser = whole::<u64>(Range::within(1.0, 65_536.0)))]
    gpus: Option<u64>,
    /// Give each rank this much memory, such as 24GiB (default: what is free on this machine's GPU, or on the CPU an even share
    /// of the memory)
    #[arg(long, visible_alias = "gpu-memory", value_name = "SIZE", allow_hyphen_values = true)]
    vram: Option<String>,
    /// Plan for this kind of device (default: `gpu` with --gpus or --vram, else as model.device says)
    #[arg(long, value_parser = ["cpu", "gpu"])]
    device: Option<String>,
    /// Assume this speed of a rank in TFLOP/s (default on the CPU: as last measured by `tunesmith bench`)
    #[arg(long, value_parser = number(Range::greater_than(0.0)))]
    tflops: Option<f64>,
    #[command(flatten)]
    scaling: scaling::ScalingArgs,
    /// Print the plan of the run as `train` makes it before step 1: reads the model and the data, measures passes if sizes are
    /// `auto`, trains nothing
    #[arg(long, conflicts_with_all = ["model", "gpus", "vram", "device", "tflops", "scaling"])]
    run: bool,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
///
/// # Errors
/// Those of the configuration; no such model; a model that this version does not have.
pub fn run(args: &Args) -> Result<()> {
    if args.run {
        return run_plan::run(&args.config.load(&[])?, args.json);
    }
    let report = report(args)?;
    if args.json {
        let text = serde_json::to_string_pretty(&report)
            .map_err(|error| Error::config("cannot be written as JSON").caused_by(error))?;
        return terminal::print_exact(&(text + "\n"));
    }
    terminal::print(&show(&report))
}

fn report(args: &Args) -> Result<Report> {
    let resolved = match args.model {
        Some(_) => args.config.load_optional(&[])?.0,
        None => args.config.load_partial()?,
    };
    let mut config = resolved.config.clone();
    let Planned { mut arch, stored, name, shown } = model(args, &mut config, &resolved)?;
    let machine = machine(args, config.model.device)?;
    let mut notes = Vec::new();
    if config.task() != Task::CausalLm && arch.score.is_none() {
        let mut labels = config.data.labels.0.clone();
        if config.task() == Task::Classification && labels.is_empty() {
            labels = ["0", "1"].map(String::from).to_vec();
            notes.push(
                "data.labels is not set: planned with two labels; each further label adds a row to the head".to_owned(),
            );
        }
        arch.score = Some(ScoreHead { labels });
    }
    if config.train.batch_size == Auto::Auto {
        notes.push("train.batch_size: auto: planned with 1 row; the table shows the most that fit".to_owned());
    }

    let mut job = memory_prediction::job_showing(&config, &arch, stored, None, shown.as_ref())?;
    job.companions = memory_prediction::tokenizer(arch.vocab_size);
    let predictor = Predictor::new(job, machine.device);
    let most = match resolved.source("train.max_tokens_per_pass") {
        // The default is tuned to a CPU's caches.
        crate::config::Source::Default if machine.device == Device::Gpu => None,
        _ => config.train.max_tokens_per_pass.map(|most| most as u64),
    };
    let batch = Batch { rows: config.train.batch_size.or(1) as u64, length: config.model.max_seq_len as u64, most };
    let plan = strategies::plan(&predictor, &machine, &batch, arch.max_position_embeddings as u64);
    let at = plan.recommended.unwrap_or_default();
    let chosen = plan.rows.get(at).or_else(|| plan.rows.first()).copied();
    let checkpointing = chosen.map(|row| policies(&predictor, &machine, &batch, row)).unwrap_or_default();
    let optimizers = optimizers(&config, &arch)?;
    let time = match chosen {
        Some(row) => time(args, &config, &predictor, &machine, &batch, row)?,
        None => None,
    };
    if let Some(more) = predictor.uneven_routing(&batch.pass()) {
        let spread = if machine.device == Device::Gpu { "evenly over experts" } else { "over all experts" };
        notes.push(format!(
            "tokens are planned to spread {spread}; if all chose the same ones, a rank would need {} more",
            human_bytes(more)
        ));
    }
    if machine.device == Device::Gpu {
        notes.push(format!(
            "the engine counts what it takes on a GPU; {} for CUDA's context and kernels, and {} for NCCL where ranks talk, are assumed",
            human_bytes(plan::memory::CUDA_CONTEXT),
            human_bytes(plan::memory::NCCL)
        ));
    }
    if time.is_none() {
        notes.push(match machine.device {
            Device::Cpu => "no time: run `tunesmith bench` once on this machine, or give --tflops".to_owned(),
            Device::Gpu => "no time: give the training speed of one GPU (--tflops)".to_owned(),
        });
    }
    let scaling = match speed(args, &predictor, &machine) {
        _ if !args.scaling.scaling => None,
        Some((speed, _)) => Some(scaling::report(&args.scaling, &config, &predictor, &batch, machine.device, speed)),
        None => {
            return Err(Error::config("--scaling: the speed of a rank is unknown")
                .hint("give the training speed of one rank (--tflops), or run `tunesmith bench` once on the CPU"));
        }
    };
    let facts = facts(&name, &config, &arch, &predictor, &batch, &machine)?;
    Ok(Report { facts, machine, batch, plan, checkpointing, optimizers, time, scaling, notes })
}

/// A model that is planned for.
struct Planned {
    arch: Arch,
    /// How its checkpoint is stored.
    stored: Storage,
    name: String,
    /// The images of rows.
    shown: Option<ShownPictures>,
}

/// The model of the flags or of the configuration.
fn model(args: &Args, config: &mut Config, resolved: &Resolved) -> Result<Planned> {
    if let Some(model) = &args.model {
        check_model_folder("--model", model)?;
        config.model =
            ModelConfig { name: Some(model.clone()), local_dir: None, revision: None, ..config.model.clone() };
    }
    let named = config.model.local_dir.clone().or_else(|| config.model.name.as_ref().map(PathBuf::from));
    let Some(named) = named else {
        return Err(Error::config("no model is named").hint("set model.name, or give --model"));
    };
    let known = named.to_str().filter(|name| is_hub_name(name) && config.model.revision.is_none()).and_then(shape);
    let mut shown = None;
    let (mut arch, stored) = if let Some(text) = known {
        terminal::print_note(&format!("{}: this shape is built in; nothing is downloaded", named.display()));
        (Arch::from_json(text, &named)?, memory_prediction::stored_by(text))
    } else if named.is_file() {
        refuse_gguf(&named)?;
        let text = files::read_text(&named, files::SMALL)
            .map_err(|error| Error::io("read", &named, &error).with_kind(crate::Kind::Model))?;
        (Arch::from_json(&text, &named)?, memory_prediction::stored_by(&text))
    } else {
        let dir = hub::model_dir(&config.model, Part::Description, &NoProgress)?.dir;
        let mut arch = Arch::from_dir(&dir)?;
        if let Some((vision, pictures)) = vision(config, &dir, arch.hidden_size) {
            (arch.vision, shown) = (Some(vision), pictures);
        }
        (arch, memory_prediction::stored(&dir))
    };
    arch.refuse_dropout(config.train.disable_dropout)?;
    let vocabulary = arch.vocab_size as u32;
    arch.grow((vocabulary..vocabulary + config.tuning.new_tokens.len() as u32).collect());
    arch.separate(Targets::of(&config.tuning).apart());
    let other = args.model.is_some();
    let (length, note) = resolved.max_seq_len(arch.reach(), other)?;
    config.model.max_seq_len = length;
    if let Some(note) = note {
        terminal::print_note(&note);
    }
    let name = if named.is_file() { named.parent().unwrap_or(Path::new("")).to_owned() } else { named };
    Ok(Planned { arch, stored, name: name.display().to_string(), shown })
}

/// The image encoder and connector of a run with images, as far as training holds them in memory, and the images.
fn vision(config: &Config, dir: &Path, hidden_size: usize) -> Option<(Arc<VisionArch>, Option<ShownPictures>)> {
    let named = config.vision.load.unwrap_or_else(|| names_encoder(config));
    // The data may not be there yet.
    if config.vision.load == Some(false) || !(named || data::first_picture(config).is_ok_and(|row| row.is_some())) {
        return None;
    }
    let seer = Seer { dir, tokenizer: dir, hidden_size };
    match Sight::open(config, seer, Part::Description, &NoProgress) {
        Ok(sight) => {
            let features = features::kept_by(config, &sight.arch);
            if features.is_some() {
                terminal::print_note(
                    "the image encoder is planned to run before training, and not to be held in it (vision.cache_features)",
                );
            }
            let shown = match ShownPictures::of_first_rows(config, &sight, features) {
                Ok((shown, what)) => {
                    terminal::print_note(&format!("planned with {what}"));
                    Some(shown)
                }
                Err(error) => {
                    terminal::print_note(&format!("planned without images: {}", error.message()));
                    None
                }
            };
            Some((Arc::new(VisionArch { features, ..(*sight.arch).clone() }), shown))
        }
        Err(error) => {
            terminal::print_note(&format!("planned without an image encoder: {}", error.message()));
            None
        }
    }
}

/// The devices to plan for: from the flags, else from `choice`.
fn machine(args: &Args, choice: DeviceChoice) -> Result<Machine> {
    let asked = args.device.as_deref().map(|device| device == "gpu");
    let asked = asked.or_else(|| (args.gpus.is_some() || args.vram.is_some()).then_some(true));
    // A GPU of this machine, if there is one that the plan could be for.
    let here = |choice| device::device(choice).ok().filter(|&found| found != crate::device::Device::Cpu);
    let (device, here) = match (asked, choice) {
        (Some(true), DeviceChoice::Cpu) => (Device::Gpu, here(DeviceChoice::Cuda(None))),
        (Some(true), _) | (None, DeviceChoice::Cuda(_)) => (Device::Gpu, here(choice)),
        (None, DeviceChoice::Auto) => here(choice).map_or((Device::Cpu, None), |found| (Device::Gpu, Some(found))),
        (Some(false), _) | (None, DeviceChoice::Cpu) => (Device::Cpu, None),
    };
    let ranks = args.gpus.unwrap_or(1);
    let memory = match (&args.vram, device) {
        // A plain `24` would be 24 bytes, but is meant as gigabytes.
        (Some(text), _) => match Bytes::parse(text).filter(|bytes| bytes.0 >= 1 << 20) {
            Some(bytes) => bytes.0,
            None => return Err(Error::config(format!("--vram {text:?}, expected a size such as 24GiB"))),
        },
        (None, Device::Cpu) => machine::usable_memory() / ranks,
        // The free memory does not include the CUDA context of this process, but the plan counts one.
        (None, Device::Gpu) => here.and_then(device::usable).map_or(Machine::UNKNOWN, |free| free + CUDA_CONTEXT),
    };
    Ok(Machine { device, ranks, memory })
}

fn facts(
    name: &str,
    config: &Config,
    arch: &Arch,
    predictor: &Predictor<'_>,
    batch: &Batch,
    machine: &Machine,
) -> Result<Vec<(String, String)>> {
    let job = &predictor.job;
    let numbers: u64 = arch.tensors().iter().map(|spec| TensorSpec::len(spec) as u64).sum();
    let all = trainable::all_parameters(config, arch, &targets::placed(arch, &config.tuning)?)?;
    let share = 100.0 * job.trained.values as f64 / all.max(1) as f64;
    let base = match job.base.quantized {
        Some(quantized) => format!("{}; embedding and head {}", quantized.name(), job.base.matrices.name()),
        None => job.base.matrices.name().to_owned(),
    };
    let rank = adapters::of(&config.tuning).and_then(|method| method.targets().ranks);
    let how = rank.map_or_else(|| config.tuning.mode.to_string(), |rank| format!("adapters of rank {}", rank.r));
    let keeps = match (job.full, arch.num_hidden_layers) {
        (0, _) => "outputs of matrix products are kept for the backward pass",
        (full, blocks) if full >= blocks => "every block is recomputed",
        _ => "some blocks are recomputed",
    };
    let pass = batch.pass();
    let device = match machine.device {
        Device::Cpu => format!("{} on the CPU", ranks(machine.ranks, "process", "processes")),
        Device::Gpu => ranks(machine.ranks, "GPU", "GPUs"),
    };
    let facts = [
        (
            "model",
            format!(
                "{name}: {}, {}, {}",
                arch.family.model_type,
                billions(numbers),
                count(arch.num_hidden_layers, "block")
            ),
        ),
        ("base", base),
        (
            "trained",
            format!("{} parameters ({share:.2} %), {how}; {}", grouped(job.trained.values), config.train.optim),
        ),
        (
            "micro-batch",
            format!(
                "{} x {} tokens; a pass has {} tokens; {keeps}{}",
                batch.rows,
                grouped(batch.length),
                grouped(pass.tokens),
                if job.narrow { " in bfloat16" } else { "" }
            ),
        ),
        (
            "device",
            match machine.memory {
                Machine::UNKNOWN => format!("{device} of unknown memory (--vram 24GiB)"),
                bytes => format!("{device}, {} each", human_bytes(bytes)),
            },
        ),
    ]
    .map(|(label, value)| (label.to_owned(), value))
    .to_vec();
    Ok(facts)
}

fn ranks(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

fn billions(numbers: u64) -> String {
    if numbers >= 1_000_000_000 {
        format!("{:.2} B parameters", numbers as f64 / 1e9)
    } else {
        format!("{:.1} M parameters", numbers as f64 / 1e6)
    }
}

/// Bytes of activations and in total, for each policy of gradient checkpointing.
fn policies(predictor: &Predictor<'_>, machine: &Machine, batch: &Batch, row: Row) -> Vec<(String, u64, u64)> {
    let blocks = predictor.job.arch.num_hidden_layers;
    let one = |(name, full, none): (&str, usize, usize)| {
        let mut job = predictor.job.clone();
        (job.full, job.none) = (full, none);
        let rank = strategies::rank(&predictor.with_job(job), machine, row.way, &batch.pass());
        (name.to_owned(), rank.kept + rank.work, rank.total())
    };
    [
        ("nothing recomputed", 0, blocks),
        ("outputs of matrix products", 0, 0),
        ("half of the blocks recomputed", blocks / 2, 0),
        ("every block recomputed", blocks, 0),
    ]
    .into_iter()
    .map(one)
    .collect()
}

fn optimizers(config: &Config, arch: &Arch) -> Result<Vec<(String, u64)>> {
    use crate::config::Optim;
    let (mut states, trained) = (Vec::new(), OptimizerState::of(config, arch)?);
    for &optim in Optim::ALL {
        let mut other = config.clone();
        if optim != config.train.optim {
            (other.train.optim, other.train.optim_args) = (optim, crate::config::Arguments::default());
        }
        match trained.bytes(&other) {
            Ok(bytes) => states.push((optim.to_string(), bytes.state + bytes.average)),
            Err(error) if optim == config.train.optim => return Err(error),
            // Another optimizer may contradict other settings; it is left out.
            Err(_) => {}
        }
    }
    Ok(states)
}

/// The FLOP/s of a rank, and where the number comes from.
fn speed(args: &Args, predictor: &Predictor<'_>, machine: &Machine) -> Option<(f64, String)> {
    match (args.tflops, machine.device) {
        (Some(tflops), _) => Some((tflops * 1e12, format!("{tflops} TFLOP/s per rank, as given"))),
        (None, Device::Cpu) => {
            // A typical row: only the order of magnitude matters.
            const LENGTH: usize = 512;
            let row = Costs::new(&predictor.job).of([LENGTH], LENGTH as f64 - 1.0).total();
            let rate = MeasuredRate::known(predictor.job.threads, row / LENGTH as f64)?;
            let ours =
                format!("{:.0} GFLOP/s, measured here by bench ({}, {})", rate.flops / 1e9, rate.shape, rate.mode);
            Some((rate.flops, ours))
        }
        (None, Device::Gpu) => None,
    }
}

/// Bytes a second that a GPU copies from pinned memory of the host: what 16 lanes of PCI Express 4.0 deliver, of 31.5 GB/s.
const HOST_LINK: f64 = 25e9;
/// What limits a step whose copies take longer than its computation.
const COPIES: &str = "; the base's copies from the host take that long, at an assumed 25 GB/s";

/// An estimate of the time, if any speed is known.
///
/// # Errors
/// [`crate::Kind::Config`]: the ranks do not divide `train.effective_batch`.
fn time(
    args: &Args,
    config: &Config,
    predictor: &Predictor<'_>,
    machine: &Machine,
    batch: &Batch,
    row: Row,
) -> Result<Option<Time>> {
    let Some((speed, basis)) = speed(args, predictor, machine) else { return Ok(None) };
    let (ranks, efficiency) = if row.way.strategy == Strategy::Single {
        (1.0, 1.0)
    } else {
        (machine.ranks as f64, row.way.strategy.efficiency())
    };
    // With `auto`, a step has the requested size, with rows of the maximal length.
    let asked = BatchRequest::new(&config.train, predictor.job.arch, ranks as usize);
    let rows = match asked.batch_size.given().zip(asked.grad_accum.given()) {
        Some((batch, accum)) => batch * accum,
        None => asked.rows_of_step(batch.length as f64, usize::MAX)?,
    } as f64;
    let one = Costs::new(&predictor.job).of([batch.length as usize], batch.length as f64 - 1.0);
    let (flops_per_step, tokens_per_step) = (one.total() * rows * ranks, rows * batch.length as f64 * ranks);
    let computing = flops_per_step / (speed * ranks * efficiency);
    // Forward and backward copy the base once each.
    let passes = (rows * batch.length as f64 / batch.pass().tokens as f64).ceil();
    let sharing = if matches!(row.way.strategy, Strategy::Zero3 | Strategy::Fsdp) { ranks } else { 1.0 };
    let copying = 2.0 * predictor.offloaded() as f64 / sharing * passes / HOST_LINK;
    let seconds_per_step = computing.max(copying);
    let copies = if copying > computing { COPIES } else { "" };
    let steps = u64::try_from(config.train.max_steps).ok().filter(|&steps| steps > 0);
    let shared =
        if ranks > 1.0 { format!(", {:.0} % of it on {ranks} ranks", 100.0 * efficiency) } else { String::new() };
    Ok(Some(Time {
        flops_per_step,
        tokens_per_step,
        seconds_per_step,
        tokens_per_second: tokens_per_step / seconds_per_step,
        basis: basis + &shared + copies,
        seconds: steps.map(|steps| steps as f64 * seconds_per_step),
        seconds_per_image_ahead: Some(Costs::image(&predictor.job).ahead / speed).filter(|&seconds| seconds > 0.0),
    }))
}
