//! Attention on a GPU: cuts queries and keys into tiles, writes down which query sees which keys, and launches the
//! kernels.
//!
//! 16-bit activations whose heads have a multiple of 16 features, up to 256, take the kernels with tensor cores
//! (`mma.rs`). All others take the kernels that multiply in float32: float32 activations, larger and odd heads, and
//! scales that are not positive. So does [`decode`](super::decode), whose time is that of reading the cache.
use super::mma::{Class, Launch};
use super::{Heads, KeyValues, Saved, Scores};
use crate::activation::{Activation, LANES};
use crate::cuda::{self, Arg, Grid, Header, Source, Typed};
use crate::floats::{Floats, FloatsMut};
use crate::spans::{Span, Window};
use std::cmp::Reverse;
use tunesmith_device::{Array, Device};

static HEADERS: [Header; 2] = [("simt.cuh", include_str!("simt.cuh")), ("tiles.cuh", include_str!("tiles.cuh"))];
static KERNELS: Typed = Typed::new("attention", include_str!("attention.cu")).with_headers(&HEADERS);
static BACKWARD: Typed = Typed::new("attention_backward", include_str!("attention_backward.cu")).with_headers(&HEADERS);

/// Queries of a tile in the kernels without tensor cores.
const QUERIES: usize = 64;
/// Threads in each direction of a block. It is also the number of query heads that a block of the decoding kernel
/// takes.
const SIDE: usize = 16;

/// Kernels that sum up to `features` features of a head at once. Heads with more features are divided among blocks.
struct Width {
    features: usize,
    forward: &'static str,
    backward_queries: &'static str,
    backward_keys: &'static str,
    /// Keys of a tile of the kernel `backward_keys`.
    keys: usize,
}

static WIDTHS: [Width; 3] = [
    Width {
        features: 64,
        forward: "attention_forward_64",
        backward_queries: "attention_backward_queries_64",
        backward_keys: "attention_backward_keys_64",
        keys: 64,
    },
    Width {
        features: 128,
        forward: "attention_forward_128",
        backward_queries: "attention_backward_queries_128",
        backward_keys: "attention_backward_keys_128",
        keys: 64,
    },
    Width {
        features: 256,
        forward: "attention_forward_256",
        backward_queries: "attention_backward_queries_256",
        backward_keys: "attention_backward_keys_256",
        keys: 32,
    },
];

impl Width {
    /// The kernels for the narrowest width that holds so many features, or else for the widest.
    fn of(features: usize) -> &'static Self {
        let [.., widest] = &WIDTHS;
        WIDTHS.iter().find(|width| width.features >= features).unwrap_or(widest)
    }

    /// How to launch the forward pass for that many tiles of queries.
    fn forward(&self, source: &'static Source, tiles: usize, heads: Heads) -> Launch {
        (source, self.forward, self.grid(tiles, heads.query, heads.v_head_dim))
    }

    /// How to launch the gradient of the queries for that many tiles of queries.
    fn backward_queries(&self, source: &'static Source, tiles: usize, heads: Heads) -> Launch {
        (source, self.backward_queries, self.grid(tiles, heads.query, heads.head_dim))
    }

    /// How to launch the gradients of keys and values for that many tiles of keys.
    fn backward_keys(&self, source: &'static Source, tiles: usize, heads: Heads) -> Launch {
        (source, self.backward_keys, self.grid(tiles, heads.kv, heads.head_dim.max(heads.v_head_dim)))
    }

    /// A grid with one block for each tile, each head, and each part of the features of a head.
    fn grid(&self, tiles: usize, heads: usize, features: usize) -> Grid {
        let mut grid = Grid::blocks(tiles);
        grid.blocks[1] = heads as u32;
        grid.blocks[2] = features.div_ceil(self.features) as u32;
        grid
    }
}

/// Which keys each row sees, counted from the first key of its sequence, and the tiles of queries; all on the GPU.
struct Seen {
    first: Array<u32>,
    /// One past the last key; zero for a row that is no query.
    end: Array<u32>,
    tiles: Array<u32>,
    count: usize,
}

