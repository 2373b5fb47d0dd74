//! Splits the output of a reasoning model into its reasoning and its answer while tokens arrive.
use tunesmith_base::error::Result;
use tunesmith_data::{ReasoningForm, Tokenizer};

use super::stream::{TextStream, certain};

/// Which part the next token belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Not known yet: the text so far may be the beginning of [`ReasoningForm::open`] or [`ReasoningForm::head`].
    Start,
    Reasoning,
    Answer,
}

/// A generated text while it grows, split into its reasoning and its answer.
#[derive(Debug)]
pub struct SplitAnswer<'a> {
    form: Option<&'a ReasoningForm>,
    part: Part,
    /// Tokens before the answer, with special tokens in their text.
    before: TextStream,
    /// Where the reasoning begins in the text of `before`, and where it ends.
    reasoning: std::ops::Range<usize>,
    /// The answer; special tokens are left out of its text.
    answer: TextStream,
    /// Text of the answer in the token that closed the reasoning.
    first: String,
    ids: Vec<u32>,
}

impl<'a> SplitAnswer<'a> {
    /// Starts to split the output for a chat template that marks reasoning by `form`; with `None`, all of it is the answer.
    pub fn new(form: Option<&'a ReasoningForm>) -> Self {
        let part = match form {
            None => Part::Answer,
            Some(form) if form.open.is_empty() => Part::Reasoning,
            Some(_) => Part::Start,
        };
        Self {
            form,
            part,
            before: TextStream::with_special_tokens(),
            reasoning: 0..0,
            answer: TextStream::default(),
            first: String::new(),
            ids: Vec::new(),
        }
    }

    /// Splits a whole output at once.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn of(form: Option<&'a ReasoningForm>, tokenizer: &Tokenizer, tokens: &[u32]) -> Result<Self> {
        let mut split = Self::new(form);
        tokens.iter().try_for_each(|&id| split.push(tokenizer, id))?;
        split.finish(tokenizer)?;
        Ok(split)
    }

    /// Adds a token.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<()> {
        let Some(form) = self.form.filter(|_| self.part != Part::Answer) else {
            return self.answer.push(tokenizer, id).map(drop);
        };
        self.ids.push(id);
        self.before.push(tokenizer, id)?;
        if self.part == Part::Start {
            let text = self.before.text();
            let begins = text.trim_start();
            let skipped = text.len() - begins.len();
            if begins.starts_with(&form.open) {
                self.part = Part::Reasoning;
                self.reasoning = skipped + form.open.len()..text.len();
            } else if !form.head.is_empty() && begins.starts_with(&form.head) {
                self.first = begins[form.head.len()..].trim_start().to_owned();
                self.part = Part::Answer;
                return Ok(());
            } else if !form.open.starts_with(begins) && !form.head.starts_with(begins) {
                return self.no_reasoning(tokenizer);
            }
        }
        if self.part == Part::Reasoning {
            let text = self.before.text();
            let rest = &text[self.reasoning.start..];
            if let Some(at) = rest.find(&form.close) {
                self.reasoning.end = self.reasoning.start + at;
                self.first = rest[at + form.close.len()..].trim_start().to_owned();
                self.part = Part::Answer;
            } else {
                self.reasoning.end = self.reasoning.start + certain(rest, std::slice::from_ref(&form.close));
            }
        }
        Ok(())
    }

    /// Treats all tokens so far as the answer.
    fn no_reasoning(&mut self, tokenizer: &Tokenizer) -> Result<()> {
        self.part = Part::Answer;
        std::mem::take(&mut self.ids).into_iter().try_for_each(|id| self.answer.push(tokenizer, id).map(drop))
    }

    /// Tells that no more tokens come. Text that only looked like the beginning of reasoning is then the answer, and reasoning
    /// that is still open ends here.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<()> {
        match self.part {
            Part::Start => self.no_reasoning(tokenizer),
            Part::Reasoning => {
                self.reasoning.end = self.before.text().len();
                Ok(())
            }
            Part::Answer => Ok(()),
        }
    }

    /// The reasoning so far, without white space at its ends; empty if there is none.
    pub fn reasoning(&self) -> &str {
        self.before.text()[self.reasoning.clone()].trim()
    }

    /// The text of the answer so far, without its reasoning.
    pub fn answer(&self) -> String {
        let text = self.first.clone() + self.answer.text();
        if self.reasoning().is_empty() { text } else { text.trim_start().to_owned() }
    }
}
