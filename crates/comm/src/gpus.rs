//! Which ranks share a GPU. Every rank publishes its GPU, and all draw the same conclusions: NCCL needs a GPU for each rank, and ranks
//! that share one divide its memory.
use std::time::Duration;

use super::rendezvous::{Rendezvous, ranks};
use tunesmith_base::error::Result;

/// The UUID of a rank's GPU, or why the rank cannot take part.
pub type Offer = std::result::Result<String, String>;

/// The key of a rank's offer in the store.
fn key(rank: usize) -> String {
    format!("gpu/{rank}")
}

/// Exchanges GPU identities with the other ranks. Returns why the ranks cannot use NCCL, if so: the same text on every
/// rank.
///
/// # Errors
/// [`tunesmith_base::Kind::Peer`]: a rank is gone or late.
pub fn agree(rendezvous: &Rendezvous, own: Offer, limit: Duration) -> Result<std::result::Result<(), String>> {
    let value = match own {
        Ok(uuid) => format!("+{uuid}"),
        Err(why) => format!("-{}", why.chars().take(2000).collect::<String>()),
    };
    rendezvous.store.set(&key(rendezvous.world.rank), value.as_bytes())?;
    let offer = |rank: usize| -> Result<Offer> {
        let value = rendezvous.store.wait(&key(rank), Some(limit))?;
        let value = String::from_utf8_lossy(&value).into_owned();
        Ok(match value.strip_prefix('+') {
            Some(uuid) => Ok(uuid.to_owned()),
            None => Err(value.trim_start_matches('-').to_owned()),
        })
    };
    let offers: Result<Vec<Offer>> = (0..rendezvous.world.size).map(offer).collect();
    Ok(decide(&offers?))
}

/// How many ranks compute on this rank's GPU, itself included; `own` is the GPU's UUID, or none of a rank that computes on the CPU. Every
/// rank calls it.
///
/// # Errors
/// [`tunesmith_base::Kind::Peer`]: a rank is gone or late.
pub fn sharing(rendezvous: &Rendezvous, own: Option<&str>, limit: Duration) -> Result<usize> {
    let key = |rank: usize| format!("computes-on/{rank}");
    let own = own.unwrap_or_default().as_bytes();
    rendezvous.store.set(&key(rendezvous.world.rank), own)?;
    let mut there = 0;
    for rank in 0..rendezvous.world.size {
        there += usize::from(rendezvous.store.wait(&key(rank), Some(limit))? == own);
    }
    Ok(there)
}

/// Whether each rank has its own GPU; else why not.
fn decide(offers: &[Offer]) -> std::result::Result<(), String> {
    if let Some((rank, why)) = offers.iter().enumerate().find_map(|(rank, offer)| Some((rank, offer.as_ref().err()?))) {
        return Err(format!("rank {rank}: {why}"));
    }
    for (rank, offer) in offers.iter().enumerate() {
        let together: Vec<usize> = (rank..offers.len()).filter(|&other| offers[other] == *offer).collect();
        if together.len() > 1 {
            let gpu = offer.as_deref().unwrap_or_default();
            return Err(format!("{} share one GPU ({gpu})", ranks(&together)));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_needs_a_gpu_of_its_own() {
        let gpu = |name: &str| Ok(name.to_owned());
        assert_eq!(decide(&[gpu("GPU-1"), gpu("GPU-2")]), Ok(()));
        let shared = decide(&[gpu("GPU-1"), gpu("GPU-2"), gpu("GPU-1")]).unwrap_err();
        assert_eq!(shared, "rank 0 and rank 2 share one GPU (GPU-1)".replace("rank 0 and rank 2", &ranks(&[0, 2])));
        let without = decide(&[gpu("GPU-1"), Err("computes on the CPU".to_owned())]).unwrap_err();
        assert_eq!(without, "rank 1: computes on the CPU");
    }
}
