//! Floating-point operations (FLOPs) of training. A multiply-add counts as two.
//!
//! A token costs 2 for each weight that it passes forward, 2 for the gradient of the weight's input, and 2 for the
//! gradient of the weight if it is trained. For N weights that is `6 N` for full training (Kaplan et al., 2020,
//! <https://arxiv.org/abs/2001.08361>), `4 N` for a frozen base, and `6 N` for adapters on it.
//!
//! Attention costs `4 d` forward for each pair of a query and a key that it sees, and twice that backward; `d` is the
//! width of all heads together: the mean of that of keys and that of values where these differ. With causal attention over a row of S tokens that is `6 S^2 d` a layer. A block that
//! gradient checkpointing runs again costs its forward pass once more. Norms, activations and softmax are not counted.
//!
//! Of a block that reads an image by cross-attention, each row of the image passes the projection to keys and values, and every
//! token sees every row. Each row of a text shows as many images as the job says, which go through encoder and connector
//! ([`super::image_flops`]).
use super::image_flops::ImageFlops;
use super::memory::footprint::{Footprint, Shape};
use super::memory::{Job, Policy, block_of};
use std::collections::BTreeMap;
use tunesmith_config::arch::{
    ALTUP_PROJECTIONS, ALTUP_UNEMBED_PROJECTIONS, Arch, BlockSpec, BranchSpec, CrossAttentionSpec, LinearSpec,
    PER_LAYER_PROJECTION, PartSpec,
};

/// FLOPs of some rows, forward and backward.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Flops {
    /// FLOPs that the result needs. Model FLOPs utilization (MFU) counts these.
    pub useful: f64,
    /// FLOPs of blocks that gradient checkpointing runs again.
    pub again: f64,
}

impl Flops {
    /// All FLOPs. Hardware FLOPs utilization (HFU) counts these.
    pub const fn total(&self) -> f64 {
        self.useful + self.again
    }
}

impl std::ops::AddAssign for Flops {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl std::ops::Mul<f64> for Flops {
    type Output = Self;

    fn mul(self, times: f64) -> Self {
        Self { useful: self.useful * times, again: self.again * times }
    }
}

impl std::ops::Add for Flops {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { useful: self.useful + other.useful, again: self.again + other.again }
    }
}

/// The FLOPs of a token in a model. They are computed once, then used for rows of any lengths.
#[derive(Debug, Clone, PartialEq)]
pub struct Costs {
    /// FLOPs of a token in the blocks, without attention between tokens.
    token: Flops,
    /// FLOPs of a label token in the LM head.
    label: f64,
    /// FLOPs of a pair of query and key, summed over all blocks with the same sliding window.
    pairs: Vec<(Option<usize>, Flops)>,
    /// How many rows of an image each text reads by cross-attention; 0 if it reads none.
    image_rows: f64,
    /// FLOPs of such a row in the blocks, and FLOPs of a pair of a token and such a row.
    across: [Flops; 2],
    /// FLOPs of a row's images in encoder and connector.
    images: f64,
}

