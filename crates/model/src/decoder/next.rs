//! Decoding: texts of any lengths continue from their caches, each by one token or by many. A text's logits do not depend on the other
//! texts in the walk. Nor do they depend on how its tokens were cut into walks, except for the rounding of recurrences: these take 16 or
//! more tokens of a text in chunks. Where caches keep latents, they depend on where the prompt ends ([`TextCache::expect_prompt`]).
use super::layer_cache::{LatentText, LayerCache, over_latents};
use super::pictures::{Spliced, put};
use super::{Model, one_image};
use crate::across;
use crate::attention::{self as mixed, Attention, Qkv};
use crate::blocks::Walk;
use crate::cross_attention::{self, CrossAttention};
use crate::delta_net::{self, DeltaNet};
use crate::mamba::{self, Mamba};
use crate::mixers::Mixing;
use crate::pass::{BlockRows, Layout, Pass};
use crate::positions::Positions;
use crate::recurrent::{self, Recurrent};
use crate::short_conv::{self, ShortConv};
use crate::vision::Splice;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::Rope;
use tunesmith_data::batch::{Batch, ImageRows};
use tunesmith_device::{Device, memory};
use tunesmith_ops::activation::{Activation, Pool, Unrounded};
use tunesmith_ops::attention::{self, KeyValues};
use tunesmith_ops::causal_conv1d::Conv;
use tunesmith_ops::gated_delta_rule;
use tunesmith_ops::loss::linear;
use tunesmith_ops::mamba2;
use tunesmith_ops::par;

/// With at most this many new tokens, the queries of a text read its cache one by one. For more, its keys and values are laid out as a
/// batch.
const FEW: usize = 16;

/// From this many new prompt tokens on, it pays to make keys and values of all the text's latents again. With `nope + rope` features of a
/// key, `value` of a value, and latents of `rank`, a token saves `2 rank - nope - value` products with each earlier token, for which
/// `rank (nope + value)` are spent: as much with 171 new tokens in the sizes of all `DeepSeek` models (128, 64, 128, and 512).
const MANY: usize = 171;

/// One text in decoding: its tokens, and their keys, values and states in every block. A clone shares memory until either of the two
/// continues.
#[derive(Debug, Clone)]
pub struct TextCache {
    tokens: Vec<u32>,
    /// The KV cache of each attention, in the order of the blocks.
    layers: Vec<LayerCache>,
    /// The keys and values of its image's rows for each cross-attention, in the order of the blocks.
    across: Vec<KeyValues>,
    /// The state of each recurrent mixer, in the order of the blocks.
    recurrent: Vec<Recurrent>,
    /// Its images, in the order of their rows.
    images: Vec<Shown>,
    /// How many tokens were read first. In a model that reads prompts in both directions, they are the prompt.
    prompt: usize,
    /// With cached latents: tokens before this position are computed as in training, later ones by absorbed projections.
    as_heads: usize,
}

/// An image of a text.
#[derive(Debug, Clone)]
struct Shown {
    /// The runs of its rows, as positions in the text.
    runs: Vec<Range<usize>>,
    /// Whether they come from a second encoder. Such rows see only what is before them.
    world: bool,
    /// The rows and columns of the grid that they form, if they do.
    sides: Option<[usize; 2]>,
    /// The rows themselves, `[rows, hidden]` for each connector.
    rows: Arc<[Vec<f32>]>,
}

impl Shown {
    /// The runs within `range`, and of each the place of its first row among [`Shown::rows`].
    fn within(&self, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
        let mut first = 0;
        let places = self.runs.iter().map(move |run| {
            let clipped = run.start.max(range.start)..run.end.min(range.end);
            let place = first + clipped.start.saturating_sub(run.start);
            first += run.len();
            (clipped, place)
        });
        places.filter(|(run, _)| run.start < run.end)
    }
}

