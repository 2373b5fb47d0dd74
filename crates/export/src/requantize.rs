//! Quantizes the matrices of a merged model to 4 or 8 bits, as bitsandbytes stores them, and measures the error.
use std::collections::BTreeSet;

use serde_json::Value;

use super::merge::Merged;
use tunesmith_base::error::Result;
use tunesmith_config::arch::{Arch, TensorSpec};
use tunesmith_model::quantize::{self, Held};
use tunesmith_model::weights::config_json;
use tunesmith_ops::quant::encode::{BLOCK, NESTED_BLOCK};
use tunesmith_ops::quant::{Format, Quantized, encode};

/// Which matrices of a model are quantized, and how.
#[derive(Debug)]
pub struct Requantization {
    held: Held,
    matrices: BTreeSet<String>,
}

/// The error that quantization adds to the weights.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Loss {
    /// How many matrices were quantized.
    pub matrices: usize,
    /// The largest absolute change of a weight.
    pub largest: f32,
    /// The largest absolute weight before quantization.
    pub scale: f32,
    sum: f64,
    count: u64,
}

impl Loss {
    /// The mean absolute change of a weight.
    pub fn mean(&self) -> f64 {
        self.sum / self.count.max(1) as f64
    }

    pub(super) fn add(&mut self, values: &[f32], dequantized: &[f32]) {
        self.matrices += 1;
        self.count += values.len() as u64;
        for (value, dequantized) in values.iter().zip(dequantized) {
            let difference = (value - dequantized).abs();
            self.sum += f64::from(difference);
            self.largest = self.largest.max(difference);
            self.scale = self.scale.max(value.abs());
        }
    }
}

impl Requantization {
    /// Chooses the matrices of a model of this shape.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: the list of modules that are left out fits nothing.
    pub fn new(arch: &Arch, held: Held) -> Result<Self> {
        Ok(Self { matrices: quantize::matrices(arch, &held.skip)?, held })
    }

    /// The format in words, for messages.
    pub fn describe(&self) -> String {
        self.held.how.describe()
    }

    /// Whether this tensor is quantized.
    pub(super) fn has(&self, name: &str) -> bool {
        self.matrices.contains(name)
    }

    /// Approximate bytes of a matrix in its file.
    pub(super) fn bytes(&self, spec: &TensorSpec) -> u64 {
        /// Allowance in bytes for the lookup tables and the description of a matrix.
        const BESIDE: u64 = 4 * (16 + 256) + 256;
        let len = spec.len() as u64;
        match self.held.how.format {
            Format::Mxfp4 | Format::Nvfp4 | Format::Int4Groups => len.div_ceil(2) + len.div_ceil(16),
            Format::Int8 | Format::Fp8 | Format::Fp8Tiles(_) | Format::Int8Groups => {
                len + 4 * spec.shape.first().map_or(0, |&rows| rows as u64) + 1
            }
            Format::Nf4 | Format::Fp4 => {
                let blocks = len.div_ceil(BLOCK as u64);
                let nested = blocks + 4 * blocks.div_ceil(NESTED_BLOCK as u64);
                len.div_ceil(2) + if self.held.how.double { nested } else { 4 * blocks } + BESIDE
            }
        }
    }

    /// Quantizes a matrix of the merged model, and adds its error to `loss`.
    ///
    /// # Errors
    /// Those of [`Merged::values`]; [`tunesmith_base::Kind::Model`]: a number that cannot be quantized.
    pub(super) fn quantize(&self, merged: &Merged, spec: &TensorSpec, loss: &mut Loss) -> Result<Quantized> {
        let values = merged.values(spec)?;
        let width = spec.shape.last().copied().unwrap_or(1);
        let matrix = encode::quantize(&values, width, self.held.how.format, self.held.how.double)
            .map_err(|error| error.context(format!("tensor {:?}", spec.name)))?;
        loss.add(&values, &matrix.dequantize());
        Ok(matrix)
    }

    /// The `quantization_config` for `config.json`, in bitsandbytes' form. It lists the modules `beside` as unquantized too.
    pub(super) fn config_json(&self, beside: BTreeSet<String>) -> Value {
        let skipped: Vec<String> = self.held.skip.iter().cloned().chain(beside).collect();
        config_json(self.held.how.format, self.held.how.double, &skipped)
    }
}
