//! A walk over the model, forward and backward, in the order of `model::decoder`. It takes activations and gives them
//! back, and computes nothing. Afterwards the pools say how many bytes a pass needs, and how many are saved for the
//! backward pass.
use super::block::{Block, Feed, How, Pools};
use super::parts::{Modules, Moe};
use super::pool::{Activation, LANES, Layout, Pool};
use super::{Device, Job, Pass, Policy};

/// The bytes of a walk's pools for one pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Walked {
    /// Bytes that are saved for the backward pass when the head begins.
    pub kept: u64,
    /// Bytes of all buffers of the walk, the saved ones included.
    pub pools: u64,
    /// Bytes of a chunk of logits, and of the head's other buffers for it.
    pub head: u64,
}

/// The pools after a walk, without the number of tokens. That matters only where some experts see no tokens: see
/// [`experts_in_use`].
#[derive(Debug)]
pub(super) struct Shape {
    waiting: Pool,
    main: Pool,
    /// For each block with experts: its own pool when the head begins and at the end, and what its buffers' sizes
    /// follow from.
    experts: Vec<(Pool, Pool, Moe, How)>,
    head: Pool,
}

/// How many experts see tokens in `pass`, at most all: in blocks that compute all tokens, and in the last block, which
/// computes the labelled ones. Passes with the same numbers have the same [`Shape`].
pub(super) fn experts_in_use(job: &Job<'_>, pass: &Pass) -> [u64; 2] {
    let used = |tokens: u64| {
        job.arch.experts.as_ref().map_or(0, |experts| (tokens * experts.per_token as u64).min(experts.count as u64))
    };
    [used(pass.tokens), used(pass.labelled)]
}

/// Walks `pass` forward and backward.
pub(super) fn walk(job: &Job<'_>, pass: &Pass) -> Shape {
    let (arch, hidden) = (job.arch, job.arch.hidden_size as u64);
    let trains = |tensor: &str| job.trained.tensors.contains(tensor);
    let modules = Modules::new(arch, &job.trained);
    let blocks: Vec<Block> =
        (0..arch.num_hidden_layers).map(|layer| Block::new(arch, &modules, trains, layer)).collect();
    let last = blocks.len() - 1;
    let embeds = trains("model.embed_tokens.weight") || !arch.token_rows.embedding.is_empty();
    let lowest = if embeds { 0 } else { blocks.iter().position(|block| block.trains).unwrap_or(blocks.len()) };
    let balanced = arch.experts.as_ref().is_some_and(|experts| experts.balance.is_some());
    let how_of = |index: usize| {
        let picked = index == last && !balanced;
        // What is kept in bfloat16 is rounded: what follows from it is then computed again.
        let whole = job.policy(index) == Policy::None && (!job.narrow || index == last);
        How { dropout: job.dropout, picked, rows: if picked { pass.labelled } else { pass.tokens }, whole }
    };

    let mut main = Pool::default();
    let mut owns = vec![Pool::default(); blocks.len()];
    // Rotary tables: cosines and sines of all tokens, and of the labelled ones.
    let halves = arch.ropes.iter().map(|rope| rope.rotary_dim as u64 / 2);
    let tables: Vec<Activation> = halves.flat_map(|half| [half; 4]).map(|half| main.take(half)).collect();
    let mut x = main.take(hidden);
    let mut kept = Vec::with_capacity(blocks.len());
    for (index, block) in blocks.iter().enumerate() {
        let mut pools = Pools { main: &mut main, own: &mut owns[index] };
        let (y, saved) = block.forward(&mut pools, how_of(index));
        let input = std::mem::replace(&mut x, y);
        let saved = if job.policy(index) != Policy::Full || index == last {
            Some(saved)
        } else {
            saved.give(&mut pools);
            None
        };
        if index < lowest {
            pools.main.give(input);
            if let Some(saved) = saved {
                saved.give(&mut pools);
            }
            kept.push(None);
        } else if job.narrow && index != last {
            let input = pools.main.narrow(input);
            kept.push(Some((input, saved.map(|saved| saved.map(&mut pools, Pool::narrow)))));
        } else {
            kept.push(Some((input, saved)));
        }
    }
    if balanced {
        let rows = main.take(hidden);
        main.give(std::mem::replace(&mut x, rows));
    }
    let (waiting, waiting_own) = (main.clone(), owns.clone());

    let head = head(job, &mut main);
    main.give(x);
    let mut dy = main.take(hidden);
    if balanced {
        let all = main.take(hidden);
        main.give(std::mem::replace(&mut dy, all));
    }
    dy = rounded(job, &mut main, dy, hidden);
    for (index, block) in blocks.iter().enumerate().rev() {
        let Some((x, saved)) = kept.pop().flatten() else { break };
        let mut pools = Pools { main: &mut main, own: &mut owns[index] };
        let x = pools.main.widen(x);
        let saved = if let Some(saved) = saved {
            saved.map(&mut pools, Pool::widen)
        } else {
            let (y, saved) = block.forward(&mut pools, How { whole: false, ..how_of(index) });
            pools.main.give(y);
            saved
        };
        let want_dx = index > lowest || embeds;
        let dx = block.backward(&mut pools, saved, dy, how_of(index), want_dx);
        dy = match dx {
            Some(dx) => rounded(job, pools.main, dx, hidden),
            None => pools.main.take(0),
        };
        pools.main.give(x);
    }
    main.give(dy);
    main.give_all(tables);
    let own = waiting_own.into_iter().zip(owns).zip(&blocks).enumerate();
    let experts = own.filter_map(|(index, ((waiting, own), block))| match &block.feed {
        Feed::Sparse(moe) => Some((waiting, own, moe.clone(), how_of(index))),
        Feed::Dense(_) => None,
    });
    Shape { waiting, main, experts: experts.collect(), head }
}

