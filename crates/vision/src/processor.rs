//! Prepares a picture as the image processor of a checkpoint does: resizes, crops, normalizes and cuts it into the
//! patches that the encoder reads.
use std::borrow::Cow;

use tunesmith_base::error::{Error, Result};
use tunesmith_config::vision::{Joined, PanAndScan, Processing, Size};

use crate::any_res::{best_grid, within_grid};
use crate::resize::resize;
use crate::{Picture, Pixels, Tile};

/// The most tiles of a picture that is cut by [`Size::AnyRes`].
const MOST_TILES: usize = 4096;

/// The longest side in pixels to which Idefics 3 and `SmolVLM` resize a picture.
const LONGEST: u32 = 4096;

/// Prepares pictures for one encoder, by the settings of its checkpoint.
#[derive(Debug, Clone)]
pub struct Processor {
    processing: Processing,
    patch: u32,
    /// The most tiles whose rows for the decoder are all kept; with more, the rows are scaled down ([`Size::AnyRes`]).
    most_tiles: usize,
}

/// How a picture is resized and cut. It depends only on the picture's size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The tiles, in the order of their rows in the decoder's input.
    pub tiles: Vec<Tile>,
    /// How many rows and columns of tiles the picture is cut into; `None` if it is not cut. The whole picture is one
    /// more tile: the first one with [`Size::AnyRes`], the last one otherwise.
    pub split: Option<(usize, usize)>,
    /// How all tiles but the first are put together to lines of rows for the decoder ([`Size::AnyRes`]); `None`
    /// otherwise.
    pub joined: Option<Joined>,
    /// The sizes `(width, height)` to which the picture is resized, one after the other.
    steps: Vec<(u32, u32)>,
    /// Parts of the picture that follow it as further tiles (`pan_and_scan`).
    crops: Vec<Crop>,
}

/// A part of a picture, in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Crop {
    x: u32,
    y: u32,
    width: u32,
    height: u32,
}

impl Processor {
    /// Makes a processor for an encoder with square patches of `patch` pixels a side.
    pub const fn new(processing: Processing, patch: usize) -> Self {
        Self { processing, patch: patch as u32, most_tiles: usize::MAX }
    }

    /// Sets up to how many tiles a picture keeps all its rows for the decoder. With more, its rows are scaled down
    /// ([`Size::AnyRes`]).
    #[must_use]
    pub const fn with_most_tiles(mut self, most_tiles: usize) -> Self {
        self.most_tiles = most_tiles;
        self
    }

    /// Whether a picture is cut into tiles only if it is the only one in its row ([`Size::AnyRes`]).
    pub const fn cuts_alone(&self) -> bool {
        matches!(self.processing.size, Size::AnyRes { .. })
    }

