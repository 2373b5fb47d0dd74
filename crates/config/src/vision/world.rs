//! A second encoder of images next to the first one: the encoder of a variational autoencoder (VAE), whose latents
//! become rows of the decoder (`TheWorld`). The encoder is frozen, and the projector from its latents to the decoder is
//! trained.
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::connector::Connector;
use super::connectors;
use super::image_processors::{Resample, Size};
use super::latents::LatentEncoder;
use super::processing::{Backend, Processing};
use crate::enums::{ProjectionArchitecture, WorldProjection};
use crate::hf_json::{Source, read_text};
use tunesmith_base::error::{Error, Result};

/// The tokens before and after these rows.
pub const WORLD_TOKENS: [&str; 2] = ["<start_of_world>", "<end_of_world>"];
/// The prefix of the projector's tensors in the whole model.
pub const WORLD_PROJECTOR: &str = "model.world_projector.";
/// The file in a merged model's folder that describes its second encoder.
pub const WORLD_SETTINGS: &str = "world.json";
/// The file with the weights of the second encoder and its projector.
pub const WORLD_WEIGHTS: &str = "world.safetensors";
/// The key of [`WORLD_SETTINGS`] with the encoder's own `config.json`, as diffusers writes it.
const ENCODER_CONFIG: &str = "encoder_config";

/// The second encoder and its projector.
#[derive(Debug, Clone, PartialEq)]
pub struct World {
    /// The encoder, from an image to latents.
    pub encoder: LatentEncoder,
    /// Whether each channel of the latents becomes a row; otherwise each place does.
    pub channels: bool,
    /// The projector from such a row to the decoder's width. Only the files of a merged model have its weights.
    pub projector: Connector,
    /// The modules of the projector.
    pub architecture: ProjectionArchitecture,
    /// The side in pixels of the square to which each image is resized.
    pub image_size: usize,
    /// The ids of the tokens before and after the rows ([`WORLD_TOKENS`]).
    pub tokens: [u32; 2],
    /// The encoder's folder; for a merged model, the file [`WORLD_WEIGHTS`].
    pub folder: PathBuf,
}

/// How the latents of the second encoder become rows of the decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorldSettings {
    /// Whether a place or a channel of the latents becomes a row.
    pub projection: WorldProjection,
    /// The modules of the projector from latents to the decoder's width.
    pub architecture: ProjectionArchitecture,
    /// The side in pixels of the square to which each image is resized.
    pub image_size: usize,
}

impl World {
    /// Reads the encoder in `folder`, or in its subfolder `vae`, for a decoder of width `decoder_size`.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the encoder is not supported; [`tunesmith_base::Kind::Config`]: the image size
    /// is not a multiple of the pixels per latent.
    pub fn open(folder: &Path, settings: WorldSettings, tokens: [u32; 2], decoder_size: usize) -> Result<Self> {
        let inner = folder.join("vae");
        let folder = if inner.join("config.json").is_file() { inner } else { folder.to_owned() };
        Self::before(decoder_size, LatentEncoder::open(&folder)?, settings, tokens, folder)
            .map_err(|error| error.of_key("image_size", "vision.world.image_size"))
    }

