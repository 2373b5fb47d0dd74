//! What a multimodal checkpoint holds besides its language model: its names, and the tensors that are copied unchanged.
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::WeightFiles;
use super::format::{Dtype, Entry, known_dtype};
use super::makers::MakersPart;
use super::write::{Numbers, write_floats};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::{Arch, Naming, is_beside, is_decoders};
use tunesmith_config::stored_format::StoredFormat;

/// What a multimodal checkpoint has beyond its language model: names of its own, and other tensors.
#[derive(Debug, Clone)]
pub struct Wrapping {
    naming: Option<Naming>,
    others: Arc<WeightFiles>,
}

impl Wrapping {
    /// For a model without files whose family has its own names of tensors; `None` for other families.
    pub fn drawn(arch: &Arch) -> Option<Self> {
        let naming = arch.module_names.naming.filter(|_| arch.wrapper.is_none())?;
        Some(Self { naming: Some(naming), others: Arc::new(WeightFiles::empty()) })
    }

    /// For files that hold no part of a language model.
    pub fn of(others: WeightFiles) -> Self {
        Self { naming: None, others: Arc::new(others) }
    }

    /// The tensors beside the language model, under their names in the files.
    pub fn files(&self) -> &WeightFiles {
        &self.others
    }

    /// The dtype of a tensor, by its name in the files.
    pub fn dtype(&self, stored: &str) -> Option<Dtype> {
        self.others.dtype(stored)
    }

    /// The name in the files of a tensor of the language model, or of a tensor of encoder or connector that is given by
    /// its name in Transformers 5.
    pub fn stored_name(&self, name: &str) -> String {
        if is_beside(name) {
            let alike = |stored: &&String| plain_beside(stored) == plain_beside(name);
            return self.others.entries.keys().find(alike).map_or_else(|| name.to_owned(), Clone::clone);
        }
        self.naming.map_or_else(|| name.to_owned(), |naming| naming.stored(name))
    }

    /// Whether a tensor is one of those beside the language model, by its name in the files.
    pub fn has(&self, stored: &str) -> bool {
        self.others.entries.contains_key(stored)
    }

    /// Whether there are heads that predict several tokens ahead: `mtp.*`, or blocks after the last one. They were
    /// trained for the model as it was before fine-tuning.
    pub fn predicts_ahead(&self) -> bool {
        self.others.entries.keys().any(|name| name.starts_with("mtp.") || block_of(name).is_some())
    }

    /// Bytes of the tensors beside the language model.
    pub fn bytes(&self) -> u64 {
        self.others.entries.values().map(|entry| entry.end - entry.begin).sum()
    }

    /// The modules beside the language model, such as `model.vision_tower`, as Transformers 5 names them.
    pub fn modules(&self) -> BTreeSet<String> {
        let top = |name: &String| {
            let name = name.strip_prefix("model.").unwrap_or(name);
            format!("model.{}", name.split('.').next().unwrap_or(name))
        };
        self.others.entries.keys().map(top).collect()
    }

    /// The tensors beside the language model, for [`Wrapping::write`]. They are copied as they are, but quantized
    /// matrices are widened, since what is written with them is not quantized. With `keeps`, matrices in a maker's
    /// format stay as they are.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: one is of a dtype that is not known here.
    pub fn tensors(&self, keeps: bool) -> Result<Vec<(String, Vec<usize>, Numbers<'static>)>> {
        let others = &*self.others;
        let companions = others.companions();
        let mut stored: Vec<MakersPart> = Vec::new();
        if keeps {
            stored.extend(others.quantized.keys().flat_map(|name| others.makers_parts(name)));
            stored.extend(others.makers_leftovers());
        }
        let plain =
            |(name, _): &(&String, &Entry)| !companions.contains(*name) && !others.quantized.contains_key(*name);
        let wide = others.entries.iter().filter(plain).find_map(|(_, entry)| Dtype::parse(&entry.dtype));
        let tensor = |(name, entry): (&String, &Entry)| {
            if let Some(quantized) = others.quantized.get(name) {
                let shape = quantized.shape().to_vec();
                let count = shape.iter().product();
                return Ok((name.clone(), shape, Numbers::Fetched(count, wide.unwrap_or(Dtype::F32))));
            }
            let dtype = known_dtype(&entry.dtype).ok_or_else(|| {
                others.fail(entry, name, format!("is {}, which this version cannot copy", entry.dtype))
            })?;
            Ok((name.clone(), entry.shape.clone(), Numbers::Elsewhere(entry.len(), dtype)))
        };
        let kept = |name: &str| keeps && others.layout(name).is_some();
        let rest = others.entries.iter().filter(|(name, _)| !companions.contains(*name) && !kept(name)).map(tensor);
        rest.chain(stored.into_iter().map(|part| Ok((part.name, part.shape, part.numbers)))).collect()
    }

