//! `tunesmith train`, end to end on a tiny model made here.
mod events;
