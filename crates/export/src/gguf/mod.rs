//! GGUF, the files of llama.cpp: a model with its tokenizer and chat template, an image encoder with its connector, or an adapter.
//! Format: `docs/gguf.md` of ggml; names and rules: llama.cpp's own converter.
mod check;
mod container;
mod keys;
mod layout;
mod mmproj;
mod mxfp4;
mod names;
mod rows;
mod split;
mod tensors;
mod vocabulary;

use std::cell::RefCell;
use std::io;
use std::path::Path;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};

use super::merge::{Merged, fits};
use container::{Entry, Header, Value};
use layout::{Adapted, Layout, Made};
pub use mmproj::{Mmproj, write_mmproj};
use tensors::Output;
use tunesmith_base::error::{Error, Result};
use tunesmith_checkpoint::loaded_adapter::LoadedAdapter;
use tunesmith_checkpoint::preflight;
use tunesmith_config::arch::{Arch, TensorSpec};
use tunesmith_model::weights::Dtype;
use tunesmith_ops::quant::Format;
pub use vocabulary::GgufVocabulary;

/// How the numbers of matrices are stored. Vectors and routers are always float32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufFormat {
    /// IEEE float32: 4 bytes a weight.
    F32,
    /// IEEE float16: 2 bytes a weight.
    F16,
    /// Blocks of 32 numbers: bytes with a scale.
    Q8_0,
    /// Blocks of 32 numbers: half bytes with a scale; embedding and head as [`GgufFormat::Q8_0`].
    Q4_0,
    /// Blocks of 32 numbers: half bytes with a power of two. Only for matrices that the model's own files store in MXFP4.
    Mxfp4,
}

impl GgufFormat {
    /// Parses the value of a command-line flag.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: another word.
    pub fn parse(word: &str) -> Result<Self> {
        match word.to_lowercase().as_str() {
            "f32" => Ok(Self::F32),
            "f16" => Ok(Self::F16),
            "q8_0" => Ok(Self::Q8_0),
            "q4_0" => Ok(Self::Q4_0),
            other => Err(Error::config(format!("--gguf {other}: expected f16, q8_0, q4_0 or f32"))
                .hint("llama.cpp's llama-quantize makes other types from an f16 file")),
        }
    }

    /// The format as the flag spells it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Mxfp4 => "mxfp4",
        }
    }

    const fn file_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q8_0 => 7,
            Self::Mxfp4 => 38,
        }
    }

    /// The number of a tensor type in the file (`ggml_type`).
    const fn code(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q8_0 => 8,
            Self::Mxfp4 => 39,
        }
    }

    const fn bytes(self, count: usize) -> usize {
        match self {
            Self::F32 => 4 * count,
            Self::F16 => 2 * count,
            Self::Q4_0 => count / BLOCK * 18,
            Self::Q8_0 => count / BLOCK * 34,
            Self::Mxfp4 => count / mxfp4::BLOCK * mxfp4::BYTES,
        }
    }

    /// How a tensor of this shape is stored.
    fn of(self, name: &str, shape: &[usize]) -> Self {
        let columns = shape.last().copied().unwrap_or(1);
        let vocabulary = ["token_embd.weight", "output.weight"].contains(&name);
        match self {
            _ if shape.len() < 2 || keeps_f32(name) => Self::F32,
            // Rows must consist of whole blocks.
            Self::Q8_0 | Self::Q4_0 if !columns.is_multiple_of(BLOCK) => Self::F16,
            Self::Q4_0 if vocabulary => Self::Q8_0,
            format => format,
        }
    }

    fn encode(self, values: &[f32]) -> io::Result<Vec<u8>> {
        let quantized = |dtype| {
            let data = || {
                let tensor = Tensor::from_slice(values, values.len(), &Device::Cpu)?;
                Ok::<_, candle_core::Error>(QTensor::quantize(&tensor, dtype)?.data()?.into_owned())
            };
            data().map_err(io::Error::other)
        };
        match self {
            Self::F32 => Ok(values.iter().flat_map(|value| value.to_le_bytes()).collect()),
            Self::F16 => Ok(values.iter().flat_map(|value| half::f16::from_f32(*value).to_le_bytes()).collect()),
            Self::Q4_0 => quantized(GgmlDType::Q4_0),
            Self::Q8_0 => quantized(GgmlDType::Q8_0),
            Self::Mxfp4 => mxfp4::encode(values),
        }
    }
}

/// Whether llama.cpp needs a matrix in float32: routers, and matrices that its mixers read value by value.
fn keeps_f32(name: &str) -> bool {
    ["ffn_gate_inp", "ssm_a", "ssm_d", "ssm_norm", "ssm_conv1d", "shortconv.conv", "altup_", "_exps.bias"]
        .iter()
        .any(|part| name.contains(part))
}

/// Values in a quantization block.
const BLOCK: usize = 32;

