//! `tunesmith train`, end to end on a tiny model made here.
mod backend;
mod crash;
mod ends;
mod events;
pub(super) mod fixture;
mod machines;
mod optim;
mod ranks;
mod refusals;
mod resume;
mod signals;
