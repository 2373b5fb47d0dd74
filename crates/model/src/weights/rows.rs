//! An embedding table that stays in the model's file: a pass reads only the rows that it looks up.
use super::WeightFiles;
use crate::stack::round_to_bf16;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use tunesmith_base::error::{Error, Result};
use tunesmith_ops::activation::{Activation, Pool};
use tunesmith_ops::embedding;
use tunesmith_ops::gemm::Store;

/// A table `[rows, width]` in a file that stays open.
#[derive(Debug)]
pub struct StoredRows {
    files: WeightFiles,
    name: String,
    width: usize,
    /// Whether the numbers are rounded to bfloat16.
    rounds: bool,
}

impl StoredRows {
    /// The table `name` of `files`, with rows of `width` numbers. `None` if the files do not hold it row by row,
    /// because it is quantized or lies in pieces.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: the file cannot be opened a second time.
    pub fn of(files: &WeightFiles, name: &str, width: usize, rounds: bool) -> Result<Option<Self>> {
        let apart = files.quantized.contains_key(name) || files.pieces.contains_key(name);
        let Some(entry) = files.entries.get(name).filter(|_| !apart) else { return Ok(None) };
        let open = |(path, file): &(PathBuf, File)| {
            let file = file.try_clone().map_err(|error| Error::io("open", path, &error))?;
            Ok((path.clone(), file))
        };
        let own = files.files.iter().map(open).collect::<Result<_>>()?;
        let entries = [(name.to_owned(), entry.clone())].into();
        let files = WeightFiles { files: own, entries, ..WeightFiles::empty() };
        Ok(Some(Self { files, name: name.to_owned(), width, rounds }))
    }

    /// `scale` times the row of each token, `[tokens, width]`, the same to the bit as [`embedding::forward`]. Each row
    /// is read once.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the file has shrunk, or a number is not finite.
    pub fn look_up(&self, pool: &Arc<Pool>, tokens: &[u32], scale: f32) -> Result<Activation> {
        let mut ids = tokens.to_vec();
        ids.sort_unstable();
        ids.dedup();
        let mut rows = vec![0.0; ids.len() * self.width];
        for (row, &id) in rows.chunks_exact_mut(self.width).zip(&ids) {
            self.files.read_part_into(&self.name, id as usize * self.width, row)?;
        }
        if self.rounds {
            round_to_bf16(&mut rows);
        }
        let places: Vec<u32> = tokens.iter().map(|id| ids.partition_point(|other| other < id) as u32).collect();
        Ok(embedding::forward(pool, Store::F32((&rows).into()), self.width, &places, scale))
    }
}
