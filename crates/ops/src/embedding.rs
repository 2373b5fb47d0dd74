//! Token embedding: rows of a table into panels; its gradient adds rows back.
use super::floats::FloatsMut;
use super::gemm::Store;
use super::panel::{Act, LANES, Pool};
use super::par;
use std::sync::Arc;

/// `x[t] = scale * table[tokens[t]]`, with `table [vocabulary, features]` row-major.
///
/// # Panics
/// If a token is not in the table: the data layer has refused such rows before.
pub fn forward(pool: &Arc<Pool>, table: Store<'_>, features: usize, tokens: &[u32], scale: f32) -> Act {
    let mut out = pool.act(tokens.len(), features);
    if out.is_meta() {
        return out;
    }
    let (to, stride) = (out.shared(), out.stride());
    par::run(tokens.len().div_ceil(LANES), |panel| {
        let mut row = vec![0.0; features];
        for (lane, &token) in tokens[panel * LANES..].iter().take(LANES).enumerate() {
            table.widen(token as usize * features, &mut row);
            for (feature, &value) in row.iter().enumerate() {
                // SAFETY: `panel` and `feature` are below those of `out` and `lane` below LANES: a place within `out`,
                // which lives on. No other task has this panel.
                unsafe { *to.get().add(panel * stride + feature * LANES + lane) = value * scale };
            }
        }
    });
    out
}

/// Adds `scale` times each token's gradient to its row of `d_table`, in the order of the tokens. The row of `padding` gets none, as in
/// PyTorch's `Embedding(padding_idx)`.
pub fn backward(dx: &Act, tokens: &[u32], scale: f32, padding: Option<u32>, d_table: FloatsMut<'_>) {
    if dx.is_meta() {
        return;
    }
    let (features, d_table) = (dx.features(), d_table.host());
    for (at, &token) in tokens.iter().enumerate().filter(|&(_, &token)| Some(token) != padding) {
        let from = &dx.panel(at / LANES)[at % LANES..];
        let row = &mut d_table[token as usize * features..][..features];
        for (feature, value) in row.iter_mut().enumerate() {
            *value += scale * from[feature * LANES];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_gradient, numbers};

    #[test]
    fn looks_rows_up_and_adds_them_back() {
        let (features, tokens) = (5, [3u32, 0, 3, 2, 1, 3, 0, 0, 1, 2, 3, 3, 1, 0, 2, 2, 1, 3]);
        let (table, seed) = (numbers(1, 4 * features), numbers(2, tokens.len() * features));
        let pool = Pool::new();
        let x = forward(&pool, Store::F32(&table), features, &tokens, 2.0);
        let reference = |table: &[f64]| -> Vec<f64> {
            tokens
                .iter()
                .flat_map(|&t| table[t as usize * features..][..features].iter().map(|x| 2.0 * x).collect::<Vec<_>>())
                .collect()
        };
        let double: Vec<f64> = table.iter().map(|&x| f64::from(x)).collect();
        assert!(x.to_rows().iter().zip(reference(&double)).all(|(got, want)| f64::from(*got) == want));
        let mut d_table = vec![0.0; table.len()];
        backward(&Act::from_rows(&pool, &seed, features), &tokens, 2.0, None, (&mut d_table).into());
        let mut padded = vec![0.0; table.len()];
        backward(&Act::from_rows(&pool, &seed, features), &tokens, 2.0, Some(3), (&mut padded).into());
        assert_eq!((&padded[..3 * features], &padded[3 * features..]), (&d_table[..3 * features], &[0.0; 5][..]));
        check_gradient("table", &table, &d_table, |table| {
            reference(table).iter().zip(&seed).map(|(x, &s)| x * f64::from(s)).sum()
        });
    }
}
