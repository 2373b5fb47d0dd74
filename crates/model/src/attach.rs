//! Puts a fresh adapter on a module of the model that is being built: it implements [`Attach`] on the tensors that a
//! builder reads.
use super::adapters::{Attach, Placement};
use super::linear::Linear;
use super::quantize::How;
use super::source::Tensors;
use super::weight::Weight;
use std::ops::Range;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::Config;
use tunesmith_config::arch::LinearSpec;
use tunesmith_device::{Device, Floats};

pub(super) struct Module<'s, 'b> {
    tensors: &'s mut Tensors<'b>,
    spec: &'s LinearSpec,
    number: u64,
    /// Names and shapes of the adapter's tensors, and how many of them have their values.
    adapter: Vec<(String, Vec<usize>)>,
    pushed: usize,
    /// Whether the adapter is on a block's experts, whose weights are built elsewhere.
    experts: bool,
    /// The module's weight and bias, once they are read or replaced.
    settled: Option<(Weight, Option<Weight>)>,
}

impl<'s, 'b> Module<'s, 'b> {
    pub(super) fn new(tensors: &'s mut Tensors<'b>, spec: &'s LinearSpec, number: u64, placement: &Placement) -> Self {
        Self {
            tensors,
            spec,
            number,
            adapter: placement.tensors(),
            pushed: 0,
            experts: placement.experts.is_some(),
            settled: None,
        }
    }

    /// The linear module with the adapter of `placement`.
    pub(super) fn attach(mut self, placement: &Placement) -> Result<Linear> {
        let adapter = Some(placement.adapter.attach(&mut self)?);
        self.base()?;
        let LinearSpec { name, out_features, in_features, .. } = self.spec;
        let (weight, bias) = self.settled.ok_or_else(|| Error::model(format!("{name}: no weight")))?;
        Ok(Linear { weight, bias, out_features: *out_features, in_features: *in_features, adapter })
    }
}

impl Attach for Module<'_, '_> {
    fn module(&self) -> &str {
        &self.spec.name
    }

    fn number(&self) -> u64 {
        self.number
    }

    fn config(&self) -> &Config {
        self.tensors.source.config
    }

    fn tensor_name(&self, index: usize) -> String {
        self.adapter.get(index).map(|(name, _)| name.clone()).unwrap_or_default()
    }

    fn how(&self) -> Option<How> {
        self.tensors.quantizer.how(&self.weight_name())
    }

    fn values(&self) -> Result<Vec<f32>> {
        self.tensors.values(&self.weight_name(), self.spec.out_features * self.spec.in_features)
    }

    fn base(&mut self) -> Result<(&Weight, Floats<'_>)> {
        let settled = match self.settled.take() {
            Some(settled) => settled,
            None => self.tensors.plain(self.spec)?,
        };
        Ok((&self.settled.insert(settled).0, self.tensors.params.values()))
    }

    fn replace(&mut self, weight: Weight) -> Result<()> {
        self.settled = Some((weight, self.tensors.bias(self.spec)?));
        Ok(())
    }

    fn device(&self) -> Device {
        self.tensors.device
    }

    fn push(&mut self, values: &[f32]) -> Result<Range<usize>> {
        if !self.experts {
            self.base()?;
        }
        if let (true, Some((name, shape))) = (self.tensors.only_counts(), self.adapter.get(self.pushed)) {
            self.pushed += 1;
            let values = Floats::meta(shape.iter().product());
            return Ok(self.tensors.params.push(name.clone(), shape.clone(), true, values));
        }
        let next = self.adapter.get(self.pushed).filter(|(_, shape)| shape.iter().product::<usize>() == values.len());
        let Some((name, shape)) = next.cloned() else {
            let (count, number) = (values.len(), self.pushed);
            return Err(Error::model(format!("{}: {count} values for tensor {number} of its adapter", self.spec.name)));
        };
        self.pushed += 1;
        Ok(self.tensors.params.push(name, shape, true, values.into()))
    }
}
