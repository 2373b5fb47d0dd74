//! Writes model folders for Transformers: `config.json`, `model.safetensors`, and copies of the tokenizer's files.
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::encoders::EncoderFiles;
pub use super::layout::MODEL_WEIGHTS as WEIGHTS_FILE;
use super::publish::StagedFolder;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;
use tunesmith_config::arch::{Arch, COMPANIONS, TensorSpec};
use tunesmith_model::weights::{Dtype, Numbers, StackedTensor, Stacking, Wrapping, write_floats, write_numbers_by};

fn companions(model_dir: &Path) -> impl Iterator<Item = (&'static str, PathBuf)> {
    COMPANIONS.into_iter().map(move |name| (name, model_dir.join(name))).filter(|(_, path)| files::is_there(path))
}

/// The size in bytes of the files that [`stage_companions`] would copy from the model in `model_dir`.
pub fn companion_bytes(model_dir: &Path) -> u64 {
    companions(model_dir).filter_map(|(_, path)| path.metadata().ok()).map(|metadata| metadata.len()).sum()
}

/// The model that a written folder is made from, and what the run changed in its vocabulary and its head.
#[derive(Debug, Clone, Copy)]
pub struct SourceModel<'a> {
    /// The folder of the model whose companion files are copied.
    pub dir: &'a Path,
    /// The new `tokenizer.json` and the new number of rows of the embedding, if tokens were added.
    pub grown: Option<(&'a str, usize)>,
    /// A chat template that replaces the tokenizer's.
    pub template: Option<&'a str>,
    /// The model's architecture, if its head differs from the source's: a classification head, or a head that no longer
    /// shares the embedding's matrix.
    pub own_head: Option<&'a Arch>,
    /// The parts of a multimodal model other than its language model.
    pub wrapping: Option<&'a Wrapping>,
    /// In which format the source stores experts. They are written in the same format.
    pub stacking: &'a Stacking,
}

/// Tensors that are not in memory. They are fetched one at a time while the file is written.
pub struct LazyTensors<'a> {
    /// Names and shapes of the tensors to fetch.
    pub tensors: &'a [(String, Vec<usize>)],
    /// Returns the values of the tensor of that name.
    pub fetch: &'a dyn Fn(&str) -> Result<Vec<f32>>,
}

/// Copies the files of the tokenizer, the processor and the generation settings, with added tokens and a new template.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`].
pub fn stage_companions(staging: &mut StagedFolder<'_>, source: SourceModel<'_>) -> Result<()> {
    const TEMPLATE: &str = "chat_template.jinja";
    for (name, path) in companions(source.dir) {
        match source.grown {
            _ if name == TEMPLATE && source.template.is_some() => {}
            Some((text, _)) if name == "tokenizer.json" => {
                staging.write(name, |writer| writer.write_all(text.as_bytes()))?;
            }
            _ => staging.copy(name, &path)?,
        }
    }
    match source.template {
        Some(text) => staging.write(TEMPLATE, |writer| writer.write_all(text.as_bytes())),
        None => Ok(()),
    }
}

/// Copies the processor's settings from the base, if the tokenizer comes from an adapter, which has none.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`].
pub fn stage_processor(staging: &mut StagedFolder<'_>, base: &Path, tokenizer: &Path) -> Result<()> {
    let missing = companions(base)
        .filter(|(name, _)| name.ends_with("processor_config.json") && !files::is_there(&tokenizer.join(name)));
    missing.into_iter().try_for_each(|(name, path)| staging.copy(name, &path))
}

