//! Rows looked up and added back, against the definition and finite differences.
use super::*;
use crate::testing::{check_gradient, numbers};

#[test]
fn looks_rows_up_and_adds_them_back() {
    let (features, tokens) = (5, [3u32, 0, 3, 2, 1, 3, 0, 0, 1, 2, 3, 3, 1, 0, 2, 2, 1, 3]);
    let (table, seed) = (numbers(1, 4 * features), numbers(2, tokens.len() * features));
    let pool = Pool::new();
    let x = forward(&pool, Store::F32((&table).into()), features, &tokens, 2.0);
    let reference = |table: &[f64]| reference::forward(table, features, &tokens, 2.0);
    let double: Vec<f64> = table.iter().map(|&x| f64::from(x)).collect();
    assert!(x.to_rows().iter().zip(reference(&double)).all(|(got, want)| f64::from(*got) == want));
    let mut d_table = vec![0.0; table.len()];
    backward(&Activation::from_rows(&pool, &seed, features), &tokens, 2.0, None, (&mut d_table).into());
    let mut padded = vec![0.0; table.len()];
    backward(&Activation::from_rows(&pool, &seed, features), &tokens, 2.0, Some(3), (&mut padded).into());
    assert_eq!((&padded[..3 * features], &padded[3 * features..]), (&d_table[..3 * features], &[0.0; 5][..]));
    check_gradient("table", &table, &d_table, |table| {
        reference(table).iter().zip(&seed).map(|(x, &s)| x * f64::from(s)).sum()
    });
}
