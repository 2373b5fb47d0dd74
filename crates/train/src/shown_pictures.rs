//! What memory predictions need to know about a run's images: how many a row shows, and the shape of the largest one.
use std::sync::Arc;

use super::picture_identity::Identity;
use super::run_pictures::RunPictures;
use super::vision::Sight;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;
use tunesmith_config::vision::{Features, Joined, VisionArch};
use tunesmith_config::{Auto, Config, TrainConfig};
use tunesmith_data::{Dataset, PictureLook, Pictures as _, Shown, Split};
use tunesmith_plan::grouped;
use tunesmith_plan::memory::{ImageSize, Pictures, encoder_scratch};
use tunesmith_vision::{Pixels, Tile};

/// How many images rows show, and the largest one.
#[derive(Debug, Clone, PartialEq)]
pub struct ShownPictures {
    /// What their number and their size mean for memory.
    pub(crate) pictures: Pictures,
    /// The largest image, filled with zeros: one for the second encoder, if there is one, then one for the first.
    pub(crate) pixels: Vec<Arc<Pixels>>,
}

/// Width and height in pixels that an image of unknown size is assumed to have.
const UNKNOWN: u32 = 1024;

/// The numbers of images in rows, and the largest image: the one with the most tokens.
#[derive(Default)]
struct Rows<'a> {
    /// The most images in one sequence.
    per_sequence: usize,
    /// The most images in one row, over all its sequences.
    per_row: usize,
    /// The fewest tokens per image in a sequence with images.
    spacing: Option<usize>,
    /// The image with the most tokens, and their number.
    largest: Option<(usize, &'a Shown)>,
}

impl<'a> Rows<'a> {
    fn add(&mut self, split: &'a Split) {
        for index in 0..split.len() {
            let sequences = split.pictures(index);
            let own = |shown: &&Shown| !shown.is_world();
            let mut in_row = 0;
            for sequence in sequences {
                let count = sequence.iter().filter(own).count();
                if count == 0 {
                    continue;
                }
                in_row += count;
                self.per_sequence = self.per_sequence.max(count);
                let rows = |shown: &Shown| shown.runs.iter().map(std::ops::Range::len).sum::<usize>();
                let length = if sequences.len() == 1 {
                    split.length(index)
                } else {
                    sequence.iter().map(rows).sum::<usize>() + 1
                };
                let spacing = (length / count).max(1);
                self.spacing = Some(self.spacing.map_or(spacing, |least| least.min(spacing)));
                for shown in sequence.iter().filter(own) {
                    let rows = rows(shown);
                    if self.largest.is_none_or(|(most, _)| rows > most) {
                        self.largest = Some((rows, shown));
                    }
                }
            }
            self.per_row = self.per_row.max(in_row);
        }
    }
}

impl ShownPictures {
    /// The largest image, filled with zeros: one for the second encoder, if there is one, then one for the first.
    pub fn pixels(&self) -> &[Arc<Pixels>] {
        &self.pixels
    }

    /// The images of the training and validation rows, as pixels or as the features that `vision` expects; `None` if the rows
    /// show none.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the largest image cannot be read.
    pub(crate) fn of_dataset(
        dataset: &Dataset,
        train: &TrainConfig,
        vision: &VisionArch,
        files: &RunPictures,
    ) -> Result<Option<Self>> {
        let mut rows = Rows::default();
        rows.add(&dataset.train);
        dataset.validation.iter().for_each(|split| rows.add(split));
        let Some((_, largest)) = rows.largest else { return Ok(None) };
        let layout = Identity::of(&files.source.files, &largest.file)?.layout;
        let mut found = Self::of_image(vision, &layout.tiles, layout.joined.as_ref(), rows.per_sequence);
        found.pictures.spacing = rows.spacing.unwrap_or(1) as u64;
        found.pictures.most = Some(match train.batch_size {
            Auto::Given(count) => (count * rows.per_row) as u64,
            Auto::Auto => u64::MAX,
        });
        Ok(Some(found))
    }

