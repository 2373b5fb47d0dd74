//! Opens the files of a model, and checks their tensors against those that its architecture needs.
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;

use super::WeightFiles;
use super::format::{Entry, Pairs, read_header};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;
use tunesmith_config::arch::{Arch, Naming, TensorSpec};
use tunesmith_config::stored_format::StoredFormat;
use tunesmith_config::{INSTEAD_OF_GGUF, is_gguf};

/// Larger than the index of any real model.
const INDEX_BYTES: u64 = 64 << 20;

impl WeightFiles {
    /// Opens `dir/model.safetensors`, or the shards that `dir/model.safetensors.index.json` names, and checks that
    /// exactly the `expected` tensors are there, in their shapes and in F32, BF16 or F16, or as matrices that
    /// bitsandbytes has quantized, or in the maker's format that `dir/config.json` describes. Stored rotary frequencies
    /// are ignored, and so is the `lm_head.weight` of a tied model.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`], naming file, tensor, what was found and what was expected.
    pub fn open(dir: &Path, expected: &[TensorSpec]) -> Result<Self> {
        Self::open_part(dir, expected, None)
    }

    /// As [`WeightFiles::open`], for the model that `arch` describes. From a multimodal model it takes the tensors of
    /// the language model, under the names that a plain language model has. The rest stays on disk
    /// ([`WeightFiles::wrapping`]), and so do heads that predict several tokens ahead.
    ///
    /// # Errors
    /// As [`WeightFiles::open`].
    pub fn open_model(dir: &Path, arch: &Arch, expected: &[TensorSpec]) -> Result<Self> {
        Self::open_part(dir, expected, Some(arch))
    }

    fn open_part(dir: &Path, expected: &[TensorSpec], arch: Option<&Arch>) -> Result<Self> {
        let single = dir.join("model.safetensors");
        let index = dir.join("model.safetensors.index.json");
        let (mut weights, origin) = if single.exists() {
            (Self::open_file(&single)?, single)
        } else if index.exists() {
            (Self::open_shards(dir, &index)?, index)
        } else {
            return Err(no_weights(dir));
        };
        let format = StoredFormat::from_dir(dir)?;
        let own = Naming::is_own(&|name| weights.entries.contains_key(name));
        let wrapped = own || arch.is_some_and(|arch| arch.wrapper.is_some());
        let mut others = if wrapped { weights.unwrap_model()? } else { BTreeMap::new() };
        if let Some(arch) = arch.filter(|arch| arch.predicts_ahead) {
            others.extend(weights.take_ahead(arch.num_hidden_layers));
        }
        if wrapped || !others.is_empty() {
            weights.put_aside(others, format.as_ref())?;
        }
        weights.rename_head_gates();
        weights.find_quantized()?;
        if let Some(format) = &format {
            weights.find_makers(format)?;
        }
        weights.unstack(Some(expected))?;
        weights.unlist()?;
        weights.rename_linear_attention();
        weights.check(expected, &origin)?;
        Ok(weights)
    }

    /// Opens the weights in `dir`, whatever tensors they hold.
    ///
    /// # Errors
    /// As [`WeightFiles::open`], but for tensors that are missing or not expected.
    pub fn open_folder(dir: &Path) -> Result<Self> {
        let (single, index) = (dir.join("model.safetensors"), dir.join("model.safetensors.index.json"));
        let mut weights = if single.exists() {
            Self::open_file(&single)?
        } else if index.exists() {
            Self::open_shards(dir, &index)?
        } else {
            return Err(no_weights(dir));
        };
        weights.find_quantized()?;
        Ok(weights)
    }

    /// Opens a folder as [`Self::open_folder`], or a file as [`Self::open_file`].
    ///
    /// # Errors
    /// As [`Self::open_folder`] and [`Self::open_file`].
    pub fn open_at(path: &Path) -> Result<Self> {
        if path.is_file() { Self::open_file(path) } else { Self::open_folder(path) }
    }

    /// Opens one file, whatever tensors it holds.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`] where the header does not fit the file.
    pub fn open_file(path: &Path) -> Result<Self> {
        let mut weights = Self::empty();
        weights.add_file(path)?;
        Ok(weights)
    }

