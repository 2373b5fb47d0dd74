//! The second image encoder (an autoencoder's, frozen) and its trained projector (`TheWorld`).
use super::connector::{self, Connector};
use super::latents::LatentEncoder;
use super::tiles::Tiles;
use crate::grads::Grads;
use crate::pass::Pass;
use std::sync::Arc;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::vision::World as Spec;
use tunesmith_ops::activation::Activation;
use tunesmith_vision::Pixels;

/// The second encoder, and its projector.
#[derive(Debug)]
pub struct World {
    pub spec: Arc<Spec>,
    /// `None` where images come as latents that were computed before.
    pub encoder: Option<LatentEncoder>,
    pub projector: Connector,
}

/// What forward keeps for backward.
#[derive(Debug)]
pub struct Saved {
    x: Activation,
    projector: connector::Saved,
}

impl World {
    /// How many numbers an image has: those of its pixels, or of its precomputed latents.
    pub fn numbers(&self) -> usize {
        match self.encoder {
            Some(_) => 3 * self.spec.image_size.pow(2),
            None => self.spec.latents(),
        }
    }

    /// Refuses pixels that are not those of a square of the right size.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`].
    pub fn check(&self, pixels: &Pixels) -> Result<()> {
        let side = self.spec.image_size;
        let [tile] = pixels.tiles.as_slice() else { return Err(Error::data("a second image of several tiles")) };
        if [tile.rows, tile.columns] != [side; 2] || pixels.patches.len() != self.numbers() {
            let (rows, columns) = (tile.rows, tile.columns);
            return Err(Error::data(format!(
                "an image of {rows} x {columns} pixels for the second encoder, expected {side} x {side}"
            )));
        }
        Ok(())
    }

    /// The latents of an image on the host, `[places, latent]`.
    pub fn latents(&self, pass: &Pass<'_>, pixels: &Pixels) -> Vec<f32> {
        match &self.encoder {
            Some(encoder) => encoder.forward(pass.values, pixels).to_rows(),
            None => pixels.patches.clone(),
        }
    }

    /// The rows of the images, `[rows, hidden of the decoder]`, and what backward needs.
    pub fn forward(&self, pass: &Pass<'_>, pictures: &[&Pixels]) -> (Activation, Saved) {
        let (latent, places) = (self.spec.encoder.latent, self.spec.places());
        let mut rows = Vec::with_capacity(pictures.len() * self.spec.latents());
        for pixels in pictures {
            let latents = self.latents(pass, pixels);
            if self.spec.channels {
                rows.extend(
                    (0..latent)
                        .flat_map(|channel| (0..places).map(move |place| place * latent + channel))
                        .map(|at| latents[at]),
                );
            } else {
                rows.extend(latents);
            }
        }
        let x = Activation::from_rows(pass.pool, &rows, self.spec.projector.encoder_size);
        let (y, projector) = self.projector.forward(pass, &Tiles::of([]), &x, None);
        (y, Saved { x, projector })
    }

    /// Adds the gradients of the projector, given that of its rows.
    pub fn backward(&self, pass: &Pass<'_>, saved: Saved, dy: &Activation, grads: &mut Grads<'_>) {
        let Saved { x, projector } = saved;
        self.projector.backward(pass, &Tiles::of([]), &x, (projector, None), dy, false, grads);
    }
}
