//! Compares the trained values of ranks that must hold the same ones, so that hardware errors and bugs show at once.
use tunesmith_base::error::{Error, Result};
use tunesmith_comm::rendezvous::ranks;
use tunesmith_comm::{Collectives, bytes};
use tunesmith_device::Floats;

/// Compares `values` with those of the other ranks, which must be equal to the bit. `step` is the number of the step in the
/// message.
///
/// # Errors
/// [`tunesmith_base::Kind::Numeric`], naming the ranks that differ from the majority (of two ranks: from rank 0);
/// [`tunesmith_base::Kind::Peer`].
pub(crate) fn compare_replicas(comm: &dyn Collectives, values: Floats<'_>, step: u64) -> Result<()> {
    if comm.world().size == 1 {
        return Ok(());
    }
    let hashes = comm.collect(&[hash(bytes::of(&values.to_host()))])?;
    let count = |one: u64| hashes.iter().filter(|&&other| other == one).count();
    // The hash that most ranks have; of several, the one that comes first in the order of ranks.
    let right = hashes.iter().rev().copied().max_by_key(|&one| count(one)).unwrap_or_default();
    let odd: Vec<usize> = (0..hashes.len()).filter(|&rank| hashes[rank] != right).collect();
    if odd.is_empty() {
        return Ok(());
    }
    Err(Error::numeric(format!("in step {step} the trained values of {} differ from those of the others", ranks(&odd)))
        .hint("memory, a processor or a link has corrupted them: check that machine, then --resume from the last checkpoint"))
}

/// The hash that ranks compare: the first 64 bits of BLAKE3.
pub fn hash(bytes: &[u8]) -> u64 {
    let hash = blake3::hash(bytes);
    u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("a hash has 32 bytes"))
}

#[cfg(test)]
mod tests {
    use tunesmith_base::Kind;
    use tunesmith_comm::Limits;
    use tunesmith_comm::threads::{self, Threads};

    use super::*;

    #[test]
    fn a_replica_that_went_wrong_is_named() {
        let outcomes = |values: &[f32]| -> Vec<Option<Error>> {
            let ranks = threads::world(values.len(), Limits::default());
            std::thread::scope(|scope| {
                let check = |(rank, &value)| {
                    scope.spawn(move || {
                        let rank: Threads = rank;
                        compare_replicas(&rank, [1.0, value][..].into(), 7).err()
                    })
                };
                let running: Vec<_> = ranks.into_iter().zip(values).map(check).collect();
                running.into_iter().map(|rank| rank.join().unwrap()).collect()
            })
        };
        assert!(outcomes(&[2.0, 2.0, 2.0]).iter().all(Option::is_none));
        for error in outcomes(&[2.0, 3.0, 3.0]) {
            let error = error.unwrap();
            assert_eq!(error.kind(), Kind::Numeric);
            assert!(error.message().contains("in step 7 the trained values of rank 0 differ"), "{error}");
        }
        // A comparison of numbers would not see this bit.
        assert!(outcomes(&[0.0, -0.0])[0].as_ref().unwrap().message().contains("rank 1"));
    }
}