/// Writes a model folder: the source's `config.json` with dtype f32, the tokenizer's files, and one file of weights. The weights
/// are `tensors`, those of `rest`, and the unchanged other parts of a multimodal model. `encoders` have files of their own.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`]; [`tunesmith_base::Kind::Model`] where `config.json` is not valid or a tensor cannot be fetched.
pub fn stage(
    staging: &mut StagedFolder<'_>,
    source: SourceModel<'_>,
    encoders: Option<&EncoderFiles<'_>>,
    tensors: &[(String, Vec<usize>, &[f32])],
    rest: &LazyTensors<'_>,
) -> Result<()> {
    stage_config(staging, source)?;
    stage_companions(staging, source)?;
    if let Some(encoders) = encoders {
        let values = |spec: &TensorSpec, _| match tensors.iter().find(|(name, ..)| *name == spec.name) {
            Some((_, _, values)) => Ok(values.to_vec()),
            None => (rest.fetch)(&spec.name),
        };
        encoders.stage(staging, &values)?;
    }
    let here = |name: &str| encoders.is_none_or(|encoders| !encoders.hold(name));
    let tensors: Vec<_> = tensors.iter().filter(|(name, ..)| here(name)).cloned().collect();
    let names: Vec<_> = rest.tensors.iter().filter(|(name, _)| here(name)).cloned().collect();
    let rest = LazyTensors { tensors: &names, fetch: rest.fetch };
    let names = tensors.iter().map(|(name, shape, _)| (name.as_str(), shape.as_slice()));
    let names = names.chain(rest.tensors.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())));
    let stacked = source.stacking.again(names);
    stage_weights(staging, WEIGHTS_FILE, source.wrapping, &tensors, &rest, &stacked)
}

/// Writes `tensors` and the fetched tensors of `rest` into one file, and stacks those that `stacked` names.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`]; those of fetching; [`tunesmith_base::Kind::Model`]: a tensor of another part of a multimodal
/// model cannot be copied.
pub(crate) fn stage_weights(
    staging: &mut StagedFolder<'_>,
    file: &str,
    wrapping: Option<&Wrapping>,
    tensors: &[(String, Vec<usize>, &[f32])],
    rest: &LazyTensors<'_>,
    stacked: &[StackedTensor],
) -> Result<()> {
    let stored = |name: &str| wrapping.map_or_else(|| name.to_owned(), |wrapping| wrapping.stored_name(name));
    let plain: BTreeMap<String, &str> = rest.tensors.iter().map(|(name, _)| (stored(name), name.as_str())).collect();
    let parts: BTreeSet<&str> = stacked.iter().flat_map(|it| it.experts.iter().flatten()).map(String::as_str).collect();
    let alone = |name: &str| !parts.contains(name);
    let here = tensors
        .iter()
        .filter(|(name, ..)| alone(name))
        .map(|(name, shape, values)| (stored(name), shape.clone(), Numbers::F32((*values).into())));
    let later = rest
        .tensors
        .iter()
        .filter(|(name, _)| alone(name))
        .map(|(name, shape)| (stored(name), shape.clone(), Numbers::Fetched(shape.iter().product(), Dtype::F32)));
    let mut beside = wrapping.map_or_else(|| Ok(Vec::new()), |wrapping| wrapping.tensors(false))?;
    // The trained tensors of an encoder or a connector are already in `tensors`.
    beside.retain(|(name, ..)| !plain.contains_key(name) && tensors.iter().all(|(own, ..)| stored(own) != *name));
    let of_experts = stacked
        .iter()
        .map(|it| (stored(&it.name), it.shape.clone(), Numbers::Fetched(it.shape.iter().product(), Dtype::F32)));
    let numbers: Vec<_> = here.chain(later).chain(of_experts).chain(beside).collect();
    let values = |name: &str| match tensors.iter().find(|(own, ..)| own == name) {
        Some((_, _, values)) => Ok(values.to_vec()),
        None => (rest.fetch)(name),
    };
    let mut failed = None;
    let failure = RefCell::new(&mut failed);
    let written = staging.write(file, |writer| {
        let write = |name: &str, numbers: Numbers<'_>, writer: &mut dyn io::Write| match wrapping {
            Some(wrapping) if wrapping.has(name) && !plain.contains_key(name) => wrapping.write(name, numbers, writer),
            _ => {
                let fetch = |name: &str| {
                    values(name).map_err(|error| {
                        let message = error.to_string();
                        **failure.borrow_mut() = Some(error);
                        io::Error::other(message)
                    })
                };
                if let Some(stacked) = stacked.iter().find(|it| stored(&it.name) == name) {
                    for expert in &stacked.experts {
                        let parts = expert.iter().map(|part| fetch(part)).collect::<io::Result<Vec<_>>>()?;
                        write_floats(writer, &stacked.joined(&parts), Dtype::F32)?;
                    }
                    return Ok(());
                }
                let name = plain.get(name).ok_or(io::ErrorKind::NotFound)?;
                write_floats(writer, &fetch(name)?, Dtype::F32)
            }
        };
        write_numbers_by(writer, &numbers, &write, &[("format", "pt")])
    });
    match failed {
        Some(error) => Err(error),
        None => written,
    }
}

