//! The model engine: loads a decoder with its adapters, and computes forward and backward passes without autograd.
//!
//! A [`Model`] is a list of segments: the embedding, the blocks, and the head. Each segment has a forward pass and a
//! backward pass that is written by hand. Adapters ([`adapters`]) are inside the linear modules. [`Model::load`] reads
//! the weights from safetensors files. [`Model::forward_backward`], [`Model::token_losses`] and [`Model::extend`] walk
//! over the segments for training, evaluation and decoding.
//!
//! Where to find what:
//!
//! - `decoder`: the walks over a whole model. `blocks`, `block` and `branch`: the walk over blocks, a block, and its
//!   branches.
//! - `attention`, `latent`, `delta_net`, `mamba`, `short_conv`: mixers. `mlp`, `plain_mlp`, `moe`: what follows them.
//! - `linear`, `norm`, [`weight`], [`params`], [`grads`]: modules, frozen and trained values, and gradients.
//! - `build` and the files `build_*`: how a model is put together. [`weights`]: files. [`targets`]: which modules
//!   get an adapter.
//! - [`vision`]: image encoders and connectors. [`shards`]: weights that ranks share.
mod across;
pub mod adapters;
mod altup;
mod attach;
mod attention;
mod block;
mod blocks;
mod branch;
mod branches;
mod build;
mod build_altup;
mod build_experts;
mod build_mixers;
mod build_per_layer;
mod build_vision;
mod build_world;
mod clipped;
mod cross_attention;
mod decoder;
mod delta_net;
pub mod device;
mod expert;
pub mod feature_cache;
pub mod freeze;
pub mod grads;
mod head;
pub mod init;
mod kept;
mod latent;
mod laurel;
mod learned_positions;
mod linear;
mod mamba;
mod mixers;
mod mlp;
mod mlp_and_experts;
mod moe;
mod names;
mod norm;
pub mod offload;
pub mod params;
mod pass;
mod per_layer;
mod per_layer_inputs;
mod picture_encoder;
mod plain_mlp;
mod positions;
mod projections;
pub mod quantize;
pub mod quantized_cache;
mod quantized_form;
mod recurrent;
mod segment;
pub mod shards;
mod shared_kv;
mod short_conv;
mod source;
pub mod stack;
mod streams;
mod svd;
pub mod targets;
mod tiled_branch;
mod tiles;
mod values;
pub mod vision;
pub mod vision_files;
pub mod weight;
pub mod weights;

pub use decoder::{Drafted, Logits, Model, Phases, TextCache};
pub use grads::Grads;
pub use params::{ParamSpec, Params};
pub use picture_encoder::PictureEncoder;
pub use source::Source;
