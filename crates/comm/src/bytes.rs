//! The number types that ranks can exchange: their bytes, and their sums in rank order. The only `unsafe` here is to view a slice
//! of numbers as bytes.
use half::{bf16, f16};

mod sealed {
    pub trait Sealed {}
}

/// A number that ranks can exchange and sum: f32, f64, bf16, f16, i64, u64, u8.
pub trait Element: Copy + Send + Sync + PartialEq + std::fmt::Debug + sealed::Sealed + 'static {
    /// The neutral element of the sum.
    const ZERO: Self;
    /// Sums `all`, `[ranks, out.len()]`, over ranks into `out`, the first rank first.
    fn sum(out: &mut [Self], all: &[Self]);
}

macro_rules! elements {
    ($($type:ty, $zero:expr, |$sum:ident, $value:ident| $add:expr;)*) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const ZERO: Self = $zero;

            fn sum(out: &mut [Self], all: &[Self]) {
                let mut parts = all.chunks_exact(out.len().max(1));
                if let Some(first) = parts.next() {
                    out.copy_from_slice(first);
                }
                for part in parts {
                    for ($sum, &$value) in out.iter_mut().zip(part) {
                        $add;
                    }
                }
            }
        }
    )*};
}

elements! {
    f32, 0.0, |sum, value| *sum += value;
    f64, 0.0, |sum, value| *sum += value;
    i64, 0, |sum, value| *sum = sum.wrapping_add(value);
    u64, 0, |sum, value| *sum = sum.wrapping_add(value);
    u8, 0, |sum, value| *sum = sum.wrapping_add(value);
}

macro_rules! halves {
    ($($type:ty),*) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const ZERO: Self = <$type>::ZERO;

            fn sum(out: &mut [Self], all: &[Self]) {
                let length = out.len();
                for (index, out) in out.iter_mut().enumerate() {
                    let values = all[index..].iter().step_by(length);
                    *out = <$type>::from_f32(values.map(|value| value.to_f32()).fold(0.0, |sum, value| sum + value));
                }
            }
        }
    )*};
}

halves!(bf16, f16);

/// The bytes of `values`, in this machine's order.
pub fn of<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: the types of [`Element`], which is sealed, are plain numbers without padding, so that each byte is
    // initialised. A u8 needs no alignment; place, length and lifetime are those of `values`.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes of `values`, to change: every pattern of bits is a number.
pub fn of_mut<T: Element>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as in [`of`]. Whatever bytes are written make numbers, for these types have a value for every pattern of
    // bits; the borrow of `values` for writing goes over to the bytes.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_go_from_the_first_rank_to_the_last_and_halves_round_once() {
        let mut out = [0.0f32];
        f32::sum(&mut out, &[1e8, 1.0, -1e8]);
        assert_eq!(out, [0.0], "(1e8 + 1) - 1e8 in f32");
        let mut out = [bf16::ZERO];
        bf16::sum(&mut out, &[256.0, 1.0, 1.0].map(bf16::from_f32));
        assert_eq!(out[0].to_f32(), 258.0, "rounded after each addition it would be 256");
        let mut out = [0u8, 0];
        u8::sum(&mut out, &[200, 1, 100, 2]);
        assert_eq!(out, [44, 3]);
        u8::sum(&mut [], &[]);
    }

    #[test]
    fn bytes_are_those_of_the_numbers() {
        let mut values = [1.5f32, -2.0];
        assert_eq!(of(&values), [1.5f32.to_ne_bytes(), (-2.0f32).to_ne_bytes()].concat());
        of_mut(&mut values)[..4].copy_from_slice(&7.25f32.to_ne_bytes());
        assert_eq!(values, [7.25, -2.0]);
    }
}
