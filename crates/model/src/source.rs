//! The tensors of the base: where their values come from (files, or the seed), in what form they are held, and which of
//! them are trained.
use super::init;
use super::names::{is_vocabulary, token_rows};
use super::norm::Norm;
use super::offload;
use super::params::Params;
use super::quantize::{How, Quantizer};
use super::stack::{Stack, round_to_bf16};
use super::values::placed;
use super::vision_files::VisionFiles;
use super::weight::Weight;
use super::weights::{StoredRows, WeightFiles};
use half::bf16;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::{Arch, LinearSpec, SCORE, TensorSpec, is_beside};
use tunesmith_config::{Config, Dtype};
use tunesmith_device::{Array, Device, FloatBuffer, Floats};
use tunesmith_ops::quant::encode;

/// Where base tensors come from.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// The model's shape, grown by new tokens.
    pub arch: &'a Arch,
    /// The checkpoint's files; without them, tensors are drawn from the seed.
    pub weights: Option<&'a WeightFiles>,
    /// The configuration: the seed of what is drawn, and the dtype of frozen matrices.
    pub config: &'a Config,
    /// Finished adapters to merge in.
    pub stack: &'a Stack,
}

impl Source<'_> {
    /// The values of a base tensor, with finished adapters merged in.
    ///
    /// # Errors
    /// Those of [`WeightFiles::read_into`] and of [`Stack::apply`].
    pub fn values(&self, name: &str, count: usize) -> Result<Vec<f32>> {
        let seed = self.config.train.seed;
        let vision = if is_beside(name) { VisionFiles::open(self.arch, self.weights, seed)? } else { None };
        let mut values = match vision.filter(|files| files.has(name)) {
            Some(files) => files.values(name, count)?,
            None => self.base(name, count)?,
        };
        self.stack.apply(name, &mut values)?;
        Ok(values)
    }

    /// As [`Source::values`], for a tensor that the run holds without training it: with `model.dtype: bfloat16` the
    /// values are rounded as they are in memory.
    ///
    /// # Errors
    /// As [`Source::values`].
    pub fn frozen_values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let mut values = self.values(name, shape.iter().product())?;
        if self.rounds(name, shape) {
            round_to_bf16(&mut values);
        }
        Ok(values)
    }

    /// Whether the configuration asks for a frozen tensor in bfloat16, whatever the dtype of the files. A table of which some rows
    /// are trained stays in float32.
    pub fn rounds(&self, name: &str, shape: &[usize]) -> bool {
        let narrow = self.config.model.dtype == Dtype::Bfloat16 && TensorSpec::is_matrix(shape);
        narrow && !self.stack.keeps(name) && self.arch.rows_of(name).is_empty()
    }

    /// As [`Source::values`], on `device`. A tensor that the run needs as it is stored goes from the file to the
    /// device, of which the host holds only a few MiB at a time.
    ///
    /// # Errors
    /// As [`Source::values`].
    pub(super) fn placed(&self, name: &str, count: usize, device: Device) -> Result<FloatBuffer> {
        let Some(files) = self.stored(name, count) else { return Ok(placed(self.values(name, count)?, device)) };
        let mut values = FloatBuffer::zeros(device, count);
        files.read_to(self.arch.starts_as(name), values.view_mut())?;
        Ok(values)
    }

    /// The files, if they hold a tensor as the run needs it: no adapter is merged into it, and it has no new rows.
    pub(super) fn stored(&self, name: &str, count: usize) -> Option<&WeightFiles> {
        let stored = self.arch.starts_as(name);
        let shape = self.weights?.shape(stored);
        let whole = !is_vocabulary(stored)
            || (self.arch.new_tokens.is_empty() && shape.is_some_and(|shape| shape.iter().product::<usize>() == count));
        let drawn = stored == SCORE && shape.is_none();
        self.weights.filter(|_| whole && !drawn && !self.stack.changes(name))
    }

    fn base(&self, name: &str, count: usize) -> Result<Vec<f32>> {
        let name = self.arch.starts_as(name);
        // A classification head is drawn where the checkpoint is that of a language model.
        let Some(files) = self.weights.filter(|files| name != SCORE || files.shape(name).is_some()) else {
            return Ok(init::base(self.config.train.seed, name, count, self.arch));
        };
        let mut values = vec![0.0; count];
        let (tokens, hidden) = (&self.arch.new_tokens, self.arch.hidden_size);
        let stored: usize = files.shape(name).map_or(0, |shape| shape.iter().product());
        if !is_vocabulary(name) || (tokens.is_empty() && stored == count) {
            files.read_into(name, &mut values)?;
            return Ok(values);
        }
        files.read_into(name, &mut values[..stored.min(count)])?;
        // New rows start as the mean of those that are there.
        let mut mean = vec![0.0f64; hidden];
        for row in values[..stored.min(count)].chunks_exact(hidden) {
            mean.iter_mut().zip(row).for_each(|(mean, &value)| *mean += f64::from(value));
        }
        let rows = (stored / hidden).max(1) as f64;
        let mean: Vec<f32> = mean.into_iter().map(|sum| (sum / rows) as f32).collect();
        let beyond = stored / hidden..count / hidden;
        for row in beyond.chain(tokens.iter().map(|&token| token as usize)) {
            values[row * hidden..][..hidden].copy_from_slice(&mean);
        }
        Ok(values)
    }
}

