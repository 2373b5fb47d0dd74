//! Which matrices of a base are quantized, and where the codes come from: the checkpoint itself, a copy on disk, or the
//! checkpoint's unquantized values. The last are quantized one matrix at a time, so that memory holds the quantized
//! model and one unquantized matrix.

pub use super::quantized_form::{Held, How, format_of};

use super::quantized_cache::{Cache, Kept};
use super::stack::Stack;
use super::weights::WeightFiles;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;
use tunesmith_config::arch::{Arch, TensorSpec};
use tunesmith_config::bitsandbytes::Bitsandbytes;
use tunesmith_config::stored_format::Layout;
use tunesmith_config::{Config, Init, InitLora, ModelConfig, Quantization, nearest};
use tunesmith_device::{Device, FloatBuffer};
use tunesmith_ops::quant::tiles::TileForm;
use tunesmith_ops::quant::{Format, Four, Quantized, Tiled, encode};

/// What bitsandbytes has quantized in a checkpoint. Without files, `config.json` tells it.
pub fn bitsandbytes(arch: &Arch, config: &Config, weights: Option<&WeightFiles>) -> Option<Bitsandbytes> {
    match weights {
        Some(files) => files.bitsandbytes(),
        None => arch.bitsandbytes.clone().filter(|_| config.model.init == Init::Pretrained),
    }
}

/// How the base of a run is quantized: as the configuration asks, or as the checkpoint is where the configuration
/// leaves that open. `None`: not quantized. Without files, `config.json` tells what bitsandbytes has quantized; what it
/// tells of makers' formats is in [`kept`].
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: the two contradict each other, or a quantized base cannot be trained in this way.
pub fn resolve(arch: &Arch, config: &Config, weights: Option<&WeightFiles>) -> Result<Option<How>> {
    let ModelConfig { quantization, double_quant: double, .. } = config.model;
    let described = || match bitsandbytes(arch, config, None)?.quantization {
        Quantization::Nf4 => Some(Format::Nf4),
        Quantization::Fp4 => Some(Format::Fp4),
        _ => Some(Format::Int8),
    };
    let stored = weights.map_or_else(described, WeightFiles::quantization);
    let wanted = match quantization {
        Quantization::None => None,
        Quantization::Auto => stored,
        Quantization::Nf4 => Some(Format::Nf4),
        Quantization::Fp4 => Some(Format::Fp4),
        Quantization::Int8 => Some(Format::Int8),
        Quantization::Fp8 => Some(Format::Fp8),
        Quantization::Mxfp4 => Some(Format::Mxfp4),
    };
    let Some(wanted) = wanted else { return Ok(None) };
    if wanted == Format::Mxfp4 && weights.is_some() && stored != Some(wanted) {
        return Err(Error::config("model.quantization: mxfp4, and the checkpoint holds nothing in that format")
            .hint("set model.quantization: nf4, which codes a checkpoint while it is loaded"));
    }
    // MXFP4 experts stay as they are beside matrices in another format. Matrices in another maker's format are
    // dequantized first.
    if let Some(stored) = stored.filter(|stored| *stored != wanted && !stored.is_makers()) {
        let (wanted, stored) = (wanted.name(), stored.name());
        return Err(Error::config(format!("model.quantization: {wanted}, the checkpoint is quantized as {stored}"))
            .hint(format!("set model.quantization: {stored}, or none to dequantize it")));
    }
    if !config.tuning.mode.adapts() {
        return Err(Error::config(format!(
            "tuning.mode: {}, and the checkpoint is quantized as {}: such weights cannot be trained themselves",
            config.tuning.mode,
            wanted.name()
        ))
        .hint("set tuning.mode: lora, or model.quantization: none to dequantize them"));
    }
    let init = config.tuning.lora.init_lora_weights;
    if init.is_pissa() || (init == InitLora::Loftq && stored.is_some()) {
        return Err(Error::config(
            "tuning.lora.init_lora_weights starts from the weights before quantization, which this checkpoint does not have",
        )
        .hint("use the checkpoint that is not quantized, or init_lora_weights: true"));
    }
    Ok(Some(How { format: wanted, double }))
}

