//! Trained values that ranks share, put together tensor by tensor for the first rank to write: it asks for one after the
//! other, and the others follow.
use std::cell::Cell;
use std::io;

use super::ddp_zero::Sharing;
use super::gather_optimizer::Gathered;
use tunesmith_base::error::{Error, Result};
use tunesmith_checkpoint::TRAINED;
use tunesmith_comm::{Collectives, bytes};
use tunesmith_model::ParamSpec;
use tunesmith_optim::Optimizer;

/// What the first rank sends in the place of a tensor's number when it needs no more.
const END: u64 = u64::MAX;

/// Values of which each rank keeps its share.
pub struct Fetch<'a> {
    gathered: Gathered<'a>,
    comm: &'a dyn Collectives,
    specs: &'a [ParamSpec],
    ended: Cell<bool>,
}

impl<'a> Fetch<'a> {
    /// `values` are those that this rank keeps, end to end.
    pub fn new(
        comm: &'a dyn Collectives,
        sharing: &'a Sharing,
        optimizer: &'a Optimizer,
        specs: &'a [ParamSpec],
        values: &'a [f32],
    ) -> Self {
        let gathered = Gathered::new(comm, sharing, optimizer, specs, Some(values));
        Self { gathered, comm, specs, ended: Cell::new(false) }
    }

    fn tensor(&self, index: usize, writer: &mut dyn io::Write) -> Result<()> {
        let Some(spec) = self.specs.get(index) else {
            return Err(Error::peer(format!("rank 0 asks for tensor {index} of {}", self.specs.len()))
                .hint("start all ranks with the same version and configuration; then go on with --resume"));
        };
        let written = self.gathered.write(&format!("{}{TRAINED}", spec.name), writer);
        self.gathered.cause(written.map_err(|error| Error::io("put together", &spec.name, &error)))
    }

    /// The values of a tensor, on the first rank.
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

    /// All values, on the first rank; needs no [`Fetch::end`] after it.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`].
    pub fn all(&self) -> Result<Vec<f32>> {
        let tensors: Result<Vec<_>> = self.specs.iter().map(|spec| self.values(&spec.name)).collect();
        let values = tensors?.concat();
        self.end()?;
        Ok(values)
    }

    /// Lets the other ranks go on, once.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`].
    pub fn end(&self) -> Result<()> {
        if self.ended.replace(true) { Ok(()) } else { self.comm.broadcast(&mut [END], 0) }
    }

    /// What the other ranks do meanwhile.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`].
    pub fn follow(&self) -> Result<()> {
        loop {
            let mut asked = [0u64];
            self.comm.broadcast(&mut asked, 0)?;
            match asked {
                [END] => {
                    // It was for this rank too.
                    self.ended.set(true);
                    return Ok(());
                }
                [index] => self.tensor(index as usize, &mut io::sink())?,
            }
        }
    }
}
