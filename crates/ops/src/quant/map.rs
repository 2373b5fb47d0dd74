//! bitsandbytes' dynamic map: 256 values whose spacing grows with their magnitude, for a byte each
//! (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022).
use std::sync::{Arc, OnceLock};

/// bitsandbytes' `create_dynamic_map(signed)`, sorted: for each power of ten from 1e-6 to 1, the middles of equal parts
/// of `0.1..1`, twice as many as for the power before; and 0 and 1.
pub fn dynamic(signed: bool) -> [f32; 256] {
    let mut values = Vec::with_capacity(256);
    values.extend([0.0f32, 1.0]);
    for power in 0..7 {
        let parts = 1usize << (power + usize::from(!signed));
        let scale = 10f64.powi(power as i32 - 6) as f32;
        let edges = edges(parts + 1);
        for ends in edges.windows(2) {
            let value = scale * f32::midpoint(ends[0], ends[1]);
            values.push(value);
            if signed {
                values.push(-value);
            }
        }
    }
    values.sort_by(f32::total_cmp);
    std::array::from_fn(|at| values[at])
}

/// `torch.linspace(0.1, 1, count)` in f32: from both ends to the middle.
fn edges(count: usize) -> Vec<f32> {
    let step = (1.0f32 - 0.1) / (count - 1) as f32;
    let fused = |from: f32, steps: usize, sign: f64| (f64::from(from) + sign * f64::from(step) * steps as f64) as f32;
    let edge = |at: usize| if at < count / 2 { fused(0.1, at, 1.0) } else { fused(1.0, count - 1 - at, -1.0) };
    (0..count).map(edge).collect()
}

/// The signed map, computed once.
pub fn signed() -> Arc<[f32; 256]> {
    static MAP: OnceLock<Arc<[f32; 256]>> = OnceLock::new();
    MAP.get_or_init(|| Arc::new(dynamic(true))).clone()
}

/// The midpoints between neighbouring values of the signed map.
pub(super) fn bounds() -> [f32; 255] {
    let map = signed();
    std::array::from_fn(|at| f32::midpoint(map[at], map[at + 1]))
}

/// How many cells bitsandbytes' table has, from a number in -1..1 to its code.
const CELLS: usize = 1 << 16;

/// The code of a number in -1..1 in the signed map, as bitsandbytes' CPU library finds it: by the middle of one of
/// 65,536 cells. So near the border of two codes it may choose the farther one.
pub fn code(value: f32) -> u8 {
    static CODES: OnceLock<Vec<u8>> = OnceLock::new();
    let codes = CODES.get_or_init(|| {
        let bounds = bounds();
        let middle = |cell: usize| (2.0 * cell as f64 / (CELLS - 1) as f64 - 1.0) as f32;
        (0..CELLS).map(|cell| bounds.partition_point(|&bound| bound < middle(cell)) as u8).collect()
    });
    let cell = (value + 1.0) * 0.5 * (CELLS - 1) as f32 + 0.5;
    codes[(cell as usize).min(CELLS - 1)]
}
