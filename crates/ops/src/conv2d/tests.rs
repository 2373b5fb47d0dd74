//! Convolutions with and without padding and stride, and the last plane of one in time, against the definition.
use super::*;
use crate::testing::{each_engine, f64s, near, numbers};

#[test]
fn equals_the_definition() {
    each_engine(|engine| {
        for (size, [channels, out], [planes, side], stride, padding) in [
            ([5, 7], [3, 8], [1, 3], 1, [1, 1]),
            ([6, 9], [17, 5], [3, 3], 1, [1, 1]),
            ([6, 6], [4, 19], [1, 3], 2, [0, 1]),
            ([5, 8], [2, 3], [1, 3], 2, [0, 1]),
            ([4, 3], [20, 33], [1, 1], 1, [0, 0]),
            ([1, 1], [1, 1], [2, 3], 1, [1, 1]),
        ] {
            let steps = Steps { stride, padding };
            let x = numbers(1, size[0] * size[1] * channels);
            let weight = numbers(2, out * channels * planes * side * side);
            let bias = numbers(3, out);
            let [weights, biases] = [&weight, &bias].map(|values| engine.array(values));
            let pool = engine.pool();
            let kernel = Kernel { weight: weights.view().into(), bias: biases.view(), planes, side };
            let y = forward(&Activation::from_rows(&pool, &x, channels), size, kernel, steps);
            let wanted = reference::forward(&f64s(&x), size, (&f64s(&weight), &f64s(&bias)), [planes, side], steps);
            near("y", &y.to_rows(), &wanted, 1e-5);
        }
    });
}
