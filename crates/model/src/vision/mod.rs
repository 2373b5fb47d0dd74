//! Images in a decoder: an encoder and a connector turn what [`tunesmith_vision::Pixels`] holds into rows of the
//! decoder's width. These take the place of rows of the embedding's output. Gradients flow back through them to what is
//! trained.
//!
//! A caller does four things:
//!
//! 1. It describes encoder and connector, and puts the description on the architecture before a model is loaded, or its
//!    trained tensors are listed: `arch.vision = Some(Arc::new(VisionArch { training, ..VisionArch::pair(dir, &pairing, arch.hidden_size)? }))`,
//!    or [`VisionArch::of_model`](tunesmith_config::vision::VisionArch::of_model) for a multimodal checkpoint. From then on [`crate::Model::load`]
//!    loads it too, [`crate::targets::Targets::tensors`] has what is trained of it, and [`crate::Params`] its values.
//! 2. It gives images to training and evaluation in [`tunesmith_data::batch::Batch::images`]: for each its
//!    [`Pixels`] and the rows of the flat stream that show it.
//!    [`VisionArch::rows`](tunesmith_config::vision::VisionArch::rows) says how many rows an image takes.
//! 3. For generation it makes a text's cache by [`crate::Model::cache_with_images`], whose rows count from the text's start, and continues
//!    as without images: the prompt's tokens, with any id in the places of image rows, then those that are generated.
//!    Caches of texts with different images must not be shared, though their tokens may be equal.
//! 4. It saves, freezes and loads by names: those of Transformers 5.
pub(crate) mod connector;
pub(crate) mod encoder;
mod interpolation;
pub(crate) mod latents;
mod lines;
mod splice;
pub(crate) mod stem;
mod streams;
#[cfg(test)]
mod tests;
mod tiles;
pub(crate) mod world;

use crate::grads::Grads;
use crate::params::Params;
use crate::pass::{Drops, Pass};
use crate::weight::Weight;
use connector::Connector;
use encoder::Encoder;
use lines::Lines;
pub(crate) use splice::{Splice, by_sequence};
use std::sync::Arc;
pub(crate) use streams::Trace;
use tiles::Tiles;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::vision::{Features, VisionArch};
use tunesmith_data::batch::ImageRows;
use tunesmith_ops::activation::{Activation, Pool};
use tunesmith_ops::dropout::{Dropout, key};
use tunesmith_ops::embedding;
use tunesmith_vision::Pixels;
use world::World;

/// The key of the connector's dropout, in the place of a module's number, so that it differs from that of every module
/// with an adapter.
const CONNECTOR: u64 = u64::MAX - 1;

/// Encoder and connector, and those of a second stream of images. Of these there are only the parts that come after the
/// features that images are given as ([`VisionArch::features`]).
#[derive(Debug)]
pub(crate) struct Vision {
    pub(crate) arch: VisionArch,
    encoder: Option<Encoder>,
    /// The connector, then those that take the output of inner blocks.
    connectors: Vec<Connector>,
    /// The learned row that ends a line, where images are cut by their own shape: `[width of the decoder]`.
    newline: Option<Weight>,
    /// The second encoder, and its projector.
    world: Option<World>,
    /// The pool of the encoder's activations: batches of patches have another length than batches of tokens.
    pub(crate) pool: Arc<Pool>,
}

/// What decides the dropout of a training pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Training<'a> {
    /// The dropout probability on adapters' inputs.
    pub(crate) dropout: f32,
    pub(crate) seed: u64,
    pub(crate) step: u64,
    /// The row number of the batch's first token within the step.
    pub(crate) first_row: u64,
    /// The rows of the images in the batch, in order.
    pub(crate) rows: &'a [usize],
    pub(crate) images: &'a [ImageRows],
}

/// What forward keeps for backward, for the images of the first encoder.
#[derive(Debug)]
struct OwnTrace {
    tiles: Tiles,
    encoder: Option<encoder::Saved>,
    /// The connectors' inputs, and what they keep.
    connectors: Vec<(Activation, connector::Saved)>,
    lines: Option<Lines>,
}

impl<'a> Training<'a> {
    /// The dropout number of each token of the encoder. It does not depend on the micro-batch that the image is in: it
    /// is the row number of the image's first row in the step, times 2^16, plus the token's number in the image.
    fn encoder_rows(&self, tokens: impl Fn(&Pixels) -> usize) -> Vec<usize> {
        let of = |image: &ImageRows| {
            let first = self.first_number(image);
            first..first + tokens(&image.pixels)
        };
        self.images.iter().flat_map(of).collect()
    }