impl Shape {
    /// The bytes of the pools for `pass` on a device.
    pub(super) fn bytes(&self, job: &Job<'_>, pass: &Pass, device: Device) -> Walked {
        let (layout, logits) = match device {
            Device::Cpu => (Layout::Panels, Layout::Panels),
            Device::Gpu => (Layout::Rows(2), Layout::Rows(4)),
        };
        let rows = job.trained.adapters.values().map(|adapter| adapter.rows());
        let tokens = pass.tokens.max(rows.max().unwrap_or(0));
        let (mut kept, mut pools) = (self.waiting.bytes_out(layout, tokens), self.main.bytes(layout, tokens));
        for (waiting, own, moe, how) in &self.experts {
            let tokens = if how.picked { pass.labelled } else { pass.tokens };
            let each = match device {
                Device::Cpu => moe.panels(tokens) * LANES,
                Device::Gpu => moe.use_of(tokens).0,
            };
            kept += waiting.bytes_out(layout, each);
            pools += own.bytes(layout, each);
        }
        let chunk = super::head_chunk(job.arch.outputs()) as u64;
        Walked { kept, pools, head: self.head.bytes(logits, chunk.min(pass.labelled)) }
    }
}

/// A gradient between blocks, which is rounded to float16 and back where [`Job::rounds_gradients`].
fn rounded(job: &Job<'_>, main: &mut Pool, gradient: Activation, hidden: u64) -> Activation {
    if job.rounds_gradients {
        main.pass([hidden.div_ceil(2), hidden]);
    }
    gradient
}

/// Walks the head; returns its own pool, whose buffers are for a chunk of tokens.
fn head(job: &Job<'_>, main: &mut Pool) -> Pool {
    let (arch, hidden) = (job.arch, job.arch.hidden_size as u64);
    let trained = job.trained.tensors.contains(arch.head_tensor());
    let rows = Some(arch.rows_of(arch.head_tensor()).len() as u64).filter(|&rows| rows > 0 && !trained);
    // The normed rows and their statistics, the gradient of these, that of the input.
    main.pass([hidden, 1, hidden, hidden]);
    let vocabulary = arch.outputs() as u64;
    let capped = (arch.logit_softcap.is_some() && arch.score.is_none()).then_some(vocabulary);
    let chunk = [hidden, vocabulary].into_iter().chain(capped).chain([hidden]);
    let gradient = (trained || rows.is_some()).then_some(hidden.next_multiple_of(LANES));
    let mut pool = Pool::default();
    pool.pass(chunk.chain(rows).chain(gradient));
    pool
}
