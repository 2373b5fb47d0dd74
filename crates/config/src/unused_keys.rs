//! Keys that are read only if another key has a certain value, such as `tuning.lora` with `mode: lora`. A key that nothing would read
//! is refused.
use super::enums::{Dedupe, EvalMetric, EvalStrategy, LrScaling, Mode, Optim, SaveStrategy, Task};
use super::resolved::Resolved;
use super::schema::{self, Config, TuningConfig};
use super::source::{Setting, Source};
use super::value::Node;
use tunesmith_base::error::Result;

/// A key that decides whether other keys are read.
struct Switch {
    key: &'static str,
    /// Whether the configuration reads `keys`.
    on: fn(&Config) -> bool,
    /// The keys that depend on it; an entry that ends with a dot is a whole section.
    keys: &'static [&'static str],
    /// Why they are not read, and what to change.
    why: &'static str,
}

macro_rules! sections_of_adapters {
    ($( $module:ident: $settings:ident = $mode:ident, $word:literal $( | $alias:literal ($alias_doc:literal) )?, $doc:literal; )*) => {
        const ADAPTERS: &[Switch] = &[$( Switch {
            key: "tuning.mode",
            on: |config| config.tuning.mode == Mode::$mode,
            keys: &[concat!("tuning.", $word, ".")],
            why: concat!("it shapes an adapter of mode: ", $word, ", which this mode does not train; set that, or remove it"),
        }, )*];
    };
}
tunesmith_base::registry::adapters!(sections_of_adapters);

