//! LoRA (Hu et al., 2021): `y = W x + b + B (s A x)`, `s = alpha / r` or, rank-stabilised, `alpha / sqrt(r)`. Given
//! `dy`: `dz = s B^T dy`, `dB = dy (s A x)^T`, `dA = dz x^T`, `dx = W^T dy + A^T dz`. Dropout acts on the adapter's
//! input alone, as in PEFT. The product is in `low_rank`, magnitudes are in `dora`, and [`super::start`] initializes A
//! and B.
use std::sync::Arc;

use rayon::prelude::*;
use serde_json::Value;

use super::dora::{self, Dora, Magnitude};
use super::low_rank::{Matrices, OfExpert};
use super::{
    About, Adapter, Attach, Method, Part, Placement, Rank, Ranks, Site, Stacked, Targets, names, parameters, ranks,
    start,
};
use crate::linear::Formula;
use crate::names::ends_with_module;
use crate::values::placed;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::adapters::lora::{LoraConfig, PREFIX};
use tunesmith_config::{ConfigValue, InitLora, Mode, TargetModules, TuningConfig};
use tunesmith_device::Array;
use tunesmith_ops::low_rank;
use tunesmith_plan::memory::{Footprint, LowRank};

/// What all LoRA adapters have in common.
pub static ABOUT: About = About {
    mode: Mode::Lora,
    title: "LoRA",
    parts: "the matrices A and B",
    section: &LoraConfig::section(),
    training: &["lora_dropout", "loraplus_lr_ratio"],
    starting: &["init_lora_weights", "loftq_iter"],
    ours: &["loraplus_lr_ratio", "loftq_iter"],
    peft_type: "LORA",
    prefix: PREFIX,
    fields: r#"{"alora_invocation_tokens": null, "arrow_config": null, "corda_config": null,
        "eva_config": null, "fan_in_fan_out": false, "kasa_config": null, "layer_replication": null, "layers_pattern": null,
        "loftq_config": {}, "lora_bias": false, "lora_ga_config": null, "megatron_config": null,
        "megatron_core": "megatron.core", "monteclora_config": null, "qalora_group_size": 16,
        "trainable_token_indices": null, "use_bdlora": null, "use_qalora": false, "velora_config": null}"#,
    indifferent: &[
        "corda_config",
        "eva_config",
        // PEFT sets `fan_in_fan_out` by the class of the module.
        "fan_in_fan_out",
        "loftq_config",
        "lora_ga_config",
        "megatron_core",
        "qalora_group_size",
    ],
    absent: r#"{"r": 8, "lora_alpha": 8}"#,
};

impl Method for LoraConfig {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn targets(&self) -> Targets {
        Targets {
            section: LoraConfig::SECTION,
            target_modules: self.target_modules.clone(),
            target_parameters: self.target_parameters.clone(),
            renames: true,
            exclude_modules: self.exclude_modules.clone(),
            layers_to_transform: self.layers_to_transform.clone(),
            modules_to_save: self.modules_to_save.clone(),
            ensure_weight_tying: self.ensure_weight_tying,
            bias: self.bias,
            ranks: Some(Ranks {
                r: self.r,
                alpha: self.lora_alpha,
                rslora: self.use_rslora,
                rank_pattern: self.rank_pattern.clone(),
                alpha_pattern: self.alpha_pattern.clone(),
            }),
            ..Targets::default()
        }
    }

    fn adapter(&self, site: &Site<'_>) -> Arc<dyn Adapter> {
        let (outputs, inputs) = (site.module.out_features, site.module.in_features);
        Arc::new(Update { outputs, inputs, rank: site.rank, magnitudes: self.use_dora, experts: site.experts })
    }

    fn list(&self, placements: &[Placement], tuning: &mut TuningConfig) {
        let (rank_pattern, alpha_pattern) = ranks(placements, self.r, self.lora_alpha);
        tuning.lora = Self {
            target_modules: names(placements),
            target_parameters: parameters(placements),
            exclude_modules: None,
            layers_to_transform: None,
            rank_pattern,
            alpha_pattern,
            init_lora_weights: match self.init_lora_weights {
                InitLora::Pissa => InitLora::Pissa,
                _ => InitLora::Kaiming,
            },
            ..self.clone()
        };
    }

