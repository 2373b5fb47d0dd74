//! The image encoder (a vision transformer): stem, blocks, last norm, and the choice of rows that connectors take.
use super::stem::{self, Stem};
use super::tiles::Tiles;
use crate::blocks::{Blocks, Trace, Walk};
use crate::grads::Grads;
use crate::norm::Norm;
use crate::params::Params;
use crate::pass::{Layout, Pass};
use crate::shards::Shards;
use tunesmith_base::error::Result;
use tunesmith_config::vision::Encoder as Spec;
use tunesmith_device::Floats;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::elementwise;
use tunesmith_ops::rope::{Rope, sections};
use tunesmith_ops::spans::Window;

/// An image encoder with its weights.
#[derive(Debug)]
pub struct Encoder {
    pub spec: Spec,
    pub stem: Stem,
    /// The blocks, cut into parts: a connector takes the output of each part, that of the last after the final norm.
    pub parts: Vec<Blocks>,
    /// Whether anything before each part is trained.
    pub trains_below: Vec<bool>,
    pub final_norm: Option<Norm>,
    /// Whether anything in it is trained.
    pub trains: bool,
    /// Without segments: the caller has already gathered the whole encoder.
    pub shards: Shards,
}

/// What forward keeps for backward.
#[derive(Debug)]
pub struct Saved {
    stem: stem::Saved,
    layout: Layout,
    /// What each part keeps.
    traces: Vec<Trace>,
    /// The last norm's input, and its statistics.
    norm: Option<(Activation, Activation)>,
}

/// The window of a block in which patches see only a part of a tile, as [`Layout::full`] knows it; `None` for a block
/// in which they see all of it.
pub fn window(spec: &Spec, layer: usize) -> Option<Window> {
    let windows = spec.windows.as_ref().filter(|_| spec.is_windowed(layer))?;
    Some(Window::Chunked(windows.side * windows.side))
}

/// The order of the patches in the blocks, where windows make it another than that of the tile, and its reverse.
#[derive(Debug)]
struct Order {
    forth: Vec<usize>,
    back: Vec<usize>,
    /// Where windows begin, and the end.
    windows: Vec<usize>,
}

impl Order {
    fn of(spec: &Spec, tiles: &Tiles) -> Option<Self> {
        let (forth, windows) = tiles.windows(spec.windows.as_ref()?.side);
        let mut back = vec![0; forth.len()];
        forth.iter().enumerate().for_each(|(place, &patch)| back[patch] = place);
        Some(Self { forth, back, windows })
    }
}

/// The rotary tables of an encoder with rotary positions: one table, or one for each half of a head; none without
/// rotary positions.
fn ropes(pass: &Pass<'_>, spec: &Spec, tiles: &Tiles, order: Option<&Order>) -> Vec<Rope> {
    let quarter = spec.head_dim / 4;
    let Some(theta) = spec.rope_theta.map(|theta| theta as f32) else { return Vec::new() };
    // Rows and columns have the frequencies of half a head each, or every other one of a whole head's.
    let (step, width) = if spec.rope_in_turns { (2, 4 * quarter) } else { (1, 2 * quarter) };
    let frequency = |index: usize| 1.0 / theta.powf((2 * index) as f32 / width as f32);
    let of_axis = |axis: usize| (0..quarter).map(move |index| frequency(step * index + axis * (step - 1)));
    let inv_freq: Vec<f32> = (0..2).flat_map(of_axis).collect();
    let places = tiles.places().map(|places| match order {
        Some(order) => order.forth.iter().map(|&patch| places[patch]).collect(),
        None => places,
    });
    let positions = [places[0].as_slice(), places[1].as_slice()];
    let count = places[0].len();
    if spec.rope_by_halves {
        let of_half = |axis: usize| {
            let part = (count, (&inv_freq[..quarter], 1.0));
            Rope::with_components(pass.pool, &positions, &vec![axis; quarter], [part])
        };
        return vec![of_half(1), of_half(0)];
    }
    let part = (count, (inv_freq.as_slice(), 1.0));
    vec![Rope::with_components(pass.pool, &positions, &sections(&[quarter, quarter]), [part])]
}

impl Encoder {
    fn walk<'a>(&'a self, layout: &'a Layout) -> Walk<'a> {
        Walk {
            shards: &self.shards,
            values: Floats::default(),
            layout,
            every_token: true,
            added: None,
            per_layer: None,
            across: None,
        }
    }

