//! Checks across keys: keys that contradict each other.
use super::auto_values::Auto;
use super::enums::{
    ConnectorChoice, Contamination, EvalStrategy, LrScheduler, Mode, Quantization, SaveStrategy, Sharding, Strategy,
    Task,
};
use super::mixed_values::{DeviceChoice, InitLora, TargetModules};
use super::resolved::{Resolved, set_by};
use super::schema::{Config, TrainConfig};
use super::source::Source;
use super::value::ConfigValue as _;
use super::{adapters, task, unused_keys};
use tunesmith_base::error::{Error, Result};

/// Switches validation off, with a note, where training rows come from the shell and there are no validation rows. In a file the same
/// combination is a contradiction.
pub(super) fn disable_empty_validation(resolved: &mut Resolved) {
    let (train, data) = (&resolved.config.train, &resolved.config.data);
    let validates = !data.val_path.is_empty() || data.split > 0.0;
    let rows = ["data.train_path", "data.datasets"].map(|key| resolved.source(key).clone());
    let strategy = resolved.source("train.eval_strategy").clone();
    let Some(rows) = rows.into_iter().find(Source::is_shell).filter(|_| !validates && !strategy.is_shell()) else {
        return;
    };
    if train.eval_strategy == EvalStrategy::No || train.load_best_model_at_end || train.early_stopping_patience > 0 {
        return;
    }
    resolved.notes.push(format!(
        "train.eval_strategy: {} ({strategy}) validates nothing: there are no validation rows; set data.val_path or data.split",
        train.eval_strategy
    ));
    resolved.config.train.eval_strategy = EvalStrategy::No;
    set_by(&mut resolved.settings, "train.eval_strategy", EvalStrategy::No.to_json(), &rows);
}

/// `train.dp_ranks` alone asks for ranks as threads, so `strategy: auto` is `dp` with it.
pub(super) fn ranks_as_threads(resolved: &mut Resolved) {
    let train = &resolved.config.train;
    if train.dp_ranks.is_some() && train.strategy == Strategy::Auto {
        let source = resolved.source("train.dp_ranks").clone();
        resolved.config.train.strategy = Strategy::Dp;
        set_by(&mut resolved.settings, "train.strategy", Strategy::Dp.to_json(), &source);
    }
}

/// Refuses an empty list of modules where nothing else says what gets an adapter.
fn names_none(config: &Config) -> Result<()> {
    let tuning = &config.tuning;
    let none = TargetModules::List(Vec::new());
    let (key, hint) = match tuning.mode {
        Mode::Lora if tuning.lora.target_modules == none && tuning.lora.target_parameters.is_empty() => {
            ("lora", "name modules, such as [q_proj, v_proj], or experts by target_parameters")
        }
        Mode::Ia3 if tuning.ia3.target_modules.as_ref() == Some(&none) => {
            ("ia3", "name modules, such as [k_proj, v_proj]")
        }
        Mode::Oft if tuning.oft.target_modules == none => ("oft", "name modules, such as [q_proj, v_proj]"),
        _ => return Ok(()),
    };
    Err(Error::config(format!("tuning.{key}.target_modules names no module, and nothing would be trained")).hint(hint))
}