    /// Reads the second encoder of a merged model, which [`WORLD_SETTINGS`] describes; `None` if the model has none.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the file is not as a merge writes it.
    pub fn of_model(dir: &Path, decoder_size: usize) -> Result<Option<Self>> {
        let path = dir.join(WORLD_SETTINGS);
        let Some(text) = read_text(&path)? else { return Ok(None) };
        let source = Source::parse(&text, &path)?;
        let word = |key: &str| source.text(key).map(Option::unwrap_or_default);
        let (projection, architecture) = (word("projection_mode")?, word("projection_architecture")?);
        let projection = WorldProjection::ALL.iter().find(|it| it.as_str() == projection);
        let architecture = ProjectionArchitecture::ALL.iter().find(|it| it.as_str() == architecture);
        let settings = WorldSettings {
            projection: *projection
                .ok_or_else(|| source.mismatch("projection_mode", &WorldProjection::WORDS.join(" or ")))?,
            architecture: *architecture.ok_or_else(|| {
                source.mismatch("projection_architecture", &ProjectionArchitecture::WORDS.join(" or "))
            })?,
            image_size: source.size_up_to("image_size", None, 4096)?,
        };
        let [begin, end] = source.token_ids("token_ids")?[..] else {
            return Err(source.mismatch("token_ids", "the two tokens around the embeddings"));
        };
        let Some(Value::Object(map)) = source.get(ENCODER_CONFIG) else {
            return Err(source.mismatch(ENCODER_CONFIG, "an object that describes the encoder"));
        };
        let about = Source { origin: source.origin, map: map.clone(), prefix: format!("{ENCODER_CONFIG}.") };
        let encoder = LatentEncoder::of(&about)?;
        let mut world = Self::before(decoder_size, encoder, settings, [begin, end], dir.join(WORLD_WEIGHTS))
            .map_err(|error| error.context(path.display()).with_kind(tunesmith_base::Kind::Model))?;
        world.projector.stored = true;
        Ok(Some(world))
    }

    /// The content of [`WORLD_SETTINGS`] for a merged model.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the encoder's own settings cannot be read.
    pub fn settings(&self) -> Result<Value> {
        let of_model = self.projector.stored;
        let path = if of_model { self.folder.with_file_name(WORLD_SETTINGS) } else { self.folder.join("config.json") };
        let text = read_text(&path)?.ok_or_else(|| Error::model(format!("{}: no such file", path.display())))?;
        let mut about = Source::parse(&text, &path)?.map;
        let about = if of_model { about.remove(ENCODER_CONFIG).unwrap_or_default() } else { about.into() };
        let projection = if self.channels { WorldProjection::Channel } else { WorldProjection::Spatial };
        Ok(json!({
            ENCODER_CONFIG: about,
            "projection_mode": projection.as_str(),
            "projection_architecture": self.architecture.as_str(),
            "image_size": self.image_size,
            "token_ids": self.tokens,
        }))
    }

    /// Connects this encoder to a decoder of width `decoder_size`.
    fn before(
        decoder_size: usize,
        encoder: LatentEncoder,
        settings: WorldSettings,
        tokens: [u32; 2],
        folder: PathBuf,
    ) -> Result<Self> {
        let WorldSettings { projection, architecture, image_size } = settings;
        if !image_size.is_multiple_of(encoder.shrink) {
            let shrink = encoder.shrink;
            return Err(Error::config(format!(
                "image_size: {image_size}, expected a multiple of {shrink}: the encoder makes one latent of {shrink} pixels"
            )));
        }
        let channels = projection == WorldProjection::Channel;
        let places = (image_size / encoder.shrink).pow(2);
        let encoder_size = if channels { places } else { encoder.latent };
        let projector = connectors::of_world(architecture, WORLD_PROJECTOR, [encoder_size, decoder_size]);
        Ok(Self { encoder, channels, projector, architecture, image_size, tokens, folder })
    }

    /// How many places the latents of an image have. Each has as many numbers as there are channels.
    pub const fn places(&self) -> usize {
        (self.image_size / self.encoder.shrink).pow(2)
    }

    /// How many rows of the decoder's input an image takes, without the tokens around them.
    pub const fn rows(&self) -> usize {
        if self.channels { self.encoder.latent } else { self.places() }
    }

    /// How many numbers the latents of an image have.
    pub const fn latents(&self) -> usize {
        self.places() * self.encoder.latent
    }

    /// How images are prepared: resized to a square, with values from -1 to 1.
    pub fn processing(&self, backend: Backend) -> Processing {
        Processing {
            class: "VaeImageProcessor",
            square: None,
            pan_and_scan: None,
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

    /// A short description for messages.
    pub fn described(&self) -> String {
        let kind = match self.architecture {
            ProjectionArchitecture::Linear => "linear",
            ProjectionArchitecture::Mlp => "MLP",
            ProjectionArchitecture::MlpNoFinalGelu => "MLP without a last GELU",
        };
        format!(
            "{}, frozen, {} · {kind} projector, trained",
            self.encoder.class,
            tunesmith_base::words::count(self.rows(), "embedding")
        )
    }
}
