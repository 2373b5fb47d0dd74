//! The parts of the plan that depend only on the configuration, the model, and the data.
use crate::model_source::ModelSource;
use crate::run_plan::{
    EnginePlan, EvalGenerationPlan, EvaluationPlan, LoggingPlan, MetricPlan, ModelPlan, SamplesPlan, When,
};
use crate::{output, trainable};
use std::sync::Arc;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;
use tunesmith_checkpoint::stamp::{Hashes, KernelInfo};
use tunesmith_checkpoint::{AdapterConfig, Stamp};
use tunesmith_config::arch::Arch;
use tunesmith_config::{Config, EvalStrategy, Mode, Quantization, SaveStrategy, TrainConfig, greater_is_better};
use tunesmith_data::Dataset;
use tunesmith_eval::Settings as GenerationSettings;
use tunesmith_hub::Snapshot;
use tunesmith_model::adapters;
use tunesmith_model::freeze;
use tunesmith_model::targets::Targets;
use tunesmith_plan::grouped;

/// Maximum number of prompts in memory while a validation generates.
const PROMPTS_AT_ONCE: usize = 256;
/// The same with several ranks. They check after each chunk whether to stop, so shorter chunks stop sooner.
const PROMPTS_AT_ONCE_OF_RANKS: usize = 32;

/// The model and its trained part.
pub fn model(config: &Config, source: &ModelSource) -> Result<ModelPlan> {
    let name = match &source.snapshot {
        Some(snapshot) => snapshot.repo.id.clone(),
        None => source.dir.to_string_lossy().into_owned(),
    };
    let adapts = config.tuning.mode.adapts();
    let adapter = || {
        let adapter = AdapterConfig::readable(&config.tuning, &source.placements, Some(&name), &source.saved_arch())?;
        let (kept, untouched) = (Arc::clone(&source.kept), Arc::clone(&source.untouched));
        Ok::<_, Error>(AdapterConfig { kept, untouched, ..adapter })
    };
    Ok(ModelPlan {
        summary: summary(config, source),
        adapter: adapts.then(adapter).transpose()?,
        name,
        max_seq_len: config.model.max_seq_len,
        mode: config.tuning.mode,
        new_tokens: config.tuning.new_tokens.clone(),
        saves_chat_template: config.data.template_path.is_some() || config.data.chat_template.is_some(),
        merged_adapters: config.tuning.adapters.clone(),
        trained_parameters: source.trained_parameters(),
        all_parameters: trainable::all_parameters(config, &source.arch, &source.placements)?,
        trained_in_full: trained_in_full(config, source, &source.arch)?,
    })
}

/// Tensors that are trained in full or by rows: next to adapters, or by `mode: freeze`.
fn trained_in_full(config: &Config, source: &ModelSource, arch: &Arch) -> Result<Vec<String>> {
    match config.tuning.mode {
        Mode::Freeze => freeze::trained_tensors(arch, &config.tuning.freeze),
        Mode::Full => Ok(Vec::new()),
        _ => Targets::of(&config.tuning).names_beside(arch, &source.placements),
    }
}

/// The model in one line: its path or name, its family, and how many values are trained.
fn summary(config: &Config, source: &ModelSource) -> String {
    let tuning = &config.tuning;
    let what = match adapters::of(tuning) {
        Some(method) => {
            let kind = if tuning.lora.use_dora { "DoRA" } else { method.about().title };
            let quantized = config.model.quantization != Quantization::None;
            let q = if quantized && tuning.mode == Mode::Lora { "Q" } else { "" };
            format!("{q}{kind} on {} modules", source.placements.len())
        }
        None if tuning.mode == Mode::Full
            && source.arch.vision.as_ref().is_some_and(|vision| vision.trained_tensors().is_empty()) =>
        {
            "every weight of the language model".to_owned()
        }
        None if tuning.mode == Mode::Full => "every weight".to_owned(),
        None => "some weights".to_owned(),
    };
    let head = match &source.arch.score {
        Some(head) if head.is_number() => " and a regression head".to_owned(),
        Some(head) => format!(" and a classification head with {}", count(head.labels.len(), "label")),
        None => String::new(),
    };
    let family = format!("{:?}", source.arch.family);
    let name = source.snapshot.as_ref().map_or_else(|| source.dir.display().to_string(), Snapshot::label);
    format!("{name} · {family} · {what}{head} · {} parameters trained", grouped(source.trained_parameters()))
}

/// The stamp, still without the hash of the base weights.
pub fn stamp(
    config: &Config,
    engine: &EnginePlan,
    source: &ModelSource,
    dataset: &Dataset,
    ranks: usize,
) -> Result<Stamp> {
    let template = dataset.template.as_ref().map_or("", |template| template.source());
    let hashes = Hashes {
        base_model: "",
        tokenizer: &dataset.tokenizer.hash().to_hex(),
        chat_template: &blake3::hash(template.as_bytes()).to_hex(),
        data: &dataset.fingerprint,
    };
    let EnginePlan { kernels, simd, quantization, base_dtype, activations, .. } = engine;
    let engine = KernelInfo {
        backend: kernels,
        simd: simd.clone(),
        quantization: quantization.clone(),
        dtype: format!("base {base_dtype}, activations {activations}"),
    };
    // The adapter's file also has what an earlier stage has trained.
    let trained_in_full = trained_in_full(config, source, &source.saved_arch())?;
    let stamp = Stamp::new(config, &source.placements, &trained_in_full, hashes, engine);
    Ok(Stamp { world_size: ranks, ..stamp })
}

