//! Turns data files into padding-free batches: reads rows of many forms, renders chat templates, tokenizes and labels
//! the text, and cuts, mixes, shuffles and packs the examples. Start with [`load()`], which returns a [`Dataset`].
//!
//! ```text
//! inputs (settings -> files) -> source (files -> raw rows) -> row, messages (any row form -> one of few)
//!   -> template + mask (text, and the parts that carry a loss) -> encode (ids, labels) -> tokens (on disk)
//! load: all sets -> dedupe -> split -> contamination -> mix; only row numbers are in memory
//!   -> pack, sampler -> batch (read from disk; images are read when a batch needs them)
//! fetch_pass, web_images: images that rows name by web address, fetched before rows are tokenized
//! documents: text, Markdown, HTML and DOCX files -> rows, for `tunesmith ingest`
//! ```
//!
//! Chat templates run in [`template`]: jinja (compiles) -> `jinja_compat` (Python's filters) -> `jinja_limits` (size,
//! time).
mod answer_report;
mod answers;
mod archive;
pub mod batch;
mod bounded_tokenizer;
mod catch_panic;
mod chat_tokens;
pub mod classification_rows;
mod clusters;
mod contamination;
mod control;
mod dataset;
mod dedupe;
pub mod documents;
pub mod encode;
mod encoded;
mod encoding;
mod fast_bpe;
mod fetch_pass;
mod fields;
mod file_states;
mod growth;
mod inputs;
mod jinja;
mod jinja_compat;
mod jinja_limits;
mod json_type;
pub mod labels;
mod load;
pub mod mask;
mod messages;
mod minhash;
mod mix;
mod model_files;
pub mod numbers;
pub mod pack;
mod parsed_row;
mod picture_files;
mod picture_places;
mod picture_report;
mod picture_rows;
mod picture_texts;
mod pictures;
pub mod process;
mod progress;
mod python_text;
pub mod question;
mod reasoning;
mod report;
mod rng;
pub mod row;
mod row_images;
mod row_pass;
mod sampler;
pub mod source;
mod source_texts;
mod split;
mod strftime;
mod strict;
pub mod template;
mod template_coverage;
mod template_input;
mod template_source;
mod template_time;
mod thread_time;
mod tojson;
mod tokenizer;
mod tokens;
mod web_address;
mod web_images;
mod whitespace;

pub use answer_report::AnswerReport;
pub use batch::{Batch, Example, IGNORE};
pub use dataset::Dataset;
pub use fetch_pass::WebCounts;
pub use inputs::named as named_inputs;
pub use load::load;
pub use model_files::MAX_FILE_BYTES as MAX_TOKENIZER;
pub use picture_files::{PictureFiles, first_picture, first_pictures};
pub use picture_places::PicturePlaces;
pub use picture_report::PictureReport;
pub use picture_texts::PictureRows;
pub use pictures::{ChatPictures, PictureLook, Pictures, Shown, WorldRows, before_caption, split_world};
pub use progress::{Progress, Silent};
pub use reasoning::ReasoningForm;
pub use report::{Counts, Report};
pub use row_images::shows as shows_picture;
pub use row_pass::threads;
pub use sampler::{Sampler, SamplerOptions, SamplerState, Step};
pub use split::Split;
pub use template::ChatTemplate;
pub use tokenizer::{Tokenizer, add_new_tokens, new_token_ids, with_tokens};
pub use web_address::{Came, is_link, shown as shown_address};