    fn first_number(&self, image: &ImageRows) -> usize {
        (self.first_row as usize + image.runs.first().map_or(0, |run| run.start)) << 16
    }

    /// The dropout number of each row of the connector, of which the images have `counts`: formed as those of the
    /// encoder's tokens. Empty without dropout.
    pub(crate) fn rows_of_images(&self, counts: &[usize]) -> Vec<usize> {
        if self.dropout == 0.0 {
            return Vec::new();
        }
        self.images
            .iter()
            .map(|image| self.first_number(image))
            .zip(counts)
            .flat_map(|(first, count)| first..first + count)
            .collect()
    }

    fn drops<'r>(&self, rows: &'r [usize]) -> Option<Drops<'r>> {
        let Self { dropout: rate, seed, step, .. } = *self;
        (rate > 0.0).then_some(Drops { rate, seed, step, first_row: 0, picked: rows })
    }

    /// The dropout mask between the connector's modules.
    fn connector(self, rate: f32) -> Option<Dropout<'a>> {
        let key = key(self.seed, self.step, CONNECTOR);
        (rate > 0.0).then_some(Dropout { rate, key, first_row: self.first_row, rows: Some(self.rows) })
    }
}

impl Vision {
    /// Encoder and connector as `arch` describes them.
    pub(crate) const fn new(
        arch: VisionArch,
        encoder: Option<Encoder>,
        connectors: Vec<Connector>,
        newline: Option<Weight>,
        world: Option<World>,
        pool: Arc<Pool>,
    ) -> Self {
        Self { arch, encoder, connectors, newline, world, pool }
    }

    /// Whether anything in it is trained.
    pub(crate) fn trains(&self) -> bool {
        let newline = self.newline.as_ref().is_some_and(Weight::trains);
        newline
            || self.encoder.as_ref().is_some_and(|encoder| encoder.trains)
            || self.connectors.iter().any(Connector::trains)
            || self.world.as_ref().is_some_and(|world| world.projector.trains())
    }

    fn pools(&self) -> impl Iterator<Item = &Arc<Pool>> {
        let encoder = self.world.as_ref().and_then(|world| world.encoder.as_ref());
        std::iter::once(&self.pool).chain(encoder.map(|encoder| &encoder.pool))
    }

    /// Bytes of the second encoder's buffers.
    pub(crate) fn world_bytes(&self) -> u64 {
        self.pools().skip(1).map(|pool| pool.idle_bytes()).sum()
    }

    /// Bytes of idle activation buffers.
    pub(crate) fn idle_bytes(&self) -> u64 {
        self.pools().map(|pool| pool.idle_bytes()).sum()
    }

    /// Frees the idle activation buffers.
    pub(crate) fn release(&self) {
        self.pools().for_each(|pool| pool.release());
    }

    /// Refuses images that the encoder cannot read, and runs of rows that do not fit their image.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`].
    pub(crate) fn check(&self, images: &[ImageRows], tokens: usize) -> Result<()> {
        let mut end = 0;
        for image in images {
            self.check_picture(image)?;
            for run in &image.runs {
                if run.start < end || run.end <= run.start || run.end > tokens {
                    return Err(Error::data("the rows of images overlap, or lie outside of the text"));
                }
                end = run.end;
            }
        }
        Ok(())
    }

    /// Refuses an image that its encoder cannot read, or whose number of rows is wrong.
    fn check_picture(&self, image: &ImageRows) -> Result<()> {
        match (image.pixels.world, &self.world) {
            (false, _) => self.check_own(image)?,
            (true, Some(world)) => world.check(&image.pixels)?,
            (true, None) => return Err(Error::data("an image for a second encoder, which the model does not have")),
        }
        let (rows, found) = (self.rows(&image.pixels), image.rows());
        if rows != found {
            return Err(Error::data(format!("rows of an image: {rows}, tokens that stand for it: {found}"))
                .hint("the processor's files and config.json must belong to one model"));
        }
        let in_grid = self.arch.mrope.is_some() && !image.pixels.world;
        if in_grid && (image.pixels.tiles.len() != 1 || image.runs.len() != 1) {
            return Err(Error::data("an image of several tiles or runs, whose rows have no place in one grid"));
        }
        Ok(())
    }

