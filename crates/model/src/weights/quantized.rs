//! Matrices as bitsandbytes stores them, read and written. Beside `NAME`, which holds the codes, lie
//!
//! ```text
//! 4 bits   NAME.absmax                          a scale a block: F32, or U8 with the next two
//!          NAME.nested_absmax, .nested_quant_map  factors of the scales, and what their bytes mean
//!          NAME.quant_map                       the 16 values
//!          NAME.quant_state.bitsandbytes__nf4   JSON as bytes: quant_type, blocksize, dtype, shape, nested_*
//! 8 bits   MODULE.SCB                           the largest magnitude of each row; MODULE.weight_format: 0, by rows
//! ```
use super::WeightFiles;
use super::format::Entry;
use super::makers_tensor::MakersTensor;
use crate::quantized_form::{How, format_of};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::bitsandbytes::Bitsandbytes;
use tunesmith_ops::quant::{BLOCKS, Eight, Format, Four, Nested, Quantized, Scales};

use super::write::Numbers;

/// A limit on the size of a `quant_state`, larger than any real one.
const STATE_BYTES: u64 = 4096;

/// How a quantized matrix is stored.
#[derive(Debug, Clone)]
pub(super) enum QuantizedTensor {
    /// 4 bits of bitsandbytes, with the name of the tensor that holds the state.
    Four(State, String),
    Eight(Vec<usize>),
    Mx(MxTensor),
    Makers(MakersTensor),
    Rows(RowsTensor),
}

impl QuantizedTensor {
    pub(super) fn shape(&self) -> &[usize] {
        match self {
            Self::Four(state, _) => &state.shape,
            Self::Eight(shape) => shape,
            Self::Mx(tensor) => tensor.shape(),
            Self::Makers(tensor) => &tensor.shape,
            Self::Rows(rows) => &rows.shape,
        }
    }
}

/// The rows of one expert in a stacked MXFP4 matrix.
#[derive(Debug, Clone)]
pub(super) struct MxTensor {
    /// `[rows, columns]` of the expert's matrix.
    pub(super) shape: [usize; 2],
    /// Where its codes and its scales lie in the file.
    pub(super) codes: Entry,
    pub(super) scales: Entry,
    /// Its first row, and the step to the next.
    pub(super) first: usize,
    pub(super) step: usize,
}

impl MxTensor {
    pub(super) const fn shape(&self) -> &[usize] {
        &self.shape
    }
}

/// Some rows of a 4-bit matrix of bitsandbytes.
#[derive(Debug, Clone)]
pub(super) struct RowsTensor {
    /// The name of the whole matrix, and how it is quantized.
    pub(super) whole: String,
    pub(super) format: Format,
    /// `[rows, columns]` of these.
    pub(super) shape: [usize; 2],
    /// The first row, and the step to the next.
    pub(super) first: usize,
    pub(super) step: usize,
}

/// The `quant_state` that bitsandbytes stores as JSON beside a 4-bit matrix.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct State {
    quant_type: String,
    blocksize: usize,
    dtype: String,
    shape: Vec<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nested_blocksize: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nested_dtype: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nested_offset: Option<f64>,
}

fn state_name(name: &str, format: Format) -> String {
    format!("{name}.quant_state.bitsandbytes__{}", format.name())
}

impl WeightFiles {
    /// Opens one file that holds quantized matrices, whatever they are.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`] where the file is damaged.
    pub fn open_quantized(path: &std::path::Path) -> Result<Self> {
        let mut files = Self::open_file(path)?;
        files.find_quantized()?;
        Ok(files)
    }

    /// Finds the matrices that bitsandbytes has quantized by the tensors beside them.
    pub(super) fn find_quantized(&mut self) -> Result<()> {
        let mut found = Vec::new();
        for name in self.entries.keys() {
            if let Some((matrix, kind)) = name.split_once(".quant_state.bitsandbytes__") {
                let state = self.state(name)?;
                if state.quant_type != kind || !["nf4", "fp4"].contains(&kind) {
                    let message =
                        format!("says quant_type {:?}, expected nf4 or fp4, as in its name", state.quant_type);
                    return Err(self.misfit(name, &message));
                }
                found.push((matrix.to_owned(), QuantizedTensor::Four(state, name.clone())));
            } else if let Some(module) = name.strip_suffix(".SCB") {
                let matrix = format!("{module}.weight");
                let shape = self.entries.get(&matrix).map(|entry| entry.shape.clone());
                let Some(shape) = shape.filter(|shape| shape.len() == 2) else {
                    return Err(self.misfit(name, &format!("has no matrix {matrix:?} beside it")));
                };
                found.push((matrix, QuantizedTensor::Eight(shape)));
            }
        }
        if let Some((name, _)) = found.iter().find(|(name, _)| !self.entries.contains_key(name)) {
            return Err(Error::model(format!("the quantized matrix {name:?} has no codes")));
        }
        self.quantized = found.into_iter().collect();
        Ok(())
    }

