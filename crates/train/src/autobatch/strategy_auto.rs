//! `train.strategy: auto` with several ranks: DDP if it fits, else the strategy that fits and shards the least.
use crate::model_source::ModelSource;
use tunesmith_base::error::Result;
use tunesmith_comm::Collectives;
use tunesmith_config::{Checkpointing, Strategy};
use tunesmith_device::memory;
use tunesmith_plan::human_bytes;
use tunesmith_plan::memory::Pass;
use tunesmith_plan::strategies::Way;

/// The strategies to choose from, fastest first.
pub const CANDIDATES: [Strategy; 4] = [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Fsdp];

/// Chooses the strategy of a run. Also returns the reason, with the predicted bytes of each candidate. `candidates` are
/// [`CANDIDATES`], each with the way it shards memory. All ranks choose the same.
///
/// # Errors
/// [`tunesmith_base::Kind::Peer`]; those of `MemoryModel::rank`.
pub fn choose(
    source: &ModelSource,
    candidates: &[(Strategy, Way)],
    checkpointing: Checkpointing,
    pass: &Pass,
    comm: &dyn Collectives,
) -> Result<(Strategy, String)> {
    let (model, ranks) = (source.memory(), comm.world().size);
    let need =
        |&(strategy, way): &(Strategy, Way)| Ok((strategy, model.rank(way, checkpointing, ranks, pass)?.total()));
    let needs: Vec<(Strategy, u64)> = candidates.iter().map(need).collect::<Result<_>>()?;
    let budgets = comm.collect(&[memory::budget(source.device).unwrap_or(u64::MAX)])?;
    let memory = budgets.into_iter().min().unwrap_or(u64::MAX);
    // Machines may predict differently, so the first rank chooses for all.
    let mut chosen = [pick(&needs, memory) as u64];
    comm.broadcast(&mut chosen, 0)?;
    let chosen = (chosen[0] as usize).min(needs.len() - 1);
    Ok((needs[chosen].0, reason(&needs, chosen, memory)))
}

/// The index of the first need that fits into `memory`, else of the smallest.
fn pick(needs: &[(Strategy, u64)], memory: u64) -> usize {
    let least = || (0..needs.len()).min_by_key(|&at| needs[at].1).unwrap_or(0);
    needs.iter().position(|(_, need)| *need <= memory).unwrap_or_else(least)
}

fn reason(needs: &[(Strategy, u64)], chosen: usize, memory: u64) -> String {
    let figures: Vec<_> =
        needs.iter().map(|(strategy, need)| format!("{strategy} needs {}", human_bytes(*need))).collect();
    let there = if memory == u64::MAX { "no budget".to_owned() } else { human_bytes(memory) };
    let (strategy, need) = needs[chosen];
    let fits = if need <= memory { "" } else { "; none of them fits, this needs the least" };
    format!("train.strategy: auto chooses {strategy}: with {there} per rank, {}{fits}", figures.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_that_fits_is_taken_or_the_least() {
        let needs = [(Strategy::Ddp, 900 << 20), (Strategy::Zero1, 600 << 20), (Strategy::Zero2, 500 << 20)];
        assert_eq!([1000, 900, 899, 599, 499].map(|memory| pick(&needs, memory << 20)), [0, 0, 1, 2, 2]);
        let text = reason(&needs, 1, 700 << 20);
        assert!(
            text.contains("chooses zero1: with 700 MiB per rank, ddp needs 900 MiB, zero1 needs 600 MiB"),
            "{text}"
        );
        assert!(reason(&needs, 2, 1 << 20).ends_with("none of them fits, this needs the least"));
    }
}
