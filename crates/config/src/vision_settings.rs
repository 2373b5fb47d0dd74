//! The settings of `vision` and `vision.world`.
use super::auto_values::Bytes;
use super::enums::{ConnectorChoice, ImageBackend, ProjectionArchitecture, WorldProjection};
use super::option::{Range, section};
use std::path::PathBuf;

section! {
    /// How a model sees images (`docs/guides/images.md`). A multimodal model has an image encoder of its own; any other model can be paired
    /// with one.
    VisionConfig = "vision" {
        /// Whether the image encoder is loaded (`null`: where the first rows of a file show images, and in `chat`).
        load: Option<bool> = None;
        /// An image encoder to pair with a model that has none: a folder, or `owner/name` on the hub. The embeddings of an image
        /// come before its caption.
        encoder: Option<String> = None;
        /// The branch, tag or commit of an encoder on the hub (`null`: `main`).
        revision: Option<String> = None;
        /// With `encoder`: what connects it to the model. Its weights are drawn from the seed.
        connector: ConnectorChoice = ConnectorChoice::Linear;
        /// With `connector: mlp`: the width between its two modules (`null`: the model's).
        connector_hidden_size: Option<usize> = None, range Range::within(1.0, 1_048_576.0);
        /// With `connector: mlp`: the share of values between its modules that is zeroed in training.
        connector_dropout: f64 = 0.0, range Range::from_to_below(0.0, 1.0);
        /// With `encoder`: which of its `hidden_states` the connector reads, such as -2 (`null`: the last one, after the norm).
        feature_layer: Option<i64> = None;
        /// With `encoder`: the token that stands for an image in chats. It must be in the vocabulary, or in `tuning.new_tokens`.
        /// Without it, images can only come before captions.
        image_token: Option<String> = None;
        /// The library whose rounding resizing follows.
        backend: ImageBackend = ImageBackend::Torchvision;
        /// The smallest number of pixels of a resized image, if the model's processor sizes images by it (Qwen-VL; `null`: as its
        /// files say).
        min_pixels: Option<usize> = None, range Range::within(1.0, 268_435_456.0);
        /// The largest number of pixels of a resized image, for the same processors. Fewer pixels take fewer tokens.
        max_pixels: Option<usize> = None, range Range::within(1.0, 268_435_456.0);
        /// Whether a frozen encoder runs once per image before training, and is not loaded for it. What it computes is kept in
        /// `data.cache_dir` (`null`: where images are seen more than once, and `feature_cache_size` and the disk have room).
        cache_features: Option<bool> = None;
        /// The most disk space that the features of a run's images may take.
        feature_cache_size: Bytes = Bytes(50 << 30);
    }
    nested {
        /// The section `vision.world`.
        world: WorldConfig;
    }
}

section! {
    /// A second, frozen image encoder beside that of a multimodal model: the encoder of a variational autoencoder (VAE). Its
    /// embeddings follow the first token of a text, between `<start_of_world>` and `<end_of_world>`; add both with `tuning.new_tokens`. The
    /// projector behind it is trained.
    WorldConfig = "vision.world" {
        /// A folder of diffusers with an `AutoencoderKL` or `AutoencoderKLWan`, or of a pipeline whose folder `vae` holds one.
        encoder: Option<PathBuf> = None;
        /// Which part of the latents becomes one embedding of the model.
        projection_mode: WorldProjection = WorldProjection::Spatial, aliases ["world_projection_mode"];
        /// The projector from the latents to the model. Its weights are drawn from the seed.
        projection_architecture: ProjectionArchitecture = ProjectionArchitecture::Mlp;
        /// Each image is resized to a square with this many pixels a side.
        image_size: usize = 512, range Range::within(1.0, 4096.0);
    }
}