/// Writes a model with its tokenizer to one file, and returns its size in bytes.
///
/// # Errors
/// [`tunesmith_base::Kind::Model`]: llama.cpp cannot run it as it is; [`tunesmith_base::Kind::Io`]: the disk.
pub fn write_model(
    path: &Path,
    merged: &Merged,
    vocabulary: &GgufVocabulary,
    name: &str,
    format: GgufFormat,
) -> Result<u64> {
    let layout = Layout::of(&merged.arch)?;
    let mut header = Header::new(layout.name());
    header.put("general.type", Value::text("model"));
    header.put("general.name", Value::text(name));
    header.put("general.file_type", Value::U32(format.file_type()));
    header.put("general.quantization_version", Value::U32(2));
    layout.describe(&merged.arch, &mut header);
    vocabulary.describe(&merged.arch, &mut header)?;
    let mut sources = Vec::new();
    for (name, shape, values) in layout.computed(&merged.arch) {
        header.tensors.push(Entry { name, format: GgufFormat::F32, shape });
        sources.push(Source::Ready(values));
    }
    for Made { name, shape, parts } in layout.tensors(&merged.arch)? {
        let kept = format != GgufFormat::F32 && parts.iter().all(|(spec, _)| is_mxfp4(merged, spec));
        let format = if kept { GgufFormat::Mxfp4 } else { format.of(&name, &shape) };
        header.tensors.push(Entry { name, format, shape });
        sources.push(Source::Merged(parts));
    }
    write(path, &header, &|index| sources[index].values(merged))
}

/// Whether a matrix can stay in MXFP4: the base's files store it so, and no adapter changes it.
fn is_mxfp4(merged: &Merged, spec: &TensorSpec) -> bool {
    merged.weights.format_of(&spec.name) == Some(Format::Mxfp4)
        && !merged.changes(&spec.name)
        && spec.shape.last().is_some_and(|width| width.is_multiple_of(mxfp4::BLOCK))
}

/// Where a tensor's values come from.
enum Source {
    Ready(Vec<f32>),
    /// From tensors of the model, one after the other.
    Merged(Vec<(TensorSpec, Output)>),
}

impl Source {
    fn values(&self, merged: &Merged) -> Result<Vec<f32>> {
        match self {
            Self::Ready(values) => Ok(values.clone()),
            Self::Merged(parts) => {
                let mut all = Vec::new();
                for (spec, output) in parts {
                    all.extend(output.values(spec, merged.values(spec)?));
                }
                Ok(all)
            }
        }
    }
}

/// Writes a LoRA adapter to one file, and returns its size in bytes.
///
/// # Errors
/// [`tunesmith_base::Kind::Checkpoint`]: it is more than A and B; [`tunesmith_base::Kind::Io`]: the disk.
pub fn write_adapter(path: &Path, arch: &Arch, adapter: &LoadedAdapter, format: GgufFormat) -> Result<u64> {
    if let Some(what) = adapter.beyond_matrices() {
        return Err(Error::checkpoint(format!(
            "{}: has {what}, which a GGUF adapter cannot hold",
            adapter.dir.display()
        ))
        .hint("export the merged model: leave --adapter-only out"));
    }
    let format = if format == GgufFormat::F32 { GgufFormat::F32 } else { GgufFormat::F16 };
    let layout = Layout::of(arch)?;
    let alpha = adapter.config.tuning.lora.lora_alpha as f32;
    let mut header = Header::new(layout.name());
    header.put("general.type", Value::text("adapter"));
    header.put("general.file_type", Value::U32(format.file_type()));
    header.put("adapter.type", Value::text("lora"));
    header.put("adapter.lora.alpha", Value::F32(alpha));
    let mut sources = Vec::new();
    for placement in &adapter.placements {
        let weight = placement.weight(arch);
        let named = placement.tensors();
        let [a, b] = ["lora_A", "lora_B"].map(|side| named.iter().find(|(name, _)| name.contains(side)));
        let (Some((a, [_, inputs])), Some((b, [outputs, _]))) =
            (a.map(|(name, shape)| (name, shape.as_slice())), b.map(|(name, shape)| (name, shape.as_slice())))
        else {
            continue;
        };
        let spec = TensorSpec::new(&weight, &[*outputs, *inputs]);
        let values = |name: &String| adapter.tensors.get(name).map(|(_, values)| values.as_slice()).unwrap_or_default();
        // llama.cpp scales by alpha / rank. This factor makes up for adapters with another scale (rsLoRA, alpha patterns).
        let factor = placement.adapter.rank().map_or(1.0, |rank| rank.scale * rank.r as f32 / alpha);
        for mut adapted in layout.adapted(arch, &spec, values(a), values(b))? {
            if (factor - 1.0).abs() > 1e-6 {
                adapted.b.iter_mut().for_each(|value| *value *= factor);
            }
            let Adapted { name, rank, a, b } = adapted;
            for (side, shape, values) in
                [("lora_a", vec![rank, a.len() / rank], a), ("lora_b", vec![b.len() / rank, rank], b)]
            {
                header.tensors.push(Entry { name: format!("{name}.{side}"), format, shape });
                sources.push(values);
            }
        }
    }
    write(path, &header, &|index| Ok(sources[index].clone()))
}

fn write(path: &Path, header: &Header, values: &dyn Fn(usize) -> Result<Vec<f32>>) -> Result<u64> {
    preflight(path, header.bytes(), 2)?;
    let failed = RefCell::new(None);
    let encode = |index: usize| {
        let entry: &Entry = &header.tensors[index];
        let dtype = if entry.format == GgufFormat::F16 { Dtype::F16 } else { Dtype::F32 };
        let values = values(index).and_then(|values| fits(&entry.name, values, dtype)).map_err(|error| {
            let message = error.to_string();
            failed.replace(Some(error));
            io::Error::other(message)
        })?;
        entry.format.encode(&values)
    };
    let written = container::write(path, header, &encode).map_err(|error| Error::io("write", path, &error));
    match failed.take() {
        Some(error) => Err(error),
        None => written,
    }
}
