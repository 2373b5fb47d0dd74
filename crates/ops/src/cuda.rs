//! What the host side of all GPU ops shares: kernel arguments, grids, and launches on the stream of the operands' GPU.
use tunesmith_device::cuda::{Arg as Raw, Grid as RawGrid, Number, Product};
use tunesmith_device::{Array, Device, Element, Slice, SliceMut, gpu};

pub(crate) use tunesmith_device::cuda::{Header, Source};

/// Threads of a block, unless an op says otherwise.
const THREADS: u32 = 256;

/// How many blocks of how many threads run a kernel, and their shared memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    /// Blocks in x (up to 2^31 - 1), y and z (up to 65,535).
    pub(crate) blocks: [u32; 3],
    /// Threads of a block, up to 1,024.
    pub(crate) threads: u32,
    /// Bytes of a block's dynamic shared memory.
    pub(crate) shared: u32,
}

impl Grid {
    /// `count` blocks of 256 threads, for instance one for each row.
    pub(crate) fn blocks(count: usize) -> Self {
        let blocks = u32::try_from(count).expect("a grid has less than 2^32 blocks");
        Self { blocks: [blocks, 1, 1], threads: THREADS, shared: 0 }
    }

    /// One thread for each item, in blocks of 256. There may be more threads than items: the kernel checks for the end.
    pub(crate) fn items(count: usize) -> Self {
        Self::blocks(count.div_ceil(THREADS as usize))
    }

    /// One thread for each pack of numbers. A pack is as many numbers of that type as fill 16 bytes.
    pub(crate) fn packs(count: usize, number: Number) -> Self {
        Self::items(count.div_ceil(per_pack(number)))
    }

    /// As [`Grid::rows`], where each thread takes a pack.
    pub(crate) fn rows_of_packs(count: usize, width: usize, number: Number) -> Self {
        Self::rows(count, width.div_ceil(per_pack(number)))
    }

    /// One block for each of `count` rows of `width` numbers, with as many threads as a row has work for: 32 to 256.
    pub(crate) fn rows(count: usize, width: usize) -> Self {
        Self::blocks(count).threads(width.next_multiple_of(32).clamp(32, THREADS as usize) as u32)
    }

    /// One block for each 32 columns, with eight threads for each column.
    pub(crate) fn columns(count: usize) -> Self {
        Self::blocks(count.div_ceil(32))
    }

    /// The same grid with `threads` threads for each block.
    #[must_use]
    pub(crate) const fn threads(self, threads: u32) -> Self {
        Self { threads, ..self }
    }
}

/// How many numbers of this type fill 16 bytes.
const fn per_pack(number: Number) -> usize {
    16 / number.bytes() as usize
}

/// One kernel source, compiled for each number type of activations.
#[derive(Debug)]
pub(crate) struct Typed([Source; 3]);

impl Typed {
    /// `text` writes the names of its kernels as `TYPED(name)`.
    pub(crate) const fn new(name: &'static str, text: &'static str) -> Self {
        Self([
            Source::typed(name, text, Number::F32),
            Source::typed(name, text, Number::F16),
            Source::typed(name, text, Number::Bf16),
        ])
    }

    /// Adds the files that the source includes besides `dev.cuh`.
    #[must_use]
    pub(crate) const fn with_headers(self, headers: &'static [Header]) -> Self {
        let [float, f16, bf16] = self.0;
        Self([float.with_headers(headers), f16.with_headers(headers), bf16.with_headers(headers)])
    }

    /// The kernels for activations of that number type.
    pub(crate) const fn of(&'static self, number: Number) -> &'static Source {
        &self.0[match number {
            Number::F32 => 0,
            Number::F16 => 1,
            Number::Bf16 => 2,
        }]
    }
}

/// An argument of a kernel: an address or a number of exactly the parameter's type.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arg(Raw);

impl Arg {
    /// No operand: a null pointer.
    pub(crate) const NULL: Self = Self(Raw::Address(0));

    /// Where an operand begins.
    pub(crate) const fn address(address: u64) -> Self {
        Self(Raw::Address(address))
    }

    /// A count or an index: `u64`.
    pub(crate) const fn count(count: usize) -> Self {
        Self(Raw::U64(count as u64))
    }
}

impl<T: Element> From<Slice<'_, T>> for Arg {
    fn from(values: Slice<'_, T>) -> Self {
        Self(Raw::Address(values.address()))
    }
}

impl<T: Element> From<SliceMut<'_, T>> for Arg {
    fn from(values: SliceMut<'_, T>) -> Self {
        Self(Raw::Address(values.address()))
    }
}

impl<T: Element> From<&Array<T>> for Arg {
    fn from(values: &Array<T>) -> Self {
        values.view().into()
    }
}

impl<T: Element> From<&mut Array<T>> for Arg {
    fn from(values: &mut Array<T>) -> Self {
        values.view().into()
    }
}

macro_rules! numbers {
    ($($number:ty => $variant:ident),*) => {$(
        impl From<$number> for Arg {
            fn from(number: $number) -> Self {
                Self(Raw::$variant(number))
            }
        }
    )*};
}

numbers!(u32 => U32, i32 => I32, u64 => U64, f32 => F32, f64 => F64);

impl From<bool> for Arg {
    /// Kernels take a flag as an `i32`: 1 for true.
    fn from(yes: bool) -> Self {
        Self(Raw::I32(i32::from(yes)))
    }
}

/// The device number of the GPU. Panics on other devices.
fn ordinal(device: Device) -> u8 {
    match device {
        Device::Cuda(ordinal) => ordinal,
        Device::Cpu | Device::Meta => panic!("an op of a GPU has operands there"),
    }
}

/// Runs a kernel of `source` on a GPU, after all work that was requested before.
pub(crate) fn launch(device: Device, source: &'static Source, kernel: &'static str, grid: Grid, args: &[Arg]) {
    let args: Vec<Raw> = args.iter().map(|arg| arg.0).collect();
    let grid = RawGrid { blocks: grid.blocks, threads: grid.threads, shared: grid.shared };
    gpu::launch(ordinal(device), source, kernel, &grid, &args);
}

/// Runs a product of column-major matrices on a GPU, with cublasLt.
pub(crate) fn matmul(device: Device, product: &Product) {
    gpu::matmul(ordinal(device), product);
}

/// Copies numbers of the host, such as indices, to a GPU. The copy may be dropped as soon as the kernel that reads it
/// is launched.
pub(crate) fn upload<T: Element>(device: Device, values: &[T]) -> Array<T> {
    Array::of(device, values)
}
