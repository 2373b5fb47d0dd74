//! The KV cache of one text for one attention: keys and values of all heads, or the latents that they are made of.
use crate::attention::{self as mixed, Attention};
use crate::latent::Latent;
use crate::pass::{BlockRows, Pass};
use std::ops::Range;
use tunesmith_device::Device;
use tunesmith_ops::activation::{Activation, Pool};
use tunesmith_ops::attention::{self, KeyValues};
use tunesmith_ops::latent_attention::Latents;
use tunesmith_ops::spans::Span;

/// The cache of one text for one attention.
#[derive(Debug, Clone)]
pub(super) enum LayerCache {
    /// Keys and values of all heads.
    Heads(KeyValues),
    /// For latent attention: the latents and the turned part of keys, which all heads share
    /// ([`Attention::cached_latents`]).
    Latents(Latents),
}

/// A text in a walk over cached latents: its cache, the number of its new tokens, and the position at which its prompt
/// ends.
#[derive(Debug)]
pub(super) struct LatentText<'a> {
    pub cache: &'a mut Latents,
    pub count: usize,
    pub prompt: usize,
}

impl LayerCache {
    /// The empty cache of a new text.
    pub(super) fn new(attention: &Attention, device: Device) -> Self {
        match attention.cached_latents(device) {
            Some(latent) => Self::Latents(latent.cache()),
            None => Self::Heads(KeyValues::new(attention.heads, attention.how.window)),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Heads(heads) => heads.bytes(),
            Self::Latents(latents) => latents.bytes(),
        }
    }

    pub(super) fn clear(&mut self) {
        match self {
            Self::Heads(heads) => heads.clear(),
            Self::Latents(latents) => latents.clear(),
        }
    }

    /// Forgets all but the first `length` positions. Returns false if it cannot go back.
    pub(super) fn truncate(&mut self, length: usize) -> bool {
        match self {
            Self::Heads(heads) => heads.truncate(length),
            Self::Latents(latents) => {
                latents.truncate(length);
                true
            }
        }
    }

    /// Keys and values of all heads.
    ///
    /// # Panics
    /// If it holds latents.
    pub(super) fn heads(&self) -> &KeyValues {
        match self {
            Self::Heads(heads) => heads,
            Self::Latents(_) => panic!("keys and values of heads"),
        }
    }

    /// As [`LayerCache::heads`], for appending tokens.
    ///
    /// # Panics
    /// If it holds latents.
    pub(super) fn heads_mut(&mut self) -> &mut KeyValues {
        match self {
            Self::Heads(heads) => heads,
            Self::Latents(_) => panic!("keys and values of heads"),
        }
    }
}

/// Those queries of a text that are computed in one way, over heads or over latents: their rows in the walk, the text's
/// cache, and their part of its span.
struct Share<'a> {
    rows: Range<usize>,
    cache: &'a Latents,
    span: Span,
}

/// Latent attention for texts that continue from their caches. The caches take the new tokens first. Tokens of a prompt
/// attend as in training, over keys and values made of the latents. Tokens after the prompt attend over the latents
/// themselves. So the result for a token depends on its text and its place in it, and not on what else is in the walk.
pub(super) fn over_latents(
    (part, latent): (&Attention, &Latent),
    pass: &Pass<'_>,
    h: &Activation,
    rows: BlockRows<'_>,
    texts: &mut [LatentText<'_>],
) -> mixed::Saved {
    part.forward_latents(latent, pass, h, rows, |q, normed, k_rot| {
        let mut start = 0;
        for text in texts.iter_mut() {
            text.cache.append(normed, k_rot, start, text.count);
            start += text.count;
        }
        let (mut prompts, mut answers) = (Vec::new(), Vec::new());
        for (text, span) in texts.iter().zip(rows.outputs.spans(part.how.window)) {
            let [prompt, answer] = halves(text.cache, span, text.prompt);
            prompts.extend(prompt);
            answers.extend(answer);
        }
        if answers.is_empty() {
            return as_heads(part, latent, pass, q, &prompts);
        }
        if prompts.is_empty() {
            return as_latents(part, latent, pass, q, &answers);
        }
        let of = |shares: &[Share<'_>]| shares.iter().flat_map(|share| share.rows.clone()).collect::<Vec<usize>>();
        let [first, second] = [of(&prompts), of(&answers)];
        let mut mixed = as_heads(part, latent, pass, &q.gather(&first), &prompts).scatter(&first, q.tokens());
        mixed.scatter_add(&second, None, &as_latents(part, latent, pass, &q.gather(&second), &answers));
        mixed
    })
}

/// The queries of a text within its prompt, and those after it; none where there are none.
fn halves<'a>(cache: &'a Latents, span: &Span, prompt: usize) -> [Option<Share<'a>>; 2] {
    let rows = span.query_tokens();
    if span.ranges.is_some() {
        // The ranges say which keys each query sees.
        return [Some(Share { rows, cache, span: span.clone() }), None];
    }
    let cut = span.positions.partition_point(|&position| position < prompt);
    let share = |from: usize, to: usize, keys: usize| {
        let rows = rows.start + from..rows.start + to;
        let span = Span { keys, positions: span.positions[from..to].to_vec(), ..span.clone() };
        (from < to).then_some(Share { rows, cache, span })
    };
    [share(0, cut, prompt.min(span.keys)), share(cut, span.positions.len(), span.keys)]
}

/// The mixed values of queries that attend over the latents themselves: they absorb the projections to keys and values.
fn as_latents(part: &Attention, latent: &Latent, pass: &Pass<'_>, q: &Activation, shares: &[Share<'_>]) -> Activation {
    let positions = |share: &Share<'_>| share.span.positions.clone();
    let queries: Vec<(&Latents, usize)> =
        shares.iter().flat_map(|share| positions(share).into_iter().map(|position| (share.cache, position))).collect();
    latent.decode(pass, q, &queries, part.how.scale)
}

/// The mixed values of queries over keys and values of all heads.
fn as_heads(part: &Attention, latent: &Latent, pass: &Pass<'_>, q: &Activation, shares: &[Share<'_>]) -> Activation {
    let pool = Pool::on(q.device());
    pool.set_products(q.pool().products());
    let texts: Vec<(&Latents, usize)> = shares.iter().map(|share| (share.cache, share.span.keys)).collect();
    let (normed, k_rot) = Latents::concat(&pool, &texts);
    let (k, v) = latent.expand(pass, &normed, &k_rot);
    let (mut key_start, mut query_start) = (0, 0);
    let end_to_end = |Share { span, .. }: &Share<'_>| {
        let moved = Span { key_start, query_start, ..span.clone() };
        key_start += span.keys;
        query_start += span.positions.len();
        moved
    };
    let spans: Vec<Span> = shares.iter().map(end_to_end).collect();
    attention::forward(q, &k, &v, None, &spans, part.heads, part.how).0
}
