//! The decoder. A model is a row of segments: embedding, blocks, head. Each has a forward and a backward pass, and
//! adapters ([`adapters`]) are inside its linear modules. [`Model`] reads weights from safetensors and walks the segments.
pub mod adapters;
mod attach;
mod attention;
mod block;
mod build;
mod decoder;
pub mod freeze;
pub mod grads;
mod head;
pub mod init;
mod kept;
mod linear;
mod mlp;
mod moe;
mod names;
mod norm;
pub mod params;
mod pass;
mod projections;
pub mod quantize;
pub mod quantized_cache;
mod quantized_form;
mod segment;
pub mod shards;
mod source;
pub mod stack;
mod svd;
pub mod targets;
mod values;
pub mod weight;
pub mod weights;

pub use decoder::{Logits, Model, Phases, TextCache};
pub use grads::Grads;
pub use params::{ParamSpec, Params};
pub use source::Source;