    fn open_shards(dir: &Path, index: &Path) -> Result<Self> {
        let fail = |message: String| Error::model(format!("{}: {message}", index.display()));
        let mut text = Vec::new();
        let (file, len) = open_regular(index)?;
        if len > INDEX_BYTES {
            return Err(fail(format!("{len} bytes long, expected at most {INDEX_BYTES}")));
        }
        file.take(INDEX_BYTES).read_to_end(&mut text).map_err(|error| Error::io("read", index, &error))?;
        let parsed: Index =
            serde_json::from_slice(&text).map_err(|error| fail("not a valid index".to_owned()).caused_by(error))?;
        let map = parsed.weight_map.0;
        let shards: BTreeSet<&str> = map.iter().map(|(_, shard)| shard.as_str()).collect();
        if let Some(shard) = shards.iter().find(|shard| !is_plain_name(shard)) {
            return Err(fail(format!("shard name {shard:?}, expected the plain name of a file beside the index")));
        }
        let mut weights = Self::empty();
        for shard in shards {
            if !dir.join(shard).exists() {
                return Err(fail(format!("shard {shard:?} is missing from {}", dir.display()))
                    .hint("download the model again; every shard that the index names is needed"));
            }
            weights.add_file(&dir.join(shard))?;
        }
        let mut listed = BTreeSet::new();
        for (name, shard) in &map {
            if !listed.insert(name.as_str()) {
                return Err(fail(format!("tensor {name:?} is listed twice")));
            }
            let found = weights.entries.get(name).map(|entry| &weights.files[entry.file].0);
            if found.is_none_or(|path| path != &dir.join(shard)) {
                return Err(fail(format!("tensor {name:?} is listed in {shard:?}, which does not hold it")));
            }
        }
        if let Some(name) = weights.entries.keys().find(|name| !listed.contains(name.as_str())) {
            return Err(fail(format!("tensor {name:?} is in a shard, but the index does not list it")));
        }
        Ok(weights)
    }

    fn add_file(&mut self, path: &Path) -> Result<()> {
        let (file, len) = open_regular(path)?;
        let number = self.files.len();
        for (name, entry) in read_header(path, &file, len, number)? {
            if let Some(earlier) = self.entries.insert(name.clone(), entry) {
                let earlier = self.files.get(earlier.file).map_or(path, |(path, _)| path);
                return Err(Error::model(format!(
                    "{}: tensor {name:?} is there twice (also in {})",
                    path.display(),
                    earlier.display()
                )));
            }
        }
        self.files.push((path.to_owned(), file));
        Ok(())
    }

    /// Checks that the files hold exactly the expected tensors, apart from those that are ignored.
    fn check(&self, expected: &[TensorSpec], origin: &Path) -> Result<()> {
        for spec in expected {
            let Some(entry) = self.entries.get(&spec.name) else {
                let name = self.stored_name(&spec.name);
                let error =
                    Error::model(format!("{}: no tensor {name:?}, expected {:?}", origin.display(), spec.shape));
                return Err(match spec.name.as_str() {
                    "lm_head.weight" => {
                        error.hint("if the model shares its embedding, config.json needs \"tie_word_embeddings\": true")
                    }
                    _ => error.hint("config.json and the weights must belong to one model"),
                });
            };
            let shape = self.shape(&spec.name).unwrap_or_default();
            if shape != spec.shape {
                return Err(self
                    .fail(entry, &spec.name, format!("is {shape:?}, expected {:?}", spec.shape))
                    .hint("config.json and the weights must belong to one model"));
            }
            if !self.quantized.contains_key(&spec.name) {
                self.readable(&spec.name)?;
            }
        }
        let known: BTreeSet<&str> = expected.iter().map(|spec| spec.name.as_str()).collect();
        self.check_shared(&known)?;
        let companions: BTreeSet<String> = self.companions();
        let passed = |name: &str| is_passed_over(name) || companions.contains(name) || is_unused_key(name, &known);
        let extra = |name: &&String| !known.contains(name.as_str()) && !passed(name);
        match self.entries.iter().find(|(name, _)| extra(name)) {
            Some((name, entry)) => Err(self
                .fail(
                    entry,
                    name,
                    format!("({} {:?}) is no part of what config.json describes", entry.dtype, entry.shape),
                )
                .hint("config.json and the weights must belong to one model")),
            None => Ok(()),
        }
    }