/// The tensors of a model that is being built.
pub(super) struct Tensors<'a> {
    pub(super) source: Source<'a>,
    /// The files of image encoder and connector, where the model has them.
    pub(super) vision: Option<VisionFiles>,
    /// The device that they go to. For the meta device, no value is read or drawn.
    pub(super) device: Device,
    pub(super) quantizer: Quantizer<'a>,
    /// The trained tensors, in the order in which they were asked for.
    pub(super) params: Params,
    /// On a device that only counts: the names of tensors that are float32 whatever `model.dtype` says.
    pub(super) float32: Option<&'a BTreeSet<String>>,
    /// The shape of each by its name.
    pub(super) sizes: BTreeMap<String, Vec<usize>>,
    /// The names of those that a GPU leaves in the host's memory.
    pub(super) offloaded: Vec<String>,
    /// The names of those that are trained in full.
    pub(super) trained: BTreeSet<String>,
    /// Trained tensors that have another name in an adapter's file.
    pub(super) renamed: BTreeMap<String, String>,
}

impl Tensors<'_> {
    /// The device of a frozen tensor: the host, for those that a GPU leaves there.
    fn place(&self, name: &str) -> Device {
        match self.device {
            Device::Cuda(_) if !self.offloaded.iter().any(|it| it == name) => self.device,
            Device::Cuda(_) if self.only_counts() => Device::Meta,
            Device::Cuda(_) | Device::Cpu => Device::Cpu,
            Device::Meta => Device::Meta,
        }
    }

    /// The files of a tensor of encoder or connector.
    fn vision(&self, name: &str) -> Option<&VisionFiles> {
        self.vision.as_ref().filter(|files| files.has(name))
    }

    /// As [`Source::values`], also for tensors of encoder and connector.
    pub(super) fn values(&self, name: &str, count: usize) -> Result<Vec<f32>> {
        let Some(files) = self.vision(name) else { return self.source.values(name, count) };
        let mut values = files.values(name, count)?;
        self.source.stack.apply(name, &mut values)?;
        Ok(values)
    }

    /// Whether the tensor, or some of its rows, is trained.
    pub(super) fn trains(&self, name: &str) -> bool {
        self.trained.contains(name) || !self.source.arch.rows_of(name).is_empty()
    }

    pub(super) fn weight(&mut self, name: &str) -> Result<Weight> {
        let Some(shape) = self.sizes.get(name).cloned() else {
            return Err(Error::model(format!("the architecture has no tensor {name:?}")));
        };
        let tokens = self.source.arch.rows_of(name);
        if self.only_counts() {
            return self.counted(name, shape);
        }
        if self.trained.contains(name) {
            let decay = init::decays(name) || self.source.config.train.decay_norms_and_bias;
            let renamed = self.renamed.get(name).map_or(name, String::as_str).to_owned();
            let count = shape.iter().product();
            let stored = self.source.stored(name, count).filter(|_| self.vision(name).is_none());
            let values = if stored.is_none() { self.values(name, count)? } else { Vec::new() };
            let range = self.params.push(renamed, shape, decay, Floats::meta(count));
            let place = self.params.last(count);
            let to = self.params.values_mut().slice(place);
            match stored {
                Some(files) => files.read_to(self.source.arch.starts_as(name), to)?,
                None => to.write(&values),
            }
            Ok(Weight::Trained(range))
        } else if !tokens.is_empty() {
            let (hidden, values) = (self.source.arch.hidden_size, self.source.values(name, shape.iter().product())?);
            let rows: Vec<f32> =
                tokens.iter().flat_map(|&token| values[token as usize * hidden..][..hidden].iter().copied()).collect();
            let range = self.params.push(token_rows(name), vec![tokens.len(), hidden], true, (&rows).into());
            Ok(Weight::rows(placed(values, self.device), tokens, range))
        } else {
            self.frozen(name, &shape)
        }
    }

    /// A table that stays in the model's files, whose rows are read when they are looked up: `train.offload_embedding` on the CPU.
    ///
    /// # Errors
    /// The file cannot be opened a second time ([`StoredRows::of`]).
    pub(super) fn stored_rows(&self, name: &str) -> Result<Option<StoredRows>> {
        let Source { arch, config, .. } = self.source;
        let stays = self.device == Device::Cpu && self.offloaded.iter().any(|it| it == name);
        let Some(shape) = self.sizes.get(name).filter(|_| stays && offload::stays_in_files(arch, config)) else {
            return Ok(None);
        };
        let plain = self.quantizer.how(name).is_none() && !self.trained.contains(name);
        let files = self.source.stored(name, shape.iter().product()).filter(|_| plain);
        let of = |files| StoredRows::of(files, arch.starts_as(name), shape[1], self.source.rounds(name, shape));
        Ok(files.map(of).transpose()?.flatten())
    }

    /// Whether tensors get no values, because only the model's memory is counted.
    pub(super) fn only_counts(&self) -> bool {
        self.device.only_counts()
    }

    fn counted(&mut self, name: &str, shape: Vec<usize>) -> Result<Weight> {
        let (tokens, count) = (self.source.arch.rows_of(name), shape.iter().product());
        if self.trained.contains(name) {
            Ok(Weight::Trained(self.params.push(name.to_owned(), shape, true, Floats::meta(count))))
        } else if tokens.is_empty() {
            self.frozen(name, &shape)
        } else {
            let rows = vec![tokens.len(), self.source.arch.hidden_size];
            let values = Floats::meta(rows.iter().product());
            let range = self.params.push(token_rows(name), rows, true, values);
            Ok(Weight::rows(FloatBuffer::zeros(self.device, count), tokens, range))
        }
    }

    /// A frozen base tensor of zeros, in the form in which a run holds it. While it is put there, a matrix to be
    /// quantized lies beside its codes as a whole.
    fn counted_frozen(&self, name: &str, shape: &[usize]) -> Result<Weight> {
        let (count, device) = (shape.iter().product(), self.place(name));
        if let Some(matrix) = self.quantizer.counted(name, shape, device) {
            return Ok(Weight::Quantized(Arc::new(matrix)));
        }
        if let Some(How { format, double }) = self.quantizer.how(name) {
            let (whole, width) = (FloatBuffer::zeros(device, count), shape.last().copied().unwrap_or(1));
            let matrix = encode::quantize_there(whole.view(), width, format, double)?;
            return Ok(Weight::Quantized(Arc::new(matrix)));
        }
        let wide = self.float32.is_some_and(|names| names.contains(name));
        let narrow = TensorSpec::is_matrix(shape) && self.source.config.model.dtype == Dtype::Bfloat16 && !wide;
        Ok(Weight::Frozen(if narrow {
            Array::<bf16>::zeros(device, count).into()
        } else {
            FloatBuffer::zeros(device, count).into()
        }))
    }

    /// A frozen base tensor. A matrix is in bfloat16 if the configuration or the checkpoint says so. A tensor that
    /// finished adapters are merged into no longer counts as the checkpoint's.
    fn frozen(&self, name: &str, shape: &[usize]) -> Result<Weight> {
        if self.only_counts() {
            return self.counted_frozen(name, shape);
        }
        if let Some(how) = self.quantizer.how(name) {
            return self.quantized(name, shape, how);
        }
        let Source { weights, stack, config, .. } = self.source;
        let untouched = stack.leaves_base() && !stack.keeps(name);
        let (count, device) = (shape.iter().product(), self.place(name));
        let narrow = TensorSpec::is_matrix(shape)
            && !stack.keeps(name)
            && match config.model.dtype {
                Dtype::Float32 => false,
                Dtype::Bfloat16 => true,
                Dtype::Auto if self.vision(name).is_some() => {
                    untouched && self.vision(name).is_some_and(|files| files.is_bf16(name))
                }
                Dtype::Auto => {
                    untouched && weights.is_some_and(|files| files.is_bf16(self.source.arch.starts_as(name)))
                }
            };
        if let Some(files) = self.vision(name) {
            let stored = if narrow && untouched { files.read_bf16(name, count)? } else { None };
            return Ok(match stored {
                Some(values) => Weight::frozen(values, device),
                None if narrow => {
                    let values = self.values(name, count)?;
                    Weight::frozen(values.into_iter().map(bf16::from_f32).collect(), device)
                }
                None => Weight::frozen(self.values(name, count)?, device),
            });
        }
        Ok(match weights.filter(|_| narrow && untouched) {
            Some(files) => {
                let mut values = Array::<bf16>::zeros(device, count);
                files.read_bf16_to(self.source.arch.starts_as(name), values.view_mut())?;
                Weight::Frozen(values.into())
            }
            None if narrow => {
                let values = self.source.values(name, count)?;
                Weight::frozen(values.into_iter().map(bf16::from_f32).collect(), device)
            }
            None => Weight::Frozen(self.source.placed(name, count, device)?.into()),
        })
    }

    /// A frozen base matrix in 4 or 8 bits a number. In a quantized checkpoint, matrices that were left unquantized
    /// stay so.
    fn quantized(&self, name: &str, shape: &[usize], how: How) -> Result<Weight> {
        let Source { weights, stack, .. } = self.source;
        let values = || self.source.placed(name, shape.iter().product(), self.device);
        let matrix = self.quantizer.matrix(name, shape, how, weights, stack.changes(name), values)?;
        Ok(Weight::Quantized(Arc::new(matrix.to(self.device))))
    }

    /// The matrix of a head that is quantized as `gen.quantize_head` asks.
    pub(super) fn quantized_head(&self, name: &str) -> Result<Weight> {
        let Some(shape) = self.sizes.get(name) else {
            return Err(Error::model(format!("the architecture has no tensor {name:?}")));
        };
        self.quantized(name, shape, self.quantizer.head()?)
    }

    pub(super) fn norm(&mut self, name: &str) -> Result<Norm> {
        let arch = self.source.arch;
        let weight = self.weight(name)?;
        let bias = arch.layer_norms.then(|| self.weight(&name.replace(".weight", ".bias"))).transpose()?;
        Ok(Norm { weight, bias, offset: arch.norm_offset as f32, eps: arch.rms_norm_eps as f32 })
    }

    /// A norm over `features` features whose gain is one.
    pub(super) fn weightless(&self, features: usize) -> Norm {
        let ones = Array::of(self.device, &vec![1.0; features]);
        Norm { weight: Weight::Frozen(ones.into()), bias: None, offset: 0.0, eps: self.source.arch.rms_norm_eps as f32 }
    }

    /// The values of four tensors of one number each (shape `[]`): the bounds of a clipped module. Infinite bounds on a
    /// device that only counts.
    pub(super) fn bounds(&self, specs: &[TensorSpec]) -> Result<[f32; 4]> {
        let mut bounds = [f32::NEG_INFINITY, f32::INFINITY, f32::NEG_INFINITY, f32::INFINITY];
        for (bound, spec) in bounds.iter_mut().zip(specs).filter(|_| !self.only_counts()) {
            let values = self.values(&spec.name, 1)?;
            *bound = values[0];
        }
        let ordered = bounds[0] <= bounds[1] && bounds[2] <= bounds[3];
        if !ordered {
            let [first, ..] = specs else { return Ok(bounds) };
            return Err(Error::model(format!(
                "{} and its neighbours: bounds {bounds:?}, expected two ranges",
                first.name
            )));
        }
        Ok(bounds)
    }

    /// A module's weight and bias, without an adapter.
    pub(super) fn plain(&mut self, spec: &LinearSpec) -> Result<(Weight, Option<Weight>)> {
        Ok((self.weight(&format!("{}.weight", spec.name))?, self.bias(spec)?))
    }

    pub(super) fn bias(&mut self, spec: &LinearSpec) -> Result<Option<Weight>> {
        if spec.bias { self.weight(&format!("{}.bias", spec.name)).map(Some) } else { Ok(None) }
    }

    /// Joins tensors of the same row length end to end into one weight. They must be trained together or not at all,
    /// and are never quantized.
    pub(super) fn end_to_end(&mut self, names: &[String]) -> Result<Weight> {
        let parts = names.iter().map(|name| self.weight(name)).collect::<Result<Vec<_>>>()?;
        let apart = || Error::config(format!("{} can only be trained together", names.join(", ")));
        let join = |whole: Weight, part: Weight| match (whole, part) {
            // One after the other in the flat buffer: their ranges are one.
            (Weight::Trained(whole), Weight::Trained(part)) if whole.end == part.start => {
                Ok(Weight::Trained(whole.start..part.end))
            }
            (Weight::Frozen(whole), Weight::Frozen(part)) => whole.joined(&part).map(Weight::Frozen).ok_or_else(apart),
            _ => Err(apart()),
        };
        let mut parts = parts.into_iter();
        let first = parts.next().ok_or_else(|| Error::model("no tensor to join"))?;
        parts.try_fold(first, join)
    }

    /// Joins the gate and up matrices (or biases) of an expert into one weight, as they lie side by side in
    /// Transformers 5.
    pub(super) fn joined(&mut self, names: [&str; 2], shape: &[usize]) -> Result<Weight> {
        let [first, second] = names;
        if self.trained.contains(first) && self.trained.contains(second) {
            // One after the other in the flat buffer: their ranges are one.
            let (first, second) = (self.weight(first)?, self.weight(second)?);
            return match (first.trained(), second.trained()) {
                (Some(first), Some(second)) => Ok(Weight::Trained(first.start..second.end)),
                _ => Err(Error::model("an expert's gate and up are trained together")),
            };
        }
        if self.trained.contains(first) || self.trained.contains(second) {
            return Err(Error::config(format!("{first} and {second} can only be trained together")));
        }
        match (self.frozen(first, shape)?, self.frozen(second, shape)?) {
            (Weight::Frozen(above), Weight::Frozen(below)) => match above.joined(&below) {
                Some(joined) => Ok(Weight::Frozen(joined)),
                None => Err(Error::model(format!("{first} and {second} have one dtype"))),
            },
            (Weight::Quantized(above), Weight::Quantized(below)) => match above.joined(&below) {
                Some(joined) => Ok(Weight::Quantized(Arc::new(joined))),
                None => Err(Error::model(format!(
                    "{first} and {second} cannot be put into one quantized matrix: the first is {shape:?}, which is no \
                     whole number of blocks"
                ))
                .hint("name the experts in model.quantization_skip_modules")),
            },
            _ => Err(Error::model("an expert's gate and up are frozen together")),
        }
    }
}