    /// Computes how a picture of this size is resized and cut. `several` says that its row shows other pictures too.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the resized picture is smaller than a patch, or an intermediate size has too
    /// many pixels.
    pub fn layout(&self, width: u32, height: u32, several: bool) -> Result<Layout> {
        if let Size::AnyRes { tile } = self.processing.size
            && !several
        {
            return self.any_res(width, height, tile);
        }
        let picture = (width, height);
        let (width, height) = if self.processing.square.is_some() {
            let longest = width.max(height);
            bounded((longest, longest))?;
            (longest, longest)
        } else {
            (width, height)
        };
        let (mut steps, mut split) = (Vec::new(), None);
        match self.processing.size {
            Size::Kept => {}
            Size::Exact([height, width]) => steps.push((width, height)),
            Size::AnyRes { tile } => steps.push((tile, tile)),
            Size::ShortestEdge(edge) => {
                let longer = |long: u32, short: u32| {
                    (f64::from(edge) * f64::from(long) / f64::from(short)).min(f64::from(u32::MAX)) as u32
                };
                steps.push(if width <= height { (edge, longer(height, width)) } else { (longer(width, height), edge) });
            }
            Size::Tiles { longest_edge, tile, split: cut } => {
                let first = below(scaled(width, height, longest_edge));
                steps.push(first);
                if cut {
                    let (width, height) = multiples(first, tile);
                    steps.push((width, height));
                    if width > tile || height > tile {
                        split = Some(((height / tile) as usize, (width / tile) as usize));
                    }
                } else {
                    steps.push((tile, tile));
                }
            }
            Size::Canvas { tile: [tall, wide], cut, least, most } => {
                let (columns, rows) = if cut { canvas((width, height), [tall, wide], [least, most]) } else { (1, 1) };
                steps.push((wide * columns, tall * rows));
                split = (columns * rows > 1).then_some((rows as usize, columns as usize));
            }
            Size::Within { most, unit } => steps.push(smaller(width, height, most, unit)),
            Size::MostRows { most, merge, patch } => {
                self.check_patch(patch)?;
                steps.push(most_rows(width, height, patch, merge, most)?);
            }
            Size::MostPatches { most, patch } => {
                self.check_patch(patch)?;
                steps.push(most_patches(width, height, patch, most));
            }
            Size::Pixels { least, most, merge, patch } => {
                self.check_patch(patch)?;
                steps.push(within(width, height, u64::from(self.patch) * u64::from(merge), [least, most])?);
            }
        }
        let mut before = (width, height);
        for &step in &steps {
            bounded(step)?;
            // Between the two directions, a picture has the size of the one that was resampled first. Pillow may begin with the other.
            let between =
                [(step.0, before.1), (before.0, step.1)].map(|size| (u64::from(size.0) * u64::from(size.1), size));
            let pil = self.processing.backend == crate::resize::Backend::Pil;
            bounded(if pil { between[0].min(between[1]).1 } else { between[0].1 })?;
            before = step;
        }
        let (width, height) = steps.last().copied().unwrap_or((width, height));
        let (width, height) = match self.processing.crop {
            Some([high, wide]) => {
                // The crop may reach beyond the picture, which is then padded to its size.
                bounded((width.max(wide), height.max(high)))?;
                (wide, high)
            }
            None => (width, height),
        };
        let whole = match self.processing.size {
            Size::Tiles { tile, .. } if split.is_some() => (tile, tile),
            Size::Canvas { tile: [height, width], .. } => (width, height),
            _ => (width, height),
        };
        let tile = Tile { rows: (whole.1 / self.patch) as usize, columns: (whole.0 / self.patch) as usize };
        if tile.rows == 0 || tile.columns == 0 {
            let patch = self.patch;
            return Err(Error::data(format!("the image has {width} x {height} pixels, a patch {patch} x {patch}")));
        }
        let crops = match &self.processing.pan_and_scan {
            Some(rule) => crops(picture, rule)?,
            None => Vec::new(),
        };
        let tiles = vec![tile; split.map_or(1, |(rows, columns)| rows * columns + 1) + crops.len()];
        Ok(Layout { tiles, split, joined: None, steps, crops })
    }

    /// Checks that the preprocessor's settings and the encoder have the same patch size.
    fn check_patch(&self, patch: u32) -> Result<()> {
        if patch == self.patch {
            return Ok(());
        }
        let own = self.patch;
        Err(Error::data(format!("patches of {patch} pixels a side in preprocessor_config.json, {own} in config.json"))
            .hint("both files must belong to one model"))
    }

    /// Cuts a picture by [`Size::AnyRes`]: the whole picture as one tile, and then tiles of `tile` pixels a side.
    fn any_res(&self, width: u32, height: u32, tile: u32) -> Result<Layout> {
        let grid @ [down, across] = best_grid(width, height, &self.processing.grids)?;
        let side = (tile / self.patch) as usize;
        if side == 0 || !down.is_multiple_of(tile) || !across.is_multiple_of(tile) {
            let patch = self.patch;
            return Err(Error::data(format!(
                "a grid of {down} x {across} pixels, tiles of {tile}, and patches of {patch}"
            ))
            .hint("image_grid_pinpoints must be multiples of the size of a tile"));
        }
        bounded((across, down))?;
        let split = [down, across].map(|side| (side / tile) as usize);
        if split[0] * split[1] > MOST_TILES {
            return Err(Error::data(format!("a grid of more than {MOST_TILES} tiles")));
        }
        let joined = Joined::of([height, width], split, [side; 2], self.most_tiles).ok_or_else(|| {
            Error::data(format!("of an image of {width} x {height} pixels nothing would be left"))
                .hint("its sides differ too much; leave it out, or cut it")
        })?;
        let tiles = vec![Tile { rows: side, columns: side }; split[0] * split[1] + 1];
        let steps = vec![within_grid(width, height, grid)];
        Ok(Layout { tiles, split: Some((split[0], split[1])), joined: Some(joined), steps, crops: Vec::new() })
    }