impl Seen {
    /// With tiles of `size` queries each.
    fn new(device: Device, spans: &[Span], window: Option<Window>, rows: usize, size: usize) -> Self {
        let (mut first, mut end) = (vec![0; rows], vec![0; rows]);
        let mut tiles: Vec<[u32; 5]> = Vec::new();
        for span in spans {
            let visibility = span.visibility(window);
            for start in (0..visibility.queries()).step_by(size) {
                let queries = start..visibility.queries().min(start + size);
                let mut any = visibility.keys_of(start);
                // An imaginary GPU that only counts memory needs only the number of tiles.
                let each = if device.only_counts() { 0..0 } else { queries.clone() };
                for query in each {
                    let (seen, row) = (visibility.keys_of(query), span.query_start + query);
                    (first[row], end[row]) = (seen.start as u32, seen.end as u32);
                    any = any.start.min(seen.start)..any.end.max(seen.end);
                }
                let place = [span.query_start + start, queries.len(), span.key_start, any.start, any.end];
                tiles.push(place.map(|number| number as u32));
            }
        }
        // The longest first, so that the tiles that finish last are short.
        tiles.sort_by_key(|[.., from, to]| Reverse(to - from));
        let of = |numbers: &[u32]| cuda::upload(device, numbers);
        Self { first: of(&first), end: of(&end), tiles: of(tiles.as_flattened()), count: tiles.len() }
    }
}

/// Tiles of `keys` keys, each with the range of queries that may see some of them.
fn key_tiles(spans: &[Span], window: Option<Window>, keys: usize) -> Vec<[u32; 6]> {
    let mut tiles: Vec<[u32; 6]> = Vec::new();
    for span in spans {
        for key in (0..span.keys).step_by(keys) {
            let count = keys.min(span.keys - key);
            let queries = span.visibility(window).queries_of(key..key + count);
            let place = [span.key_start + key, key, count, span.query_start, queries.start, queries.end];
            tiles.push(place.map(|number| number as u32));
        }
    }
    tiles.sort_by_key(|[.., from, to]| Reverse(to - from));
    tiles
}

/// The numbers at the end of every kernel's arguments: head counts, head sizes, scale and soft cap.
fn numbers(heads: Heads, how: Scores) -> [Arg; 6] {
    let [query, kv, head_dim, v_head_dim] =
        [heads.query, heads.kv, heads.head_dim, heads.v_head_dim].map(|number| (number as u32).into());
    // 0 stands for no soft cap.
    [query, kv, head_dim, v_head_dim, how.scale.into(), how.softcap.unwrap_or(0.0).into()]
}

/// [`super::forward`], which has checked the arguments.
pub(super) fn forward(
    q: &Activation,
    k: &Activation,
    v: &Activation,
    sinks: Option<Floats<'_>>,
    spans: &[Span],
    heads: Heads,
    how: Scores,
) -> (Activation, Activation) {
    let mut o = q.pool().act(q.tokens(), heads.query * heads.v_head_dim);
    let mut lse = q.pool().act_f32(q.tokens(), heads.query);
    let simt = KERNELS.same(&[q, k, v, &o]);
    let class = Class::of(&[q, k, v], heads, how);
    let size = class.map_or(QUERIES, |class| class.queries);
    let seen = Seen::new(q.device(), spans, how.window, q.tokens(), size);
    let (source, name, grid) = class.map_or_else(
        || Width::of(heads.v_head_dim).forward(simt, seen.count, heads),
        |class| class.forward(q.number(), seen.count, heads),
    );
    let sinks = sinks.map_or(Arg::NULL, Arg::from);
    let (first, end, tiles) = ((&seen.first).into(), (&seen.end).into(), (&seen.tiles).into());
    let operands = [q.into(), k.into(), v.into(), sinks, (&mut o).into(), (&mut lse).into(), first, end, tiles];
    let args = [operands.as_slice(), &numbers(heads, how)].concat();
    cuda::launch(q.device(), source, name, grid, &args);
    (o, lse)
}

