//! The tokens of a text.

/// The token ids of a text, with the byte range of each.
#[derive(Debug, Clone, Default)]
pub struct Encoded {
    /// Token ids, with those that the post-processor adds.
    pub ids: Vec<u32>,
    /// One byte range `start..end` of the text per id; empty for a token that the post-processor adds.
    pub offsets: Vec<(usize, usize)>,
}
