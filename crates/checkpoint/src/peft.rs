//! Reads and writes adapters in PEFT's format: `adapter_config.json` ([`AdapterConfig`]) and
//! `adapter_model.safetensors`. In this file, the name of a tensor is [`PREFIX`] followed by its name in the base
//! model. For multimodal models, the module names of every Transformers version are accepted. In memory, tensors have
//! the names of the language model alone.
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::Path;

use super::adapter_config::AdapterConfig;
pub use super::adapter_file::{PREFIX, open_weights};
pub use super::layout::{ADAPTER_CONFIG as CONFIG_FILE, ADAPTER_WEIGHTS as WEIGHTS_FILE};
use super::manifest::Manifest;
use super::older_formats;
use super::publish::StagedFolder;
pub use super::tensors::Tensors;
use super::tensors::same_tensors;
use tunesmith_base::Kind;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::atomic::{self, AtomicFile};
use tunesmith_config::arch::{Arch, EMBEDDING, LM_HEAD, Vocabulary, is_beside};
use tunesmith_config::vision::{VisionArch, VisionTraining};
use tunesmith_model::targets::token_rows;
use tunesmith_model::weights::{Numbers, write_numbers_by};

/// Writes both files of an adapter; the tensors have the base model's names (`<module>.lora_A.weight`, or a whole tensor's).
///
/// # Errors
/// [`Kind::Io`].
pub fn stage(
    staging: &mut StagedFolder<'_>,
    config: &AdapterConfig,
    tensors: &[(String, Vec<usize>, &[f32])],
) -> Result<()> {
    staging.write_json(CONFIG_FILE, &config.to_json())?;
    staging.write(WEIGHTS_FILE, |writer| write_weights(writer, config, tensors))
}

/// Writes both files of an adapter into the existing folder `dir`, which has none yet.
///
/// # Errors
/// [`Kind::Io`].
pub fn save_adapter(dir: &Path, config: &AdapterConfig, tensors: &[(String, Vec<usize>, &[f32])]) -> Result<()> {
    let path = dir.join(CONFIG_FILE);
    atomic::write(&path, format!("{:#}\n", config.to_json()).as_bytes())
        .map_err(|error| Error::io("write", &path, &error))?;
    let path = dir.join(WEIGHTS_FILE);
    let write = || {
        if path.symlink_metadata().is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let mut staged = AtomicFile::create(&path)?;
        write_weights(&mut staged, config, tensors)?;
        staged.commit()
    };
    write().map_err(|error| Error::io("write", &path, &error))
}

/// Writes all tensors of an adapter one after another. Tensors that are only copied ([`AdapterConfig::untouched`]) are
/// read at that moment.
fn write_weights(
    writer: &mut dyn Write,
    config: &AdapterConfig,
    tensors: &[(String, Vec<usize>, &[f32])],
) -> io::Result<()> {
    let named = with_prefix(config, tensors);
    let copied = config.untouched.beside(&named.iter().map(|(name, ..)| name.as_str()).collect());
    let own = named.iter().map(|(name, shape, values)| (name.clone(), shape.clone(), Numbers::F32((*values).into())));
    let all: Vec<_> = own.chain(copied).collect();
    let copy = |name: &str, numbers: Numbers<'_>, writer: &mut dyn Write| config.untouched.write(name, numbers, writer);
    write_numbers_by(writer, &all, &copy, &[("format", "pt")])
}