/// Refuses keys that contradict each other. The error names both with their sources.
pub(super) fn contradictions(resolved: &Resolved) -> Result<()> {
    let config = &resolved.config;
    let (train, data, tuning) = (&config.train, &config.data, &config.tuning);
    let evaluates = train.eval_strategy != EvalStrategy::No;
    let validation = !data.val_path.is_empty() || data.split > 0.0;
    resolved.refuse_if(
        train.warmup_ratio > 0.0 && train.warmup_steps > 0,
        "train.warmup_ratio",
        "train.warmup_steps",
        "both say how long the warm-up is; keep one",
    )?;
    let warms = if train.warmup_steps > 0 { "train.warmup_steps" } else { "train.warmup_ratio" };
    resolved.refuse_if(
        train.lr_scheduler_type == LrScheduler::Constant && (train.warmup_ratio > 0.0 || train.warmup_steps > 0),
        warms,
        "train.lr_scheduler_type",
        "this schedule has no warm-up; use constant_with_warmup",
    )?;
    resolved.refuse_if(
        train.dp_ranks.is_some() && matches!(train.strategy, Strategy::Single | Strategy::Ddp),
        "train.dp_ranks",
        "train.strategy",
        "strategy: dp, zero1, zero2, zero3 and fsdp have ranks as threads; other ranks are started by a launcher",
    )?;
    resolved.refuse_if(
        train.fsdp_sharding_strategy != Sharding::FullShard && train.strategy != Strategy::Fsdp,
        "train.fsdp_sharding_strategy",
        "train.strategy",
        "only strategy: fsdp has ways to share weights",
    )?;
    resolved.refuse_if(
        train.reduce_every_pass && train.strategy == Strategy::Zero1,
        "train.reduce_every_pass",
        "train.strategy",
        "gradients that are summed after every pass are strategy: zero2; set that instead",
    )?;
    let schedule_free = train.optim.averages();
    let constant = matches!(train.lr_scheduler_type, LrScheduler::Constant | LrScheduler::ConstantWithWarmup);
    resolved.refuse_if(
        schedule_free && !constant,
        "train.optim",
        "train.lr_scheduler_type",
        "its averages take the place of a schedule; set lr_scheduler_type: constant, or constant_with_warmup for a warm-up",
    )?;
    resolved.refuse_if(
        schedule_free && train.ema_decay.is_some(),
        "train.optim",
        "train.ema_decay",
        "the optimizer averages the weights itself; keep one",
    )?;
    resolved.refuse_if(
        train.bf16 && train.fp16,
        "train.bf16",
        "train.fp16",
        "activations are kept in one of them; keep one",
    )?;
    let default = TrainConfig::default();
    let scaling = [
        (train.loss_scale != default.loss_scale, "train.loss_scale"),
        (train.initial_scale_power != default.initial_scale_power, "train.initial_scale_power"),
        (train.loss_scale_window != default.loss_scale_window, "train.loss_scale_window"),
        (train.hysteresis != default.hysteresis, "train.hysteresis"),
        (train.min_loss_scale != default.min_loss_scale, "train.min_loss_scale"),
    ];
    for (set, key) in scaling {
        resolved.refuse_if(
            set && !train.fp16,
            key,
            "train.fp16",
            "gradients are scaled with fp16 only; set it, or remove the key",
        )?;
    }
    resolved.refuse_if(
        train.min_loss_scale > 2f64.powi(train.initial_scale_power as i32),
        "train.min_loss_scale",
        "train.initial_scale_power",
        "the first loss scale would be below the lowest; raise the power",
    )?;
    let given = train.batch_size != Auto::Auto && train.grad_accum != Auto::Auto;
    resolved.refuse_if(
        given && train.effective_batch.is_some(),
        "train.effective_batch",
        "train.grad_accum",
        "batch_size and grad_accum say it already; set one of them to auto, or remove effective_batch",
    )?;
    let target = train.target_tokens_per_device_step != TrainConfig::default().target_tokens_per_device_step;
    resolved.refuse_if(
        given && target,
        "train.target_tokens_per_device_step",
        "train.grad_accum",
        "it is read only with batch_size or grad_accum: auto; set one of them, or remove it",
    )?;
    resolved.refuse_if(
        target && train.effective_batch.is_some(),
        "train.target_tokens_per_device_step",
        "train.effective_batch",
        "both say how large a step is; keep one",
    )?;
    // A file for others to include may leave the data to them.
    resolved.refuse_if(
        evaluates && !validation && (!data.train_path.is_empty() || !data.datasets.is_empty()),
        "train.eval_strategy",
        "data.val_path",
        "there are no validation rows; set data.val_path or data.split",
    )?;
    resolved.refuse_if(
        train.eval_strategy == EvalStrategy::Steps && train.eval_steps.is_none(),
        "train.eval_strategy",
        "train.eval_steps",
        "set train.eval_steps to the number of steps between validations",
    )?;
    resolved.refuse_if(
        !data.val_path.is_empty() && data.split > 0.0,
        "data.val_path",
        "data.split",
        "both say where validation rows come from; keep one",
    )?;
    resolved.refuse_if(
        !data.train_path.is_empty() && !data.datasets.is_empty(),
        "data.train_path",
        "data.datasets",
        "both say where training rows come from; keep one",
    )?;
    resolved.refuse_if(
        data.min_length.zip(data.max_length).is_some_and(|(min, max)| min > max),
        "data.min_length",
        "data.max_length",
        "no row can be both; swap them",
    )?;
    resolved.refuse_if(
        data.contamination != Contamination::Off && !validation && data.test_path.is_empty(),
        "data.contamination",
        "data.val_path",
        "there are no validation or test rows; set data.val_path, data.split or data.test_path",
    )?;
    resolved.refuse_if(
        train.load_best_model_at_end && !evaluates,
        "train.load_best_model_at_end",
        "train.eval_strategy",
        "the best checkpoint is known only by validation; set train.eval_strategy",
    )?;
    let same_moments = match (train.eval_strategy, train.save_strategy) {
        (EvalStrategy::Steps, SaveStrategy::Steps) => {
            train.eval_steps.is_none_or(|every| train.save_steps.may_be_multiple_of(every))
        }
        (EvalStrategy::Epoch, SaveStrategy::Epoch) => true,
        _ => false,
    };
    let (save, eval) = if train.save_strategy == SaveStrategy::Steps && train.eval_strategy == EvalStrategy::Steps {
        ("train.save_steps", "train.eval_steps")
    } else {
        ("train.save_strategy", "train.eval_strategy")
    };
    resolved.refuse_if(
        train.load_best_model_at_end && !same_moments,
        save,
        eval,
        "with train.load_best_model_at_end every checkpoint needs its validation: use the same strategy, and save_steps \
         a multiple of eval_steps",
    )?;
    resolved.refuse_if(
        train.early_stopping_patience > 0 && !evaluates,
        "train.early_stopping_patience",
        "train.eval_strategy",
        "early stopping watches the validation loss; set train.eval_strategy",
    )?;
    let metric = train.metric_for_best_model.strip_prefix("eval_").unwrap_or(&train.metric_for_best_model);
    resolved.refuse_if(
        !matches!(metric, "loss" | "perplexity" | "byte_perplexity")
            && !train.predict_with_generate
            && config.task() == Task::CausalLm,
        "train.metric_for_best_model",
        "train.predict_with_generate",
        "without answers a validation measures the loss and the perplexity alone; set train.predict_with_generate: true",
    )?;
    resolved.refuse_if(
        !metric.starts_with("scorer.") && train.greater_is_better == Some(!greater_is_better(metric)),
        "train.greater_is_better",
        "train.metric_for_best_model",
        "which direction is better is known of this measure; remove greater_is_better",
    )?;
    let answers = &config.generation;
    resolved.refuse_if(
        answers.do_sample && answers.num_beams > 1,
        "gen.do_sample",
        "gen.num_beams",
        "a beam search draws nothing; keep one",
    )?;
    resolved.refuse_if(
        answers.do_sample && train.generation_num_beams.is_some_and(|beams| beams > 1),
        "gen.do_sample",
        "train.generation_num_beams",
        "a beam search draws nothing; keep one",
    )?;
    resolved.refuse_if(
        answers.min_new_tokens > answers.max_new_tokens,
        "gen.min_new_tokens",
        "gen.max_new_tokens",
        "no answer is that long; lower the one or raise the other",
    )?;
    let guesses = answers.prompt_lookup_num_tokens > 0;
    resolved.refuse_if(
        guesses && answers.num_beams > 1,
        "gen.prompt_lookup_num_tokens",
        "gen.num_beams",
        "a beam search guesses nothing; keep one",
    )?;
    resolved.refuse_if(
        guesses && train.generation_num_beams.is_some_and(|beams| beams > 1),
        "gen.prompt_lookup_num_tokens",
        "train.generation_num_beams",
        "a beam search guesses nothing; keep one",
    )?;
    resolved.refuse_if(
        data.template_path.is_some() && data.chat_template.is_some(),
        "data.template_path",
        "data.chat_template",
        "both say which chat template is used; keep one",
    )?;
    resolved.refuse_if(
        train.group_by_length && !data.shuffle,
        "train.group_by_length",
        "data.shuffle",
        "rows in file order cannot be grouped by length; keep one",
    )?;
    resolved.refuse_if(
        train.group_by_length && data.packing,
        "train.group_by_length",
        "data.packing",
        "packed rows are all of one length; keep one",
    )?;
    resolved.refuse_if(
        !tuning.mode.adapts() && tuning.adapter.is_some(),
        "tuning.mode",
        "tuning.adapter",
        "this mode trains no adapter; set the adapter's, such as lora, remove the adapter, or merge it with tuning.adapters",
    )?;
    resolved.refuse_if(
        adapters::trains_tokens(tuning.mode) == Some(false) && !tuning.new_tokens.is_empty(),
        "tuning.mode",
        "tuning.new_tokens",
        "this kind of adapter has no rows of tokens; use mode: lora, full or freeze",
    )?;
    resolved.refuse_if(
        train.activation_offloading && config.model.device == DeviceChoice::Cpu,
        "train.activation_offloading",
        "model.device",
        "on the CPU activations are in main memory already; set model.device: cuda, or remove the key",
    )?;
    if config.generation.stop_strings.iter().any(String::is_empty) {
        return Err(Error::config(
            "gen.stop_strings (--stop): an empty text, with which every answer would end at once",
        )
        .hint("name the text that ends an answer, or leave the key out"));
    }
    names_none(config)?;
    vision(resolved)?;
    unused_keys::refuse(resolved)?;
    let from_weights = tuning.lora.init_lora_weights.is_pissa() || tuning.lora.init_lora_weights == InitLora::Loftq;
    resolved.refuse_if(
        from_weights && tuning.adapter.is_some(),
        "tuning.lora.init_lora_weights",
        "tuning.adapter",
        "the adapter in tuning.adapter is initialized already; remove one of them",
    )?;
    task::contradictions(resolved)?;
    quantization(resolved)
}