    fn write(&self, placements: &[Placement], tuning: &mut TuningConfig) {
        let named = |key: &String| self.target_parameters.iter().any(|target| ends_with_module(key, target));
        let parameters = parameters(placements);
        let all_linear = self.target_modules == TargetModules::AllLinear;
        if !parameters.iter().all(named) || all_linear && !parameters.is_empty() {
            // Some parameters were found by the name of a module. PEFT's file lists them as the parameters that they
            // are. Such names also double the rank of a parameter that is named by itself.
            self.list(placements, tuning);
        } else if matches!(self.target_modules, TargetModules::Auto | TargetModules::AllLinear) {
            tuning.lora.target_modules = names(placements);
        }
    }

    fn check(&self, placements: &[Placement]) -> Result<()> {
        if let Some(placement) = placements.iter().find(|placement| placement.is_on_parameter()) {
            let plain = format!("adapters on parameters ({}) are plain LoRA, as in PEFT", placement.key);
            let refused = [
                (self.use_dora, "use_dora"),
                (self.lora_dropout > 0.0, "lora_dropout"),
                (self.init_lora_weights.is_pissa(), "init_lora_weights: pissa"),
            ];
            if let Some((_, key)) = refused.into_iter().find(|(refused, _)| *refused) {
                return Err(Error::config(format!("tuning.lora.{key} with target_parameters: {plain}"))
                    .hint("target_modules: auto leaves router and experts as they are"));
            }
        }
        let rank = |placement: &Placement| placement.adapter.rank().map_or(0, |rank| rank.r);
        let too_large =
            placements.iter().find(|placement| rank(placement) > placement.in_features.min(placement.out_features));
        match too_large.filter(|_| self.init_lora_weights.is_pissa()) {
            Some(placement) => Err(Error::config(format!(
                "tuning.lora.init_lora_weights: pissa: rank {} of {}, which is [{}, {}] and has no more singular values \
                 than its smaller side",
                rank(placement),
                placement.module,
                placement.out_features,
                placement.in_features
            ))
            .hint("lower tuning.lora.r, or name the module in tuning.lora.rank_pattern")),
            None => Ok(()),
        }
    }

    fn dropout(&self) -> f64 {
        self.lora_dropout
    }

    fn takes_from_base(&self) -> bool {
        self.init_lora_weights.is_pissa()
    }

    fn start(&self) -> Option<String> {
        match self.init_lora_weights {
            // What the adapter starts with is taken out of the base, at a resume too.
            init if init.is_pissa() => init.to_json().as_str().map(str::to_owned),
            // The base of more than one round is not the quantized checkpoint.
            InitLora::Loftq if self.loftq_iter > 1 => Some(format!("loftq of {} rounds", self.loftq_iter)),
            _ => None,
        }
    }

    fn read_field(&self, key: &str, value: &Value) -> Option<Value> {
        match (key, value.as_str()) {
            // These initializations store A and B in the file, and leave the base as it is.
            ("init_lora_weights", Some("eva" | "orthogonal")) => Some(Value::Bool(true)),
            // Others also change the base: such an adapter fits another base than this one.
            ("init_lora_weights", Some(word)) if !["gaussian", "pissa"].contains(&word) => None,
            _ => Some(value.clone()),
        }
    }

    fn write_field(&self, key: &str, value: Value) -> Value {
        // PEFT would quantize the base again on loading; the values are stored.
        if key == "init_lora_weights" && value == "loftq" { Value::Bool(true) } else { value }
    }
}

/// The low-rank update of a module, `s B A`, with A `[r, in_features]` and B `[out_features, r]`. On stacked experts, A
/// is `[experts * r, in_features]` and B `[out_features, r * experts]`. Expert e then has the rows from `e * r` to
/// `(e + 1) * r` of A, and every column `e + k * experts` of B, for k from 0 to r - 1.
#[derive(Debug)]
struct Update {
    outputs: usize,
    inputs: usize,
    rank: Rank,
    /// Whether the weight has a trained magnitude for each output (`use_dora`).
    magnitudes: bool,
    experts: Option<Stacked>,
}

