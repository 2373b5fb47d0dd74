//! Layer 5: what a model answers, and how right it is.
mod generate;
pub mod metrics;

pub use generate::greedy;

/// Whether an answer is the reference, white space at both ends aside.
pub fn exact_match(answer: &str, reference: &str) -> bool {
    answer.trim() == reference.trim()
}
