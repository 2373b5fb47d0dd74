//! Layer 4: optimizers as pure updates on slices, learning-rate schedules, clipping.
pub mod adamw;
pub mod clip;
pub mod schedule;

pub use adamw::{AdamW, Betas};
pub use schedule::Schedule;
