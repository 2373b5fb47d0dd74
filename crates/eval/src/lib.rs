//! What a model answers, and how right it is.
pub mod asked;
pub mod beam;
pub mod chat;
pub mod generate;
pub mod metrics;
pub mod sample;
pub mod stream;

pub use asked::Asked;
pub use generate::{Answer, End, Go, Settings, Strategy, Unwatched, Watcher, While, generate};

/// Whether an answer is the reference, white space at both ends aside.
pub fn exact_match(answer: &str, reference: &str) -> bool {
    answer.trim() == reference.trim()
}
