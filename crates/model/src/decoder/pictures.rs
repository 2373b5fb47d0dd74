//! Images in a pass: their rows replace the embedding's, and a mask says which of them see each other.
use super::Model;
use crate::across::Across;
use crate::blocks::Added;
use crate::grads::Grads;
use crate::params::Params;
use crate::pass::{Layout, Pass, everywhere, in_windows, within_windows};
use crate::positions::{Positions, Shown};
use crate::vision::{Splice, Trace, Training, by_sequence};
use std::borrow::Cow;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use tunesmith_base::error::Result;
use tunesmith_config::vision::{Bidirectional, VisionArch};
use tunesmith_data::batch::{Batch, IGNORE, ImageRows};
use tunesmith_ops::activation::Activation;
use tunesmith_ops::spans::Window;
use tunesmith_vision::{Pixels, Tile};

/// The images of a pass: the rows of each connector before they are in the stream, and what their backward needs.
pub(super) struct Seen {
    features: Vec<Activation>,
    trace: Trace,
    /// The number of rows of each image.
    counts: Vec<usize>,
}

/// The stream with the rows of images in it, and what is added to them after the first blocks.
pub(super) type Spliced = (Activation, Option<Added>);

/// The stream before the first block, and the images of the pass.
pub(super) struct Placed {
    pub(super) x: Activation,
    /// What is added to the stream after the first blocks.
    pub(super) added: Option<Added>,
    /// The image features for cross-attention, where the model has it.
    pub(super) across: Option<Across>,
    /// What backward through encoder and connector needs, if anything of them is trained.
    pub(super) trace: Option<Trace>,
}

/// The prefix of each sequence: the tokens before its first label, as positions in it; all tokens of a sequence without
/// labels.
fn prefixes(batch: &Batch) -> Vec<Vec<Range<usize>>> {
    let of = |ends: &[usize]| {
        let targets = batch.targets.get(ends[0]..ends[1]).unwrap_or_default();
        let first = targets.iter().position(|&target| target != IGNORE);
        std::iter::once(0..first.map_or(ends[1] - ends[0], |first| first + 1)).collect()
    };
    batch.cu_seqlens.windows(2).map(of).collect()
}

/// Puts the rows of images into the stream: the first of `features` now, the others are added after later blocks.
pub(super) fn put(splice: &Splice, x: &Activation, mut features: Vec<Activation>) -> Spliced {
    let later = features.split_off(1);
    let x = splice.put(x, &features[0]);
    let to_pool = |rows: Activation| rows.gather_to(x.pool(), &(0..rows.tokens()).collect::<Vec<_>>());
    let features: Vec<Activation> = later.into_iter().map(to_pool).collect();
    let added =
        (!features.is_empty()).then(|| Added { rows: splice.images.clone(), features, gradients: RefCell::default() });
    (x, added)
}

impl Model {
    /// An image with these pixel values, of the size for which the encoder has positions. Its rows stand at the first
    /// token of a text. For a model whose decoder reads an image by cross-attention; empty without an encoder.
    pub fn image_of(&self, number: impl Fn(usize) -> f32) -> Vec<ImageRows> {
        let of = |vision: &Arc<VisionArch>| {
            let [rows, columns] = vision.encoder.grid;
            let numbers = rows * columns * vision.encoder.patch_values();
            let pixels = Pixels {
                patches: (0..numbers).map(&number).collect(),
                tiles: vec![Tile { rows, columns }],
                ..Pixels::default()
            };
            ImageRows { runs: std::iter::once(0..1).collect(), pixels: Arc::new(pixels) }
        };
        self.arch.vision.iter().map(of).collect()
    }

    /// The windows of the blocks, each once.
    fn windows(&self) -> Vec<Option<Window>> {
        let mut windows: Vec<Option<Window>> = Vec::new();
        for attention in self.blocks.attentions() {
            if !windows.contains(&attention.how.window) {
                windows.push(attention.how.window);
            }
        }
        windows
    }