    fn any_res_pixels(&self, picture: &Picture, layout: Layout, tile: u32) -> Pixels {
        let Processing { resample, backend, .. } = self.processing;
        let mut patches = Vec::new();
        let whole = resize(picture, tile, tile, resample, backend);
        self.unfold(&whole, (0, 0), layout.tiles[0], &mut patches);
        let ((width, height), (down, across)) = (layout.steps[0], layout.split.unwrap_or((1, 1)));
        let within = resize(picture, width, height, resample, backend);
        let (wide, high) = (across as u32 * tile, down as u32 * tile);
        let canvas = placed(&within, (wide, high), ((wide - width) / 2, (high - height) / 2), [0; 3]);
        for (row, column) in (0..down).flat_map(|row| (0..across).map(move |column| (row, column))) {
            self.unfold(&canvas, (column as u32 * tile, row as u32 * tile), layout.tiles[0], &mut patches);
        }
        Pixels { patches, tiles: layout.tiles, joined: layout.joined, world: false }
    }

    /// Makes the encoder's input for a picture. `several` says that its row shows other pictures too.
    ///
    /// # Errors
    /// As [`Self::layout`].
    pub fn pixels(&self, picture: &Picture, several: bool) -> Result<Pixels> {
        let layout = self.layout(picture.width, picture.height, several)?;
        if let Size::AnyRes { tile } = self.processing.size
            && !several
        {
            return Ok(self.any_res_pixels(picture, layout, tile));
        }
        let Processing { resample, backend, .. } = self.processing;
        let mut current = Cow::Borrowed(picture);
        if let Some(color) = self.processing.square {
            current = Cow::Owned(squared(&current, color));
        }
        for &(width, height) in &layout.steps {
            current = Cow::Owned(resize(&current, width, height, resample, backend).into_owned());
        }
        if let Some([height, width]) = self.processing.crop {
            current = Cow::Owned(centre(&current, width, height));
        }
        let mut patches = Vec::new();
        let tile = match self.processing.size {
            Size::Tiles { tile, .. } => [tile; 2],
            Size::Canvas { tile, .. } => tile,
            _ => [0; 2],
        };
        if let (Some((rows, columns)), [tall, wide]) = (layout.split, tile) {
            for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
                self.unfold(&current, (column as u32 * wide, row as u32 * tall), layout.tiles[0], &mut patches);
            }
            // The last tile, the whole picture: with [`Size::Canvas`] it is resized from the original, otherwise from
            // the picture that was cut.
            let is_canvas = matches!(self.processing.size, Size::Canvas { .. });
            let whole = if is_canvas { picture } else { &*current };
            current = Cow::Owned(resize(whole, wide, tall, resample, backend).into_owned());
        }
        self.unfold(&current, (0, 0), layout.tiles[0], &mut patches);
        for crop in &layout.crops {
            let mut part = cropped(picture, *crop);
            for &(width, height) in &layout.steps {
                part = resize(&part, width, height, resample, backend).into_owned();
            }
            self.unfold(&part, (0, 0), layout.tiles[0], &mut patches);
        }
        Ok(Pixels { patches, tiles: layout.tiles, joined: None, world: false })
    }

    /// Appends the patches of a tile whose first pixel is at `(x, y)`.
    fn unfold(&self, picture: &Picture, (x, y): (u32, u32), tile: Tile, patches: &mut Vec<f32>) {
        let tables = self.tables();
        let (patch, width) = (self.patch as usize, picture.width as usize);
        let frames = self.processing.frames;
        patches.reserve(tile.rows * tile.columns * patch * patch * 3 * frames);
        for (row, column) in (0..tile.rows).flat_map(|row| (0..tile.columns).map(move |column| (row, column))) {
            if self.processing.channels_last {
                for line in 0..patch {
                    let start = (y as usize + row * patch + line) * width + x as usize + column * patch;
                    let values = picture.rgb[start * 3..(start + patch) * 3].iter().enumerate();
                    patches.extend(values.map(|(at, value)| tables[at % 3][usize::from(*value)]));
                }
                continue;
            }
            for (channel, table) in tables.iter().enumerate().flat_map(|of| std::iter::repeat_n(of, frames)) {
                for line in 0..patch {
                    let start = (y as usize + row * patch + line) * width + x as usize + column * patch;
                    let pixels = picture.rgb[start * 3..(start + patch) * 3].as_chunks::<3>().0;
                    patches.extend(pixels.iter().map(|pixel| table[usize::from(pixel[channel])]));
                }
            }
        }
    }

    /// The normalized value of each byte in each channel. If mean and deviation are scaled to bytes first, the rounding
    /// is that of torchvision's `normalize`.
    fn tables(&self) -> [[f32; 256]; 3] {
        let Processing { rescale, normalize, .. } = &self.processing;
        let value = |channel: usize, byte: usize| {
            let byte = byte as f32;
            match (rescale, normalize) {
                (None, None) => byte,
                (Some(factor), None) => byte * *factor as f32,
                (None, Some([mean, std])) => (byte - mean[channel]) / std[channel],
                (Some(factor), Some([mean, std])) => {
                    let whole = (1.0 / factor) as f32;
                    (byte - mean[channel] * whole) / (std[channel] * whole)
                }
            }
        };
        [0, 1, 2].map(|channel| std::array::from_fn(|byte| value(channel, byte)))
    }
}

