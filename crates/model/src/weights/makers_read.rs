//! Reads matrices in the formats of [`super::makers`], and reorders their parts: codes by rows, scales and zero points
//! by rows of tiles.
use super::WeightFiles;
use super::makers_tensor::{Kind, MakersTensor};
use rayon::prelude::*;
use tunesmith_base::error::Result;
use tunesmith_config::stored_format::{Grouped, Layout};
use tunesmith_ops::quant::tiles::{Integers, Tiled, Zeros};
use tunesmith_ops::quant::{Four, Quantized};

/// Which of its eight rows each field of an AWQ word belongs to, from the lowest bits on.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
/// Rows that are assembled together, so that one cache line serves all of them.
const ROWS: usize = 16;

impl WeightFiles {
    /// Reads a quantized matrix. The inner error says which of its parts does not fit.
    pub(super) fn read_makers(&self, name: &str, tensor: &MakersTensor) -> Result<Result<Quantized, String>> {
        let beside = |end: &str| format!("{}.{end}", tensor.module);
        let has = |end: &str| tensor.beside.contains(&end);
        match tensor.kind {
            Kind::Fp8(scales) => {
                let Layout::Fp8 { tile } = tensor.layout else { return Ok(Err("is no FP8".into())) };
                let (codes, scales) = (self.raw(name)?, self.scales_of(&beside(scales))?);
                Ok(Tiled::fp8(codes, tensor.shape[1], tile, scales).map(Quantized::Tiled))
            }
            Kind::Nvfp4(divides) => {
                let whole = self.scales_of(&beside(if divides { "weight_global_scale" } else { "weight_scale_2" }))?;
                let &[whole] = whole.as_slice() else {
                    return Ok(Err("has more than one scale of the whole matrix".into()));
                };
                if self.entry(&beside("weight_scale"))?.dtype != "F8_E4M3" {
                    return Ok(Err("has scales of groups that are not F8_E4M3".into()));
                }
                let (codes, scales) = (self.raw(name)?, self.raw(&beside("weight_scale"))?);
                let scale = |scale: f32| if divides { scale / whole } else { scale * whole };
                Ok(Four::nvfp4(codes, scales, scale).map(Quantized::Four))
            }
            Kind::Gptq(grouped) => self.read_gptq(name, tensor, grouped),
            Kind::Awq => {
                let Layout::Integers { group, zeros, .. } = tensor.layout else { return Ok(Err("is no AWQ".into())) };
                let [rows, width] = tensor.shape;
                let codes = awq_codes(&self.words(name)?, [rows, width]);
                let scales = turned(&self.scales_of(&beside("scales"))?, rows);
                let words = if has("qzeros") { self.words(&beside("qzeros"))? } else { Vec::new() };
                if !zeros && words.iter().any(|&word| word != 0x8888_8888) {
                    return Ok(Err(
                        "has zero points (qzeros) other than 8, and config.json says zero_point: false".into()
                    ));
                }
                let zeros = if zeros { Zeros::Each(turned(&awq_zeros(&words), rows)) } else { Zeros::All(8) };
                let parts = Integers { codes, bits: 4, width, group, scales, zeros, groups: None };
                Ok(Tiled::integers(parts).map(Quantized::Tiled))
            }
            Kind::Packed | Kind::Bytes => {
                let Layout::Integers { bits, group, grouped, .. } = tensor.layout else {
                    return Ok(Err("has no integers".into()));
                };
                let [rows, width] = tensor.shape;
                let mut codes = self.raw(name)?;
                if tensor.kind == Kind::Packed {
                    codes = unpadded(codes, rows, width * bits / 8);
                    // The first number is in the low half; codes of 8 bits are 128 more.
                    codes
                        .par_iter_mut()
                        .for_each(|byte| *byte = if bits == 4 { byte.rotate_left(4) } else { *byte ^ 0x80 });
                }
                let across = width.div_ceil(group);
                let mut scales = self.scales_of(&beside("weight_scale"))?;
                if scales.len() == 1 {
                    scales = vec![scales[0]; rows * across];
                }
                let zeros = match (has("weight_zero_point"), tensor.kind) {
                    (false, _) => Zeros::All(if bits == 4 { 8 } else { 128 }),
                    (true, Kind::Packed) => {
                        let words = self.words(&beside("weight_zero_point"))?;
                        Zeros::Each(down_zeros(&words, bits, rows, across))
                    }
                    (true, _) => {
                        let zeros: Vec<u8> =
                            self.raw(&beside("weight_zero_point"))?.iter().map(|zero| zero ^ 0x80).collect();
                        Zeros::Each(if zeros.len() == 1 { vec![zeros[0]; rows * across] } else { zeros })
                    }
                };
                let groups = if has("weight_g_idx") { self.groups(&beside("weight_g_idx"), grouped)? } else { None };
                let parts = Integers { codes, bits, width, group, scales, zeros, groups };
                Ok(Tiled::integers(parts).map(Quantized::Tiled))
            }
        }
    }

