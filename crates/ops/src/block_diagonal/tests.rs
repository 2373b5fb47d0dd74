//! Products and gradients against their definition.
use super::*;
use crate::testing::{each_engine, numbers};

#[test]
fn products_and_gradients_equal_their_definition() {
    each_engine(|engine| {
        for (tokens, size, blocks, count) in [(37, 5, 3, 3), (16, 32, 2, 1), (1, 8, 4, 4), (50, 13, 1, 1), (3, 2, 6, 6)]
        {
            let (pool, features) = (engine.pool(), size * blocks);
            let (x, d) = (numbers(1, tokens * features), numbers(2, tokens * features));
            let matrices = numbers(3, count * size * size);
            let on_device = engine.array(&matrices);
            let plain = reference::Blocks { matrices: &matrices, size, features };
            let (xa, da) = (Activation::from_rows(&pool, &x, features), Activation::from_rows(&pool, &d, features));
            for (transposed, adds) in [(false, false), (true, false), (false, true), (true, true)] {
                let mut out = da.copy();
                times(Diagonal { matrices: on_device.view(), size }, &xa, transposed, &mut out, adds);
                let products = plain.times(&x, transposed).into_iter().zip(&d);
                for (got, (product, &before)) in out.to_rows().into_iter().zip(products) {
                    let wanted = product + if adds { f64::from(before) } else { 0.0 };
                    assert!((f64::from(got) - wanted).abs() < 1e-4, "{engine:?} {size} {transposed}: {got} {wanted}");
                }
            }
            for (got, wanted) in outer(size, &xa, &da).into_iter().zip(plain.outer(&x, &d)) {
                assert!((f64::from(got) - wanted).abs() < 1e-4, "{engine:?} {size}: {got} {wanted}");
            }
        }
    });
}