    /// The images of the first rows of a configuration's data. If none of them can be read, assumes an image of 1,024 x 1,024
    /// pixels in each row. Also returns a description of what was found or assumed.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the processor refuses even that.
    pub fn of_first_rows(config: &Config, sight: &Sight, features: Option<Features>) -> Result<(Self, String)> {
        let files = &sight.run_pictures.source.files;
        let vision = VisionArch { features, ..(*sight.arch).clone() };
        let rows = tunesmith_data::first_pictures(config);
        let per_row = rows.iter().map(Vec::len).max().unwrap_or(1).max(1);
        let mut largest: Option<(u64, u64, Self)> = None;
        for names in &rows {
            // Images that are embedded in rows would be written to the cache.
            for name in names.iter().filter(|name| !name.starts_with("data:")) {
                let name = if names.len() > 1 { files.among_others(name.clone()) } else { name.clone() };
                let read = || {
                    let PictureLook { content, width, height } = files.look(&name)?;
                    Ok::<_, Error>((width, height, files.cut(&name, width, height, content)?.0))
                };
                let Ok((width, height, layout)) = read() else { continue };
                let found = Self::of_image(&vision, &layout.tiles, layout.joined.as_ref(), per_row);
                if largest.as_ref().is_none_or(|(.., most)| found.pictures.rows > most.pictures.rows) {
                    largest = Some((u64::from(width), u64::from(height), found));
                }
            }
        }
        let (width, height, found) = if let Some(largest) = largest {
            largest
        } else {
            let (layout, _) = files.cut("", UNKNOWN, UNKNOWN, String::new())?;
            let found = Self::of_image(&vision, &layout.tiles, layout.joined.as_ref(), per_row);
            (u64::from(UNKNOWN), u64::from(UNKNOWN), found)
        };
        let size = format!("{} x {} pixels ({})", grouped(width), grouped(height), count(found.pictures.rows, "token"));
        Ok((found, format!("{} of {size} in each row", count(per_row, "image"))))
    }

    /// `per_row` images in each row, each cut into `tiles`. `joined` says how the tiles' patches are put together, if they are.
    pub fn of_image(vision: &VisionArch, tiles: &[Tile], joined: Option<&Joined>, per_row: usize) -> Self {
        let of_image = tiles.to_vec();
        let tiles: Vec<(usize, usize)> = tiles.iter().map(|tile| (tile.rows, tile.columns)).collect();
        let patches: usize = tiles.iter().map(|(rows, columns)| rows * columns).sum();
        let tokens = patches + tiles.len() * vision.encoder.prefix_tokens();
        let numbers = match vision.features {
            None => patches * vision.encoder.patch_values(),
            Some(features) => vision.features_shape(features, &tiles, joined).iter().product(),
        };
        let mut rows = vision.rows(tiles.iter().copied(), joined);
        let mut pixels = Vec::new();
        if let Some(world) = &vision.world {
            let side = world.image_size;
            let numbers = if vision.features.is_some() { world.latents() } else { 3 * side * side };
            let tiles = vec![Tile { rows: side, columns: side }];
            pixels.push(Pixels { patches: vec![0.0; numbers], tiles, joined: None, world: true });
            rows += world.rows();
        }
        pixels.push(Pixels { patches: vec![0.0; numbers], tiles: of_image, joined: joined.cloned(), world: false });
        // Every patch of an image that is not cut sees every other one, in some block at least.
        let longest = tiles.iter().map(|(rows, columns)| rows * columns).max().unwrap_or(0);
        let longest = (longest + vision.encoder.prefix_tokens()) as u64;
        let head = vision.encoder.head_dim as u64;
        // Decoder blocks that read the image's rows by cross-attention pass a gradient back to them.
        let across = vision.start_token.is_some();
        let trains = across || vision.fixed_features().is_none();
        let scratch = if vision.features.is_some() && !across { 0 } else { encoder_scratch(head, longest, trains) };
        let pictures = Pictures {
            per_row: per_row as u64,
            most: None,
            spacing: rows as u64,
            rows: rows as u64,
            tokens: tokens.max(rows) as u64,
            numbers: pixels.iter().map(|pixels| pixels.patches.len() as u64).sum(),
            scratch,
            size: ImageSize::of(vision, &tiles),
        };
        Self { pictures, pixels: pixels.into_iter().map(Arc::new).collect() }
    }
}
