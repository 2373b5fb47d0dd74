//! Learned positions (GPT-2): each position of a text has a row of a table, which is added to the stream before the first
//! block, to rows of images too. Positions are counted from the beginning of each text, whatever it shares a batch with.
use super::grads::Grads;
use super::pass::Pass;
use super::weight::Weight;
use std::ops::Range;
use tunesmith_base::error::{Error, Result};
use tunesmith_ops::activation::Activation;
use tunesmith_ops::{elementwise, embedding};

/// The table of learned positions.
#[derive(Debug)]
pub struct LearnedPositions {
    /// `[count, hidden]`.
    pub table: Weight,
    /// How many positions there are.
    pub count: usize,
    pub hidden: usize,
}

impl LearnedPositions {
    /// The rows of the table for texts with tokens at these places. Every place of a text that
    /// [`LearnedPositions::check`] accepts has a row. On a device that only counts, texts may be longer.
    pub fn ids(&self, places: impl Iterator<Item = Range<usize>>) -> Vec<u32> {
        places.flatten().map(|place| (place % self.count) as u32).collect()
    }

    /// Refuses a text with more tokens than there are positions. The rows of its images count as tokens.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the text is too long.
    pub fn check(&self, tokens: usize) -> Result<()> {
        if tokens <= self.count {
            return Ok(());
        }
        Err(Error::data(format!("a text of {tokens} tokens, and the model has {} positions", self.count))
            .hint("shorten it, or generate fewer tokens: n_positions of config.json is the most"))
    }

    /// The rows `ids` of the table, `[ids, hidden]`.
    pub fn rows(&self, pass: &Pass<'_>, ids: &[u32]) -> Activation {
        embedding::forward(pass.pool, self.table.view(pass.values).store(), self.hidden, ids, 1.0)
    }

    /// Adds the rows of the table to `x [ids, hidden]`.
    pub fn add(&self, pass: &Pass<'_>, x: &mut Activation, ids: &[u32]) {
        elementwise::add(x, &self.rows(pass, ids));
    }

    /// Adds the gradient of the table, if it is trained, given that of the stream `[ids, hidden]`.
    pub fn backward(&self, dx: &Activation, ids: &[u32], grads: &mut Grads<'_>) {
        self.table.add_embedding_gradient(dx, ids, 1.0, None, grads);
    }
}
