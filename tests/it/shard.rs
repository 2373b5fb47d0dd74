//! Weights that ranks share: the same numbers to the bit as with all weights everywhere, whatever each rank has to do, and
//! a part of the bytes.
use tunesmith::comm::threads::{self, Threads};
use tunesmith::comm::{Collectives, Limits};
use tunesmith::config::arch::Arch;
use tunesmith::config::{Config, Dtype, Mode, Quantization, Sharding, Strategy};
use tunesmith::data::batch::{Batch, IGNORE};
use tunesmith::model::Model;
use tunesmith::model::stack::Stack;
use tunesmith::model::weights::WeightFiles;
use tunesmith::train::shard::Gatherer;

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
    let dir = golden(family).join("model");
    let arch = Arch::from_dir(&dir).unwrap();
    let weights = WeightFiles::open(&dir, &arch.tensors()).unwrap();
    let mut model = match gatherer {
        Some(gatherer) => {
            Model::load_shared(&arch, Some(&weights), config, &Stack::default(), None, gatherer.shards()).unwrap()
        }
        None => Model::load(&arch, Some(&weights), config).unwrap(),
    };
    if config.tuning.mode == Mode::Lora {
        put(&mut model, &tensors(&golden(family).join("adapter_init/adapter_model.safetensors")));
    }
    model
}

/// What `work` finds on each rank of a world of threads on machines of such sizes, whose weights are shared as `config` says.
fn on_ranks<T: Send>(
    machines: &[usize],
    config: &Config,
    work: impl Fn(&Gatherer, &dyn Collectives) -> T + Sync,
) -> Vec<T> {
    let run = |rank: Threads| {
        let gatherer = Gatherer::new(&config.train, &rank).unwrap();
        work(&gatherer.expect("several ranks share"), &rank)
    };
    let run = &run;
    std::thread::scope(|scope| {
        let ranks = threads::machines(machines, Limits::default()).into_iter();
        let running: Vec<_> = ranks.map(|rank| scope.spawn(move || run(rank))).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Everything that a model says of a batch: loss and gradients, losses token by token, logits, and what comes next.
fn said(model: &mut Model, batch: &Batch) -> (f64, Vec<f32>, Vec<f32>, Vec<f32>, Vec<f32>) {
    model.params.zero_grads();
    let loss = model.forward_backward(batch, 0.25, 1.0, 0).unwrap();
    let grads = model.params.grads().to_vec();
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
    let cases: [Case<'_>; 12] = [
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
    ];
    for (family, base, how, machines) in cases {
        let mut config = config(family, base);
        config.train.fsdp_sharding_strategy = how;
        let batch = Forward::read(family).batch();
        let expected = said(&mut load(family, &config, None), &batch);
        let found = on_ranks(machines, &config, |gatherer, _| {
            let mut model = load(family, &config, Some(gatherer));
            let shards = model.shards().unwrap();
            let values = 4 * model.params.values().len();
            assert_eq!(shards.shares_trained(), how != Sharding::HybridShard);
            let own = shards.own_bytes() + if shards.shares_trained() { values } else { 0 };
            let all = shards.all_bytes() + if shards.shares_trained() { 4 * model.params.len() } else { 0 };
            let said = said(&mut model, &batch);
            assert_eq!(model.shards().unwrap().held_bytes(), 0, "nothing is together after a pass");
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
    assert!(errors.iter().all(|error| error.message().contains("1 ranks evaluate while 1 train")), "{errors:?}");
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
    let cases: [(&str, &[&str]); 3] = [
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
            "two" => &["train.strategy=zero3"],
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