    fn check_own(&self, image: &ImageRows) -> Result<()> {
        let tiles = &image.pixels.tiles;
        let patches: usize = tiles.iter().map(|tile| tile.rows * tile.columns).sum();
        let wanted = self.numbers_of(&image.pixels);
        if patches == 0 || image.pixels.patches.len() != wanted {
            let found = image.pixels.patches.len();
            return Err(Error::data(format!("an image of {patches} patches has {found} numbers, expected {wanted}")));
        }
        tiles.iter().try_for_each(|tile| self.arch.check_tile(tile.rows, tile.columns))?;
        if let Some(joined) = &image.pixels.joined {
            let [down, across] = joined.tiles;
            let [high, wide] = joined.tile;
            let equal = tiles.iter().all(|tile| [tile.rows, tile.columns] == [high, wide]);
            let inside = joined.rows.end <= down * high && joined.columns.end <= across * wide;
            if !equal || !inside || tiles.len() != down * across + 1 || self.arch.any_res.is_none() {
                return Err(Error::data("an image whose tiles are not those of its grid"));
            }
        } else if self.arch.any_res.is_some() && tiles.len() != 1 {
            return Err(Error::data("an image of several tiles without their grid"));
        }
        Ok(())
    }

    /// How many numbers an image has: those of its patches, or of its precomputed features.
    fn numbers_of(&self, pixels: &Pixels) -> usize {
        let tiles: Vec<_> = pixels.tiles.iter().map(|tile| (tile.rows, tile.columns)).collect();
        match self.arch.features {
            None => {
                tiles.iter().map(|(rows, columns)| rows * columns).sum::<usize>() * self.arch.encoder.patch_values()
            }
            Some(features) => self.arch.features_shape(features, &tiles, pixels.joined.as_ref()).iter().product(),
        }
    }

    /// How many rows of the decoder an image takes.
    pub(crate) fn rows(&self, pixels: &Pixels) -> usize {
        if let Some(world) = self.world.as_ref().filter(|_| pixels.world) {
            return world.spec.rows();
        }
        self.arch.rows(pixels.tiles.iter().map(|tile| (tile.rows, tile.columns)), pixels.joined.as_ref())
    }

    /// How many rows the connector gives for an image.
    pub(crate) fn connector_rows(&self, pixels: &Pixels) -> usize {
        if pixels.world {
            return self.rows(pixels);
        }
        self.arch.connector_rows(pixels.tiles.iter().map(|tile| (tile.rows, tile.columns)), pixels.joined.as_ref())
    }

    /// The grid of an image's rows in the decoder, as rows and columns. `None` for an image of a second encoder, whose
    /// positions are counted as those of text.
    pub(crate) fn sides(&self, pixels: &Pixels) -> Option<[usize; 2]> {
        let side = self.arch.connector.side();
        let first = pixels.tiles.first().filter(|_| !pixels.world);
        first.map(|tile| [tile.rows / side, tile.columns / side])
    }

