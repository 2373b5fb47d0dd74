//! Queries, keys and values of multi-head latent attention (`DeepSeek`). A token is projected to a latent of queries,
//! to one of keys and values, and to a part of the key that is rotated and shared by all heads. Each latent has a norm,
//! and is then projected to all heads.
use super::grads::Grads;
use super::linear::{self, Base, Input, Linear};
use super::norm::Norm;
use super::pass::Pass;
use super::projections::Projections;
use super::weight::Weight;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::latent_attention::{self, Latents, LowRank, Projection};
use tunesmith_ops::latent_heads::{self, LatentHeads};
use tunesmith_ops::rope::Rope;

/// The projections of multi-head latent attention (MLA).
#[derive(Debug)]
pub struct Latent {
    /// `q_a_proj` (or `q_proj`, where queries have no latent) and `kv_a_proj_with_mqa`: to the latent of queries or to
    /// queries, to the latent of keys and values, and to the part of keys that turns.
    pub down: Projections<3>,
    /// From the latent of queries to all heads (`q_b_proj`), where queries have a latent.
    pub query: Option<Up>,
    /// From the latent of keys and values to each head's part of the key that does not turn, and its value
    /// (`kv_b_proj`).
    pub kv: Up,
    pub heads: LatentHeads,
}

/// From a latent to all heads: a norm, then a projection.
#[derive(Debug)]
pub struct Up {
    pub norm: Norm,
    pub proj: Linear,
}

/// What [`Up`] keeps for backward: the latent, the `rstd` of its norm, and what the projection keeps.
#[derive(Debug)]
struct UpSaved<T> {
    latent: T,
    rstd: Activation,
    extra: Option<linear::Saved<T>>,
}

/// What forward keeps for backward.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    query: Option<UpSaved<T>>,
    kv: UpSaved<T>,
}

impl<T> UpSaved<T> {
    fn map<U>(self, f: &impl Fn(T) -> U) -> UpSaved<U> {
        UpSaved { latent: f(self.latent), rstd: self.rstd, extra: self.extra.map(|extra| extra.map(f)) }
    }
}

impl<T> Saved<T> {
    /// Applies `f` to each activation that is kept: to store it in 16 bits or on the host, or to restore it
    /// ([`super::kept`]).
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        Saved { query: self.query.map(|query| query.map(f)), kv: self.kv.map(f) }
    }
}

impl Up {
    fn forward(&self, pass: &Pass<'_>, latent: Activation) -> (Activation, UpSaved<Activation>) {
        let (normed, rstd) = self.norm.forward(pass, &latent, 1);
        let (y, extra) = self.proj.forward(pass, &normed, None);
        (y, UpSaved { latent, rstd, extra })
    }

    /// From the gradient of all heads to that of the latent.
    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: UpSaved<Activation>,
        dy: &Activation,
        grads: &mut Grads<'_>,
    ) -> Activation {
        let UpSaved { latent, rstd, extra } = saved;
        let normed = self.norm.again(pass, &latent, &rstd);
        let mut d_normed = normed.like();
        let to = Some((&mut d_normed, false));
        self.proj.backward(pass, &Input::new(&normed), extra.as_ref(), dy, to, grads);
        drop(normed);
        let mut d_latent = latent.like();
        self.norm.backward(pass, &latent, &rstd, &d_normed, Some((&mut d_latent, false)), grads);
        d_latent
    }
}

impl Latent {
    fn ups(&self) -> impl Iterator<Item = &Up> {
        self.query.iter().chain([&self.kv])
    }

    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> Vec<&mut Weight> {
        let ups = self.query.iter_mut().chain([&mut self.kv]);
        let ups = ups.flat_map(|up| up.norm.weights_mut().chain(up.proj.weights_mut()));
        self.down.linears_mut().flat_map(Linear::weights_mut).chain(ups).collect()
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.down.linears().chain(self.ups().map(|up| &up.proj))
    }

    /// Whether a norm is trained.
    pub fn trains_norms(&self) -> bool {
        self.ups().any(|up| up.norm.trains())
    }

    /// Queries as they are projected (of the rows `picked` only, if given); keys, of which the part that turns is
    /// turned; and values. All heads lie side by side.
    pub fn forward(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        picked: Option<&[usize]>,
        rope: Option<&Rope>,
    ) -> ([Activation; 3], Vec<Option<linear::Saved>>, Saved) {
        let ([q, latent, mut k_rot], extra) = self.down.forward(pass, h, picked);
        let (q, query) = match &self.query {
            Some(up) => {
                let (q, saved) = up.forward(pass, q);
                (q, Some(saved))
            }
            None => (q, None),
        };
        let (kv, saved) = self.kv.forward(pass, latent);
        if let Some(rope) = rope {
            rope.forward(&mut k_rot, self.heads.rope, 0);
        }
        let (k, v) = latent_heads::forward(&kv, &k_rot, self.heads);
        ([q, k, v], extra, Saved { query, kv: saved })
    }

