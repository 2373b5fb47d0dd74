//! [`Four`]: matrices of 4 bits a number with a scale for each block, NF4, FP4, MXFP4 and NVFP4.
use super::{E2M1, Format, MX_BLOCK, MX_LARGEST, NV_BLOCK, Nested, Scales, Stored};
use crate::fp8;
use std::sync::Arc;
use tunesmith_device::{Array, Device};

/// A matrix of 4 bits a number: number i is `table[code i] * scale[i / block]`.
#[derive(Debug, Clone)]
pub struct Four {
    pub(super) format: Format,
    pub(super) codes: Stored<u8>,
    pub(super) len: usize,
    /// A block holds `1 << shift` numbers.
    pub(super) shift: u32,
    pub(super) table: [f32; 16],
    pub(super) scales: Scales,
    /// What [`lookup`] returned.
    pub(super) lookup: Option<Arc<Array<f32>>>,
}

/// For kernels of a GPU: the table of the codes, followed by the map of nested scales. `None` on other devices.
pub(super) fn lookup(device: Device, table: &[f32; 16], scales: &Scales) -> Option<Arc<Array<f32>>> {
    let map = match scales {
        Scales::Plain(_) => &[][..],
        Scales::Nested(nested) => &nested.map[..],
    };
    match device {
        Device::Cuda(_) => Some(Arc::new(Array::of(device, &[table, map].concat()))),
        Device::Cpu | Device::Meta => None,
    }
}

/// The block sizes that bitsandbytes has.
pub const BLOCKS: [usize; 8] = [32, 64, 128, 256, 512, 1024, 2048, 4096];

impl Four {
    /// A matrix from its parts, as a file may have them.
    ///
    /// # Errors
    /// A text that says which part does not fit the others.
    pub fn new(
        format: Format,
        codes: Vec<u8>,
        len: usize,
        block: usize,
        table: [f32; 16],
        scales: Scales,
    ) -> Result<Self, String> {
        Self::of(format, codes.into(), len, block, table, scales)
    }

    /// A matrix in MXFP4, as files store it: two codes a byte, the first in the **low** half, and for each 32 numbers a
    /// byte that is the exponent of their scale, `2^(scale - 127)`.
    ///
    /// # Errors
    /// A text: sizes that do not fit, or a scale that is not a number.
    pub fn mxfp4(mut codes: Vec<u8>, scales: Vec<u8>) -> Result<Self, String> {
        if let Some(scale) = scales.iter().find(|&&scale| scale > MX_LARGEST) {
            return Err(format!("a scale of {scale}, expected at most {MX_LARGEST}"));
        }
        for pair in &mut codes {
            *pair = pair.rotate_left(4);
        }
        let map = std::array::from_fn(|scale| 2.0f32.powi(scale.min(usize::from(MX_LARGEST)) as i32 - 127));
        let (len, block) = (2 * codes.len(), scales.len());
        // The exponents become codes of nested scales, which have a single factor of 1.
        let nested = Nested { codes: scales.into(), map: Arc::new(map), absmax: vec![1.0].into(), block, offset: 0.0 };
        Self::new(Format::Mxfp4, codes, len, MX_BLOCK, E2M1, Scales::Nested(nested))
    }

    /// A matrix in NVFP4, as files store it: two codes a byte, the first in the **low** half, and for each 16 numbers
    /// an E4M3 byte. `scale` turns the byte's value into a scale: some makers multiply it by a number of the matrix,
    /// others divide it by one.
    ///
    /// # Errors
    /// A text: sizes that do not fit, or a scale that is not a number.
    pub fn nvfp4(mut codes: Vec<u8>, scales: Vec<u8>, scale: impl Fn(f32) -> f32) -> Result<Self, String> {
        if scales.iter().any(|scale| scale & 0x7f == 0x7f) {
            return Err("a scale that is NaN".into());
        }
        for pair in &mut codes {
            *pair = pair.rotate_left(4);
        }
        let map = fp8::VALUES.map(|value| if value.is_nan() { 0.0 } else { scale(value) });
        let (len, block) = (2 * codes.len(), scales.len());
        let nested = Nested { codes: scales.into(), map: Arc::new(map), absmax: vec![1.0].into(), block, offset: 0.0 };
        Self::new(Format::Nvfp4, codes, len, NV_BLOCK, E2M1, Scales::Nested(nested))
    }

    /// A matrix of `len` numbers in MXFP4 or NVFP4 on `device`, for counting memory: it takes the memory of a real one,
    /// but its numbers do not matter.
    pub fn counted(format: Format, len: usize, device: Device) -> Self {
        let bytes = |count: usize| Array::<u8>::zeros(device, count).into();
        let block = if format == Format::Nvfp4 { NV_BLOCK } else { MX_BLOCK };
        let (scales, absmax) = (len.div_ceil(block), Array::<f32>::zeros(device, 1).into());
        let map = Arc::new([0.0; 256]);
        let scales = Scales::Nested(Nested { codes: bytes(scales), map, absmax, block: scales, offset: 0.0 });
        let lookup = lookup(device, &E2M1, &scales);
        let shift = block.trailing_zeros();
        Self { format, codes: bytes(len.div_ceil(2)), len, shift, table: E2M1, scales, lookup }
    }

