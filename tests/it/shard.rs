//! Sharded weights (FSDP): the numbers are the same to the bit as with all weights on every rank, whatever each rank has to do,
//! and each rank holds only a part of the bytes.
use std::ops::Range;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use tunesmith::comm::threads::{self, Threads};
use tunesmith::comm::{Collectives, Limits};
use tunesmith::config::arch::Arch;
use tunesmith::config::{Config, Dtype, Mode, Quantization, Sharding, Strategy};
use tunesmith::data::batch::{Batch, IGNORE};
use tunesmith::device::Device;
use tunesmith::model::shards::{Flat, Kind, Peers, Shards};
use tunesmith::model::stack::Stack;
use tunesmith::model::weight::Weight;
use tunesmith::model::weights::WeightFiles;
use tunesmith::model::{Model, ParamSpec, Params};
use tunesmith::ops::floats::Floats;
use tunesmith::optim::rule;
use tunesmith::parallel::ParallelPlan;
use tunesmith::parallel::fsdp::Gatherer;

use super::parity::{Forward, adapter_config, golden, put, tensors};
use super::run::fixture::{Fixture, said as said_by, train};

/// An adapter of a golden model as a configuration, and the base in another form.
fn config(family: &str, base: impl Fn(&mut Config)) -> Config {
    let mut config = adapter_config(&golden(family).join("adapter_init/adapter_config.json"));
    config.train.strategy = Strategy::Fsdp;
    base(&mut config);
    config
}

fn load(family: &str, config: &Config, gatherer: Option<&Gatherer>) -> Model {
    let mut model = load_with(family, config, &[], gatherer);
    if config.tuning.mode == Mode::Lora {
        put(&mut model, &tensors(&golden(family).join("adapter_init/adapter_model.safetensors")));
    }
    model
}

/// With these tokens' rows trained.
fn load_with(family: &str, config: &Config, tokens: &[u32], gatherer: Option<&Gatherer>) -> Model {
    let dir = golden(family).join("model");
    let mut arch = Arch::from_dir(&dir).unwrap();
    let weights = WeightFiles::open(&dir, &arch.tensors()).unwrap();
    arch.grow(tokens.to_vec());
    let shards = gatherer.map(Gatherer::shards).unwrap_or_default();
    Model::load_with(&arch, Some(&weights), config, &Stack::default(), None, shards).unwrap()
}

