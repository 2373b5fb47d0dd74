//! Writes a merged model as a folder that Transformers loads, one tensor at a time.
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use serde_json::{Value, json};

use super::merge::{Merged, fits};
use super::requantize::{Loss, Requantization};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::disk::RealDisk;
use tunesmith_checkpoint::encoders::EncoderFiles;
use tunesmith_checkpoint::publish::{StagedFolder, publish_output};
use tunesmith_checkpoint::{FILES, folder, preflight};
use tunesmith_config::arch::TensorSpec;
use tunesmith_config::stored_format::Layout;
use tunesmith_model::weights::{
    Dtype, MakersPart, Numbers, Parts, StackedTensor, Stacking, Wrapping, write_floats, write_numbers_by,
};
use tunesmith_ops::quant::Format;

/// How the weights of a written folder are stored.
#[derive(Debug, Clone, Copy)]
pub struct FolderSettings<'a> {
    /// Dtype of all tensors; `None` keeps each tensor's dtype in the base.
    pub dtype: Option<Dtype>,
    /// The most bytes of a file that holds more than one tensor.
    pub shard_bytes: u64,
    /// The folder with the tokenizer's files: the adapter's, or the base's.
    pub tokenizer: &'a Path,
    /// The text of a chat template that replaces the tokenizer's; `None` keeps it.
    pub template: Option<&'a str>,
    /// The text of `README.md` (model card).
    pub card: Option<&'a str>,
    /// Quantizes linear layers; other tensors keep their dtype.
    pub requantization: Option<&'a Requantization>,
    /// Whether an older folder is replaced.
    pub overwrite: bool,
}

/// A tensor of the written folder, and where its numbers come from.
#[derive(Debug, Clone)]
enum Planned {
    /// A tensor of the merged model, and its dtype in the file (before quantization).
    Merged(TensorSpec, Dtype),
    /// A stacked tensor of all experts of a block.
    Stacked(StackedTensor, Dtype),
    /// Experts in MXFP4, copied from the base.
    Stored(String, Vec<usize>, Numbers<'static>),
    /// A part (codes or scales) of a matrix that the base's maker has quantized, copied from the base.
    Makers(MakersPart),
    /// A matrix in the base's FP8 format that the adapter changes: it is quantized again into the same parts.
    Recoded(TensorSpec, Vec<MakersPart>),
    /// A tensor of a multimodal model outside its language model.
    Beside(String, Vec<usize>, Numbers<'static>),
}

/// The size of a written folder, and the error of its quantization.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WrittenFolder {
    /// Bytes of all tensors, without headers.
    pub bytes: u64,
    /// The error of the quantization; all zero without one.
    pub loss: Loss,
}

impl FolderSettings<'_> {
    fn plan(&self, merged: &Merged, wrapping: Option<&Wrapping>) -> Result<Vec<Planned>> {
        let dtype = |name: &str| self.dtype.or_else(|| merged.weights.dtype(merged.arch.starts_as(name)));
        // A quantized matrix does not tell its original dtype. The embedding's dtype is taken instead.
        let plain = dtype("model.embed_tokens.weight").unwrap_or(Dtype::F32);
        let of = |spec: &TensorSpec| match self.quantized(&spec.name) {
            Some(_) => dtype(&spec.name).unwrap_or(plain),
            None => dtype(&spec.name).unwrap_or(Dtype::F32),
        };
        let tensors = merged.arch.tensors();
        let mut stacked =
            merged.weights.stacking().again(tensors.iter().map(|spec| (spec.name.as_str(), spec.shape.as_slice())));
        let keeps = self.keeps_makers(merged);
        // Quantized codes cannot be transposed, so these experts are not stacked again.
        let coded = |name: &str| self.quantized(name).is_some() || keeps && merged.weights.layout(name).is_some();
        stacked.retain(|it| !(it.is_transposed() && coded(&it.name)));
        if self.requantization.is_some() && stacked.iter().any(|it| !it.is_transposed()) {
            return Err(Error::config("not yet: experts that the base holds stacked, in bitsandbytes' formats")
                .hint("leave out --requantize: experts in MXFP4 stay so"));
        }
        let parts: BTreeSet<&String> = stacked.iter().flat_map(|it| it.experts.iter().flatten()).collect();
        let mut of_model: Vec<Planned> = Vec::new();
        for spec in tensors.iter().filter(|spec| !parts.contains(&spec.name)) {
            match self.as_stored(merged, spec)? {
                Some(stored) => of_model.extend(stored),
                None => of_model.push(Planned::Merged(spec.clone(), of(spec))),
            }
        }
        if keeps {
            of_model.extend(merged.weights.makers_leftovers().into_iter().map(Planned::Makers));
        }
        let stored = if keeps_mxfp4(merged, self.dtype) { merged.weights.stacked_mxfp4() } else { Vec::new() };
        let is_stored = |it: &StackedTensor| stored.iter().any(|(name, ..)| *name == format!("{}_blocks", it.name));
        let experts: Vec<Planned> = (stacked.iter().filter(|it| !is_stored(it)))
            .map(|it| Planned::Stacked(it.clone(), expert_dtype(it, &dtype).unwrap_or(plain)))
            .collect();
        let stored = stored.into_iter().map(|(name, shape, numbers)| Planned::Stored(name, shape, numbers));
        let of_model = of_model.into_iter().chain(experts).chain(stored);
        let is_pair = merged.arch.vision.as_ref().is_some_and(|vision| vision.folder.is_some());
        // The encoder of a pair has files of its own.
        let changed = if is_pair { Vec::new() } else { merged.changed_beside() };
        let mut changed: BTreeMap<String, TensorSpec> = match wrapping {
            Some(wrapping) => changed.into_iter().map(|spec| (wrapping.stored_name(&spec.name), spec)).collect(),
            None => BTreeMap::new(),
        };
        let beside = wrapping.map_or_else(|| Ok(Vec::new()), |wrapping| wrapping.tensors(keeps))?.into_iter();
        let beside = beside.map(|(name, shape, numbers)| match changed.remove(&name) {
            Some(spec) => Planned::Merged(spec.clone(), of(&spec)),
            None => Planned::Beside(name, shape, numbers),
        });
        Ok(of_model.chain(beside).collect())
    }