/// In what form a run of this configuration holds the matrices of its base; `None` if it does not quantize them.
///
/// # Errors
/// As [`resolve`].
pub fn held(arch: &Arch, config: &Config, weights: &WeightFiles) -> Result<Option<Held>> {
    let skip = || config.model.quantization_skip_modules.clone();
    Ok(resolve(arch, config, Some(weights))?.map(|how| Held { how, skip: skip() }))
}

/// The matrices that a quantized run holds in its format: [`matrices`] without those that bitsandbytes left
/// unquantized.
///
/// # Errors
/// As [`matrices`].
pub fn coded(arch: &Arch, config: &Config, weights: Option<&WeightFiles>) -> Result<BTreeSet<String>> {
    let mut coded = matrices(arch, &config.model.quantization_skip_modules)?;
    if let Some(stored) = bitsandbytes(arch, config, weights) {
        coded.retain(|name| stored.holds(name));
    }
    Ok(coded)
}

/// The matrices that can be quantized: those of linear layers and experts, without the head and without what `skip`
/// names.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: an entry of `model.quantization_skip_modules` names nothing.
pub fn matrices(arch: &Arch, skip: &[String]) -> Result<BTreeSet<String>> {
    let mut modules: Vec<String> =
        arch.linear_modules().into_iter().filter(|spec| !spec.is_head()).map(|spec| spec.name).collect();
    for layer in 0..arch.num_hidden_layers {
        if let Some(experts) = arch.experts_of(layer) {
            let names = (0..experts.count).flat_map(|expert| experts.names(expert));
            modules.extend(names.map(|name| format!("model.layers.{layer}.{}", name.trim_end_matches(".weight"))));
        }
    }
    let always = ["lm_head", "score", "embed_tokens", "model.embed_tokens", "norm"];
    let named = |module: &str, entry: &str| {
        module == entry || module.ends_with(&format!(".{entry}")) || module.starts_with(&format!("{entry}."))
    };
    for entry in skip.iter().filter(|entry| !always.contains(&entry.as_str())) {
        let entry = entry.trim_end_matches('.');
        if !modules.iter().any(|module| named(module, entry)) {
            let error = Error::config(format!("model.quantization_skip_modules: {entry:?} names no linear layer"));
            let names = modules.iter().filter_map(|module| module.rsplit('.').next());
            return Err(match nearest(entry, names) {
                Some(near) => error.hint(format!("did you mean {near}?")),
                None => error.hint(format!("a layer's name is such as {}", modules.first().map_or("", String::as_str))),
            });
        }
    }
    // The few weights of Gemma 3n's streams stay dense: Transformers reads them beside their modules.
    let of_streams = |module: &str| module.contains(".altup.");
    modules
        .retain(|module| !of_streams(module) && !skip.iter().any(|entry| named(module, entry.trim_end_matches('.'))));
    Ok(modules.into_iter().map(|module| format!("{module}.weight")).collect())
}

/// The matrices that the checkpoint has in its maker's format (FP8, GPTQ, AWQ, MXFP4 and others), and that a run of
/// this configuration keeps in it: all of them with `model.quantization: auto`; MXFP4 also beside another format.
/// Without files, `config.json` tells which there are.
///
/// # Errors
/// As [`matrices`].
pub fn kept(arch: &Arch, config: &Config, weights: Option<&WeightFiles>) -> Result<BTreeMap<String, Layout>> {
    let ModelConfig { quantization, quantization_skip_modules: skip, .. } = &config.model;
    let stays = |layout: &Layout| match quantization {
        Quantization::None => false,
        Quantization::Auto => true,
        _ => *layout == Layout::Mxfp4,
    };
    let layout = |name: &str| match weights {
        Some(files) => files.layout(name),
        None => described(arch, config, name),
    };
    let kept = |name: String| layout(&name).filter(stays).map(|layout| (name, layout));
    Ok(matrices(arch, skip)?.into_iter().filter_map(kept).collect())
}

/// The maker's format that `config.json` describes for the matrix of a linear layer or an expert.
fn described(arch: &Arch, config: &Config, name: &str) -> Option<Layout> {
    if name.contains(".experts.") && arch.experts.is_some_and(|experts| experts.mxfp4) {
        return Some(Layout::Mxfp4);
    }
    arch.stored.as_ref().filter(|_| config.model.init == Init::Pretrained)?.layout(name)
}

