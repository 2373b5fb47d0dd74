//! `tunesmith train`, end to end on a tiny model made here.
mod backend;
mod classify;
mod crash;
mod curves;
mod divergence;
pub(super) mod ends;
mod events;
mod faults;
pub(super) mod fixture;
mod full_disk;
#[cfg(feature = "cuda")]
mod gpu_ranks;
mod launchers;
mod machines;
mod optim;
mod peers;
mod planned;
mod power;
mod printed;
mod quantized;
mod ranks;
mod recipes;
mod recipes_of_sft_play;
mod refusals;
pub(super) mod resume;
mod screen;
mod sharing;
mod signals;
