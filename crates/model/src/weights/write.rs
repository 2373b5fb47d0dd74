//! Writes safetensors files as a stream, without a copy of the tensors in memory.
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use half::{bf16, f16};

use super::format::{CHUNK_BYTES, Dtype, TensorInfo, item_bytes};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::atomic::AtomicFile;
use tunesmith_device::{Floats, Slice};

/// The numbers of a tensor to write.
#[derive(Debug, Clone, Copy)]
pub enum Numbers<'a> {
    /// Numbers that are stored as F32.
    F32(Floats<'a>),
    /// Bytes that are stored as U8.
    U8(Slice<'a, u8>),
    /// The bits of I8 numbers.
    I8(&'a [u8]),
    /// This many floats, which the `later` function of [`write_numbers_by`] writes in this dtype when it is their turn.
    Fetched(usize, Dtype),
    /// This many numbers of any dtype, whose bytes the `later` function of [`write_numbers_by`] writes when it is their
    /// turn.
    Elsewhere(usize, &'static str),
}

impl Numbers<'_> {
    const fn len(self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::U8(values) => values.len(),
            Self::I8(values) => values.len(),
            Self::Fetched(count, _) | Self::Elsewhere(count, _) => count,
        }
    }

    /// Their size in a file, in bytes.
    pub fn bytes(self) -> u64 {
        self.dtype().1 * self.len() as u64
    }

    fn dtype(self) -> (&'static str, u64) {
        match self {
            Self::Elsewhere(_, name) => (name, item_bytes(name).unwrap_or(1)),
            Self::F32(_) | Self::Fetched(_, Dtype::F32) => ("F32", 4),
            Self::Fetched(_, Dtype::BF16) => ("BF16", 2),
            Self::Fetched(_, Dtype::F16) => ("F16", 2),
            Self::U8(_) => ("U8", 1),
            Self::I8(_) => ("I8", 1),
        }
    }
}

/// Writes a new F32 safetensors file, as [`write_safetensors_to`]; the file must not exist.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`] from the file system.
pub fn write_safetensors(
    path: &Path,
    tensors: &[(String, Vec<usize>, &[f32])],
    metadata: &[(&str, &str)],
) -> Result<()> {
    let write = || {
        if path.symlink_metadata().is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let mut staged = AtomicFile::create(path)?;
        write_safetensors_to(&mut staged, tensors, metadata)?;
        staged.commit()
    };
    write().map_err(|error| Error::io("write", path, &error))
}

/// Streams F32 tensors sorted by name, as [`write_numbers_to`].
///
/// # Errors
/// As [`write_numbers_to`].
pub fn write_safetensors_to(
    writer: &mut dyn Write,
    tensors: &[(String, Vec<usize>, &[f32])],
    metadata: &[(&str, &str)],
) -> io::Result<()> {
    let numbers: Vec<_> = tensors
        .iter()
        .map(|(name, shape, values)| (name.clone(), shape.clone(), Numbers::F32((*values).into())))
        .collect();
    write_numbers_to(writer, &numbers, metadata)
}

/// Streams tensors through a buffer of 1 MiB, in the order of the Python library: wider dtypes first, then by name.
///
/// # Errors
/// Those of the writer; `InvalidInput` where two tensors have one name or a shape does not fit its values.
pub fn write_numbers_to(
    writer: &mut dyn Write,
    tensors: &[(String, Vec<usize>, Numbers<'_>)],
    metadata: &[(&str, &str)],
) -> io::Result<()> {
    write_numbers_by(writer, tensors, &|_, _, _| Err(io::ErrorKind::NotFound.into()), metadata)
}

/// As [`write_numbers_to`]. `later` writes the numbers that are [`Numbers::Fetched`] or [`Numbers::Elsewhere`].
///
/// # Errors
/// As [`write_numbers_to`], and those of `later`; `InvalidInput` where `later` writes more or less than it should.
pub fn write_numbers_by(
    writer: &mut dyn Write,
    tensors: &[(String, Vec<usize>, Numbers<'_>)],
    later: &dyn Fn(&str, Numbers<'_>, &mut dyn Write) -> io::Result<()>,
    metadata: &[(&str, &str)],
) -> io::Result<()> {
    let mut sorted: Vec<_> = tensors.iter().collect();
    sorted.sort_by(|a, b| b.2.dtype().1.cmp(&a.2.dtype().1).then_with(|| a.0.cmp(&b.0)));
    let mut header = serde_json::Map::new();
    if !metadata.is_empty() {
        let strings: BTreeMap<_, _> = metadata.iter().copied().collect();
        header.insert("__metadata__".into(), serde_json::to_value(strings)?);
    }
    let mut at = 0;
    for (name, shape, values) in &sorted {
        let dtype = values.dtype().0;
        let end = at + values.bytes();
        let tensor = TensorInfo { dtype: dtype.into(), shape: shape.clone(), data_offsets: (at, end) };
        let twice = header.insert(name.clone(), serde_json::to_value(tensor)?).is_some();
        if twice || shape.iter().product::<usize>() != values.len() {
            let message = format!("tensor {name:?} {shape:?} of {} values, there twice: {twice}", values.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        at = end;
    }
    let mut text = serde_json::to_vec(&header)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    writer.write_all(&(text.len() as u64).to_le_bytes())?;
    writer.write_all(&text)?;
    for (name, shape, values) in sorted {
        match *values {
            Numbers::U8(bytes) => writer.write_all(&bytes.to_host())?,
            Numbers::I8(bytes) => writer.write_all(bytes)?,
            Numbers::F32(values) => write_floats(writer, &values.to_host(), Dtype::F32)?,
            Numbers::Fetched(..) | Numbers::Elsewhere(..) => {
                let mut counting = Counting { writer: &mut *writer, bytes: 0 };
                later(name, *values, &mut counting)?;
                let (found, expected) = (counting.bytes, values.dtype().1 * values.len() as u64);
                if found != expected {
                    let message = format!("tensor {name:?} {shape:?} of {found} bytes, {expected} expected");
                    return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
                }
            }
        }
    }
    writer.flush()
}

/// Counts the bytes that are written.
struct Counting<'w> {
    writer: &'w mut dyn Write,
    bytes: u64,
}

impl Write for Counting<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.writer.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

/// Writes numbers rounded to `dtype`, through a buffer of 1 MiB.
///
/// # Errors
/// Those of the writer.
pub fn write_floats(writer: &mut dyn Write, values: &[f32], dtype: Dtype) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(CHUNK_BYTES.min(4 * values.len()));
    for chunk in values.chunks(CHUNK_BYTES / 4) {
        buffer.clear();
        match dtype {
            Dtype::F32 => buffer.extend(chunk.iter().flat_map(|value| value.to_le_bytes())),
            Dtype::BF16 => buffer.extend(chunk.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes())),
            Dtype::F16 => buffer.extend(chunk.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes())),
        }
        writer.write_all(&buffer)?;
    }
    Ok(())
}