    /// Whether the prompt of a text is read in both directions (prefix attention).
    pub(super) fn has_prefix(&self) -> bool {
        self.vision.as_ref().is_some_and(|vision| vision.arch.prefix)
    }

    /// Whether the rows of an image see those after them.
    pub(super) fn sees_both_ways(&self) -> bool {
        self.vision.as_ref().is_some_and(|vision| vision.arch.bidirectional != Bidirectional::Never)
    }

    /// The layout in which the rows of an image see each other, if the model is such. `images` has the runs of rows of
    /// each sequence.
    pub(super) fn showing(&self, layout: Layout, images: &[Vec<Range<usize>>]) -> Layout {
        let bidirectional = self.vision.as_ref().map_or(Bidirectional::Never, |vision| vision.arch.bidirectional);
        match bidirectional {
            Bidirectional::Windowed => layout.showing(images, &self.windows(), within_windows),
            Bidirectional::Always => layout.showing(images, &self.windows(), in_windows),
            Bidirectional::Never if self.has_prefix() => layout.showing(images, &self.windows(), everywhere),
            Bidirectional::Never => layout,
        }
    }

    /// Boundaries and rotary tables of a batch, whose head looks at the tokens `rows` (rising).
    pub(super) fn layout(&self, batch: &Batch, rows: &[usize]) -> Layout {
        let positions = self.positions(batch);
        let layout = Layout::new(&self.pool, &batch.cu_seqlens, rows, &self.arch.ropes, positions.as_ref());
        let layout = layout.scaling(self.arch.query_scaling);
        if self.has_prefix() {
            return layout.showing(&prefixes(batch), &self.windows(), everywhere);
        }
        self.showing(layout, &by_sequence(&batch.images, &batch.cu_seqlens))
    }

    /// The positions of a batch's tokens in a model in which images change them (`mrope`); else `None`.
    fn positions(&self, batch: &Batch) -> Option<Positions> {
        let vision = self.vision.as_ref().filter(|_| !batch.images.is_empty())?;
        let mut positions = Positions::new(vision.arch.mrope.as_ref()?);
        let sides = batch.images.iter().map(|image| Some((&image.runs[0], vision.sides(&image.pixels)?)));
        let sides: Vec<_> = sides.flatten().collect();
        for ends in batch.cu_seqlens.windows(2) {
            let own = sides.iter().filter(|(run, _)| ends[0] <= run.start && run.end <= ends[1]);
            let own: Vec<Shown> = own.map(|(run, sides)| (run.start - ends[0]..run.end - ends[0], *sides)).collect();
            positions.extend(&own, 0..ends[1] - ends[0]);
        }
        Some(positions)
    }

    /// The embedding's output with the rows of images in it, for evaluation.
    pub(super) fn embed_batch(&self, pass: &Pass<'_>, batch: &Batch) -> Result<Placed> {
        let x = self.embed(pass, &batch.tokens)?;
        let seen = self.encoded(pass, &batch.images, None)?;
        let Placed { mut x, added, across, .. } = self.place(x, seen, &self.splice(batch), None);
        if let (Some(positions), Some(ids)) = (&self.positions, self.position_ids(batch)) {
            positions.add(pass, &mut x, &ids);
        }
        Ok(Placed { x, added, across, trace: None })
    }

    /// The rows of all images `[rows, hidden]`, image after image; `None` if there is none.
    fn encoded(&self, pass: &Pass<'_>, images: &[ImageRows], training: Option<Training<'_>>) -> Result<Option<Seen>> {
        let Some(vision) = self.vision.as_ref().filter(|_| !images.is_empty()) else { return Ok(None) };
        let pictures: Vec<&Pixels> = images.iter().map(|image| &*image.pixels).collect();
        let (features, trace) = vision.forward(pass, &pictures, training)?;
        let counts = pictures.iter().map(|pixels| vision.connector_rows(pixels)).collect();
        Ok(Some(Seen { features, trace, counts }))
    }

