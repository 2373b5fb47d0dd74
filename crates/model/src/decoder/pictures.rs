//! Pictures in a pass: their rows in the place of the embedding's, and who sees whom among them.
use super::Model;
use crate::grads::Grads;
use crate::params::Params;
use crate::pass::{Layout, Pass};
use crate::vision::{Splice, Trace, Training, by_sequence};
use std::ops::Range;
use tunesmith_base::error::Result;
use tunesmith_data::batch::{Batch, ImageRows};
use tunesmith_ops::activation::Activation;
use tunesmith_ops::spans::Window;
use tunesmith_vision::Pixels;

/// The pictures of a training pass: their rows before they are in the stream, and what their backward needs.
pub(super) struct Seen {
    features: Activation,
    trace: Trace,
}

impl Model {
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

    /// Whether a picture's rows see those after them.
    pub(super) fn sees_both_ways(&self) -> bool {
        self.vision.as_ref().is_some_and(|vision| vision.arch.bidirectional)
    }

    /// A layout whose pictures' rows see each other, where the model is such. `images` has the runs of each sequence.
    pub(super) fn showing(&self, layout: Layout, images: &[Vec<Range<usize>>]) -> Layout {
        if self.sees_both_ways() { layout.showing(images, &self.windows()) } else { layout }
    }

    /// Boundaries and rotary tables of a batch, whose head looks at the tokens `rows` (rising).
    pub(super) fn layout(&self, batch: &Batch, rows: &[usize]) -> Layout {
        let layout = Layout::new(&self.pool, &batch.cu_seqlens, rows, &self.arch.ropes);
        self.showing(layout, &by_sequence(&batch.images, &batch.cu_seqlens))
    }

    /// The embedding's output with pictures' rows in it, for evaluation.
    pub(super) fn embed_batch(&self, pass: &Pass<'_>, batch: &Batch) -> Result<Activation> {
        let x = self.embed(pass, &batch.tokens);
        match self.encoded(pass, &batch.images, None)? {
            Some(seen) => Ok(Splice::new(&batch.images, batch.tokens.len()).put(&x, &seen.features)),
            None => Ok(x),
        }
    }

    /// The rows of pictures `[rows, hidden]`, one picture after the other; nothing where there is none.
    fn encoded(&self, pass: &Pass<'_>, images: &[ImageRows], training: Option<Training<'_>>) -> Result<Option<Seen>> {
        let Some(vision) = self.vision.as_ref().filter(|_| !images.is_empty()) else { return Ok(None) };
        let pictures: Vec<&Pixels> = images.iter().map(|image| &*image.pixels).collect();
        let (features, trace) = vision.forward(pass, &pictures, training)?;
        Ok(Some(Seen { features, trace }))
    }

    /// The rows of one picture `[rows, hidden]` on the host.
    pub(super) fn encode(&self, image: &ImageRows) -> Result<Vec<f32>> {
        let (pass, values) = (self.evaluation(), self.params.values());
        self.forward(|| {
            let seen =
                self.shards.at(0, values, &pass, |pass| self.encoded(pass, std::slice::from_ref(image), None))??;
            Ok(seen.map(|seen| seen.features.to_rows()).unwrap_or_default())
        })
    }

    /// The embedding's output, and the rows of the batch's pictures, which [`Model::place`] puts into it.
    pub(super) fn embed_training(
        &self,
        pass: &Pass<'_>,
        batch: &Batch,
        training: Training<'_>,
    ) -> Result<(Activation, Option<Seen>)> {
        let x = self.embed(pass, &batch.tokens);
        Ok((x, self.encoded(pass, &batch.images, Some(training))?))
    }

    /// Puts the rows of pictures into the stream; gives what their backward needs, where something is trained.
    pub(super) fn place(&self, x: Activation, seen: Option<Seen>, splice: &Splice) -> (Activation, Option<Trace>) {
        let Some(Seen { features, trace }) = seen else { return (x, None) };
        let trains = self.vision.as_ref().is_some_and(super::super::vision::Vision::trains);
        (splice.put(&x, &features), trains.then_some(trace))
    }

    /// Adds the gradients of encoder and connector, given that of the stream.
    pub(super) fn pictures_backward(
        &self,
        pass: &Pass<'_>,
        trace: Option<Trace>,
        training: Training<'_>,
        dx: &Activation,
        params: &Params,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        match (&self.vision, trace) {
            (Some(vision), Some(trace)) => {
                let dy = dx.gather_to(&vision.pool, training.rows);
                vision.backward(pass, trace, training, &dy, params, grads)
            }
            _ => Ok(()),
        }
    }
}
