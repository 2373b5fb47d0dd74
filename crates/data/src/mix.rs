//! Mixes several sources by weight. How many rows each source gives, which ones, and in what order depends only on
//! sizes, weights and the seed, so a resumed run sees the same mix.
use super::rng::shuffle;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::MixStrategy;

/// The limit of an epoch: it may use each row this often on average, or have this many rows, whichever is more.
const MOST: (usize, usize) = (100, 1 << 20);

/// The random stream of the first source. Epochs use the lower numbers.
const STREAM: u64 = 1 << 48;

/// How many rows each source gives to an epoch.
///
/// With `interleave_under` the mix is the largest that uses no row twice. With `interleave_over` it is the smallest
/// that uses every row. A source without rows, or with weight 0, gives none.
///
/// # Errors
/// [`tunesmith_base::Kind::Data`]: an epoch would repeat rows more than 100 times on average and have over a million
/// rows.
pub fn counts(sizes: &[usize], weights: &[f64], strategy: MixStrategy) -> Result<Vec<usize>> {
    let ratio = |(&size, &weight): (&usize, &f64)| size as f64 / weight;
    let there = sizes.iter().zip(weights).filter(|(size, weight)| **size > 0 && **weight > 0.0);
    let total = match strategy {
        MixStrategy::InterleaveUnder => there.map(ratio).reduce(f64::min),
        MixStrategy::InterleaveOver => there.map(ratio).reduce(f64::max),
    };
    let Some(total) = total else { return Ok(vec![0; sizes.len()]) };
    let count = |(&size, &weight): (&usize, &f64)| {
        let exact = total * weight;
        // The source that decides the size must give exactly all its rows, whatever the rounding.
        match strategy {
            _ if size == 0 || weight <= 0.0 => 0,
            MixStrategy::InterleaveUnder => (exact.round() as usize).min(size),
            MixStrategy::InterleaveOver => (exact.round() as usize).max(size),
        }
    };
    let counts: Vec<usize> = sizes.iter().zip(weights).map(count).collect();
    let rows = |counts: &[usize]| counts.iter().fold(0_usize, |sum, &count| sum.saturating_add(count));
    let most = rows(sizes).saturating_mul(MOST.0).max(MOST.1);
    if rows(&counts) > most {
        return Err(Error::data(format!(
            "data.datasets: with these weights an epoch would have more than {most} rows, made of {} different ones",
            rows(sizes)
        ))
        .hint("with mix_strategy: interleave_over every row is taken at least once: raise the smallest weights"));
    }
    Ok(counts)
}

/// The order of the mix, as pairs of a source and a row of that source. Each source gives `counts[source]` rows: all
/// its rows as often as they fit, and then a part of them, drawn by `seed` and in the order of the source. The rows of
/// each source are spread evenly over the mix.
pub fn order(sizes: &[usize], counts: &[usize], seed: u64) -> Vec<(usize, usize)> {
    let mut placed: Vec<(f64, usize, usize)> = Vec::with_capacity(counts.iter().sum());
    for (source, (&size, &count)) in sizes.iter().zip(counts).enumerate().filter(|(_, (size, _))| **size > 0) {
        let mut drawn: Vec<usize> = (0..size).collect();
        shuffle(&mut drawn, seed, STREAM + source as u64);
        drawn.truncate(count % size);
        drawn.sort_unstable();
        let rows = (0..count / size).flat_map(|_| 0..size).chain(drawn);
        placed.extend(rows.enumerate().map(|(nth, row)| ((nth as f64 + 0.5) / count as f64, source, row)));
    }
    // A stable order: at equal places the sources, and the rows of a source, keep their order.
    placed.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
    placed.into_iter().map(|(_, source, row)| (source, row)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_decide_the_counts_exactly() {
        let under = |sizes: &[usize], weights: &[f64]| counts(sizes, weights, MixStrategy::InterleaveUnder).unwrap();
        let over = |sizes: &[usize], weights: &[f64]| counts(sizes, weights, MixStrategy::InterleaveOver).unwrap();
        assert_eq!(under(&[100, 1000], &[1.0, 1.0]), [100, 100]);
        assert_eq!(under(&[100, 1000], &[0.3, 0.7]), [100, 233]);
        assert_eq!(under(&[100, 1000], &[1.0, 100.0]), [10, 1000]);
        assert_eq!(over(&[100, 1000], &[1.0, 1.0]), [1000, 1000]);
        assert_eq!(over(&[100, 1000, 50], &[2.0, 1.0, 1.0]), [2000, 1000, 1000]);
        assert_eq!(under(&[100, 0, 7], &[1.0, 1.0, 0.0]), [100, 0, 0], "what has no rows or no weight gives none");
        assert_eq!(under(&[0], &[1.0]), [0]);
        for weights in [[1e-9, 1.0], [1e18, 1.0], [1.0, f64::MIN_POSITIVE]] {
            let error = counts(&[20, 8], &weights, MixStrategy::InterleaveOver).unwrap_err();
            assert!(error.message().contains("28 different ones"), "{error}");
        }
    }

    #[test]
    fn a_mix_repeats_whole_rounds_spreads_sources_and_follows_its_seed() {
        let sizes = [3, 8];
        let mixed = order(&sizes, &[8, 8], 5);
        assert_eq!(mixed.len(), 16);
        let of = |source: usize| -> Vec<usize> {
            mixed.iter().filter(|(from, _)| *from == source).map(|(_, row)| *row).collect()
        };
        assert_eq!(of(0)[..6], [0, 1, 2, 0, 1, 2]);
        assert_eq!(of(1), (0..8).collect::<Vec<_>>(), "every row once");
        assert!(mixed.chunks(2).all(|pair| pair[0].0 == 0 && pair[1].0 == 1), "{mixed:?}");
        assert_eq!(mixed, order(&sizes, &[8, 8], 5));
        let some = |seed| order(&[1000], &[10], seed);
        assert_ne!(some(1), some(2), "which rows a part is made of is drawn");
        assert!(some(1).is_sorted(), "and they keep their order");
    }
}
