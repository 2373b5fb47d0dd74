//! Builds what only Gemma 3n has: several residual streams, and a low-rank branch beside attention.
use super::altup::{AltUp, Router};
use super::branch::Gained;
use super::build::Builder;
use super::laurel::Laurel;
use super::linear::Linear;
use super::streams::Projected;
use std::collections::BTreeMap;
use tunesmith_base::error::Result;
use tunesmith_config::arch::{ALTUP_PROJECTIONS, ALTUP_UNEMBED_PROJECTIONS, AltUpSpec, LinearSpec};
use tunesmith_device::Array;

/// Linear modules that are not built yet, by name.
type Linears = BTreeMap<String, LinearSpec>;

impl Builder<'_> {
    /// The low-rank branch beside a block's attention, where the model has several streams.
    pub(super) fn laurel(&mut self, layer: usize, linears: &mut Linears) -> Result<Option<Box<Laurel>>> {
        if self.arch.altup.is_none() {
            return Ok(None);
        }
        let mut linear =
            |name: &str| -> Result<Linear> { self.named(&format!("model.layers.{layer}.laurel.{name}"), linears) };
        let (left, right) = (linear("linear_left")?, linear("linear_right")?);
        Ok(Some(Box::new(Laurel { left, right, norm: self.norm(layer, "laurel.post_laurel_norm")? })))
    }

    /// What a block has beside its branches, where the model has several streams.
    pub(super) fn altup(&mut self, layer: usize, linears: &mut Linears) -> Result<Option<Box<AltUp>>> {
        let arch = self.arch;
        let Some(AltUpSpec { streams, active, .. }) = arch.altup else { return Ok(None) };
        let begin = if layer == 0 { Some(self.projected(ALTUP_PROJECTIONS, streams, linears)?) } else { None };
        let mut linear =
            |name: &str| -> Result<Linear> { self.named(&format!("model.layers.{layer}.altup.{name}"), linears) };
        let correction = linear("correction_coefs")?;
        let prediction = linear("prediction_coefs")?;
        let to_streams = linear("modality_router")?;
        let norm = self.norm(layer, "altup.router_norm")?;
        let router = Router { norm, linear: to_streams, scale: 1.0 / arch.hidden_size as f32 };
        let gain = self.tensors.weight(&format!("model.layers.{layer}.altup.correct_output_scale"))?;
        let (device, width) = (self.tensors.device, arch.hidden_size);
        let output_scale = Gained::new(gain, || Array::of(device, &vec![1.0; width]));
        let per_layer = self.per_layer_gate(layer, linears)?;
        let per_layer_norm = self.norm(layer, "post_per_layer_input_norm")?;
        let is_last = layer + 1 == arch.num_hidden_layers;
        let end = if is_last { Some(self.projected(ALTUP_UNEMBED_PROJECTIONS, streams, linears)?) } else { None };
        let altup = AltUp {
            streams,
            active,
            router,
            prediction,
            correction,
            output_scale,
            per_layer,
            per_layer_norm,
            begin,
            end,
        };
        Ok(Some(Box::new(altup)))
    }

    /// The projections of all streams but the first.
    fn projected(&mut self, module: &str, streams: usize, linears: &mut Linears) -> Result<Projected> {
        let each = (0..streams - 1).map(|index| self.named(&format!("{module}.{index}"), linears));
        Ok(Projected(each.collect::<Result<_>>()?))
    }
}