impl TextCache {
    /// The tokens that it holds.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Bytes of its keys and values, and of its states.
    pub fn bytes(&self) -> usize {
        let states: usize = self.recurrent.iter().map(Recurrent::bytes).sum();
        let across: usize = self.across.iter().map(KeyValues::bytes).sum();
        states + across + self.layers.iter().map(LayerCache::bytes).sum::<usize>()
    }

    /// Declares the first `length` tokens a prompt, so that the result does not depend on how the prompt is cut into walks. Without this
    /// call, the tokens of the first walk are the prompt. If the cache already holds tokens, a few more are treated as if the model had
    /// written them, which takes less time.
    pub fn expect_prompt(&mut self, length: usize) {
        if self.tokens.is_empty() || length >= self.tokens.len() + MANY {
            self.as_heads = length;
        }
    }

    /// Frees everything but the images, and returns the tokens, which then have to be read again.
    pub fn give_up(&mut self) -> Vec<u32> {
        self.layers.iter_mut().for_each(LayerCache::clear);
        self.across.iter_mut().for_each(KeyValues::clear);
        self.recurrent.fill(Recurrent::default());
        std::mem::take(&mut self.tokens)
    }

    /// Forgets all but the first `length` tokens, and images that reach beyond. Returns false if it cannot go back: a sliding window may
    /// have dropped what they need, a recurrent state does not go back, or a prompt that was read in both directions would be cut.
    pub fn truncate(&mut self, length: usize) -> bool {
        if length < self.prompt || (length < self.tokens.len() && !self.recurrent.is_empty()) {
            return false;
        }
        self.tokens.truncate(length);
        self.images.retain(|image| image.runs.last().is_none_or(|run| run.end <= length));
        if self.images.is_empty() {
            self.across.iter_mut().for_each(KeyValues::clear);
        }
        self.layers.iter_mut().all(|layer| layer.truncate(length))
    }
}

/// A text and its new tokens in a walk. The last of them may be drafts, as in speculative decoding.
#[derive(Debug)]
pub struct Drafted<'a> {
    /// The text so far, which then holds all of the tokens.
    pub cache: &'a mut TextCache,
    /// The new tokens, drafts last: at least one more than `drafted`.
    pub tokens: &'a [u32],
    /// How many of the last tokens are drafts.
    pub drafted: usize,
}

/// The logits for the next token of each text; where tokens are drafted, also for the position of each draft.
#[derive(Debug)]
pub struct Logits {
    /// Parts of `[texts, vocabulary]`, each with some of the texts.
    parts: Vec<linear::Logits>,
}

impl Logits {
    /// The logits of one text, `[vocabulary]`.
    pub fn row(&self, text: usize) -> Vec<f32> {
        let mut row = text;
        for part in &self.parts {
            if row < part.rows() {
                return part.row(row);
            }
            row -= part.rows();
        }
        panic!("text {text} is not among the logits");
    }

    /// Each text's most probable token, the first of several; `None` if its logits are not finite.
    pub fn best(&self) -> Vec<Option<u32>> {
        self.parts.iter().flat_map(linear::Logits::best).collect()
    }
}

impl Model {
    /// The empty cache of a new text.
    pub fn cache(&self) -> TextCache {
        TextCache {
            tokens: Vec::new(),
            layers: self.blocks.attentions().map(|part| LayerCache::new(part, self.device())).collect(),
            across: self.blocks.cross_attentions().map(|cross| KeyValues::new(cross.heads, None)).collect(),
            recurrent: self.blocks.recurrent().map(|_| Recurrent::default()).collect(),
            images: Vec::new(),
            prompt: 0,
            as_heads: 0,
        }
    }

