//! The decoder from parts: segments (embedding, [`block`], [`head`]) with forward and backward, adapters
//! ([`adapters`]) inside [`linear`], weights from safetensors, and the walks over it all in [`decoder`].
pub mod adapters;
mod attach;
pub mod attention;
pub mod block;
mod build;
pub mod decoder;
pub mod freeze;
pub mod grads;
pub mod head;
pub mod init;
pub mod kept;
pub mod linear;
pub mod mlp;
pub mod moe;
mod names;
pub mod norm;
pub mod params;
pub mod pass;
pub mod quantize;
pub mod quantized_cache;
mod segment;
pub mod shards;
mod source;
pub mod stack;
pub mod svd;
pub mod targets;
pub mod values;
pub mod weight;
pub mod weights;

pub use decoder::{Logits, Model, Phases, TextCache};
pub use grads::Grads;
pub use params::{ParamSpec, Params};
pub use source::Source;
