//! The functions of a vector against the library's, and conversions against the crate that defines them.
use super::*;
use crate::testing::each_level;

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
    each_level(|level| {
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
    each_level(|level| {
        let mut values: Vec<f32> = (0..256u16).map(f32::from).collect();
        // SAFETY: 256 floats.
        unsafe { turn_lanes(values.as_mut_ptr()) };
        for (at, value) in values.into_iter().enumerate() {
            assert_eq!(value, (at % 16 * 16 + at / 16) as f32, "{level:?} {at}");
        }
    });
}

/// # Safety
/// The features of `S`; `codes` holds 256 bytes, `to` has room for 256 floats.
#[inline(always)]
unsafe fn e4m3_kernel<S: Simd>(codes: *const u8, to: *mut f32) {
    for at in (0..256).step_by(16) {
        // SAFETY: `at + 16` is at most 256.
        unsafe { S::store(to.add(at), S::load_e4m3(codes.add(at))) };
    }
}
dispatch! { fn load_e4m3 = e4m3_kernel(codes: *const u8, to: *mut f32); }

#[test]
fn each_code_of_fp8_is_its_number() {
    each_level(|level| {
        let (codes, mut got) = (std::array::from_fn::<u8, 256, _>(|code| code as u8), [0.0f32; 256]);
        // SAFETY: both have 256 places.
        unsafe { load_e4m3(codes.as_ptr(), got.as_mut_ptr()) };
        for (code, (got, value)) in got.into_iter().zip(*crate::fp8::VALUES).enumerate() {
            assert!(got.to_bits() == value.to_bits() || got.is_nan() && value.is_nan(), "{level:?} {code}: {got}");
        }
    });
}

/// # Safety
/// The features of `S`; `table` holds 16 floats, `bytes` 16 bytes, `to` has room for 32 floats.
#[inline(always)]
unsafe fn pairs_kernel<S: Simd>(table: *const f32, bytes: *const u8, to: *mut f32) {
    // SAFETY: as the caller says.
    unsafe {
        let [high, low] = S::lookup_pairs(S::load(table), bytes);
        S::store(to, high);
        S::store(to.add(16), low);
    }
}
dispatch! { fn lookup_pairs = pairs_kernel(table: *const f32, bytes: *const u8, to: *mut f32); }

/// # Safety
/// The features of `S`; `table` holds 16 floats, `words` 16 words, `to` has room for 8 times 16 floats.
#[inline(always)]
unsafe fn words_kernel<S: Simd>(table: *const f32, words: *const u32, to: *mut f32) {
    for at in 0..8 {
        // SAFETY: as the caller says.
        unsafe { S::store(to.add(16 * at), S::lookup_words(S::load(table), words, at)) };
    }
}
dispatch! { fn lookup_words = words_kernel(table: *const f32, words: *const u32, to: *mut f32); }

#[test]
fn codes_of_words_are_looked_up_one_after_the_other() {
    each_level(|level| {
        let table: [f32; 16] = std::array::from_fn(|code| code as f32 * 1.5 - 4.0);
        let words = std::array::from_fn::<u32, 16, _>(|at| (at as u32).wrapping_mul(0x9E37_79B9) ^ 0x8C00_0051);
        let mut got = [0.0f32; 128];
        // SAFETY: the arrays are as long as the kernel asks.
        unsafe { lookup_words(table.as_ptr(), words.as_ptr(), got.as_mut_ptr()) };
        for (index, got) in got.into_iter().enumerate() {
            let (at, lane) = (index / 16, index % 16);
            assert!(got == table[(words[lane] >> (4 * at) & 15) as usize], "{level:?} {at} {lane}");
        }
    });
}

#[test]
fn halves_of_bytes_are_looked_up_apart() {
    each_level(|level| {
        let table: [f32; 16] = std::array::from_fn(|code| code as f32 * 1.5 - 4.0);
        let (bytes, mut got) = (std::array::from_fn::<u8, 16, _>(|at| (at * 83 + 7) as u8), [0.0f32; 32]);
        // SAFETY: the arrays are as long as the kernel asks.
        unsafe { lookup_pairs(table.as_ptr(), bytes.as_ptr(), got.as_mut_ptr()) };
        for (at, &byte) in bytes.iter().enumerate() {
            let (high, low) = (table[usize::from(byte >> 4)], table[usize::from(byte & 15)]);
            assert!([got[at], got[16 + at]] == [high, low], "{level:?} {at}");
        }
    });
}

/// # Safety
/// The features of `S`; `wide` and `narrow` hold 16 rows of 20 numbers, `to` has room for 256 floats.
#[inline(always)]
unsafe fn eight_kernel<S: Simd>(wide: *const f32, narrow: *const u16, to: *mut f32) {
    // SAFETY: each row holds 8 numbers; 16 vectors are written.
    unsafe {
        for (at, column) in S::turn_eight(wide, 20).iter().chain(&S::turn_eight(narrow, 20)).enumerate() {
            S::store(to.add(16 * at), *column);
        }
    }
}
dispatch! { fn turn_eight = eight_kernel(wide: *const f32, narrow: *const u16, to: *mut f32); }

#[test]
fn eight_columns_of_rows_are_turned() {
    each_level(|level| {
        let wide: Vec<f32> = (0..320).map(|at| at as f32).collect();
        let narrow: Vec<u16> = wide.iter().map(|value| half::bf16::from_f32(*value).to_bits()).collect();
        let mut got = [0.0f32; 256];
        // SAFETY: there are 16 rows of 20 numbers, and room for 16 vectors.
        unsafe { turn_eight(wide.as_ptr(), narrow.as_ptr(), got.as_mut_ptr()) };
        for (at, value) in got.into_iter().enumerate() {
            let number = wide[at % 16 * 20 + at / 16 % 8];
            let expected = if at < 128 { number } else { half::bf16::from_f32(number).to_f32() };
            assert!(value == expected, "{level:?} {at}: {value}");
        }
    });
}

#[test]
fn bytes_of_rows_are_turned() {
    let rows: Vec<u8> = (0..16 * 19).map(|at| (at * 7 % 251) as u8).collect();
    let mut turned = TurnedBytes([0; 256]);
    // SAFETY: there are 16 rows of 19 bytes.
    unsafe { turn_bytes(rows.as_ptr(), 19, &mut turned) };
    for (at, byte) in turned.0.into_iter().enumerate() {
        assert_eq!(byte, rows[at % 16 * 19 + at / 16], "{at}");
    }
}