/// [`super::backward`], which has checked the arguments.
pub(super) fn backward(
    saved: Saved<'_>,
    d_o: &Activation,
    spans: &[Span],
    heads: Heads,
    how: Scores,
    d_sinks: Option<FloatsMut<'_>>,
) -> (Activation, Activation, Activation) {
    let Saved { q, k, v, sinks, o, lse } = saved;
    let (device, pool, count) = (q.device(), q.pool(), q.tokens() * heads.query);
    let (mut dq, mut dk, mut dv) = (q.like(), k.like(), v.like());
    let mut delta = pool.act_f32(q.tokens(), heads.query);
    let class = Class::of(&[q, k, v, d_o], heads, how);
    let size = class.map_or(QUERIES, |class| class.queries);
    let seen = Seen::new(device, spans, how.window, q.tokens(), size);
    let (first, end, numbers) = ((&seen.first).into(), (&seen.end).into(), numbers(heads, how));
    let (sums, gradients) = (KERNELS.of(q.number()), BACKWARD.same(&[q, k, v, o, d_o]));
    let launch = |source, name, grid, args: &[Arg]| cuda::launch(device, source, name, grid, args);

    // One warp for each sum.
    let args = [o.into(), d_o.into(), (&mut delta).into(), Arg::count(count), (heads.v_head_dim as u32).into()];
    launch(sums, "attention_delta", Grid::items(count * 32), &args);

    if let Some((sinks, d_sinks)) = sinks.zip(d_sinks) {
        let of = [sinks.into(), lse.into(), (&delta).into(), end, d_sinks.into(), Arg::count(q.tokens()), numbers[0]];
        launch(sums, "attention_sinks", Grid::blocks(heads.query), &of);
    }

    let read = [q.into(), k.into(), v.into(), d_o.into(), lse.into(), (&delta).into()];
    let rest = [(&mut dq).into(), first, end, (&seen.tiles).into()];
    let (source, name, grid) = class.map_or_else(
        || Width::of(heads.head_dim).backward_queries(gradients, seen.count, heads),
        |class| class.backward_queries(q.number(), seen.count, heads),
    );
    launch(source, name, grid, &[read.as_slice(), &rest, &numbers].concat());

    let width = Width::of(heads.head_dim.max(heads.v_head_dim));
    let tiles = key_tiles(spans, how.window, class.map_or(width.keys, |class| class.keys));
    let on_device = cuda::upload(device, tiles.as_flattened());
    let rest = [(&mut dk).into(), (&mut dv).into(), first, end, (&on_device).into()];
    let (source, name, grid) = class.map_or_else(
        || width.backward_keys(gradients, tiles.len(), heads),
        |class| class.backward_keys(q.number(), tiles.len(), heads),
    );
    launch(source, name, grid, &[read.as_slice(), &rest, &numbers].concat());
    (dq, dk, dv)
}

/// [`super::decode`], which has checked the arguments.
pub(super) fn decode(
    q: &Activation,
    queries: &[(&KeyValues, usize)],
    sinks: Option<Floats<'_>>,
    heads: Heads,
    how: Scores,
) -> Activation {
    let mut o = q.pool().act(q.tokens(), heads.query * heads.v_head_dim);
    let (mut pages, mut texts): (Vec<u64>, Vec<[u32; 4]>) = (Vec::new(), Vec::new());
    for &(cache, position) in queries {
        assert_eq!(cache.number(), Some(q.number()), "a cache of the queries' type");
        let seen = Window::causal(how.window, position);
        let numbers = seen.start / LANES..seen.end.div_ceil(LANES);
        texts.push([pages.len(), numbers.start, seen.start, seen.end].map(|number| number as u32));
        pages.extend(numbers.map(|number| cache.address(number)));
    }
    let pages = cuda::upload(q.device(), &pages);
    let texts = cuda::upload(q.device(), texts.as_flattened());
    let parts = (heads.query / heads.kv).div_ceil(SIDE);
    // The widest kernel for all heads: with few features, registers stay unused, but no work is wasted.
    let [.., widest] = &WIDTHS;
    let grid = widest.grid(queries.len(), heads.kv * parts, heads.v_head_dim);
    let sinks = sinks.map_or(Arg::NULL, Arg::from);
    let operands = [q.into(), sinks, (&mut o).into(), (&pages).into(), (&texts).into()];
    let args = [operands.as_slice(), &numbers(heads, how)].concat();
    cuda::launch(q.device(), KERNELS.same(&[q, &o]), "attention_decode", grid, &args);
    o
}
