//! Matrix products by cublasLt.
use super::library::{Code, CublasLt, Handle, cublas_lt};
use super::memory::Memory;
use super::stream::Stream;
use std::collections::HashMap;
use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use tunesmith_base::error::{Error, Result};

/// Bytes of scratch that a product may use.
pub const WORKSPACE: usize = 32 << 20;

/// The number type of activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Number {
    /// float32.
    F32,
    /// bfloat16.
    Bf16,
    /// float16.
    F16,
}

impl Number {
    /// Its `cudaDataType_t`.
    const fn code(self) -> c_int {
        match self {
            Self::F32 => 0,
            Self::F16 => 2,
            Self::Bf16 => 14,
        }
    }

    /// The type's name in kernels.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Bytes of one number.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// The number type of an operand of a matrix product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OperandType {
    /// One of the types of activations.
    Number(Number),
    /// FP8 with four bits of exponent. Only for A and B of a product whose A is transposed and B is not; addresses and
    /// strides are multiples of 16. From compute capability 8.9 on.
    E4m3,
}

impl From<Number> for OperandType {
    fn from(number: Number) -> Self {
        Self::Number(number)
    }
}

impl OperandType {
    /// `cudaDataType_t`.
    const fn code(self) -> c_int {
        match self {
            Self::Number(number) => number.code(),
            Self::E4m3 => 28,
        }
    }

    /// Bytes of one.
    const fn bytes(self) -> u64 {
        match self {
            Self::Number(number) => number.bytes(),
            Self::E4m3 => 1,
        }
    }
}

/// A column-major matrix in a GPU's memory.
#[derive(Debug, Clone, Copy)]
pub struct Operand {
    /// The address of its first number in the GPU's memory.
    pub address: u64,
    /// The type of its numbers.
    pub number: OperandType,
    /// Numbers from one column to the next, as it is stored.
    pub leading: u64,
    /// Whether it is multiplied transposed; only for A and B.
    pub transposed: bool,
    /// Numbers from one matrix of a batch to the next.
    pub batch_stride: u64,
}

/// `D = alpha op(A) op(B) + beta C`: op(A) is `[m, k]`, op(B) `[k, n]`, C and D `[m, n]`, all column-major; for each of a batch.
/// Sums are in float32.
#[derive(Debug, Clone, Copy)]
pub struct Product {
    /// Rows of D.
    pub m: u64,
    /// Columns of D.
    pub n: u64,
    /// The inner dimension, which is summed over.
    pub k: u64,
    /// The factor of the product.
    pub alpha: f32,
    /// The factor of C; with 0, C is not read.
    pub beta: f32,
    /// The left operand A.
    pub a: Operand,
    /// The right operand B.
    pub b: Operand,
    /// What is added; it may be D itself.
    pub c: Operand,
    /// Where the result D is written.
    pub d: Operand,
    /// The number of products in the batch.
    pub batch: u32,
    /// Whether float32 operands may be rounded to TF32, for tensor cores.
    pub tf32: bool,
}

/// The algorithm that cublasLt chose for a shape, with space for the rest of its answer.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Heuristic {
    algorithm: [u64; 8],
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// What the choice of an algorithm depends on.
type Key = ([u64; 4], [(u64, OperandType, bool, u64); 4], [u64; 4], bool, bool);

/// cublasLt on a GPU. An algorithm is chosen once for each shape, so that equal products give equal bits.
#[derive(Debug)]
pub struct Blas {
    functions: &'static CublasLt,
    handle: Handle,
    workspace: Memory,
    chosen: Mutex<HashMap<Key, Heuristic>>,
}

// SAFETY: cublasLt's handle may be used by any thread, by several at once.
unsafe impl Send for Blas {}
// SAFETY: as above; the algorithms are behind a lock.
unsafe impl Sync for Blas {}

/// Numbers of cublasLt's attributes: `CUBLASLT_MATMUL_DESC_`, `CUBLASLT_MATRIX_LAYOUT_` and `CUBLASLT_MATMUL_PREF_`.
mod attribute {
    use std::ffi::c_int;

    pub(super) const TRANSA: c_int = 3;
    pub(super) const TRANSB: c_int = 4;
    pub(super) const BATCH_COUNT: c_int = 5;
    pub(super) const BATCH_OFFSET: c_int = 6;
    pub(super) const MAX_WORKSPACE: c_int = 1;
    pub(super) const MIN_ALIGNMENT: [c_int; 4] = [5, 6, 7, 8];
}