impl Costs {
    /// Computes the costs of the training that `job` describes. Blocks below the lowest trained one have no backward
    /// pass.
    pub fn new(job: &Job<'_>) -> Self {
        let (arch, trained) = (job.arch, &job.trained);
        let mut matrices = Matrices::default();
        matrices.read(arch);
        let [_, of_image, _] =
            CrossAttentionSpec::LINEARS.map(|name| format!(".{}.{name}", CrossAttentionSpec::MODULE));
        // Whether a matrix multiplies the rows of an image (`image`) or the tokens of the text.
        let is = |name: &str, image: bool| name.contains(&of_image) == image;
        let adapters = |block: usize, image: bool| -> f64 {
            let prefix = format!("model.layers.{block}.");
            let ours = trained.adapters.range(prefix.clone()..).take_while(|(name, _)| name.starts_with(&prefix));
            let ours = ours.filter(|(name, _)| is(name, image));
            ours.map(|(name, adapter)| matrices.numbers(arch, name, adapter.as_ref())).sum()
        };
        let weights = |block: usize, image: bool| -> f64 {
            let names = trained.tensors.iter().filter(|name| place(name) == Some(block) && is(name, image));
            names.filter_map(|name| matrices.of.get(name.as_str())).sum()
        };
        let trains = |block: usize| {
            adapters(block, false) + adapters(block, true) > 0.0
                || trained.tensors.iter().any(|it| block_of(it) == Some(block))
        };
        let blocks = arch.num_hidden_layers;
        let embeds = trained.tensors.contains("model.embed_tokens.weight") || !arch.token_rows.embedding.is_empty();
        // The gradient of an image passes through all blocks.
        let of_images = arch
            .vision
            .as_ref()
            .is_some_and(|vision| !vision.trained_tensors().is_empty() || !vision.adapted_linears().is_empty());
        let lowest = if embeds || of_images { 0 } else { (0..blocks).find(|&block| trains(block)).unwrap_or(blocks) };
        let image_rows = job.pictures.filter(|_| arch.reads_images_across()).map_or(0.0, |shown| shown.tokens as f64);
        let mut costs = Self {
            token: Flops::default(),
            label: 0.0,
            pairs: Vec::new(),
            image_rows,
            across: [Flops::default(); 2],
            images: job.pictures.map_or(0.0, |shown| shown.per_row as f64) * Self::image(job).step,
        };
        for (block, spec) in arch.blocks.iter().enumerate() {
            let back = if block >= lowest { 1.0 } else { 0.0 };
            let again =
                if job.policy(block) == Policy::Full && block >= lowest && block + 1 < blocks { 1.0 } else { 0.0 };
            let passes = |image: bool| {
                let module = format!("model.layers.{block}{of_image}.weight");
                let of_rows = matrices.of.get(&module).copied().unwrap_or_default();
                let passed = if image { of_rows } else { matrices.blocks[block] - of_rows };
                let adapters = adapters(block, image);
                Flops {
                    useful: 2.0 * passed * (1.0 + back) + 2.0 * weights(block, image) + 6.0 * adapters,
                    again: again * 2.0 * (passed + adapters),
                }
            };
            costs.token += passes(false);
            let pair = |width: f64| Flops { useful: width * (4.0 + 8.0 * back), again: again * 4.0 * width };
            if let Some(cross) = spec.cross_attention() {
                costs.across[0] += passes(true);
                costs.across[1] += pair(cross.size() as f64);
            }
            // A token reads the state, changes it and reads it again. The backward pass takes about twice as much,
            // after running the forward pass once more.
            let state = 2.0 * 3.0 * states(spec);
            costs.token.useful += state * (1.0 + 2.0 * back);
            costs.token.again += state * (back + again);
            let Some(attention) = spec.attention() else { continue };
            let width = (attention.query_size() + attention.mixed_size()) as f64 / 2.0;
            match costs.pairs.iter_mut().find(|(window, _)| *window == attention.window) {
                Some((_, sum)) => *sum += pair(width),
                None => costs.pairs.push((attention.window, pair(width))),
            }
        }
        let full = trained.tensors.contains(arch.head_tensor());
        costs.label = (arch.outputs() * arch.hidden_size) as f64 * if full { 6.0 } else { 4.0 };
        costs
    }

    /// FLOPs of one of the images that the job's rows show; 0 if they show none.
    pub fn image(job: &Job<'_>) -> ImageFlops {
        let shown = job.arch.vision.as_ref().zip(job.pictures);
        shown.map(|(vision, shown)| ImageFlops::of(vision, &job.trained, &shown.size)).unwrap_or_default()
    }

    /// FLOPs of rows with these lengths in tokens, which have `labels` label tokens together.
    pub fn of(&self, lengths: impl IntoIterator<Item = usize>, labels: f64) -> Flops {
        let mut sum = Flops { useful: labels * self.label, again: 0.0 };
        for length in lengths {
            let tokens = length as f64;
            let [row, pair] = self.across;
            sum += self.token * tokens + (row + pair * tokens) * self.image_rows;
            sum.useful += self.images;
            for (window, pair) in &self.pairs {
                // Half of a square, without the triangle that the window hides.
                let hidden = window.map_or(0.0, |window| tokens - (window as f64).min(tokens));
                sum += *pair * ((tokens * tokens - hidden * hidden) / 2.0);
            }
        }
        sum
    }
}

/// The block to which a matrix is counted. The projections that are computed once for all blocks count to block 0:
/// those of per-layer inputs, and those that make several streams and join them.
fn place(name: &str) -> Option<usize> {
    let once = [PER_LAYER_PROJECTION, ALTUP_PROJECTIONS, ALTUP_UNEMBED_PROJECTIONS];
    block_of(name).or_else(|| once.iter().any(|module| name.starts_with(module)).then_some(0))
}

/// How many numbers the states of linear attention in a block have.
fn states(block: &BlockSpec) -> f64 {
    let of = |branch: &BranchSpec| match &branch.part {
        PartSpec::DeltaNet(spec) => (spec.value_size() * spec.key_dim) as f64,
        PartSpec::Mamba(spec) => (spec.inner_size() * spec.state) as f64,
        _ => 0.0,
    };
    block.branches.iter().map(of).sum()
}

/// How many weights of each matrix a token is multiplied with.
#[derive(Debug, Default)]
struct Matrices {
    /// By the name of the tensor. The weights of an expert count by the share of tokens that it gets.
    of: BTreeMap<String, f64>,
    /// The sum for each block.
    blocks: Vec<f64>,
    /// `[rows, columns]` of the weight of each linear module, by its name.
    shapes: BTreeMap<String, [u64; 2]>,
}

