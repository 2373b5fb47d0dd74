//! Whether the files of a token set's images are still those that were tokenized: a cached row may have another number of image tokens than
//! the file that is there now, or may have been left out for a file that was repaired since.
use super::pictures::{Pictures, Shown};

/// Collects the states of the files of the images of rows, in the order of the rows.
#[derive(Debug, Default)]
pub(super) struct FileStates {
    hasher: blake3::Hasher,
    any: bool,
}

impl FileStates {
    /// Adds the images of a row's examples.
    pub fn add(&mut self, pictures: &dyn Pictures, examples: &[Vec<Shown>]) {
        for name in examples.iter().flatten().map(Shown::name) {
            self.any = true;
            if let Some(state) = pictures.file_state(name) {
                self.hasher.update(format!("{name:?} {state}\n").as_bytes());
            }
        }
    }

    /// A hash of all states; `None` without an image. With `incomplete`, rows were left out for their images, and no later state equals this
    /// one: they are read again.
    pub fn finish(&self, incomplete: bool) -> Option<String> {
        match (incomplete, self.any) {
            (true, _) => Some("incomplete".to_owned()),
            (false, true) => Some(self.hasher.finalize().to_hex().to_string()),
            (false, false) => None,
        }
    }
}
