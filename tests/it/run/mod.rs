//! `tunesmith train`, end to end on a tiny model made here.
mod ends;
mod events;
mod fixture;
mod optim;
mod refusals;
mod resume;
mod signals;
