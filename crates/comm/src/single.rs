//! The engine for one rank, where every sum is already complete.
use std::ops::Range;

use super::{Collectives, Group, Limits, World};
use tunesmith_base::error::Result;

/// A world of one rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct Single;

impl Collectives for Single {
    fn world(&self) -> World {
        World::ALONE
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn name(&self) -> &'static str {
        "single"
    }

    fn all_to_all_bytes(&self, send: &[u8], _parts: &[Range<usize>], receive: &mut [u8]) -> Result<()> {
        receive.copy_from_slice(send);
        Ok(())
    }

    fn all_gather_bytes(&self, _data: &mut [u8], _parts: &[Range<usize>]) -> Result<()> {
        Ok(())
    }

    fn broadcast_bytes(&self, _data: &mut [u8], _root: usize) -> Result<()> {
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        Ok(())
    }

    fn new_group(&self, _: Group) -> Result<Box<dyn Collectives>> {
        Ok(Box::new(Self))
    }
}
