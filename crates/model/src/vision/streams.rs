//! Images for two encoders in one pass. The images of each encoder go through it together, and all rows come out in the
//! order of the images.
use super::world::{self, World};
use super::{OwnTrace, Training, Vision};
use crate::grads::Grads;
use crate::params::Params;
use crate::pass::Pass;
use tunesmith_base::error::Result;
use tunesmith_config::vision::Features;
use tunesmith_data::batch::ImageRows;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::elementwise;
use tunesmith_vision::Pixels;

/// What forward keeps for backward.
#[derive(Debug)]
pub(crate) struct Trace {
    own: Option<OwnTrace>,
    world: Option<(world::Saved, Places)>,
}

/// Which of all image rows belong to which encoder, rising.
#[derive(Debug)]
struct Places {
    own: Vec<usize>,
    world: Vec<usize>,
}

/// What a training pass has for the first encoder: its rows and its images.
struct OwnRows {
    rows: Vec<usize>,
    images: Vec<ImageRows>,
}

impl Places {
    fn of(vision: &Vision, pictures: &[&Pixels]) -> Self {
        let (mut places, mut end) = (Self { own: Vec::new(), world: Vec::new() }, 0);
        for pixels in pictures {
            let rows = vision.rows(pixels);
            let own = if pixels.world { &mut places.world } else { &mut places.own };
            own.extend(end..end + rows);
            end += rows;
        }
        places
    }

    fn count(&self) -> usize {
        self.own.len() + self.world.len()
    }

    /// `training`, reduced to the images of the first encoder.
    fn own_of(&self, training: Training<'_>) -> OwnRows {
        let images = training.images.iter().filter(|image| !image.pixels.world);
        OwnRows { rows: self.own.iter().map(|&row| training.rows[row]).collect(), images: images.cloned().collect() }
    }
}

impl OwnRows {
    fn of<'a>(&'a self, training: Training<'a>) -> Training<'a> {
        Training { rows: &self.rows, images: &self.images, ..training }
    }
}

impl Vision {
    /// The rows of the images, `[rows, hidden of the decoder]` for each connector, and what backward needs if there is
    /// `training`.
    ///
    /// # Errors
    /// As [`crate::blocks::Blocks::forward`].
    pub(crate) fn forward(
        &self,
        pass: &Pass<'_>,
        pictures: &[&Pixels],
        training: Option<Training<'_>>,
    ) -> Result<(Vec<Activation>, Trace)> {
        let Some(world) = self.world.as_ref().filter(|_| pictures.iter().any(|pixels| pixels.world)) else {
            let (rows, own) = self.forward_own(pass, pictures, training)?;
            return Ok((rows, Trace { own: Some(own), world: None }));
        };
        let places = Places::of(self, pictures);
        let (second, first): (Vec<&Pixels>, Vec<&Pixels>) = pictures.iter().copied().partition(|pixels| pixels.world);
        self.pool.reserve(places.count());
        let (y, saved) = world.forward(&self.pass(pass, None, &[]), &second);
        // After the first blocks of the decoder, nothing is added to the rows of a second encoder.
        let mut rows = vec![y.scatter(&places.world, places.count())];
        let mut own = None;
        if !first.is_empty() {
            let of_own = training.map(|training| places.own_of(training));
            let training = training.zip(of_own.as_ref()).map(|(training, own)| own.of(training));
            let (features, trace) = self.forward_own(pass, &first, training)?;
            let mut features = features.iter().map(|features| features.scatter(&places.own, places.count()));
            features.by_ref().take(1).for_each(|first| elementwise::add(&mut rows[0], &first));
            rows.extend(features);
            own = Some(trace);
        }
        while rows.len() <= self.arch.deepstack.len() {
            let mut nothing = rows[0].like();
            nothing.zero();
            rows.push(nothing);
        }
        Ok((rows, Trace { own, world: Some((saved, places)) }))
    }

    /// The features of an image, on the host: what a cache stores. For an image of the second encoder they are its
    /// latents.
    ///
    /// # Errors
    /// As [`Vision::forward`].
    pub(crate) fn features(&self, pass: &Pass<'_>, pixels: &Pixels, features: Features) -> Result<Vec<f32>> {
        if let Some(world) = self.world.as_ref().filter(|_| pixels.world) {
            world.check(pixels)?;
            return Ok(world.latents(pass, pixels));
        }
        let (y, trace) = self.forward_own(pass, &[pixels], None)?;
        Ok(match features {
            Features::Encoder => trace.connectors.iter().flat_map(|(x, _)| x.to_rows()).collect(),
            Features::Connector => y.iter().flat_map(Activation::to_rows).collect(),
        })
    }

    /// Adds the gradients of what is trained, given those of each connector's rows `[rows, hidden of the decoder]`.
    ///
    /// # Errors
    /// Those of the collector that takes the gradients ([`crate::grads::Collector`]).
    pub(crate) fn backward(
        &self,
        pass: &Pass<'_>,
        trace: Trace,
        training: Training<'_>,
        dy: &[Activation],
        params: &Params,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        let (Some((saved, places)), Some(world), [rows, ..]) = (trace.world, &self.world, dy) else {
            return trace.own.map_or(Ok(()), |own| self.backward_own(pass, own, training, dy, params, grads));
        };
        if let Some(trace) = trace.own {
            let own = places.own_of(training);
            let dy: Vec<Activation> = dy.iter().map(|rows| rows.gather(&places.own)).collect();
            self.backward_own(pass, trace, own.of(training), &dy, params, grads)?;
        }
        World::backward(world, &self.pass(pass, None, &[]), saved, &rows.gather(&places.world), grads);
        Ok(())
    }
}
