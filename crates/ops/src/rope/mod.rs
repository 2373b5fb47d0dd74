//! Rotary position embedding, `RoPE` (Su et al., 2021): pairs of features of a head are rotated by angles that grow with
//! the token's position.
//!
//! ```text
//! angle[t, i] = positions[components[i]][t] * inv_freq[i]
//! y[a] = x[a] * cos(angle[t, i]) - x[b] * sin(angle[t, i])      (a, b) is pair i of the head: see Pairing
//! y[b] = x[b] * cos(angle[t, i]) + x[a] * sin(angle[t, i])
//! ```
//!
//! In each head, `2 * frequencies` features are rotated, from an offset on; the rest stay as they are. The backward
//! pass rotates the other way. A [`Rope`] holds the cosines and sines of a batch, so that forward and backward need not
//! know positions.
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use super::activation::{Activation, Pool};
use std::ops::Range;
use std::sync::Arc;
use tunesmith_device::Device;

/// Which two of the rotated features form pair i of n.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairing {
    /// `i` and `i + n`: Hugging Face's Llama, and most others.
    Half,
    /// `2i` and `2i + 1`: GPT-J, GLM, Cohere, and the complex form of Llama 4 and `DeepSeek`.
    Interleaved,
}

/// The cosines and sines of each token, multiplied by the rule's factor (`attention_scaling` in Transformers).
#[derive(Debug)]
pub struct Rope {
    /// Both tables are `[tokens, frequencies]`.
    cos: Activation,
    sin: Activation,
    pairing: Pairing,
}

impl Rope {
    /// The table for sequences with these lengths, end to end, whose positions count from 0. `frequencies` gives each
    /// sequence length its rule: `inv_freq`, and a factor on cosines and sines. Angles are f32 products, as in
    /// `transformers`.
    pub fn new<'a>(
        pool: &Arc<Pool>,
        sequences: impl IntoIterator<Item = usize>,
        mut frequencies: impl FnMut(usize) -> (&'a [f32], f32),
    ) -> Self {
        Self::at(pool, sequences.into_iter().map(|length| (0..length, frequencies(length))))
    }

