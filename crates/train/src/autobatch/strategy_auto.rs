//! `train.strategy: auto` with several ranks: whole copies where they fit, else what shares the least that makes it fit.
use super::budget;
use crate::prepare::Parts;
use tunesmith_base::error::Result;
use tunesmith_base::memory;
use tunesmith_comm::Collectives;
use tunesmith_config::{Config, Strategy, TrainConfig};
use tunesmith_data::Dataset;
use tunesmith_plan::human_bytes;

/// What there is, the fastest first.
const WAYS: [Strategy; 4] = [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Fsdp];

/// The strategy that the ranks of a run take where it leaves that to them, and why, with the figures; nothing where there is
/// nothing to choose.
///
/// # Errors
/// [`tunesmith_base::Kind::Peer`]; what the prediction of memory refuses.
pub fn choose(parts: &Parts, dataset: &Dataset, comm: &dyn Collectives) -> Result<Option<(Strategy, String)>> {
    let Parts { config, arch, weights, .. } = parts;
    let ranks = comm.world().size;
    if ranks == 1 || config.train.strategy != Strategy::Auto {
        return Ok(None);
    }
    let pass = budget::largest(config, dataset);
    let mut needs = Vec::new();
    for strategy in WAYS {
        let config = Config { train: TrainConfig { strategy, ..config.train.clone() }, ..config.clone() };
        needs.push((strategy, budget::held(&config, arch, weights.as_ref(), (ranks, pass))?.total()));
    }
    let budgets = comm.collect(&[memory::budget().unwrap_or(u64::MAX)])?;
    let memory = budgets.into_iter().min().unwrap_or(u64::MAX);
    // Machines may predict otherwise: what the first rank finds holds for all.
    let mut chosen = [pick(&needs, memory) as u64];
    comm.broadcast(&mut chosen, 0)?;
    let chosen = (chosen[0] as usize).min(needs.len() - 1);
    Ok(Some((needs[chosen].0, told(&needs, chosen, memory))))
}

/// The place of the first need that there is memory for, or else of the least.
fn pick(needs: &[(Strategy, u64)], memory: u64) -> usize {
    let least = || (0..needs.len()).min_by_key(|&at| needs[at].1).unwrap_or(0);
    needs.iter().position(|(_, need)| *need <= memory).unwrap_or_else(least)
}

fn told(needs: &[(Strategy, u64)], chosen: usize, memory: u64) -> String {
    let figures: Vec<_> =
        needs.iter().map(|(strategy, need)| format!("{strategy} needs {}", human_bytes(*need))).collect();
    let there = if memory == u64::MAX { "no budget".to_owned() } else { human_bytes(memory) };
    let (strategy, need) = needs[chosen];
    let fits = if need <= memory { "" } else { "; none of them fits, this is the least" };
    format!("train.strategy: auto takes {strategy}: of {there} a rank, {}{fits}", figures.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_that_fits_is_taken_or_the_least() {
        let needs = [(Strategy::Ddp, 900 << 20), (Strategy::Zero1, 600 << 20), (Strategy::Zero2, 500 << 20)];
        assert_eq!([1000, 900, 899, 599, 499].map(|memory| pick(&needs, memory << 20)), [0, 0, 1, 2, 2]);
        let text = told(&needs, 1, 700 << 20);
        assert!(text.contains("takes zero1: of 700 MiB a rank, ddp needs 900 MiB, zero1 needs 600 MiB"), "{text}");
        assert!(told(&needs, 2, 1 << 20).ends_with("none of them fits, this is the least"));
    }
}
