//! The values of the 4-bit formats of bitsandbytes, and how a number gets its code.
use super::Format;

/// How many numbers share a scale, unless a file says otherwise.
pub const BLOCK: usize = 64;
/// How many scales share a factor with double quantization.
pub const NESTED_BLOCK: usize = 256;

/// The value of each NF4 code (Dettmers et al., 2023, appendix E).
#[allow(clippy::excessive_precision, reason = "as published")]
pub const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_800_998_687_7,
    -0.525_073_051_452_636_7,
    -0.394_917_488_098_144_53,
    -0.284_441_381_692_886_35,
    -0.184_773_430_228_233_34,
    -0.091_050_036_251_544_95,
    0.0,
    0.079_580_299_556_255_34,
    0.160_930_201_411_247_25,
    0.246_112_301_945_686_34,
    0.337_915_241_718_292_24,
    0.440_709_829_330_444_34,
    0.562_617_003_917_694_1,
    0.722_956_836_223_602_3,
    1.0,
];

/// The value of each FP4 code.
pub const FP4: [f32; 16] = [
    0.0,
    0.0625 / 12.0,
    8.0 / 12.0,
    1.0,
    4.0 / 12.0,
    6.0 / 12.0,
    2.0 / 12.0,
    3.0 / 12.0,
    0.0,
    -0.0625 / 12.0,
    -8.0 / 12.0,
    -1.0,
    -4.0 / 12.0,
    -6.0 / 12.0,
    -2.0 / 12.0,
    -3.0 / 12.0,
];

/// The FP4 codes in the order of their values. Of the two zeros, one is for numbers that are not above zero, the other
/// for those that are.
const FP4_ORDER: [u8; 16] = [11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3];
const NF4_ORDER: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// The value of each code of a 4-bit format.
pub const fn table(format: Format) -> &'static [f32; 16] {
    match format {
        Format::Fp4 => &FP4,
        Format::Mxfp4 | Format::Nvfp4 => &super::E2M1,
        _ => &NF4,
    }
}

/// How to find a number's code: the bounds between neighbouring values, and the codes in the order of their values.
pub(super) struct Rule {
    pub(super) bounds: [f32; 15],
    pub(super) order: [u8; 16],
}

impl Rule {
    pub(super) fn new(format: Format) -> Self {
        let (table, order) = match format {
            Format::Fp4 => (FP4, FP4_ORDER),
            _ => (NF4, NF4_ORDER),
        };
        let sorted = order.map(|code| table[usize::from(code)]);
        Self { bounds: std::array::from_fn(|at| f32::midpoint(sorted[at], sorted[at + 1])), order }
    }

    /// The code of a number in -1..1 (divided by its scale). At a bound it is the code of the lower value.
    pub(super) fn code(&self, value: f32) -> u8 {
        self.order[self.bounds.iter().filter(|&&bound| bound < value).count()]
    }
}
