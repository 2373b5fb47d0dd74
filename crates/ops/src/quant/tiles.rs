//! [`Tiled`]: quantized matrices with a scale for each tile of rows and columns, as checkpoints in FP8, GPTQ, AWQ and
//! compressed-tensors have them. Codes are stored row by row.
//!
//! ```text
//! FP8            e4m3(code) * scale            tiles of 128 x 128 (DeepSeek, Qwen), of a row, or of the whole matrix
//! 4 and 8 bits   (code - zero) * scale         tiles of 1 x 128 and the like: GPTQ, AWQ, compressed-tensors
//! ```
//!
//! Tiles at the right and lower edge may be smaller. GPTQ may have sorted the columns by their activations before it
//! divided them into groups (`desc_act`). Then each column has the number of its group.
//!
//! `code - zero` is exact, so a number is rounded only once, as the product of two floats. Nothing here quantizes to
//! integers in groups; [`Tiled::coded_fp8`] quantizes to FP8.
use super::{Format, Quantized, Stored};
use crate::fp8;
use rayon::prelude::*;
use std::sync::Arc;
use tunesmith_device::{Array, Device, Element};

/// The zero points: what is subtracted from integer codes, which count from 0 to the largest code.
#[derive(Debug, Clone)]
pub enum Zeros<T> {
    /// One zero point for all codes.
    All(u8),
    /// One zero point for each tile.
    Each(T),
}

impl<T> Zeros<T> {
    pub(super) fn each(&self) -> Option<&T> {
        match self {
            Self::All(_) => None,
            Self::Each(zeros) => Some(zeros),
        }
    }
}

/// A matrix with a scale for each tile.
#[derive(Debug, Clone)]
pub struct Tiled {
    pub(super) format: Format,
    /// One code in a byte: FP8, or an integer code minus 128 as a signed number. 4-bit codes lie two in a byte, the
    /// first in the high half, and rows have an even width.
    pub(super) codes: Stored<u8>,
    pub(super) width: usize,
    /// Rows and columns of a tile, clipped to those of the matrix.
    pub(super) tile: [usize; 2],
    /// How many tiles lie side by side.
    pub(super) across: usize,
    pub(super) scales: Stored<f32>,
    pub(super) zeros: Zeros<Stored<u8>>,
    /// The tile of each column, if columns are not in the order of their tiles (`desc_act`).
    pub(super) groups: Option<Arc<Array<u32>>>,
}

/// The form of a matrix for counting memory, where numbers do not matter ([`Tiled::counted`]).
#[derive(Debug, Clone, Copy)]
pub struct TileForm {
    /// FP8, or integers of 4 or 8 bits.
    pub format: Format,
    /// Rows and columns of a tile.
    pub tile: [usize; 2],
    /// Whether each tile has a zero point of its own.
    pub zeros: bool,
    /// Whether each column has the number of its tile (`desc_act`).
    pub grouped: bool,
}

/// A matrix of integer codes in groups, from which [`Tiled::integers`] makes a [`Tiled`].
#[derive(Debug)]
pub struct Integers {
    /// 4-bit codes, two in a byte with the first in the high half; or 8-bit codes minus 128, as signed numbers.
    pub codes: Vec<u8>,
    /// Bits of a code: 4 or 8.
    pub bits: usize,
    /// Columns of the matrix: the numbers of a row.
    pub width: usize,
    /// How many numbers of a row share a scale.
    pub group: usize,
    /// A scale for each group, row by row.
    pub scales: Vec<f32>,
    /// The zero points: one for all codes, or one for each group, row by row.
    pub zeros: Zeros<Vec<u8>>,
    /// The group of each column, if the columns were sorted (`desc_act`).
    pub groups: Option<Vec<u32>>,
}

impl Tiled {
    /// A matrix in FP8 with a scale for each tile, row by row of tiles.
    ///
    /// # Errors
    /// A text: sizes that do not fit, or a code or a scale that is not a number.
    pub fn fp8(codes: Vec<u8>, width: usize, tile: [usize; 2], scales: Vec<f32>) -> Result<Self, String> {
        if codes.par_iter().any(|code| code & 0x7f == 0x7f) {
            return Err("a number that is NaN".into());
        }
        if let Some(scale) = scales.iter().find(|scale| !(**scale * fp8::LARGEST).is_finite()) {
            return Err(format!("a scale of {scale}"));
        }
        let [rows, columns] = tile.map(|size| u32::try_from(size).unwrap_or(u32::MAX));
        Self::of(Format::Fp8Tiles([rows, columns]), codes, width, tile, scales, Zeros::All(0), None)
    }

    /// A matrix of integers with a scale, and perhaps a zero point, for each group of a row.
    ///
    /// # Errors
    /// A text: sizes that do not fit, a group that does not exist, or a scale that is not a number.
    pub fn integers(parts: Integers) -> Result<Self, String> {
        let Integers { codes, bits, width, group, scales, zeros, groups } = parts;
        if let Some(scale) = scales.iter().find(|scale| !(**scale * 256.0).is_finite()) {
            return Err(format!("a scale of {scale}"));
        }
        let format = if bits == 4 { Format::Int4Groups } else { Format::Int8Groups };
        Self::of(format, codes, width, [1, group], scales, zeros, groups)
    }