    /// Refuses a stored head that differs from the embedding, in a model that ties the two.
    fn check_shared(&self, known: &BTreeSet<&str>) -> Result<()> {
        let (head, embedding) = ("lm_head.weight", "model.embed_tokens.weight");
        let (Some(stored), Some(shared)) = (self.entries.get(head), self.entries.get(embedding)) else { return Ok(()) };
        if known.contains(head) || known.contains("score.weight") || !known.contains(embedding) {
            return Ok(());
        }
        let content = |entry: &Entry| {
            let mut hasher = blake3::Hasher::new();
            let read = self.chunks(entry, |bytes| {
                hasher.update(bytes);
            });
            read.map_err(|error| {
                Error::io("read", &self.files[entry.file].0, &error).with_kind(tunesmith_base::Kind::Model)
            })?;
            Ok::<_, Error>(hasher.finalize())
        };
        let alike = stored.dtype == shared.dtype && stored.shape == shared.shape;
        if alike && content(stored)? == content(shared)? {
            return Ok(());
        }
        Err(self.fail(stored, head, format!("is not {embedding:?}, though config.json says that they are one")).hint(
            "set \"tie_word_embeddings\": false in config.json, as Transformers takes it, or leave the tensor out",
        ))
    }
}

/// Whether a tensor is ignored: a buffer that the model computes itself (old files of GPT-2 have causal masks), or the
/// copy of a tied head.
fn is_passed_over(name: &str) -> bool {
    let buffers = [
        ".rotary_emb.inv_freq",
        ".attn.bias",
        ".attn.masked_bias",
        ".crossattention.bias",
        ".crossattention.masked_bias",
    ];
    buffers.iter().any(|buffer| name.ends_with(buffer)) || name == "lm_head.weight"
}

/// Whether a tensor belongs to the keys or values of a block that reuses those of another: Gemma 4's files have such
/// tensors, and no class of Transformers reads them.
fn is_unused_key(name: &str, known: &BTreeSet<&str>) -> bool {
    let parts = [".self_attn.k_proj.weight", ".self_attn.v_proj.weight", ".self_attn.k_norm.weight"];
    let block = parts.iter().find_map(|part| name.strip_suffix(part));
    // No other block has none of them.
    let has = |block: &str, part: &str| known.contains(format!("{block}{part}").as_str());
    block.is_some_and(|block| has(block, ".layer_scalar") && parts.iter().all(|part| !has(block, part)))
}

/// Whether a name is a plain file name, without separators and without a leading dot, so that it stays within the
/// folder that it is joined to.
fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

fn no_weights(dir: &Path) -> Error {
    let error = Error::model(format!(
        "{}: no weights: expected model.safetensors or model.safetensors.index.json",
        dir.display()
    ));
    let gguf = std::fs::read_dir(dir).into_iter().flatten().flatten().find(|entry| is_gguf(&entry.path()));
    if let Some(gguf) = gguf {
        let name = gguf.file_name().to_string_lossy().into_owned();
        return error.hint(format!("{name} is a GGUF file, and tunesmith reads none: {INSTEAD_OF_GGUF}"));
    }
    if dir.join("pytorch_model.bin").exists() || dir.join("pytorch_model.bin.index.json").exists() {
        error.hint("not yet: pytorch_model.bin; save the model again with safetensors (save_pretrained does)")
    } else {
        error.hint("for a model from scratch set model.init: random")
    }
}

/// Opens a file of a model folder, with its length.
fn open_regular(path: &Path) -> Result<(File, u64)> {
    let io = |error| Error::io("open", path, &error).with_kind(tunesmith_base::Kind::Model);
    let file = files::open_member(path).map_err(io)?;
    let len = file.metadata().map_err(io)?.len();
    Ok((file, len))
}

#[derive(Deserialize)]
struct Index {
    weight_map: Pairs<String>,
}
