//! `tunesmith train`, end to end on a tiny model made here.
mod backend;
mod classify;
mod crash;
mod divergence;
mod ends;
mod events;
mod faults;
pub(super) mod fixture;
mod launchers;
mod machines;
mod optim;
mod quantized;
mod ranks;
mod recipes;
mod refusals;
mod resume;
mod sharing;
mod signals;
