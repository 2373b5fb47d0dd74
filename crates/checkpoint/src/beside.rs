//! The file of weights of an encoder that stands next to the model: what is copied from the encoder's files, and what was trained.
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;

use super::publish::StagedFolder;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::TensorSpec;
use tunesmith_model::weights::{Dtype, Numbers, Wrapping, write_floats, write_numbers_by};

/// Tensors of a file that is to be written.
#[derive(Debug)]
pub struct BesideFile {
    /// The encoder's files, from which tensors are copied.
    pub from: Wrapping,
    /// By name in the file: for copied tensors, the name in the encoder's files.
    pub copied: BTreeMap<String, (String, Vec<usize>, Numbers<'static>)>,
    /// Those whose numbers are not the files', and their dtype.
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

    /// Whether a tensor of the model is computed.
    pub fn has(&self, name: &str) -> bool {
        self.computed.values().any(|(spec, _)| spec.name == name)
    }

    /// Bytes of all tensors of the file that is written, without its header.
    pub fn bytes(&self) -> u64 {
        self.tensors().iter().map(|(_, _, numbers)| numbers.bytes()).sum()
    }

    /// Writes the file. `values` gives the numbers of computed tensors, which must be finite in the dtype.
    ///
    /// # Errors
    /// Those of the disk and of `values`.
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
