//! Weights on disk: safetensors files, single or sharded, read tensor by tensor into the caller's buffer and written as
//! a stream. Files are never memory-mapped, because a file that is truncated while it is mapped kills the process. No
//! size that a file claims is allocated unchecked.
mod format;
mod listed;
mod makers;
mod makers_read;
mod makers_tensor;
mod open;
mod quantized;
mod renamed;
mod rows;
mod stacked;
mod wrapping;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use format::{CHUNK_BYTES, Entry};
pub use format::{Dtype, first_non_finite};
pub use makers::MakersPart;
use quantized::QuantizedTensor;
pub use quantized::{Parts, config_json};
pub use rows::StoredRows;
pub use stacked::{StackedTensor, Stacking};
pub use wrapping::Wrapping;
pub use write::{Numbers, write_floats, write_numbers_by, write_numbers_to, write_safetensors, write_safetensors_to};

use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::Naming;
use tunesmith_device::{Device, Element, FloatsMut, SliceMut};

/// The opened safetensors files of a model or an adapter, their headers checked against the files' real sizes.
#[derive(Debug)]
pub struct WeightFiles {
    files: Vec<(PathBuf, File)>,
    entries: BTreeMap<String, Entry>,
    /// The matrices in 4 or 8 bits, by name.
    quantized: BTreeMap<String, QuantizedTensor>,
    /// Tensors as the files hold them whose parts are in `entries` under other names: stacked experts, and transposed
    /// matrices.
    stacked: BTreeMap<String, Entry>,
    /// Tensors whose numbers lie in several stretches, in order. `entries` has their shape and the first stretch.
    pieces: BTreeMap<String, Vec<Entry>>,
    /// Which stacked tensors of experts are not transposed.
    stacking: Stacking,
    /// The names of tensors that belong to quantized activations, such as their scales. Nothing reads them.
    of_activations: BTreeSet<String>,
    /// How the files name the tensors of `entries`, if not as in `entries`.
    naming: Option<Naming>,
    /// What a multimodal checkpoint holds beside its language model.
    others: Option<Arc<WeightFiles>>,
}

impl WeightFiles {
    /// Renames all tensors.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: two of them get one name.
    pub fn renamed(mut self, name: impl Fn(&str) -> String) -> Result<Self> {
        for (stored, entry) in std::mem::take(&mut self.entries) {
            let new = name(&stored);
            if self.entries.contains_key(&new) {
                return Err(self.fail(&entry, &stored, format!("is there twice: {new:?} is another name of it")));
            }
            self.entries.insert(new, entry);
        }
        Ok(self)
    }

    fn stored_name(&self, name: &str) -> String {
        self.naming.map_or_else(|| name.to_owned(), |naming| naming.stored(name))
    }

    fn empty() -> Self {
        Self {
            files: Vec::new(),
            entries: BTreeMap::new(),
            quantized: BTreeMap::new(),
            stacked: BTreeMap::new(),
            pieces: BTreeMap::new(),
            stacking: Stacking::default(),
            of_activations: BTreeSet::new(),
            naming: None,
            others: None,
        }
    }

