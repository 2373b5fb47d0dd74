//! Writes the container of a GGUF file: a header of keys and tensor descriptions, then the bytes of the tensors, each aligned
//! to 32 bytes. Candle's writer needs all tensors in memory; this one takes them one at a time.
use std::io::{self, Write};
use std::path::Path;

use super::GgufFormat;
use tunesmith_base::files::atomic::AtomicFile;

/// Alignment of tensors, in bytes.
const ALIGNMENT: usize = 32;

/// A value of the header.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    U32s(Vec<u32>),
    Bools(Vec<bool>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
}

impl Value {
    pub(super) fn text(text: &str) -> Self {
        Self::Text(text.to_owned())
    }

    pub(super) fn count(number: usize) -> Self {
        Self::U32(u32::try_from(number).unwrap_or(u32::MAX))
    }

    pub(super) fn counts(numbers: &[usize]) -> Self {
        Self::U32s(numbers.iter().map(|&number| u32::try_from(number).unwrap_or(u32::MAX)).collect())
    }

    const fn code(&self) -> u32 {
        match self {
            Self::U32(_) => 4,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::Text(_) => 8,
            Self::Texts(_) | Self::U32s(_) | Self::Bools(_) | Self::I32s(_) | Self::F32s(_) => 9,
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        let list = |out: &mut Vec<u8>, code: u32, length: usize| {
            out.extend(code.to_le_bytes());
            out.extend((length as u64).to_le_bytes());
        };
        match self {
            Self::U32(value) => out.extend(value.to_le_bytes()),
            Self::F32(value) => out.extend(value.to_le_bytes()),
            Self::Bool(value) => out.push(u8::from(*value)),
            Self::Text(value) => text(out, value),
            Self::Texts(values) => {
                list(out, 8, values.len());
                for value in values {
                    text(out, value);
                }
            }
            Self::U32s(values) => {
                list(out, 4, values.len());
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
            Self::Bools(values) => {
                list(out, 7, values.len());
                out.extend(values.iter().map(|&value| u8::from(value)));
            }
            Self::I32s(values) => {
                list(out, 5, values.len());
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
            Self::F32s(values) => {
                list(out, 6, values.len());
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
        }
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// The description of a tensor in the file: its name, how its numbers are stored, and its shape.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) format: GgufFormat,
    /// Row-major, the longest stride first.
    pub(super) shape: Vec<usize>,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.format.bytes(self.shape.iter().product())
    }
}

/// Everything before the tensors' bytes.
#[derive(Debug)]
pub(super) struct Header {
    architecture: &'static str,
    values: Vec<(String, Value)>,
    pub(super) tensors: Vec<Entry>,
}

impl Header {
    pub(super) fn new(architecture: &'static str) -> Self {
        let mut header = Self { architecture, values: Vec::new(), tensors: Vec::new() };
        header.put("general.architecture", Value::text(architecture));
        header
    }

    pub(super) fn put(&mut self, key: &str, value: Value) {
        self.values.push((key.to_owned(), value));
    }

    /// Adds a key of the model's architecture: `ARCHITECTURE.key`.
    pub(super) fn own(&mut self, key: &str, value: Value) {
        self.values.push((format!("{}.{key}", self.architecture), value));
    }

    /// Approximate size of the file in bytes.
    pub(super) fn bytes(&self) -> u64 {
        (self.tensors.iter().map(|tensor| tensor.bytes() + ALIGNMENT).sum::<usize>() + self.encode().len()) as u64
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(b"GGUF");
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.values.len() as u64).to_le_bytes());
        for (key, value) in &self.values {
            text(&mut out, key);
            out.extend(value.code().to_le_bytes());
            value.write(&mut out);
        }
        let mut at = 0u64;
        for tensor in &self.tensors {
            text(&mut out, &tensor.name);
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|&size| out.extend((size as u64).to_le_bytes()));
            out.extend(tensor.format.code().to_le_bytes());
            out.extend(at.to_le_bytes());
            at += tensor.bytes().next_multiple_of(ALIGNMENT) as u64;
        }
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out
    }
}

/// Writes the file under a temporary name, then renames it. `encode` writes a tensor's bytes. Returns the file's size.
pub(super) fn write(path: &Path, header: &Header, encode: &dyn Fn(usize) -> io::Result<Vec<u8>>) -> io::Result<u64> {
    let mut out = AtomicFile::create(path)?;
    let start = header.encode();
    out.write_all(&start)?;
    let mut size = start.len() as u64;
    for (index, tensor) in header.tensors.iter().enumerate() {
        let bytes = encode(index)?;
        if bytes.len() != tensor.bytes() {
            let (name, found, wanted) = (&tensor.name, bytes.len(), tensor.bytes());
            return Err(io::Error::other(format!("{name} has {found} bytes, expected {wanted}")));
        }
        let padding = bytes.len().next_multiple_of(ALIGNMENT) - bytes.len();
        out.write_all(&bytes)?;
        out.write_all(&[0; ALIGNMENT][..padding])?;
        size += (bytes.len() + padding) as u64;
    }
    out.commit()?;
    Ok(size)
}
