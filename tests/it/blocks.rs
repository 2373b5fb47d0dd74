//! Blocks whose parts differ from one to the next: head sizes, shared keys and values, widths, experts with an MLP beside
//! them, one part a block. No family of `config.json` has all of it; the description does.
use crate::generate::check_cache;
use crate::parity::{golden, recipe};
use tunesmith::config::arch::{Arch, BlockSpec, BranchSpec, ExpertNames, Experts, PartSpec, RouterSpec, SharedExpert};
use tunesmith::config::{Checkpointing, Config, Mode};
use tunesmith::data::batch::{Batch, Example};
use tunesmith::model::Model;

fn full() -> Config {
    let mut config = recipe();
    config.tuning.mode = Mode::Full;
    config
}

/// Gemma 3 with the blocks of `change`, drawn at random, and no value at which a fault would not show.
fn model(change: impl FnOnce(&mut Arch), config: &Config) -> Model {
    let mut arch = Arch::from_dir(&golden("gemma3").join("model")).unwrap();
    change(&mut arch);
    arch.num_hidden_layers = arch.blocks.len();
    let mut model = Model::load(&arch, None, config).unwrap();
    for (at, value) in model.params.values_mut().on_host().iter_mut().enumerate() {
        *value += 0.1 * ((at * 7919 % 1009) as f32 / 504.0 - 1.0);
    }
    model
}

fn batch() -> Batch {
    let row = |seed: u32, length: u32| {
        let input_ids: Vec<u32> = (0..length).map(|at| 3 + (seed * 7919 + at * 104_729 + at * at * 31) % 500).collect();
        let labels = input_ids.iter().enumerate().map(|(at, &id)| if at % 3 == 0 { -100 } else { id as i32 }).collect();
        Example { input_ids, labels }
    };
    Batch::from_examples(&[row(1, 19), row(2, 33), row(3, 5)])
}

/// Five blocks: two with heads of their own sizes, one of them with a window; three that take keys and values from these,
/// one of which has experts beside an MLP.
fn mixed(arch: &mut Arch) {
    let block = |attention: (usize, usize, usize, usize, Option<usize>), width| {
        let (num_heads, num_kv_heads, head_dim, rope, kv_from) = attention;
        let mut spec = arch.blocks[0].attention().unwrap().clone();
        (spec.num_heads, spec.num_kv_heads, spec.head_dim) = (num_heads, num_kv_heads, head_dim);
        (spec.rope, spec.kv_from, spec.window) = (Some(rope), kv_from, (rope == 1).then_some(7));
        let mut block = BlockSpec::new(spec, width);
        block.set_norms(tunesmith::config::arch::NormPlacement::Sandwich);
        block
    };
    let mut blocks = vec![
        block((4, 2, 16, 0, None), 128),
        block((2, 1, 32, 1, None), 96),
        block((6, 2, 16, 0, Some(0)), 64),
        block((3, 1, 32, 1, Some(1)), 128),
        block((2, 2, 16, 0, Some(0)), 48),
    ];
    blocks[3].set_experts();
    arch.blocks = blocks;
    arch.experts = Some(Experts {
        count: 4,
        per_token: 2,
        width: 24,
        normalised: true,
        router: RouterSpec::SOFTMAX,
        shared: Some(SharedExpert { width: 40, gated: false }),
        balance: None,
        names: ExpertNames::Qwen,
        clamp: None,
        biased: false,
        gated: true,
        latent: None,
        mxfp4: false,
    });
}

