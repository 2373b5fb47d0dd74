//! Generation (greedy, sampling, beam search) and metrics of answers.
pub mod beam;
pub mod chat;
pub mod generate;
mod held_out;
pub mod metrics;
pub mod sample;
pub mod stop_strings;
pub mod stream;

pub use generate::{Answer, End, Go, Settings, Strategy, Unwatched, Watcher, While, generate};
pub use held_out::{AnsweredRow, HeldOut};
pub use stop_strings::AnswerDecoder;

/// Whether an answer is the reference, white space at both ends aside.
pub fn exact_match(answer: &str, reference: &str) -> bool {
    answer.trim() == reference.trim()
}
