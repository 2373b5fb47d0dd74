//! What every segment needs in a pass over a batch: trained values, buffers, dropout, and the layout of tokens
//! (sequence boundaries, masks, rotary tables).

use super::across::Across;
use super::per_layer_inputs::PerLayerInputs;
use super::positions::{Positions, pairing};
use super::shared_kv::SharedKeyValues;
use super::tiles::Tiles;
use super::values::Values;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use tunesmith_config::arch::{self, Frequencies, QueryScaling};
use tunesmith_ops::activation::Pool;
use tunesmith_ops::dropout::{Dropout, key};
use tunesmith_ops::rope::Rope;
use tunesmith_ops::spans::{Mask, Span, Window, full_spans, row_spans};

/// What a forward or backward pass computes with.
#[derive(Debug)]
pub struct Pass<'a> {
    /// The trained values: all, or those of the segments that are gathered.
    pub values: Values<'a>,
    pub pool: &'a Arc<Pool>,
    /// In backward, with a load-balancing loss: for each expert, what that loss adds to the gradient of a token's
    /// probability of it.
    pub balance: Option<&'a [f32]>,
    /// Adapter dropout; none in evaluation.
    pub dropout: Option<Drops<'a>>,
}

impl Pass<'_> {
    /// The pass for some `rows` of the `all` rows of a branch: it has the part of the dropout masks that belongs to
    /// these rows.
    pub fn of_rows(&self, rows: &Range<usize>, all: usize) -> Self {
        let dropout = self.dropout.map(|drops| match drops.picked.get(rows.clone()) {
            Some(picked) if drops.picked.len() == all => Drops { picked, ..drops },
            _ => Drops { first_row: drops.first_row + rows.start as u64, picked: &[], ..drops },
        });
        Pass { dropout, ..*self }
    }
}

/// What decides the dropout masks of a pass: a mask depends on seed, step, module, and row, and not on how the batch is
/// cut.
#[derive(Debug, Clone, Copy)]
pub struct Drops<'a> {
    /// Probability that a value is dropped.
    pub rate: f32,
    pub seed: u64,
    pub step: u64,
    /// Row number of the first token within the step.
    pub first_row: u64,
    /// The tokens that the rows of the last block stand for.
    pub picked: &'a [usize],
}

impl<'a> Drops<'a> {
    /// The mask of one module, whose input has `rows` rows: all tokens, or the picked ones. Which it is follows from
    /// the number of rows.
    pub fn of(&self, module: u64, rows: usize) -> Dropout<'a> {
        let rows = (rows == self.picked.len()).then_some(self.picked);
        Dropout { rate: self.rate, key: key(self.seed, self.step, module), first_row: self.first_row, rows }
    }
}

/// Which tokens a block works on: all, or for the last block the rows that are asked for.
#[derive(Debug)]
pub struct Rows {
    /// The tokens, rising; none means all.
    pub picked: Option<Vec<usize>>,
    /// Keys and queries of each sequence.
    spans: Vec<Span>,
    /// The same for blocks with each window, where they differ: the rows of an image see each other in both directions,
    /// or the patches of an encoder see a part of a tile.
    by_window: Vec<(Option<Window>, Vec<Span>)>,
    /// Rotary tables of the queries, one for each of the architecture's rules.
    pub ropes: Vec<Rope>,
    /// The factor on each query after its rotation; `None` where all are 1.
    pub query_factors: Option<Vec<f32>>,
}

impl Rows {
    /// Keys and queries of each sequence in a block with this window.
    pub fn spans(&self, window: Option<Window>) -> &[Span] {
        self.by_window.iter().find(|(of, _)| *of == window).map_or(&self.spans, |(_, spans)| spans)
    }

    /// The rows of each sequence, end to end.
    pub fn sequences(&self) -> Vec<Range<usize>> {
        self.spans.iter().map(Span::query_tokens).collect()
    }

    /// Sets the factors of queries by their positions.
    fn scale_queries(&mut self, scaling: QueryScaling) {
        let positions = self.spans.iter().flat_map(|span| &span.positions);
        let factors: Vec<f32> = positions.map(|&position| scaling.factor(position)).collect();
        self.query_factors = Some(factors).filter(|factors| factors.iter().any(|&factor| factor != 1.0));
    }

    /// From here on, a query in one of the `images` of its sequence sees what `mask` says.
    fn show(&mut self, images: &[Vec<Range<usize>>], windows: &[Option<Window>], mask: MaskOf) {
        let masked = |window: &Option<Window>| {
            let spans = self.spans.iter().zip(images).map(|(span, blocks)| match blocks.as_slice() {
                [] => span.clone(),
                blocks => span.clone().masked(&mask(blocks, *window)),
            });
            (*window, spans.collect())
        };
        self.by_window = windows.iter().map(masked).collect();
    }
}