    /// The cache of a new text that will show `images`, whose runs are positions in the text. The encoder reads them here, once. The text's
    /// tokens may have any id at these positions.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the model sees no pictures, or one does not fit its rows. [`tunesmith_base::Kind::Memory`]: it does not
    /// fit into the memory budget.
    pub fn cache_with_images(&self, images: &[ImageRows]) -> Result<TextCache> {
        let end = images.iter().flat_map(|image| &image.runs).map(|run| run.end).max().unwrap_or_default();
        self.check(&Batch { tokens: vec![0; end], images: images.to_vec(), ..Batch::default() })?;
        let shown = |image: &ImageRows| {
            let sides = self.vision.as_ref().and_then(|vision| vision.sides(&image.pixels));
            let world = image.pixels.world;
            Ok(Shown { runs: image.runs.clone(), world, sides, rows: self.encode(image)?.into() })
        };
        Ok(TextCache { images: images.iter().map(shown).collect::<Result<_>>()?, ..self.cache() })
    }

    /// Continues each text by its tokens (at least one), which its cache then holds, and returns the logits for the next token. No dropout.
    ///
    /// A rotary rule for long contexts may turn keys differently once a text is longer: such a text is then read again as a whole.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: a token outside the vocabulary, or a text without a new one. [`tunesmith_base::Kind::Memory`]: it does not
    /// fit into the memory budget; the caches then know their texts' tokens, the new ones included, and nothing else: what is
    /// left is [`TextCache::give_up`]. [`tunesmith_base::Kind::Peer`]: a rank that has a share of the weights is gone.
    pub fn extend(&self, texts: &mut [(&mut TextCache, &[u32])]) -> Result<Logits> {
        let whole = texts.iter_mut().map(|(cache, tokens)| Drafted { cache, tokens, drafted: 0 });
        self.extend_drafted(&mut whole.collect::<Vec<_>>())
    }

    /// As [`Model::extend`]. A text has a row of logits for the tokens that are not drafted, and one more for each drafted token:
    /// those that [`Model::extend`] would give one by one. [`TextCache::truncate`] takes the wrong ones back, where it can.
    ///
    /// # Errors
    /// As [`Model::extend`].
    pub fn extend_drafted(&self, texts: &mut [Drafted<'_>]) -> Result<Logits> {
        if texts.iter().any(|text| text.tokens.len() <= text.drafted) {
            return Err(Error::data("a text without tokens cannot go on"));
        }
        let tokens: Vec<u32> = texts.iter().flat_map(|text| text.tokens.iter().copied()).collect();
        self.check(&Batch { tokens, ..Batch::default() })?;
        if texts.is_empty() {
            return Ok(Logits { parts: Vec::new() });
        }
        let end = |text: &Drafted<'_>| {
            let end = text.cache.tokens.len() + text.tokens.len();
            self.positions.as_ref().map_or(Ok(()), |positions| positions.check(end))?;
            if !text.cache.across.is_empty() && text.cache.images.len() != 1 {
                return Err(one_image(text.cache.images.len()));
            }
            self.refuse_cut(text.cache, end)
        };
        texts.iter().try_for_each(end)?;
        let mut growth: Vec<Growth<'_>> = Vec::with_capacity(texts.len());
        for Drafted { cache, tokens: new, drafted } in texts.iter_mut() {
            let mut start = cache.tokens.len();
            cache.tokens.extend(*new);
            if self.has_prefix() && cache.prompt == 0 {
                cache.prompt = cache.tokens.len();
            }
            if cache.as_heads == 0 {
                cache.as_heads = cache.tokens.len() - *drafted;
            }
            if self.turns_otherwise(start, cache.tokens.len()) {
                cache.layers = self.cache().layers;
                cache.recurrent.fill(Recurrent::default());
                start = 0;
            }
            let TextCache { tokens, layers, across, recurrent, images, prompt, as_heads } = &mut **cache;
            let (prompt, as_heads, asked) = (*prompt, *as_heads, *drafted + 1);
            growth.push(Growth { layers, across, recurrent, tokens, images, prompt, as_heads, start, asked });
        }
        if self.shards.gathers() {
            // Threads that wait for work without sleeping would be in the way of the one that brings weights.
            return self.forward(|| self.go_on(&mut growth));
        }
        if self.device() != Device::Cpu {
            // They would keep the host's cores busy while a GPU computes.
            return memory::guarded(|| self.go_on(&mut growth));
        }
        memory::guarded(|| par::together(|| self.go_on(&mut growth)))
    }