/// The matrices that a run with `model.dtype: auto` holds in float32, unless it quantizes them or keeps them in their
/// format. The checkpoint has them in another dtype than bfloat16, or quantized, so that they are dequantized. Without
/// files, `config.json` tells which are quantized.
///
/// # Errors
/// As [`matrices`].
pub fn float32(arch: &Arch, config: &Config, weights: Option<&WeightFiles>) -> Result<BTreeSet<String>> {
    let Some(files) = weights else {
        let stored = bitsandbytes(arch, config, None);
        let coded = |name: &String| stored.as_ref().is_some_and(|stored| stored.holds(name));
        let described = |name: &String| coded(name) || described(arch, config, name).is_some();
        return Ok(matrices(arch, &[])?.into_iter().filter(described).collect());
    };
    let wide = |spec: &TensorSpec| TensorSpec::is_matrix(&spec.shape) && !files.is_bf16(arch.starts_as(&spec.name));
    Ok(arch.tensors().into_iter().filter(wide).map(|spec| spec.name).collect())
}

/// Quantizes the matrices of which `cache` has no copy, one at a time, and keeps them there. Returns what a user should
/// know. Matrices that `stack` changes or that `LoftQ` quantizes itself are not kept.
///
/// # Errors
/// The weights cannot be read, or hold a number that cannot be quantized.
pub fn keep(
    arch: &Arch,
    weights: &WeightFiles,
    config: &Config,
    stack: &Stack,
    cache: Cache<'_>,
    device: Device,
) -> Result<Vec<String>> {
    if config.tuning.lora.init_lora_weights == InitLora::Loftq {
        return Ok(Vec::new());
    }
    let quantizer = Quantizer::new(arch, Some(weights), config, Some(cache))?;
    for TensorSpec { name, shape } in arch.tensors() {
        let kept = |cache: &Cache<'_>| cache.has(&name);
        let wanted = !stack.changes(&name) && !quantizer.cache.as_ref().is_some_and(kept);
        if let Some(how) = quantizer.how(&name).filter(|how| wanted && !how.format.is_makers()) {
            let values = || {
                let mut values = FloatBuffer::zeros(device, shape.iter().product());
                weights.read_to(&name, values.view_mut())?;
                Ok(values)
            };
            quantizer.matrix(&name, &shape, how, Some(weights), false, values)?;
        }
    }
    Ok(quantizer.into_notes())
}

/// Quantizes matrices while a model is built.
pub(super) struct Quantizer<'a> {
    how: Option<How>,
    matrices: BTreeSet<String>,
    /// The matrices that stay in the checkpoint's own (its maker's) format.
    stored: BTreeMap<String, Layout>,
    cache: Option<Cache<'a>>,
    /// Messages for the user.
    notes: RefCell<Vec<String>>,
    requantized: Cell<usize>,
    /// How many matrices were dequantized from the format of the checkpoint's maker.
    converted: Cell<usize>,
}

impl<'a> Quantizer<'a> {
    /// For a configuration and the files that its base comes from. Without a cache, every load quantizes again.
    pub(super) fn new(
        arch: &Arch,
        weights: Option<&WeightFiles>,
        config: &Config,
        cache: Option<Cache<'a>>,
    ) -> Result<Self> {
        let how = resolve(arch, config, weights)?;
        let matrices = if how.is_some() { coded(arch, config, weights)? } else { BTreeSet::new() };
        let (stored, notes, requantized, converted) =
            (kept(arch, config, weights)?, RefCell::default(), Cell::new(0), Cell::new(0));
        Ok(Self { how, matrices, stored, cache, notes, requantized, converted })
    }

    /// A quantizer that quantizes nothing.
    pub(super) fn none() -> Self {
        let (notes, requantized, converted) = (RefCell::default(), Cell::new(0), Cell::new(0));
        let (matrices, stored) = (BTreeSet::new(), BTreeMap::new());
        Self { how: None, matrices, stored, cache: None, notes, requantized, converted }
    }

    /// How a tensor is quantized, if it is.
    pub(super) fn how(&self, name: &str) -> Option<How> {
        if let Some(layout) = self.stored.get(name) {
            return Some(How { format: format_of(*layout), double: false });
        }
        self.how.filter(|how| !how.format.is_makers() && self.matrices.contains(name))
    }

