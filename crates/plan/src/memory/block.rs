//! The activations of a decoder block: takes them from the pools and gives them back in the order of `model::block`.
use super::footprint::Input;
use super::parts::{Extra, Linear, Mlp, MlpSaved, Modules, Moe, MoeSaved};
use super::pool::{Activation, Pool};
use tunesmith_config::arch::{Arch, NormPlacement, QkNorm};

/// How a branch's output is added to the residual stream: as it is, times a factor, or after a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Join {
    Plain,
    Scaled,
    Normed,
}

#[derive(Debug, Clone)]
pub(super) enum Feed {
    Dense(Mlp),
    Sparse(Moe),
}

/// A block's parts and widths in features; `heads` are those of queries and of keys.
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own
#[derive(Debug, Clone)]
pub(super) struct Block {
    hidden: u64,
    query: u64,
    key: u64,
    heads: [u64; 2],
    attention_norm: bool,
    trains_attention_norm: bool,
    qkv: Vec<Linear>,
    qk_norm: Option<[u64; 2]>,
    o: Linear,
    attention_join: Join,
    mlp_norm: bool,
    pub(super) feed: Feed,
    mlp_join: Join,
    pub(super) trains: bool,
}

#[derive(Debug)]
struct AttentionSaved {
    qkv: [Activation; 3],
    raw: Option<[(Activation, Activation); 2]>,
    mixed: Activation,
    lse: Activation,
    extra: Vec<Option<Extra>>,
}

#[derive(Debug)]
enum FeedSaved {
    /// With the adapter's activations of `down`, and with the input of `down` where it is saved.
    Dense(MlpSaved, Option<Extra>, Option<Activation>),
    Sparse(MoeSaved),
}

type Raw = Option<(Activation, Activation)>;

#[derive(Debug)]
pub(super) struct Saved {
    /// The normed inputs of both branches, where they are saved.
    normed: [Option<Activation>; 2],
    rstd1: Option<Activation>,
    attention: AttentionSaved,
    attention_raw: Raw,
    x2: Activation,
    rstd2: Option<Activation>,
    feed: FeedSaved,
    mlp_raw: Raw,
    o_extra: Option<Extra>,
}

impl Saved {
    /// Applies `f`, such as [`Pool::narrow`], to each activation that may be saved in two bytes a number, in the
    /// engine's order.
    pub(super) fn map(self, pools: &mut Pools, f: fn(&mut Pool, Activation) -> Activation) -> Self {
        let Pools { main, own } = pools;
        let mut g = |act: Activation| f(main, act);
        let normed = self.normed.map(|normed| normed.map(&mut g));
        let AttentionSaved { qkv, raw, mixed, lse, extra } = self.attention;
        let qkv = qkv.map(&mut g);
        let raw = raw.map(|raw| raw.map(|(input, rstd)| (g(input), rstd)));
        let mixed = g(mixed);
        let extra = extra.into_iter().map(|extra| extra.map(|extra| extra.map(&mut g))).collect();
        let attention = AttentionSaved { qkv, raw, mixed, lse, extra };
        let attention_raw = self.attention_raw.map(|(input, rstd)| (g(input), rstd));
        let x2 = g(self.x2);
        let feed = match self.feed {
            FeedSaved::Dense(saved, extra, middle) => {
                FeedSaved::Dense(saved.map(&mut g), extra.map(|extra| extra.map(&mut g)), middle.map(&mut g))
            }
            FeedSaved::Sparse(saved) => FeedSaved::Sparse(saved.map(&mut |act| f(own, act), &mut g)),
        };
        let mlp_raw = self.mlp_raw.map(|(input, rstd)| (g(input), rstd));
        let o_extra = self.o_extra.map(|extra| extra.map(&mut g));
        Self { normed, attention, attention_raw, x2, feed, mlp_raw, o_extra, ..self }
    }

