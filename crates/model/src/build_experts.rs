//! Builds the mixtures of experts of blocks.
use super::adapters::Placement;
use super::attach::Module;
use super::build::{Builder, gate};
use super::expert::Expert;
use super::linear::{Formula, Linear};
use super::mlp::Mlp;
use super::moe::Moe;
use super::plain_mlp::PlainMlp;
use super::projections::Projections;
use super::source::Tensors;
use std::collections::BTreeMap;
use std::sync::Arc;
use tunesmith_base::error::Result;
use tunesmith_config::arch::{Arch, Clamp, ExpertGroups, Experts, LinearSpec, RouterSpec, SharedExpert};
use tunesmith_ops::gated_mlp::Gate;
use tunesmith_ops::pointwise::Function;
use tunesmith_ops::route::{GroupScore, Groups, Router, Scores};

impl Builder<'_> {
    /// The adapters of all experts of a block on one of their matrices, part by part.
    fn expert_adapters(&mut self, parameter: &str) -> Result<Vec<Box<dyn Formula>>> {
        let wrapper = self.placements.iter().find(|(_, (_, placement))| placement.key == parameter);
        let Some(wrapper) = wrapper.map(|(wrapper, _)| wrapper.clone()) else { return Ok(Vec::new()) };
        let Some((number, placement)) = self.placements.remove(&wrapper) else { return Ok(Vec::new()) };
        let Placement { out_features, in_features, .. } = placement;
        let spec = LinearSpec { name: wrapper, out_features, in_features, bias: false, layer: None };
        placement.adapter.attach_experts(&mut Module::new(&mut self.tensors, &spec, number, &placement))
    }

    pub(super) fn moe(
        &mut self,
        layer: usize,
        experts: &Experts,
        linears: &mut BTreeMap<String, LinearSpec>,
    ) -> Result<Moe> {
        let (prefix, hidden) = (format!("model.layers.{layer}"), self.arch.hidden_size);
        let router = LinearSpec {
            name: format!("{prefix}.{}", experts.router().trim_end_matches(".weight")),
            out_features: experts.count,
            in_features: hidden,
            bias: experts.biased,
            layer: Some(layer),
        };
        let router = self.linear(&router)?;
        let module = format!("{prefix}.{}", experts.module());
        let [before, after] = experts.parameters().map(|name| self.expert_adapters(&format!("{module}.{name}")));
        let (before, mut after) = (before?, after?.into_iter());
        // Then gate and up have an adapter each, of which each takes every other row of B.
        let apart = experts.is_interleaved() && !before.is_empty();
        let mut before = before.into_iter();
        let mut parts = Vec::with_capacity(experts.count);
        for expert in 0..experts.count {
            let own = before.by_ref().take(1 + usize::from(apart)).collect();
            parts.push(self.expert(layer, experts, expert, own, after.next())?);
        }
        let shared = match experts.shared {
            Some(_) if experts.shared_module() == self.arch.module_names.mlp => {
                Some((Expert::Gated(self.mlp(layer, linears)?), None))
            }
            Some(SharedExpert { gated, .. }) => {
                let (module, gate) = (experts.shared_module(), gate_of(self.arch, experts));
                let mut linear = |name: &str| self.named(&format!("{prefix}.{module}{name}"), linears);
                let mlp = if experts.gated {
                    let (to_gate, to_up) = (linear(".gate_proj")?, linear(".up_proj")?);
                    let gate_up = Projections::apart([to_gate, to_up]);
                    Expert::Gated(Mlp { gate_up, down: linear(".down_proj")?, gate, cut: None })
                } else {
                    let fc1 = linear(".up_proj")?;
                    Expert::Plain(PlainMlp { fc1, fc2: linear(".down_proj")?, function: Function::Relu2 })
                };
                Some((mlp, gated.then(|| linear("_gate")).transpose()?))
            }
            None => None,
        };
        let latent = match experts.latent {
            Some(_) => {
                let feed = experts.feed();
                let mut linear = |name: &str| self.named(&format!("{prefix}.{feed}.{name}"), linears);
                Some([linear("fc1_latent_proj")?, linear("fc2_latent_proj")?])
            }
            None => None,
        };
        let choice = experts.choice_bias().filter(|_| !self.tensors.only_counts());
        let choice = choice.map(|name| self.tensors.values(&format!("{prefix}.{name}"), experts.count)).transpose()?;
        let pool = Arc::clone(&self.expert_pools[usize::from(layer + 1 == self.arch.num_hidden_layers)]);
        Ok(Moe { router, experts: parts, shared, latent, factors: None, how: how(experts), choice, pool })
    }

    /// One expert of a block, with the adapters on its parts of the block's two parameters: two on the first one where gate and up
    /// have an adapter each.
    fn expert(
        &mut self,
        layer: usize,
        experts: &Experts,
        expert: usize,
        before: Vec<Box<dyn Formula>>,
        after: Option<Box<dyn Formula>>,
    ) -> Result<Expert> {
        let prefix = format!("model.layers.{layer}");
        let (width, features) = (experts.width, experts.latent.unwrap_or(self.arch.hidden_size));
        let linear = |weight, bias, adapter, [out_features, in_features]: [usize; 2]| Linear {
            weight,
            bias,
            out_features,
            in_features,
            adapter,
        };
        let apart = before.len() > 1;
        let mut before = before.into_iter();
        let names: Vec<String> = experts.names(expert).iter().map(|name| format!("{prefix}.{name}")).collect();
        let [to_gate, to_up, to_down] = match names.as_slice() {
            [to_up, to_down] => {
                let fc1 = linear(self.tensors.weight(to_up)?, None, before.next(), [width, features]);
                let fc2 = linear(self.tensors.weight(to_down)?, None, after, [features, width]);
                let [fc1, fc2] = [fc1, fc2].map(|module| self.arranged(module));
                return Ok(Expert::Plain(PlainMlp { fc1, fc2, function: Function::Relu2 }));
            }
            [to_gate, to_up, to_down] => [to_gate, to_up, to_down],
            _ => unreachable!("an expert has two or three matrices"),
        };
        let pair = |tensors: &mut Tensors<'_>, [of_gate, of_up]: [&str; 2], shape: &[usize]| {
            if apart {
                return Ok(vec![tensors.weight(of_gate)?, tensors.weight(of_up)?]);
            }
            tensors.joined([of_gate, of_up], shape).map(|joined| vec![joined])
        };
        let weights = pair(&mut self.tensors, [to_gate, to_up], &[width, features])?;
        let down = self.tensors.weight(to_down)?;
        let (biases, down_bias) = match experts.bias_names(expert) {
            Some(names) => {
                let [of_gate, of_up, of_down] = names.map(|name| format!("{prefix}.{name}"));
                let biases = pair(&mut self.tensors, [&of_gate, &of_up], &[width])?;
                (biases, Some(self.tensors.weight(&of_down)?))
            }
            None => (Vec::new(), None),
        };
        let (mut biases, outputs) = (biases.into_iter(), if apart { width } else { 2 * width });
        let module = |weight| linear(weight, biases.next(), before.next(), [outputs, features]);
        let gate_up: Vec<Linear> = weights.into_iter().map(module).map(|module| self.arranged(module)).collect();
        let gate_up = match <[Linear; 2]>::try_from(gate_up) {
            Ok(modules) => Projections::apart(modules),
            Err(mut joined) => Projections::fused(joined.remove(0), [width; 2]),
        };
        let down = self.arranged(linear(down, down_bias, after, [features, width]));
        Ok(Expert::Gated(Mlp { gate_up, down, gate: gate_of(self.arch, experts), cut: None }))
    }
}

/// How the router chooses the experts of a token, and how it weights them.
fn how(experts: &Experts) -> Router {
    let RouterSpec { sigmoid, groups, eps, scale, .. } = experts.router;
    Router {
        per_token: experts.per_token,
        scores: if sigmoid { Scores::Sigmoid } else { Scores::Softmax },
        groups: groups.map(|ExpertGroups { count, chosen, by_best }| Groups {
            count,
            chosen,
            score: if by_best { GroupScore::Best } else { GroupScore::BestTwo },
        }),
        normalised: experts.normalised.then_some(eps as f32),
        scale: scale as f32,
    }
}

/// The activation function of these experts' gates.
fn gate_of(arch: &Arch, experts: &Experts) -> Gate {
    match experts.clamp {
        Some(Clamp { alpha, limit }) => Gate::Clamped { alpha: alpha as f32, limit: limit as f32 },
        None => gate(arch),
    }
}
