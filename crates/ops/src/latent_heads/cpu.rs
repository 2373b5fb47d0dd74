//! Keys and values of latent attention on the CPU: one task takes one panel. A feature is a vector of 16 tokens; features have the order that a
//! token's features have.
use super::LatentHeads;
use crate::activation::{Activation, LANES};
use crate::par;

pub(super) fn forward(kv: &Activation, k_rot: &Activation, k: &mut Activation, v: &mut Activation, how: LatentHeads) {
    let [nope, key, value] = [how.nope, how.key(), how.value].map(|features| features * LANES);
    let (k_stride, v_stride) = (k.stride(), v.stride());
    let (k, v) = (k.shared(), v.shared());
    par::run(kv.panels(), |panel| {
        // SAFETY: both have as many panels as `kv`, of so many floats each; they are borrowed for writing, and no other task
        // has this panel of them.
        let (keys, values) = unsafe {
            (
                std::slice::from_raw_parts_mut(k.get().add(panel * k_stride), k_stride),
                std::slice::from_raw_parts_mut(v.get().add(panel * v_stride), v_stride),
            )
        };
        let (kv, shared) = (kv.panel(panel), k_rot.panel(panel));
        for head in 0..how.heads {
            let (own, of_value) = kv[head * (nope + value)..][..nope + value].split_at(nope);
            let (plain, turned) = keys[head * key..][..key].split_at_mut(nope);
            plain.copy_from_slice(own);
            turned.copy_from_slice(shared);
            values[head * value..][..value].copy_from_slice(of_value);
        }
    });
}

pub(super) fn backward(
    dk: &Activation,
    dv: &Activation,
    d_kv: &mut Activation,
    d_k_rot: &mut Activation,
    how: LatentHeads,
) {
    let [nope, key, value] = [how.nope, how.key(), how.value].map(|features| features * LANES);
    let (kv_stride, rot_stride) = (d_kv.stride(), d_k_rot.stride());
    let (d_kv, d_k_rot) = (d_kv.shared(), d_k_rot.shared());
    par::run(dk.panels(), |panel| {
        // SAFETY: both have as many panels as `dk`, of so many floats each; they are borrowed for writing, and no other task
        // has this panel of them.
        let (both, sums) = unsafe {
            (
                std::slice::from_raw_parts_mut(d_kv.get().add(panel * kv_stride), kv_stride),
                std::slice::from_raw_parts_mut(d_k_rot.get().add(panel * rot_stride), rot_stride),
            )
        };
        let (keys, values) = (dk.panel(panel), dv.panel(panel));
        sums.fill(0.0);
        for head in 0..how.heads {
            let (plain, turned) = keys[head * key..][..key].split_at(nope);
            let (to_plain, to_value) = both[head * (nope + value)..][..nope + value].split_at_mut(nope);
            to_plain.copy_from_slice(plain);
            to_value.copy_from_slice(&values[head * value..][..value]);
            sums.iter_mut().zip(turned).for_each(|(sum, &one)| *sum += one);
        }
    });
}