    /// The names of all tensors that belong to quantized matrices or activations, beside the codes.
    pub(super) fn companions(&self) -> BTreeSet<String> {
        let beside = |(name, quantized): (&String, &QuantizedTensor)| -> Vec<String> {
            match quantized {
                QuantizedTensor::Mx(_) => Vec::new(),
                QuantizedTensor::Makers(tensor) => tensor.companions().collect(),
                QuantizedTensor::Rows(rows) => vec![rows.whole.clone()],
                QuantizedTensor::Four(_, state) => {
                    let parts = ["absmax", "quant_map", "nested_absmax", "nested_quant_map"];
                    let parts = parts.into_iter().map(|part| format!("{name}.{part}"));
                    parts.chain([state.clone()]).collect()
                }
                QuantizedTensor::Eight(_) => {
                    let module = name.trim_end_matches(".weight");
                    vec![format!("{module}.SCB"), format!("{module}.weight_format")]
                }
            }
        };
        self.quantized.iter().flat_map(beside).chain(self.of_activations.iter().cloned()).collect()
    }

    fn state(&self, name: &str) -> Result<State> {
        let entry = self.entry(name)?;
        if entry.dtype != "U8" || entry.end - entry.begin > STATE_BYTES {
            return Err(
                self.misfit(name, &format!("is {} {:?}, expected a few bytes of JSON", entry.dtype, entry.shape))
            );
        }
        let state: State = serde_json::from_slice(&self.raw(name)?)
            .map_err(|error| self.misfit(name, "is not valid").caused_by(error))?;
        let sizes = state.shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        if sizes.is_none_or(|sizes| sizes == 0) || !BLOCKS.contains(&state.blocksize) {
            let State { shape, blocksize, .. } = &state;
            return Err(
                self.misfit(name, &format!("says {shape:?} in blocks of {blocksize}, expected one of {BLOCKS:?}"))
            );
        }
        Ok(state)
    }

    /// The format of the quantized matrices; `None` if no matrix is quantized.
    pub fn quantization(&self) -> Option<Format> {
        self.quantized.keys().find_map(|name| self.format_of(name))
    }

    /// What bitsandbytes has quantized; `None` if nothing is quantized, or only in makers' formats.
    pub fn bitsandbytes(&self) -> Option<Bitsandbytes> {
        let format = self.quantization().filter(|format| !format.is_makers())?;
        let nested = |name: &&String| self.entries.get(*name).is_some_and(|scales| scales.dtype == "U8");
        let double = self.entries.keys().filter(|name| name.ends_with(".absmax")).any(|name| nested(&name));
        let setting = How { format, double }.setting();
        Some(Bitsandbytes::of_files(setting, double, Arc::new(self.quantized.keys().cloned().collect())))
    }

    /// How a tensor is quantized, if it is.
    pub fn format_of(&self, name: &str) -> Option<Format> {
        self.quantized.get(name).map(|quantized| match quantized {
            QuantizedTensor::Four(state, _) if state.quant_type == "fp4" => Format::Fp4,
            QuantizedTensor::Four(..) => Format::Nf4,
            QuantizedTensor::Eight(_) => Format::Int8,
            QuantizedTensor::Mx(_) => Format::Mxfp4,
            QuantizedTensor::Makers(tensor) => format_of(tensor.layout),
            QuantizedTensor::Rows(rows) => rows.format,
        })
    }

