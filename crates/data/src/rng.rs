//! Seeded shuffling with the same result on every machine and in every version.

/// `SplitMix64`: small, fast, and good enough to shuffle with.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, with a bias of at most bound / 2^64.
    fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }
}

/// Shuffles in place (Fisher-Yates). `stream` separates the uses of one seed, such as epochs and the split.
pub fn shuffle<T>(items: &mut [T], seed: u64, stream: u64) {
    let mut random = SplitMix(seed);
    random.0 = random.next() ^ stream.wrapping_mul(0xd134_2543_de82_ef95);
    for index in (1..items.len()).rev() {
        items.swap(index, random.below(index + 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_means_one_order() {
        let order = |seed, stream| {
            let mut items: Vec<u32> = (0..100).collect();
            shuffle(&mut items, seed, stream);
            items
        };
        assert_eq!(order(1, 0), order(1, 0));
        assert_ne!(order(1, 0), order(1, 1));
        assert_ne!(order(1, 0), order(2, 0));
        let mut sorted = order(1, 0);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
    }
}
