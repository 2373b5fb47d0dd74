//! What every segment needs in one pass over a batch.

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

/// One walk over the segments.
#[derive(Debug)]
pub struct Pass<'a> {
    /// The trained values at hand.
    pub values: Values<'a>,
    pub pool: &'a Arc<Pool>,
    /// In a backward pass what uneven use of experts adds to the gradient of a token's probability of each.
    pub balance: Option<&'a [f32]>,
    /// Adapter dropout; none in evaluation.
    pub dropout: Option<Drops<'a>>,
}

impl Pass<'_> {
    /// The pass of some of a branch's `all` rows, which gets their part of the dropout masks.
    pub fn of_rows(&self, rows: &Range<usize>, all: usize) -> Self {
        let dropout = self.dropout.map(|drops| match drops.picked.get(rows.clone()) {
            Some(picked) if drops.picked.len() == all => Drops { picked, ..drops },
            _ => Drops { first_row: drops.first_row + rows.start as u64, picked: &[], ..drops },
        });
        Pass { dropout, ..*self }
    }
}

/// Which dropout masks hold in this pass.
#[derive(Debug, Clone, Copy)]
pub struct Drops<'a> {
    /// Probability that a value is dropped.
    pub rate: f32,
    pub seed: u64,
    pub step: u64,
    /// Row number of the first token within the step.
    pub first_row: u64,
    /// The tokens that the last block's rows are.
    pub picked: &'a [usize],
}

impl<'a> Drops<'a> {
    /// The mask of one module, whose input has so many rows: all tokens, or those picked, which are fewer, unless they are all.
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
    /// The same for layers of each window, where these differ: images see themselves in both directions, or an encoder's
    /// patches their part of a tile.
    by_window: Vec<(Option<Window>, Vec<Span>)>,
    /// Rotary tables of the queries, one for each of the architecture's rules.
    pub ropes: Vec<Rope>,
    /// What each query is multiplied by behind its rotation, where that differs from 1.
    pub query_factors: Option<Vec<f32>>,
}

impl Rows {
    /// Keys and queries of each sequence in a layer with this window.
    pub fn spans(&self, window: Option<Window>) -> &[Span] {
        self.by_window.iter().find(|(of, _)| *of == window).map_or(&self.spans, |(_, spans)| spans)
    }

    /// The rows of each sequence, end to end.
    pub fn sequences(&self) -> Vec<Range<usize>> {
        self.spans.iter().map(Span::query_tokens).collect()
    }

    /// From here on queries are scaled by their positions.
    fn scale_queries(&mut self, scaling: QueryScaling) {
        let positions = self.spans.iter().flat_map(|span| &span.positions);
        let factors: Vec<f32> = positions.map(|&position| scaling.factor(position)).collect();
        self.query_factors = Some(factors).filter(|factors| factors.iter().any(|&factor| factor != 1.0));
    }

    /// From here on each query in one of the `images` of its span sees what `mask` says of them.
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

/// The tokens that a block reads, and those that it has an output for.
#[derive(Debug, Clone, Copy)]
pub struct BlockRows<'a> {
    pub all: &'a Rows,
    /// The tokens of the block's output: its queries.
    pub outputs: &'a Rows,
    /// Keys and values that several blocks use.
    pub shared: &'a SharedKeyValues,
    /// How branches are cut in long passes, where nothing of them is kept.
    pub tiles: Option<&'a Tiles>,
    /// Embeddings for each block, where the model has them.
    pub per_layer: Option<&'a PerLayerInputs>,
    /// The rows of pictures that blocks attend to, where they do.
    pub across: Option<&'a Across>,
}

impl<'a> BlockRows<'a> {
    /// The rows of the pass's pictures.
    ///
    /// # Panics
    /// If the walk has none.
    pub fn pictures(&self) -> &'a Across {
        self.across.expect("the walk has rows of pictures beside the stream")
    }

    /// The embeddings of the pass for each block.
    ///
    /// # Panics
    /// If the model has none.
    pub fn own_embeddings(&self) -> &'a PerLayerInputs {
        self.per_layer.expect("the walk has embeddings for each block")
    }
}

/// Sequence boundaries and rotary tables of a batch.
#[derive(Debug)]
pub struct Layout {
    all: Rows,
    /// The queries of the last block.
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

    /// The tokens that the head looks at, where they are not all.
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

    /// For a batch with these boundaries, whose head looks at the tokens `rows` (rising). `positions` replaces their counting.
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

    /// For texts that go on at `positions`, laid end to end; the head looks at the last `asked` tokens of each. The spans are
    /// those of attention over all positions so far, with the keys of each text from its first one on. `turned` replaces
    /// the counting of positions in rotary tables.
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
    /// For an encoder: every token of a sequence sees all of it, and turns by these tables. In blocks of this window a token sees
    /// its part of a sequence, by the boundaries beside the window.
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

    /// From here on queries are scaled by their positions, where the architecture says so.
    #[must_use]
    pub fn scaling(mut self, scaling: Option<QueryScaling>) -> Self {
        if let Some(scaling) = scaling {
            self.all.scale_queries(scaling);
            self.last.scale_queries(scaling);
        }
        self
    }

    /// From here on each token of an image sees all of it, in layers with these windows too. `images` has those of each
    /// sequence, as positions in it that rise.
    #[must_use]
    pub fn showing(mut self, images: &[Vec<Range<usize>>], windows: &[Option<Window>]) -> Self {
        if images.iter().any(|of| !of.is_empty()) {
            self.all.show(images, windows, everywhere);
            self.last.show(images, windows, everywhere);
        }
        self
    }

    /// As [`Layout::showing`], but that layers without a window stay causal, and a window bounds what a token sees before it in its image
    /// too.
    #[must_use]
    pub fn showing_within(mut self, images: &[Vec<Range<usize>>], windows: &[Option<Window>]) -> Self {
        if images.iter().any(|of| !of.is_empty()) {
            self.all.show(images, windows, within_windows);
            self.last.show(images, windows, within_windows);
        }
        self
    }
}

/// The mask of a layer with this window, in a sequence with these images.
type MaskOf = for<'m> fn(&'m [Range<usize>], Option<Window>) -> Mask<'m>;

fn everywhere(blocks: &[Range<usize>], window: Option<Window>) -> Mask<'_> {
    Mask::Blocks { blocks, window }
}

fn within_windows(blocks: &[Range<usize>], window: Option<Window>) -> Mask<'_> {
    window.map_or(Mask::Causal(None), |window| Mask::BlocksWithin { blocks, window })
}

/// One rule's table for texts that go on at `positions`, each with the frequencies of its length so far.
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

/// One rule's table for sequences with these boundaries.
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
