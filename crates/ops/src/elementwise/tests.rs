//! Each function against its formula.
use super::*;
use crate::testing::{each_engine, numbers};

#[test]
fn each_equals_its_formula() {
    each_engine(|engine| {
        for (tokens, features) in [(1, 1), (19, 5), (32, 8)] {
            let (x, y) = (numbers(1, tokens * features), numbers(2, tokens * features));
            let pool = engine.pool();
            let act = |rows: &[f32]| Activation::from_rows(&pool, rows, features);
            let check = |what: &str, got: &Activation, want: &dyn Fn(f32, f32) -> f32| {
                let want: Vec<f32> = x.iter().zip(&y).map(|(&x, &y)| want(x, y)).collect();
                assert_eq!(got.to_rows(), want, "{what} on [{tokens}, {features}]");
            };
            let changed = |f: &dyn Fn(&mut Activation, &Activation)| {
                let mut to = act(&y);
                f(&mut to, &act(&x));
                to
            };
            check("scale", &changed(&|y, _| scale(y, 0.3)), &|_, y| y * 0.3);
            check("scaled", &scaled(&act(&x), 0.3), &|x, _| 0.3 * x);
            check("add", &changed(&|y, x| add(y, x)), &|x, y| y + x);
            check("sub", &sub(&act(&x), &act(&y)), &|x, y| x - y);
            check("scale_add", &changed(&|y, x| scale_add(y, 0.3, x)), &|x, y| y * 0.3 + x);
            check("axpby", &changed(&|y, x| axpby(0.3, x, 0.7, y)), &|x, y| 0.3 * x + 0.7 * y);
            check("assign", &changed(&|y, x| assign(y, x)), &|x, _| x);
            check("fill", &changed(&|y, _| fill(y, 2.5)), &|_, _| 2.5);

            let bias = numbers(3, features);
            let biased: Vec<f32> = y.iter().enumerate().map(|(at, y)| y + bias[at % features]).collect();
            assert_eq!(changed(&|y, _| add_bias(y, engine.array(&bias).view())).to_rows(), biased);
            let mut sums = engine.array(&bias);
            add_bias_backward(&act(&y), sums.view_mut());
            for (feature, sum) in sums.read().iter().enumerate() {
                let column = y.iter().skip(feature).step_by(features).map(|&y| f64::from(y)).sum::<f64>();
                assert!((f64::from(*sum) - f64::from(bias[feature]) - column).abs() < 1e-5, "feature {feature}");
            }
        }
    });
}