    /// Whether a text of `length` tokens may continue by one token and `drafted` drafts at once. It may not where a rotary rule for long
    /// contexts would turn keys differently once the text is longer.
    pub fn may_draft(&self, length: usize, drafted: usize) -> bool {
        !self.turns_otherwise(length + 1, length + 1 + drafted)
    }

    /// Whether the keys of the first `old` tokens turn differently when the text has `new` tokens.
    fn turns_otherwise(&self, old: usize, new: usize) -> bool {
        let differs = |rule: &Rope| {
            let (before, after) = (rule.frequencies(old), rule.frequencies(new));
            before.inv_freq != after.inv_freq || before.attention_factor != after.attention_factor
        };
        old > 0 && self.arch.ropes.iter().any(|rule| rule.depends_on_length() && differs(rule))
    }

    /// Refuses to read a text up to the middle of an image whose rows see those after them.
    fn refuse_cut(&self, cache: &TextCache, end: usize) -> Result<()> {
        let mut runs = cache.images.iter().filter(|image| !image.world).flat_map(|image| &image.runs);
        let cut = self.sees_both_ways() && runs.any(|run| run.start < end && end < run.end);
        if cut {
            Err(Error::data(format!("position {end} is inside of an image, which is read as a whole")))
        } else {
            Ok(())
        }
    }

