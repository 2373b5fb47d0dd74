//! How a model reads images: a vision encoder (a transformer over patches), a connector from its width to the
//! decoder's, and the places of the decoder's input that show an image. [`VisionArch`] describes all of it, in the
//! field `vision` of [`Arch`](crate::arch::Arch). Code that builds or saves the model reads it there.
//!
//! Names of tensors are those of Transformers 5 for the whole model, such as
//! `model.vision_tower.encoder.layers.0.self_attn.q_proj.weight`. The files of a checkpoint may have older ones
//! ([`VisionArch::stored_names`]).
mod across;
mod chat;
mod connector;
mod connectors;
mod encoder;
mod families;
mod image_processors;
mod joined;
mod latents;
mod models;
mod pixtral;
mod processing;
mod tensors;
mod world;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;
use tunesmith_base::words::count;

pub use chat::{ChatForm, ChatImages};
pub use connector::{Connector, Norm, Pairing, Step};
pub use connectors::{CONNECTORS, ConnectorFamily};
pub use encoder::{BlockNames, CLIP_BOUNDS, Encoder, Feature, Interpolation, Names, Pointwise, StemNames, Windows};
pub use families::{ENCODERS, EncoderFamily};
pub use image_processors::{Resample, Size};
pub use joined::{AnyRes, Joined, Taps};
pub use latents::{
    Convolution, LatentEncoder, LatentLayer, LatentNorm, LatentNormKind, Residual, SpatialAttention, WORLD_ENCODER,
};
pub use models::SEEING;
pub use pixtral::PIXTRAL_TOKENS;
pub use processing::{Backend, PanAndScan, Processing};
pub use world::{WORLD_PROJECTOR, WORLD_SETTINGS, WORLD_TOKENS, WORLD_WEIGHTS, World, WorldSettings};

/// Describes both parts of a pair, in a folder that has them next to the files of the text model: `vision_config`,
/// `connector_hidden_size`, `feature_layer` and `image_token_id`.
pub const PAIR_SETTINGS: &str = "vision.json";
/// The weights of encoder and connector in such a folder: `vision_tower.…` and `multi_modal_projector.…`.
pub const PAIR_WEIGHTS: &str = "vision.safetensors";
/// The files next to a model that have its vision encoders: the settings and the weights of each.
pub const ENCODER_FILES: [[&str; 2]; 2] = [[PAIR_SETTINGS, PAIR_WEIGHTS], [WORLD_SETTINGS, WORLD_WEIGHTS]];

/// The vision encoder and the connector of a model that reads images, and which parts of them are trained.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionArch {
    /// The vision transformer over patches.
    pub encoder: Encoder,
    /// The connector from the encoder's outputs to rows of the decoder's input.
    pub connector: Connector,
    /// Further connectors, each for the output of an inner block of the encoder. The output of the first one is added
    /// to an image's rows after the decoder's first block, that of the second one after the second block, and so on
    /// (`DeepStack`, Meng et al., 2024; Qwen3-VL).
    pub deepstack: Vec<Deepstack>,
    /// How positions of a text with images have three components: time, row and column. `None` if positions simply
    /// count up.
    pub mrope: Option<Mrope>,
    /// In which blocks of the decoder the rows of an image attend to all rows of their image, also to later ones.
    pub bidirectional: Bidirectional,
    /// Whether the tokens before an answer attend to each other in both directions (`PaliGemma`). In training these are
    /// all tokens up to the row's first label, in generation the prompt.
    pub prefix: bool,
    /// The token whose per-layer embeddings the rows of images get, if blocks have embeddings of their own (Gemma 4).
    pub per_layer_token: Option<u32>,
    /// The token that begins a text, if the decoder reads images by cross-attention (`VisionEncoderDecoderModel`). It
    /// stands in place of the image's rows, which are not part of the text. `None` if the rows of images are part of
    /// the text.
    pub start_token: Option<u32>,
    /// Whether images are cut into a grid that fits their shape, and how lines of their rows end (LLaVA-OneVision).
    pub any_res: Option<AnyRes>,
    /// A second encoder. In a chat, its rows stand after BOS.
    pub world: Option<Arc<World>>,
    /// How a chat shows images; `None` if they can only stand in front of a caption.
    pub chat: Option<ChatImages>,
    /// The encoder's folder, or the file with encoder and connector; `None` if they are part of the decoder's
    /// checkpoint.
    pub folder: Option<PathBuf>,
    /// Which parts of encoder, connector and decoder are trained.
    pub training: VisionTraining,
    /// Set if images come as features that were computed before. The model then has only the parts that follow.
    pub features: Option<Features>,
}

