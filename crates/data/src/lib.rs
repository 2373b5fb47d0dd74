//! From files to padding-free batches.
//!
//! ```text
//! inputs (settings -> files) -> source (files -> raw rows) -> row, messages (any form -> one)
//!   -> template + mask (text, and what carries a loss) -> encode (ids, labels) -> tokens (on disk)
//! dataset: the sets -> dedupe -> split -> contamination -> mix: numbers of rows, nothing else in memory
//!   -> pack, sampler -> batch (read from disk)
//! documents: text, Markdown, HTML and DOCX files -> rows, for `tunesmith ingest`
//! ```
pub mod batch;
mod clock;
mod contamination;
mod control;
pub mod dataset;
mod dedupe;
pub mod documents;
mod dumps;
pub mod encode;
mod fields;
mod growth;
mod inputs;
mod isolate;
mod jinja;
pub mod labeled;
pub mod labels;
pub mod mask;
mod messages;
mod meter;
mod minhash;
mod mix;
pub mod numbers;
pub mod pack;
mod print;
pub mod process;
mod python;
pub mod question;
pub mod report;
mod rng;
pub mod row;
pub mod sampler;
pub mod source;
mod space;
pub mod split;
mod strict;
pub mod template;
pub mod tokenizer;
mod tokens;
mod unwritten;
mod walk;

pub use batch::{Batch, Example, IGNORE};
pub use dataset::{Dataset, Progress, Silent, load};
pub use inputs::named as named_inputs;
pub use report::{Counts, Report};
pub use sampler::{Sampler, SamplerOptions, SamplerState, Step};
pub use split::Split;
pub use template::ChatTemplate;
pub use tokenizer::{MAX_FILE_BYTES as MAX_TOKENIZER, Tokenizer, new_token_ids, with_tokens};
pub use tokens::default_dir as cache_dir;
