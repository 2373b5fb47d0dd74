//! The functions of a vector against the library's, and conversions against the crate that defines them.
use super::*;

/// # Safety
/// The features of `S`; `x` holds 16 floats.
#[inline(always)]
unsafe fn exp_kernel<S: Simd>(x: *mut f32) {
    // SAFETY: the caller has the features, and `x` holds a vector.
    unsafe { S::store(x, S::exp(S::load(x))) }
}
dispatch! { fn exp_lanes = exp_kernel(x: *mut f32); }

/// # Safety
/// The features of `S`; `x` holds 16 floats.
#[inline(always)]
unsafe fn tanh_kernel<S: Simd>(x: *mut f32) {
    // SAFETY: the caller has the features, and `x` holds a vector.
    unsafe { S::store(x, S::tanh(S::load(x))) }
}
dispatch! { fn tanh_lanes = tanh_kernel(x: *mut f32); }

/// # Safety
/// The features of `S`; `x` and `bits` hold 16 numbers each.
#[inline(always)]
unsafe fn bf16_kernel<S: Simd>(x: *mut f32, bits: *mut u16) {
    // SAFETY: the caller has the features, and both places hold a vector.
    unsafe {
        S::store_bf16(bits, S::load(x));
        S::store(x, S::load_bf16(bits));
    }
}
dispatch! { fn bf16_lanes = bf16_kernel(x: *mut f32, bits: *mut u16); }

#[test]
fn bf16_rounds_as_the_half_crate_does() {
    crate::testing::each_level(|level| {
        let special = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE, 1e-40];
        let ties = [0x3F80_8000u32, 0x3F81_8000, 0x3F80_8001, 0x3F80_7FFF].map(f32::from_bits);
        let values = special.iter().chain(&ties).copied().chain(crate::testing::numbers(3, 500));
        let values: Vec<f32> = values.collect();
        for chunk in values.chunks_exact(16) {
            let (mut lanes, mut bits) = ([0.0f32; 16], [0u16; 16]);
            lanes.copy_from_slice(chunk);
            // SAFETY: arrays of 16 numbers.
            unsafe { bf16_lanes(lanes.as_mut_ptr(), bits.as_mut_ptr()) };
            for ((&value, &got), &back) in chunk.iter().zip(&bits).zip(&lanes) {
                let want = half::bf16::from_f32(value);
                assert!(got == want.to_bits() || (want.is_nan() && back.is_nan()), "{level:?}: {value}");
                assert!(back == want.to_f32() || back.is_nan());
            }
        }
    });
}

#[test]
fn tanh_is_accurate_and_saturates() {
    let mut worst = 0.0f64;
    for step in -30_000..30_000 {
        let x = step as f32 * 0.001;
        let mut lanes = [x; 16];
        // SAFETY: arrays of 16 numbers.
        unsafe { tanh_lanes(lanes.as_mut_ptr()) };
        let exact = f64::from(x).tanh();
        worst = worst.max((f64::from(lanes[5]) - exact).abs() / exact.abs().max(1e-30));
    }
    assert!(worst < 5e-7, "relative error {worst:e}");
    for (x, y) in [(1e30, 1.0), (-1e30, -1.0), (f32::INFINITY, 1.0), (0.0, 0.0)] {
        let mut lanes = [x; 16];
        // SAFETY: arrays of 16 numbers.
        unsafe { tanh_lanes(lanes.as_mut_ptr()) };
        assert_eq!(lanes, [y; 16], "{x}");
    }
}

#[test]
fn exp_is_accurate_and_saturates() {
    let mut worst = 0.0f64;
    for step in -8730..8800 {
        let mut lanes = [step as f32 * 0.01; 16];
        let exact = f64::from(lanes[0]).exp();
        // SAFETY: arrays of 16 numbers.
        unsafe { exp_lanes(lanes.as_mut_ptr()) };
        worst = worst.max((f64::from(lanes[3]) / exact - 1.0).abs());
    }
    assert!(worst < 3e-7, "relative error {worst:e}");
    let mut lanes = [f32::NEG_INFINITY; 16];
    // SAFETY: arrays of 16 numbers.
    unsafe { exp_lanes(lanes.as_mut_ptr()) };
    assert_eq!(lanes, [0.0; 16]);
}

/// # Safety
/// The features of `S`; `values` holds 256 floats.
#[inline(always)]
unsafe fn turn_kernel<S: Simd>(values: *mut f32) {
    // SAFETY: the caller has the features, and `values` holds 16 vectors.
    unsafe {
        let rows: [S::V; 16] = std::array::from_fn(|row| S::load(values.add(16 * row)));
        for (column, lanes) in S::turn(&rows).into_iter().enumerate() {
            S::store(values.add(16 * column), lanes);
        }
    }
}
dispatch! { fn turn_lanes = turn_kernel(values: *mut f32); }

#[test]
fn rows_become_columns() {
    crate::testing::each_level(|level| {
        let mut values: Vec<f32> = (0..256u16).map(f32::from).collect();
        // SAFETY: 256 floats.
        unsafe { turn_lanes(values.as_mut_ptr()) };
        for (at, value) in values.into_iter().enumerate() {
            assert_eq!(value, (at % 16 * 16 + at / 16) as f32, "{level:?} {at}");
        }
    });
}
