//! Norms against those of the formed sum.
use super::*;
use crate::testing::{each_engine, numbers};

#[test]
fn norms_are_those_of_the_sum() {
    each_engine(|engine| {
        for (outputs, inputs, rank) in [(1, 1, 1), (70, 19, 3), (5, 33, 8)] {
            let (w, a, b) = (numbers(1, outputs * inputs), numbers(2, rank * inputs), numbers(3, outputs * rank));
            let square = |row: &[f32]| row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
            let squares: Vec<f64> = w.chunks(inputs).map(square).collect();
            let [wd, ad, bd] = [&w, &a, &b].map(|values| engine.array(values));
            let update = Update { a: ad.view(), b: bd.view(), rank, scale: 0.75 };
            let norms = row_norms(&engine.pool(), Store::F32(wd.view()), &engine.array(&squares), update, inputs);
            for (got, want) in norms.read().into_iter().zip(reference::row_norms(&w, &a, &b, rank, 0.75)) {
                assert!((f64::from(got) - want).abs() < 1e-4, "{engine:?}: {got} != {want}");
            }
        }
    });
}
