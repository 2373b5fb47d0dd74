//! Layer 4: optimizers as pure updates of tensors, learning-rate schedules, clipping.
//!
//! An optimizer is one file with a [`Rule`] and one line in [`registry`], a schedule one file with a [`schedule::Form`] and one
//! line in [`schedule`]; each has its word in `config/choice.rs`.
pub mod adafactor;
pub mod adamw;
pub mod adamw_8bit;
pub mod clip;
pub mod ema;
pub mod lion;
pub mod loss_scale;
pub mod muon;
pub mod optimizer;
pub mod rates;
pub mod registry;
pub mod schedule;
pub mod schedule_free;
pub mod sgd;

pub use adamw::{AdamW, Betas};
pub use ema::Ema;
pub use loss_scale::LossScaler;
pub use optimizer::{Gradients, Optimizer, Rule, Slot, State, StateTensor};
pub use schedule::Schedule;