const SWITCHES: &[Switch] = &[
    Switch {
        key: "vision.world.encoder",
        on: |config| config.vision.world.encoder.is_some(),
        keys: &["vision.world.projection_mode", "vision.world.projection_architecture", "vision.world.image_size"],
        why: "it shapes a second encoder; name its folder, or remove it",
    },
    Switch {
        key: "tuning.freeze_language",
        on: |config| !config.tuning.freeze_language,
        keys: &[
            "tuning.lora.target_modules",
            "tuning.lora.exclude_modules",
            "tuning.lora.layers_to_transform",
            "tuning.lora.target_parameters",
            "tuning.lora.modules_to_save",
            "tuning.lora.bias",
            "tuning.ia3.target_modules",
            "tuning.ia3.feedforward_modules",
            "tuning.ia3.exclude_modules",
            "tuning.ia3.modules_to_save",
            "tuning.oft.target_modules",
            "tuning.oft.exclude_modules",
            "tuning.oft.layers_to_transform",
            "tuning.oft.modules_to_save",
        ],
        why: "it chooses what is trained of the language model, which is frozen; remove one of them",
    },
    Switch {
        key: "tuning.mode",
        on: |config| config.tuning.mode == Mode::Freeze,
        keys: &["tuning.freeze."],
        why: "it says what mode: freeze trains; set that, or remove it",
    },
    Switch {
        key: "task",
        on: |config| config.task() == Task::Classification,
        keys: &["train.class_weights", "data.labels"],
        why: "only task: classification has labels; set that, or remove it",
    },
    Switch {
        key: "task",
        on: |config| config.task() == Task::CausalLm,
        keys: &[
            "gen.",
            "eval.metrics",
            "eval.normalization",
            "eval.rouge_stemmer",
            "eval.json_schema",
            "eval.scorer",
            "train.predict_with_generate",
            "data.format",
            "data.loss_on",
        ],
        why: "the rows of this task are {text, label}, and nothing is generated: all its measures are always made; remove it",
    },
    Switch {
        key: "train.eval_strategy",
        on: |config| config.train.eval_strategy != EvalStrategy::No,
        keys: &[
            "train.eval_on_start",
            "train.eval_steps",
            "train.predict_with_generate",
            "train.metric_for_best_model",
            "train.greater_is_better",
        ],
        why: "without validations nothing reads it; set eval_strategy: steps or epoch, or remove it",
    },
    Switch {
        key: "train.predict_with_generate",
        on: |config| config.train.predict_with_generate,
        keys: &[
            "train.generation_max_new_tokens",
            "train.generation_num_beams",
            "train.generation_rows",
            "train.eval_accumulation_steps",
        ],
        why: "it is about the answers of validations; set predict_with_generate: true, or remove it",
    },
    Switch {
        key: "train.save_strategy",
        on: |config| config.train.save_strategy == SaveStrategy::Steps,
        keys: &["train.save_steps"],
        why: "checkpoints are not written by steps; set save_strategy: steps, or remove it",
    },
    Switch {
        key: "train.optim",
        on: |config| !matches!(config.train.optim, Optim::Sgd | Optim::Adafactor),
        keys: &["train.adam_beta1", "train.adam_beta2"],
        why: "this optimizer has no such moments, and optim_args has what it reads; remove it",
    },
    Switch {
        key: "train.optim",
        on: |config| !matches!(config.train.optim, Optim::Sgd | Optim::Adafactor | Optim::Lion),
        keys: &["train.adam_epsilon"],
        why: "this optimizer does not divide by a moment; remove it",
    },
    Switch {
        key: "data.dedupe",
        on: |config| config.data.dedupe == Dedupe::Minhash,
        keys: &["data.dedupe_threshold"],
        why: "near-duplicates are not looked for; set dedupe: minhash, or remove it",
    },
    Switch {
        key: "data.datasets",
        on: |config| !config.data.datasets.is_empty(),
        keys: &["data.mix_strategy"],
        why: "rows of one source are not mixed; name the sources in data.datasets, or remove it",
    },
    Switch {
        key: "data.shuffle",
        // Rows for validation and those of a mix are drawn with it too.
        on: |config| config.data.shuffle || config.data.split > 0.0 || !config.data.datasets.is_empty(),
        keys: &["train.data_seed"],
        why: "nothing is drawn with it; set shuffle: true, or remove it",
    },
    Switch {
        key: "train.lr_scaling",
        on: |config| config.train.lr_scaling != LrScaling::None,
        keys: &["train.lr_scaling_batch"],
        why: "the rate is not scaled; set lr_scaling: linear or sqrt, or remove it",
    },
    Switch {
        key: "train.early_stopping_patience",
        on: |config| config.train.early_stopping_patience > 0,
        keys: &["train.early_stopping_threshold"],
        why: "early stopping is off; set the patience in validations, or remove it",
    },
    Switch {
        key: "gen.do_sample",
        on: |config| config.generation.do_sample,
        keys: &["gen.temperature", "gen.top_k", "gen.top_p", "gen.min_p", "gen.seed"],
        why: "the most probable token is taken, nothing is drawn; set do_sample: true, or remove it",
    },
    Switch {
        key: "gen.num_beams",
        on: |config| {
            config.generation.num_beams > 1 || config.train.generation_num_beams.is_some_and(|beams| beams > 1)
        },
        keys: &["gen.length_penalty", "gen.early_stopping"],
        why: "there is no beam search; set num_beams above 1, or remove it",
    },
    Switch {
        key: "gen.prompt_lookup_num_tokens",
        on: |config| config.generation.prompt_lookup_num_tokens > 0,
        keys: &["gen.max_matching_ngram_size"],
        why: "no tokens are guessed; set prompt_lookup_num_tokens above 0, or remove it",
    },
    Switch {
        key: "eval.metrics",
        on: |config| config.eval.metrics.contains(&EvalMetric::Json),
        keys: &["eval.json_schema"],
        why: "eval.metrics does not contain json; add it, or remove the schema",
    },
    Switch {
        key: "eval.metrics",
        on: |config| config.eval.metrics.contains(&EvalMetric::Rouge),
        keys: &["eval.rouge_stemmer"],
        why: "eval.metrics does not contain rouge; add it, or remove the key",
    },
    Switch {
        key: "eval.scorer",
        on: |config| !config.eval.scorer.is_empty(),
        keys: &["eval.scorer_timeout"],
        why: "there is no scorer; name its program, or remove the key",
    },
];

/// The switch that makes `config` ignore `key`; `None` if the key is read.
fn switch(key: &str, config: &Config) -> Option<&'static Switch> {
    let names = |switch: &&Switch| {
        switch.keys.iter().any(|name| if name.ends_with('.') { key.starts_with(name) } else { key == *name })
    };
    // A task without answers shows none anyway.
    let asks_for_nothing = key == "gen.num_samples" && config.generation.num_samples == 0;
    ADAPTERS.iter().chain(SWITCHES).filter(names).find(|switch| !(switch.on)(config)).filter(|_| !asks_for_nothing)
}