/// Which output for an image is computed once and cached, because nothing before it is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Features {
    /// The encoder's outputs, `[rows, width of the encoder]`.
    Encoder,
    /// The connector's outputs, `[rows, width of the decoder]`.
    Connector,
}

/// In which blocks of the decoder the rows of an image attend to later rows of the same image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bidirectional {
    /// In no block: attention is causal.
    Never,
    /// In all blocks. A sliding window limits how far back a row sees, also in its image (Gemma 3).
    Always,
    /// In blocks with a sliding window, which limits this likewise (Gemma 4).
    Windowed,
}

/// A connector for the output of an inner block of the encoder.
#[derive(Debug, Clone, PartialEq)]
pub struct Deepstack {
    /// The index of the block whose output it takes.
    pub block: usize,
    /// From this output to rows of the decoder.
    pub connector: Connector,
}

/// Rotary positions with three components in the decoder (Qwen-VL). A text token has the same number in all three. The
/// rows of an image have the time of the image's start, and their own row and column counted from that number on. The
/// text after the image continues at `max(rows, columns)` after the image's start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mrope {
    /// How many frequencies rotate by time, by row and by column.
    pub sections: [usize; 3],
    /// Whether the components alternate along the frequencies, instead of having one range each.
    pub interleaved: bool,
}

/// Whether a model's folder has a vision encoder in files of its own ([`ENCODER_FILES`]).
pub fn has_encoder(dir: &Path) -> bool {
    ENCODER_FILES.iter().any(|[settings, _]| files::is_there(&dir.join(settings)))
}

/// Which parts of a [`VisionArch`] are trained. By default none is.
#[allow(clippy::struct_excessive_bools)] // each is a part
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VisionTraining {
    /// Whether the connector's tensors are trained.
    pub connector: bool,
    /// Whether the vector that ends a line of an image's rows is trained ([`AnyRes::newline`]). It belongs to no
    /// module, so an adapter in PEFT's format cannot have it.
    pub newline: bool,
    /// Whether every tensor of the encoder is trained that contributes to its output.
    pub encoder: bool,
    /// How many of the encoder's last blocks are trained.
    pub last_blocks: usize,
    /// The linear modules of the encoder's blocks that get an adapter of the run's kind, each by the last part of its
    /// name, such as `q_proj`.
    pub adapters: Vec<String>,
    /// Whether the decoder is frozen except for rows of new tokens, whatever `tuning.mode` says.
    pub freeze_language: bool,
}

impl VisionArch {
    /// Reads the encoder and the connector from `dir`: those of a composite checkpoint, such as LLaVA, from
    /// `config.json`; those of a merged pair from [`PAIR_SETTINGS`]. Also reads the second encoder of a merged model
    /// from [`WORLD_SETTINGS`]. `decoder_size` is the decoder's width.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: this version reads no images in models of this `model_type`, or does not know a
    /// part of the description; the message names it.
    pub fn of_model(dir: &Path, decoder_size: usize) -> Result<Self> {
        let world = World::of_model(dir, decoder_size)?.map(Arc::new);
        Ok(Self { world, ..models::read(dir, decoder_size)? })
    }

    /// Pairs the encoder in the folder `dir` with a decoder of width `decoder_size`. The weights of the connector are
    /// not in any checkpoint.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the folder's `config.json` does not describe a known encoder.
    pub fn pair(dir: &Path, pairing: &Pairing, decoder_size: usize) -> Result<Self> {
        models::pair(dir, pairing, decoder_size)
    }

    /// The description of a pair's encoder with its `model_type`, to be stored in [`PAIR_SETTINGS`].
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the `config.json` cannot be read.
    pub fn encoder_config(folder: &Path) -> Result<serde_json::Map<String, serde_json::Value>> {
        models::encoder_config(folder)
    }

    /// The last output for an image that training does not change, so that it needs to be computed only once: the
    /// connector's, if the connector is frozen, has no dropout and gives no more numbers than it reads; otherwise the
    /// encoder's. `None` if a part of the encoder is trained.
    pub fn fixed_features(&self) -> Option<Features> {
        let VisionTraining { connector, newline, encoder, last_blocks, adapters, .. } = &self.training;
        if *encoder || *last_blocks > 0 || !adapters.is_empty() {
            return None;
        }
        let of_encoder = self.connector.side().pow(2) * self.connector.encoder_size;
        let fewer = self.connector.decoder_size <= of_encoder;
        let fixed = !connector && !newline && self.connector.dropout() == 0.0;
        Some(if fixed && fewer { Features::Connector } else { Features::Encoder })
    }