/// What `work` finds on each rank of a world of threads on machines of such sizes, whose weights are shared as `config` says.
fn on_ranks<T: Send>(
    machines: &[usize],
    config: &Config,
    work: impl Fn(&Gatherer, &dyn Collectives) -> T + Sync,
) -> Vec<T> {
    let run = |rank: Threads| {
        let gatherer = Gatherer::new(
            &ParallelPlan::new(&config.train, rank.world().size),
            &rule(&config.train).unwrap().into(),
            &rank,
        )
        .unwrap();
        work(&gatherer.expect("several ranks share"), &rank)
    };
    let run = &run;
    std::thread::scope(|scope| {
        let ranks = threads::machines(machines, Limits::default()).into_iter();
        let running: Vec<_> = ranks.map(|rank| scope.spawn(move || run(rank))).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Everything that a model computes from a batch: loss and gradients, losses token by token, logits, and generated tokens.
fn said(model: &mut Model, batch: &Batch) -> (f64, Vec<f32>, Vec<f32>, Vec<f32>, Vec<f32>) {
    model.params.zero_grads();
    let loss = model.forward_backward(batch, 0.25, 1.0, 0).unwrap();
    let grads = model.params.grads().read();
    let losses = model.token_losses(batch).unwrap();
    let logits = model.logits(batch, &[0, 2]).unwrap();
    let mut text = model.cache();
    let mut next = Vec::new();
    for tokens in batch.tokens[..6].chunks(3) {
        next.extend(model.extend(&mut [(&mut text, tokens)]).unwrap().row(0));
    }
    (loss, grads, losses, logits, next)
}

/// A name, what it sets, how it shares, and with how many ranks.
type Case<'a> = (&'a str, &'a dyn Fn(&mut Config), Sharding, &'a [usize]);

/// Models whose weights ranks share.
pub const SHARED: [&str; 36] = [
    "afmoe",
    "deepseek_v3",
    "gemma2",
    "gemma3n",
    "gemma3n_odd",
    "gemma4_31b",
    "gemma4_a4b",
    "gemma4_e2b",
    "gemma4_unified",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt2",
    "gpt_oss",
    "granite4_moe",
    "granitemoehybrid",
    "hunyuan_v1_dense",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "llama",
    "minimax_m2",
    "ministral3",
    "mistral4",
    "moonlight",
    "muse_glimmer",
    "nemotron3_super",
    "nemotron_h",
    "olmo_hybrid",
    "phi3",
    "qwen2",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
    "seed_oss",
];

#[test]
fn a_shared_model_computes_the_same_to_the_bit_from_a_part_of_the_bytes() {
    let as_it_is = |_: &mut Config| {};
    let bf16 = |config: &mut Config| config.model.dtype = Dtype::Bfloat16;
    let nf4 = |config: &mut Config| config.model.quantization = Quantization::Nf4;
    let fp4 = |config: &mut Config| {
        (config.model.quantization, config.model.double_quant) = (Quantization::Fp4, false);
    };
    let int8 = |config: &mut Config| config.model.quantization = Quantization::Int8;
    let full = |config: &mut Config| config.tuning.mode = Mode::Full;
    let cases: [Case<'_>; 47] = [
        ("llama", &as_it_is, Sharding::FullShard, &[2]),
        ("llama", &nf4, Sharding::FullShard, &[4]),
        ("llama", &bf16, Sharding::ShardGradOp, &[3]),
        ("qwen2", &fp4, Sharding::ShardGradOp, &[2]),
        ("gemma2", &int8, Sharding::FullShard, &[3]),
        ("phi3", &nf4, Sharding::ShardGradOp, &[2]),
        ("qwen3_moe", &as_it_is, Sharding::FullShard, &[2]),
        ("qwen3_moe", &bf16, Sharding::ShardGradOp, &[4]),
        ("llama", &nf4, Sharding::HybridShard, &[2, 3]),
        ("llama", &full, Sharding::FullShard, &[2]),
        ("qwen2", &full, Sharding::FullShard, &[4]),
        ("qwen3_moe", &full, Sharding::ShardGradOp, &[3]),
        ("qwen3_5", &bf16, Sharding::FullShard, &[3]),
        ("qwen3_5", &full, Sharding::FullShard, &[2]),
        ("lfm2", &nf4, Sharding::ShardGradOp, &[2]),
        ("granitemoehybrid", &nf4, Sharding::FullShard, &[2]),
        ("granite4_moe", &full, Sharding::FullShard, &[3]),
        ("olmo_hybrid", &full, Sharding::FullShard, &[3]),
        ("nemotron_h", &full, Sharding::ShardGradOp, &[2]),
        ("lfm3", &bf16, Sharding::ShardGradOp, &[2]),
        ("muse_glimmer", &full, Sharding::FullShard, &[2]),
        ("nemotron3_super", &full, Sharding::FullShard, &[2]),
        ("glm4_moe", &full, Sharding::FullShard, &[2]),
        ("afmoe", &bf16, Sharding::FullShard, &[3]),
        ("qwen3_next", &full, Sharding::ShardGradOp, &[2]),
        ("lfm2_moe", &nf4, Sharding::FullShard, &[2]),
        ("gemma4_e2b", &as_it_is, Sharding::FullShard, &[2]),
        ("gemma4_e2b", &full, Sharding::FullShard, &[3]),
        ("gemma3n", &as_it_is, Sharding::FullShard, &[2]),
        ("gemma3n", &full, Sharding::FullShard, &[3]),
        ("gemma3n_odd", &full, Sharding::ShardGradOp, &[2]),
        ("gemma4_31b", &full, Sharding::ShardGradOp, &[2]),
        ("gemma4_a4b", &full, Sharding::FullShard, &[2]),
        ("gpt2", &nf4, Sharding::FullShard, &[2]),
        ("gpt2", &full, Sharding::FullShard, &[3]),
        ("gpt_oss", &full, Sharding::FullShard, &[2]),
        ("qwen3_5_moe", &full, Sharding::ShardGradOp, &[3]),
        ("ministral3", &nf4, Sharding::FullShard, &[2]),
        ("glm4_moe_lite", &full, Sharding::FullShard, &[3]),
        ("mistral4", &bf16, Sharding::FullShard, &[2]),
        ("deepseek_v3", &full, Sharding::ShardGradOp, &[2]),
        ("moonlight", &nf4, Sharding::FullShard, &[3]),
        ("seed_oss", &full, Sharding::FullShard, &[2]),
        ("glm4", &bf16, Sharding::ShardGradOp, &[2]),
        ("hunyuan_v1_dense", &full, Sharding::FullShard, &[2]),
        ("minimax_m2", &full, Sharding::FullShard, &[2]),
        ("gemma4_unified", &full, Sharding::FullShard, &[3]),
    ];
    assert!(SHARED.iter().all(|name| cases.iter().any(|(family, ..)| family == name)));
    for (family, base, how, machines) in cases {
        assert!(SHARED.contains(&family), "{family}");
        let mut config = config(family, base);
        config.train.fsdp_sharding_strategy = how;
        let batch = Forward::read(family).batch();
        let expected = said(&mut load(family, &config, None), &batch);
        let found = on_ranks(machines, &config, |gatherer, _| {
            let mut model = load(family, &config, Some(gatherer));
            let shards = model.shards();
            let values = 4 * model.params.values().len();
            assert_eq!(shards.shares_trained(), how != Sharding::HybridShard);
            let own = shards.own_bytes() + if shards.shares_trained() { values } else { 0 };
            let all = shards.all_bytes() + if shards.shares_trained() { 4 * model.params.len() } else { 0 };
            let said = said(&mut model, &batch);
            assert_eq!(model.shards().held_bytes(), 0, "nothing is together after a pass");
            (said, own, all)
        });
        let all = found[0].2;
        let copies = if how == Sharding::HybridShard { machines.len() } else { 1 };
        assert_eq!(found.iter().map(|(_, own, _)| own).sum::<usize>(), copies * all, "every byte has one owner");
        let sizes = machines.iter().flat_map(|&size| vec![size; size]);
        for ((said, own, _), size) in found.into_iter().zip(sizes) {
            assert!(said == expected, "{family} {how:?}, {machines:?}");
            assert!(own.abs_diff(all / size) < all / 50, "{own} of {all} among {size}");
        }
    }
}

#[test]
fn a_table_of_which_rows_are_trained_is_shared_with_what_they_have_become() {
    for (family, how, machines) in [
        ("llama", Sharding::FullShard, &[2][..]),
        ("gemma2", Sharding::ShardGradOp, &[3]),
        ("llama", Sharding::HybridShard, &[2, 1]),
    ] {
        let mut config = config(family, |_| {});
        config.train.fsdp_sharding_strategy = how;
        let mut batch = Forward::read(family).batch();
        let (known, beyond) =
            (batch.tokens[1], Arch::from_dir(&golden(family).join("model")).unwrap().vocab_size as u32);
        (batch.tokens[3], batch.targets[0]) = (beyond, beyond as i32);
        let load = |gatherer: Option<&Gatherer>| load_with(family, &config, &[known, beyond], gatherer);
        // What the rows were must not come back.
        let moved = |model: &mut Model| {
            let mut specs = model.params.specs.clone();
            specs.retain(|spec| spec.name.contains("token_adapter"));
            for spec in &specs {
                let range = spec.range();
                let values: Vec<f32> = range.clone().map(|at| (at % 37) as f32 / 64.0 - 0.25).collect();
                model.params.put(&range, &values);
            }
            specs.len()
        };
        let mut whole = load(None);
        let before = said(&mut whole, &batch);
        assert!(moved(&mut whole) > 0);
        let after = said(&mut whole, &batch);
        assert_ne!(before.0, after.0);
        let tables = 4 * whole.arch.vocab_size * whole.arch.hidden_size * if whole.arch.ties_head() { 1 } else { 2 };
        let found = on_ranks(machines, &config, |gatherer, _| {
            let mut model = load(Some(gatherer));
            let shards = model.shards();
            let (own, all) = (shards.own_bytes(), shards.all_bytes());
            let first = said(&mut model, &batch);
            moved(&mut model);
            ((first, said(&mut model, &batch)), own, all)
        });
        assert!(found[0].2 > tables, "the tables are among what is shared");
        let copies = if how == Sharding::HybridShard { machines.len() } else { 1 };
        assert_eq!(found.iter().map(|(_, own, _)| own).sum::<usize>(), copies * found[0].2, "every byte has one owner");
        for (rank, (said, ..)) in found.iter().enumerate() {
            assert!(said.0 == before && said.1 == after, "{family} {how:?}, rank {rank}");
        }
    }
}

/// A rank that is alone, and records how many numbers each segment has that it asks for.
#[derive(Debug, Default, Clone)]
struct Asked(Arc<Mutex<Vec<usize>>>);

impl Peers for Asked {
    fn part(&self, length: usize) -> Range<usize> {
        0..length
    }

    fn rank(&self) -> usize {
        0
    }

    fn cuts(&self, _: &[ParamSpec], _: usize) -> Option<Vec<Range<usize>>> {
        None
    }

    fn begin(&self, numbers: Flat) -> Receiver<tunesmith::Result<Flat>> {
        self.0.lock().unwrap().push(numbers.floats.len());
        let (done, receiver) = channel();
        done.send(Ok(numbers)).unwrap();
        receiver
    }

    fn next(&self, own: Option<Kind>) -> tunesmith::Result<Option<Kind>> {
        Ok(own)
    }
}

#[test]
fn the_next_segment_is_asked_for_while_one_is_at_work_and_a_pass_that_breaks_off_asks_for_the_same() {
    for (stays, asked_for) in [(false, &[10, 20, 30, 40, 30, 20][..]), (true, &[10, 20, 30, 40])] {
        let asked = Asked::default();
        let mut shards = Shards::new(Box::new(asked.clone()), stays);
        for length in [10, 20, 30, 40] {
            let mut weight = Weight::frozen(vec![length as f32; length], Device::Cpu);
            shards.push(vec![&mut weight], &mut Params::default());
        }
        // Segments 0 to 3, where the last is turned around in, and down to 1.
        shards.set_route(vec![0, 1, 2, 3], &[2, 1]);
        let route = [0, 1, 2, 3, 2, 1];
        for breaks_off in 0..=route.len() {
            asked.0.lock().unwrap().clear();
            shards.begin(Kind::Train).unwrap();
            for (at, &segment) in route.iter().enumerate().take(breaks_off) {
                shards.reach(segment, Floats::default()).unwrap();
                let ahead = asked_for.len().min(at + 2);
                assert_eq!(*asked.0.lock().unwrap(), asked_for[..ahead], "one ahead at {at}, {stays}");
                let together = if stays { 10 + 20 + 30 + 40 } else { 40 };
                assert!(shards.held_bytes() <= 4 * together, "at {at}: {}", shards.held_bytes());
            }
            let mut left = Vec::new();
            let mut leave = |segment| {
                left.push(segment);
                Ok(())
            };
            shards.end(Floats::default(), &mut leave).unwrap();
            let expected = [None, Some(2), Some(1)];
            assert_eq!(left, expected[breaks_off.saturating_sub(4).min(2)..], "broken off at {breaks_off}");
            assert_eq!(*asked.0.lock().unwrap(), asked_for, "broken off at {breaks_off}, {stays}");
            assert_eq!(shards.held_bytes(), 0);
        }
    }
}

#[test]
fn ranks_with_more_and_with_fewer_passes_wait_for_nobody_in_vain() {
    let config = config("llama", |_| {});
    let batch = Forward::read("llama").batch();
    let unlabelled = Batch { targets: vec![IGNORE; batch.targets.len()], ..batch.clone() };
    let mut whole = load("llama", &config, None);
    let expected = said(&mut whole, &batch);
    let found = on_ranks(&[3], &config, |gatherer, comm| {
        let mut model = load("llama", &config, Some(gatherer));
        model.params.zero_grads();
        // Ranks 0, 1 and 2 train on 0, 1 and 2 batches, one of which has no labels.
        let rank = comm.world().rank;
        let mut losses = Vec::new();
        for batch in [&batch, &unlabelled].into_iter().take(rank) {
            losses.push(model.forward_backward(batch, 0.25, 1.0, 0).unwrap());
        }
        model.stand_by().unwrap();
        // The last has nothing to evaluate.
        for _ in rank..2 {
            losses.push(model.token_losses(&batch).unwrap().into_iter().map(f64::from).sum());
        }
        model.stand_by().unwrap();
        comm.barrier().unwrap();
        losses
    });
    let evaluated: f64 = expected.2.iter().copied().map(f64::from).sum();
    assert_eq!(found, [vec![evaluated; 2], vec![expected.0, evaluated], vec![expected.0, 0.0]]);
}

#[test]
fn a_rank_that_is_lost_ends_a_pass_of_the_others_and_passes_of_two_kinds_are_told() {
    let config = config("llama", |_| {});
    let batch = Forward::read("llama").batch();
    let kinds = on_ranks(&[3], &config, |gatherer, comm| {
        let mut model = load("llama", &config, Some(gatherer));
        if comm.world().rank == 2 {
            return None;
        }
        Some(model.forward_backward(&batch, 1.0, 1.0, 0).unwrap_err().kind())
    });
    assert_eq!(kinds, [Some(tunesmith::Kind::Peer), Some(tunesmith::Kind::Peer), None]);
    let errors = on_ranks(&[2], &config, |gatherer, comm| {
        let mut model = load("llama", &config, Some(gatherer));
        match comm.world().rank {
            0 => model.forward_backward(&batch, 1.0, 1.0, 0).unwrap_err(),
            _ => model.token_losses(&batch).unwrap_err(),
        }
    });
    assert!(
        errors.iter().all(|error| error.message().contains("1 rank is at an evaluation, 1 rank is at a training step")),
        "{errors:?}"
    );
}

/// The value of `key` in each line of a run's metrics that has it, as text: equal to the last bit.
fn curve(fixture: &Fixture, out: &str, key: &str) -> Vec<String> {
    let text = std::fs::read_to_string(fixture.path(out).join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let of =
        |line: &serde_json::Value| line.get(key).or_else(|| line.get("eval_scores")?.get(key)).map(ToString::to_string);
    lines.filter_map(|line| of(&line)).collect()
}

#[test]
fn a_run_with_shared_weights_is_that_with_copies_to_the_bit() {
    let fixture = Fixture::new();
    // 22 rows by 4 or 8 a step: the last step of an epoch has nothing for some ranks, and neither has a validation of 3 batches.
    let extra = [
        "train.max_steps: 7",
        "data.max_rows: 22",
        "train.grad_accum: 1",
        "train.eval_strategy: steps",
        "train.eval_steps: 3",
        "train.eval_batch_size: 2",
        "train.eval_on_start: true",
        "train.predict_with_generate: true",
        "train.generation_rows: 3",
        "train.generation_max_new_tokens: 3",
        "gen.num_samples: 2",
        "gen.max_new_tokens: 3",
    ];
    let cases: [(&str, &[&str]); 4] = [
        ("tokens", &["train.dp_ranks=2", "tuning.new_tokens=[\"<one>\", \"<two>\"]", "model.dtype=bfloat16"]),
        ("two", &["train.dp_ranks=2", "tuning.mode=lora"]),
        ("four", &["train.dp_ranks=4", "model.quantization=nf4"]),
        ("dora", &["train.dp_ranks=2", "tuning.lora.use_dora=true", "train.bf16=true"]),
    ];
    for (name, words) in cases {
        let config = fixture.config(name, &extra);
        let run = |out: &str, strategy: &[&str]| {
            let to = format!("train.output_dir={}", fixture.path(out).display());
            let output = train(&config, &[&[&*to], words, strategy].concat());
            assert!(output.status.success(), "{}", said_by(&output));
        };
        let (copies, shares) = (format!("{name}-copies"), format!("{name}-shares"));
        run(&copies, &["train.strategy=dp"]);
        let how: &[&str] = match name {
            "two" | "tokens" => &["train.strategy=zero3"],
            "four" => &["train.strategy=fsdp"],
            _ => &["train.strategy=fsdp", "train.fsdp_sharding_strategy=shard_grad_op"],
        };
        run(&shares, how);
        for key in ["loss", "grad_norm", "eval_loss", "exact_match", "rougeL"] {
            assert_eq!(curve(&fixture, &copies, key), curve(&fixture, &shares, key), "{name}: {key}");
        }
        assert_eq!(curve(&fixture, &shares, "loss").len(), 7);
        assert!(!curve(&fixture, &shares, "exact_match").is_empty(), "answers were scored");
        let adapter = |out: &str| std::fs::read(fixture.path(out).join("adapter/adapter_model.safetensors")).unwrap();
        assert!(adapter(&copies) == adapter(&shares), "{name}: the adapter");
        assert!(fixture.path(&shares).join("report.html").exists());
    }
}