/// What a block needs about its tokens: those that it reads, and those that it gives an output for.
#[derive(Debug, Clone, Copy)]
pub struct BlockRows<'a> {
    pub all: &'a Rows,
    /// The tokens of the block's output: its queries.
    pub outputs: &'a Rows,
    /// Keys and values that several blocks use.
    pub shared: &'a SharedKeyValues,
    /// How branches are cut into tiles in long passes, where nothing of them is kept.
    pub tiles: Option<&'a Tiles>,
    /// Per-layer embeddings, where the model has them.
    pub per_layer: Option<&'a PerLayerInputs>,
    /// The image features for cross-attention, where the model has it.
    pub across: Option<&'a Across>,
}

impl<'a> BlockRows<'a> {
    /// The image features of the pass.
    ///
    /// # Panics
    /// If the walk has no image features.
    pub fn pictures(&self) -> &'a Across {
        self.across.expect("the walk has rows of pictures beside the stream")
    }

    /// The per-layer embeddings of the pass.
    ///
    /// # Panics
    /// If the model has no per-layer embeddings.
    pub fn own_embeddings(&self) -> &'a PerLayerInputs {
        self.per_layer.expect("the walk has embeddings for each block")
    }
}

/// The layout of a batch: sequence boundaries, attention masks and rotary tables. A batch is one stream of tokens
/// without padding.
#[derive(Debug)]
pub struct Layout {
    all: Rows,
    /// The rows of the last block, which are those that the head needs.
    last: Rows,
    shared: SharedKeyValues,
}

impl Layout {
    /// The rows of a block that gives an output for every token.
    pub const fn block(&self) -> BlockRows<'_> {
        BlockRows {
            all: &self.all,
            outputs: &self.all,
            shared: &self.shared,
            tiles: None,
            per_layer: None,
            across: None,
        }
    }

    /// The tokens that the head needs; `None` if it needs all.
    pub fn picked(&self) -> Option<&[usize]> {
        self.last.picked.as_deref()
    }

    /// The rows of the last block, which gives an output only for the tokens that the head looks at.
    pub const fn last_block(&self) -> BlockRows<'_> {
        BlockRows {
            all: &self.all,
            outputs: &self.last,
            shared: &self.shared,
            tiles: None,
            per_layer: None,
            across: None,
        }
    }

    /// The layout of a batch with the sequence boundaries `cu_seqlens`, whose head needs the tokens `rows` (rising).
    /// `rules` are the architecture's rotary rules. `positions`, if given, takes the place of counted positions.
    pub fn new(
        pool: &Arc<Pool>,
        cu_seqlens: &[usize],
        rows: &[usize],
        rules: &[arch::Rope],
        positions: Option<&Positions>,
    ) -> Self {
        let table = |rule: &arch::Rope| match positions {
            Some(positions) => {
                positions.table(pool, cu_seqlens.windows(2).map(|ends| (ends[1] - ends[0], ends[1] - ends[0])), rule)
            }
            None => table(pool, cu_seqlens, rule),
        };
        let ropes: Vec<Rope> = rules.iter().map(table).collect();
        let last = Rows {
            ropes: ropes.iter().map(|rope| rope.gather(rows)).collect(),
            spans: row_spans(cu_seqlens, rows),
            by_window: Vec::new(),
            query_factors: None,
            picked: Some(rows.to_vec()),
        };
        let all =
            Rows { picked: None, spans: full_spans(cu_seqlens), by_window: Vec::new(), query_factors: None, ropes };
        Self { all, last, shared: SharedKeyValues::default() }
    }

    /// The layout of texts that continue: `positions` are the positions of the new tokens of each, laid end to end. The
    /// head needs the last `asked` tokens of each. The spans are those of attention over all positions so far, with the
    /// keys of each text from its first one on. `turned`, if given, takes the place of counted positions in rotary
    /// tables.
    pub fn continued(
        pool: &Arc<Pool>,
        positions: &[Range<usize>],
        asked: &[usize],
        rules: &[arch::Rope],
        turned: Option<&Positions>,
    ) -> Self {
        let table = |rule: &arch::Rope| match turned {
            Some(turned) => turned.table(pool, positions.iter().map(|range| (range.len(), range.end)), rule),
            None => continued(pool, positions, rule),
        };
        let ropes: Vec<Rope> = rules.iter().map(table).collect();
        let spans = |last: bool| {
            let (mut keys, mut queries) = (0, 0);
            let span = |(range, asked): (&Range<usize>, &usize)| {
                let first = if last { range.end - asked } else { range.start };
                let positions = (first..range.end).collect();
                let span = Span { key_start: keys, keys: range.end, query_start: queries, positions, ranges: None };
                (keys, queries) = (keys + range.end, queries + span.positions.len());
                span
            };
            positions.iter().zip(asked).map(span).collect::<Vec<Span>>()
        };
        let mut end = 0;
        let rows: Vec<usize> = positions
            .iter()
            .zip(asked)
            .flat_map(|(range, asked)| {
                end += range.len();
                end - asked..end
            })
            .collect();
        // Of texts that go on by what is asked for, the last rows are all rows.
        let picked = (end > rows.len()).then(|| rows.clone());
        let ropes_of_last = ropes.iter().map(|rope| rope.gather(&rows)).collect();
        let last =
            Rows { ropes: ropes_of_last, spans: spans(true), by_window: Vec::new(), query_factors: None, picked };
        let all = Rows { picked: None, spans: spans(false), by_window: Vec::new(), query_factors: None, ropes };
        Self { all, last, shared: SharedKeyValues::default() }
    }
}