    /// Whether [`Latent::decode`] can compute it: the projection to keys and values has no bias, and no adapter other
    /// than `LoRA`.
    pub fn absorbs(&self) -> bool {
        let proj = &self.kv.proj;
        proj.bias.is_none() && proj.adapter.as_ref().is_none_or(|adapter| adapter.is_low_rank())
    }

    /// The low-rank update that `LoRA` adds to the projection to keys and values, if there is one.
    fn low_rank<'a>(&'a self, pass: &'a Pass<'a>) -> Option<LowRank<'a>> {
        let proj = &self.kv.proj;
        let low = proj.adapter.as_ref()?.low_rank(Base { linear: proj, pass }, 1)?;
        let (a, b) = (low.a.on_host(proj.in_features), low.b.on_host(low.rank));
        let (a, b) = a.zip(b).expect("float32, row by row");
        Some(LowRank { a, b, width: low.rank, scale: low.scale })
    }

    /// The empty cache of a new text.
    pub const fn cache(&self) -> Latents {
        Latents::new(self.kv.proj.in_features, self.heads.rope)
    }

    /// What a cache of latents takes: queries as they are projected (of the rows `picked` only, if given); the normed
    /// latents of keys and values; and the part of keys that turns, turned.
    pub fn compress(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        picked: Option<&[usize]>,
        rope: Option<&Rope>,
    ) -> [Activation; 3] {
        let ([q, latent, mut k_rot], _) = self.down.forward(pass, h, picked);
        let q = match &self.query {
            Some(up) => up.forward(pass, q).0,
            None => q,
        };
        let (normed, _) = self.kv.norm.forward(pass, &latent, 1);
        if let Some(rope) = rope {
            rope.forward(&mut k_rot, self.heads.rope, 0);
        }
        [q, normed, k_rot]
    }

    /// Keys and values of all heads, from the latents and turned parts of [`Latent::compress`]. They equal those of
    /// [`Latent::forward`] to the bit.
    pub fn expand(&self, pass: &Pass<'_>, normed: &Activation, k_rot: &Activation) -> (Activation, Activation) {
        let (kv, _) = self.kv.proj.forward(pass, normed, None);
        latent_heads::forward(&kv, k_rot, self.heads)
    }

    /// The mixed values of single, turned queries, each over the latents of its text up to a position. Neither keys nor
    /// values are made: the projection to keys is absorbed by the queries, and the projection to values is applied to
    /// what was mixed.
    ///
    /// # Panics
    /// As [`latent_attention::decode`].
    pub fn decode(&self, pass: &Pass<'_>, q: &Activation, queries: &[(&Latents, usize)], scale: f32) -> Activation {
        let weight = self.kv.proj.weight.view(pass.values);
        let projection =
            Projection { weight: weight.store(), low_rank: self.low_rank(pass), rank: self.kv.proj.in_features };
        latent_attention::decode(q, queries, projection, self.heads, scale)
    }

    /// From the gradients of turned keys and of values to those of what `kv` gave and of what turns of keys.
    pub fn backward_heads(&self, [dk, dv]: [Activation; 2], rope: Option<&Rope>) -> [Activation; 2] {
        let (d_kv, mut d_k_rot) = latent_heads::backward(&dk, &dv, self.heads);
        if let Some(rope) = rope {
            rope.backward(&mut d_k_rot, self.heads.rope, 0);
        }
        [d_kv, d_k_rot]
    }

    /// From the gradients of queries and of what [`Latent::backward_heads`] gives to that of `h`, or none if `want_dh` is
    /// false.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        (saved, extra): (Saved, &[Option<linear::Saved>]),
        [dq, d_kv, d_k_rot]: [Activation; 3],
        picked: Option<&[usize]>,
        want_dh: bool,
        grads: &mut Grads<'_>,
    ) -> Option<Activation> {
        let d_latent = self.kv.backward(pass, saved.kv, &d_kv, grads);
        drop(d_kv);
        let dq = match (&self.query, saved.query) {
            (Some(up), Some(saved)) => up.backward(pass, saved, &dq, grads),
            _ => dq,
        };
        self.down.backward(pass, h, extra, [dq, d_latent, d_k_rot], picked, want_dh, grads)
    }
}
