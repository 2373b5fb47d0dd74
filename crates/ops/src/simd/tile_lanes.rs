//! The lanes of a tile of a product.
use super::Simd;

/// What a tile of a product sums in: all lanes of a panel ([`Simd`]), or the first of them.
///
/// # Safety
/// As for [`Simd`]'s methods, of the lanes that there are.
#[allow(clippy::missing_safety_doc, reason = "stated once for the trait")]
pub trait TileLanes: Copy + 'static {
    /// The lanes in registers.
    type Sum: Copy;
    /// Rows of the largest tile.
    const TILE_ROWS: usize;
    /// Panels of the largest tile.
    const TILE_PANELS: usize;
    /// All lanes `value`.
    unsafe fn broadcast(value: f32) -> Self::Sum;
    /// Reads the lanes of a panel's vector.
    unsafe fn read(from: *const f32) -> Self::Sum;
    /// Writes a panel's vector of 16 floats, zero where there are no lanes.
    unsafe fn write(to: *mut f32, value: Self::Sum);
    /// `a * b + c`, rounded once.
    unsafe fn add_product(a: Self::Sum, b: Self::Sum, c: Self::Sum) -> Self::Sum;
}

impl<S: Simd> TileLanes for S {
    type Sum = S::V;
    const TILE_ROWS: usize = S::ROWS;
    const TILE_PANELS: usize = S::PANELS;
    #[inline(always)]
    unsafe fn broadcast(value: f32) -> S::V {
        // SAFETY: as the caller says.
        unsafe { S::splat(value) }
    }
    #[inline(always)]
    unsafe fn read(from: *const f32) -> S::V {
        // SAFETY: as the caller says.
        unsafe { S::load(from) }
    }
    #[inline(always)]
    unsafe fn write(to: *mut f32, value: S::V) {
        // SAFETY: as the caller says.
        unsafe { S::store(to, value) }
    }
    #[inline(always)]
    unsafe fn add_product(a: S::V, b: S::V, c: S::V) -> S::V {
        // SAFETY: as the caller says.
        unsafe { S::fma(a, b, c) }
    }
}