    /// The stream of the new tokens with the rows of images in it, and which rows these are.
    fn embed_texts(&self, pass: &Pass<'_>, tokens: &[u32], texts: &[Growth<'_>]) -> Result<(Spliced, Splice)> {
        let x = self.embed(pass, tokens)?;
        let (mut start, mut runs) = (0, Vec::new());
        let mut rows: Vec<Vec<f32>> = Vec::new();
        let hidden = self.arch.hidden_size;
        for text in texts.iter().filter(|text| text.across.is_empty()) {
            for (run, (image, first)) in text.shown() {
                rows.resize(image.rows.len(), Vec::new());
                for (rows, own) in rows.iter_mut().zip(&*image.rows) {
                    rows.extend_from_slice(&own[first * hidden..(first + run.len()) * hidden]);
                }
                runs.push(start + run.start - text.start..start + run.end - text.start);
            }
            start += text.fresh().len();
        }
        let splice = Splice::of(runs.into_iter(), tokens.len());
        let (mut x, added) = if splice.images.is_empty() {
            (x, None)
        } else {
            let rows = rows.iter().map(|rows| Activation::from_rows(pass.pool, rows, hidden)).collect();
            put(&splice, &x, rows)
        };
        if let Some(positions) = &self.positions {
            let ids = positions.ids(texts.iter().map(|text| text.start..text.tokens.len()));
            positions.add(pass, &mut x, &ids);
        }
        Ok(((x, added), splice))
    }

    /// The positions of the new tokens in a model in which images change them (`mrope`); else `None`.
    fn positions_of(&self, texts: &[Growth<'_>]) -> Option<Positions> {
        let rule = self.vision.as_ref()?.arch.mrope.as_ref()?;
        let mut positions = Positions::new(rule);
        for text in texts {
            let pictures = text.images.iter().map(|image| Some((image.runs[0].clone(), image.sides?)));
            let pictures: Vec<_> = pictures.flatten().collect();
            positions.extend(&pictures, text.start..text.tokens.len());
        }
        Some(positions)
    }

    /// The rows of the images for cross-attention whose keys and values no cache holds yet.
    fn unread(&self, texts: &[Growth<'_>]) -> Option<Activation> {
        let vision = self.vision.as_ref()?;
        let rows: Vec<f32> = texts.iter().filter(|text| text.is_unread()).flat_map(Growth::picture).copied().collect();
        (!rows.is_empty()).then(|| Activation::from_rows(&vision.pool, &rows, self.arch.hidden_size))
    }

    fn go_on(&self, texts: &mut [Growth<'_>]) -> Result<Logits> {
        // A token's numbers depend on its text alone, whatever else is computed with it.
        let _unrounded = Unrounded::new(self.pools());
        let pass = self.evaluation();
        let tokens: Vec<u32> = texts.iter().flat_map(Growth::fresh).copied().collect();
        self.pool.reserve(tokens.len());
        let positions: Vec<Range<usize>> = texts.iter().map(|text| text.start..text.tokens.len()).collect();
        let fresh = positions.iter().all(|range| range.start == 0);
        let few = |range: &Range<usize>| range.len() == 1 || (range.start > 0 && range.len() <= FEW);
        let few = positions.iter().all(few);
        let asked: Vec<usize> = texts.iter().map(|text| text.asked).collect();
        let turned = self.positions_of(texts);
        let layout = Layout::continued(&self.pool, &positions, &asked, &self.arch.ropes, turned.as_ref());
        let layout = layout.scaling(self.arch.query_scaling);
        let layout = self.showing(layout, &texts.iter().map(Growth::runs).collect::<Vec<_>>());
        let values = self.params.values();
        let ((x, added), per_layer) = self.shards.at(0, values, &pass, |pass| {
            let (placed, splice) = self.embed_texts(pass, &tokens, texts)?;
            let of_blocks = self.per_layer_tokens(&tokens, &splice);
            let per_layer = self.per_layer_inputs(pass, &placed.0, &of_blocks, false);
            Ok::<_, Error>((placed, per_layer))
        })??;
        let (added, per_layer) = (added.as_ref(), per_layer.as_ref());
        let walk =
            Walk { shards: &self.shards, values, layout: &layout, every_token: false, added, per_layer, across: None };
        let unread = self.unread(texts);
        let mut caches = OverCaches { texts: &mut *texts, few, fresh, unread };
        let x = self.blocks.forward_by(&walk, &pass, x, &mut caches)?;
        for shared in self.blocks.attentions().filter(|attention| attention.shares) {
            for text in texts.iter_mut() {
                text.layers[shared.layer].heads_mut().trim();
            }
        }
        self.at_head(&pass, |pass| Logits { parts: self.head.next(pass, &x) })
    }
}

/// A text in a walk. What its blocks hold reaches to the position `start`.
struct Growth<'a> {
    layers: &'a mut [LayerCache],
    across: &'a mut [KeyValues],
    recurrent: &'a mut [Recurrent],
    tokens: &'a [u32],
    images: &'a [Shown],
    /// Where the model reads prompts in both directions: how many tokens are the prompt.
    prompt: usize,
    /// As [`TextCache::as_heads`].
    as_heads: usize,
    start: usize,
    /// For how many of its last tokens the head computes logits.
    asked: usize,
}

impl Growth<'_> {
    fn fresh(&self) -> &[u32] {
        &self.tokens[self.start..]
    }

    /// Its cached latents of this attention; `None` if the cache holds keys and values.
    fn latents(&mut self, layer: usize) -> Option<LatentText<'_>> {
        let (count, prompt) = (self.fresh().len(), self.as_heads);
        match &mut self.layers[layer] {
            LayerCache::Latents(cache) => Some(LatentText { cache, count, prompt }),
            LayerCache::Heads(_) => None,
        }
    }

    /// Whether its blocks attend to an image whose keys and values its cache does not hold yet.
    fn is_unread(&self) -> bool {
        self.across.first().is_some_and(KeyValues::is_empty)
    }

    /// The rows of its first image for the first connector.
    fn picture(&self) -> &[f32] {
        self.images.first().and_then(|image| image.rows.first()).map_or(&[], Vec::as_slice)
    }

    /// The runs of image rows among the new tokens, as positions in the text, each with its image and the place of its first row there.
    fn shown(&self) -> impl Iterator<Item = (Range<usize>, (&Shown, usize))> {
        let fresh = self.start..self.tokens.len();
        self.images
            .iter()
            .flat_map(move |image| image.within(fresh.clone()).map(move |(run, place)| (run, (image, place))))
    }

    /// The runs of new tokens that see each other in both directions.
    fn runs(&self) -> Vec<Range<usize>> {
        if self.prompt > self.start {
            return std::iter::once(self.start..self.prompt).collect();
        }
        self.shown().filter(|(_, (image, _))| !image.world).map(|(run, _)| run).collect()
    }
}