/// Validation during training; `None` without validation rows or with `eval_strategy: "no"`.
pub fn evaluation(
    config: &Config,
    source: &ModelSource,
    dataset: &Dataset,
    ranks: usize,
    total_steps: u64,
) -> Result<Option<EvaluationPlan>> {
    let train = &config.train;
    let when = match train.eval_strategy {
        EvalStrategy::No => return Ok(None),
        EvalStrategy::Steps => train.eval_steps.map_or(When::Never, |every| When::Steps(every.steps(total_steps))),
        EvalStrategy::Epoch => When::Epochs,
    };
    let Some(validation) = &dataset.validation else { return Ok(None) };
    let generation = if train.predict_with_generate {
        let mut generation = config.generation.clone();
        generation.max_new_tokens = train.generation_max_new_tokens.unwrap_or(generation.max_new_tokens);
        generation.num_beams = train.generation_num_beams.unwrap_or(generation.num_beams);
        let config = &Config { generation, ..config.clone() };
        let usual = if ranks > 1 { PROMPTS_AT_ONCE_OF_RANKS } else { PROMPTS_AT_ONCE };
        let settings = generation_settings(config, source, dataset)?;
        let at_once = settings.texts_at_once(source.device);
        Some(EvalGenerationPlan {
            settings,
            stop_strings: config.generation.stop_strings.clone(),
            rows: train.generation_rows.map_or(validation.len(), |rows| rows.min(validation.len())),
            prompts_at_once: match train.eval_accumulation_steps {
                Some(batches) => (batches as usize).saturating_mul(train.eval_batch_size),
                None => usual.max(at_once),
            },
            metrics: config.eval.clone(),
        })
    } else {
        None
    };
    let name = &train.metric_for_best_model;
    let name = name.strip_prefix("eval_").unwrap_or(name).to_owned();
    Ok(Some(EvaluationPlan {
        when,
        on_start: train.eval_on_start,
        at_end: train.final_eval,
        batch_size: train.eval_batch_size,
        metric: MetricPlan {
            greater_is_better: train.greater_is_better.unwrap_or_else(|| greater_is_better(&name)),
            name,
        },
        generation,
    }))
}

fn generation_settings(config: &Config, source: &ModelSource, dataset: &Dataset) -> Result<GenerationSettings> {
    let stop_ids = [&source.arch.eos_token_ids[..], &dataset.stop_ids()?].concat();
    Ok(GenerationSettings::new(config, source.arch.reach(), stop_ids))
}

/// When checkpoints are written.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: shares of all steps, rounded up, of which checkpoints would lack their validation.
pub fn saving(train: &TrainConfig, total_steps: u64) -> Result<When> {
    let save = train.save_steps.steps(total_steps);
    match (train.save_strategy, train.eval_steps) {
        (SaveStrategy::No, _) => Ok(When::Never),
        (SaveStrategy::Epoch, _) => Ok(When::Epochs),
        (SaveStrategy::Steps, Some(every)) if train.load_best_model_at_end => {
            let eval = every.steps(total_steps);
            if save.is_multiple_of(eval) {
                return Ok(When::Steps(save));
            }
            let total = count(total_steps, "step");
            let message =
                format!("train.save_steps is {save} of {total}, which is no multiple of train.eval_steps, {eval}");
            Err(Error::config(message)
                .hint("with train.load_best_model_at_end every checkpoint needs its validation: give numbers of steps"))
        }
        (SaveStrategy::Steps, _) => Ok(When::Steps(save)),
    }
}

/// Metrics, TensorBoard, and the report.
pub fn logging(config: &Config, total_steps: u64) -> LoggingPlan {
    let Config { logging, train, .. } = config;
    let folder = || train.output_dir.file_name().map(|name| name.to_string_lossy().into_owned());
    LoggingPlan {
        steps: train.logging_steps.steps(total_steps),
        events_dir: logging.tensorboard.then(|| output::events_dir(config)),
        report: logging.report,
        run_name: logging.run_name.clone().or_else(folder).unwrap_or_else(|| "run".to_owned()),
        timeline_step: logging.timeline_step,
    }
}

/// The generations of the report.
pub fn samples(config: &Config, source: &ModelSource, dataset: &Dataset) -> Result<SamplesPlan> {
    let scores = source.arch.score.is_some();
    Ok(SamplesPlan {
        rows: if scores { 0 } else { config.generation.num_samples },
        settings: generation_settings(config, source, dataset)?,
        stop_strings: config.generation.stop_strings.clone(),
    })
}