/// Checks gradients by finite differences: the loss changes along each tensor's own gradient, and along another direction, as
/// the gradients predict.
fn check_gradients(mut model: Model) {
    let batch = batch();
    model.params.zero_grads();
    model.forward_backward(&batch, 1.0, 1.0, 0).unwrap();
    let (gradients, start) = (model.params.grads().read(), model.params.values().read());
    for spec in model.params.specs.clone() {
        let range = spec.range();
        let gradient = &gradients[range.clone()];
        let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        assert!(norm > 0.0, "{}: no gradient", spec.name);
        let sign = |at: usize| if at * 7919 % 13 < 6 { 1.0 } else { -1.0 };
        let own: Vec<f64> = gradient.iter().map(|g| f64::from(*g) / norm).collect();
        let other: Vec<f64> =
            gradient.iter().enumerate().map(|(at, g)| f64::from(*g) / norm * 0.5 * (1.0 + sign(at))).collect();
        for direction in [own, other] {
            let expected: f64 = direction.iter().zip(gradient).map(|(d, g)| d * f64::from(*g)).sum();
            let eps = 2e-3 / norm.max(1.0).sqrt();
            let mut at = |eps: f64| {
                let moved = start[range.clone()].iter().zip(&direction);
                let moved: Vec<f32> = moved.map(|(start, d)| (f64::from(*start) + eps * d) as f32).collect();
                model.params.put(&range, &moved);
                model.loss(&batch).unwrap()
            };
            let found = (at(eps) - at(-eps)) / (2.0 * eps);
            at(0.0);
            assert!((found - expected).abs() <= 0.02 * expected.abs() + 0.02, "{}: {found} != {expected}", spec.name);
        }
    }
}

#[test]
fn gradients_of_mixed_blocks_are_those_of_their_loss() {
    check_gradients(model(mixed, &full()));
}

#[test]
fn what_mixed_blocks_keep_does_not_change_their_gradients() {
    let of = |full_blocks: usize, none: usize| {
        let mut config = full();
        config.train.gradient_checkpointing = Checkpointing::Blocks { full: full_blocks, none };
        let mut model = model(mixed, &config);
        model.params.zero_grads();
        let loss = model.forward_backward(&batch(), 1.0, 1.0, 0).unwrap();
        (loss, model.params.grads().read())
    };
    let all = of(0, 5);
    assert!(all == of(0, 0) && all == of(5, 0) && all == of(2, 1));
}

#[test]
fn mixed_blocks_go_on_from_their_cache_to_the_bit() {
    check_cache(&model(mixed, &full()));
}

#[test]
fn a_block_with_one_part_is_half_of_one_with_two() {
    let whole = model(|arch| arch.blocks.truncate(2), &full());
    let halves = |arch: &mut Arch| {
        arch.blocks.truncate(2);
        let halves = arch.blocks.iter().flat_map(|block| &block.branches);
        arch.blocks = halves.map(|branch: &BranchSpec| BlockSpec { branches: vec![branch.clone()] }).collect();
        assert!(matches!(arch.blocks[3].branches[0].part, PartSpec::Mlp { .. }), "the last has no attention");
    };
    let mut halves = model(halves, &full());
    for spec in &whole.params.specs {
        let mut name = spec.name.clone();
        if let Some((layer, rest)) = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')) {
            let mlp = rest.starts_with("mlp.") || rest.contains("feedforward");
            name = format!("model.layers.{}.{rest}", 2 * layer.parse::<usize>().unwrap() + usize::from(mlp));
        }
        let range = halves.params.find(&name).unwrap_or_else(|| panic!("{name}")).range();
        halves.params.put(&range, &whole.params.values().slice(spec.range()).read());
    }
    let batch = batch();
    let rows: Vec<usize> = vec![3, 18, 19, 40];
    assert_eq!(whole.logits(&batch, &rows).unwrap(), halves.logits(&batch, &rows).unwrap());
    let gradients = |mut model: Model| {
        model.params.zero_grads();
        let loss = model.forward_backward(&batch, 1.0, 1.0, 0).unwrap();
        let of = |name: &str| model.params.grads().slice(model.params.find(name).unwrap().range()).read();
        (loss, of("model.embed_tokens.weight"), of("model.layers.0.self_attn.k_proj.weight"))
    };
    check_cache(&halves);
    let ((loss, embedding, keys), (halves_loss, halves_embedding, halves_keys)) = (gradients(whole), gradients(halves));
    assert_eq!(loss, halves_loss);
    // Sums over tokens round otherwise where the last block has only those that are asked for.
    let close = |one: &[f32], other: &[f32]| one.iter().zip(other).all(|(a, b)| (a - b).abs() < 1e-4 + 1e-4 * a.abs());
    assert!(close(&embedding, &halves_embedding) && close(&keys, &halves_keys));
}