    /// From `patches [patches, channels * frames * patch * patch]` to the rows that connectors take, each
    /// `[rows, hidden]`: those after inner blocks, then the last. With `keep`, also keeps what backward needs, if
    /// anything is trained.
    ///
    /// # Errors
    /// As [`Blocks::forward`].
    pub fn forward(
        &self,
        pass: &Pass<'_>,
        tiles: &Tiles,
        patches: Activation,
        keep: bool,
    ) -> Result<(Vec<Activation>, Option<Saved>)> {
        let prefix = self.spec.prefix_tokens();
        let order = Order::of(&self.spec, tiles);
        let windows = order.as_ref().zip(self.spec.windows.as_ref());
        let windows =
            windows.map(|(order, windows)| (Window::Chunked(windows.side * windows.side), order.windows.as_slice()));
        let ropes = ropes(pass, &self.spec, tiles, order.as_ref());
        let layout = Layout::full(&tiles.cu_seqlens(prefix), ropes, windows);
        let (mut x, stem) = self.stem.forward(pass, &self.spec, tiles, patches);
        if let Some(order) = &order {
            x = x.gather(&order.forth);
        }
        let keep = keep && self.trains;
        let (mut outputs, mut traces) = (Vec::new(), Vec::new());
        for (index, part) in self.parts.iter().enumerate() {
            if keep {
                let (y, trace) = part.forward_keeping(&self.walk(&layout), pass, x, false)?;
                traces.push(trace);
                x = y;
            } else {
                x = part.forward(&self.walk(&layout), pass, x)?;
            }
            if index + 1 < self.parts.len() {
                outputs.push(self.output(tiles, order.as_ref(), x.copy()));
            }
        }
        let (y, norm) = match &self.final_norm {
            Some(norm) => {
                let (y, stats) = norm.forward(pass, &x, 1);
                (y, Some((x, stats)))
            }
            None => (x, None),
        };
        outputs.push(self.output(tiles, order.as_ref(), y));
        Ok((outputs, keep.then_some(Saved { stem, layout, traces, norm })))
    }

    /// The rows that a connector takes, out of the encoder's tokens.
    fn output(&self, tiles: &Tiles, order: Option<&Order>, y: Activation) -> Activation {
        let prefix = self.spec.prefix_tokens();
        match order {
            Some(order) => y.gather(&order.back),
            None if self.spec.feature.drop_prefix && prefix > 0 => y.gather(&tiles.patch_rows(prefix)),
            None => y,
        }
    }

    /// From the gradient of [`Encoder::output`]'s rows to that of the tokens.
    fn output_backward(&self, tiles: &Tiles, order: Option<&Order>, dy: Activation) -> Activation {
        let prefix = self.spec.prefix_tokens();
        match order {
            Some(order) => dy.gather(&order.forth),
            None if self.spec.feature.drop_prefix && prefix > 0 => {
                dy.scatter(&tiles.patch_rows(prefix), tiles.tokens(prefix))
            }
            None => dy,
        }
    }

    /// Adds the gradients of what is trained, given those of the rows that connectors took, each `[rows, hidden]`.
    ///
    /// # Errors
    /// Those of the collector that takes the gradients ([`crate::grads::Collector`]).
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        tiles: &Tiles,
        saved: Saved,
        mut d_outputs: Vec<Activation>,
        params: &Params,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        let Saved { stem, layout, mut traces, norm } = saved;
        let order = Order::of(&self.spec, tiles);
        let mut gradient = |part: usize| {
            let dy = d_outputs.pop().filter(|_| part < self.parts.len());
            dy.map(|dy| self.output_backward(tiles, order.as_ref(), dy))
        };
        let Some(mut dx) = gradient(0) else { return Ok(()) };
        if let (Some(norm), Some((x, stats))) = (&self.final_norm, norm) {
            let mut d_norm = dx.like();
            norm.backward(pass, &x, &stats, &dx, Some((&mut d_norm, false)), grads);
            dx = d_norm;
        }
        for (index, part) in self.parts.iter().enumerate().rev() {
            if index + 1 < self.parts.len()
                && let Some(dy) = gradient(index)
            {
                elementwise::add(&mut dx, &dy);
            }
            let Some(trace) = traces.pop() else { return Ok(()) };
            let below = self.trains_below[index];
            match part.backward(&self.walk(&layout), pass, trace, dx, params, below, grads)? {
                Some(found) if below => dx = found,
                _ => return Ok(()),
            }
        }
        let dx = match &order {
            Some(order) => dx.gather(&order.back),
            None => dx,
        };
        self.stem.backward(pass, &self.spec, tiles, stem, dx, grads);
        Ok(())
    }
}