/// Checks that a size has at most as many pixels as a picture may have.
fn bounded((width, height): (u32, u32)) -> Result<()> {
    if u64::from(width) * u64::from(height) > crate::MAX_PIXELS {
        return Err(Error::data(format!("the image would be made {width} x {height} pixels large"))
            .hint("its sides differ too much; leave it out, or cut it"));
    }
    Ok(())
}

/// The largest ratio of the longer to the shorter side, if the number of pixels decides the size.
const MOST_APART: u32 = 200;

/// The size with sides of multiples of `factor` and a number of pixels within these bounds: `smart_resize` of
/// `transformers.models.qwen2_vl.image_processing_qwen2_vl`.
fn within(width: u32, height: u32, factor: u64, [least, most]: [u64; 2]) -> Result<(u32, u32)> {
    let (long, short) = (width.max(height), width.min(height));
    if f64::from(long) / f64::from(short) > f64::from(MOST_APART) {
        return Err(Error::data(format!(
            "the image has {width} x {height} pixels, one side over {MOST_APART} times the other"
        ))
        .hint("leave it out, or cut it"));
    }
    let step = factor as f64;
    let [width, height] = [width, height].map(f64::from);
    let sides = |of: &dyn Fn(f64) -> f64| [width, height].map(|side| of(side) * step);
    let near = sides(&|side| (side / step).round_ties_even());
    let pixels = near[0] * near[1];
    let [width, height] = if pixels > most as f64 {
        let beta = (height * width / most as f64).sqrt();
        sides(&|side| (side / beta / step).floor()).map(|side| side.max(step))
    } else if pixels < least as f64 {
        let beta = (least as f64 / (height * width)).sqrt();
        sides(&|side| (side * beta / step).ceil())
    } else {
        near
    };
    Ok((width as u32, height as u32))
}

/// The size with sides of at most so many pixels, and then up to multiples of `unit`: `get_resize_output_image_size` of
/// `transformers.models.pixtral.image_processing_pixtral`. A side may become 0.
fn smaller(width: u32, height: u32, [tall, wide]: [u32; 2], unit: u32) -> (u32, u32) {
    let ratio = (f64::from(height) / f64::from(tall)).max(f64::from(width) / f64::from(wide));
    let of = |side: u32| {
        let side = if ratio > 1.0 { (f64::from(side) / ratio).floor() as u32 } else { side };
        side.div_ceil(unit) * unit
    };
    (of(width), of(height))
}