/// Writes the source's `config.json` with the new dtype, vocabulary and head.
///
/// # Errors
/// As [`stage`].
pub fn stage_config(staging: &mut StagedFolder<'_>, source: SourceModel<'_>) -> Result<()> {
    let path = source.dir.join("config.json");
    let text = tunesmith_base::files::read_text(&path, tunesmith_base::files::SMALL)
        .map_err(|error| Error::io("read", &path, &error).with_kind(tunesmith_base::Kind::Model))?;
    let mut config = f32_config(&text, &path, source.grown.map(|(_, rows)| rows))?;
    describe_head(&mut config, source.own_head)?;
    staging.write_json("config.json", &config)
}

/// Describes in `config.json` a classification head, or a head untied from the embedding.
///
/// # Errors
/// [`tunesmith_base::Kind::Model`]: Transformers has no classification head for the family.
pub fn describe_head(config: &mut Value, arch: Option<&Arch>) -> Result<()> {
    let (Some(config), Some(arch)) = (config.as_object_mut(), arch) else { return Ok(()) };
    if let Some(head) = &arch.score {
        return head.describe(arch.family, arch.padding(), config);
    }
    if arch.separated {
        // LFM2's files have a key of their own, which goes before the other.
        let untie = |config: &mut Map<String, Value>| {
            config.insert("tie_word_embeddings".into(), false.into());
            if let Some(own) = config.get_mut("tie_embedding") {
                *own = false.into();
            }
        };
        untie(config);
        if let Some(Value::Object(text)) = config.get_mut("text_config") {
            untie(text);
        }
    }
    Ok(())
}

/// The source's `config.json` with dtype f32: Transformers casts weights to the dtype that is named there.
fn f32_config(text: &str, path: &Path, rows: Option<usize>) -> Result<Value> {
    let mut config: Value = serde_json::from_str(text)
        .map_err(|error| Error::model(format!("{}: not valid JSON", path.display())).caused_by(error))?;
    if let Some(map) = config.as_object_mut() {
        set_dtype(map, Dtype::F32);
        // The weights are no longer quantized.
        map.remove("quantization_config");
        if let Some(rows) = rows {
            set_vocabulary(map, rows);
        }
    }
    Ok(config)
}

/// Sets the dtype in a `config.json`, and in its `text_config` if it is a multimodal model's.
pub fn set_dtype(config: &mut Map<String, Value>, dtype: Dtype) {
    let key = if config.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
    config.insert(key.into(), dtype.name().into());
    let Some(Value::Object(text)) = config.get_mut("text_config") else { return };
    for key in ["torch_dtype", "dtype"] {
        if let Some(value) = text.get_mut(key) {
            *value = dtype.name().into();
        }
    }
}

/// Sets `vocab_size` in a `config.json`, in `text_config` if it is a multimodal model's.
pub fn set_vocabulary(config: &mut Map<String, Value>, rows: usize) {
    let key = "vocab_size";
    if let Some(Value::Object(text)) = config.get_mut("text_config") {
        text.insert(key.into(), rows.into());
        if !config.contains_key(key) {
            return;
        }
    }
    config.insert(key.into(), rows.into());
}
