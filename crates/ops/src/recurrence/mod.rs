//! What recurrent mixers share: the state of a text, and on the CPU how a sequence's tokens are walked.
//!
//! A head's state is a matrix. Its columns do not depend on each other: on the CPU some of them stay in the nearest cache
//! while the tokens of a chunk pass.
mod panels;
mod state;

pub(crate) use panels::{Block, COLUMNS, Chunk, Scratch, add_rows, chunks, read_block, sums_of, write_block};
pub(crate) use state::check_sequences;
pub use state::{Shape, State};
