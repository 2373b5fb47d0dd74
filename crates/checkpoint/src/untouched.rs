//! Tensors that an adapter's file must have although training never changes them. PEFT wants every tensor of a module
//! in `modules_to_save`, also those that get no gradient: an encoder's token for masked patches, its pooling head, its
//! last block. They are copied from the base's files while the adapter is written.
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::Path;

use super::adapter_file::{PREFIX, open_weights};
use tunesmith_base::error::Result;
use tunesmith_config::arch::Arch;
use tunesmith_model::weights::{Numbers, WeightFiles, Wrapping};

/// The tensors to copy, and the files to copy them from.
#[derive(Debug, Default)]
pub struct Untouched {
    from: Option<Wrapping>,
    tensors: Vec<Copied>,
}

#[derive(Debug)]
struct Copied {
    /// The name in the whole model.
    name: String,
    /// The name in the files that it is copied from.
    stored: String,
    shape: Vec<usize>,
    numbers: Numbers<'static>,
}

impl PartialEq for Untouched {
    fn eq(&self, other: &Self) -> bool {
        let shapes = |all: &Self| all.tensors.iter().map(|it| (it.name.clone(), it.shape.clone())).collect::<Vec<_>>();
        shapes(self) == shapes(other)
    }
}

impl Untouched {
    /// Finds them in the files of the base model. `arch.vision` says what is trained; `weights` are the decoder's
    /// files.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the encoder's files cannot be read.
    pub fn of_base(arch: &Arch, weights: Option<&WeightFiles>) -> Result<Self> {
        let Some(vision) = arch.vision.as_ref().filter(|vision| !vision.saved_modules().is_empty()) else {
            return Ok(Self::default());
        };
        let from = match &vision.folder {
            Some(folder) => Some(Wrapping::of(WeightFiles::open_at(folder)?)),
            None => weights.and_then(WeightFiles::wrapping),
        };
        let Some(from) = from else { return Ok(Self::default()) };
        let rest = vision.rest_of_saved(&from.files().names().collect());
        let named = rest.into_iter().map(|(name, stored)| (name, stored.to_owned())).collect();
        Self::named(from, named)
    }

    /// Finds them in the files of the adapter in `dir`. `arch.vision` says what the adapter has trained.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`]: the adapter's file cannot be read.
    pub fn of_adapter(dir: &Path, arch: &Arch) -> Result<Self> {
        let Some(vision) = &arch.vision else { return Ok(Self::default()) };
        let (from, untouched) = (Wrapping::of(open_weights(dir)?), vision.untouched());
        let plain = |stored: &str| stored.strip_prefix(PREFIX).filter(|name| untouched(name)).map(str::to_owned);
        let named = from.files().names().filter_map(|stored| Some((plain(stored)?, stored.to_owned()))).collect();
        Self::named(from, named)
    }

    fn named(from: Wrapping, named: Vec<(String, String)>) -> Result<Self> {
        if named.is_empty() {
            return Ok(Self::default());
        }
        let all = from.tensors(false)?;
        let of = |(name, stored): (String, String)| {
            let (_, shape, numbers) = all.iter().find(|(other, ..)| *other == stored)?;
            // Integers, such as counters, are no parameters.
            let floats = from.dtype(&stored).is_some() || matches!(numbers, Numbers::Fetched(..));
            floats.then(|| Copied { name, stored, shape: shape.clone(), numbers: *numbers })
        };
        let tensors = named.into_iter().filter_map(of).collect();
        Ok(Self { from: Some(from), tensors })
    }

    /// Whether this tensor of the model is copied.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.iter().any(|it| it.name == name)
    }

    /// Whether nothing is copied.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The bytes that the tensors take in a file.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|it| it.numbers.bytes()).sum()
    }

    /// Names, shapes and numbers of the tensors as an adapter's file has them, except those whose names are in
    /// `others`. [`Untouched::write`] writes the numbers.
    pub(super) fn beside(&self, others: &BTreeSet<&str>) -> Vec<(String, Vec<usize>, Numbers<'static>)> {
        let named = self.tensors.iter().map(|it| (format!("{PREFIX}{}", it.name), it.shape.clone(), it.numbers));
        named.filter(|(name, ..)| !others.contains(name.as_str())).collect()
    }

    /// Writes the numbers of the tensor with this name in an adapter's file.
    ///
    /// # Errors
    /// The files cannot be read, or the writer fails.
    pub(super) fn write(&self, name: &str, numbers: Numbers<'_>, writer: &mut dyn Write) -> io::Result<()> {
        let found = self.tensors.iter().find(|it| name.strip_prefix(PREFIX) == Some(&it.name));
        let (from, found) = self.from.as_ref().zip(found).ok_or(io::ErrorKind::NotFound)?;
        from.write(&found.stored, numbers, writer)
    }
}
