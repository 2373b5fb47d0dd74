//! A caller's view of a running generation: tokens as they come, and answers as they end.
use tunesmith_base::error::Result;

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum End {
    /// A stop token, or a stop string that the watcher found.
    Stop,
    /// The answer has `max_new_tokens` tokens.
    Length,
    /// Prompt and answer together fill the model's context.
    Context,
}

/// A generated answer, as tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The generated tokens, without the stop token.
    pub tokens: Vec<u32>,
    /// What ended it.
    pub end: End,
}

/// A watcher's decision about what happens next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Go {
    /// Generate the next token.
    On,
    /// End this answer with [`End::Stop`]; others continue.
    EndText,
    /// End all answers: the generation returns `None`.
    EndAll,
}

/// Receives tokens and answers during a generation, and decides whether it continues.
pub trait Watcher {
    /// The answer to prompt number `text` has grown to `tokens`; with beam search, the leading beam has.
    ///
    /// # Errors
    /// Ends everything.
    fn token(&mut self, text: usize, tokens: &[u32]) -> Result<Go> {
        let _ = (text, tokens);
        Ok(Go::On)
    }

    /// Whether `tokens` end the answer for another reason than a stop token, such as a stop string. A beam search calls it for
    /// each candidate continuation.
    fn ends(&mut self, text: usize, tokens: &[u32]) -> bool {
        let _ = (text, tokens);
        false
    }

    /// Prompt number `text` has its answer. Answers come in the order in which they end.
    ///
    /// # Errors
    /// Ends everything.
    fn answer(&mut self, text: usize, answer: &Answer) -> Result<()> {
        let _ = (text, answer);
        Ok(())
    }
}

/// A watcher that ignores everything.
pub struct Unwatched;

impl Watcher for Unwatched {}

/// Ends the generation when the function, called before each token, returns false.
pub struct While<F: FnMut() -> bool>(pub F);

impl<F: FnMut() -> bool> Watcher for While<F> {
    fn token(&mut self, _: usize, _: &[u32]) -> Result<Go> {
        Ok(if (self.0)() { Go::On } else { Go::EndAll })
    }
}