    /// The shape `[rows, width]` of an image's features, if its tiles have these rows and columns of patches. The rows
    /// for the first connector come first, then those for the connectors of inner blocks.
    pub fn features_shape(&self, features: Features, tiles: &[(usize, usize)], joined: Option<&Joined>) -> [usize; 2] {
        let kept = if self.encoder.feature.drop_prefix { 0 } else { self.encoder.prefix_tokens() };
        let [rows, width] = match features {
            Features::Encoder => {
                [tiles.iter().map(|(rows, columns)| rows * columns + kept).sum(), self.connector.encoder_size]
            }
            Features::Connector => [self.connector_rows(tiles.iter().copied(), joined), self.connector.decoder_size],
        };
        [rows * self.connectors().count(), width]
    }

    /// Describes encoder and connector in one line for messages. [`World::described`] describes a second encoder.
    pub fn described(&self) -> String {
        let VisionTraining { connector, encoder, last_blocks, adapters, .. } = &self.training;
        let encoder = match (encoder, last_blocks, adapters.is_empty()) {
            (true, ..) => "trained".to_owned(),
            (false, 0, true) => "frozen".to_owned(),
            (false, 0, false) => "with adapters".to_owned(),
            (false, blocks, _) => format!("the last {} trained", count(*blocks, "block")),
        };
        if self.connector.steps.is_empty() {
            return format!("{}, {encoder}", self.encoder.family);
        }
        let kind = self.connector.kind;
        let connector = if *connector { "trained" } else { "frozen" };
        format!("{}, {encoder} · {kind} connector, {connector}", self.encoder.family)
    }

    /// How many rows of the decoder's input an image takes, if its tiles have these rows and columns of patches: as
    /// many as the connector gives, or the one token that begins a text if the decoder reads images by cross-attention.
    pub fn rows(&self, tiles: impl IntoIterator<Item = (usize, usize)>, joined: Option<&Joined>) -> usize {
        if self.start_token.is_some() { 1 } else { self.connector_rows(tiles, joined) }
    }

    /// How many rows the connector gives for an image, if its tiles have these rows and columns of patches. With
    /// [`AnyRes`], every line ends with a further row: either all tiles but the first are `joined`, or the image is one
    /// tile.
    pub fn connector_rows(&self, tiles: impl IntoIterator<Item = (usize, usize)>, joined: Option<&Joined>) -> usize {
        let mut tiles = tiles.into_iter().map(|(rows, columns)| self.tile_rows(rows, columns));
        match (&self.any_res, joined) {
            (None, _) => tiles.sum(),
            (Some(_), None) => tiles.map(|rows| rows + 1).sum(),
            (Some(_), Some(joined)) => tiles.next().unwrap_or(0) + joined.decoder_rows(),
        }
    }

    /// Refuses a tile with so many rows and columns of patches if the encoder or the connector cannot take it.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the connector joins patches of which the tile has no multiple, or the encoder has fewer positions.
    pub fn check_tile(&self, rows: usize, columns: usize) -> Result<()> {
        let side = self.connector.side();
        let error = if !rows.is_multiple_of(side) || !columns.is_multiple_of(side) {
            Error::data(format!("a tile of {rows} x {columns} patches, whose sides are no multiples of {side} patches"))
        } else if self.encoder.interpolation == Some(Interpolation::Fixed) && [rows, columns] != self.encoder.grid {
            let [high, wide] = self.encoder.grid;
            Error::data(format!(
                "an image of {rows} x {columns} patches, and the encoder has positions for {high} x {wide}"
            ))
        } else if self.encoder.interpolation == Some(Interpolation::Axes) && rows.max(columns) > self.encoder.grid[1] {
            let places = self.encoder.grid[1];
            Error::data(format!(
                "an image of {rows} x {columns} patches, and the encoder has {places} positions a side"
            ))
        } else {
            return Ok(());
        };
        Err(error.hint("the processor's sizes and config.json must belong to one model"))
    }

    /// How many rows of the decoder's input a tile takes that has this many rows and columns of patches.
    pub fn tile_rows(&self, rows: usize, columns: usize) -> usize {
        let kept = if self.encoder.feature.drop_prefix { 0 } else { self.encoder.prefix_tokens() };
        self.connector.rows(rows, columns, kept)
    }
}
