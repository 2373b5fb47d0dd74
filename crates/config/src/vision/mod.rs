//! How a model reads images: an encoder (a transformer over patches), a connector to the decoder's width, and which places
//! of the decoder's input show an image. [`VisionArch`] holds it, in the field `vision` of [`Arch`](crate::arch::Arch).
//! Code that builds or saves the model reads it there.
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
use tunesmith_base::error::Result;
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

/// What a folder has that holds both parts of a pair, beside the files of the text model: `vision_config`, `connector_hidden_size`,
/// `feature_layer`, and `image_token_id`.
pub const PAIR_SETTINGS: &str = "vision.json";
/// The tensors of encoder and connector in such a folder: `vision_tower.…` and `multi_modal_projector.…`.
pub const PAIR_WEIGHTS: &str = "vision.safetensors";
/// The files next to a model that hold its image encoders: settings and weights of each.
pub const ENCODER_FILES: [[&str; 2]; 2] = [[PAIR_SETTINGS, PAIR_WEIGHTS], [WORLD_SETTINGS, WORLD_WEIGHTS]];

/// Encoder and connector of a model that sees pictures, and what of them is trained.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionArch {
    /// The vision transformer over patches.
    pub encoder: Encoder,
    /// From the encoder's width to the decoder's.
    pub connector: Connector,
    /// Further connectors, each behind an inner block of the encoder: what the first of them gives is added to an image's rows
    /// after the decoder's first block, and so on (`DeepStack`, Meng et al., 2024; Qwen3-VL).
    pub deepstack: Vec<Deepstack>,
    /// Where the tokens of a text with images have a time, a row and a column; `None` where they are counted.
    pub mrope: Option<Mrope>,
    /// In which blocks of the decoder the rows of an image see each other, those after them too.
    pub bidirectional: Bidirectional,
    /// Whether the tokens before an answer see each other, those after them too (`PaliGemma`): of a row all up to its first label,
    /// of a text that is generated its prompt.
    pub prefix: bool,
    /// The token whose embedding for each block the rows of pictures have, where blocks have embeddings of their own (Gemma 4).
    pub per_layer_token: Option<u32>,
    /// The token that begins a text where the decoder's blocks read pictures by cross-attention: it stands in the place of a picture's
    /// rows, which are not among the text's (`VisionEncoderDecoderModel`). `None`: pictures' rows stand among those of the text.
    pub start_token: Option<u32>,
    /// Whether pictures are cut at their own shape, and how lines of their rows end (LLaVA-OneVision).
    pub any_res: Option<AnyRes>,
    /// A second encoder, whose rows stand behind a text's first token.
    pub world: Option<Arc<World>>,
    /// How a chat shows pictures; `None` where they stand only in front of a caption.
    pub chat: Option<ChatImages>,
    /// The encoder's folder, or the file with encoder and connector; `None` where they are a part of the decoder's checkpoint.
    pub folder: Option<PathBuf>,
    /// Which parts of encoder, connector and decoder are trained.
    pub training: VisionTraining,
    /// Set where pictures come as values that were computed before: the model then holds only what is behind them.
    pub features: Option<Features>,
}

/// Values of a picture that are computed once, as nothing before them is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Features {
    /// The encoder's rows, `[rows, width of the encoder]`.
    Encoder,
    /// The connector's rows, `[rows, width of the decoder]`.
    Connector,
}

/// In which blocks of the decoder the rows of an image see those after them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bidirectional {
    /// In none.
    Never,
    /// In all. With a window, a row sees all of its image (Gemma 3).
    Always,
    /// In those with a window, which bounds what a row sees before it in its image too (Gemma 4).
    Windowed,
}

/// A connector behind an inner block of the encoder.
#[derive(Debug, Clone, PartialEq)]
pub struct Deepstack {
    /// The block whose output it takes.
    pub block: usize,
    /// From there to rows of the decoder.
    pub connector: Connector,
}

/// Rotary positions of three components in the decoder (Qwen-VL). A text's tokens have one number in all three. The rows of an
/// image have the time of the image's start, and the row and column of their place from that number on. The text behind it goes
/// on `max(rows, columns)` after the image's start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mrope {
    /// Frequencies that turn by time, row and column.
    pub sections: [usize; 3],
    /// Whether the components take turns along the frequencies, and do not lie one after the other.
    pub interleaved: bool,
}