    fn of(
        format: Format,
        codes: Vec<u8>,
        width: usize,
        tile: [usize; 2],
        scales: Vec<f32>,
        zeros: Zeros<Vec<u8>>,
        groups: Option<Vec<u32>>,
    ) -> Result<Self, String> {
        let numbers = codes.len() * format.per_byte();
        if width == 0 || numbers == 0 || tile.contains(&0) || !numbers.is_multiple_of(width) {
            return Err(format!("{numbers} numbers in rows of {width} and tiles of {tile:?}"));
        }
        if !width.is_multiple_of(format.per_byte()) {
            return Err(format!("rows of {width} numbers, expected an even number in 4 bits"));
        }
        let rows = numbers / width;
        let tile = [tile[0].min(rows), tile[1].min(width)];
        let across = width.div_ceil(tile[1]);
        let tiles = rows.div_ceil(tile[0]) * across;
        if scales.len() != tiles || zeros.each().is_some_and(|zeros| zeros.len() != tiles) {
            return Err(format!("{} scales, expected {tiles} for {rows} x {width} numbers", scales.len()));
        }
        if let Some(groups) = &groups {
            let fits = groups.len() == width && tile[0] == 1;
            if let Some(group) = groups.iter().find(|&&group| !fits || group as usize >= across) {
                return Err(format!("{} columns, one of group {group}, expected {width} below {across}", groups.len()));
            }
        }
        let zeros = match zeros {
            Zeros::All(zero) => Zeros::All(zero),
            Zeros::Each(zeros) => Zeros::Each(zeros.into()),
        };
        // Columns that are in the order of their groups need no group numbers.
        let sorted = |groups: &Vec<u32>| groups.iter().enumerate().all(|(at, group)| at / tile[1] == *group as usize);
        let groups = groups.filter(|groups| !sorted(groups)).map(|groups| Arc::new(Array::of(Device::Cpu, &groups)));
        Ok(Self { format, codes: codes.into(), width, tile, across, scales: scales.into(), zeros, groups })
    }

    /// A matrix of that many rows and columns on `device`, for counting memory: it takes the memory of a real one, but
    /// its numbers do not matter.
    pub fn counted(form: TileForm, [rows, width]: [usize; 2], device: Device) -> Self {
        let TileForm { format, tile, zeros, grouped } = form;
        let tile = [tile[0].clamp(1, rows.max(1)), tile[1].clamp(1, width.max(1))];
        let across = width.div_ceil(tile[1]);
        let tiles = rows.div_ceil(tile[0]) * across;
        let bytes = |count: usize| Array::<u8>::zeros(device, count).into();
        Self {
            format,
            codes: bytes((rows * width).div_ceil(format.per_byte())),
            width,
            tile,
            across,
            scales: Array::<f32>::zeros(device, tiles).into(),
            zeros: if zeros { Zeros::Each(bytes(tiles)) } else { Zeros::All(0) },
            groups: grouped.then(|| Arc::new(Array::zeros(device, width))),
        }
    }

    /// Quantizes rows of `width` numbers to FP8 with a scale for each tile. The scale is the tile's largest magnitude
    /// divided by 448, rounded by `round` to what can be stored. A number's code is the one nearest to the number
    /// divided by the scale.
    ///
    /// # Errors
    /// A text: a number that is not finite, or sizes that do not fit.
    pub fn coded_fp8(
        values: &[f32],
        width: usize,
        tile: [usize; 2],
        round: impl Fn(f32) -> f32 + Sync,
    ) -> Result<Self, String> {
        if width == 0 || values.is_empty() || !values.len().is_multiple_of(width) || tile.contains(&0) {
            return Err(format!("{} numbers in rows of {width} and tiles of {tile:?}", values.len()));
        }
        if values.par_iter().any(|value| !value.is_finite()) {
            return Err("a number that is NaN or infinite".into());
        }
        let [high, wide] = [tile[0].min(values.len() / width), tile[1].min(width)];
        let across = width.div_ceil(wide);
        let mut codes = vec![0; values.len()];
        let bands = values.par_chunks(high * width).zip(codes.par_chunks_mut(high * width));
        let scales: Vec<Vec<f32>> = bands
            .map(|(values, codes)| {
                let mut scales = vec![0.0f32; across];
                for row in values.chunks_exact(width) {
                    for (scale, part) in scales.iter_mut().zip(row.chunks(wide)) {
                        *scale = part.iter().fold(*scale, |most, value| most.max(value.abs()));
                    }
                }
                // A tile of zeros has the scale 1, as Transformers writes it.
                let scale = |most: f32| if most > 0.0 { round(most / fp8::LARGEST) } else { 1.0 };
                for most in &mut scales {
                    *most = scale(*most);
                }
                for (values, codes) in values.chunks_exact(width).zip(codes.chunks_exact_mut(width)) {
                    for (at, (value, code)) in values.iter().zip(codes).enumerate() {
                        // A scale may be too small for a float.
                        let quotient = value / scales[at / wide].max(f32::MIN_POSITIVE);
                        *code = fp8::code(quotient);
                    }
                }
                scales
            })
            .collect();
        Self::fp8(codes, width, tile, scales.concat())
    }