/// The largest size whose sides are multiples of `patch`, with at most `most` patches. Each side is at most a patch
/// longer than the picture's proportions. As `get_image_size_for_max_num_patches` of
/// `transformers.models.siglip2.image_processing_siglip2`.
fn most_patches(width: u32, height: u32, patch: u32, most: u32) -> (u32, u32) {
    const NEAR: f64 = 1e-5;
    let scaled = |scale: f64| {
        [width, height].map(|side| {
            let patches = (f64::from(side) * scale / f64::from(patch)).ceil();
            patches.max(1.0) * f64::from(patch)
        })
    };
    let (mut least, mut largest) = (NEAR / 10.0, 100.0);
    while largest - least >= NEAR {
        let scale = f64::midpoint(least, largest);
        let [wide, high] = scaled(scale).map(|side| side / f64::from(patch));
        if high * wide <= f64::from(most) {
            least = scale;
        } else {
            largest = scale;
        }
    }
    let [width, height] = scaled(least);
    (width as u32, height as u32)
}

/// The largest size that nearly keeps the proportions, whose sides are multiples of `merge` patches, with at most
/// `most` squares of `merge` x `merge` patches. As `get_aspect_ratio_preserving_size` of
/// `transformers.models.gemma4.image_processing_gemma4`.
fn most_rows(width: u32, height: u32, patch: u32, merge: u32, most: u32) -> Result<(u32, u32)> {
    let unit = u64::from(patch) * u64::from(merge);
    let pixels = u64::from(most) * unit * unit;
    let factor = (pixels as f64 / (u64::from(width) * u64::from(height)) as f64).sqrt();
    let units = |side: u32| (factor * f64::from(side) / unit as f64).floor() as u64;
    let longest = |long: u32, short: u32| u64::from(long / short).min(u64::from(most));
    let (wide, high) = match (units(width), units(height)) {
        (0, 0) => {
            return Err(Error::data(format!("an image of {width} x {height} pixels would be made 0 x 0 pixels large")));
        }
        (_, 0) => (longest(width, height), 1),
        (0, _) => (1, longest(height, width)),
        both => both,
    };
    if wide * high > u64::from(most) {
        return Err(Error::data(format!(
            "an image of {width} x {height} pixels would take more tokens than max_soft_tokens, {most}"
        )));
    }
    Ok(((wide * unit) as u32, (high * unit) as u32))
}

/// Columns and rows of the grid of tiles whose shape is nearest to the picture's. Among equally near grids, one with
/// more tiles is taken as long as its tiles have less than twice the picture's pixels. As `get_optimal_tiled_canvas` of
/// `transformers.models.got_ocr2.image_processing_got_ocr2`.
fn canvas((width, height): (u32, u32), [tall, wide]: [u32; 2], [least, most]: [u32; 2]) -> (u32, u32) {
    let mut grids: Vec<(u32, u32)> = (1..=most)
        .flat_map(|columns| (1..=most).map(move |rows| (columns, rows)))
        .filter(|(columns, rows)| (least..=most).contains(&(columns * rows)))
        .collect();
    grids.sort_by_key(|(columns, rows)| columns * rows);
    let [width, height, tall, wide] = [width, height, tall, wide].map(f64::from);
    let (mut best, mut nearest) = ((1, 1), f64::INFINITY);
    for (columns, rows) in grids {
        let [across, down] = [columns, rows].map(f64::from);
        let apart = (width / height - across / down).abs();
        let as_near = apart.total_cmp(&nearest).is_eq();
        if apart < nearest {
            (best, nearest) = ((columns, rows), apart);
        } else if as_near && width * height > 0.5 * tall * wide * across * down {
            best = (columns, rows);
        }
    }
    best
}

