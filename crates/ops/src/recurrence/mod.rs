//! What recurrent mixers share: the state of a text, and all of forward and backward but for their gates.
pub(crate) mod cpu;
pub(crate) mod cuda;
mod state;

pub(crate) use state::check_sequences;
pub use state::{Shape, State};
