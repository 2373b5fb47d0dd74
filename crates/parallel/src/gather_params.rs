//! Gathers sharded trained values for rank 0 to write. Rank 0 names one tensor after the other, and the other ranks send
//! their parts.
use std::cell::Cell;
use std::io;

use super::ddp_zero::Sharing;
use super::gather_optimizer::Gathered;
use tunesmith_base::error::{Error, Result};
use tunesmith_checkpoint::TRAINED;
use tunesmith_comm::{Collectives, bytes};
use tunesmith_device::Floats;
use tunesmith_model::ParamSpec;
use tunesmith_optim::Optimizer;

/// Rank 0 sends this instead of a tensor's index when it needs no more.
const END: u64 = u64::MAX;

/// Sharded trained values, which rank 0 gathers tensor by tensor while the other ranks serve it ([`Fetch::follow`]).
pub struct Fetch<'a> {
    gathered: Gathered<'a>,
    comm: &'a dyn Collectives,
    specs: &'a [ParamSpec],
    ended: Cell<bool>,
}

impl<'a> Fetch<'a> {
    /// Every rank makes one. `values` are the trained values that this rank keeps, end to end; `specs` are all trained tensors.
    pub fn new(
        comm: &'a dyn Collectives,
        sharing: &'a Sharing,
        optimizer: &'a Optimizer,
        specs: &'a [ParamSpec],
        values: Floats<'a>,
    ) -> Self {
        let gathered = Gathered::new(comm, sharing, optimizer, specs, Some(values));
        Self { gathered, comm, specs, ended: Cell::new(false) }
    }

    /// Gathers the trained tensor number `index` and writes its values. All ranks call it together.
    fn tensor(&self, index: usize, writer: &mut dyn io::Write) -> Result<()> {
        let Some(spec) = self.specs.get(index) else {
            return Err(Error::peer(format!("rank 0 asks for tensor {index} of {}", self.specs.len()))
                .hint("start all ranks with the same version and configuration; then continue with --resume"));
        };
        let written = self.gathered.write(&format!("{}{TRAINED}", spec.name), writer);
        self.gathered.cause(written.map_err(|error| Error::io("put together", &spec.name, &error)))
    }

    /// The values of a tensor. Rank 0 calls it while the others are in [`Fetch::follow`].
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]; [`tunesmith_base::Kind::Model`]: no such tensor is trained.
    pub fn values(&self, name: &str) -> Result<Vec<f32>> {
        let index = self.specs.iter().position(|spec| spec.name == name);
        let index = index.ok_or_else(|| Error::model(format!("no tensor {name:?} is trained")))?;
        self.comm.broadcast(&mut [index as u64], 0)?;
        let mut values = vec![0.0f32; self.specs[index].range().len()];
        self.tensor(index, &mut bytes::of_mut(&mut values))?;
        Ok(values)
    }

    /// All values, in the order of the flat buffer. Rank 0 calls it while the others are in [`Fetch::follow`], and lets them
    /// return ([`Fetch::end`]).
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`].
    pub fn all(&self) -> Result<Vec<f32>> {
        let tensors: Result<Vec<_>> = self.specs.iter().map(|spec| self.values(&spec.name)).collect();
        let values = tensors?.concat();
        self.end()?;
        Ok(values)
    }

    /// Lets the other ranks return from [`Fetch::follow`]. A second call does nothing.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`].
    pub fn end(&self) -> Result<()> {
        if self.ended.replace(true) { Ok(()) } else { self.comm.broadcast(&mut [END], 0) }
    }

    /// Serves rank 0 until it calls [`Fetch::end`]. Every other rank calls it.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`].
    pub fn follow(&self) -> Result<()> {
        loop {
            let mut wanted = [0u64];
            self.comm.broadcast(&mut wanted, 0)?;
            match wanted {
                [END] => {
                    self.ended.set(true);
                    return Ok(());
                }
                [index] => self.tensor(index as usize, &mut io::sink())?,
            }
        }
    }
}