    /// Every `step`-th row, from row `first` on, of a matrix on the CPU with rows of `width` numbers. `None` if rows do
    /// not consist of whole blocks.
    pub fn rows(&self, width: usize, first: usize, step: usize) -> Option<Self> {
        let block = self.block();
        if width == 0 || step == 0 || !width.is_multiple_of(block) || !self.len.is_multiple_of(width) {
            return None;
        }
        let pick = |all: &[u8], size: usize| -> Vec<u8> {
            all.chunks_exact(size).skip(first).step_by(step).flatten().copied().collect()
        };
        let codes = pick(&self.codes, width / 2);
        let scales = self.scales.all();
        let scales = scales.chunks_exact(width / block).skip(first).step_by(step).flatten().copied();
        let scales = Scales::Plain(scales.collect::<Vec<f32>>().into());
        Self::new(self.format, codes.clone(), 2 * codes.len(), block, self.table, scales).ok()
    }

    /// As [`Four::new`], for parts on any device.
    pub(super) fn of(
        format: Format,
        codes: Stored<u8>,
        len: usize,
        block: usize,
        table: [f32; 16],
        scales: Scales,
    ) -> Result<Self, String> {
        if matches!(format, Format::Int8 | Format::Fp8) {
            return Err(format!("{} is no format of 4 bits", format.name()));
        }
        if !BLOCKS.contains(&block) && (format, block) != (Format::Nvfp4, NV_BLOCK) {
            return Err(format!("blocks of {block} numbers, expected one of {BLOCKS:?}"));
        }
        let (bytes, blocks) = (len.div_ceil(2), len.div_ceil(block));
        if len == 0 || codes.len() != bytes {
            return Err(format!("{} bytes of codes for {len} numbers, expected {bytes}", codes.len()));
        }
        if scales.len() != blocks {
            return Err(format!("{} scales for {len} numbers in blocks of {block}, expected {blocks}", scales.len()));
        }
        let finite = match &scales {
            Scales::Plain(scales) => scales.view().to_host().iter().all(|scale| scale.is_finite()),
            Scales::Nested(nested) => {
                let factors = if nested.block == 0 { 0 } else { blocks.div_ceil(nested.block) };
                if factors == 0 || nested.absmax.len() != factors {
                    let (found, block) = (nested.absmax.len(), nested.block);
                    return Err(format!("{found} factors for {blocks} scales in blocks of {block}"));
                }
                let absmax = nested.absmax.view().to_host();
                nested.map.iter().chain(&*absmax).chain([&nested.offset]).all(|value| value.is_finite())
            }
        };
        if !finite || !table.iter().all(|value| value.is_finite()) {
            return Err("a scale that is NaN or infinite".into());
        }
        let lookup = lookup(codes.device(), &table, &scales);
        Ok(Self { format, codes, len, shift: block.trailing_zeros(), table, scales, lookup })
    }

    /// The format of the matrix.
    pub const fn format(&self) -> Format {
        self.format
    }

    /// The codes of a matrix on the CPU: two in a byte, the first in the high half.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// How many numbers share a scale.
    pub const fn block(&self) -> usize {
        1 << self.shift
    }

    /// The value of each code, before the scale.
    pub const fn table(&self) -> &[f32; 16] {
        &self.table
    }

    /// The scales of sixteen blocks: block `first`, and every `step`-th block after it.
    ///
    /// # Safety
    /// The matrix has these blocks.
    #[inline(always)]
    pub(crate) unsafe fn scales_of(&self, first: usize, step: usize, to: &mut [f32; 16]) {
        // SAFETY: as the caller says.
        unsafe { self.scales.look().every(first, step, to) }
    }

    /// The scale of each block.
    pub const fn scales(&self) -> &Scales {
        &self.scales
    }

    /// `self` followed by `below` as one matrix. `None` if they are quantized differently or `self` ends within a
    /// block. Quantized scales are turned into float32 if their codes mean different things, as with different offsets.
    pub(super) fn joined(&self, below: &Self) -> Option<Self> {
        let fits = self.len.is_multiple_of(self.block()) && self.shift == below.shift && self.table == below.table;
        fits.then(|| Self {
            codes: self.codes.joined(&below.codes),
            len: self.len + below.len,
            scales: match (&self.scales, &below.scales) {
                (Scales::Nested(above), Scales::Nested(under))
                    if self.format.is_makers() && self.format == below.format && above.map == under.map =>
                {
                    let (codes, block) = (above.codes.joined(&under.codes), above.block + under.block);
                    Scales::Nested(Nested { codes, block, ..above.clone() })
                }
                _ => Scales::Plain(self.scales.wide().joined(&below.scales.wide())),
            },
            lookup: self.lookup.clone(),
            ..*self
        })
    }

    pub(super) fn to(&self, device: Device) -> Self {
        let (codes, scales) = (self.codes.to(device), self.scales.to(device));
        let lookup = lookup(device, &self.table, &scales);
        Self { codes, scales, lookup, ..*self }
    }
}
