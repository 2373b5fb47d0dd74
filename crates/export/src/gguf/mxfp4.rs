//! MXFP4 in a file: blocks of 32 numbers with one power of two, each number a sign and one of eight sizes.
use std::io;

/// Values in a block.
pub(super) const BLOCK: usize = 32;
/// Bytes of a block: the exponent, then the codes.
pub(super) const BYTES: usize = 1 + BLOCK / 2;

/// The magnitudes that the codes stand for, in halves of the block's unit (a power of two).
const HALVES: [f32; 8] = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0];
/// Added to the exponent, so that it fits into an unsigned byte.
const BIAS: i32 = 127;

/// Encodes numbers that were read from MXFP4 without any loss. Each byte holds the code of a number from the block's first
/// half in its low bits, and one from the second half in its high bits.
///
/// # Errors
/// `values` contain a number that no code stands for.
pub(super) fn encode(values: &[f32]) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(values.len() / BLOCK * BYTES);
    for block in values.chunks_exact(BLOCK) {
        let exponent = exponent(block);
        let unit = 2.0f64.powi(exponent - 1);
        let code = |value: f32| {
            let halves = (f64::from(value.abs()) / unit) as f32;
            let size = HALVES.iter().position(|size| *size == halves);
            let size = size.ok_or_else(|| io::Error::other(format!("{value} is no number of MXFP4")))?;
            Ok::<_, io::Error>(size as u8 | u8::from(value.is_sign_negative()) << 3)
        };
        bytes.push(u8::try_from(exponent + BIAS).unwrap_or(0));
        for at in 0..BLOCK / 2 {
            bytes.push(code(block[at])? | code(block[at + BLOCK / 2])? << 4);
        }
    }
    Ok(bytes)
}

/// The exponent with which the largest number of a block is 4 or 6 units, so that all are whole halves. At most three below the
/// one that the block came with: where the largest is small, the others are even smaller.
fn exponent(block: &[f32]) -> i32 {
    let largest = block.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    if largest == 0.0 {
        return 0;
    }
    // 2 and 3 halves have the same power of two as 1, which is 2 powers below 4.
    (f64::from(largest).log2().floor() as i32 - 2).max(-BIAS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_that_were_written_down_by_hand() {
        let mut block = [0.0f32; BLOCK];
        // The power of two is 2^3: 6 units are 48, half a unit is 4.
        (block[0], block[1], block[16], block[31]) = (48.0, -4.0, 12.0, -32.0);
        let bytes = encode(&block).unwrap();
        assert_eq!((bytes.len(), bytes[0]), (17, 130));
        assert_eq!((bytes[1], bytes[2], bytes[16]), (0x37, 0x09, 0xe0));
        assert!(bytes[3..16].iter().all(|byte| *byte == 0));
        block[2] = 5.0;
        assert!(encode(&block).is_err());
        assert_eq!(encode(&[0.0; BLOCK]).unwrap()[0], 127);
    }

    #[test]
    fn every_block_of_mxfp4_comes_back_as_it_was() {
        for size in 1..8 {
            for exponent in [-126, -3, 0, 5, 120] {
                let unit = 2.0f32.powi(exponent) / 2.0;
                let block: Vec<f32> = (0..BLOCK)
                    .map(|at| HALVES[at % (size + 1)] * unit * if at % 3 == 0 { -1.0 } else { 1.0 })
                    .collect();
                let bytes = encode(&block).unwrap();
                let unit = 2.0f64.powi(i32::from(bytes[0]) - BIAS - 1);
                for (at, value) in block.iter().enumerate() {
                    let byte = bytes[1 + at % 16];
                    let code = if at < 16 { byte & 15 } else { byte >> 4 };
                    let size = f64::from(HALVES[usize::from(code & 7)]) * unit;
                    assert_eq!(f64::from(*value).abs(), size, "{size} {exponent}");
                    assert_eq!(value.is_sign_negative(), code > 7);
                }
            }
        }
    }
}