    /// A quantized matrix as it is stored.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: it is not quantized, or its parts do not fit each other.
    pub fn read_quantized(&self, name: &str) -> Result<Quantized> {
        let Some(quantized) = self.quantized.get(name) else {
            return Err(self.misfit(name, "is no quantized matrix"));
        };
        let len: usize = quantized.shape().iter().product(); // checked when the file was opened
        match quantized {
            QuantizedTensor::Four(state, _) => {
                let (codes, table) = (self.raw(name)?, self.floats::<16>(&format!("{name}.quant_map"))?);
                let scales = self.scales(name, state, len)?;
                let format = if state.quant_type == "fp4" { Format::Fp4 } else { Format::Nf4 };
                Four::new(format, codes, len, state.blocksize, table, scales).map(Quantized::Four)
            }
            QuantizedTensor::Mx(tensor) => {
                let read = self.read_mxfp4(tensor);
                read.map_err(|error| self.misfit(name, "cannot be read").caused_by(error))?
            }
            QuantizedTensor::Makers(tensor) => self.read_makers(name, tensor)?,
            QuantizedTensor::Rows(rows) => match self.read_quantized(&rows.whole)? {
                whole if rows.step == 1 => Ok(whole),
                Quantized::Four(four) => {
                    four.rows(rows.shape[1], rows.first, rows.step).map(Quantized::Four).ok_or_else(|| {
                        format!("has rows of {}, which end within a block of {}", rows.shape[1], four.block())
                    })
                }
                Quantized::Eight(_) | Quantized::Tiled(_) => Err("is no matrix of 4 bits".into()),
            },
            QuantizedTensor::Eight(shape) => {
                let module = name.trim_end_matches(".weight");
                let order = format!("{module}.weight_format");
                if self.entries.contains_key(&order) && self.raw(&order)?.iter().any(|&byte| byte != 0) {
                    let message = "says that the matrix is not stored by rows";
                    return Err(self.misfit(&order, message).hint("save it again with a recent bitsandbytes"));
                }
                if self.entry(name)?.dtype != "I8" {
                    return Err(self.misfit(name, "is no matrix of I8, though it has a scale for each row"));
                }
                let scales = self.vector(&format!("{module}.SCB"), shape[0])?;
                Eight::new(self.raw(name)?, scales, shape[1]).map(Quantized::Eight)
            }
        }
        .map_err(|error| self.misfit(name, &error))
    }

    fn scales(&self, name: &str, state: &State, len: usize) -> Result<Scales> {
        let (absmax, blocks) = (format!("{name}.absmax"), len.div_ceil(state.blocksize));
        if self.entry(&absmax)?.dtype != "U8" {
            return self.vector(&absmax, blocks).map(|scales| Scales::Plain(scales.into()));
        }
        let (Some(block), Some(offset)) = (state.nested_blocksize.filter(|&block| block > 0), state.nested_offset)
        else {
            return Err(self.misfit(&absmax, "is quantized, and its nested_blocksize and nested_offset are missing"));
        };
        Ok(Scales::Nested(Nested {
            codes: self.raw(&absmax)?.into(),
            map: Arc::new(self.floats::<256>(&format!("{name}.nested_quant_map"))?),
            absmax: self.vector(&format!("{name}.nested_absmax"), blocks.div_ceil(block))?.into(),
            block,
            offset: offset as f32,
        }))
    }

    pub(super) fn entry(&self, name: &str) -> Result<&Entry> {
        self.entries.get(name).ok_or_else(|| {
            let origin = self.files.first().map_or_else(String::new, |(path, _)| path.display().to_string());
            Error::model(format!("{origin}: no tensor {name:?}, which a quantized matrix needs"))
                .hint("the file was saved halfway or by another program; fetch it again")
        })
    }

    fn misfit(&self, name: &str, message: &str) -> Error {
        match self.entries.get(name) {
            Some(entry) => self.fail(entry, name, message),
            None => Error::model(format!("tensor {name:?} {message}")),
        }
    }

    /// A tensor's bytes as they are.
    pub(super) fn raw(&self, name: &str) -> Result<Vec<u8>> {
        let entry = self.entry(name)?;
        let mut bytes = Vec::with_capacity((entry.end - entry.begin) as usize); // held against the file's size
        self.chunks(entry, |chunk| bytes.extend_from_slice(chunk)).map_err(|error| self.unread(entry, name, &error))?;
        Ok(bytes)
    }

    pub(super) fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        let entry = self.entry(name)?;
        if entry.len() != len {
            return Err(self.fail(entry, name, format!("is {:?}, expected {len} numbers", entry.shape)));
        }
        let mut values = vec![0.0; len];
        self.read_into(name, &mut values)?;
        Ok(values)
    }

    fn floats<const LEN: usize>(&self, name: &str) -> Result<[f32; LEN]> {
        let values = self.vector(name, LEN)?;
        Ok(std::array::from_fn(|at| values[at]))
    }
}

/// The tensors of a quantized matrix, to be written ([`super::write_numbers_to`]).
#[derive(Debug)]
pub struct Parts<'a> {
    name: String,
    shape: Vec<usize>,
    matrix: &'a Quantized,
    state: Vec<u8>,
}

