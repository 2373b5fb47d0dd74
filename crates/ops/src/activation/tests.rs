//! Tokens keep their places through every copy.
use super::*;
use crate::testing::{each_engine, numbers};
use std::panic::{AssertUnwindSafe, catch_unwind};

#[test]
fn rows_go_in_and_come_back() {
    each_engine(|engine| {
        let pool = engine.pool();
        for tokens in [1, 15, 16, 17, 40] {
            let rows: Vec<f32> = (0..tokens * 5).map(|i| i as f32).collect();
            let act = Activation::from_rows(&pool, &rows, 5);
            assert_eq!(act.to_rows(), rows);
            let picked: Vec<usize> = (0..tokens).step_by(3).collect();
            let gathered = act.gather(&picked);
            assert_eq!(gathered.row(gathered.tokens() - 1), act.row(picked[picked.len() - 1]));
            let back = gathered.scatter(&picked, tokens);
            for token in 0..tokens {
                let expected = if token % 3 == 0 { act.row(token)[2] } else { 0.0 };
                assert_eq!(back.row(token)[2], expected);
            }
        }
    });
}

#[test]
fn parts_of_rows_and_features_are_copied_scaled_and_summed() {
    each_engine(|engine| {
        let (pool, tokens, features) = (engine.pool(), 37, 21);
        let rows = numbers(1, tokens * features);
        let x = Activation::from_rows(&pool, &rows, features);
        let at = |token: usize, feature: usize| rows[token * features + feature];
        assert_eq!(x.row(36), rows[36 * features..]);
        let columns = x.columns(3..8);
        assert_eq!(columns.to_rows(), (0..tokens).flat_map(|t| (3..8).map(move |j| at(t, j))).collect::<Vec<_>>());
        let side = Activation::side_by_side(&[&columns, &x, &columns]);
        assert_eq!(
            (side.row(20)[..5].to_vec(), side.row(20)[5 + features..].to_vec()),
            (columns.row(20), columns.row(20))
        );
        let part = x.rows(&pool, 16..30);
        assert_eq!(part.to_rows(), rows[16 * features..30 * features]);
        let mut put = x.like();
        put.zero();
        put.put_rows(16, &part);
        assert_eq!((put.row(15), put.row(29)), (vec![0.0; features], x.row(29)));
        let factors = numbers(2, tokens);
        let mut scaled = x.copy();
        scaled.times(&factors);
        let expected: Vec<f32> = (0..tokens * features).map(|i| rows[i] * factors[i / features]).collect();
        assert_eq!(scaled.to_rows(), expected);
        for (token, sum) in scaled.dot(&x).into_iter().enumerate() {
            let expected: f32 = (0..features).map(|j| at(token, j).powi(2)).sum::<f32>() * factors[token];
            assert!((sum - expected).abs() < 1e-5, "{sum} != {expected}");
        }
        let mut sums = x.copy();
        sums.scatter_add(&[2, 9, 30], Some(&[0.5, 2.0, -1.0]), &x.gather(&[0, 1, 2]));
        let expected: Vec<f32> = (0..features).map(|j| at(9, j) + 2.0 * at(1, j)).collect();
        assert_eq!((sums.row(9), sums.row(3)), (expected, x.row(3)));
        sums.scatter_add(&[3], None, &x.gather(&[4]));
        assert_eq!(sums.row(3), (0..features).map(|j| at(3, j) + at(4, j)).collect::<Vec<_>>());
    });
}

/// Whether `work` panics, without having changed what later work on the device needs.
fn refused(work: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(work)).is_err()
}

#[test]
fn what_lies_outside_is_refused() {
    each_engine(|engine| {
        let (pool, tokens, features) = (engine.pool(), 37, 21);
        let x = Activation::from_rows(&pool, &numbers(1, tokens * features), features);
        let two = x.gather(&[0, 1]);
        assert!(refused(|| drop(x.gather(&[0, 64]))), "gather");
        assert!(refused(|| drop(two.scatter(&[0, 64], tokens))), "scatter");
        assert!(refused(|| x.copy().scatter_add(&[0, 64], None, &two)), "scatter_add");
        assert!(refused(|| x.copy().scatter_add(&[0, 1], Some(&[1.0]), &two)), "a factor for each row");
        assert!(refused(|| drop(x.columns(3..22))), "columns");
        assert!(refused(|| drop(Activation::side_by_side(&[&two, &x]))), "side by side");
        assert!(refused(|| drop(x.row(64))), "row");
        assert_eq!(x.gather(&[36]).row(0), x.row(36));
    });
}

#[test]
fn halves_of_pairs_come_apart_and_together() {
    crate::testing::each_engine(|engine| {
        let (tokens, width, pairs) = (21, 3, 4);
        let features = 2 * width * pairs;
        let rows: Vec<f32> = (0..tokens * features).map(|at| at as f32).collect();
        let x = Activation::from_rows(&engine.pool(), &rows, features);
        let halves = x.split_halves(width);
        for (which, half) in halves.iter().enumerate() {
            let own = rows.chunks_exact(width).skip(which).step_by(2).flatten().copied();
            assert!(half.to_rows().into_iter().eq(own));
        }
        assert_eq!(Activation::join_halves([&halves[0], &halves[1]], width).to_rows(), rows);
    });
}

#[test]
fn parts_of_groups_come_apart_and_together() {
    crate::testing::each_engine(|engine| {
        let (tokens, widths, groups) = (21, [3, 1, 4], 5);
        let group: usize = widths.iter().sum();
        let rows: Vec<f32> = (0..tokens * groups * group).map(|at| at as f32).collect();
        let parts = Activation::from_rows(&engine.pool(), &rows, groups * group).split_parts(widths);
        for (part, own) in parts.iter().zip([0..3, 3..4, 4..8]) {
            let expected: Vec<f32> = rows.chunks_exact(group).flat_map(|group| group[own.clone()].to_vec()).collect();
            assert_eq!(part.to_rows(), expected);
        }
        assert_eq!(Activation::join_parts(parts.each_ref(), widths).to_rows(), rows);
    });
}
