//! Adapters as PEFT writes and reads them: `adapter_config.json` ([`AdapterConfig`]) and `adapter_model.safetensors`,
//! whose names are the base model's behind [`PREFIX`].
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::adapter_config::AdapterConfig;
use super::atomic::Staging;
use super::former;
use crate::Kind;
use crate::config::arch::{EMBEDDING, LM_HEAD, Vocabulary};
use crate::error::{Error, Result};
use crate::model::weights::{WeightFiles, write_safetensors, write_safetensors_to};

/// The file with the adapter's settings.
pub const CONFIG_FILE: &str = "adapter_config.json";
/// The file with the adapter's tensors.
pub const WEIGHTS_FILE: &str = "adapter_model.safetensors";
/// What PEFT puts before a tensor's name in the base model.
pub const PREFIX: &str = "base_model.model.";

/// Tensors by name with their shapes.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Writes both files of an adapter; the tensors have the base model's names (`<module>.lora_A.weight`, or a whole tensor's).
///
/// # Errors
/// [`Kind::Io`].
pub fn stage(
    staging: &mut Staging<'_>,
    config: &AdapterConfig,
    tensors: &[(String, Vec<usize>, &[f32])],
) -> Result<()> {
    staging.write_json(CONFIG_FILE, &config.to_json())?;
    staging.write(WEIGHTS_FILE, |writer| write_safetensors_to(writer, &with_prefix(tensors), &[("format", "pt")]))
}

/// Writes both files of an adapter into the existing folder `dir`, which has none yet. Does not sync.
///
/// # Errors
/// [`Kind::Io`].
pub fn save_adapter(dir: &Path, config: &AdapterConfig, tensors: &[(String, Vec<usize>, &[f32])]) -> Result<()> {
    let path = dir.join(CONFIG_FILE);
    fs::write(&path, format!("{:#}\n", config.to_json())).map_err(|error| Error::io("write", &path, &error))?;
    write_safetensors(&dir.join(WEIGHTS_FILE), &with_prefix(tensors), &[("format", "pt")])
}

fn with_prefix<'a>(tensors: &[(String, Vec<usize>, &'a [f32])]) -> Vec<(String, Vec<usize>, &'a [f32])> {
    tensors.iter().map(|(name, shape, values)| (format!("{PREFIX}{name}"), shape.clone(), *values)).collect()
}

/// Opens `dir/adapter_model.safetensors`.
///
/// # Errors
/// [`Kind::Checkpoint`].
pub fn open_weights(dir: &Path) -> Result<WeightFiles> {
    let path = dir.join(WEIGHTS_FILE);
    if !path.exists() && dir.join("adapter_model.bin").exists() {
        return Err(Error::checkpoint(format!("{}: not yet: adapter_model.bin", dir.display()))
            .hint("save the adapter again with safetensors (PEFT's save_pretrained does)"));
    }
    WeightFiles::open_file(&path).map_err(|error| error.with_kind(Kind::Checkpoint))
}

/// Reads an adapter: its settings, and its tensors in f32 under the base model's names.
///
/// # Errors
/// [`Kind::Checkpoint`].
pub fn load_adapter(dir: &Path) -> Result<(AdapterConfig, Tensors)> {
    let mut config = AdapterConfig::from_dir(dir)?;
    let weights = open_weights(dir)?;
    let mut tensors = Tensors::new();
    for name in weights.names() {
        let Some(plain) = name.strip_prefix(PREFIX) else {
            return Err(Error::checkpoint(format!(
                "{}: tensor {name:?}, expected names that begin with {PREFIX:?}",
                dir.join(WEIGHTS_FILE).display()
            )));
        };
        // Copies that PEFT writes where a vocabulary has grown: the base's own rows, a shared head's rows again, and the parts
        // of what is saved whole.
        let copy = name.ends_with(".token_adapter.base_layer.weight")
            || plain.ends_with(".original_module.weight")
            || plain.ends_with(".modules_to_save.weight")
            || (plain.starts_with("lm_head.token_adapter.") && config.token_rows.head.is_empty());
        if copy {
            continue;
        }
        let tensor = weights.read(name).map_err(|error| error.with_kind(Kind::Checkpoint))?;
        tensors.insert(plain.to_owned(), tensor);
    }
    // PEFT also stores the tables of a vocabulary that was resized, trained or not, and takes them from there.
    let tables = [(EMBEDDING, "embed_tokens"), (LM_HEAD, "lm_head")];
    for (_, module) in tables.into_iter().filter(|(table, _)| tensors.contains_key(*table)) {
        config.save_whole(module);
    }
    Ok((config, former::stacked(tensors)))
}

/// What the adapter in `dir` makes of the vocabulary, by its settings and the sizes of its tables.
///
/// # Errors
/// [`Kind::Checkpoint`]: its files cannot be read.
pub fn vocabulary(dir: &Path) -> Result<Vocabulary> {
    let rows = AdapterConfig::from_dir(dir)?.token_rows;
    let weights = open_weights(dir)?;
    let sizes = [EMBEDDING, LM_HEAD].map(|name| weights.shape(&format!("{PREFIX}{name}")).and_then(<[usize]>::first));
    let whole = sizes.into_iter().flatten().copied().max().unwrap_or_default();
    Ok(Vocabulary { rows, whole, origin: dir.to_owned() })
}

/// Holds an adapter's tensors against what the model needs: the same names, the same shapes.
///
/// # Errors
/// [`Kind::Checkpoint`] with both sides.
pub fn check_tensors(dir: &Path, found: &Tensors, expected: &[(String, Vec<usize>)]) -> Result<()> {
    let shapes = found.iter().map(|(name, (shape, _))| (name.as_str(), shape.as_slice()));
    same_tensors(
        &dir.join(WEIGHTS_FILE),
        shapes,
        expected.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())),
    )
}

/// As [`check_tensors`], for any two sets.
pub(super) fn same_tensors<'n>(
    path: &Path,
    found: impl IntoIterator<Item = (&'n str, &'n [usize])>,
    expected: impl IntoIterator<Item = (&'n str, &'n [usize])>,
) -> Result<()> {
    let (found, expected): (BTreeMap<_, _>, BTreeMap<_, _>) =
        (found.into_iter().collect(), expected.into_iter().collect());
    let fail = |message: String| {
        let both = format!("{} tensors there, {} expected", found.len(), expected.len());
        Err(Error::checkpoint(format!("{}: {message} ({both})", path.display()))
            .hint("the adapter must belong to this model and these settings"))
    };
    for (name, shape) in &expected {
        match found.get(name) {
            None => return fail(format!("no tensor {name:?}, expected {shape:?}")),
            Some(other) if other != shape => return fail(format!("tensor {name:?} is {other:?}, expected {shape:?}")),
            Some(_) => {}
        }
    }
    match found.iter().find(|(name, _)| !expected.contains_key(*name)) {
        Some((name, shape)) => fail(format!("tensor {name:?} {shape:?} has no place in the model")),
        None => Ok(()),
    }
}
