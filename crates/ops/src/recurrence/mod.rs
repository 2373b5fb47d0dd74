//! What the recurrent mixers (the gated delta rule and Mamba 2) share: the state of a text, and the forward and
//! backward passes except for the gates.
pub(crate) mod cpu;
pub(crate) mod cuda;
mod state;

pub(crate) use state::check_sequences;
pub use state::{Shape, State};