    pub(super) fn give(self, pools: &mut Pools) {
        let Pools { main, own } = pools;
        let AttentionSaved { qkv, raw, mixed, lse, extra } = self.attention;
        main.give_all(qkv);
        main.give_all([mixed, lse, self.x2]);
        main.give_all([self.rstd1, self.rstd2].into_iter().chain(self.normed).flatten());
        let pairs = raw.into_iter().flatten().chain(self.attention_raw).chain(self.mlp_raw);
        main.give_all(pairs.flat_map(|(input, rstd)| [input, rstd]));
        extra.into_iter().chain([self.o_extra]).flatten().for_each(|extra| extra.give(main));
        match self.feed {
            FeedSaved::Dense(saved, extra, middle) => {
                saved.give(main);
                main.give_all(middle);
                if let Some(extra) = extra {
                    extra.give(main);
                }
            }
            FeedSaved::Sparse(saved) => saved.give(main, own),
        }
    }
}

/// The pool of the walk (`main`), and that of the block's experts (`own`), whose buffers have other numbers of tokens.
pub(super) struct Pools<'a> {
    pub(super) main: &'a mut Pool,
    pub(super) own: &'a mut Pool,
}

/// How a block is computed in a pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct How {
    pub(super) dropout: bool,
    /// The block computes keys and values of all tokens, the rest only of those with a label, as the last block does.
    pub(super) picked: bool,
    /// How many tokens go through the second branch.
    pub(super) rows: u64,
    /// The block also saves what is cheap to compute again ([`super::Policy::None`]).
    pub(super) whole: bool,
}

/// Returns the activation to save it where `whole`, else gives it back.
fn keep(pool: &mut Pool, act: Option<Activation>, whole: bool) -> Option<Activation> {
    if whole {
        return act;
    }
    pool.give_all(act);
    None
}

impl Block {
    pub(super) fn new(arch: &Arch, modules: &Modules<'_>, trains: impl Fn(&str) -> bool, layer: usize) -> Self {
        let prefix = format!("model.layers.{layer}");
        let linear = |name: &str| modules.linear(&format!("{prefix}.self_attn.{name}"));
        let qkv =
            if arch.fused { vec![linear("qkv_proj")] } else { ["q_proj", "k_proj", "v_proj"].map(linear).to_vec() };
        let o = linear("o_proj");
        let heads = [arch.num_attention_heads as u64, arch.num_key_value_heads as u64];
        let feed = modules.moe(layer).map_or_else(|| Feed::Dense(modules.mlp(&format!("{prefix}.mlp"))), Feed::Sparse);
        let norms = arch.norms.names();
        let norm_trains = |name: &str| trains(&format!("{prefix}.{name}.weight"));
        let any_norm = norms.iter().flatten().copied().chain(["self_attn.q_norm", "self_attn.k_norm"]).any(norm_trains);
        let feeds = match &feed {
            Feed::Dense(mlp) => mlp.gate_up.iter().chain([&mlp.down]).any(|linear| linear.trains),
            Feed::Sparse(moe) => moe.trains(),
        };
        let join = if arch.norms != NormPlacement::Pre {
            Join::Normed
        } else if arch.residual_scale == 1.0 {
            Join::Plain
        } else {
            Join::Scaled
        };
        Self {
            hidden: arch.hidden_size as u64,
            query: heads[0] * arch.head_dim as u64,
            key: heads[1] * arch.head_dim as u64,
            heads,
            attention_norm: norms[0].is_some(),
            trains_attention_norm: norms[0].is_some_and(norm_trains),
            trains: any_norm || feeds || o.trains || qkv.iter().any(|linear| linear.trains),
            qkv,
            qk_norm: match arch.qk_norm {
                QkNorm::None => None,
                QkNorm::Head => Some(heads),
                QkNorm::Whole => Some([1, 1]),
            },
            o,
            attention_join: join,
            mlp_norm: norms[2].is_some(),
            feed,
            mlp_join: join,
        }
    }

    fn norm(pool: &mut Pool, features: u64, there: bool) -> (Option<Activation>, Option<Activation>) {
        there
            .then(|| {
                let rstd = pool.take(1);
                (pool.take(features), rstd)
            })
            .unzip()
    }

