//! Layer 3: from files to padding-free batches.
//!
//! ```text
//! source (files -> raw rows) -> row (any form -> one) -> template + mask (text, and what carries a loss)
//!   -> encode (ids, labels) -> dataset (parallel, cached, split) -> pack, sampler -> batch
//! ```
pub mod batch;
mod cache;
mod clock;
pub mod dataset;
mod dumps;
pub mod encode;
mod isolate;
mod jinja;
pub mod mask;
pub mod pack;
mod python;
mod rng;
pub mod row;
pub mod sampler;
pub mod source;
pub mod split;
pub mod template;
pub mod tokenizer;

pub use batch::{Batch, Example, IGNORE};
pub use dataset::{Counts, Dataset, Progress, Report, Silent, load};
pub use sampler::{Sampler, SamplerOptions, SamplerState, Step};
pub use split::Split;
pub use template::ChatTemplate;
pub use tokenizer::{Tokenizer, new_token_ids, with_tokens};