/// Refuses keys that contradict a quantized base model.
fn quantization(resolved: &Resolved) -> Result<()> {
    let config = &resolved.config;
    let (lora, kind) = (&config.tuning.lora, config.model.quantization);
    let qlora = resolved.settings.iter().any(|setting| setting.key == "tuning.mode" && setting.value == "qlora");
    let quantized = !matches!(kind, Quantization::Auto | Quantization::None);
    resolved.refuse_if(
        qlora && kind == Quantization::None,
        "tuning.mode",
        "model.quantization",
        "qlora trains on a quantized base; set mode: lora, or remove model.quantization",
    )?;
    resolved.refuse_if(
        quantized && !config.tuning.mode.adapts(),
        "model.quantization",
        "tuning.mode",
        "quantized weights cannot be trained themselves; train an adapter, such as mode: qlora, or set quantization: none",
    )?;
    resolved.refuse_if(
        quantized && lora.init_lora_weights.is_pissa(),
        "tuning.lora.init_lora_weights",
        "model.quantization",
        "PiSSA changes the base before it is quantized, so other tools do not have it; use loftq",
    )?;
    resolved.refuse_if(
        lora.init_lora_weights == InitLora::Loftq && !matches!(kind, Quantization::Nf4 | Quantization::Fp4),
        "tuning.lora.init_lora_weights",
        "model.quantization",
        "LoftQ needs a base of 4 bits; set tuning.mode: qlora",
    )?;
    resolved.refuse_if(
        lora.loftq_iter > 1 && lora.init_lora_weights != InitLora::Loftq,
        "tuning.lora.loftq_iter",
        "tuning.lora.init_lora_weights",
        "only loftq has rounds; set init_lora_weights: loftq, or remove the key",
    )
}