/// Whether a model's folder has an image encoder in files of its own ([`ENCODER_FILES`]).
pub fn has_encoder(dir: &Path) -> bool {
    ENCODER_FILES.iter().any(|[settings, _]| files::is_there(&dir.join(settings)))
}

/// What of a [`VisionArch`] is trained. By default nothing is.
#[allow(clippy::struct_excessive_bools)] // each is a part
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VisionTraining {
    /// Whether the connector's tensors are trained.
    pub connector: bool,
    /// What ends a line of an image's rows ([`AnyRes::newline`]). It is no module, so no adapter's file of PEFT holds it.
    pub newline: bool,
    /// Every tensor of the encoder that pictures come through.
    pub encoder: bool,
    /// The encoder's last blocks: so many.
    pub last_blocks: usize,
    /// Linear modules of the encoder's blocks that get an adapter of the run's kind, by the last part of their names, such as
    /// `q_proj`.
    pub adapters: Vec<String>,
    /// Nothing of the decoder is trained, whatever `tuning.mode` says, but rows of new tokens.
    pub freeze_language: bool,
}

impl VisionArch {
    /// Reads the encoder and the connector of a composite checkpoint from `dir/config.json`, such as LLaVA's, or of a merged pair from
    /// its [`PAIR_SETTINGS`]; and a merged model's second encoder from its [`WORLD_SETTINGS`]. `decoder_size` is the decoder's width.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: a `model_type` without pictures here, or a form that is not known, by name.
    pub fn of_model(dir: &Path, decoder_size: usize) -> Result<Self> {
        let world = World::of_model(dir, decoder_size)?.map(Arc::new);
        Ok(Self { world, ..models::read(dir, decoder_size)? })
    }

    /// Pairs the encoder in a folder of its own with a decoder of that width, through a connector of which no checkpoint has weights.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the folder's `config.json` is of no encoder that is known here.
    pub fn pair(dir: &Path, pairing: &Pairing, decoder_size: usize) -> Result<Self> {
        models::pair(dir, pairing, decoder_size)
    }

    /// What describes the encoder of a pair, with its `model_type`: for [`PAIR_SETTINGS`].
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: its `config.json` cannot be read.
    pub fn encoder_config(folder: &Path) -> Result<serde_json::Map<String, serde_json::Value>> {
        models::encoder_config(folder)
    }

    /// The values of pictures that need no second computation: the connector's rows if it is frozen and they are fewer numbers, else
    /// the encoder's. `None` if a part of the encoder is trained.
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

    /// The shape of the features of a picture with these tiles (rows and columns of patches each): rows and width. The rows for the
    /// first connector come first, then those for the connectors behind inner blocks.
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

    /// Encoder and connector in one line, for people; of a second encoder [`World::described`] tells.
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

    /// How many rows of the decoder's input a picture with these tiles (rows and columns of patches each) takes: those that the
    /// connector gives, or the one token that begins a text where the decoder reads them by cross-attention.
    pub fn rows(&self, tiles: impl IntoIterator<Item = (usize, usize)>, joined: Option<&Joined>) -> usize {
        if self.start_token.is_some() { 1 } else { self.connector_rows(tiles, joined) }
    }

    /// How many rows the connector gives for a picture with these tiles (rows and columns of patches each). Where lines end with a row, its
    /// tiles but the first are `joined`, or it is one tile.
    pub fn connector_rows(&self, tiles: impl IntoIterator<Item = (usize, usize)>, joined: Option<&Joined>) -> usize {
        let mut tiles = tiles.into_iter().map(|(rows, columns)| self.tile_rows(rows, columns));
        match (&self.any_res, joined) {
            (None, _) => tiles.sum(),
            (Some(_), None) => tiles.map(|rows| rows + 1).sum(),
            (Some(_), Some(joined)) => tiles.next().unwrap_or(0) + joined.decoder_rows(),
        }
    }

    /// How many rows of the decoder a tile of so many rows and columns of patches takes.
    pub fn tile_rows(&self, rows: usize, columns: usize) -> usize {
        let kept = if self.encoder.feature.drop_prefix { 0 } else { self.encoder.prefix_tokens() };
        self.connector.rows(rows, columns, kept)
    }
}
