//! Generation (greedy, sampling, beam search) and metrics of answers.
pub mod beam;
pub mod chat;
mod generate;
mod held_out;
pub mod metrics;
pub mod sample;
mod settings;
mod stop_strings;
pub mod stream;
mod watcher;

pub use generate::generate;
pub use held_out::{AnsweredRow, HeldOut};
pub use settings::{Settings, Strategy};
pub use stop_strings::AnswerDecoder;
pub use watcher::{Answer, End, Go, Unwatched, Watcher, While};

/// Whether an answer is the reference, white space at both ends aside.
pub fn exact_match(answer: &str, reference: &str) -> bool {
    answer.trim() == reference.trim()
}
