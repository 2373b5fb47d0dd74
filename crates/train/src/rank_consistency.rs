//! Checks before step 1 that all ranks train the same model in the same way. Ranks compare the fields of the stamp (kernels,
//! base, tokenizer, template, data, adapter, settings), the settings that decide when they communicate, and their start.
use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::rank_settings::COMMUNICATION;
use super::session::Session;
use tunesmith_base::error::{Error, Result};
use tunesmith_checkpoint::stamp::show;
use tunesmith_comm::rendezvous::ranks;
use tunesmith_comm::{Collectives, bytes};
use tunesmith_parallel::replicas::hash;

/// Fields of the stamp that may differ between ranks. Other vector instructions change only last bits.
const MAY_DIFFER: &[&str] = &["simd"];

/// Maximum number of differences in the error; one cause may have many.
const MAX_DIFFERENCES: usize = 12;

/// What a rank is about to train: values by name, as text.
type Claims = BTreeMap<String, String>;

impl Session<'_> {
    /// Refuses ranks that would not train the same model in the same way.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`], naming the ranks, the differences, and both values; [`tunesmith_base::Kind::Peer`].
    pub fn check_rank_consistency(&self) -> Result<()> {
        if self.comm.world().size == 1 {
            return Ok(());
        }
        let words = |(key, value): (&String, &serde_json::Value)| (key.clone(), show(key, value));
        let mut claims: Claims = self.stamp.fields()?.iter().map(words).collect();
        claims.retain(|key, _| !MAY_DIFFER.contains(&key.as_str()));
        let settings = self.plan.settings.iter().filter(|setting| COMMUNICATION.contains(&&*setting.key));
        claims.extend(settings.map(|setting| words((&setting.key, &setting.value))));
        if !self.sharing.shares_values() {
            let start = format!("hash {:016x}", hash(bytes::of(&self.model.params.values().to_host())));
            claims.insert("starting values".into(), start);
        }
        claims.insert("number of steps".into(), self.plan.steps.total_steps.to_string());
        claims.insert("step to start from".into(), self.state.step.to_string());
        compare(&*self.comm, &claims)
    }
}

/// Compares the claims of each rank with those of rank 0.
fn compare(comm: &dyn Collectives, claims: &Claims) -> Result<()> {
    let own = serde_json::to_vec(claims)
        .map_err(|error| Error::config("the settings cannot be compared between ranks").caused_by(error))?;
    let hashes = comm.collect(&[hash(&own)])?;
    if hashes.iter().all(|&other| other == hashes[0]) {
        return Ok(());
    }
    // All ranks see the same hashes, so all of them get here. Shorter texts are padded with blanks.
    let most = comm.collect(&[own.len() as u64])?.into_iter().max().unwrap_or_default() as usize;
    let mut padded = own;
    padded.resize(most, b' ');
    let all = comm.collect(&padded)?;
    let said: Vec<Claims> =
        all.chunks(most.max(1)).map(|text| serde_json::from_slice(text).unwrap_or_default()).collect();
    Err(refusal(&said).hint("every rank needs the same configuration, model, data, checkpoint and version"))
}

/// The error with the differences and both values. Ranks with the same value are named together.
fn refusal(said: &[Claims]) -> Error {
    let mut sides: BTreeMap<(&str, Option<&str>), Vec<usize>> = BTreeMap::new();
    let first = &said[0];
    for (rank, claims) in said.iter().enumerate().skip(1) {
        for key in first.keys().chain(claims.keys().filter(|key| !first.contains_key(*key))) {
            if first.get(key) != claims.get(key) {
                sides.entry((key, claims.get(key).map(String::as_str))).or_default().push(rank);
            }
        }
    }
    let mut others: Vec<usize> = sides.values().flatten().copied().collect();
    others.sort_unstable();
    others.dedup();
    let mut text = format!("{} would train differently from rank 0:", ranks(&others));
    for ((key, other), who) in sides.iter().take(MAX_DIFFERENCES) {
        let ours = first.get(*key).map_or("nothing", String::as_str);
        let (other, who) = (other.unwrap_or("nothing"), ranks(who));
        let _ = write!(text, "\n    {key}: {ours} on rank 0, {other} on {who}"); // a String never fails
    }
    if let Some(more) = sides.len().checked_sub(MAX_DIFFERENCES).filter(|&more| more > 0) {
        let _ = write!(text, "\n    and {more} more");
    }
    Error::config(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tunesmith_comm::Limits;
    use tunesmith_comm::threads::{self, Threads};

    #[test]
    fn differences_are_shown_with_both_values_and_the_ranks() {
        let compared = |sides: &[&[(&str, &str)]]| -> Vec<Option<String>> {
            let said: Vec<Claims> = sides
                .iter()
                .map(|claims| claims.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect())
                .collect();
            let seats = threads::world(said.len(), Limits::default());
            std::thread::scope(|scope| {
                let one = |(seat, claims)| {
                    scope.spawn(move || {
                        let seat: Threads = seat;
                        compare(&seat, claims).err().map(|error| error.to_string())
                    })
                };
                let running: Vec<_> = seats.into_iter().zip(&said).map(one).collect();
                running.into_iter().map(|rank| rank.join().unwrap()).collect()
            })
        };
        let base: &[(&str, &str)] = &[("data", "d"), ("tokenizer", "t")];
        assert!(compared(&[base, base, base]).iter().all(Option::is_none));
        let other: &[(&str, &str)] = &[("data", "d"), ("tokenizer", "a longer one")];
        for error in compared(&[base, other, base, other]) {
            let error = error.unwrap();
            assert!(error.contains("ranks 1 and 3 would train differently from rank 0"), "{error}");
            assert!(error.contains("tokenizer: t on rank 0, a longer one on ranks 1 and 3"), "{error}");
            assert!(!error.contains("data:"), "{error}");
        }
        let more: &[(&str, &str)] = &[("backend", "reference"), ("data", "e")];
        for error in compared(&[base, more]) {
            let error = error.unwrap();
            for side in ["backend: nothing on rank 0, reference on rank 1", "data: d on rank 0, e on rank 1"] {
                assert!(error.contains(side), "{error}");
            }
        }
    }
}