    /// Adds a branch's output to the residual stream; a norm between saves its input.
    fn join(&self, pool: &mut Pool, how: Join, y: Activation) -> (Activation, Raw) {
        if how != Join::Normed {
            return (y, None);
        }
        let rstd = pool.take(1);
        (pool.take(self.hidden), Some((y, rstd)))
    }

    fn attention(&self, pool: &mut Pool, how: How) -> AttentionSaved {
        let dropout = how.dropout;
        let (mut qkv, extra) = if let [fused] = &self.qkv[..] {
            let (y, extra) = fused.forward(pool, dropout);
            let mut parts = [self.query, self.key, self.key].map(|features| pool.take(features));
            if how.picked {
                let q = pool.take(self.query);
                pool.give(std::mem::replace(&mut parts[0], q));
            }
            pool.give(y);
            (parts, vec![extra])
        } else {
            let (k, k_extra) = self.qkv[1].forward(pool, dropout);
            let (v, v_extra) = self.qkv[2].forward(pool, dropout);
            let picked = how.picked.then(|| pool.take(self.hidden));
            let (q, q_extra) = self.qkv[0].forward(pool, dropout);
            pool.give_all(picked);
            ([q, k, v], vec![q_extra, k_extra, v_extra])
        };
        let raw = self.qk_norm.map(|groups| {
            let mut one = |at: usize, features: u64| {
                let rstd = pool.take(groups[at]);
                (std::mem::replace(&mut qkv[at], pool.take(features)), rstd)
            };
            [one(0, self.query), one(1, self.key)]
        });
        let (mixed, lse) = (pool.take(self.query), pool.take(self.heads[0]));
        AttentionSaved { qkv, raw, mixed, lse, extra }
    }

    pub(super) fn forward(&self, pools: &mut Pools<'_>, how: How) -> (Activation, Saved) {
        let (h, rstd1) = Self::norm(pools.main, self.hidden, self.attention_norm);
        let attention = self.attention(pools.main, how);
        let first = keep(pools.main, h, how.whole);
        let picked = how.picked.then(|| pools.main.take(self.hidden));
        let (y, o_extra) = self.o.forward(pools.main, how.dropout);
        let (x2, attention_raw) = self.join(pools.main, self.attention_join, y);
        pools.main.give_all(picked);
        let (h, rstd2) = Self::norm(pools.main, self.hidden, self.mlp_norm);
        let (second, (y, mlp_raw), feed) = match &self.feed {
            Feed::Dense(mlp) => {
                let saved = mlp.forward(pools.main, how.dropout);
                let second = keep(pools.main, h, how.whole);
                let middle = pools.main.take(mlp.inner);
                let (y, extra) = mlp.down.forward(pools.main, how.dropout);
                let joined = self.join(pools.main, self.mlp_join, y);
                let middle = keep(pools.main, Some(middle), how.whole);
                (second, joined, FeedSaved::Dense(saved, extra, middle))
            }
            Feed::Sparse(moe) => {
                let (y, saved) = moe.forward(pools.main, pools.own, how.rows, how.dropout);
                let second = keep(pools.main, h, how.whole);
                (second, self.join(pools.main, self.mlp_join, y), FeedSaved::Sparse(saved))
            }
        };
        let normed = [first, second];
        (y, Saved { normed, rstd1, attention, attention_raw, x2, rstd2, feed, mlp_raw, o_extra })
    }

