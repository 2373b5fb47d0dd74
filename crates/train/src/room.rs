//! Ranks that run out of memory in a validation: all ranks end together, with the message of the rank that failed.
use tunesmith_base::error::{Error, Result};
use tunesmith_comm::Collectives;
use tunesmith_comm::rendezvous::ranks;

/// Ends all ranks at the same point if one has `failed` for lack of memory. Each rank returns the message of that rank.
///
/// # Errors
/// [`tunesmith_base::Kind::Memory`] if any rank has `failed`; [`tunesmith_base::Kind::Peer`].
pub fn all_have_room(comm: &dyn Collectives, failed: Option<Error>) -> Result<()> {
    if comm.world().size == 1 {
        return failed.map_or(Ok(()), Err);
    }
    let said = failed
        .map_or_else(String::new, |error| format!("{}\0{}", error.message(), error.hint_text().unwrap_or_default()));
    let lengths = comm.collect(&[said.len() as u64])?;
    let short: Vec<usize> = (0..lengths.len()).filter(|&rank| lengths[rank] > 0).collect();
    let Some(&first) = short.first() else { return Ok(()) };
    // All ranks see the same lengths, so all of them get here.
    let most = lengths.into_iter().max().unwrap_or_default() as usize;
    let mut padded = said.into_bytes();
    padded.resize(most, 0);
    let all = comm.collect(&padded)?;
    let of_first = String::from_utf8_lossy(&all[first * most..(first + 1) * most]).into_owned();
    let (message, hint) = of_first.split_once('\0').unwrap_or((&of_first, ""));
    let error = Error::memory(format!("{} had no room for a validation: {message}", ranks(&short)));
    let hint = hint.trim_end_matches('\0');
    Err(if hint.is_empty() { error } else { error.hint(hint) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tunesmith_base::error::Kind;
    use tunesmith_comm::Limits;
    use tunesmith_comm::threads::{self, Threads};

    #[test]
    fn all_ranks_report_the_rank_without_room() {
        let errors = |short: &[Option<&str>]| -> Vec<Option<Error>> {
            let seats = threads::world(short.len(), Limits::default());
            std::thread::scope(|scope| {
                let one = |(seat, short): (Threads, Option<&str>)| {
                    let failed = short.map(|text| Error::memory(text).hint("smaller batches"));
                    scope.spawn(move || all_have_room(&seat, failed).err())
                };
                let running: Vec<_> = seats.into_iter().zip(short.iter().copied()).map(one).collect();
                running.into_iter().map(|rank| rank.join().unwrap()).collect()
            })
        };
        assert!(errors(&[None, None]).iter().all(Option::is_none));
        for error in errors(&[None, Some("9 tokens need a lot"), None, Some("short")]) {
            let error = error.unwrap();
            assert_eq!(error.kind(), Kind::Memory);
            assert_eq!(error.message(), "ranks 1 and 3 had no room for a validation: 9 tokens need a lot");
            assert_eq!(error.hint_text(), Some("smaller batches"));
        }
    }
}