/// Whether a higher value of a metric is better. It is not for losses, perplexities and errors.
pub fn greater_is_better(measure: &str) -> bool {
    !matches!(measure, "loss" | "perplexity" | "byte_perplexity" | "mse" | "mae")
}

/// What the section `vision` and the keys of `tuning` about pictures exclude of one another.
fn vision(resolved: &Resolved) -> Result<()> {
    let Config { vision, tuning, .. } = &resolved.config;
    let of_pair = [
        ("revision", vision.revision.is_some()),
        ("connector", vision.connector != ConnectorChoice::Linear),
        ("feature_layer", vision.feature_layer.is_some()),
        ("image_token", vision.image_token.is_some()),
    ];
    if vision.min_pixels.zip(vision.max_pixels).is_some_and(|(least, most)| least > most) {
        return Err(Error::config("vision.min_pixels is above vision.max_pixels"));
    }
    if let Some((key, _)) = of_pair.into_iter().find(|(_, set)| *set && vision.encoder.is_none()) {
        return Err(Error::config(format!("vision.{key} is for vision.encoder, which is not set")).hint(
            "name an image encoder, or remove the key: a multimodal model has an encoder and a connector of its own",
        ));
    }
    resolved.refuse_if(
        vision.connector == ConnectorChoice::Linear && vision.connector_hidden_size.is_some(),
        "vision.connector",
        "vision.connector_hidden_size",
        "a linear connector has one module; set vision.connector: mlp",
    )?;
    resolved.refuse_if(
        vision.connector == ConnectorChoice::Linear && vision.connector_dropout > 0.0,
        "vision.connector",
        "vision.connector_dropout",
        "a linear connector has one module; set vision.connector: mlp",
    )?;
    resolved.refuse_if(
        vision.encoder.is_some() && vision.load == Some(false),
        "vision.encoder",
        "vision.load",
        "an encoder that is not loaded sees nothing; remove one of them",
    )?;
    resolved.refuse_if(
        vision.world.encoder.is_some() && vision.load == Some(false),
        "vision.world.encoder",
        "vision.load",
        "an encoder that is not loaded sees nothing; remove one of them",
    )?;
    resolved.refuse_if(
        !tuning.freeze_vision && tuning.vision_unfreeze_layers > 0,
        "tuning.freeze_vision",
        "tuning.vision_unfreeze_layers",
        "the whole encoder is trained; remove one of them",
    )?;
    resolved.refuse_if(
        !tuning.freeze_vision && !tuning.vision_target_modules.is_empty(),
        "tuning.freeze_vision",
        "tuning.vision_target_modules",
        "the whole encoder is trained, so it needs no adapters; remove one of them",
    )?;
    resolved.refuse_if(
        !tuning.mode.adapts() && !tuning.vision_target_modules.is_empty(),
        "tuning.mode",
        "tuning.vision_target_modules",
        "this mode trains no adapter; set freeze_vision: false to train the encoder",
    )
}
