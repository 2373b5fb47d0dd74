//! The safetensors format: its header, checked against the file, and its dtypes.
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use half::{bf16, f16};
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use tunesmith_base::error::{Error, Result};

/// The format's own limit of a header.
const HEADER_BYTES: u64 = 100_000_000;
/// How much is read or written at once.
pub(super) const CHUNK_BYTES: usize = 1 << 20;

/// How a stored number is laid out; every one widens to f32 without loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE 754 single precision, 4 bytes.
    F32,
    /// bfloat16, 2 bytes: the upper half of an IEEE 754 single-precision number.
    BF16,
    /// IEEE 754 half precision, 2 bytes.
    F16,
}

impl Dtype {
    pub(super) fn parse(name: &str) -> Option<Self> {
        match name {
            "F32" => Some(Self::F32),
            "BF16" => Some(Self::BF16),
            "F16" => Some(Self::F16),
            _ => None,
        }
    }

    /// PyTorch's name of the dtype, as `config.json` has it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::BF16 => "bfloat16",
            Self::F16 => "float16",
        }
    }

    /// The index of the first value that is NaN or infinite once it is rounded to this dtype.
    pub fn first_overflow(self, values: &[f32]) -> Option<usize> {
        match self {
            Self::F32 => first_non_finite(values),
            Self::BF16 => values.iter().position(|&value| !bf16::from_f32(value).is_finite()),
            Self::F16 => values.iter().position(|&value| !f16::from_f32(value).is_finite()),
        }
    }

    /// The size of a number in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::BF16 | Self::F16 => 2,
        }
    }

    /// Widens stored little-endian bytes; `bytes` is as long as `out` needs.
    pub(super) fn widen(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Self::F32 => {
                for (value, bytes) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                }
            }
            Self::BF16 => {
                for (value, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *value = f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16);
                }
            }
            Self::F16 => {
                for (value, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *value = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
                }
            }
        }
    }
}

/// Which numbers of a contiguous part of a file belong to a tensor, and in which order: strides, counted in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct View {
    /// The index of the first one.
    pub(super) first: usize,
    /// The step from a row to the next.
    pub(super) row: usize,
    /// The step from a column to the next.
    pub(super) column: usize,
}

/// Where a tensor lies in its file, its dtype, and its shape.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) file: usize,
    /// As written in the header; only the three of [`Dtype`] can be read.
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    /// Bytes from the start of the file.
    pub(super) begin: u64,
    pub(super) end: u64,
    /// Which of these numbers the tensor consists of; `None` for all of them in order.
    pub(super) view: Option<View>,
}

impl Entry {
    pub(super) fn len(&self) -> usize {
        self.shape.iter().product() // checked against the file's bytes on opening
    }
}

