//! Confidence intervals by the Poisson bootstrap. In each replicate a row's weight is a Poisson(1) number, a function of seed, row
//! and replicate alone. Only one sum per replicate is kept, however many rows there are. Two models on the same rows have the
//! same replicates, so their difference has an interval too (a paired bootstrap).
//!
//! B. Efron, "Bootstrap methods: another look at the jackknife", 1979; J. Hanley and B. `MacGibbon`, "Creating non-parametric
//! bootstrap samples using Poisson frequencies", 2006.
use tunesmith_ops::dropout::key;

/// Sums of a metric's numbers over rows: plain, and by replicate.
#[derive(Debug, Clone)]
pub struct Sums {
    /// Sums in which every row counts once.
    pub all: Vec<f64>,
    seed: u64,
    /// `[replicates, width]`.
    replicates: Vec<f64>,
    /// Whether any row counts in each replicate, `[replicates]`.
    counted: Vec<bool>,
}

/// Bounds that turn a uniform 64-bit number into a Poisson(1) number: below the first it is 0, below the second 1, and so
/// on.
fn thresholds() -> [u64; 20] {
    let mut bounds = [u64::MAX; 20];
    let (mut probability, mut total) = ((-1.0f64).exp(), 0.0);
    for (number, bound) in bounds.iter_mut().enumerate() {
        total += probability;
        *bound = (total * 2.0f64.powi(64)) as u64;
        probability /= (number + 1) as f64;
    }
    bounds
}

impl Sums {
    /// Starts sums of `width` numbers per row; 0 replicates for no intervals.
    pub fn new(width: usize, replicates: usize, seed: u64) -> Self {
        Self {
            all: vec![0.0; width],
            seed,
            replicates: vec![0.0; width * replicates],
            counted: vec![false; replicates],
        }
    }

    /// Adds a row's numbers; `row` is its index in the split.
    pub fn add(&mut self, row: u64, counts: &[f64]) {
        assert_eq!(counts.len(), self.all.len(), "as many numbers in each row");
        self.all.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        let bounds = thresholds();
        for (number, sums) in self.replicates.chunks_exact_mut(counts.len().max(1)).enumerate() {
            let draw = key(self.seed, row, number as u64);
            let times = bounds.iter().take_while(|&&bound| draw >= bound).count() as f64;
            if times > 0.0 {
                self.counted[number] = true;
                sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += times * count);
            }
        }
    }

    /// The score of each replicate. A replicate without rows has NaN, which [`interval`] leaves out, because some metrics would
    /// give 0.
    pub fn scores(&self, score: impl Fn(&[f64]) -> f64) -> Vec<f64> {
        let replicates = self.replicates.chunks_exact(self.all.len().max(1)).zip(&self.counted);
        replicates.map(|(sums, counted)| if *counted { score(sums) } else { f64::NAN }).collect()
    }
}

/// How often each row counts in a replicate, as in [`Sums`].
pub fn times(seed: u64, rows: usize, replicate: u64) -> Vec<u8> {
    let bounds = thresholds();
    let of_row = |row: u64| {
        let draw = key(seed, row, replicate);
        bounds.iter().take_while(|&&bound| draw >= bound).count() as u8
    };
    (0..rows as u64).map(of_row).collect()
}

/// The central range with the share `confidence` of the finite values, interpolated as numpy's `percentile` does. `None` without
/// finite values.
pub fn interval(mut values: Vec<f64>, confidence: f64) -> Option<(f64, f64)> {
    values.retain(|value| value.is_finite());
    values.sort_by(f64::total_cmp);
    let last = values.len().checked_sub(1)? as f64;
    let at = |share: f64| {
        let place = share.clamp(0.0, 1.0) * last;
        let (low, high) = (values[place.floor() as usize], values[place.ceil() as usize]);
        low + (high - low) * place.fract()
    };
    Some((at(f64::midpoint(0.0, 1.0 - confidence)), at(f64::midpoint(1.0, confidence))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tunesmith_ops::testing::numbers;

    #[test]
    fn draws_are_poisson_with_mean_one() {
        let bounds = thresholds();
        let mut counts = [0u32; 4];
        for draw in 0..100_000 {
            let value = key(3, draw, 5);
            let number = bounds.iter().take_while(|&&bound| value >= bound).count();
            counts[number.min(3)] += 1;
        }
        for (count, share) in counts.iter().zip([0.367_88, 0.367_88, 0.183_94, 0.080_3]) {
            assert!((f64::from(*count) / 100_000.0 - share).abs() < 0.005, "{counts:?}");
        }
    }

    #[test]
    fn a_replicate_in_which_no_row_counts_is_left_out() {
        let mut sums = Sums::new(1, 400, 3);
        (0..2).for_each(|row| sums.add(row, &[0.5]));
        // exp(-2): about one of seven has no row. A measure such as BLEU gives 0 for it.
        let scores = sums.scores(|sums| if sums[0] > 0.0 { 50.0 } else { 0.0 });
        let empty = scores.iter().filter(|score| score.is_nan()).count();
        assert!((30..90).contains(&empty), "{empty}");
        assert_eq!(interval(scores, 0.95), Some((50.0, 50.0)));
    }

    #[test]
    fn the_interval_of_a_mean_is_that_of_the_normal_distribution_and_the_seed_s_own() {
        let rows = 400;
        let values: Vec<f64> = numbers(9, rows).into_iter().map(f64::from).collect();
        let of = |seed| {
            let mut sums = Sums::new(2, 2000, seed);
            values.iter().enumerate().for_each(|(row, value)| sums.add(row as u64, &[*value, 1.0]));
            interval(sums.scores(|sums| sums[0] / sums[1]), 0.95).unwrap()
        };
        let mean = values.iter().sum::<f64>() / rows as f64;
        let deviation = (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / rows as f64).sqrt();
        let half = 1.96 * deviation / (rows as f64).sqrt();
        let (low, high) = of(1);
        assert!(
            ((mean - low) / half - 1.0).abs() < 0.1 && ((high - mean) / half - 1.0).abs() < 0.1,
            "{low} {high} {half}"
        );
        assert_eq!(of(1), (low, high));
        assert_ne!(of(2), (low, high));
        assert_eq!(interval(vec![f64::NAN], 0.95), None);
        assert_eq!(interval(vec![1.0, 2.0, 3.0], 0.5), Some((1.5, 2.5)));
    }
}