    /// Whether the model is written in the quantization format of the base's maker. MXFP4 is handled apart ([`keeps_mxfp4`]).
    fn keeps_makers(&self, merged: &Merged) -> bool {
        let format = merged.weights.quantization();
        let makers = format.is_some_and(|format| format.is_makers() && format != Format::Mxfp4);
        makers && self.dtype.is_none() && self.requantization.is_none()
    }

    /// A matrix in the format of the base's maker: copied, or quantized again if the adapter changes it. `None` if the base does
    /// not store it in such a format or the format is not kept.
    fn as_stored(&self, merged: &Merged, spec: &TensorSpec) -> Result<Option<Vec<Planned>>> {
        let layout = merged.weights.layout(&spec.name).filter(|_| self.keeps_makers(merged));
        let Some(layout) = layout else { return Ok(None) };
        let parts = merged.weights.makers_parts(&spec.name);
        if !merged.changes(&spec.name) {
            return Ok(Some(parts.into_iter().map(Planned::Makers).collect()));
        }
        if matches!(layout, Layout::Fp8 { .. }) {
            return Ok(Some(vec![Planned::Recoded(spec.clone(), parts)]));
        }
        let found =
            format!("{} is stored as {}, in which a changed matrix cannot be written", spec.name, layout.name());
        Err(Error::config(found).hint("--dtype bfloat16 writes a dense model, --requantize nf4 one in 4 bits"))
    }

    fn quantized(&self, name: &str) -> Option<&Requantization> {
        self.requantization.filter(|requantization| requantization.has(name))
    }

    /// Bytes of a tensor in its file; approximate for quantized ones.
    fn bytes(&self, planned: &Planned) -> u64 {
        match planned {
            Planned::Merged(spec, dtype) => self
                .quantized(&spec.name)
                .map_or((spec.len() * dtype.bytes()) as u64, |requantization| requantization.bytes(spec)),
            Planned::Stacked(it, dtype) => (it.shape.iter().product::<usize>() * dtype.bytes()) as u64,
            Planned::Stored(_, _, numbers) | Planned::Beside(_, _, numbers) => numbers.bytes(),
            Planned::Makers(part) => part.numbers.bytes(),
            Planned::Recoded(_, parts) => parts.iter().map(|part| part.numbers.bytes()).sum(),
        }
    }
}

/// The dtype of a stacked tensor in the base, by its first expert.
fn expert_dtype(stacked: &StackedTensor, dtype: &dyn Fn(&str) -> Option<Dtype>) -> Option<Dtype> {
    dtype(stacked.experts.first()?.first()?)
}

/// Whether experts that the base has in MXFP4 are copied: nothing is merged into them, and no other dtype is requested.
pub fn keeps_mxfp4(merged: &Merged, dtype: Option<Dtype>) -> bool {
    let changed = |spec: &TensorSpec| spec.name.contains(".mlp.experts.") && merged.changes(&spec.name);
    dtype.is_none() && !merged.arch.tensors().iter().any(changed)
}