    /// The files, in the order of their names.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|(path, _)| path.as_path())
    }

    /// The names of all stored tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// A tensor's sizes, if it is there.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        let quantized = self.quantized.get(name).map(QuantizedTensor::shape);
        quantized.or_else(|| self.entries.get(name).map(|entry| entry.shape.as_slice()))
    }

    /// Fills `out`, which is as long as the tensor, with its values widened to f32. Beyond `out`, it holds at most 1
    /// MiB, or the quantized matrix.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: no such tensor, another length or dtype, a value that is NaN or infinite, or the file has
    /// shrunk since it was opened.
    pub fn read_into(&self, name: &str, out: &mut [f32]) -> Result<()> {
        if self.quantized.contains_key(name) {
            let matrix = self.read_quantized(name)?;
            self.expect_count(name, matrix.len(), out.len())?;
            matrix.widen(0, out);
            return Ok(());
        }
        self.expect_count(name, self.readable(name)?.0.len(), out.len())?;
        self.read_part_into(name, 0, out)
    }

    /// Fills `out` with the numbers of a tensor that is not quantized from `first` on, as [`WeightFiles::read_into`].
    ///
    /// # Errors
    /// As [`WeightFiles::read_into`]; the tensor has fewer numbers.
    pub fn read_part_into(&self, name: &str, first: usize, out: &mut [f32]) -> Result<()> {
        let (entry, dtype) = self.readable(name)?;
        if let Some(pieces) = self.pieces.get(name) {
            self.expect_count(name, entry.len(), entry.len().max(first + out.len()))?;
            let mut start = 0;
            for piece in pieces {
                let (from, to) = (first.max(start), (first + out.len()).min(start + piece.len()));
                if from < to {
                    self.read_entry_into(piece, dtype, name, from - start, &mut out[from - first..to - first])?;
                }
                start += piece.len();
            }
            return Ok(());
        }
        self.read_entry_into(entry, dtype, name, first, out)
    }

    fn read_entry_into(&self, entry: &Entry, dtype: Dtype, name: &str, first: usize, out: &mut [f32]) -> Result<()> {
        let part = self.part(entry, name, first..first + out.len(), dtype.bytes())?;
        if let Some(view) = entry.view {
            self.read_view(entry, dtype, view, first, out).map_err(|error| self.unread(entry, name, &error))?;
            let mut finite = Finite::new(first);
            finite.check(out);
            return self.refuse_non_finite(entry, name, &finite);
        }
        let (mut rest, mut finite) = (out, Finite::new(first));
        self.chunks(&part, |bytes| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(bytes.len() / dtype.bytes());
            dtype.widen(bytes, now);
            finite.check(now);
            rest = later;
        })
        .map_err(|error| self.unread(entry, name, &error))?;
        self.refuse_non_finite(entry, name, &finite)
    }

    /// As [`WeightFiles::read_into`], to a buffer on any device. For a device that is not the CPU, the host holds a few
    /// MiB at a time.
    ///
    /// # Errors
    /// As [`WeightFiles::read_into`].
    pub fn read_to(&self, name: &str, out: FloatsMut<'_>) -> Result<()> {
        let device = out.device();
        if device == Device::Cpu {
            return self.read_into(name, &mut out.on_host());
        }
        if self.quantized.contains_key(name) {
            let matrix = self.read_quantized(name)?;
            self.expect_count(name, matrix.len(), out.len())?;
            matrix.to(device).widen_to(0, out);
            return Ok(());
        }
        self.expect_count(name, self.readable(name)?.0.len(), out.len())?;
        in_parts(out, |first, part| self.read_part_into(name, first, part))
    }

    /// As [`WeightFiles::read_to`], rounded to bfloat16 where the file is more precise.
    ///
    /// # Errors
    /// As [`WeightFiles::read_into`].
    pub fn read_bf16_to(&self, name: &str, out: SliceMut<'_, bf16>) -> Result<()> {
        if self.quantized.contains_key(name) {
            let matrix = self.read_quantized(name)?;
            self.expect_count(name, matrix.len(), out.len())?;
            let wide = matrix.dequantize();
            let mut narrow = vec![bf16::ZERO; wide.len()];
            narrow.convert_from_f32_slice(&wide);
            out.write(&narrow);
            return Ok(());
        }
        self.expect_count(name, self.readable(name)?.0.len(), out.len())?;
        if out.device() == Device::Cpu {
            return self.read_bf16_part_into(name, 0, &mut out.on_host());
        }
        in_parts(out, |first, part| self.read_bf16_part_into(name, first, part))
    }

    fn expect_count(&self, name: &str, found: usize, expected: usize) -> Result<()> {
        if found == expected {
            return Ok(());
        }
        match self.readable(name) {
            Ok((entry, _)) => Err(self.fail(entry, name, format!("is {:?}, expected {expected} numbers", entry.shape))),
            Err(_) => Err(Error::model(format!("tensor {name:?} has {found} numbers, expected {expected}"))),
        }
    }

    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: one of the values that were read is NaN or infinite.
    fn refuse_non_finite(&self, entry: &Entry, name: &str, finite: &Finite) -> Result<()> {
        let Some((index, value)) = finite.bad else { return Ok(()) };
        let found = format!("has a value that is NaN or infinite: {value} at index {index} of {:?}", entry.shape);
        Err(self.fail(entry, name, found).hint("the file is damaged, or its training diverged: use an earlier one"))
    }

    /// The bytes of the numbers `range` of an entry, at `bytes` bytes a number.
    fn part(&self, entry: &Entry, name: &str, range: Range<usize>, bytes: usize) -> Result<Entry> {
        if range.end > entry.len() {
            let asked = format!("is {:?}, expected at least {} numbers", entry.shape, range.end);
            return Err(self.fail(entry, name, asked));
        }
        let place = |index: usize| entry.begin + (index * bytes) as u64;
        Ok(Entry { begin: place(range.start), end: place(range.end), ..entry.clone() })
    }

    /// Fills `out`, which is as long as the tensor, with its bytes as they are stored.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: no such tensor, another length or dtype than U8, or the file has shrunk.
    pub fn read_bytes_into(&self, name: &str, out: &mut [u8]) -> Result<()> {
        match self.entries.get(name).filter(|entry| entry.len() != out.len()) {
            Some(entry) => Err(self.fail(entry, name, format!("is {:?}, expected {} bytes", entry.shape, out.len()))),
            None => self.read_part_of_bytes_into(name, 0, out),
        }
    }

    /// Fills `out` with the bytes of a tensor from `first` on, as [`WeightFiles::read_bytes_into`].
    ///
    /// # Errors
    /// As [`WeightFiles::read_bytes_into`]; the tensor has fewer bytes.
    pub fn read_part_of_bytes_into(&self, name: &str, first: usize, out: &mut [u8]) -> Result<()> {
        let Some(entry) = self.entries.get(name).filter(|entry| entry.dtype == "U8") else {
            return Err(Error::model(format!("no tensor {name:?} of bytes (U8)")));
        };
        let part = self.part(entry, name, first..first + out.len(), 1)?;
        let mut rest = out;
        self.chunks(&part, |bytes| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(bytes.len());
            now.copy_from_slice(bytes);
            rest = later;
        })
        .map_err(|error| self.unread(entry, name, &error))
    }

    /// The dtype in which a tensor is stored; `None` if it is missing or of a dtype that cannot be read.
    pub fn dtype(&self, name: &str) -> Option<Dtype> {
        self.readable(name).ok().map(|(_, dtype)| dtype)
    }

    /// Whether a tensor is stored as bfloat16.
    pub fn is_bf16(&self, name: &str) -> bool {
        self.readable(name).is_ok_and(|(_, dtype)| dtype == Dtype::BF16)
    }

    /// As [`WeightFiles::read_part_into`], rounded to bfloat16.
    fn read_bf16_part_into(&self, name: &str, first: usize, out: &mut [bf16]) -> Result<()> {
        let (entry, dtype) = self.readable(name)?;
        let part = self.part(entry, name, first..first + out.len(), dtype.bytes())?;
        if entry.view.is_some() {
            let mut wide = vec![0.0; out.len()];
            self.read_part_into(name, first, &mut wide)?;
            out.convert_from_f32_slice(&wide);
            return Ok(());
        }
        let (mut rest, mut wide, mut finite) = (out, Vec::new(), Finite::new(first));
        self.chunks(&part, |bytes| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(bytes.len() / dtype.bytes());
            wide.resize(now.len(), 0.0);
            dtype.widen(bytes, &mut wide);
            finite.check(&wide);
            now.convert_from_f32_slice(&wide);
            rest = later;
        })
        .map_err(|error| self.unread(entry, name, &error))?;
        self.refuse_non_finite(entry, name, &finite)
    }

    /// A tensor's sizes and values in a buffer of their own.
    ///
    /// # Errors
    /// As [`WeightFiles::read_into`].
    pub fn read(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>)> {
        if let Some(quantized) = self.quantized.get(name) {
            return Ok((quantized.shape().to_vec(), self.read_quantized(name)?.dequantize()));
        }
        let (entry, _) = self.readable(name)?;
        let mut values = vec![0.0; entry.len()];
        self.read_into(name, &mut values)?;
        Ok((entry.shape.clone(), values))
    }

    fn readable(&self, name: &str) -> Result<(&Entry, Dtype)> {
        let Some(entry) = self.entries.get(name) else {
            let origin = self.files.first().map_or_else(String::new, |(path, _)| format!("{}: ", path.display()));
            return Err(Error::model(format!("{origin}no tensor {name:?}")));
        };
        match Dtype::parse(&entry.dtype) {
            Some(dtype) => Ok((entry, dtype)),
            None => Err(self.fail(entry, name, format!("is {}, expected F32, BF16 or F16", entry.dtype)).hint(
                "quantized weights need a quantization_config in config.json; without one use the unquantized model",
            )),
        }
    }

    fn fail(&self, entry: &Entry, name: &str, message: impl fmt::Display) -> Error {
        let name = self.stored_name(name);
        Error::model(format!("{}: tensor {name:?} {message}", self.files[entry.file].0.display()))
    }

    /// The error for a tensor whose bytes the system cannot read.
    fn unread(&self, entry: &Entry, name: &str, error: &std::io::Error) -> Error {
        let fault = self.fail(entry, name, "cannot be read");
        fault.unless_of_machine(&self.files[entry.file].0, error)
    }

    /// A hash of all tensors' names, dtypes, shapes and bytes, whatever files they are spread over.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`] where a file cannot be read.
    pub fn fingerprint(&self) -> Result<String> {
        let parts = |name: &str, entry: &Entry| entry.view.is_some() || self.is_part(name) || self.is_of_rows(name);
        let whole = self.entries.iter().filter(|(name, entry)| !parts(name, entry));
        let all: Vec<_> = whole.chain(&self.stacked).collect();
        let hashes: Vec<_> = all.into_par_iter().map(|(name, entry)| self.hash_tensor(name, entry)).collect();
        let mut all = blake3::Hasher::new();
        for hash in hashes {
            all.update(hash?.as_bytes());
        }
        Ok(all.finalize().to_hex().to_string())
    }

    fn hash_tensor(&self, name: &str, entry: &Entry) -> Result<blake3::Hash> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(format!("{name:?} {} {:?}\n", entry.dtype, entry.shape).as_bytes());
        for entry in self.pieces.get(name).map_or(std::slice::from_ref(entry), Vec::as_slice) {
            let read = self.chunks(entry, |bytes| {
                hasher.update(bytes);
            });
            read.map_err(|error| {
                Error::io("read", &self.files[entry.file].0, &error).with_kind(tunesmith_base::Kind::Model)
            })?;
        }
        Ok(hasher.finalize())
    }

    /// Reads a tensor's bytes in chunks of at most 1 MiB that hold whole numbers, and calls `each` with every chunk.
    fn chunks(&self, entry: &Entry, mut each: impl FnMut(&[u8])) -> io::Result<()> {
        let (mut at, mut buffer) = (entry.begin, vec![0; CHUNK_BYTES.min((entry.end - entry.begin) as usize)]);
        while at < entry.end {
            let now = &mut buffer[..CHUNK_BYTES.min((entry.end - at) as usize)];
            self.files[entry.file].1.read_exact_at(now, at)?;
            each(now);
            at += now.len() as u64;
        }
        Ok(())
    }
}

/// How many numbers are read at once for a device that is not the CPU.
const PART: usize = 1 << 20;

/// Fills `out` on a device part by part. `read` fills a part on the host, given the index of its first number.
fn in_parts<T: Element>(mut out: SliceMut<'_, T>, read: impl Fn(usize, &mut [T]) -> Result<()>) -> Result<()> {
    let mut buffer = vec![T::default(); PART.min(out.len())];
    for first in (0..out.len()).step_by(PART) {
        let part = &mut buffer[..PART.min(out.len() - first)];
        read(first, part)?;
        out.reborrow().slice(first..first + part.len()).write(part);
    }
    Ok(())
}

/// Finds the first value of a tensor that is NaN or infinite while the tensor is read piece by piece.
struct Finite {
    /// The index of the next value.
    next: usize,
    bad: Option<(usize, f32)>,
}

impl Finite {
    const fn new(first: usize) -> Self {
        Self { next: first, bad: None }
    }

    fn check(&mut self, values: &[f32]) {
        if self.bad.is_none() {
            self.bad = first_non_finite(values).map(|at| (self.next + at, values[at]));
        }
        self.next += values.len();
    }
}
