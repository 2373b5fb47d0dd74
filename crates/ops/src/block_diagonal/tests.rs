//! Products and gradients against their definition.
use super::*;
use crate::activation::Pool;
use crate::testing::{each_level, numbers};

#[test]
fn products_and_gradients_equal_their_definition() {
    each_level(|level| {
        for (tokens, size, blocks, count) in [(37, 5, 3, 3), (16, 32, 2, 1), (1, 8, 4, 4), (50, 13, 1, 1), (3, 2, 6, 6)]
        {
            let (pool, features) = (Pool::new(), size * blocks);
            let (x, d) = (numbers(1, tokens * features), numbers(2, tokens * features));
            let matrices = numbers(3, count * size * size);
            let plain = reference::Blocks { matrices: &matrices, size, features };
            let (xa, da) = (Activation::from_rows(&pool, &x, features), Activation::from_rows(&pool, &d, features));
            for (transposed, adds) in [(false, false), (true, false), (false, true), (true, true)] {
                let mut out = da.copy();
                times(Diagonal { matrices: (&matrices).into(), size }, &xa, transposed, &mut out, adds);
                let products = plain.times(&x, transposed).into_iter().zip(&d);
                for (got, (product, &before)) in out.to_rows().into_iter().zip(products) {
                    let wanted = product + if adds { f64::from(before) } else { 0.0 };
                    assert!((f64::from(got) - wanted).abs() < 1e-4, "{level:?} {size} {transposed}: {got} {wanted}");
                }
            }
            for (got, wanted) in outer(size, &xa, &da).into_iter().zip(plain.outer(&x, &d)) {
                assert!((f64::from(got) - wanted).abs() < 1e-4, "{level:?} {size}: {got} {wanted}");
            }
        }
    });
}