    fn read_gptq(&self, name: &str, tensor: &MakersTensor, grouped: Grouped) -> Result<Result<Quantized, String>> {
        let Layout::Integers { bits, group, grouped: sorted, .. } = tensor.layout else {
            return Ok(Err("is no GPTQ".into()));
        };
        let beside = |end: &str| format!("{}.{end}", tensor.module);
        let [rows, width] = tensor.shape;
        let codes = gptq_codes(&self.words(name)?, bits, [rows, width]);
        let scales = turned(&self.scales_of(&beside("scales"))?, rows);
        let words = self.words(&beside("qzeros"))?;
        let (one, middle) = if bits == 4 { (0x1111_1111u32, 0x8888_8888) } else { (0x0101_0101, 0x8080_8080) };
        // Some files claim the wrong version of GPTQ. If all zero points are in the middle, they show which version it
        // is: the first version stores them one lower.
        let all = |value: u32| words.iter().all(|&word| word == value);
        let plain = !all(middle - one) && (all(middle) || grouped.plain_zeros);
        // The ones are added to whole words, so that a zero point of 0, which has borrowed from the next field, gives
        // it back.
        let words: Vec<u32> = words.iter().map(|&word| if plain { word } else { word.wrapping_add(one) }).collect();
        let zeros = if words.iter().all(|&word| word == middle) && grouped.symmetric {
            Zeros::All(if bits == 4 { 8 } else { 128 })
        } else {
            Zeros::Each(turned(&fields(&words, bits), rows))
        };
        let groups = if tensor.beside.contains(&"g_idx") { self.groups(&beside("g_idx"), sorted)? } else { None };
        let parts = Integers { codes, bits, width, group, scales, zeros, groups };
        Ok(Tiled::integers(parts).map(Quantized::Tiled))
    }

    /// Scales in single precision: floats, or exponents of two in a byte.
    fn scales_of(&self, name: &str) -> Result<Vec<f32>> {
        let entry = self.entry(name)?;
        if matches!(entry.dtype.as_str(), "U8" | "F8_E8M0") {
            // 255 is NaN, which is refused where the scales are used.
            let exponent = |byte: &u8| if *byte == 255 { f32::NAN } else { 2f32.powi(i32::from(*byte) - 127) };
            return Ok(self.raw(name)?.iter().map(exponent).collect());
        }
        self.vector(name, entry.len())
    }

    /// A tensor of I32 as words.
    fn words(&self, name: &str) -> Result<Vec<u32>> {
        let entry = self.entry(name)?;
        if entry.dtype != "I32" {
            return Err(self.fail(entry, name, format!("is {}, expected I32", entry.dtype)));
        }
        let bytes = self.raw(name)?;
        Ok(bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect())
    }

    /// The group of each column; `None` if the file says by -1 for all columns that groups are in order. `sorted`:
    /// config.json says that they are not.
    fn groups(&self, name: &str, sorted: bool) -> Result<Option<Vec<u32>>> {
        let words = self.words(name)?;
        let unset = words.iter().filter(|&&word| word == u32::MAX).count();
        if unset > 0 && (sorted || unset < words.len()) {
            let found = format!("has no group (-1) for {unset} of {} columns", words.len());
            return Err(self.fail(self.entry(name)?, name, found).hint("the file is damaged; fetch it again"));
        }
        Ok((unset == 0 && !words.is_empty()).then_some(words))
    }
}