    /// The format of its codes: FP8, or integers of 4 or 8 bits.
    pub const fn format(&self) -> Format {
        self.format
    }

    /// The bytes of the codes, for a matrix on the CPU.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// Where the codes begin, and how many bits each has, for a matrix on the CPU.
    pub(crate) fn stored(&self) -> (*const u8, usize) {
        (self.codes.as_ptr(), 8 / self.format.per_byte())
    }

    /// The scales, row by row of tiles, for a matrix on the CPU.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    pub(super) fn len(&self) -> usize {
        self.codes.len() * self.format.per_byte()
    }

    pub(super) fn bytes(&self) -> usize {
        let groups = self.groups.as_ref().map_or(0, |groups| 4 * groups.len());
        self.codes.len() + self.zeros.each().map_or(0, Stored::len) + 4 * self.scales.len() + groups
    }

    pub(super) fn to(&self, device: Device) -> Self {
        Self {
            codes: self.codes.to(device),
            scales: self.scales.to(device),
            zeros: match &self.zeros {
                Zeros::All(zero) => Zeros::All(*zero),
                Zeros::Each(zeros) => Zeros::Each(zeros.to(device)),
            },
            groups: self.groups.as_ref().map(|groups| groups_on(groups, device)),
            ..*self
        }
    }

    /// The rows of `self` followed by those of `below`. `None` if they are quantized differently. If tiles would cross
    /// the border, each row gets its own scale.
    pub(super) fn joined(&self, below: &Self) -> Option<Self> {
        let kind = |it: &Self| std::mem::discriminant(&it.format);
        let groups = |it: &Self| it.groups.as_ref().filter(|it| !it.device().only_counts()).map(|groups| groups.read());
        let alike = kind(self) == kind(below) && self.width == below.width && self.tile[1] == below.tile[1];
        if !alike || groups(self) != groups(below) {
            return None;
        }
        let rows = self.len() / self.width;
        if self.tile != below.tile || !rows.is_multiple_of(self.tile[0]) {
            return self.by_rows()?.joined(&below.by_rows()?);
        }
        let zeros = match (&self.zeros, &below.zeros) {
            (Zeros::All(zero), Zeros::All(other)) if zero == other => Zeros::All(*zero),
            (above, below_zeros) => Zeros::Each(spread(above, self.scales.len(), self).joined(&spread(
                below_zeros,
                below.scales.len(),
                below,
            ))),
        };
        Some(Self {
            codes: self.codes.joined(&below.codes),
            scales: self.scales.joined(&below.scales),
            zeros,
            groups: self.groups.clone(),
            ..*self
        })
    }

    /// The same matrix with tiles of one row each. `None` if tiles of several rows have zero points of their own.
    fn by_rows(&self) -> Option<Self> {
        let (rows, device) = (self.len() / self.width, self.codes.device());
        if self.tile[0] == 1 {
            return Some(self.clone());
        }
        let Zeros::All(zero) = self.zeros else { return None };
        let scales = if device.only_counts() { vec![0.0; self.scales.len()] } else { self.scales.view().read() };
        let lines = (0..rows).flat_map(|row| &scales[row / self.tile[0] * self.across..][..self.across]);
        let scales: Vec<f32> = lines.copied().collect();
        let format = match self.format {
            Format::Fp8Tiles([_, columns]) => Format::Fp8Tiles([1, columns]),
            format => format,
        };
        Some(Self {
            format,
            codes: self.codes.clone(),
            tile: [1, self.tile[1]],
            scales: Array::of(device, &scales).into(),
            zeros: Zeros::All(zero),
            groups: self.groups.clone(),
            ..*self
        })
    }
}

/// The columns' group numbers on `device`: shared if they are there already.
pub(super) fn groups_on(groups: &Arc<Array<u32>>, device: Device) -> Arc<Array<u32>> {
    if groups.device() == device { Arc::clone(groups) } else { Arc::new(Array::of(device, &groups.read())) }
}

/// One zero point for each of `tiles` tiles, on the device of `of`.
fn spread(zeros: &Zeros<Stored<u8>>, tiles: usize, of: &Tiled) -> Stored<u8> {
    match zeros {
        Zeros::Each(zeros) => zeros.clone(),
        Zeros::All(zero) => same(of.codes.device(), *zero, tiles),
    }
}

fn same<T: Element>(device: Device, value: T, count: usize) -> Stored<T> {
    Array::of(device, &vec![value; count]).into()
}

impl From<Tiled> for Quantized {
    fn from(tiled: Tiled) -> Self {
        Self::Tiled(tiled)
    }
}