impl Layout {
    /// The layout of an image encoder: every token sees its whole sequence, in both directions, and turns by `ropes`.
    /// In blocks with the window of `windows`, a token sees its part of the sequence; the boundaries of these parts are
    /// beside the window.
    pub fn full(cu_seqlens: &[usize], ropes: Vec<Rope>, windows: Option<(Window, &[usize])>) -> Self {
        let full = |cu_seqlens: &[usize]| -> Vec<Span> {
            full_spans(cu_seqlens).into_iter().map(|span| span.masked(&Mask::Full)).collect()
        };
        let rows = |ropes: Vec<Rope>| Rows {
            picked: None,
            spans: full(cu_seqlens),
            by_window: windows.iter().map(|(window, parts)| (Some(*window), full(parts))).collect(),
            ropes,
            query_factors: None,
        };
        // Every block of an encoder gives an output for every token.
        Self { all: rows(ropes), last: rows(Vec::new()), shared: SharedKeyValues::default() }
    }

    /// Adds the scaling of queries by their positions, where the architecture has it.
    #[must_use]
    pub fn scaling(mut self, scaling: Option<QueryScaling>) -> Self {
        if let Some(scaling) = scaling {
            self.all.scale_queries(scaling);
            self.last.scale_queries(scaling);
        }
        self
    }

    /// Lets the tokens of an image see later ones of it, as `mask` says for each of these windows. `images` has the runs of
    /// image rows of each sequence, as rising positions in it.
    #[must_use]
    pub fn showing(mut self, images: &[Vec<Range<usize>>], windows: &[Option<Window>], mask: MaskOf) -> Self {
        if images.iter().any(|of| !of.is_empty()) {
            self.all.show(images, windows, mask);
            self.last.show(images, windows, mask);
        }
        self
    }
}

/// The mask of a layer with this window, in a sequence with these images.
pub type MaskOf = for<'m> fn(&'m [Range<usize>], Option<Window>) -> Mask<'m>;

/// In every layer, each token of an image sees all of it, whatever the window.
pub fn everywhere(blocks: &[Range<usize>], window: Option<Window>) -> Mask<'_> {
    Mask::Blocks { blocks, window }
}

/// In every layer, but a window also limits what a token sees before it in its own image.
pub fn in_windows(blocks: &[Range<usize>], window: Option<Window>) -> Mask<'_> {
    window.map_or(Mask::Blocks { blocks, window: None }, |window| Mask::BlocksWithin { blocks, window })
}

/// As [`in_windows`], but layers without a window stay causal.
pub fn within_windows(blocks: &[Range<usize>], window: Option<Window>) -> Mask<'_> {
    window.map_or(Mask::Causal(None), |window| Mask::BlocksWithin { blocks, window })
}

/// The rotary table of one rule for texts that continue at `positions`, each with the frequencies of its length so far.
fn continued(pool: &Arc<Pool>, positions: &[Range<usize>], rule: &arch::Rope) -> Rope {
    let key = |range: &Range<usize>| if rule.depends_on_length() { range.end } else { 0 };
    let by_length: BTreeMap<usize, Frequencies> =
        positions.iter().map(|range| (key(range), rule.frequencies(key(range)))).collect();
    Rope::at(
        pool,
        positions.iter().map(|range| {
            let found = &by_length[&key(range)];
            (range.clone(), (found.inv_freq.as_slice(), found.attention_factor))
        }),
    )
    .paired(pairing(rule))
}

/// The rotary table of one rule for sequences with these boundaries.
fn table(pool: &Arc<Pool>, cu_seqlens: &[usize], rule: &arch::Rope) -> Rope {
    let lengths = || cu_seqlens.windows(2).map(|ends| ends[1] - ends[0]);
    // A rule that doesn't look at the length has one entry for all.
    let key = |length| if rule.depends_on_length() { length } else { 0 };
    let by_length: BTreeMap<usize, Frequencies> =
        lengths().map(|length| (key(length), rule.frequencies(key(length)))).collect();
    Rope::new(pool, lengths(), |length| {
        let found = &by_length[&key(length)];
        (&found.inv_freq, found.attention_factor)
    })
    .paired(pairing(rule))
}
