//! Cross-attention: a text's tokens attend to all rows of its image (`transformers.models.gpt2`, with `add_cross_attention`).
//!
//! Queries come from the residual stream. Keys and values come from the rows of the image, which are the same for every
//! block.
use super::across::Across;
use super::grads::Grads;
use super::linear::{self, Input, Linear};
use super::pass::{Drops, Pass, Rows};
use super::projections::Projections;
use super::weight::Weight;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::attention::{self, Heads, Scores};

/// Cross-attention as the part of a branch.
#[derive(Debug)]
pub struct CrossAttention {
    pub q: Linear,
    /// To keys and values.
    pub kv: Projections<2>,
    pub o: Linear,
    pub heads: Heads,
    pub how: Scores,
    /// Its number among the cross-attentions of the model, from 0: where caches hold its keys and values.
    pub number: usize,
}

/// What forward keeps for backward; sums and roots of sums stay in f32.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    q: T,
    /// Keys and values, `[rows of images, heads * head_dim]` each, unless a cache holds them.
    kv: Option<[T; 2]>,
    /// The mixed values.
    pub mixed: T,
    lse: Activation,
    /// What the projection to queries keeps.
    of_q: Option<linear::Saved<T>>,
    /// What the projection to keys and values keeps.
    of_kv: Vec<Option<linear::Saved<T>>>,
}

impl<T> Saved<T> {
    /// Applies `f` to each activation that is kept: to store it in 16 bits or on the host, or to restore it
    /// ([`super::kept`]).
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        Saved {
            q: f(self.q),
            kv: self.kv.map(|kv| kv.map(f)),
            mixed: f(self.mixed),
            lse: self.lse,
            of_q: self.of_q.map(|saved| saved.map(f)),
            of_kv: self.of_kv.into_iter().map(|saved| saved.map(|saved| saved.map(f))).collect(),
        }
    }
}

impl CrossAttention {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> Vec<&mut Weight> {
        [&mut self.q]
            .into_iter()
            .chain(self.kv.linears_mut())
            .chain([&mut self.o])
            .flat_map(Linear::weights_mut)
            .collect()
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        [&self.q].into_iter().chain(self.kv.linears()).chain([&self.o])
    }

    /// The mixed values `[rows, heads * head_dim]` for `h [rows, hidden]`, and what backward needs. `rows` has the
    /// sequences.
    pub fn forward(&self, pass: &Pass<'_>, h: &Activation, images: &Across, rows: &Rows) -> Saved {
        let (kv, of_kv) = self.kv.forward(&pass_of(images, pass), images.features(), None);
        let (q, of_q) = self.q.forward(pass, h, None);
        let (mixed, lse) =
            attention::forward(&q, &kv[0], &kv[1], None, &images.spans(rows.sequences()), self.heads, self.how);
        Saved { q, kv: Some(kv), mixed, lse, of_q, of_kv }
    }

    /// As [`CrossAttention::forward`], for decoding: `mix` computes the mixed values of the queries over keys and
    /// values that a cache holds.
    pub fn forward_by(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        mix: impl FnOnce(&Activation) -> (Activation, Activation),
    ) -> Saved {
        let (q, of_q) = self.q.forward(pass, h, None);
        let (mixed, lse) = mix(&q);
        Saved { q, kv: None, mixed, lse, of_q, of_kv: Vec::new() }
    }

    /// Keys and values of rows of images, `[rows, heads * head_dim]` each.
    pub fn keys_and_values(&self, pass: &Pass<'_>, rows: &Activation) -> [Activation; 2] {
        self.kv.forward(&Pass { pool: rows.pool(), ..*pass }, rows, None).0
    }

    /// From the gradient of the mixed values to that of `h`. Those of the rows of images are added to `images`, where asked for.
    ///
    /// # Panics
    /// If `saved` comes from [`CrossAttention::forward_by`].
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        saved: Saved,
        d_mixed: &Activation,
        (images, rows): (&Across, &Rows),
        want_dh: bool,
        grads: &mut Grads<'_>,
    ) -> Option<Activation> {
        let Saved { q, kv, mixed, lse, of_q, of_kv } = saved;
        let [k, v] = kv.expect("a pass with a way back keeps keys and values");
        let (dq, dk, dv) = {
            let forward = attention::Saved { q: &q, k: &k, v: &v, sinks: None, o: &mixed, lse: &lse };
            attention::backward(forward, d_mixed, &images.spans(rows.sequences()), self.heads, self.how, None)
        };
        drop((q, k, v, mixed, lse));
        let of_images = pass_of(images, pass);
        let d_rows =
            self.kv.backward(&of_images, images.features(), &of_kv, [dk, dv], None, images.want_gradient(), grads);
        images.add_gradient(d_rows);
        let mut dh = want_dh.then(|| h.like());
        self.q.backward(pass, &Input::new(h), of_q.as_ref(), &dq, dh.as_mut().map(|dh| (dh, false)), grads);
        dh
    }
}

/// The pass for modules whose input is the rows of images: it takes buffers from their pool, and dropout goes by the
/// numbers of these rows.
fn pass_of<'a>(images: &'a Across, pass: &Pass<'a>) -> Pass<'a> {
    let dropout = pass.dropout.map(|drops| Drops { first_row: 0, picked: images.numbers(), ..drops });
    Pass { pool: images.features().pool(), balance: None, dropout, ..*pass }
}