    /// The rows of one image `[rows, hidden]` on the host, for each connector.
    pub(super) fn encode(&self, image: &ImageRows) -> Result<Vec<Vec<f32>>> {
        let (pass, values) = (self.evaluation(), self.params.values());
        self.forward(|| {
            let seen =
                self.shards.at(0, values, &pass, |pass| self.encoded(pass, std::slice::from_ref(image), None))??;
            Ok(seen.iter().flat_map(|seen| &seen.features).map(Activation::to_rows).collect())
        })
    }

    /// The embedding's output, and the rows of the batch's images, which [`Model::place`] then puts into it.
    pub(super) fn embed_training(
        &self,
        pass: &Pass<'_>,
        batch: &Batch,
        training: Training<'_>,
    ) -> Result<(Activation, Option<Seen>)> {
        let x = self.embed(pass, &batch.tokens)?;
        Ok((x, self.encoded(pass, &batch.images, Some(training))?))
    }

    /// Which rows of a batch's stream belong to images.
    pub(super) fn splice(&self, batch: &Batch) -> Splice {
        let shown = if self.arch.reads_images_across() { &[] } else { batch.images.as_slice() };
        Splice::new(shown, batch.tokens.len())
    }

    /// The tokens whose per-layer embeddings the rows of the stream have. Rows of images have the embeddings of a token
    /// that the model defines.
    pub(super) fn per_layer_tokens<'t>(&self, tokens: &'t [u32], splice: &Splice) -> Cow<'t, [u32]> {
        let token = self.vision.as_ref().and_then(|vision| vision.arch.per_layer_token);
        let Some(token) = token.filter(|_| !splice.images.is_empty()) else { return tokens.into() };
        let mut tokens = tokens.to_vec();
        splice.images.iter().for_each(|&row| tokens[row] = token);
        tokens.into()
    }

    /// Puts the rows of images into the stream, or beside it for cross-attention. `training` is that of a training
    /// pass.
    pub(super) fn place(
        &self,
        x: Activation,
        seen: Option<Seen>,
        splice: &Splice,
        training: Option<Training<'_>>,
    ) -> Placed {
        let Some((Seen { mut features, trace, counts }, vision)) = seen.zip(self.vision.as_ref()) else {
            return Placed { x, added: None, across: None, trace: None };
        };
        let trace = (training.is_some() && vision.trains()).then_some(trace);
        if !self.arch.reads_images_across() {
            let (x, added) = put(splice, &x, features);
            return Placed { x, added, across: None, trace };
        }
        let numbers = training.map_or_else(Vec::new, |training| training.rows_of_images(&counts));
        let across = Across::new(features.swap_remove(0), &counts, numbers, trace.is_some());
        Placed { x, added: None, across: Some(across), trace }
    }

    /// Adds the gradients of encoder and connector, given that of the stream.
    pub(super) fn pictures_backward(
        &self,
        pass: &Pass<'_>,
        trace: Option<Trace>,
        training: Training<'_>,
        (dx, added, across): (&Activation, Option<Added>, Option<Across>),
        params: &Params,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        match (&self.vision, trace) {
            (Some(vision), Some(trace)) if across.is_some() => {
                let dy: Vec<Activation> = across.and_then(Across::into_gradient).into_iter().collect();
                vision.backward(pass, trace, training, &dy, params, grads)
            }
            (Some(vision), Some(trace)) => {
                let mut dy = vec![dx.gather_to(&vision.pool, training.rows)];
                let added = added.map(|added| added.gradients.into_inner()).unwrap_or_default();
                let to_pool = |rows: Activation| rows.gather_to(&vision.pool, &(0..rows.tokens()).collect::<Vec<_>>());
                dy.extend(added.into_iter().rev().map(to_pool));
                vision.backward(pass, trace, training, &dy, params, grads)
            }
            _ => Ok(()),
        }
    }
}
