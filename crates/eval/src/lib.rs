//! Generation (greedy, sampling, beam search) and metrics of generated answers.
pub mod beam;
pub mod chat;
mod eval_split;
mod generate;
pub mod metrics;
pub mod processors;
mod prompt_lookup;
mod reasoning;
mod row_generator;
pub mod sample;
mod settings;
mod stop_strings;
pub mod stream;
mod watcher;

pub use eval_split::{AnsweredRow, EvalSplit};
pub use generate::{generate, generate_with_images};
pub use prompt_lookup::PromptLookup;
pub use reasoning::SplitAnswer;
pub use row_generator::{EvalExample, RowGenerator};
pub use settings::{Settings, Strategy};
pub use stop_strings::AnswerDecoder;
pub use watcher::{Answer, End, Go, Unwatched, Watcher, While};

/// Whether an answer equals the reference, except for white space at both ends.
pub fn exact_match(answer: &str, reference: &str) -> bool {
    answer.trim() == reference.trim()
}