impl Matrices {
    fn read(&mut self, arch: &Arch) {
        self.blocks = vec![0.0; arch.num_hidden_layers];
        let share = arch.experts.as_ref().map_or(1.0, |experts| experts.per_token as f64 / experts.count as f64);
        for spec in arch.tensors().into_iter().filter(|spec| spec.shape.len() == 2) {
            let Some(block) = place(&spec.name) else { continue };
            let numbers = spec.len() as f64 * if spec.name.contains(".experts.") { share } else { 1.0 };
            self.blocks[block] += numbers;
            self.of.insert(spec.name, numbers);
        }
        let shape = |linear: LinearSpec| (linear.name, [linear.out_features as u64, linear.in_features as u64]);
        self.shapes = arch.linear_modules().into_iter().chain(arch.routers()).map(shape).collect();
    }

    /// How many weights of a module's adapter a token is multiplied with. Those of an expert count by the share of
    /// tokens that it gets.
    fn numbers(&self, arch: &Arch, module: &str, adapter: &dyn Footprint) -> f64 {
        let experts = arch.experts.as_ref().filter(|_| module.contains(".experts."));
        let ([out, inputs], times) = match experts {
            None => (self.shapes.get(module).copied().unwrap_or_default(), 1),
            Some(experts) => {
                let (hidden, width) = (arch.hidden_size as u64, experts.width as u64);
                let shape = if module.ends_with("down_proj") { [hidden, width] } else { [2 * width, hidden] };
                (shape, experts.per_token)
            }
        };
        (adapter.numbers(&Shape { out, inputs }) * times as u64) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::testing::{arch, job};
    use crate::memory::{ImageSize, Pictures};
    use std::path::Path;

    #[test]
    fn a_frozen_base_costs_4_and_what_is_trained_6_a_weight() {
        let arch = arch();
        let linears = arch.linear_modules();
        let numbers = |it: &LinearSpec| (it.in_features * it.out_features) as f64;
        let blocks: f64 = linears.iter().filter(|it| it.layer.is_some()).map(numbers).sum();
        let head = (arch.vocab_size * arch.hidden_size) as f64;
        let attention = 6.0 * 64.0 * 64.0 * (arch.hidden_size * arch.num_hidden_layers) as f64;
        let lora = job(&arch, false);
        let costs = Costs::new(&lora).of([64], 60.0);
        let adapters = lora.trained.values as f64;
        assert_eq!(costs.useful, 64.0 * (4.0 * blocks + 6.0 * adapters) + 60.0 * 4.0 * head + attention);
        assert_eq!(costs.again, 0.0);
        let full = Costs::new(&job(&arch, true)).of([64], 60.0);
        assert_eq!(full.useful, 64.0 * 6.0 * blocks + 60.0 * 6.0 * head + attention);
        let again = Costs::new(&Job { full: 1, ..job(&arch, true) }).of([64], 60.0);
        let one = 64.0 * 2.0 * blocks / 3.0 + attention / 9.0;
        assert!((again.again - one).abs() < 1.0 && again.useful == full.useful, "{again:?} {one}");
    }

    #[test]
    fn rows_of_an_image_pass_keys_and_values_and_are_seen_by_every_token() {
        let text = r#"{"model_type": "vision-encoder-decoder", "encoder": {}, "decoder": {"model_type": "gpt2", "n_embd": 64,
            "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 1000, "add_cross_attention": true}}"#;
        let across = Arch::from_json(text, Path::new("a test")).expect("a shape");
        let plain = Arch { blocks: across.blocks.iter().map(without).collect(), ..across.clone() };
        let (numbers, scratch, size) = (0, 0, ImageSize::default());
        let pictures =
            |tokens| Some(Pictures { per_row: 1, most: None, spacing: 1, rows: 1, tokens, numbers, scratch, size });
        let of = |arch: &Arch, full: bool, rows: u64| {
            Costs::new(&Job { pictures: pictures(rows), ..job(arch, full) }).of([32], 31.0)
        };
        let (width, tokens, rows, blocks) = (64.0, 32.0, 17.0, 2.0);
        // In full training each number costs 6: queries and outputs by token, keys and values by row; each pair costs 12 a feature.
        let wanted = blocks * (6.0 * 2.0 * width * width * (tokens + rows) + 12.0 * width * tokens * rows);
        assert_eq!(of(&across, true, 17).useful - of(&plain, true, 0).useful, wanted);
        assert_eq!(of(&plain, true, 17), of(&plain, true, 0), "an image among the tokens is in their number");
        // Adapters of rank 8 beside a frozen base: 4 a number, and 6 of theirs.
        let adapters = |inputs: f64, outputs: f64| 6.0 * 8.0 * (inputs + outputs);
        let modules = 4.0 * 2.0 * width * width * (tokens + rows);
        let ranks = 2.0 * adapters(width, width) * tokens + adapters(width, 2.0 * width) * rows;
        let wanted = blocks * (modules + ranks + 12.0 * width * tokens * rows);
        assert_eq!(of(&across, false, 17).useful - of(&plain, false, 0).useful, wanted);
    }

    /// A block without its cross-attention.
    fn without(block: &BlockSpec) -> BlockSpec {
        let branches = block.branches.iter().filter(|it| !matches!(it.part, PartSpec::CrossAttention(_)));
        BlockSpec { branches: branches.cloned().collect() }
    }
}
