//! A second encoder of pictures beside the first: that of a variational autoencoder, whose latents become rows behind a text's first
//! token (`TheWorld`). The encoder is frozen; the projector behind it is trained.
use std::path::{Path, PathBuf};

use super::connector::{Connector, ConnectorKind};
use super::encoder::Pointwise;
use super::latents::LatentEncoder;
use super::processing::{Backend, Processing, Resample, Size};
use crate::enums::{ProjectionArchitecture, WorldProjection};
use tunesmith_base::error::{Error, Result};

/// The tokens before and behind the rows.
pub const WORLD_TOKENS: [&str; 2] = ["<start_of_world>", "<end_of_world>"];
/// The module of the projector.
const PROJECTOR: &str = "model.world_projector.";

/// The second encoder, and its projector.
#[derive(Debug, Clone, PartialEq)]
pub struct World {
    /// From a picture to latents.
    pub encoder: LatentEncoder,
    /// Whether each channel of the latents is a row, and not each place.
    pub channels: bool,
    /// From such a row to one of the decoder's. It has no weights in any checkpoint.
    pub projector: Connector,
    /// Whether GELU follows the projector.
    pub final_gelu: bool,
    /// The side that each picture gets, whatever its shape.
    pub image_size: usize,
    /// The tokens before and behind the rows ([`WORLD_TOKENS`]).
    pub tokens: [u32; 2],
    /// The encoder's folder.
    pub folder: PathBuf,
}

/// How latents become rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorldSettings {
    /// What a row is.
    pub projection: WorldProjection,
    /// What the projector is.
    pub architecture: ProjectionArchitecture,
    /// The side that each picture gets.
    pub image_size: usize,
}

impl World {
    /// The encoder in `folder`, or in its folder `vae`, before a decoder of that width.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the encoder is not known here; [`tunesmith_base::Kind::Config`]: a size that it does not divide.
    pub fn open(folder: &Path, settings: WorldSettings, tokens: [u32; 2], decoder_size: usize) -> Result<Self> {
        let inner = folder.join("vae");
        let folder = if inner.join("config.json").is_file() { inner } else { folder.to_owned() };
        let encoder = LatentEncoder::open(&folder)?;
        let WorldSettings { projection, architecture, image_size } = settings;
        if !image_size.is_multiple_of(encoder.shrink) {
            let shrink = encoder.shrink;
            return Err(Error::config(format!(
                "vision.world.image_size: {image_size}, expected a multiple of {shrink}: the encoder makes one latent of {shrink} pixels"
            )));
        }
        let channels = projection == WorldProjection::Channel;
        let places = (image_size / encoder.shrink).pow(2);
        let kind = match architecture {
            ProjectionArchitecture::Linear => ConnectorKind::Linear { name: format!("{PROJECTOR}linear"), bias: true },
            ProjectionArchitecture::Mlp | ProjectionArchitecture::MlpNoFinalGelu => ConnectorKind::Mlp {
                names: ["linear_1", "linear_2"].map(|name| format!("{PROJECTOR}{name}")),
                hidden_size: decoder_size,
                activation: Pointwise::Gelu,
                bias: true,
                dropout: 0.0,
            },
        };
        let encoder_size = if channels { places } else { encoder.latent };
        let projector = Connector { encoder_size, decoder_size, kind, stored: false };
        let final_gelu = architecture == ProjectionArchitecture::Mlp;
        Ok(Self { encoder, channels, projector, final_gelu, image_size, tokens, folder })
    }

    /// Places of the latents: of one feature each.
    pub const fn places(&self) -> usize {
        (self.image_size / self.encoder.shrink).pow(2)
    }

    /// Rows of the decoder that a picture takes, without the tokens around them.
    pub const fn rows(&self) -> usize {
        if self.channels { self.encoder.latent } else { self.places() }
    }

    /// The numbers of a picture's latents.
    pub const fn latents(&self) -> usize {
        self.places() * self.encoder.latent
    }

    /// How pictures are prepared: resized to a square, with values from -1 to 1.
    pub fn processing(&self, backend: Backend) -> Processing {
        Processing {
            class: "VaeImageProcessor",
            square: None,
            size: Size::Exact([self.image_size as u32; 2]),
            resample: Resample::Bilinear,
            backend,
            crop: None,
            rescale: Some(1.0 / 255.0),
            normalize: Some([[0.5; 3]; 2]),
            channels_last: false,
            grids: Vec::new(),
            frames: 1,
        }
    }

    /// In a few words, for people.
    pub fn described(&self) -> String {
        let kind = match (&self.projector.kind, self.final_gelu) {
            (ConnectorKind::Linear { .. }, _) => "linear",
            (_, true) => "MLP",
            (_, false) => "MLP without a last GELU",
        };
        format!(
            "{}, frozen, {} · {kind} projector, trained",
            self.encoder.class,
            tunesmith_base::words::count(self.rows(), "row")
        )
    }
}
