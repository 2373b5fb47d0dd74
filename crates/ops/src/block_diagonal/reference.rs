//! The definition in f64, on rows `[tokens, features]`.

/// `matrices [count, size, size]`, the last of which counts for all further blocks.
pub(super) struct Blocks<'a> {
    pub matrices: &'a [f32],
    pub size: usize,
    pub features: usize,
}

impl Blocks<'_> {
    fn entry(&self, block: usize, row: usize, col: usize) -> f64 {
        let count = self.matrices.len() / (self.size * self.size);
        f64::from(self.matrices[(block.min(count - 1) * self.size + row) * self.size + col])
    }

    /// `x D`, or `x D^T`.
    pub(super) fn times(&self, x: &[f32], transposed: bool) -> Vec<f64> {
        let Self { size, features, .. } = *self;
        let one = |index: usize| {
            let (token, block, col) = (index / features, index % features / size, index % size);
            let x = |k: usize| f64::from(x[token * features + block * size + k]);
            let entry = |k: usize| if transposed { self.entry(block, col, k) } else { self.entry(block, k, col) };
            (0..size).map(|k| x(k) * entry(k)).sum()
        };
        (0..x.len()).map(one).collect()
    }

    /// `sum_t x[t, b]^T d[t, b]` of each block: `[features / size, size, size]`.
    pub(super) fn outer(&self, x: &[f32], d: &[f32]) -> Vec<f64> {
        let Self { size, features, .. } = *self;
        let one = |index: usize| {
            let (block, row, col) = (index / (size * size), index / size % size, index % size);
            let at = |token: usize, feature: usize| token * features + block * size + feature;
            let term = |token: usize| f64::from(x[at(token, row)]) * f64::from(d[at(token, col)]);
            (0..x.len() / features).map(term).sum()
        };
        (0..features * size).map(one).collect()
    }
}
