//! A weights file that is written next to a model's, for a vision encoder: most tensors are copied from the encoder's
//! files, and those that training has changed are computed.
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;

use super::publish::StagedFolder;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::TensorSpec;
use tunesmith_model::weights::{Dtype, Numbers, Wrapping, write_floats, write_numbers_by};

/// The tensors of one such file.
#[derive(Debug)]
pub struct BesideFile {
    /// The encoder's files, from which tensors are copied.
    pub from: Wrapping,
    /// The copied tensors by their names in the written file, each with its name in the encoder's files, its shape and
    /// its numbers.
    pub copied: BTreeMap<String, (String, Vec<usize>, Numbers<'static>)>,
    /// The tensors with new values by their names in the written file, each with its dtype there.
    pub computed: BTreeMap<String, (TensorSpec, Dtype)>,
}

impl BesideFile {
    fn tensors(&self) -> Vec<(String, Vec<usize>, Numbers<'static>)> {
        let computed = self
            .computed
            .iter()
            .map(|(name, (spec, dtype))| (name.clone(), spec.shape.clone(), Numbers::Fetched(spec.len(), *dtype)));
        let copied = self.copied.iter().map(|(name, (_, shape, numbers))| (name.clone(), shape.clone(), *numbers));
        computed.chain(copied).collect()
    }

    /// Whether this tensor of the model is written with new values.
    pub fn has(&self, name: &str) -> bool {
        self.computed.values().any(|(spec, _)| spec.name == name)
    }

    /// The size of the file in bytes, without its header.
    pub fn bytes(&self) -> u64 {
        self.tensors().iter().map(|(_, _, numbers)| numbers.bytes()).sum()
    }

    /// Writes the file. `values` returns the new values of a tensor; they must be finite in its dtype.
    ///
    /// # Errors
    /// The errors of the disk and of `values`.
    pub fn stage(
        &self,
        staging: &mut StagedFolder<'_>,
        file: &str,
        values: &dyn Fn(&TensorSpec, Dtype) -> Result<Vec<f32>>,
    ) -> Result<()> {
        let failed: RefCell<Option<Error>> = RefCell::new(None);
        let write = |name: &str, numbers: Numbers<'_>, writer: &mut dyn io::Write| {
            if let Some((spec, dtype)) = self.computed.get(name) {
                let values = values(spec, *dtype).map_err(|error| {
                    let message = error.to_string();
                    failed.replace(Some(error));
                    io::Error::other(message)
                })?;
                return write_floats(writer, &values, *dtype);
            }
            let (stored, ..) = self.copied.get(name).ok_or(io::ErrorKind::NotFound)?;
            self.from.write(stored, numbers, writer)
        };
        let tensors = self.tensors();
        let done = staging.write(file, |writer| write_numbers_by(writer, &tensors, &write, &[("format", "pt")]));
        match failed.take() {
            Some(error) => Err(error),
            None => done,
        }
    }
}
