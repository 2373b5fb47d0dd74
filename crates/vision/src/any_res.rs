//! Chooses the grid of tiles for a picture whose shape decides how it is cut (`AnyRes`, as in LLaVA-OneVision).
use tunesmith_base::error::{Error, Result};

/// The grid, `[height, width]` in pixels, in which the picture keeps the most pixels; among equal ones, that with the
/// smallest margin. As `select_best_resolution` of `transformers.image_processing_utils`.
pub fn best_grid(width: u32, height: u32, grids: &[[u32; 2]]) -> Result<[u32; 2]> {
    let (wide, high) = (f64::from(width), f64::from(height));
    let own = u64::from(width) * u64::from(height);
    let (mut best, mut most, mut least) = (None, 0, i128::MAX);
    for grid @ [down, across] in grids {
        let scale = (f64::from(*across) / wide).min(f64::from(*down) / high);
        let shown = ((wide * scale) as u64 * (high * scale) as u64).min(own);
        let wasted = i128::from(*down) * i128::from(*across) - i128::from(shown);
        if shown > most || (shown == most && wasted < least) {
            (best, most, least) = (Some(*grid), shown, wasted);
        }
    }
    best.ok_or_else(|| {
        Error::data(format!("the image has {width} x {height} pixels, of which no grid of tiles shows any"))
            .hint("leave it out, or cut it")
    })
}

/// Width and height of a picture that is scaled to fit into a grid. As `get_patch_output_size` of
/// `transformers.image_processing_utils`.
pub fn within_grid(width: u32, height: u32, [down, across]: [u32; 2]) -> (u32, u32) {
    let scales = [f64::from(across) / f64::from(width), f64::from(down) / f64::from(height)];
    let up = |side: u32, scale: f64| (f64::from(side) * scale).ceil() as u32;
    if scales[0] < scales[1] {
        (across, up(height, scales[0]).min(down))
    } else {
        (up(width, scales[1]).min(across), down)
    }
}