    pub(super) fn backward(
        &self,
        pools: &mut Pools<'_>,
        saved: Saved,
        dy: Activation,
        how: How,
        want_dx: bool,
    ) -> Option<Activation> {
        let Saved { normed: [h1, h2], rstd1, attention, attention_raw, x2, rstd2, feed, mlp_raw, o_extra } = saved;
        let pool = &mut *pools.main;
        let dx2 = dy;
        let d_last = (self.mlp_join != Join::Plain).then(|| pool.take(self.hidden));
        pool.give_all(mlp_raw.into_iter().flat_map(|(input, rstd)| [input, rstd]));
        let dh = match (&self.feed, feed) {
            (Feed::Dense(mlp), FeedSaved::Dense(saved, extra, middle)) => {
                let d_middle = mlp.backward_down(pool, middle, how.dropout);
                pool.give(d_middle);
                let again = h2.or_else(|| self.mlp_norm.then(|| pool.take(self.hidden)));
                let dh = mlp.backward_gate_up(pool, saved, self.hidden, how.dropout);
                pool.give_all(again);
                if let Some(extra) = extra {
                    extra.give(pool);
                }
                Some(dh)
            }
            (Feed::Sparse(moe), FeedSaved::Sparse(saved)) => {
                let again = h2.or_else(|| self.mlp_norm.then(|| pool.take(self.hidden)));
                let dh = moe.backward(pool, pools.own, saved, how.dropout);
                pool.give_all(again);
                Some(dh)
            }
            _ => None, // a branch keeps its own kind
        };
        pool.give_all(dh);
        pool.give(x2);
        pool.give_all(rstd2);
        let d_mixed = pool.take(self.query);
        let d_o = (self.attention_join != Join::Plain).then(|| pool.take(self.hidden));
        pool.give_all(attention_raw.into_iter().flat_map(|(input, rstd)| [input, rstd]));
        let mut input = Input::default();
        self.o.backward(pool, &mut input, how.dropout, true);
        input.give(pool);
        pool.give_all(d_o);
        // Back through attention.
        let AttentionSaved { qkv, raw, mixed, lse, extra } = attention;
        let mut d = [self.query, self.key, self.key].map(|features| pool.take(features));
        pool.give_all([d_mixed, mixed, lse]);
        pool.give_all(qkv);
        if let Some(raw) = raw {
            let turned = [self.query, self.key].map(|features| pool.take(features));
            for (at, turned) in turned.into_iter().enumerate() {
                pool.give(std::mem::replace(&mut d[at], turned));
            }
            pool.give_all(raw.into_iter().flat_map(|(input, rstd)| [input, rstd]));
        }
        // Back through the projections.
        let h = h1.or_else(|| self.attention_norm.then(|| pool.take(self.hidden)));
        let want_dh = want_dx || self.trains_attention_norm;
        let dh = self.backward_projections(pool, d, how, want_dh);
        extra.into_iter().flatten().for_each(|extra| extra.give(pool));
        let dx = if want_dx && dh.is_some() && how.picked {
            let dx = pool.take(self.hidden);
            pool.give(dx2);
            Some(dx)
        } else if want_dx && dh.is_some() {
            Some(dx2)
        } else {
            pool.give(dx2);
            None
        };
        pool.give_all([h, dh, rstd1, d_last].into_iter().flatten());
        if let Some(extra) = o_extra {
            extra.give(pool);
        }
        dx
    }

    fn backward_projections(&self, pool: &mut Pool, d: [Activation; 3], how: How, want_dh: bool) -> Option<Activation> {
        let mut input = Input::default();
        let dh = if let [fused] = &self.qkv[..] {
            let [mut dq, dk, dv] = d;
            if how.picked {
                let whole = pool.take(self.query);
                pool.give(std::mem::replace(&mut dq, whole));
            }
            let dy = pool.take(self.query + 2 * self.key);
            pool.give_all([dq, dk, dv]);
            let dh = want_dh.then(|| pool.take(self.hidden));
            fused.backward(pool, &mut input, how.dropout, want_dh);
            pool.give(dy);
            dh
        } else {
            let mut first = Input::default();
            let dh = if how.picked {
                let (h, dh) = (pool.take(self.hidden), pool.take(self.hidden));
                self.qkv[0].backward(pool, &mut first, how.dropout, want_dh);
                first.give(pool);
                let whole = want_dh.then(|| pool.take(self.hidden));
                pool.give_all([h, dh]);
                whole
            } else {
                let dh = want_dh.then(|| pool.take(self.hidden));
                self.qkv[0].backward(pool, &mut first, how.dropout, want_dh);
                first.give(pool);
                dh
            };
            self.qkv[1].backward(pool, &mut input, how.dropout, want_dh);
            self.qkv[2].backward(pool, &mut input, how.dropout, want_dh);
            pool.give_all(d);
            dh
        };
        input.give(pool);
        dh
    }
}