impl<'a> Parts<'a> {
    /// Of the matrix `name`, row-major `shape`, whose numbers were of the type `dtype` (`float32`, `bfloat16`, `float16`):
    /// bitsandbytes rounds to it when it widens them.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: `shape` is not that of the matrix.
    pub fn new(name: &str, shape: &[usize], dtype: &str, matrix: &'a Quantized) -> Result<Self> {
        let fail = |message: String| Error::model(format!("tensor {name:?}: {message}"));
        if shape.iter().product::<usize>() != matrix.len() || shape.len() != 2 {
            return Err(fail(format!("{shape:?} for a matrix of {} numbers", matrix.len())));
        }
        let state = match matrix {
            Quantized::Four(four) => {
                let nested = match four.scales() {
                    Scales::Plain(_) => None,
                    Scales::Nested(nested) => Some((nested.block, nested.offset)),
                };
                let state = State {
                    quant_type: four.format().name().into(),
                    blocksize: four.block(),
                    dtype: dtype.into(),
                    shape: shape.to_vec(),
                    nested_blocksize: nested.map(|(block, _)| block),
                    nested_dtype: nested.map(|_| "float32".into()),
                    nested_offset: nested.map(|(_, offset)| f64::from(offset)),
                };
                python_json(
                    &serde_json::to_string(&state)
                        .map_err(|error| fail("cannot be written as JSON".to_owned()).caused_by(error))?,
                )
            }
            Quantized::Eight(_) => Vec::new(),
            Quantized::Tiled(tiled) => return Err(fail(format!("bitsandbytes has no {}", tiled.format().name()))),
        };
        Ok(Self { name: name.into(), shape: shape.to_vec(), matrix, state })
    }

    /// Names, shapes and numbers, as bitsandbytes names and shapes them.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>, Numbers<'_>)> {
        let name = &self.name;
        match self.matrix {
            Quantized::Four(four) => {
                let codes = (name.clone(), vec![four.codes().len(), 1], Numbers::U8(four.codes().into()));
                let map = (format!("{name}.quant_map"), vec![16], Numbers::F32(four.table()[..].into()));
                let state = Numbers::U8((&self.state).into());
                let state = (state_name(name, four.format()), vec![self.state.len()], state);
                let mut tensors = vec![codes, map, state];
                let absmax = format!("{name}.absmax");
                match four.scales() {
                    Scales::Plain(scales) => {
                        tensors.push((absmax, vec![scales.len()], Numbers::F32(scales[..].into())));
                    }
                    Scales::Nested(nested) => tensors.extend([
                        (absmax, vec![nested.codes.len()], Numbers::U8(nested.codes[..].into())),
                        (
                            format!("{name}.nested_absmax"),
                            vec![nested.absmax.len()],
                            Numbers::F32(nested.absmax[..].into()),
                        ),
                        (format!("{name}.nested_quant_map"), vec![256], Numbers::F32(nested.map[..].into())),
                    ]),
                }
                tensors
            }
            Quantized::Eight(eight) => {
                let module = name.trim_end_matches(".weight");
                let scales = (format!("{module}.SCB"), vec![eight.scales().len()], Numbers::F32(eight.scales().into()));
                let order = (format!("{module}.weight_format"), Vec::new(), Numbers::U8([0][..].into()));
                vec![(name.clone(), self.shape.clone(), Numbers::I8(eight.codes())), scales, order]
            }
            Quantized::Tiled(_) => Vec::new(), // Parts::new has refused it
        }
    }
}

/// JSON as Python's `json.dumps` spaces it.
fn python_json(text: &str) -> Vec<u8> {
    // No string in a state holds a comma or a colon.
    text.replace(':', ": ").replace(',', ", ").into_bytes()
}

/// The `quantization_config` that `config.json` needs for such tensors. `skipped` are the modules that were left
/// unquantized, apart from the head.
pub fn config_json(format: Format, double: bool, skipped: &[String]) -> Value {
    let eight = format == Format::Int8;
    json!({
        "_load_in_4bit": !eight,
        "_load_in_8bit": eight,
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": if eight { "fp4" } else { format.name() },
        "bnb_4bit_use_double_quant": double && !eight,
        "llm_int8_enable_fp32_cpu_offload": false,
        "llm_int8_has_fp16_weight": false,
        "llm_int8_skip_modules": if skipped.is_empty() {
            Value::Null
        } else {
            // A list of one's own replaces bitsandbytes' default, the head.
            json!(skipped.iter().map(String::as_str).chain(["lm_head"]).collect::<BTreeSet<_>>())
        },
        "llm_int8_threshold": 6.0,
        "load_in_4bit": !eight,
        "load_in_8bit": eight,
        "quant_method": "bitsandbytes",
    })
}
