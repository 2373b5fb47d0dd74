//! The memory of a pass on a GPU. It depends on the number of tokens and the share of labelled ones, not on the rows.
//! So the engine counts a few passes (a walk), and the memory of others is interpolated between them. A pass with
//! images is always counted.
use super::{GpuWalk, Pass, Predictor, Routing, Walked};

/// Shares of labelled tokens are rounded up to multiples of 1/64, so that passes of whole rows, whose last tokens have
/// no label, are alike.
const SHARES: u64 = 64;
/// Passes with at most this many tokens are counted as they are.
const EXACT: u64 = 256;
/// The most tokens of a pass that is counted. Larger passes are extrapolated.
const MOST: u64 = 1 << 16;
/// The largest product of tokens and experts in a pass that is counted.
const MOST_CHOICES: u64 = 1 << 26;
/// With more experts than this in all blocks together, only a few passes are counted, of at most [`MOST_OF_MANY`]
/// tokens, because counting goes through each expert.
const MANY_EXPERTS: usize = 1024;
const MOST_OF_MANY: u64 = 1 << 14;

/// The two counted numbers of tokens around `tokens`. There are eight of them between one power of two and the next;
/// with `few`, only every third power of two is one.
fn around(tokens: u64, few: bool, most: u64) -> (u64, u64) {
    let below = tokens.clamp(EXACT, most - 1);
    if few {
        let low = EXACT << (3 * ((below / EXACT).ilog2() / 3));
        return (low, (8 * low).min(most));
    }
    let power = 1 << below.ilog2();
    let low = below - (below - power) % (power / 8);
    (low, low + power / 8)
}

impl Predictor<'_> {
    /// The memory of a pass.
    pub(super) fn on_gpu(&self, pass: &Pass, routing: Routing, shows: bool) -> Walked {
        let uneven = routing == Routing::Worst;
        let labelled = (SHARES * pass.labelled).div_ceil(pass.tokens.max(1));
        let experts = self.job.arch.experts.as_ref().map_or(0, |experts| experts.count);
        let few = experts * self.job.arch.blocks.len() > MANY_EXPERTS;
        let most = if few { MOST_OF_MANY } else { MOST };
        let most = (MOST_CHOICES / experts.max(1) as u64).clamp(2 * EXACT, most);
        let tokens = pass.tokens.max(1);
        // Not interpolated: shorter passes may have no room for the images.
        let images = if shows { self.images(pass) } else { 0 };
        if tokens <= EXACT || images > 0 {
            return self.walked(tokens, labelled, uneven, images);
        }
        let (low, high) = around(tokens, few, most);
        let (one, other) = (self.walked(low, labelled, uneven, 0), self.walked(high, labelled, uneven, 0));
        let between = |of: fn(&Walked) -> u64| {
            let (one, other) = (of(&one), of(&other));
            one + (other.saturating_sub(one) as u128 * u128::from(tokens - low) / u128::from(high - low)) as u64
        };
        Walked {
            kept: between(|walked| walked.kept),
            pools: between(|walked| walked.pools),
            head: between(|walked| walked.head),
            host: between(|walked| walked.host),
        }
    }

    fn walked(&self, tokens: u64, labelled: u64, uneven: bool, images: u64) -> Walked {
        let job = &self.job;
        let walk = GpuWalk {
            tokens: tokens as usize,
            labelled: (tokens * labelled / SHARES).clamp(1, tokens) as usize,
            room: self.room() as usize,
            full: job.full.min(job.arch.blocks.len()),
            none: job.none.min(job.arch.blocks.len()),
            narrow: job.narrow,
            rounds_gradients: job.rounds_gradients,
            uneven,
            images: images as usize,
        };
        job.engine.on_gpu(&job.base, &walk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::testing::{arch, job};
    use crate::memory::{Device, Pass};

    #[test]
    fn walked_passes_lie_around_any_other() {
        for tokens in [257, 300, 511, 512, 513, 1000, 4095, 4096, 65_535, 65_536, 1 << 22] {
            for few in [false, true] {
                let (low, high) = around(tokens, few, MOST);
                assert!(low <= tokens && low < high && high <= MOST, "{tokens}: {low} {high}");
                assert!(tokens < high || high == MOST, "{tokens}: {low} {high}");
            }
        }
        assert_eq!((around(1000, false, MOST), around(1000, true, MOST)), ((960, 1024), (256, 2048)));
        assert_eq!(around(60_000, true, MOST), (16_384, 65_536));
    }

    #[test]
    fn bytes_between_walked_passes_lie_on_a_line() {
        let arch = arch();
        let predictor = Predictor::new(job(&arch, false), Device::Gpu);
        let of = |tokens| predictor.activations(&Pass { tokens, longest: 100, labelled: tokens }).pools;
        let (low, middle, high) = (of(960), of(1000), of(1024));
        assert!(low < middle && middle < high);
        assert_eq!(middle, low + (high - low) * 40 / 64);
        // Beyond the last walked pass the line goes on.
        assert_eq!(of(1 << 20), 2 * of(1 << 19));
    }
}