impl Update {
    fn count(&self) -> usize {
        self.experts.map_or(1, |experts| experts.count)
    }
}

impl Adapter for Update {
    fn tensors(&self) -> Vec<(&'static str, Vec<usize>)> {
        let rank = self.rank.r * self.count();
        let matrices = [("lora_A.weight", vec![rank, self.inputs]), ("lora_B.weight", vec![self.outputs, rank])];
        let magnitudes = self.magnitudes.then(|| ("lora_magnitude_vector", vec![self.outputs]));
        matrices.into_iter().chain(magnitudes).collect()
    }

    fn describe(&self) -> String {
        let Rank { r, alpha, scale } = self.rank;
        format!("{r} {alpha:?} {scale:?}{}", if self.magnitudes { " dora" } else { "" })
    }

    fn rank(&self) -> Option<Rank> {
        Some(self.rank)
    }

    fn attach(&self, at: &mut dyn Attach) -> Result<Box<dyn Formula>> {
        let [a, b] = start::matrices(at, self.rank, [self.outputs, self.inputs])?;
        let (rank, scale) = (self.rank.r, self.rank.scale);
        let magnitudes = if self.magnitudes && at.device().only_counts() {
            Some((Array::zeros(at.device(), self.outputs), Vec::new()))
        } else if self.magnitudes {
            let [a, b] = [&a, &b].map(|start| placed(start.clone(), at.device()));
            let (weight, values) = at.base()?;
            let update = low_rank::Update { a: a.view(), b: b.view(), rank, scale };
            Some(dora::start(weight, values, update, self.inputs))
        } else {
            None
        };
        let (a, b, module) = (at.push(&a)?, at.push(&b)?, at.number());
        let matrices = Matrices { a, b, rank, scale, module, expert: None };
        Ok(match magnitudes {
            None => Box::new(matrices),
            Some((squares, norms)) => Box::new(Dora { matrices, magnitude: Magnitude::new(at.push(&norms)?, squares) }),
        })
    }

    fn attach_experts(&self, at: &mut dyn Attach) -> Result<Vec<Box<dyn Formula>>> {
        let (experts, rank) = (self.count(), self.rank.r);
        let [a, b] = start::of_experts(at, experts, rank, [self.outputs, self.inputs]);
        let (a, b, module) = (at.push(&a)?, at.push(&b)?, at.number());
        let parts = if self.experts.is_some_and(|experts| experts.interleaved) { 2 } else { 1 };
        let one = |(expert, part): (usize, usize)| -> Box<dyn Formula> {
            let rows = rank * self.inputs;
            let a = a.start + expert * rows..a.start + (expert + 1) * rows;
            let expert = Some(OfExpert { expert, experts, first: part, step: parts });
            Box::new(Matrices { a, b: b.clone(), rank, scale: self.rank.scale, module, expert })
        };
        Ok((0..experts).flat_map(|expert| (0..parts).map(move |part| (expert, part))).map(one).collect())
    }

    fn merge(&self, tensors: &[&[f32]], part: &Part, values: &mut [f32]) {
        let (&[a, b, ..], false) = (tensors, part.bias) else { return };
        let (inputs, r, experts) = (self.inputs, self.rank.r, self.count());
        let a = &a[part.expert * r * inputs..];
        values.par_chunks_mut(inputs).enumerate().for_each(|(row, values)| {
            let mut delta = vec![0.0f32; inputs];
            let b = &b[(part.first + part.step * row) * r * experts..];
            for k in 0..r {
                let b = b[k * experts + part.expert];
                delta.iter_mut().zip(&a[k * inputs..]).for_each(|(delta, a)| *delta += b * a);
            }
            values.iter_mut().zip(&delta).for_each(|(value, delta)| *value += self.rank.scale * delta);
            if let Some(magnitudes) = tensors.get(2) {
                dora::set_norm(values, magnitudes[row]);
            }
        });
    }

    fn footprint(&self) -> Arc<dyn Footprint> {
        Arc::new(LowRank { rank: self.rank.r as u64, magnitudes: self.magnitudes })
    }
}