    /// Writes one of [`Wrapping::tensors`]; a copied one 1 MiB at a time.
    ///
    /// # Errors
    /// The file cannot be read, or the writer fails.
    pub fn write(&self, name: &str, numbers: Numbers<'_>, writer: &mut dyn Write) -> io::Result<()> {
        if let Numbers::Fetched(_, dtype) = numbers {
            let (_, values) = self.others.read(name).map_err(io::Error::other)?;
            return write_floats(writer, &values, dtype);
        }
        // Codes may have another name here than in the files.
        let Some(entry) = self.others.entries.get(name) else {
            let matrix = name.rsplit_once('.').map_or_else(String::new, |(module, _)| format!("{module}.weight"));
            let part = self.others.makers_parts(&matrix).into_iter().find(|part| part.name == name);
            return self.others.write_makers_part(&part.ok_or(io::ErrorKind::NotFound)?, writer);
        };
        let mut written = Ok(());
        self.others.chunks(entry, |bytes| {
            if written.is_ok() {
                written = writer.write_all(bytes);
            }
        })?;
        written
    }
}

/// The number of the block that a tensor belongs to, by its name in a plain language model.
fn block_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

/// Names of ViT and `DINOv2` in files, and in Transformers 5, in the order in which they are replaced.
const RENAMED: [(&str, &str); 8] = [
    ("encoder.vision_model.", "encoder."),
    ("encoder.encoder.layer.", "encoder.layers."),
    (".attention.attention.query.", ".attention.q_proj."),
    (".attention.attention.key.", ".attention.k_proj."),
    (".attention.attention.value.", ".attention.v_proj."),
    (".attention.output.dense.", ".attention.o_proj."),
    (".intermediate.dense.", ".mlp.fc1."),
    (".output.dense.", ".mlp.fc2."),
];

/// A normal form of the names that a tensor beside the language model may have: checkpoints have the tower with and
/// without `vision_model.`, and the whole with and without `model.`. An encoder beside a decoder that reads it by
/// cross-attention has the names of its own file.
fn plain_beside(name: &str) -> String {
    if name.starts_with("encoder.") {
        return RENAMED.iter().fold(name.to_owned(), |name, (stored, plain)| name.replacen(stored, plain, 1));
    }
    name.strip_prefix("model.").unwrap_or(name).replace("vision_tower.vision_model.", "vision_tower.")
}

impl WeightFiles {
    /// Opens a file of weights that a run has saved. From a multimodal model it takes the tensors of the language
    /// model.
    ///
    /// # Errors
    /// As [`WeightFiles::open_file`].
    pub fn open_saved(path: &Path) -> Result<Self> {
        let mut weights = Self::open_file(path)?;
        let others = weights.unwrap_model()?;
        weights.put_aside(others, None)?;
        weights.unstack(None)?;
        Ok(weights)
    }

    /// The tensors beside the language model of a multimodal checkpoint, under their names in the files.
    pub(crate) fn beside(&self) -> Option<Arc<Self>> {
        self.others.clone()
    }

    /// What surrounds the language model in a multimodal checkpoint; `None` for a plain language model.
    pub fn wrapping(&self) -> Option<Wrapping> {
        Some(Wrapping { naming: self.naming, others: Arc::clone(self.others.as_ref()?) })
    }

    /// Removes and returns the tensors that are no part of a language model, and gives the others the names that a
    /// plain language model has.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: two tensors have the same name in a plain language model.
    pub(super) fn unwrap_model(&mut self) -> Result<BTreeMap<String, Entry>> {
        let naming = Naming::find(&|name| self.entries.contains_key(name));
        self.naming = naming.map(Naming::written);
        let mut others = BTreeMap::new();
        for (name, entry) in std::mem::take(&mut self.entries) {
            let plain = match naming {
                Some(naming) => naming.plain(&name),
                None => is_decoders(&name).then(|| name.clone()),
            };
            match plain {
                Some(plain) => self.put(plain, entry, &name)?,
                None => drop(others.insert(name, entry)),
            }
        }
        // A second naming of the same matrix: which of the two is meant is not known.
        for (name, entry) in &others {
            if let Some(plain) = Naming::plain_in_any(name).find(|plain| self.entries.contains_key(plain)) {
                let (path, _) = &self.files[entry.file];
                return Err(Error::model(format!(
                    "{}: tensor {:?} is there twice: {name:?} is another name of it",
                    path.display(),
                    self.stored_name(&plain)
                )));
            }
        }
        Ok(others)
    }

    /// Removes and returns heads that predict several tokens ahead, in a model with `blocks` blocks: `mtp.*`, and
    /// blocks after the last one.
    pub(super) fn take_ahead(&mut self, blocks: usize) -> BTreeMap<String, Entry> {
        let ahead = |name: &str| name.starts_with("mtp.") || block_of(name).is_some_and(|block| block >= blocks);
        let names: Vec<String> = self.entries.keys().filter(|name| ahead(name)).cloned().collect();
        let taken = names.into_iter().filter_map(|name| {
            let entry = self.entries.remove(&name)?;
            Some((self.stored_name(&name), entry))
        });
        taken.collect()
    }

    /// Keeps entries that are no part of the language model ([`WeightFiles::wrapping`]).
    pub(super) fn put_aside(&mut self, others: BTreeMap<String, Entry>, format: Option<&StoredFormat>) -> Result<()> {
        let open = |(path, file): &(PathBuf, File)| {
            let file = file.try_clone().map_err(|error| Error::io("open", path, &error))?;
            Ok((path.clone(), file))
        };
        let files = self.files.iter().map(open).collect::<Result<_>>()?;
        let mut others = Self { files, entries: others, ..Self::empty() };
        others.find_quantized()?;
        if let Some(format) = format {
            others.find_makers(format)?;
        }
        self.others = Some(Arc::new(others));
        Ok(())
    }
}
