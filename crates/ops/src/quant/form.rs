//! The layout of a quantized matrix without its numbers ([`Form`]), so that several matrices can share one buffer of
//! codes and scales.
use super::four::lookup;
use super::tiles::{Tiled, Zeros, groups_on};
use super::{Eight, Format, Four, Nested, Quantized, Scales};
use std::ops::{Deref, Range};
use std::sync::Arc;
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::{Array, Device, Element, Slice};

/// The codes or scales of a matrix: a buffer of its own, or a part of one that it shares with other matrices.
#[derive(Debug, Clone)]
pub struct Stored<T> {
    all: Numbers<T>,
    range: Range<usize>,
}

/// A buffer that matrices share, on the host or on any device.
#[derive(Debug, Clone)]
pub enum Numbers<T> {
    /// A vector in the host's memory.
    Host(Arc<Vec<T>>),
    /// An array on any device.
    Array(Arc<Array<T>>),
}

impl<T> From<&Arc<Vec<T>>> for Numbers<T> {
    fn from(numbers: &Arc<Vec<T>>) -> Self {
        Self::Host(Arc::clone(numbers))
    }
}

impl<T> From<&Arc<Array<T>>> for Numbers<T> {
    fn from(numbers: &Arc<Array<T>>) -> Self {
        Self::Array(Arc::clone(numbers))
    }
}

impl<T: Element> Numbers<T> {
    #[inline]
    fn view(&self) -> Slice<'_, T> {
        match self {
            Self::Host(numbers) => numbers.as_slice().into(),
            Self::Array(numbers) => numbers.view(),
        }
    }
}

impl<T: Element> Stored<T> {
    /// The part `range` of the buffer `all`.
    ///
    /// # Panics
    /// If the buffer has fewer numbers.
    pub fn part(all: impl Into<Numbers<T>>, range: Range<usize>) -> Self {
        let all = all.into();
        assert!(range.start <= range.end && range.end <= all.view().len(), "the part lies within the buffer");
        Self { all, range }
    }

    /// The numbers, on their device.
    #[inline]
    pub fn view(&self) -> Slice<'_, T> {
        self.all.view().slice(self.range.clone())
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// The device that the numbers are on.
    pub fn device(&self) -> Device {
        self.all.view().device()
    }

    /// The same numbers on `device`: shared if they are there already, else copied.
    pub(super) fn to(&self, device: Device) -> Self {
        if self.device() == device {
            return self.clone();
        }
        match device {
            Device::Cpu => self.view().read().into(),
            Device::Cuda(_) | Device::Meta => {
                let mut copy = Array::zeros(device, self.len());
                copy.view_mut().copy_from(self.view());
                copy.into()
            }
        }
    }

    /// These numbers followed by those of `below`.
    pub(super) fn joined(&self, below: &Self) -> Self {
        let mut all = Array::zeros(self.device(), 0);
        all.reserve(self.len() + below.len());
        all.append(self.view());
        all.append(below.view());
        all.into()
    }
}

impl<T> From<Vec<T>> for Stored<T> {
    fn from(numbers: Vec<T>) -> Self {
        Self { range: 0..numbers.len(), all: Numbers::Host(Arc::new(numbers)) }
    }
}

impl<T: Element> From<Array<T>> for Stored<T> {
    fn from(numbers: Array<T>) -> Self {
        Self { range: 0..numbers.len(), all: Numbers::Array(Arc::new(numbers)) }
    }
}

impl<T: Element> Deref for Stored<T> {
    type Target = [T];

    /// The numbers on the CPU. Panics for other devices, as [`Slice::cpu_slice`] does.
    #[inline]
    fn deref(&self) -> &[T] {
        match &self.all {
            Numbers::Host(numbers) => &numbers[self.range.clone()],
            Numbers::Array(numbers) => numbers.slice(self.range.clone()).cpu_slice(),
        }
    }
}

/// Everything about a [`Quantized`] except its codes and scales, and how many of those it has.
#[derive(Debug, Clone)]
pub struct Form {
    kind: Kind,
    /// Bytes of codes; then bytes of quantized scales, or of the tiles' zeros.
    bytes: [usize; 2],
    floats: usize,
}

#[derive(Debug, Clone)]
enum Kind {
    Four {
        format: Format,
        len: usize,
        shift: u32,
        table: [f32; 16],
        nested: Option<Outer>,
        lookup: Option<Arc<Array<f32>>>,
    },
    Eight {
        format: Format,
        width: usize,
    },
    Tiled {
        format: Format,
        width: usize,
        tile: [usize; 2],
        across: usize,
        /// The one zero point of all tiles; `None` if each tile has its own.
        zero: Option<u8>,
        groups: Option<Arc<Array<u32>>>,
    },
}

/// The constants of nested (double-quantized) scales.
#[derive(Debug, Clone)]
struct Outer {
    map: Arc<[f32; 256]>,
    block: usize,
    offset: f32,
}