/// Computes mixers over the texts' caches, which then hold the new tokens too.
struct OverCaches<'a, 't> {
    texts: &'a mut [Growth<'t>],
    /// Whether each text continues by one token or a few.
    few: bool,
    /// Whether no text had a token before.
    fresh: bool,
    /// The image rows that [`Model::unread`] gives.
    unread: Option<Activation>,
}

impl OverCaches<'_, '_> {
    /// How many new tokens each text has, and what it keeps in the recurrent mixer of that number.
    fn recurrent(&mut self, number: usize) -> (Vec<usize>, Vec<&mut Recurrent>) {
        let counts = self.texts.iter().map(|text| text.fresh().len()).collect();
        (counts, self.texts.iter_mut().map(|text| &mut text.recurrent[number]).collect())
    }
}

impl Mixing for OverCaches<'_, '_> {
    fn attention(&mut self, part: &Attention, pass: &Pass<'_>, h: &Activation, rows: BlockRows<'_>) -> mixed::Saved {
        let (layer, heads, how) = (part.kv_layer(), part.heads, part.how);
        let mut latents: Vec<_> = self.texts.iter_mut().filter_map(|text| text.latents(layer)).collect();
        if let (false, Qkv::Latent(latent)) = (latents.is_empty(), &part.qkv) {
            return over_latents((part, latent), pass, h, rows, &mut latents);
        }
        drop(latents);
        let owns = layer == part.layer;
        part.forward_by(pass, h, rows, |q, k, v, sinks| {
            let mut start = 0;
            for text in self.texts.iter_mut() {
                let count = text.fresh().len();
                if owns {
                    text.layers[layer].heads_mut().append(k, v, start, count);
                }
                start += count;
            }
            let caches: Vec<&KeyValues> = self.texts.iter().map(|text| text.layers[layer].heads()).collect();
            let spans = rows.outputs.spans(how.window);
            let mixed = if self.few && spans.iter().all(|span| span.ranges.is_none()) {
                let texts = caches.iter().zip(spans);
                let queries: Vec<(&KeyValues, usize)> =
                    texts.flat_map(|(cache, span)| span.positions.iter().map(|&position| (*cache, position))).collect();
                (attention::decode(q, &queries, sinks, heads, how), q.pool().act(0, 0))
            } else if self.fresh {
                attention::forward(q, k, v, sinks, spans, heads, how)
            } else {
                let pool = Pool::on(k.device());
                pool.set_number(k.number());
                let (k, v) = KeyValues::concat(&pool, &caches);
                attention::forward(q, &k, &v, sinks, spans, heads, how)
            };
            if owns && !part.shares {
                for text in self.texts.iter_mut() {
                    text.layers[layer].heads_mut().trim();
                }
            }
            mixed
        })
    }

    fn attention_of_one(
        &mut self,
        part: &Attention,
        pass: &Pass<'_>,
        rows: BlockRows<'_>,
        h: &dyn Fn() -> Activation,
    ) -> Option<Activation> {
        let [text] = &mut *self.texts else { return None };
        let [span] = rows.outputs.spans(part.how.window) else { return None };
        if !self.few || span.ranges.is_some() || !part.takes_vectors(pass, rows) {
            return None;
        }
        let &[position] = &span.positions[..] else { return None };
        let layer = text.layers[part.layer].heads_mut();
        let mixed = part.forward_vector(pass, &h(), rows, |q, k, v, sinks| {
            layer.append_vectors(k, v);
            attention::decode_vector(q, (layer, position), sinks, part.heads, part.how)
        });
        layer.trim();
        Some(mixed)
    }

