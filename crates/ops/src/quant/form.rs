//! A quantized matrix apart from its numbers, so that they can lie in a buffer which several matrices share.
use super::{Eight, Format, Four, Nested, Quantized, Scales};
use std::ops::{Deref, Range};
use std::sync::Arc;
use tunesmith_device::{Array, Device, Element, Slice};

/// Numbers of a matrix: its own, or a part of a buffer that it shares with others. On the CPU they are a slice.
#[derive(Debug, Clone)]
pub struct Stored<T: Element> {
    all: All<T>,
    range: Range<usize>,
}

#[derive(Debug, Clone)]
enum All<T: Element> {
    Host(Arc<Vec<T>>),
    Gpu(Arc<Array<T>>),
}

impl<T: Element> Stored<T> {
    /// The numbers `range` of `all`.
    ///
    /// # Panics
    /// If there are not as many.
    pub fn part(all: &Arc<Vec<T>>, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= all.len(), "the part lies within the buffer");
        Self { all: All::Host(Arc::clone(all)), range }
    }

    /// The numbers, wherever they are.
    pub(super) fn numbers(&self) -> Slice<'_, T> {
        match &self.all {
            All::Host(all) => Slice::from(&all[self.range.clone()]),
            All::Gpu(all) => all.slice(self.range.clone()),
        }
    }

    /// A copy on that device; on the CPU what is there is shared.
    pub(super) fn to(&self, device: Device) -> Self {
        match (device, &self.all) {
            (Device::Cpu | Device::Meta, All::Host(_)) => self.clone(),
            (Device::Cpu | Device::Meta, All::Gpu(_)) => self.numbers().read().into(),
            (Device::Cuda(_), _) => {
                let mut copy = Array::zeros(device, self.range.len());
                copy.view_mut().copy_from(self.numbers());
                Self { range: 0..copy.len(), all: All::Gpu(Arc::new(copy)) }
            }
        }
    }

    /// How many numbers there are.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }
}

impl<T: Element> From<Vec<T>> for Stored<T> {
    fn from(numbers: Vec<T>) -> Self {
        Self { range: 0..numbers.len(), all: All::Host(Arc::new(numbers)) }
    }
}

impl<T: Element> Deref for Stored<T> {
    type Target = [T];

    /// # Panics
    /// If the numbers are on a GPU: what reads them as a slice runs on the CPU.
    #[inline]
    fn deref(&self) -> &[T] {
        match &self.all {
            All::Host(all) => &all[self.range.clone()],
            All::Gpu(_) => panic!("numbers of the CPU"),
        }
    }
}

/// What a [`Quantized`] is beside its codes and scales, and how many of those it has.
#[derive(Debug, Clone)]
pub struct Form {
    kind: Kind,
    /// Codes of numbers, then codes of scales.
    bytes: [usize; 2],
    floats: usize,
}

#[derive(Debug, Clone)]
enum Kind {
    Four { format: Format, len: usize, shift: u32, table: [f32; 16], nested: Option<Outer> },
    Eight { width: usize },
}

/// What codes of scales mean.
#[derive(Debug, Clone)]
struct Outer {
    map: Arc<[f32; 256]>,
    block: usize,
    offset: f32,
}

impl Form {
    /// How many bytes of codes there are.
    pub const fn bytes(&self) -> usize {
        self.bytes[0] + self.bytes[1]
    }

    /// How many scales, or factors of scales.
    pub const fn floats(&self) -> usize {
        self.floats
    }

    /// The matrix whose codes begin at `byte` of `bytes` and whose scales begin at `float` of `floats`, in the order of
    /// [`Quantized::parts`].
    ///
    /// # Panics
    /// If the buffers do not reach that far.
    pub fn matrix(&self, bytes: &Arc<Vec<u8>>, byte: usize, floats: &Arc<Vec<f32>>, float: usize) -> Quantized {
        let codes = Stored::part(bytes, byte..byte + self.bytes[0]);
        let scales = Stored::part(floats, float..float + self.floats);
        match &self.kind {
            Kind::Eight { width } => Quantized::Eight(Eight { codes, scales, width: *width }),
            Kind::Four { format, len, shift, table, nested } => {
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
                Quantized::Four(Four { format: *format, codes, len: *len, shift: *shift, table: *table, scales, lookup: None })
            }
        }
    }
}

impl Quantized {
    /// The form of the matrix: everything but its codes and scales.
    pub fn form(&self) -> Form {
        let ([codes, nested], floats) = self.parts();
        let kind = match self {
            Self::Eight(eight) => Kind::Eight { width: eight.width },
            Self::Four(four) => Kind::Four {
                format: four.format,
                len: four.len,
                shift: four.shift,
                table: four.table,
                nested: match &four.scales {
                    Scales::Plain(_) => None,
                    Scales::Nested(Nested { map, block, offset, .. }) => {
                        Some(Outer { map: Arc::clone(map), block: *block, offset: *offset })
                    }
                },
            },
        };
        Form { kind, bytes: [codes.len(), nested.len()], floats: floats.len() }
    }

    /// The numbers: codes, codes of scales (none where scales are not quantized), and scales or their factors.
    pub fn parts(&self) -> ([&[u8]; 2], &[f32]) {
        match self {
            Self::Eight(eight) => ([&eight.codes, &[]], &eight.scales),
            Self::Four(four) => match &four.scales {
                Scales::Plain(scales) => ([&four.codes, &[]], scales),
                Scales::Nested(nested) => ([&four.codes, &nested.codes], &nested.absmax),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::encode;
    use crate::testing::numbers;

    #[test]
    fn a_matrix_put_together_elsewhere_is_the_same() {
        let values = numbers(1, 20 * 33);
        let four = |format, double| Quantized::Four(encode::four(&values, format, 64, double).unwrap());
        let eight = Quantized::Eight(encode::eight(&values, 33).unwrap());
        for matrix in [four(Format::Nf4, true), four(Format::Fp4, false), eight] {
            let (form, ([codes, nested], scales)) = (matrix.form(), matrix.parts());
            assert_eq!((form.bytes() + 4 * form.floats()), matrix.bytes());
            // Something else lies before and behind.
            let bytes = Arc::new([&[9; 3][..], codes, nested, &[7; 5]].concat());
            let floats = Arc::new([&[1.5f32][..], scales, &[2.5]].concat());
            let again = form.matrix(&bytes, 3, &floats, 1);
            assert_eq!(again.dequantize(), matrix.dequantize());
            assert_eq!(again.format(), matrix.format());
        }
    }
}