impl Form {
    /// How many bytes its codes take, with quantized scales or zeros.
    pub const fn bytes(&self) -> usize {
        self.bytes[0] + self.bytes[1]
    }

    /// How many floats its scales take, or the factors of quantized scales.
    pub const fn floats(&self) -> usize {
        self.floats
    }

    /// The matrix of this form whose codes begin at `byte` of `bytes` and whose scales begin at `float` of `floats`, in
    /// the order of [`Quantized::parts`].
    ///
    /// # Panics
    /// If the buffers are too short.
    pub fn matrix(
        &self,
        bytes: impl Into<Numbers<u8>>,
        byte: usize,
        floats: impl Into<Numbers<f32>>,
        float: usize,
    ) -> Quantized {
        let bytes = bytes.into();
        let codes = Stored::part(bytes.clone(), byte..byte + self.bytes[0]);
        let scales = Stored::part(floats, float..float + self.floats);
        match &self.kind {
            Kind::Eight { format, width } => Quantized::Eight(Eight::assembled(*format, codes, scales, *width)),
            Kind::Tiled { format, width, tile, across, zero, groups } => Quantized::Tiled(Tiled {
                format: *format,
                width: *width,
                tile: *tile,
                across: *across,
                zeros: match zero {
                    Some(zero) => Zeros::All(*zero),
                    None => Zeros::Each(Stored::part(bytes, byte + self.bytes[0]..byte + self.bytes())),
                },
                groups: groups.as_ref().map(|groups| groups_on(groups, codes.device())),
                codes,
                scales,
            }),
            Kind::Four { format, len, shift, table, nested, lookup: known } => {
                let scales = match nested {
                    None => Scales::Plain(scales),
                    Some(Outer { map, block, offset }) => Scales::Nested(Nested {
                        codes: Stored::part(bytes, byte + self.bytes[0]..byte + self.bytes()),
                        map: Arc::clone(map),
                        absmax: scales,
                        block: *block,
                        offset: *offset,
                    }),
                };
                let (format, len, shift, table, device) = (*format, *len, *shift, *table, codes.device());
                let known = known.as_ref().filter(|known| known.device() == device).cloned();
                let lookup = known.or_else(|| lookup(device, &table, &scales));
                Quantized::Four(Four { format, codes, len, shift, table, scales, lookup })
            }
        }
    }
}

impl Quantized {
    /// The matrix's form: everything but its codes and scales.
    pub fn form(&self) -> Form {
        match self {
            Self::Eight(Eight { format, codes, scales, width, .. }) => {
                let kind = Kind::Eight { format: *format, width: *width };
                Form { kind, bytes: [codes.len(), 0], floats: scales.len() }
            }
            Self::Tiled(Tiled { format, codes, width, tile, across, scales, zeros, groups }) => {
                let (zero, each) = match zeros {
                    Zeros::All(zero) => (Some(*zero), 0),
                    Zeros::Each(zeros) => (None, zeros.len()),
                };
                let (format, width, tile, across, groups) = (*format, *width, *tile, *across, groups.clone());
                let kind = Kind::Tiled { format, width, tile, across, zero, groups };
                Form { kind, bytes: [codes.len(), each], floats: scales.len() }
            }
            Self::Four(Four { format, codes, len, shift, table, scales, lookup }) => {
                let (nested, bytes, floats) = match scales {
                    Scales::Plain(scales) => (None, 0, scales.len()),
                    Scales::Nested(Nested { codes, map, absmax, block, offset }) => {
                        let outer = Outer { map: Arc::clone(map), block: *block, offset: *offset };
                        (Some(outer), codes.len(), absmax.len())
                    }
                };
                let (format, len, shift, table, lookup) = (*format, *len, *shift, *table, lookup.clone());
                let kind = Kind::Four { format, len, shift, table, nested, lookup };
                Form { kind, bytes: [codes.len(), bytes], floats }
            }
        }
    }

    /// The parts of a matrix, on its device: its codes; the codes of quantized scales, or the tiles' zeros, or nothing;
    /// and the scales, or the factors of quantized scales.
    pub fn parts(&self) -> ([Slice<'_, u8>; 2], Slice<'_, f32>) {
        match self {
            Self::Eight(eight) => ([eight.codes.view(), Slice::default()], eight.scales.view()),
            Self::Tiled(tiled) => {
                let zeros = tiled.zeros.each().map_or_else(Slice::default, Stored::view);
                ([tiled.codes.view(), zeros], tiled.scales.view())
            }
            Self::Four(four) => match &four.scales {
                Scales::Plain(scales) => ([four.codes.view(), Slice::default()], scales.view()),
                Scales::Nested(nested) => ([four.codes.view(), nested.codes.view()], nested.absmax.view()),
            },
        }
    }
}