/// The fields of words, from the lowest bits on.
fn fields(words: &[u32], bits: usize) -> Vec<u8> {
    let mask = if bits == 4 { 15 } else { 255 };
    words.iter().flat_map(|word| (0..32 / bits).map(move |at| (word >> (at * bits)) as u8 & mask)).collect()
}

/// The transpose of a matrix of `columns` columns.
fn turned<T: Copy>(values: &[T], columns: usize) -> Vec<T> {
    (0..columns).flat_map(|column| values.iter().skip(column).step_by(columns.max(1)).copied()).collect()
}

/// The rows of `width` bytes each, without the padding that fills them up to whole words.
fn unpadded(bytes: Vec<u8>, rows: usize, width: usize) -> Vec<u8> {
    let line = bytes.len() / rows.max(1);
    if line == width {
        bytes
    } else {
        bytes.chunks_exact(line).flat_map(|row| &row[..width.min(line)]).copied().collect()
    }
}

/// Two fields of 4 bits that follow each other in a word, in one byte, the first in the high half.
const fn pair(word: u32, at: usize) -> u8 {
    ((word >> (8 * at)) as u8).rotate_left(4)
}

/// Codes by rows, from GPTQ's words `[columns * bits / 32, rows]`.
fn gptq_codes(words: &[u32], bits: usize, [rows, width]: [usize; 2]) -> Vec<u8> {
    let line = width * bits / 8;
    let mut codes = vec![0; rows * line];
    codes.par_chunks_mut(ROWS * line).enumerate().for_each(|(part, codes)| {
        for (at, words) in words.chunks_exact(rows).enumerate() {
            for (row, codes) in codes.chunks_exact_mut(line).enumerate() {
                let word = words[part * ROWS + row];
                for (byte, code) in codes[4 * at..4 * at + 4].iter_mut().enumerate() {
                    *code = if bits == 4 { pair(word, byte) } else { (word >> (8 * byte)) as u8 ^ 0x80 };
                }
            }
        }
    });
    codes
}

/// Codes by rows, from AWQ's words `[columns, rows / 8]`.
fn awq_codes(words: &[u32], [rows, width]: [usize; 2]) -> Vec<u8> {
    let (line, across) = (width / 2, rows / 8);
    let mut codes = vec![0; rows * line];
    codes.par_chunks_mut(8 * line).enumerate().for_each(|(part, codes)| {
        for (column, words) in words.chunks_exact(across).enumerate().take(2 * line) {
            for (at, row) in AWQ_ORDER.into_iter().enumerate() {
                let code = (words[part] >> (4 * at)) as u8 & 15;
                codes[row * line + column / 2] |= if column.is_multiple_of(2) { code << 4 } else { code };
            }
        }
    });
    codes
}

/// Zero points in the order of rows, from AWQ's words that hold eight rows each.
fn awq_zeros(words: &[u32]) -> Vec<u8> {
    let mut zeros = vec![0; 8 * words.len()];
    for (word, zeros) in words.iter().zip(zeros.chunks_exact_mut(8)) {
        for (at, row) in AWQ_ORDER.into_iter().enumerate() {
            zeros[row] = (word >> (4 * at)) as u8 & 15;
        }
    }
    zeros
}

/// Zero points by rows, from words `[rows * bits / 32, groups]` whose fields are rows.
fn down_zeros(words: &[u32], bits: usize, rows: usize, groups: usize) -> Vec<u8> {
    let (each, mask) = (32 / bits, if bits == 4 { 15 } else { 255 });
    let zero = |row: usize, group: usize| {
        let word = words.get(row / each * groups + group).copied().unwrap_or_default();
        (word >> (row % each * bits)) as u8 & mask
    };
    (0..rows).flat_map(|row| (0..groups).map(move |group| (row, group))).map(|(row, group)| zero(row, group)).collect()
}