    /// The rows of the first encoder's images, `[rows, hidden of the decoder]` for each connector, and what backward
    /// needs if there is `training`.
    ///
    /// # Errors
    /// As [`crate::blocks::Blocks::forward`].
    fn forward_own(
        &self,
        pass: &Pass<'_>,
        pictures: &[&Pixels],
        training: Option<Training<'_>>,
    ) -> Result<(Vec<Activation>, OwnTrace)> {
        let tiles = Tiles::of(pictures.iter().copied());
        let prefix = self.arch.encoder.prefix_tokens();
        // Where lines end with a row, a picture may have more rows than patches.
        let rows: usize = pictures.iter().map(|pixels| self.connector_rows(pixels)).sum();
        self.pool.reserve(tiles.tokens(prefix).max(rows));
        let numbers = self.numbers(training);
        let pass = self.pass(pass, training, &numbers);
        let width = match self.arch.features {
            None => self.arch.encoder.patch_values(),
            Some(Features::Encoder) => self.arch.connector.encoder_size,
            Some(Features::Connector) => self.arch.connector.decoder_size,
        };
        // Features hold rows for each connector.
        let parts = if self.arch.features.is_some() { self.arch.connectors().count() } else { 1 };
        let inputs = (0..parts).map(|part| {
            let of = |pixels: &Pixels| {
                let count = pixels.patches.len() / parts;
                part * count..(part + 1) * count
            };
            // As the class does it, after the image processor.
            let centered = |value: &f32| 2.0 * value - 1.0;
            let centers = self.arch.encoder.centered && self.arch.features.is_none();
            match pictures {
                _ if centers => {
                    let all = pictures.iter().flat_map(|pixels| &pixels.patches[of(pixels)]);
                    Activation::from_rows(&self.pool, &all.map(centered).collect::<Vec<f32>>(), width)
                }
                [one] => Activation::from_rows(&self.pool, &one.patches[of(one)], width),
                several => {
                    let all = several.iter().flat_map(|pixels| &pixels.patches[of(pixels)]);
                    Activation::from_rows(&self.pool, &all.copied().collect::<Vec<f32>>(), width)
                }
            }
        });
        let mut inputs: Vec<Activation> = inputs.collect();
        let (outputs, encoder) = match (&self.encoder, inputs.pop()) {
            (Some(encoder), Some(x)) => {
                let (mut outputs, saved) = encoder.forward(&pass, &tiles, x, training.is_some())?;
                // The last output is the first connector's.
                outputs.rotate_right(1);
                (outputs, saved)
            }
            (_, last) => {
                inputs.extend(last);
                (inputs, None)
            }
        };
        if self.connectors.is_empty() {
            return Ok((outputs, OwnTrace { tiles, encoder, connectors: Vec::new(), lines: None }));
        }
        let mut features = Vec::with_capacity(outputs.len());
        let mut connectors = Vec::with_capacity(outputs.len());
        for ((connector, spec), x) in self.connectors.iter().zip(self.arch.connectors()).zip(outputs) {
            let dropped = training.and_then(|training| training.connector(spec.dropout() as f32));
            let (y, saved) = connector.forward(&pass, &tiles, &x, dropped);
            features.push(y);
            connectors.push((x, saved));
        }
        let lines = self.newline.as_ref().map(|_| Lines::of(pictures.iter().copied()));
        if let (Some(lines), Some(newline)) = (&lines, &self.newline) {
            let values = newline.view(pass.values);
            let row = embedding::forward(&self.pool, values.store(), self.arch.connector.decoder_size, &[0], 1.0);
            for part in &mut features {
                let mut ended = lines.forward(part);
                lines.end(&mut ended, &row);
                *part = ended;
            }
        }
        Ok((features, OwnTrace { tiles, encoder, connectors, lines }))
    }

    /// Adds the gradients of what is trained, given those of each connector's rows `[rows, hidden of the decoder]`.
    ///
    /// # Errors
    /// Those of the collector that takes the gradients ([`crate::grads::Collector`]).
    fn backward_own(
        &self,
        pass: &Pass<'_>,
        trace: OwnTrace,
        training: Training<'_>,
        dy: &[Activation],
        params: &Params,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        let OwnTrace { tiles, encoder, connectors, lines } = trace;
        let numbers = self.numbers(Some(training));
        let pass = self.pass(pass, Some(training), &numbers);
        let mut d_outputs = Vec::with_capacity(dy.len());
        let each = self.connectors.iter().zip(self.arch.connectors());
        let joined: Vec<Activation>;
        let dy = if let (Some(lines), Some(newline)) = (&lines, &self.newline) {
            for part in dy.iter().filter(|_| newline.trains()) {
                let ends = part.gather(lines.newlines());
                newline.add_embedding_gradient(&ends, &vec![0; ends.tokens()], 1.0, None, grads);
            }
            joined = dy.iter().map(|dy| lines.backward(dy)).collect();
            joined.as_slice()
        } else {
            dy
        };
        for (((connector, spec), (x, saved)), dy) in each.zip(connectors).zip(dy) {
            let saved = (saved, training.connector(spec.dropout() as f32));
            d_outputs.extend(connector.backward(&pass, &tiles, &x, saved, dy, encoder.is_some(), grads));
        }
        let (Some(saved), Some(encoder)) = (encoder, &self.encoder) else { return Ok(()) };
        d_outputs.rotate_left(1);
        encoder.backward(&pass, &tiles, saved, d_outputs, params, grads)
    }

    fn numbers(&self, training: Option<Training<'_>>) -> Vec<usize> {
        let prefix = self.arch.encoder.prefix_tokens();
        let tokens = |pixels: &Pixels| Tiles::of([pixels]).tokens(prefix);
        let drops = training.filter(|training| training.dropout > 0.0);
        drops.map_or_else(Vec::new, |training| training.encoder_rows(tokens))
    }

    fn pass<'a>(&'a self, pass: &Pass<'a>, training: Option<Training<'_>>, numbers: &'a [usize]) -> Pass<'a> {
        let dropout = training.and_then(|training| training.drops(numbers));
        Pass { values: pass.values, pool: &self.pool, balance: None, dropout }
    }
}
