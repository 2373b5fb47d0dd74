//! Moments of four bytes against `AdamW`'s definition; moments of a byte stay near it, whatever threads cut.
use super::*;
use crate::adamw::reference;
use crate::par::TASK;
use crate::testing::{each_engine, f64s, near, numbers};

fn step(number: u64) -> Step<'static> {
    Step { factor: 0.5.into(), rate: 0.01, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.1, number }
}

#[test]
fn a_small_tensor_follows_adamw() {
    let [mut values, mut m, mut v] = [numbers(1, 300), vec![0.0; 300], vec![0.0; 300]];
    let [mut values64, mut m64, mut v64] = [f64s(&values), f64s(&m), f64s(&v)];
    for number in 1..4 {
        let grads = numbers(number + 1, 300);
        update_small((&mut values).into(), (&grads).into(), (&mut m).into(), (&mut v).into(), &step(number));
        reference::update(&mut values64, &f64s(&grads), &mut m64, &mut v64, &step(number));
    }
    near("values", &values, &values64, 1e-5);
    near("exp_avg", &m, &m64, 1e-6);
}

#[test]
fn moments_of_a_byte_stay_near_those_of_four() {
    let (count, maps) = (TASK + 300, [CodeMap::new(true), CodeMap::new(false)]);
    let blocks = count.div_ceil(BLOCK);
    let mut values = numbers(1, count);
    let (mut codes, mut absmax) = ([vec![0u8; count], vec![0u8; count]], [vec![0.0; blocks], vec![0.0; blocks]]);
    let [mut values64, mut m64, mut v64] = [f64s(&values), vec![0.0; count], vec![0.0; count]];
    for number in 1..4 {
        // Gradients of one sign and size, so that no moment is lost in its block.
        let grads: Vec<f32> = numbers(number + 1, count).iter().map(|value| 1.0 + 0.1 * value).collect();
        let [codes1, codes2] = &mut codes;
        let [absmax1, absmax2] = &mut absmax;
        let (codes, absmax) = ([codes1.into(), codes2.into()], [absmax1.into(), absmax2.into()]);
        update((&mut values).into(), (&grads).into(), codes, absmax, [&maps[0], &maps[1]], &step(number));
        reference::update(&mut values64, &f64s(&grads), &mut m64, &mut v64, &step(number));
    }
    near("values", &values, &values64, 2e-3);
    let first = |at: usize| maps[0].values[usize::from(codes[0][at])] * absmax[0][at / BLOCK];
    near("the first moment", &(0..count).map(first).collect::<Vec<_>>(), &m64, 0.02);
}

#[test]
fn every_engine_has_the_same_bits() {
    let (count, maps) = (3 * BLOCK + 44, [CodeMap::new(true), CodeMap::new(false)]);
    let found = std::sync::Mutex::new(Vec::new());
    each_engine(|engine| {
        let blocks = count.div_ceil(BLOCK);
        let mut values = engine.array(&numbers(1, count));
        let [mut codes1, mut codes2] = [(); 2].map(|()| engine.array(&vec![0u8; count]));
        let [mut absmax1, mut absmax2] = [(); 2].map(|()| engine.array(&vec![0.0f32; blocks]));
        let [mut small, mut m, mut v] = [1, 0, 0]
            .map(|factor| engine.array(&numbers(5, 300).iter().map(|value| value * factor as f32).collect::<Vec<_>>()));
        for number in 1..4 {
            let grads = engine.array(&numbers(number + 1, count));
            let (codes, absmax) = ([codes1.view_mut(), codes2.view_mut()], [absmax1.view_mut(), absmax2.view_mut()]);
            update(values.view_mut(), grads.view(), codes, absmax, [&maps[0], &maps[1]], &step(number));
            update_small(small.view_mut(), grads.slice(0..300), m.view_mut(), v.view_mut(), &step(number));
        }
        let floats = [values, absmax1, absmax2, small, m, v].map(|array| array.read());
        let bits: Vec<u32> = floats.concat().into_iter().map(f32::to_bits).collect();
        found.lock().unwrap().push((bits, codes1.read(), codes2.read()));
    });
    let found = found.into_inner().unwrap();
    assert!(found.windows(2).all(|two| two[0] == two[1]));
}