    /// How the head is quantized where `gen.quantize_head` asks for it.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: the model is not quantized.
    pub(super) fn head(&self) -> Result<How> {
        match self.how {
            Some(how) if how.format.is_makers() => Ok(How { format: Format::Int8, double: false }),
            Some(how) => Ok(how),
            None => Err(Error::config("gen.quantize_head: true, and the model is not quantized")
                .hint("set model.quantization to nf4, fp4, int8 or fp8, or leave out gen.quantize_head")),
        }
    }

    /// A matrix in its maker's format, without numbers, on a device that only counts. `None` for a matrix that is
    /// quantized while it is loaded.
    pub(super) fn counted(&self, name: &str, shape: &[usize], device: Device) -> Option<Quantized> {
        let layout = *self.stored.get(name)?;
        let size = [*shape.first()?, *shape.last()?];
        let (tile, zeros, grouped) = match layout {
            Layout::Mxfp4 | Layout::Nvfp4 => {
                return Some(Quantized::Four(Four::counted(format_of(layout), size[0] * size[1], device)));
            }
            Layout::Fp8 { tile } => (tile, false, false),
            Layout::Integers { group, zeros, grouped, .. } => ([1, group], zeros, grouped),
        };
        let form = TileForm { format: format_of(layout), tile, zeros, grouped };
        Some(Quantized::Tiled(Tiled::counted(form, size, device)))
    }

    /// The codes of a matrix for which [`Quantizer::how`] gives `how`: from the checkpoint, from the cache, or from
    /// `values`, which reads the unquantized numbers onto the device that quantizes. With `touched`, the numbers are
    /// not the checkpoint's, because adapters were merged in. A matrix that was quantized before is on the CPU.
    pub(super) fn matrix(
        &self,
        name: &str,
        shape: &[usize],
        how: How,
        weights: Option<&WeightFiles>,
        touched: bool,
        values: impl FnOnce() -> Result<FloatBuffer>,
    ) -> Result<Quantized> {
        let stored = weights.and_then(|files| Some((files, files.format_of(name)?)));
        if let Some((files, _)) = stored.filter(|(_, format)| !touched && *format == how.format) {
            return files.read_quantized(name);
        }
        let counted = if touched { &self.requantized } else { &self.converted };
        counted.update(|count| count + usize::from(stored.is_some()));
        let cache = self.cache.as_ref().filter(|_| !touched && weights.is_some());
        let mut damaged = false;
        if let Some(cache) = cache {
            match cache.read(name, shape, how) {
                Kept::Whole(matrix) => return Ok(matrix),
                Kept::Damaged(why) => {
                    self.note(format!("the kept copy of {name} is damaged and made anew: {why}"));
                    damaged = true;
                }
                Kept::Nothing => {}
            }
        }
        let width = shape.last().copied().unwrap_or(1);
        let matrix = encode::quantize_there(values()?.view(), width, how.format, how.double)
            .map_err(|error| error.context(format!("tensor {name:?}")))?;
        if let Some(cache) = cache
            && let Err(error) = cache.write(name, shape, &matrix.to(Device::Cpu))
        {
            let first = self.notes.borrow().iter().all(|note| !note.contains("cannot keep"));
            if first || damaged {
                self.note(format!("cannot keep a quantized copy in {}: {error}", cache.dir().display()));
            }
        }
        Ok(matrix)
    }

    fn note(&self, text: String) {
        self.notes.borrow_mut().push(text);
    }

    /// The messages for the user, once the model is built.
    pub(super) fn into_notes(self) -> Vec<String> {
        let mut notes = self.notes.into_inner();
        if self.requantized.get() > 0 {
            notes.push(format!(
                "tuning.adapters are merged into {} of a quantized checkpoint: dequantized, changed and quantized again, \
                 which rounds them a second time",
                count(self.requantized.get(), "matrix")
            ));
        }
        if self.converted.get() > 0 {
            notes.push(format!(
                "{} of a quantized checkpoint are dequantized and quantized again, which rounds them a second time; \
                 model.quantization: auto with tuning.mode: lora keeps them as they are",
                count(self.converted.get(), "matrix")
            ));
        }
        notes
    }
}
