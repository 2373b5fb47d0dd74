//! Every form against the definition, in f64, and its finite differences.
use super::reference::{self, Angles};
use super::*;
use crate::testing::{Engine, check_gradient, each_engine, each_level, numbers};

/// Holds a table of so many tokens against their angles, on heads of `head_dim` that turn from `offset` on.
fn check(engine: Engine, rope: &Rope, tokens: &[Angles], head_dim: usize, offset: usize, pairing: Pairing) {
    let width = 3 * head_dim;
    let (x, seed) = (numbers(1, tokens.len() * width), numbers(2, tokens.len() * width));
    let double = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let pool = engine.pool();
    let mut turned = Activation::from_rows(&pool, &x, width);
    rope.forward(&mut turned, head_dim, offset);
    let wanted = reference::forward(&double(&x), tokens, head_dim, offset, pairing);
    for (got, want) in turned.to_rows().iter().zip(wanted) {
        assert!((f64::from(*got) - want).abs() < 1e-6, "{got} != {want}");
    }
    let mut dx = Activation::from_rows(&pool, &seed, width);
    rope.backward(&mut dx, head_dim, offset);
    check_gradient("dx", &x, &dx.to_rows(), |x| {
        let out = reference::forward(x, tokens, head_dim, offset, pairing);
        out.iter().zip(&seed).map(|(o, &s)| o * f64::from(s)).sum()
    });
}

/// The angles of a token whose frequency i turns by position `position(i)`.
fn angles(position: impl Fn(usize) -> usize, (inv_freq, factor): (&[f32], f32)) -> Angles {
    let angle = |(i, &frequency): (usize, &f32)| f64::from(position(i) as f32 * frequency);
    (inv_freq.iter().enumerate().map(angle).collect(), f64::from(factor))
}

#[test]
fn equals_the_definition_and_its_finite_differences() {
    each_engine(|engine| {
        let (short, long): ([f32; 3], [f32; 3]) = ([1.0, 0.3, 0.01], [0.5, 0.2, 0.001]);
        let rule = |length| if length > 10 { (&long[..], 1.2) } else { (&short[..], 1.0) };
        let sequences = [18, 1, 2, 12];
        let tokens: Vec<Angles> = sequences
            .iter()
            .flat_map(|&length| (0..length).map(move |position| angles(|_| position, rule(length))))
            .collect();
        for pairing in [Pairing::Half, Pairing::Interleaved] {
            let rope = Rope::new(&engine.pool(), sequences, rule).paired(pairing);
            // Whole heads, partial rotation, and what turns at a head's end or in its middle.
            for (head_dim, offset) in [(6, 0), (10, 0), (11, 5), (13, 4)] {
                check(engine, &rope, &tokens, head_dim, offset, pairing);
            }
            let rows = [0, 3, 17, 19, 32];
            let picked: Vec<Angles> = rows.iter().map(|&row| tokens[row].clone()).collect();
            check(engine, &rope.gather(&rows), &picked, 7, 1, pairing);
        }
    });
}

#[test]
fn positions_of_several_components_equal_the_definition_and_its_finite_differences() {
    // Four tokens of text, two images of 3 x 5 patches at one time each, text again: as Qwen2-VL counts.
    let text = |from: u32, count: u32| (from..from + count).map(|at| [at; 3]);
    let image = |from: u32| (0..15).map(move |patch| [from, from + patch / 5, from + patch % 5]);
    let tokens: Vec<[u32; 3]> = text(0, 4).chain(image(4)).chain(image(9)).chain(text(14, 3)).collect();
    let of = |component: usize| tokens.iter().map(|token| token[component]).collect::<Vec<u32>>();
    let (time, row, column) = (of(0), of(1), of(2));
    let inv_freq: Vec<f32> = (0..9).map(|i| 0.6f32.powi(i)).collect();
    let repeated: Vec<f32> = [&inv_freq[..4], &inv_freq[..4]].concat();
    let forms: [(&[f32], _, Vec<&[u32]>); 4] = [
        (&inv_freq, sections(&[2, 3, 4]), vec![&time, &row, &column]),
        (&inv_freq, interleaved_sections(&[4, 3, 2]), vec![&time, &row, &column]),
        // A vision tower's: the first half turns by row, the second by column.
        (&repeated, sections(&[4, 4]), vec![&row, &column]),
        (&inv_freq, sections(&[9]), vec![&time]),
    ];
    each_engine(|engine| {
        for (inv_freq, components, positions) in &forms {
            for pairing in [Pairing::Half, Pairing::Interleaved] {
                // Two sequences, each with a rule of its own.
                let parts = [(20, (*inv_freq, 1.0)), (17, (*inv_freq, 1.3))];
                let rope = Rope::with_components(&engine.pool(), positions, components, parts).paired(pairing);
                let of = |token: usize| {
                    let factor = if token < 20 { 1.0 } else { 1.3 };
                    angles(|i| positions[components[i]][token] as usize, (inv_freq, factor))
                };
                let wanted: Vec<Angles> = (0..tokens.len()).map(of).collect();
                check(engine, &rope, &wanted, 18, 0, pairing);
                check(engine, &rope, &wanted, 25, 3, pairing);
            }
        }
    });
}