impl TuningConfig {
    /// Resets what chooses modules of the language model, for a run that freezes it: an included file may have set them for other runs.
    pub fn leave_language_out(&mut self) {
        let Self { lora, ia3, oft, .. } = Self::default();
        self.lora.target_modules = lora.target_modules;
        self.lora.exclude_modules = lora.exclude_modules;
        self.lora.layers_to_transform = lora.layers_to_transform;
        self.lora.target_parameters = lora.target_parameters;
        self.lora.modules_to_save = lora.modules_to_save;
        self.lora.bias = lora.bias;
        self.ia3 = ia3;
        self.oft.target_modules = oft.target_modules;
        self.oft.exclude_modules = oft.exclude_modules;
        self.oft.layers_to_transform = oft.layers_to_transform;
        self.oft.modules_to_save = oft.modules_to_save;
    }
}

impl Setting {
    /// Whether `config` reads it. Full training, for example, reads no setting of `tuning.lora`.
    pub fn is_read(&self, config: &Config) -> bool {
        switch(&self.key, config).is_none()
    }
}

/// Those of `settings` that nothing reads because of the others, each with the reason. A configuration with them is refused. Values
/// that a key does not accept are skipped: [`crate::try_setting`] reports them.
pub fn unused_keys<'a>(settings: &[(&'a str, &Node)]) -> Vec<(&'a str, &'static str)> {
    let mut config = Config::default();
    for (key, node) in settings {
        if let Some(def) = schema::options().find(|def| def.path() == *key) {
            let _ = (def.set)(&mut config, node);
        }
    }
    settings.iter().filter_map(|(key, _)| switch(key, &config).map(|switch| (*key, switch.why))).collect()
}

/// Refuses settings that nothing reads, unless the deciding key was given closer to the user. An included file may serve several
/// modes, and a word on the command line may override a switch of a file.
pub(super) fn refuse(resolved: &Resolved) -> Result<()> {
    let nearness = |source: &Source| match source {
        Source::Default => 0,
        Source::File { path, .. } if *path != resolved.path => 1,
        Source::File { .. } | Source::Foreign { .. } => 2,
        Source::Env(_) => 3,
        Source::Word(_) => 4,
        Source::Flag(_) => 5,
    };
    let default = Config::default();
    for def in schema::options().filter(|def| (def.get)(&default) != (def.get)(&resolved.config)) {
        let key = def.path();
        let Some(switch) = switch(&key, &resolved.config) else { continue };
        let (source, chosen) = (resolved.source(&key), resolved.source(switch.key));
        let other_file = match (source, chosen) {
            (Source::File { path: here, .. }, Source::File { path: there, .. }) => here != there,
            _ => false,
        };
        let (near, chosen_near) = (nearness(source), nearness(chosen));
        if near > chosen_near || (near == chosen_near && !other_file) {
            return Err(resolved.conflict(&key, switch.key, switch.why));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::yaml::parse_value;

    #[test]
    fn what_a_frozen_language_model_does_not_read_is_reset_for_it() {
        let switch = SWITCHES.iter().find(|switch| switch.key == "tuning.freeze_language").unwrap();
        let (default, mut config) = (Config::default(), Config::default());
        let values = |config: &Config| -> Vec<_> {
            let of = |key: &&str| {
                let option = schema::options().find(|option| option.path() == *key).unwrap();
                (option.get)(config)
            };
            switch.keys.iter().map(of).collect()
        };
        for key in switch.keys {
            let option = schema::options().find(|option| option.path() == *key).unwrap();
            let is_set = |text: &&str| {
                let read = (option.set)(&mut config, &parse_value(text)).is_ok();
                read && (option.get)(&config) != (option.get)(&default)
            };
            assert!(["[q_proj]", "[0]", "all"].iter().any(is_set), "{key}");
        }
        config.tuning.leave_language_out();
        assert_eq!(values(&config), values(&default));
    }
}