    fn cross_attention(
        &mut self,
        part: &CrossAttention,
        pass: &Pass<'_>,
        h: &Activation,
        rows: BlockRows<'_>,
    ) -> cross_attention::Saved {
        if let Some(unread) = &self.unread {
            let [k, v] = part.keys_and_values(pass, unread);
            let (width, mut start) = (unread.features(), 0);
            // Earlier blocks have filled their caches of the same texts.
            for text in self.texts.iter_mut().filter(|text| text.across[part.number].is_empty()) {
                let count = text.picture().len() / width;
                text.across[part.number].append(&k, &v, start, count);
                start += count;
            }
        }
        let caches: Vec<&KeyValues> = self.texts.iter().map(|text| &text.across[part.number]).collect();
        let sequences = rows.outputs.sequences();
        part.forward_by(pass, h, |q| {
            if self.few {
                // The last position sees all of them.
                let each = caches.iter().zip(&sequences).flat_map(|(cache, rows)| rows.clone().map(|_| *cache));
                let queries: Vec<(&KeyValues, usize)> = each.map(|cache| (cache, cache.len() - 1)).collect();
                return (attention::decode(q, &queries, None, part.heads, part.how), q.pool().act(0, 0));
            }
            let pool = Pool::on(q.device());
            pool.set_number(q.number());
            let (k, v) = KeyValues::concat(&pool, &caches);
            let bounds = caches.iter().scan(0, |end, cache| {
                *end += cache.len();
                Some(*end)
            });
            let bounds: Vec<usize> = std::iter::once(0).chain(bounds).collect();
            attention::forward(q, &k, &v, None, &across::spans(sequences, &bounds), part.heads, part.how)
        })
    }

    fn delta_net(&mut self, part: &DeltaNet, pass: &Pass<'_>, h: &Activation, _: BlockRows<'_>) -> delta_net::Saved {
        let (counts, texts) = self.recurrent(part.number);
        let texts = RefCell::new(texts);
        let convolve = |conv: Conv<'_>, x: &Activation| {
            recurrent::convolve(conv, part.kernel, x, &counts, &mut texts.borrow_mut())
        };
        part.forward_by(pass, h, convolve, |inputs| {
            recurrent::go_on(part.heads.state(), h.device(), &counts, &mut texts.borrow_mut(), |sequences, states| {
                gated_delta_rule::forward(inputs, part.heads, sequences, Some(states))
            })
        })
    }

    fn mamba(&mut self, part: &Mamba, pass: &Pass<'_>, h: &Activation, _: BlockRows<'_>) -> mamba::Saved {
        let (counts, texts) = self.recurrent(part.number);
        let texts = RefCell::new(texts);
        let convolve = |conv: Conv<'_>, x: &Activation| {
            recurrent::convolve(conv, part.kernel, x, &counts, &mut texts.borrow_mut())
        };
        part.forward_by(pass, h, convolve, |inputs| {
            recurrent::go_on(part.heads.state(), h.device(), &counts, &mut texts.borrow_mut(), |sequences, states| {
                mamba2::forward(inputs, part.heads, sequences, Some(states))
            })
        })
    }

    fn short_conv(
        &mut self,
        part: &ShortConv,
        pass: &Pass<'_>,
        h: &Activation,
        _: BlockRows<'_>,
    ) -> (short_conv::Saved, Activation) {
        let (counts, mut texts) = self.recurrent(part.number);
        part.forward_by(pass, h, |conv, x| recurrent::convolve(conv, part.kernel, x, &counts, &mut texts))
    }
}
