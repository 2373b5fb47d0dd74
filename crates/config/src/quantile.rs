//! Quantiles of the normal distribution: Wichura, "Algorithm AS 241: The Percentage Points of the Normal Distribution", 1988.

/// Coefficients of a numerator and of a denominator, the highest power first.
type Ratio = [[f64; 8]; 2];

/// Of `0.180625 - q^2`, for q = p - 1/2 up to 0.425.
const CENTRE: Ratio = [
    [
        2_509.080_928_730_122_7,
        33_430.575_583_588_13,
        67_265.770_927_008_7,
        45_921.953_931_549_87,
        13_731.693_765_509_46,
        1_971.590_950_306_551_3,
        133.141_667_891_784_38,
        3.387_132_872_796_366_5,
    ],
    [
        5_226.495_278_852_854,
        28_729.085_735_721_943,
        39_307.895_800_092_71,
        21_213.794_301_586_597,
        5_394.196_021_424_751,
        687.187_007_492_057_9,
        42.313_330_701_600_91,
        1.0,
    ],
];

/// Of `sqrt(-ln p) - 1.6`, where the root is up to 5.
const TAIL: Ratio = [
    [
        0.000_774_545_014_278_341_4,
        0.022_723_844_989_269_184,
        0.241_780_725_177_450_6,
        1.270_458_252_452_368_4,
        3.647_848_324_763_204_5,
        5.769_497_221_460_691,
        4.630_337_846_156_546,
        1.423_437_110_749_683_5,
    ],
    [
        1.050_750_071_644_416_9e-9,
        0.000_547_593_808_499_534_5,
        0.015_198_666_563_616_457,
        0.148_103_976_427_480_08,
        0.689_767_334_985_1,
        1.676_384_830_183_803_8,
        2.053_191_626_637_759,
        1.0,
    ],
];

/// Of `sqrt(-ln p) - 5`, beyond.
const FAR: Ratio = [
    [
        2.010_334_399_292_288_1e-7,
        2.711_555_568_743_487_6e-5,
        0.001_242_660_947_388_078_4,
        0.026_532_189_526_576_124,
        0.296_560_571_828_504_87,
        1.784_826_539_917_291_3,
        5.463_784_911_164_114,
        6.657_904_643_501_103,
    ],
    [
        2.044_263_103_389_939_7e-15,
        1.421_511_758_316_446e-7,
        1.846_318_317_510_054_8e-5,
        0.000_786_869_131_145_613_3,
        0.014_875_361_290_850_615,
        0.136_929_880_922_735_8,
        0.599_832_206_555_888,
        1.0,
    ],
];

/// The number below which a standard normal variable is with probability `p`, between 0 and 1.
pub(crate) fn normal_quantile(p: f64) -> f64 {
    let q = p - 0.5;
    if q.abs() <= 0.425 {
        return ratio(&CENTRE, 0.180_625 - q * q) * q;
    }
    let root = (-(if q < 0.0 { p } else { 1.0 - p }).ln()).sqrt();
    let size = if root <= 5.0 { ratio(&TAIL, root - 1.6) } else { ratio(&FAR, root - 5.0) };
    size.copysign(q)
}

fn ratio([above, below]: &Ratio, x: f64) -> f64 {
    let value = |factors: &[f64; 8]| factors.iter().fold(0.0, |sum, factor| sum * x + factor);
    value(above) / value(below)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Python's `statistics.NormalDist().inv_cdf`.
    #[test]
    fn quantiles_are_those_of_the_normal_distribution() {
        for (p, expected) in [
            (0.5, 0.0),
            (0.3, -0.524_400_512_708_040_7),
            (0.75, 0.674_489_750_196_081_7),
            (0.95, 1.644_853_626_951_471_5),
            (0.9999, 3.719_016_485_455_708_4),
            (0.02, -2.053_748_910_631_822_5),
            (1e-13, -7.348_796_102_800_676_5),
        ] {
            let found = normal_quantile(p);
            assert!((found - expected).abs() <= 1e-14 * expected.abs().max(1.0), "{p}: {found} is not {expected}");
        }
    }
}