#[test]
fn equal_components_are_one_position_to_the_bit() {
    let inv_freq: Vec<f32> = (0..7).map(|i| 0.3f32.powi(i)).collect();
    let (pool, positions) = (Pool::new(), (5..38).collect::<Vec<u32>>());
    let all: [&[u32]; 3] = [&positions; 3];
    let one = Rope::at(&pool, [(5..38, (&inv_freq[..], 1.1))]);
    for components in [sections(&[2, 2, 3]), interleaved_sections(&[3, 2, 2])] {
        let three = Rope::with_components(&pool, &all, &components, [(33, (&inv_freq[..], 1.1))]);
        assert_eq!((three.cos.to_rows(), three.sin.to_rows()), (one.cos.to_rows(), one.sin.to_rows()));
    }
}

#[test]
fn sections_are_those_of_the_models() {
    // Qwen2-VL: cos.split([16, 24, 24] * 2), of which part i is that of component i % 3; the halves are alike.
    let found = sections(&[16, 24, 24]);
    assert_eq!(found.len(), 64);
    assert!(found.iter().enumerate().all(|(i, &component)| component == usize::from(i >= 16) + usize::from(i >= 40)));
    // Qwen3-VL: freqs[0], with [1:60:3] from freqs[1] and [2:60:3] from freqs[2].
    let mut wanted = vec![0; 64];
    (1..60).step_by(3).for_each(|i| wanted[i] = 1);
    (2..60).step_by(3).for_each(|i| wanted[i] = 2);
    assert_eq!(interleaved_sections(&[24, 20, 20]), wanted);
    assert_eq!(interleaved_sections(&[4, 3, 2]), [0, 1, 2, 0, 1, 2, 0, 1, 0]);
}

#[test]
#[should_panic(expected = "what turns lies within a head")]
fn a_turn_past_the_end_of_a_head_is_refused() {
    let pool = Pool::new();
    let rope = Rope::new(&pool, [2], |_| (&[1.0, 0.5], 1.0));
    rope.forward(&mut pool.act(2, 12), 6, 3);
}

#[test]
fn a_vector_turns_as_one_token_to_the_bit() {
    each_level(|level| {
        for (pairs, head_dim, offset) in [(3, 6, 0), (5, 13, 2), (16, 32, 0), (20, 64, 7), (32, 64, 0), (64, 128, 0)] {
            for pairing in [Pairing::Half, Pairing::Interleaved] {
                let (pool, inv_freq) = (Pool::new(), numbers(3, pairs));
                let rope = Rope::at(&pool, [(77..78, (&inv_freq[..], 1.2))]).paired(pairing);
                let mut x = Activation::from_rows(&pool, &numbers(1, 3 * head_dim), 3 * head_dim);
                let mut vector = x.to_vector();
                rope.forward(&mut x, head_dim, offset);
                rope.turn_vector(&mut vector, head_dim, offset);
                assert!(vector.to_rows() == x.to_rows(), "{level:?} {pairing:?} {pairs} of {head_dim} from {offset}");
            }
        }
    });
}