/// Writes the folder `target`.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`]: the disk; [`tunesmith_base::Kind::Config`]: something has appeared there that stays; those of [`Merged::values`]; [`tunesmith_base::Kind::Model`]: a number that cannot be quantized.
pub fn write(target: &Path, merged: &Merged, form: &FolderSettings<'_>) -> Result<WrittenFolder> {
    let wrapping = merged.weights.wrapping();
    let wrapping = wrapping.as_ref();
    let plan = form.plan(merged, wrapping)?;
    let encoders = EncoderFiles::of(merged.arch.vision.as_deref(), &|name| merged.changes(name), form.dtype)?;
    let beside = encoders.bytes();
    let total = plan.iter().map(|planned| form.bytes(planned)).sum::<u64>() + beside;
    preflight(target, total + folder::companion_bytes(form.tokenizer) + (1 << 20), FILES + total / form.shard_bytes)?;
    let mut shards: Vec<Vec<Planned>> = vec![Vec::new()];
    let mut filled = 0;
    for planned in plan {
        let size = form.bytes(&planned);
        if filled > 0 && filled + size > form.shard_bytes {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += size;
        if let Some(shard) = shards.last_mut() {
            shard.push(planned);
        }
    }
    let mut written = WrittenFolder { bytes: beside, loss: Loss::default() };
    publish_output(&RealDisk, target, form.overwrite, |staging| {
        staging.write_json("config.json", &config(merged, form)?)?;
        folder::stage_processor(staging, &merged.base, form.tokenizer)?;
        folder::stage_companions(
            staging,
            folder::SourceModel {
                dir: form.tokenizer,
                grown: None,
                template: form.template,
                own_head: None,
                wrapping: None,
                stacking: Stacking::NONE,
            },
        )?;
        let values = |spec: &TensorSpec, dtype| fits(&spec.name, merged.values(spec)?, dtype);
        encoders.stage(staging, &values)?;
        if let Some(card) = form.card {
            staging.write("README.md", |writer| writer.write_all(card.as_bytes()))?;
        }
        let count = shards.len();
        let mut map = BTreeMap::new();
        for (number, shard) in shards.iter().enumerate() {
            let name = match count {
                1 => folder::WEIGHTS_FILE.to_owned(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
            };
            let tensors = write_shard(staging, &name, merged, wrapping, shard, form, &mut written)?;
            map.extend(tensors.into_iter().map(|tensor| (tensor, name.clone())));
        }
        if count > 1 {
            let index = json!({ "metadata": { "total_size": written.bytes }, "weight_map": map });
            staging.write_json("model.safetensors.index.json", &index)?;
        }
        Ok(())
    })?;
    Ok(written)
}

/// Writes one file of tensors and returns their names. Quantized matrices of the file are in memory together, others one at a time.
fn write_shard(
    staging: &mut StagedFolder<'_>,
    name: &str,
    merged: &Merged,
    wrapping: Option<&Wrapping>,
    shard: &[Planned],
    form: &FolderSettings<'_>,
    written: &mut WrittenFolder,
) -> Result<Vec<String>> {
    let stored = |name: &str| wrapping.map_or_else(|| name.to_owned(), |wrapping| wrapping.stored_name(name));
    let mut specs: BTreeMap<String, &TensorSpec> = BTreeMap::new();
    let (mut quantized, mut numbers) = (Vec::new(), Vec::new());
    let mut stacks: BTreeMap<String, &StackedTensor> = BTreeMap::new();
    let mut copied: BTreeMap<String, &MakersPart> = BTreeMap::new();
    let mut recoded: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for planned in shard {
        let (spec, dtype) = match planned {
            Planned::Merged(spec, dtype) => (spec, *dtype),
            Planned::Stacked(stacked, dtype) => {
                let count = stacked.shape.iter().product();
                numbers.push((stored(&stacked.name), stacked.shape.clone(), Numbers::Fetched(count, *dtype)));
                stacks.insert(stored(&stacked.name), stacked);
                continue;
            }
            Planned::Stored(name, shape, kept) | Planned::Beside(name, shape, kept) => {
                numbers.push((name.clone(), shape.clone(), *kept));
                continue;
            }
            Planned::Makers(part) => {
                numbers.push((stored(&part.name), part.shape.clone(), part.numbers));
                copied.insert(stored(&part.name), part);
                continue;
            }
            Planned::Recoded(spec, parts) => {
                let values = merged.values(spec)?;
                let (matrix, coded) = merged.weights.recoded_fp8(&spec.name, &values)?;
                written.loss.add(&values, &matrix.dequantize());
                recoded.extend(coded.into_iter().map(|(name, bytes)| (stored(&name), bytes)));
                for part in parts {
                    numbers.push((stored(&part.name), part.shape.clone(), part.numbers));
                    copied.insert(stored(&part.name), part);
                }
                continue;
            }
        };
        let name = stored(&spec.name);
        match form.quantized(&spec.name) {
            Some(requantization) => {
                quantized.push((name, spec, dtype, requantization.quantize(merged, spec, &mut written.loss)?));
            }
            None => numbers.push((name.clone(), spec.shape.clone(), Numbers::Fetched(spec.len(), dtype))),
        }
        specs.insert(stored(&spec.name), spec);
    }
    let parts: Vec<_> = (quantized.iter())
        .map(|(name, spec, dtype, matrix)| Parts::new(name, &spec.shape, dtype.name(), matrix))
        .collect::<Result<_>>()?;
    numbers.extend(parts.iter().flat_map(Parts::tensors));
    let failed = RefCell::new(None);
    let shapes: BTreeMap<String, TensorSpec> = if stacks.is_empty() {
        BTreeMap::new()
    } else {
        merged.arch.tensors().into_iter().map(|spec| (spec.name.clone(), spec)).collect()
    };
    let values = |name: &str, spec: &TensorSpec, dtype: Dtype| {
        merged.values(spec).and_then(|values| fits(name, values, dtype)).map_err(|error| {
            let message = error.to_string();
            failed.replace(Some(error));
            io::Error::other(message)
        })
    };
    let write = |name: &str, numbers: Numbers<'_>, writer: &mut dyn io::Write| match (specs.get(name), numbers) {
        (Some(spec), Numbers::Fetched(_, dtype)) => write_floats(writer, &values(name, spec, dtype)?, dtype),
        (None, Numbers::Fetched(_, dtype)) if stacks.contains_key(name) => {
            for expert in &stacks[name].experts {
                let specs = expert.iter().filter_map(|part| shapes.get(part));
                let parts = specs.map(|spec| values(&spec.name, spec, dtype)).collect::<io::Result<Vec<_>>>()?;
                write_floats(writer, &stacks[name].joined(&parts), dtype)?;
            }
            Ok(())
        }
        (None, Numbers::Elsewhere(..)) if recoded.contains_key(name) => writer.write_all(&recoded[name]),
        (None, Numbers::Elsewhere(..)) if copied.contains_key(name) => {
            merged.weights.write_makers_part(copied[name], writer)
        }
        (None, Numbers::Elsewhere(..)) if merged.weights.is_stacked_mxfp4(name) => {
            merged.weights.write_stacked_mxfp4(name, writer)
        }
        _ => wrapping.map_or(Err(io::ErrorKind::NotFound.into()), |wrapping| wrapping.write(name, numbers, writer)),
    };
    let done = staging.write(name, |writer| write_numbers_by(writer, &numbers, &write, &[("format", "pt")]));
    match failed.take() {
        Some(error) => return Err(error),
        None => done?,
    }
    written.bytes += numbers.iter().map(|(_, _, numbers)| numbers.bytes()).sum::<u64>();
    Ok(numbers.into_iter().map(|(name, ..)| name).collect())
}

/// The base's `config.json` with the dtype and the vocabulary of what is written.
fn config(merged: &Merged, form: &FolderSettings<'_>) -> Result<Value> {
    let path = merged.base.join("config.json");
    let text = tunesmith_base::files::read_text(&path, tunesmith_base::files::SMALL)
        .map_err(|error| Error::io("read", &path, &error).with_kind(tunesmith_base::Kind::Model))?;
    let mut config: Value = serde_json::from_str(&text)
        .map_err(|error| Error::model(format!("{}: not valid JSON", path.display())).caused_by(error))?;
    if let Some(map) = config.as_object_mut() {
        if let Some(dtype) = form.dtype {
            folder::set_dtype(map, dtype);
        }
        // The base's quantization does not apply to the written weights, unless they are as its maker stores them.
        let mxfp4 = !merged.weights.stacked_mxfp4().is_empty() && keeps_mxfp4(merged, form.dtype);
        if !mxfp4 && !form.keeps_makers(merged) {
            map.remove("quantization_config");
        }
        if let Some(requantization) = form.requantization {
            let beside = merged.weights.wrapping().map(|wrapping| wrapping.modules()).unwrap_or_default();
            map.insert("quantization_config".into(), requantization.config_json(beside));
        }
        // An adapter may have grown the vocabulary.
        folder::set_vocabulary(map, merged.arch.vocab_size);
    }
    folder::describe_head(&mut config, Some(&merged.arch))?;
    Ok(config)
}