/// The crops of a picture of this size, as `pan_and_scan` of `transformers.models.gemma3.image_processing_gemma3`.
/// There are none if the picture is not oblong enough, or too small.
fn crops((width, height): (u32, u32), rule: &PanAndScan) -> Result<Vec<Crop>> {
    let (long, short) = (width.max(height), width.min(height));
    let ratio = f64::from(long) / f64::from(short);
    if ratio < rule.min_ratio_to_activate {
        return Ok(Vec::new());
    }
    let near = (ratio + 0.5).floor().min(f64::from(long / rule.min_crop_size)) as u32;
    let count = near.max(2).min(rule.max_num_crops);
    let side = long.div_ceil(count);
    if side.min(short) < rule.min_crop_size {
        return Ok(Vec::new());
    }
    // The last crop ends where the picture ends.
    let crop = |at: u32| match long.checked_sub(at * side).filter(|rest| *rest > 0) {
        Some(rest) if width >= height => Ok(Crop { x: at * side, y: 0, width: side.min(rest), height }),
        Some(rest) => Ok(Crop { x: 0, y: at * side, width, height: side.min(rest) }),
        None => Err(Error::data(format!("the image has {width} x {height} pixels, too few for {count} crops"))
            .hint("raise pan_and_scan_min_crop_size in preprocessor_config.json")),
    };
    (0..count).map(crop).collect()
}

/// Cuts a part out of a picture.
fn cropped(picture: &Picture, Crop { x, y, width, height }: Crop) -> Picture {
    let line = |row: u32| {
        let start = (row as usize * picture.width as usize + x as usize) * 3;
        &picture.rgb[start..start + width as usize * 3]
    };
    Picture { width, height, rgb: (y..y + height).flat_map(line).copied().collect() }
}

/// The size at which the longer side is `longest`, and the shorter one in proportion and even.
fn scaled(width: u32, height: u32, longest: u32) -> (u32, u32) {
    let aspect = f64::from(width) / f64::from(height);
    let even = |side: f64| {
        let side = side as u32;
        (side + side % 2).max(1)
    };
    if width >= height {
        (longest, even(f64::from(longest) / aspect))
    } else {
        (even(f64::from(longest) * aspect), longest)
    }
}

/// The size scaled down so that no side is longer than [`LONGEST`].
fn below((width, height): (u32, u32)) -> (u32, u32) {
    let aspect = f64::from(width) / f64::from(height);
    if width >= height && width > LONGEST {
        (LONGEST, ((f64::from(LONGEST) / aspect) as u32).max(1))
    } else if height > width && height > LONGEST {
        (((f64::from(LONGEST) * aspect) as u32).max(1), LONGEST)
    } else {
        (width, height)
    }
}

/// The size with its sides rounded up to multiples of `tile`.
fn multiples((width, height): (u32, u32), tile: u32) -> (u32, u32) {
    let aspect = f64::from(width) / f64::from(height);
    let up = |side: u32| side.div_ceil(tile) * tile;
    if width >= height {
        let width = up(width);
        (width, up((f64::from(width) / aspect) as u32))
    } else {
        let height = up(height);
        (up((f64::from(height) * aspect) as u32), height)
    }
}

/// The picture in the middle of a square with the longer side, filled with one color.
fn squared(picture: &Picture, color: [u8; 3]) -> Picture {
    let side = picture.width.max(picture.height);
    placed(picture, (side, side), ((side - picture.width) / 2, (side - picture.height) / 2), color)
}

/// The middle of a picture. Where the picture is smaller, the rest is black.
fn centre(picture: &Picture, width: u32, height: u32) -> Picture {
    let large = (picture.width.max(width), picture.height.max(height));
    let margin = (width.saturating_sub(picture.width) / 2, height.saturating_sub(picture.height) / 2);
    let whole = if large == (picture.width, picture.height) {
        Cow::Borrowed(picture)
    } else {
        Cow::Owned(placed(picture, large, margin, [0; 3]))
    };
    let (x, y) = ((whole.width - width) / 2, (whole.height - height) / 2);
    let line = |row: u32| {
        let start = ((y + row) * whole.width + x) as usize * 3;
        &whole.rgb[start..start + width as usize * 3]
    };
    Picture { width, height, rgb: (0..height).flat_map(line).copied().collect() }
}

/// A picture of this size, filled with one color, with `picture` at `(x, y)`.
fn placed(picture: &Picture, (width, height): (u32, u32), (x, y): (u32, u32), color: [u8; 3]) -> Picture {
    let mut rgb = color.repeat(width as usize * height as usize);
    let line = picture.width as usize * 3;
    for (row, from) in picture.rgb.chunks_exact(line).enumerate() {
        let start = ((y as usize + row) * width as usize + x as usize) * 3;
        rgb[start..start + line].copy_from_slice(from);
    }
    Picture { width, height, rgb }
}
