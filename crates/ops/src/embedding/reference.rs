//! The definition in f64, on rows.

/// `[tokens, features]`, with `table [vocabulary, features]`.
pub(super) fn forward(table: &[f64], features: usize, tokens: &[u32], scale: f64) -> Vec<f64> {
    let row = |&token: &u32| table[token as usize * features..][..features].iter().map(move |x| scale * x);
    tokens.iter().flat_map(row).collect()
}