const COMPUTE_32F: c_int = 68;
const COMPUTE_32F_FAST_TF32: c_int = 77;

impl Blas {
    /// Prepares products on this stream.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Device`]: no cublasLt. [`tunesmith_base::Kind::Memory`]: no room for its scratch.
    pub fn new(stream: &Arc<Stream>) -> Result<Self> {
        let functions = cublas_lt()?;
        stream.context().bind()?;
        let mut handle: Handle = ptr::null_mut();
        // SAFETY: it writes one handle; a context is current.
        functions.check("cublasLtCreate", unsafe { (functions.create)(&raw mut handle) })?;
        Ok(Self { functions, handle, workspace: Memory::new(stream, WORKSPACE)?, chosen: Mutex::default() })
    }

    /// Enqueues a product on the stream of [`Blas::new`].
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Device`]: cublasLt has no way to compute it, or fails.
    pub fn product(&self, stream: &Stream, product: &Product) -> Result<()> {
        let Product { m, n, k, alpha, beta, a, b, c, d, batch, tf32 } = *product;
        let compute = if tf32 { COMPUTE_32F_FAST_TF32 } else { COMPUTE_32F };
        let desc = self.desc(compute)?;
        for (operand, which) in [(a, attribute::TRANSA), (b, attribute::TRANSB)] {
            desc.set(which, c_int::from(operand.transposed))?;
        }
        let sides = |operand: Operand, rows, cols| if operand.transposed { (cols, rows) } else { (rows, cols) };
        let layouts = [(a, m, k), (b, k, n), (c, m, n), (d, m, n)].map(|(operand, rows, cols)| {
            let (rows, cols) = sides(operand, rows, cols);
            let layout = self.layout(operand, rows, cols)?;
            if batch > 1 {
                layout.set(attribute::BATCH_COUNT, batch as c_int)?;
                layout.set(attribute::BATCH_OFFSET, operand.batch_stride as i64)?;
            }
            Ok(layout)
        });
        let [in_a, in_b, in_c, in_d] = layouts;
        let (in_a, in_b, in_c, in_d): (Object<'_>, _, _, _) = (in_a?, in_b?, in_c?, in_d?);
        let alignments = [a, b, c, d].map(|operand| alignment(operand, batch));
        let key = (
            [m, n, k, u64::from(batch)],
            [a, b, c, d].map(|it| (it.leading, it.number, it.transposed, it.batch_stride)),
            alignments,
            tf32,
            beta == 0.0,
        );
        let known = self.chosen.lock().unwrap_or_else(PoisonError::into_inner).get(&key).copied();
        let chosen = if let Some(chosen) = known {
            chosen
        } else {
            let chosen = self.choose(&desc, [&in_a, &in_b, &in_c, &in_d], alignments).map_err(|error| {
                error.context(format!("a product [{m}, {k}] [{k}, {n}] of {:?} and {:?}", a.number, b.number))
            })?;
            *self.chosen.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_insert(chosen)
        };
        // SAFETY: the objects are alive; the caller's operands have room for the shapes; the scratch has as many bytes as it says;
        // what cublasLt reads of the host, it reads before it returns.
        let code = unsafe {
            (self.functions.matmul)(
                self.handle,
                desc.handle,
                (&raw const alpha).cast(),
                a.address,
                in_a.handle,
                b.address,
                in_b.handle,
                (&raw const beta).cast(),
                c.address,
                in_c.handle,
                d.address,
                in_d.handle,
                chosen.algorithm.as_ptr().cast(),
                self.workspace.address(),
                self.workspace.bytes(),
                stream.handle(),
            )
        };
        self.functions.check("cublasLtMatmul", code)
    }

    fn choose(&self, desc: &Object<'_>, layouts: [&Object<'_>; 4], alignments: [u64; 4]) -> Result<Heuristic> {
        let mut handle: Handle = ptr::null_mut();
        // SAFETY: it writes one handle.
        let code = unsafe { (self.functions.create_preference)(&raw mut handle) };
        self.functions.check("cublasLtMatmulPreferenceCreate", code)?;
        let functions = self.functions;
        let preference =
            Object { handle, functions, set: functions.set_preference, destroy: functions.destroy_preference };
        preference.set(attribute::MAX_WORKSPACE, WORKSPACE)?;
        for (which, alignment) in attribute::MIN_ALIGNMENT.into_iter().zip(alignments) {
            preference.set(which, alignment as u32)?;
        }
        let mut chosen = Heuristic { algorithm: [0; 8], workspace: 0, state: 0, waves: 0.0, reserved: [0; 4] };
        let mut found = 0;
        let [a, b, c, d] = layouts.map(|layout| layout.handle);
        // SAFETY: the objects are alive; it writes up to one result and their number.
        let code = unsafe {
            (functions.heuristic)(
                self.handle,
                desc.handle,
                a,
                b,
                c,
                d,
                preference.handle,
                1,
                (&raw mut chosen).cast(),
                &raw mut found,
            )
        };
        functions.check("cublasLtMatmulAlgoGetHeuristic", code)?;
        if found == 0 {
            return Err(Error::device("cublasLt has no algorithm for it"));
        }
        functions.check("cublasLtMatmulAlgoGetHeuristic's choice", chosen.state)?;
        Ok(chosen)
    }

    fn desc(&self, compute: c_int) -> Result<Object<'_>> {
        let functions = self.functions;
        let mut handle: Handle = ptr::null_mut();
        // SAFETY: it writes one handle.
        let code = unsafe { (functions.create_desc)(&raw mut handle, compute, Number::F32.code()) };
        functions.check("cublasLtMatmulDescCreate", code)?;
        Ok(Object { handle, functions, set: functions.set_desc, destroy: functions.destroy_desc })
    }

    fn layout(&self, operand: Operand, rows: u64, cols: u64) -> Result<Object<'_>> {
        let functions = self.functions;
        let mut handle: Handle = ptr::null_mut();
        // SAFETY: it writes one handle.
        let code = unsafe {
            (functions.create_layout)(&raw mut handle, operand.number.code(), rows, cols, operand.leading as i64)
        };
        functions.check("cublasLtMatrixLayoutCreate", code)?;
        Ok(Object { handle, functions, set: functions.set_layout, destroy: functions.destroy_layout })
    }
}

/// The bytes that the columns of a matrix, and of the others of its batch, are aligned to, at most 256.
fn alignment(operand: Operand, batch: u32) -> u64 {
    let stride = if batch > 1 { operand.batch_stride } else { 0 };
    let strides = (operand.leading | stride) * operand.number.bytes();
    1 << (operand.address | strides | 256).trailing_zeros()
}

/// One of cublasLt's description objects, which is destroyed on drop.
struct Object<'a> {
    handle: Handle,
    functions: &'a CublasLt,
    set: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Code,
    destroy: unsafe extern "C" fn(Handle) -> Code,
}

impl Object<'_> {
    /// Sets an attribute whose type is `T`.
    fn set<T: Copy>(&self, which: c_int, value: T) -> Result<()> {
        // SAFETY: the object is alive; it reads as many bytes as it is told.
        let code = unsafe { (self.set)(self.handle, which, (&raw const value).cast(), size_of::<T>()) };
        self.functions.check("an attribute of cublasLt's", code)
    }
}

impl Drop for Object<'_> {
    fn drop(&mut self) {
        // SAFETY: nothing else has the handle.
        unsafe { (self.destroy)(self.handle) };
    }
}

impl CublasLt {
    fn check(&self, call: &str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: it returns a constant C string for any code.
        let text = unsafe { CStr::from_ptr((self.error_text)(code)) };
        Err(Error::device(format!("{call} failed with {}", text.to_string_lossy())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignment_is_that_of_the_worst_column_of_a_batch() {
        let of = |address, leading, batch_stride, batch| {
            alignment(Operand { address, number: Number::F32.into(), leading, transposed: false, batch_stride }, batch)
        };
        assert_eq!(of(4096, 64, 64, 2), 256);
        assert_eq!(of(4096 + 16, 64, 64, 2), 16);
        assert_eq!(of(4096, 6, 64, 2), 8);
        assert_eq!(of(4096, 64, 65, 2), 4);
        // There is no other matrix that the stride leads to.
        assert_eq!(of(4096, 64, 65, 1), 256);
    }
}