fn with_prefix<'a>(
    config: &'a AdapterConfig,
    tensors: &[(String, Vec<usize>, &'a [f32])],
) -> Vec<(String, Vec<usize>, &'a [f32])> {
    let stored = |name: &str| format!("{PREFIX}{}", config.stored_name(name));
    let kept = config.kept.iter().map(|(name, (shape, values))| (stored(name), shape.clone(), &values[..]));
    let named = tensors.iter().map(|(name, shape, values)| (stored(name), shape.clone(), *values)).chain(kept);
    let shared = tensors.iter().filter(|(name, ..)| config.shares_head && name == EMBEDDING);
    named.chain(shared.map(|(_, shape, values)| (stored(LM_HEAD), shape.clone(), *values))).collect()
}

/// Whether an adapter's tensor still has its initial values, so that it does not change its module. PEFT may place
/// adapters on a vision tower too, and training on text leaves these without a gradient.
fn is_idle(name: &str, values: &[f32]) -> bool {
    let all = |wanted: f32| values.iter().all(|value| *value == wanted);
    match name {
        _ if name.contains(".lora_A.") || name.ends_with(".lora_magnitude_vector") => true,
        _ if name.contains(".lora_B.") || name.contains(".oft_R.") => all(0.0),
        _ => name.contains(".ia3_l") && all(1.0),
    }
}

/// Reads an adapter on a language model: its settings, and its tensors in f32 under the base model's names.
///
/// # Errors
/// [`Kind::Checkpoint`].
pub fn load_adapter(dir: &Path) -> Result<(AdapterConfig, Tensors)> {
    read_adapter(AdapterConfig::from_dir(dir)?, dir, &|_| false, &|_| false)
}

/// As [`load_adapter`], but also reads those tensors outside of the language model that `seen` accepts. Leaves out
/// those that `copied` accepts, because they are the same in the base model.
fn read_adapter(
    mut config: AdapterConfig,
    dir: &Path,
    seen: &dyn Fn(&str) -> bool,
    copied: &dyn Fn(&str) -> bool,
) -> Result<(AdapterConfig, Tensors)> {
    Manifest::check_if_any(dir, &[CONFIG_FILE, WEIGHTS_FILE])?;
    let weights = open_weights(dir)?;
    let mut tensors = Tensors::new();
    for name in weights.names() {
        let Some(plain) = name.strip_prefix(PREFIX) else {
            return Err(Error::checkpoint(format!(
                "{}: tensor {name:?}, expected names that begin with {PREFIX:?}",
                dir.join(WEIGHTS_FILE).display()
            ))
            .hint("save the adapter as PEFT does (save_pretrained); names as in a state_dict are not enough"));
        };
        // Copies that PEFT writes if a vocabulary has grown: the base's own rows, the rows of a shared head once more,
        // and the parts of modules that are saved whole.
        let copy = name.ends_with(".token_adapter.base_layer.weight")
            || plain.ends_with(".original_module.weight")
            || plain.ends_with(".modules_to_save.weight")
            || (plain.starts_with("lm_head.token_adapter.") && config.token_rows.head.is_empty());
        if copy || is_beside(plain) && !seen(plain) && copied(plain) {
            continue;
        }
        let tensor = weights.read(name).map_err(|error| match error.kind() {
            Kind::Model => error
                .with_kind(Kind::Checkpoint)
                .hint("the adapter's file is damaged or of another kind: copy the adapter again"),
            _ => error.with_kind(Kind::Checkpoint),
        })?;
        if is_beside(plain) && !seen(plain) {
            if is_idle(plain, &tensor.1) {
                continue;
            }
            return Err(Error::checkpoint(format!(
                "{}: tensor {name:?} changes what is no part of the language model, which this version leaves as it is",
                dir.join(WEIGHTS_FILE).display()
            ))
            .hint("train with target_modules that match the language model alone, such as .*language_model.*\\.(q|v)_proj"));
        }
        tensors.insert(plain.to_owned(), tensor);
    }
    // PEFT also stores the embedding and the head after a resize, trained or not, and reads them from this file.
    let tables = [(EMBEDDING, "embed_tokens"), (LM_HEAD, "lm_head")];
    let stored = tables.into_iter().filter(|(table, _)| tensors.contains_key(*table)).map(|(_, module)| module);
    config.save_whole(&stored.collect::<Vec<_>>());
    Ok((config, older_formats::stacked(tensors)))
}

/// As [`load_adapter`], for a model whose vocabulary was adapted to the adapter ([`Arch::fit`]). A matrix that
/// embedding and head share is returned once.
///
/// # Errors
/// [`Kind::Checkpoint`]: the adapter cannot be read, or has two different matrices for embedding and head, which share
/// one.
pub fn open_adapter(dir: &Path, arch: &Arch) -> Result<(AdapterConfig, Tensors)> {
    let config = AdapterConfig::from_dir(dir)?;
    let expected = match &arch.vision {
        Some(_) => config.tensors(arch)?,
        None => Vec::new(),
    };
    let seen = |name: &str| expected.iter().any(|(own, _)| own == name);
    let untouched = arch.vision.as_ref().map(|vision| vision.untouched());
    let copied = |name: &str| untouched.as_ref().is_some_and(|untouched| untouched(name));
    let (config, mut tensors) = read_adapter(config, dir, &seen, &copied)?;
    if !arch.ties_head() {
        return Ok((config, tensors));
    }
    let tables = [[EMBEDDING, LM_HEAD].map(str::to_owned), [EMBEDDING, LM_HEAD].map(token_rows)];
    let differs = |[embedding, head]: &[String; 2]| match (tensors.get(embedding), tensors.get(head)) {
        (Some(embedding), Some(head)) => embedding != head,
        _ => false,
    };
    if let Some([embedding, head]) = tables.iter().find(|pair| differs(pair)) {
        return Err(Error::checkpoint(format!(
            "{}: tensor {head:?} is not {embedding:?}, though the model and the adapter's settings make them one",
            dir.join(WEIGHTS_FILE).display()
        ))
        .hint("the adapter must belong to this model and these settings"));
    }
    for [embedding, head] in &tables {
        if tensors.contains_key(embedding) {
            tensors.remove(head);
        }
    }
    Ok((config, tensors))
}

/// Whether the adapter in `dir` changes an image encoder or a connector.
///
/// # Errors
/// [`Kind::Checkpoint`]: its files cannot be read.
pub fn changes_encoder(dir: &Path) -> Result<bool> {
    let weights = open_weights(dir)?;
    for name in weights.names() {
        let plain = name.strip_prefix(PREFIX).unwrap_or(name);
        if is_beside(plain) {
            // A module that is trained as a whole, with all tensors that it has.
            let adapts = [".lora_", ".oft_R.", ".ia3_l"].iter().any(|part| plain.contains(part));
            if !adapts {
                return Ok(true);
            }
            let (_, values) = weights.read(name).map_err(|error| error.with_kind(Kind::Checkpoint))?;
            if !is_idle(plain, &values) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Whether the adapter in `dir` was trained while the language model was frozen: it changes an image encoder or a connector, and nothing
/// else but rows of new tokens.
///
/// # Errors
/// [`Kind::Checkpoint`]: its files cannot be read.
pub fn leaves_language(dir: &Path) -> Result<bool> {
    let weights = open_weights(dir)?;
    let mut beside = 0;
    let rows = [EMBEDDING, LM_HEAD].map(token_rows);
    let leaves = weights.names().all(|name| {
        let plain = name.strip_prefix(PREFIX).unwrap_or(name);
        beside += usize::from(is_beside(plain));
        is_beside(plain) || rows.iter().any(|rows| rows == plain)
    });
    Ok(leaves && beside > 0)
}

/// The trained tensors of the encoder and the connector in the adapter `dir`.
///
/// # Errors
/// [`Kind::Checkpoint`]: its files cannot be read.
pub fn vision_training(dir: &Path, vision: &VisionArch) -> Result<VisionTraining> {
    let weights = open_weights(dir)?;
    let names: BTreeSet<&str> = weights.names().filter_map(|name| name.strip_prefix(PREFIX)).collect();
    Ok(vision.trained_by(&|name| names.contains(name)))
}

/// The values of the tensors `names` in the adapter `dir`.
///
/// # Errors
/// [`Kind::Checkpoint`]: the file cannot be read, or lacks one of them.
pub fn values_of<'n>(dir: &Path, names: impl Iterator<Item = &'n String>) -> Result<Tensors> {
    let weights = open_weights(dir)?;
    let read = |name: &String| {
        let tensor = weights.read(&format!("{PREFIX}{name}")).map_err(|error| error.with_kind(Kind::Checkpoint))?;
        Ok((name.clone(), tensor))
    };
    names.map(read).collect()
}

/// How the adapter in `dir` changes the vocabulary, from its settings and the shapes of its embedding and head.
///
/// # Errors
/// [`Kind::Checkpoint`]: its files cannot be read.
pub fn vocabulary(dir: &Path) -> Result<Vocabulary> {
    let config = AdapterConfig::from_dir(dir)?;
    let apart = config.targets().apart().to_vec();
    let weights = open_weights(dir)?;
    let sizes = [EMBEDDING, LM_HEAD].map(|name| weights.shape(&format!("{PREFIX}{name}")).and_then(<[usize]>::first));
    let whole = sizes.into_iter().flatten().copied().max().unwrap_or_default();
    let tables = match sizes {
        [Some(&embedding), Some(&head)] => Some([embedding, head]),
        _ => None,
    };
    Ok(Vocabulary { rows: config.token_rows, whole, tables, apart, origin: dir.to_owned() })
}

/// Refuses to continue the training of an adapter whose file has a whole embedding or head that its settings do not
/// train. PEFT stores these after a resize (`save_embedding_layers`) and keeps them frozen.
///
/// # Errors
/// [`Kind::Checkpoint`]: the file has such a matrix, or the adapter does not fit the model.
pub fn refuse_frozen_tables(dir: &Path, arch: &Arch) -> Result<()> {
    let weights = open_weights(dir)?;
    let is_stored = |table: &&str| weights.shape(&format!("{PREFIX}{table}")).is_some();
    let stored: Vec<_> = [EMBEDDING, LM_HEAD].into_iter().filter(is_stored).collect();
    if stored.is_empty() {
        return Ok(());
    }
    let config = AdapterConfig::from_dir(dir)?;
    let mut targets = config.targets();
    // Encoder and connector are not loaded yet, and have no matrix of the vocabulary.
    targets.modules_to_save.retain(|module| !is_beside(module));
    let saved = targets.saved_tensors(arch).map_err(|error| config.about(error))?;
    let trained = |table: &str| {
        // A shared matrix is stored under both names.
        let table = if arch.ties_head() { EMBEDDING } else { table };
        saved.iter().any(|name| name == table)
    };
    let Some(table) = stored.into_iter().find(|table| !trained(table)) else { return Ok(()) };
    Err(Error::checkpoint(format!(
        "{}: not yet: training further with the tensor {table:?}, which the file holds whole and modules_to_save of {CONFIG_FILE} does not name",
        dir.join(WEIGHTS_FILE).display()
    ))
    .hint("merge the adapter first (tunesmith merge) and train on the merged model, or name the module in modules_to_save to train it"))
}

/// Checks that an adapter has exactly the tensors that the model needs, with their shapes.
///
/// # Errors
/// [`Kind::Checkpoint`], with what was found and what was expected.
pub fn check_tensors(dir: &Path, found: &Tensors, expected: &[(String, Vec<usize>)]) -> Result<()> {
    let shapes = found.iter().map(|(name, (shape, _))| (name.as_str(), shape.as_slice()));
    same_tensors(
        &dir.join(WEIGHTS_FILE),
        shapes,
        expected.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())),
    )
}
