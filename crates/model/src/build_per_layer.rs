//! Builds per-layer embeddings (Gemma 3n and 4), and what only Gemma 4 has: experts beside an MLP.
use super::build::{Builder, gate};
use super::linear::Linear;
use super::mlp_and_experts::MlpAndExperts;
use super::moe::Moe;
use super::norm::Norm;
use super::per_layer::{PerLayer, PerLayerGate};
use std::collections::BTreeMap;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::{LAYER_SCALAR, LinearSpec, PER_LAYER_EMBEDDING, PER_LAYER_NORM, PER_LAYER_PROJECTION};

/// Linear modules that are not built yet, by name.
type Linears = BTreeMap<String, LinearSpec>;

impl Builder<'_> {
    /// What makes the embeddings of all blocks, if there are some.
    pub(super) fn per_layer(&mut self, linears: &mut Linears) -> Result<Option<PerLayer>> {
        let arch = self.arch;
        let Some(spec) = &arch.per_layer else { return Ok(None) };
        Ok(Some(PerLayer {
            table: self.tensors.weight(PER_LAYER_EMBEDDING)?,
            projection: self.named(PER_LAYER_PROJECTION, linears)?,
            norm: self.tensors.norm(PER_LAYER_NORM)?,
            blocks: arch.num_hidden_layers,
            rows: spec.vocab_size,
            table_scale: (spec.width as f64).sqrt() as f32,
            projection_scale: (arch.hidden_size as f64).powf(-0.5) as f32,
        }))
    }

    /// The gate of a block's own embeddings.
    pub(super) fn per_layer_gate(&mut self, layer: usize, linears: &mut Linears) -> Result<PerLayerGate> {
        let mut linear =
            |name: &str| -> Result<Linear> { self.named(&format!("model.layers.{layer}.{name}"), linears) };
        let (to_gate, projection) = (linear("per_layer_input_gate")?, linear("per_layer_projection")?);
        Ok(PerLayerGate { gate: to_gate, projection, act: gate(self.arch), block: layer })
    }

    /// What a block's output is multiplied by.
    pub(super) fn layer_scalar(&self, layer: usize) -> Result<Option<f32>> {
        if !self.arch.layer_scalar {
            return Ok(None);
        }
        if self.tensors.only_counts() {
            return Ok(Some(1.0));
        }
        Ok(self.tensors.values(&format!("model.layers.{layer}{LAYER_SCALAR}"), 1)?.pop())
    }

    /// Experts beside an MLP.
    pub(super) fn mlp_and_experts(&mut self, layer: usize, linears: &mut Linears) -> Result<MlpAndExperts> {
        let arch = self.arch;
        let experts = arch.experts.as_ref().ok_or_else(|| Error::model(format!("block {layer} has no experts")))?;
        let mlp = self.mlp(layer, linears)?;
        let mlp_norm = self.norm(layer, "post_feedforward_layernorm_1")?;
        let experts_norm = self.norm(layer, "pre_feedforward_layernorm_2")?;
        let prefix = format!("model.layers.{layer}.router");
        let router_norm =
            Norm { weight: self.tensors.weight(&format!("{prefix}.scale"))?, ..self.tensors.weightless(0) };
        let factors = Some(self.tensors.weight(&format!("{prefix}.per_expert_scale"))?);
        // The router is a linear module, built with the experts.
        linears.remove(&format!("{prefix}.proj"));
        let moe = Moe { factors, ..self.moe(layer, experts, linears)? };
        let moe_norm = self.norm(layer, "post_feedforward_layernorm_2")?;
        let router_scale = (arch.hidden_size as f64).powf(-0.5) as f32;
        Ok(MlpAndExperts { mlp, mlp_norm, router_norm, router_scale, experts_norm, moe, moe_norm })
    }
}