    /// The table for parts of sequences, end to end: the positions of each part, and its rule.
    ///
    /// # Panics
    /// If the rules rotate different numbers of features.
    pub fn at<'a>(pool: &Arc<Pool>, parts: impl IntoIterator<Item = (Range<usize>, (&'a [f32], f32))>) -> Self {
        let (mut positions, mut rules) = (Vec::new(), Vec::new());
        for (range, rule) in parts {
            rules.extend(std::iter::repeat_n(rule, range.len()));
            positions.extend(range);
        }
        Self::build(pool, &rules, |token, _| positions[token])
    }

    /// The table for tokens with several positions each, such as time, row and column (M-RoPE): `positions` is
    /// `[components][tokens]`. Frequency i uses the component `components[i]` ([`sections`], [`interleaved_sections`]).
    /// `parts` are runs of tokens, end to end, each with its rule.
    ///
    /// A table of rows and columns only (the vision towers of Qwen2-VL and Pixtral) has this form too: half of the
    /// frequencies take component 0, the others component 1. Where both halves have the same frequencies, `inv_freq`
    /// repeats itself.
    ///
    /// # Panics
    /// If the rules differ in their number of frequencies, or the positions in their number of tokens.
    pub fn with_components<'a>(
        pool: &Arc<Pool>,
        positions: &[&[u32]],
        components: &[usize],
        parts: impl IntoIterator<Item = (usize, (&'a [f32], f32))>,
    ) -> Self {
        let rules: Vec<_> = parts.into_iter().flat_map(|(tokens, rule)| std::iter::repeat_n(rule, tokens)).collect();
        assert!(positions.iter().all(|of| of.len() == rules.len()), "a position of each component for each token");
        assert!(components.iter().all(|&component| component < positions.len()), "components that have positions");
        assert!(rules.iter().all(|(inv_freq, _)| inv_freq.len() == components.len()), "a component for each frequency");
        Self::build(pool, &rules, |token, feature| positions[components[feature]][token] as usize)
    }

    /// The table in which token t uses `rules[t]` and, at frequency i, `position(t, i)`.
    fn build(pool: &Arc<Pool>, rules: &[(&[f32], f32)], position: impl Fn(usize, usize) -> usize + Sync) -> Self {
        let pairs = rules.first().map_or(1, |(inv_freq, _)| inv_freq.len());
        assert!(rules.iter().all(|(inv_freq, _)| inv_freq.len() == pairs), "rules of one width");
        let angle = |token: usize, feature: usize| {
            let (inv_freq, factor) = rules[token];
            let (sin, cos) = f64::from(position(token, feature) as f32 * inv_freq[feature]).sin_cos();
            (cos as f32 * factor, sin as f32 * factor)
        };
        let (mut cos, mut sin) = (pool.act_f32(rules.len(), pairs), pool.act_f32(rules.len(), pairs));
        match pool.device() {
            device if device.only_counts() => {}
            Device::Cpu => cpu::tables(&mut cos, &mut sin, angle),
            Device::Cuda(_) => cuda::tables(&mut cos, &mut sin, angle),
            Device::Meta => unreachable!("it only counts"),
        }
        Self { cos, sin, pairing: Pairing::Half }
    }

    /// The same table for another pairing; constructors use [`Pairing::Half`].
    #[must_use]
    pub fn paired(self, pairing: Pairing) -> Self {
        Self { pairing, ..self }
    }

    /// The table for the tokens `rows` only.
    #[must_use]
    pub fn gather(&self, rows: &[usize]) -> Self {
        Self { cos: self.cos.gather(rows), sin: self.sin.gather(rows), pairing: self.pairing }
    }

    /// Rotates every head of `x [tokens, heads * head_dim]` in place: its `2 * frequencies` features from `offset` on.
    ///
    /// The offset is 0 except for multi-head latent attention, where only the last features of a query are rotated: 64
    /// from feature 128 on. The rotated part of its keys is one for all heads: here it is `x [tokens, 64]`, before it
    /// is copied to each head.
    ///
    /// # Panics
    /// If `x` does not hold whole heads, or the rotated features are not within a head.
    pub fn forward(&self, x: &mut Activation, head_dim: usize, offset: usize) {
        self.turn(x, head_dim, offset, 1.0);
    }

    /// [`Rope::forward`] for the first token of the table, whose features are the vector `x [heads * head_dim, 1]`
    /// ([`Activation::to_vector`]), with the same bits.
    ///
    /// # Panics
    /// As [`Rope::forward`], or if the device is not the CPU.
    pub fn turn_vector(&self, x: &mut Activation, head_dim: usize, offset: usize) {
        assert_eq!((x.features(), x.device()), (1, Device::Cpu), "one token on the CPU");
        assert!(x.tokens().is_multiple_of(head_dim), "whole heads");
        assert!(offset + 2 * self.cos.features() <= head_dim, "what turns lies within a head");
        cpu::turn_vector(self, x, head_dim, offset);
    }

    /// The gradient of [`Rope::forward`], in place: the same rotation backwards.
    ///
    /// # Panics
    /// As [`Rope::forward`].
    pub fn backward(&self, dx: &mut Activation, head_dim: usize, offset: usize) {
        self.turn(dx, head_dim, offset, -1.0);
    }

    fn turn(&self, x: &mut Activation, head_dim: usize, offset: usize, sign: f32) {
        assert!(x.features().is_multiple_of(head_dim), "whole heads");
        assert!(offset + 2 * self.cos.features() <= head_dim, "what turns lies within a head");
        assert!(x.tokens() <= self.cos.tokens(), "a position for each token");
        match x.device() {
            Device::Cpu => cpu::turn(self, x, head_dim, offset, sign),
            Device::Cuda(_) => cuda::turn(self, x, head_dim, offset, sign),
            Device::Meta => {}
        }
    }
}

/// The component of each frequency if the frequencies are divided into sections, one for each component: `[16, 24, 24]`
/// gives 16 frequencies to component 0, the next 24 to component 1, the last 24 to component 2. This is `mrope_section`
/// of Qwen2-VL.
pub fn sections(counts: &[usize]) -> Vec<usize> {
    let of = |(component, &count): (usize, &usize)| std::iter::repeat_n(component, count);
    counts.iter().enumerate().flat_map(of).collect()
}

/// The component of each frequency if components take turns for as long as each has some left; the rest belong to
/// component 0: `[4, 3, 2]` gives `0 1 2 0 1 2 0 1 0`. This is `mrope_section` of Qwen3-VL, with `mrope_interleaved`.
pub fn interleaved_sections(counts: &[usize]) -> Vec<usize> {
    let component = |frequency: usize| {
        let (round, component) = (frequency / counts.len(), frequency % counts.len());
        if round < counts[component] { component } else { 0 }
    };
    (0..counts.iter().sum()).map(component).collect()
}