/// A JSON object in its order, duplicate keys kept for whoever checks; `__metadata__` may hold only strings.
pub(super) struct Pairs<T>(pub(super) Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Pairs<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairsVisitor<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for PairsVisitor<T> {
            type Value = Pairs<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs<T>, A::Error> {
                let mut pairs = Vec::new();
                while let Some(key) = map.next_key::<String>()? {
                    let name = |error| A::Error::custom(format!("{key:?}: {error}"));
                    if key == "__metadata__" {
                        map.next_value::<BTreeMap<String, String>>().map_err(name)?;
                    } else {
                        let value = map.next_value().map_err(name)?;
                        pairs.push((key, value));
                    }
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(PairsVisitor(std::marker::PhantomData))
    }
}

/// One tensor of a header, its bytes counted from the header's end.
#[derive(Serialize, Deserialize)]
pub(super) struct TensorInfo {
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    pub(super) data_offsets: (u64, u64),
}

/// Reads and checks a header: tensors in the order of their bytes, which they fill without gap or overlap.
pub(super) fn read_header(path: &Path, file: &File, len: u64, number: usize) -> Result<Vec<(String, Entry)>> {
    let fail = |message: String| Error::model(format!("{}: {message}", path.display()));
    let truncated = || fail(format!("{len} bytes long, too short for a safetensors file"));
    let read = |error: io::Error| fail("the header cannot be read".to_owned()).unless_of_machine(path, &error);
    let mut prefix = [0; 8];
    if len < 8 {
        return Err(truncated());
    }
    file.read_exact_at(&mut prefix, 0).map_err(read)?;
    let header_len = u64::from_le_bytes(prefix);
    if header_len > HEADER_BYTES || header_len > len - 8 {
        let most = HEADER_BYTES.min(len - 8);
        return Err(fail(format!(
            "the header claims {header_len} bytes, expected at most {most} (the file has {len})"
        ))
        .hint("the file is truncated or no safetensors file; fetch it again"));
    }
    let mut text = vec![0; header_len as usize];
    file.read_exact_at(&mut text, 8).map_err(read)?;
    let pairs: Pairs<TensorInfo> =
        serde_json::from_slice(&text).map_err(|error| fail("the header is not valid".to_owned()).caused_by(error))?;
    let (start, data_len) = (8 + header_len, len - 8 - header_len);
    let mut entries = Vec::with_capacity(pairs.0.len());
    for (name, TensorInfo { dtype, shape, data_offsets: (begin, end) }) in pairs.0 {
        if begin > end || end > data_len {
            return Err(fail(format!(
                "tensor {name:?} claims bytes {begin}..{end}, the file holds {data_len} after its header"
            ))
            .hint("the file is truncated or damaged; fetch it again"));
        }
        let bytes = item_bytes(&dtype);
        let needs = shape.iter().try_fold(bytes.unwrap_or(1), |product, &size| product.checked_mul(size as u64));
        if needs.is_none() || (bytes.is_some() && needs != Some(end - begin)) {
            return Err(fail(format!("tensor {name:?} ({dtype} {shape:?}) claims {} bytes", end - begin)));
        }
        entries.push((name, Entry { file: number, dtype, shape, begin: start + begin, end: start + end, view: None }));
    }
    entries.sort_by_key(|(_, entry)| (entry.begin, entry.end));
    let mut at = start;
    for (name, entry) in &entries {
        if entry.begin != at {
            let what = if entry.begin < at { "overlaps the tensor before it" } else { "leaves a gap before it" };
            return Err(fail(format!("tensor {name:?} at byte {} {what}, which ends at {at}", entry.begin)));
        }
        at = entry.end;
    }
    if at != len {
        return Err(fail(format!("{} bytes belong to no tensor", len - at)));
    }
    Ok(entries)
}

/// The dtypes of the format whose numbers have a size of whole bytes, and that size.
const DTYPES: [(&str, u64); 17] = [
    ("F64", 8),
    ("I64", 8),
    ("U64", 8),
    ("C64", 8),
    ("F32", 4),
    ("I32", 4),
    ("U32", 4),
    ("F16", 2),
    ("BF16", 2),
    ("I16", 2),
    ("U16", 2),
    ("BOOL", 1),
    ("U8", 1),
    ("I8", 1),
    ("F8_E4M3", 1),
    ("F8_E5M2", 1),
    ("F8_E8M0", 1),
];

/// Bytes of one number; none for a dtype whose size is not known here (such a tensor is never read).
pub(super) fn item_bytes(dtype: &str) -> Option<u64> {
    DTYPES.iter().find(|(name, _)| *name == dtype).map(|(_, bytes)| *bytes)
}

/// The name of a dtype as a static string, if it is in [`DTYPES`].
pub(super) fn known_dtype(dtype: &str) -> Option<&'static str> {
    DTYPES.iter().find(|(name, _)| *name == dtype).map(|(name, _)| *name)
}

/// The index of the first value that is NaN or infinite.
pub fn first_non_finite(values: &[f32]) -> Option<usize> {
    const INFINITY: u32 = f32::INFINITY.to_bits();
    // Finds the largest magnitude first: this loop has no branch and runs at the speed of memory.
    let largest = values.iter().fold(0, |largest, value| largest.max(value.to_bits() & !(1 << 31)));
    if largest < INFINITY { None } else { values.iter().position(|value| !value.is_finite()) }
}
