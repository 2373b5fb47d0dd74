//! Ranks that share the optimizer's state and the gradients: the bits of copies, the curve of one process, checkpoints that
//! any number of ranks goes on from.
use std::path::Path;

use tunesmith::checkpoint;
use tunesmith::comm::single::Single;
use tunesmith::comm::{Collectives, Limits, Partition, World, threads};
use tunesmith::config::{Config, Optim, Strategy, TrainConfig, load_text};
use tunesmith::data::batch::{Batch, Example, IGNORE};
use tunesmith::model::Model;
use tunesmith::optim::State;
use tunesmith::plan::memory::{Device, Job, Pass, Predictor, Storage};
use tunesmith::plan::strategies::{self, Machine, Way};
use tunesmith::train::step::{Attempt, StepStats, attempt};
use tunesmith::train::{budget, optimizer};

use super::ends::metrics;
use super::fixture::{Fixture, model_config, said, train};
use super::ranks::{apart, curve, launch};
use super::resume::{assert_same_ending, go, timeless};
use crate::comm::gloo_is_there;

const END: u64 = u64::MAX;

/// A run in this process under `name`, with these words.
fn run(fixture: &Fixture, config: &Path, name: &str, words: &[&str], stop_at: u64) -> bool {
    let to = format!("train.output_dir={}", fixture.path(name).display());
    go(config, &[&[&*to], words].concat(), stop_at)
}

fn ranks(strategy: &str, count: usize, accumulation: usize) -> Vec<String> {
    vec![
        format!("train.strategy={strategy}"),
        format!("train.dp_ranks={count}"),
        format!("train.grad_accum={accumulation}"),
    ]
}

fn words(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

/// Copies, and shares of them, on threads: files and metrics are the same to the bit.
fn copies_and_shares(extra: &[&str], count: usize, accumulation: usize) {
    let fixture = Fixture::new();
    let mut lines = vec![
        "train.max_steps: 5",
        // The last step of an epoch is short: some ranks have nothing to do.
        "data.max_rows: 22",
        "train.save_strategy: steps",
        "train.save_steps: 2",
        "train.eval_strategy: steps",
        "train.eval_steps: 2",
        "train.replica_check_steps: 1",
    ];
    lines.extend(extra);
    let config = fixture.config("run", &lines);
    let go = |name: &str, strategy: &str, more: &[&str]| {
        let ranks = ranks(strategy, count, accumulation);
        assert!(run(&fixture, &config, name, &[&words(&ranks), more].concat(), END));
    };
    let same = |one: &str, other: &str| {
        for step in [2, 4, 5] {
            assert_same_ending(&fixture.path(one), &fixture.path(other), step, false);
        }
    };
    go("copies", "dp", &[]);
    go("zero1", "zero1", &[]);
    same("copies", "zero1");
    go("zero2", "zero2", &[]);
    if accumulation > 1 {
        go("in order", "dp", &["train.reduce_every_pass=true"]);
        same("in order", "zero2");
    } else {
        same("copies", "zero2");
    }
    let how = ["train.strategy=fsdp", "train.fsdp_sharding_strategy=shard_grad_op"];
    go("zero3", "zero3", if accumulation > 1 { &how } else { &[] });
    same("zero2", "zero3");
}

#[test]
fn shares_have_the_bits_of_copies() {
    copies_and_shares(&[], 2, 1);
    copies_and_shares(&[], 4, 2);
    copies_and_shares(&["tuning.mode: qlora"], 2, 2);
    copies_and_shares(&["tuning.mode: full", "train.learning_rate: 0.002"], 3, 1);
    let narrow = ["tuning.mode: full", "train.learning_rate: 0.002", "train.grad_dtype: bfloat16"];
    copies_and_shares(&narrow, 3, 1);
    copies_and_shares(&narrow, 2, 2);
}

#[test]
fn gradients_in_bfloat16_are_summed_over_ranks_in_float32_and_rounded_once() {
    let fixture = Fixture::new();
    // A step of plain descent: the change of the weights is the gradient, of which each rank has a part.
    let lines = [
        "tuning.mode: full",
        "train.max_steps: 1",
        "train.warmup_steps: 0",
        "train.lr_scheduler_type: constant",
        "train.learning_rate: 1.0",
        "train.optim: sgd",
        "train.weight_decay: 0.0",
        "train.max_grad_norm: 0.0",
        "train.grad_accum: 1",
        "train.batch_size: 3",
    ];
    let config = fixture.config("run", &lines);
    let read = |path: &Path| {
        let bytes = std::fs::read(path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut names = file.names();
        names.sort_unstable();
        let floats = |name: &&str| file.tensor(name).unwrap().data().to_vec();
        let all: Vec<u8> = names.iter().flat_map(floats).collect();
        all.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<f32>>()
    };
    let before = read(&fixture.path("model/model.safetensors"));
    let gradient = |name: &str, more: &[&str]| -> Vec<f32> {
        assert!(run(&fixture, &config, name, &[&words(&ranks("dp", 3, 1)), more].concat(), END));
        let after = read(&fixture.path(name).join("model/model.safetensors"));
        before.iter().zip(after).map(|(before, after)| before - after).collect()
    };
    let (wide, narrow) = (gradient("wide", &[]), gradient("narrow", &["train.grad_dtype=bfloat16"]));
    assert_eq!(wide.len(), narrow.len());
    let mut moved = 0;
    for (wide, narrow) in wide.iter().zip(&narrow) {
        // Half a unit of the last of eight bits (a rank that rounded its part would be further off where parts cancel out),
        // and the rounding of the weights themselves.
        let most = wide.abs() / 512.0 * 1.01 + 2e-7;
        assert!((wide - narrow).abs() <= most, "{wide} {narrow}");
        moved += usize::from((wide - narrow).abs() > 2e-7);
    }
    assert!(moved > wide.len() / 8, "{moved} of {} were rounded", wide.len());
}

#[test]
fn shares_of_every_optimizer_and_of_averages_have_the_bits_of_copies() {
    copies_and_shares(&["train.optim: adamw_8bit", "tuning.mode: full", "train.ema_decay: 0.8"], 3, 1);
    copies_and_shares(&["train.optim: schedule_free_adamw", "train.lr_scheduler_type: constant_with_warmup"], 3, 2);
    copies_and_shares(&["train.optim: muon", "tuning.mode: full"], 2, 1);
    copies_and_shares(&["train.optim: adafactor"], 2, 1);
    copies_and_shares(&["train.optim: lion", "train.learning_rate: 0.001"], 4, 1);
    copies_and_shares(&["train.optim: sgd", "train.optim_args: momentum=0.9"], 2, 1);
    // Overflows at the first steps: skipped alike on all ranks.
    copies_and_shares(&["train.fp16: true", "train.initial_scale_power: 40"], 2, 1);
    copies_and_shares(&["tuning.mode: freeze", "tuning.freeze.trainable_layers: 1"], 2, 1);
}

/// Losses and norms of `steps` steps under each strategy against those of one process with the same rows a step.
fn curves(steps: u64, modes: &[(&str, &[&str])], worlds: &[usize], accumulations: &[usize], processes: bool) {
    for (mode, lines) in modes {
        for &accumulation in accumulations {
            for &count in worlds {
                let fixture = Fixture::new();
                let steps = format!("train.max_steps: {steps}");
                let mut extra = vec![&*steps, "data.max_rows: 22", "train.learning_rate: 0.003"];
                extra.extend(*lines);
                let config = fixture.config("run", &extra);
                let one = format!("train.grad_accum={}", accumulation * count);
                assert!(run(&fixture, &config, "one", &[&one], END));
                let mut found = Vec::new();
                for strategy in ["dp", "zero1", "zero2", "zero3", "fsdp"] {
                    assert!(run(&fixture, &config, strategy, &words(&ranks(strategy, count, accumulation)), END));
                    found.push(strategy.to_owned());
                }
                if processes && gloo_is_there() {
                    for strategy in ["ddp", "zero1", "zero2", "zero3", "fsdp"] {
                        let name = format!("{strategy} over gloo");
                        let to = format!("train.output_dir={}", fixture.path(&name).display());
                        let strategy = format!("train.strategy={strategy}");
                        let accumulation = format!("train.grad_accum={accumulation}");
                        let output =
                            launch(&config, count, &[&to, &strategy, &accumulation]).wait_with_output().unwrap();
                        assert!(output.status.success(), "{}", said(&output));
                        found.push(name);
                    }
                }
                for name in found {
                    for key in ["loss", "grad_norm"] {
                        let difference = apart(&curve(&fixture.path("one"), key), &curve(&fixture.path(&name), key));
                        println!("{mode}, {count} ranks, accumulation {accumulation}, {name}: {key} {difference:.1e}");
                        // A norm is no loss: it grows with each value's last bits.
                        let most = if key == "loss" { 1e-5 } else { 1e-4 };
                        assert!(difference < most, "{mode}, {count} x {accumulation}, {name}: {key} {difference:e}");
                    }
                    let tokens = |name: &str| curve(&fixture.path(name), "tokens");
                    assert_eq!(tokens("one"), tokens(&name), "every row once");
                }
            }
        }
    }
}

const MODES: [(&str, &[&str]); 3] = [
    ("lora", &[]),
    ("qlora", &["tuning.mode: qlora"]),
    ("full", &["tuning.mode: full", "train.learning_rate: 0.0005"]),
];

#[test]
fn strategies_have_the_curve_of_one_process() {
    curves(8, &MODES[..1], &[2], &[4], true);
    curves(8, &MODES[1..], &[4], &[1], false);
}

/// `just rank-curves`.
#[test]
#[ignore = "minutes"]
fn strategies_have_the_curve_of_one_process_over_fifty_steps() {
    assert!(gloo_is_there(), "this test is asked for by name");
    curves(50, &MODES, &[2, 4], &[1, 4], true);
}

#[test]
fn a_checkpoint_of_shares_is_gone_on_from_by_any_number_of_ranks_under_any_strategy() {
    let fixture = Fixture::new();
    // 22 rows by 8 a step: the stop is within an epoch whose last step is short.
    let extra = ["train.max_steps: 9", "data.max_rows: 22", "train.ema_decay: 0.9", "train.learning_rate: 0.003"];
    let config = fixture.config("run", &extra);
    let resume = "train.resume_from_checkpoint=latest";
    assert!(run(&fixture, &config, "one", &["train.grad_accum=4"], END));
    assert!(run(&fixture, &config, "straight", &words(&ranks("zero1", 2, 2)), END));
    // At the same number of ranks to the bit, under another strategy too.
    assert!(!run(&fixture, &config, "same", &words(&ranks("zero1", 2, 2)), 4));
    assert!(!run(&fixture, &config, "same", &[&words(&ranks("dp", 2, 2))[..], &[resume]].concat(), 5));
    assert!(run(&fixture, &config, "same", &[&words(&ranks("zero1", 2, 2))[..], &[resume]].concat(), END));
    assert_same_ending(&fixture.path("straight"), &fixture.path("same"), 9, false);
    // Saved by 4, gone on from by 1, 2 and 4.
    assert!(!run(&fixture, &config, "shares of gradients", &words(&ranks("zero2", 4, 1)), 4));
    assert!(!run(&fixture, &config, "four", &words(&ranks("zero3", 4, 1)), 4));
    for name in ["adapter_model.safetensors", "optimizer.safetensors"] {
        let read = |run: &str| std::fs::read(fixture.path(run).join("checkpoint-000004").join(name)).unwrap();
        assert!(read("shares of gradients") == read("four"), "{name}: what ranks put together");
    }
    let saved = fixture.path("four/checkpoint-000004");
    for (name, ranks) in [
        ("single", vec!["train.grad_accum=4".to_owned()]),
        ("dp2", ranks("dp", 2, 2)),
        ("zero1 of 2", ranks("zero1", 2, 2)),
        ("zero2 of 4", ranks("zero2", 4, 1)),
        ("zero3 of 2", ranks("zero3", 2, 2)),
        ("fsdp of 4", ranks("fsdp", 4, 1)),
    ] {
        let from = format!("train.resume_from_checkpoint={}", saved.display());
        assert!(run(&fixture, &config, name, &[&words(&ranks)[..], &[&*from]].concat(), END));
        for key in ["loss", "grad_norm"] {
            let rest = &curve(&fixture.path("one"), key)[4..];
            let difference = apart(rest, &curve(&fixture.path(name), key));
            assert!(difference < 1e-4, "{name}: {key} {difference:e}");
        }
        let tokens = |name: &str| curve(&fixture.path(name), "tokens");
        assert_eq!(tokens("one")[4..], tokens(name), "{name}: the rows of an epoch that are left");
    }
}

/// Two segments' worth of a tiny model, and rows of it.
fn tiny(text: &str) -> (Config, impl Fn() -> Model, Vec<Batch>) {
    let fixture = Fixture::new();
    let config = load_text(Path::new("case"), text).unwrap().config;
    let arch = tunesmith::config::arch::Arch::from_dir(&fixture.path("model")).unwrap();
    let built = config.clone();
    let load = move || Model::load(&arch, None, &built).unwrap();
    let rows = |batch: usize| {
        let example = |row: usize| {
            let input_ids: Vec<u32> = (0..9 + row).map(|at| ((batch * 53 + row * 31 + at * 17) % 256) as u32).collect();
            let labels = input_ids.iter().map(|&id| if id % 5 == 0 { IGNORE } else { id as i32 }).collect();
            Example { input_ids, labels }
        };
        Batch::from_examples(&[example(0), example(3)])
    };
    (config, load, (0..8).map(rows).collect())
}

/// Steps of `count` ranks as threads, in messages of `bucket` bytes; batch `i` of a step is rank `i % count`'s. What each
/// rank has at the end: its last statistics, its values, and its state as one.
fn steps(
    (config, load, batches): &(Config, impl Fn() -> Model + Sync, Vec<Batch>),
    strategy: (Strategy, bool),
    count: usize,
    bucket: usize,
    passes: usize,
) -> Vec<(StepStats, Vec<f32>)> {
    let train = TrainConfig { strategy: strategy.0, reduce_every_pass: strategy.1, ..config.train.clone() };
    let config = Config { train, ..config.clone() };
    let work = |comm: &dyn Collectives| {
        let mut model = load();
        let world = comm.world();
        let (mut optimizer, mut sharing) = optimizer::shared(&config, &mut model.params, world).unwrap();
        let mut last = None;
        for step in 0..4 {
            // The last step has one batch less: some rank has nothing to do, or less.
            let all = (0..passes - usize::from(step == 3)).map(|at| batches[(at + step) % batches.len()].clone());
            let own: Vec<Batch> =
                all.enumerate().filter(|(at, _)| at % world.size == world.rank).map(|(_, batch)| batch).collect();
            match attempt(&mut model, &mut optimizer, (comm, &mut sharing), &own, 0.01, 0.5).unwrap() {
                Attempt::Done(stats) => last = Some(stats),
                Attempt::TooLarge { error, .. } => panic!("{error}"),
            }
        }
        (last.unwrap(), model.params.values().to_vec())
    };
    if count == 1 {
        return vec![work(&Single)];
    }
    let limits = Limits { bucket, ..Limits::default() };
    std::thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> =
            threads::world(count, limits).into_iter().map(|rank| scope.spawn(move || work(&rank))).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn neither_the_strategy_nor_the_size_of_messages_moves_a_bit() {
    for text in
        ["tuning: {mode: full}", "tuning: {lora: {r: 4}}", "{tuning: {lora: {r: 4}}, train: {optim: adamw_8bit}}"]
    {
        let case = tiny(text);
        for (count, passes) in [(2, 2), (3, 3), (2, 5), (4, 8)] {
            let one = steps(&case, (Strategy::Ddp, false), 1, 0, passes);
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            let mut expected: Option<[_; 2]> = None;
            for bucket in [25 << 20, 9000, 1300] {
                let of = |strategy, every_pass| {
                    let all = steps(&case, (strategy, every_pass), count, bucket, passes);
                    let rank_0 = &all[0];
                    for rank in &all {
                        assert!(bits(&rank.1) == bits(&rank_0.1), "{text}: ranks differ");
                        assert_eq!((rank.0.loss, rank.0.grad_norm), (rank_0.0.loss, rank_0.0.grad_norm));
                    }
                    (bits(&rank_0.1), rank_0.0.loss.to_bits(), rank_0.0.grad_norm.to_bits())
                };
                let once = of(Strategy::Ddp, false);
                assert!(of(Strategy::Zero1, false) == once, "{text}, {count} ranks: zero1");
                let every = of(Strategy::Zero2, false);
                assert!(of(Strategy::Ddp, true) == every, "{text}, {count} ranks: zero2");
                if passes == count {
                    assert!(once == every, "{text}: one pass a rank is one sum");
                }
                let found = [once, every];
                assert!(*expected.get_or_insert(found.clone()) == found, "{text}: messages of {bucket} bytes");
            }
            let [once, every] = expected.unwrap();
            for (_, loss, norm) in [once, every] {
                let relative = |one: f64, other: u64| ((f64::from_bits(other) - one) / one).abs();
                assert!(relative(one[0].0.loss, loss) < 1e-5 && relative(one[0].0.grad_norm, norm) < 1e-4, "{text}");
            }
        }
    }
}

#[test]
fn a_rank_that_fails_while_sums_go_on_ends_the_others() {
    let case = tiny("tuning: {mode: full}");
    for strategy in [Strategy::Ddp, Strategy::Zero2] {
        let limits = Limits { bucket: 4000, ..Limits::default() };
        let errors: Vec<tunesmith::Error> = std::thread::scope(|scope| {
            let case = &case;
            let work = move |comm: threads::Threads| {
                let (config, load, batches) = case;
                let mut model = load();
                let train = TrainConfig { strategy, ..config.train.clone() };
                let config = Config { train, ..config.clone() };
                let (mut optimizer, mut sharing) = optimizer::shared(&config, &mut model.params, comm.world()).unwrap();
                let mut own = vec![batches[0].clone(), batches[1].clone()];
                if comm.world().rank == 1 {
                    own[1].tokens[0] = 1 << 20;
                }
                attempt(&mut model, &mut optimizer, (&comm, &mut sharing), &own, 0.01, 0.5).unwrap_err()
            };
            let running: Vec<_> =
                threads::world(3, limits).into_iter().map(|rank| scope.spawn(move || work(rank))).collect();
            running.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let kinds: Vec<_> = errors.iter().map(tunesmith::Error::kind).collect();
        assert_eq!(kinds, [tunesmith::Kind::Peer, tunesmith::Kind::Data, tunesmith::Kind::Peer], "{errors:?}");
        for error in [&errors[0], &errors[2]] {
            assert!(error.message().contains("rank 1 has ended"), "{error}");
        }
    }
}

#[test]
fn shares_of_a_checkpoint_put_together_are_the_whole() {
    let fixture = Fixture::new();
    let extra = ["tuning.mode: full", "train.optim: adamw_8bit", "train.ema_decay: 0.5", "train.max_steps: 3"];
    let config = fixture.config("run", &extra);
    assert!(run(&fixture, &config, "four", &words(&ranks("zero2", 4, 1)), END));
    let saved = checkpoint::load(&fixture.path("four/checkpoint-000003")).unwrap();
    let arch = tunesmith::config::arch::Arch::from_dir(&fixture.path("model")).unwrap();
    let train = TrainConfig { optim: Optim::AdamW8bit, ema_decay: Some(0.5), ..TrainConfig::default() };
    let mut config = load_text(Path::new("case"), "tuning: {mode: full}").unwrap().config;
    config.train = train;
    let restored = |world: World, strategy| {
        let config = Config { train: TrainConfig { strategy, ..config.train.clone() }, ..config.clone() };
        let mut model = Model::load(&arch, None, &config).unwrap();
        let (mut optimizer, sharing) = optimizer::shared(&config, &mut model.params, world).unwrap();
        let mut ema = optimizer::average(&config, &model.params, &sharing);
        let specs = model.params.specs.clone();
        saved.restore(&specs, model.params.values_mut(), &mut optimizer, ema.as_mut()).unwrap();
        (model.params.values().to_vec(), optimizer, ema.unwrap(), sharing.partition)
    };
    let whole = restored(World::ALONE, Strategy::Single);
    for size in [2, 3] {
        for (strategy, shares) in [(Strategy::Zero1, true), (Strategy::Ddp, false)] {
            let ranks: Vec<_> =
                (0..size).map(|rank| restored(World { rank, size, ..World::ALONE }, strategy)).collect();
            for tensor in whole.1.state() {
                let mut numbers = vec![f64::NAN; tensor.spec.count()];
                for (_, optimizer, ..) in ranks.iter().take(if shares { size } else { 1 }) {
                    for (range, state) in optimizer.owned(&tensor) {
                        let own: Vec<f64> = match state {
                            State::F32(values) => values.iter().map(|&value| f64::from(value)).collect(),
                            State::U8(values) => values.iter().map(|&value| f64::from(value)).collect(),
                        };
                        numbers[range].copy_from_slice(&own);
                    }
                }
                let (_, state) = whole.1.owned(&tensor).next().unwrap();
                let expected: Vec<f64> = match state {
                    State::F32(values) => values.iter().map(|&value| f64::from(value)).collect(),
                    State::U8(values) => values.iter().map(|&value| f64::from(value)).collect(),
                };
                assert!(numbers == expected, "{} of {size}", tensor.name);
            }
            for (rank, (values, _, ema, partition)) in ranks.iter().enumerate() {
                assert!(*values == whole.0);
                let own = if shares { partition.owned(rank) } else { Partition::alone(values.len()).owned(0) };
                assert_eq!(ema.owned(), own);
                let expected: Vec<f32> = own.into_iter().flat_map(|range| whole.2.values[range].to_vec()).collect();
                assert!(ema.values == expected);
            }
        }
    }
}

#[test]
fn what_cannot_be_shared_so_is_refused_and_a_timeline_is_told() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 2", "tuning.mode: full"]);
    let refused = |words: &[&str]| {
        let output = train(&config, words);
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        said(&output)
    };
    assert!(refused(&["train.strategy=zero1", "train.reduce_every_pass=true"]).contains("that is strategy: zero2"));
    assert!(refused(&["train.strategy=ddp", "train.dp_ranks=2"]).contains("train.dp_ranks"));
    let zero2 = ["train.strategy=zero2", "train.dp_ranks=2", "train.grad_accum=1", "logging.timeline_step=2"];
    let output = train(&config, &zero2);
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("zero2: 2 ranks as threads of one process"), "{text}");
    assert!(text.contains("step 2, rank 0: ") && text.contains("segment 2, ") && text.contains("values"), "{text}");
    let alone = train(&config, &["train.strategy=zero1", "--overwrite"]);
    assert!(alone.status.success(), "{}", said(&alone));
    assert_eq!(metrics(&fixture.path("out")).0.len(), timeless(&fixture.path("out")).len());
}

/// The most bytes that a run's process held, as its summary says.
fn held(text: &str) -> f64 {
    let line = text.lines().find(|line| line.trim_start().starts_with("memory held")).expect("a summary");
    let words: Vec<&str> = line.split_whitespace().collect();
    let at = words.iter().position(|&word| word == "at").unwrap();
    let unit = f64::from(1 << if words[at - 1] == "MiB" { 20 } else { 30 });
    words[at - 2].parse::<f64>().unwrap() * unit
}

#[test]
fn a_rank_holds_what_the_plan_says() {
    let fixture = Fixture::new();
    // Values, gradients and state are most of it: 3 million numbers, in segments of which none is much larger than others.
    let mut shape = model_config();
    for (key, value) in [("hidden_size", 256), ("intermediate_size", 512), ("num_hidden_layers", 6)] {
        shape[key] = serde_json::json!(value);
    }
    std::fs::write(fixture.path("model/config.json"), shape.to_string()).unwrap();
    let lines = [
        "model.init: random",
        "tuning.mode: full",
        "train.batch_size: 1",
        "train.max_steps: 2",
        "train.num_threads: 1",
        "train.ddp_bucket_cap_mb: 1",
        "logging.report: false",
        "logging.tensorboard: false",
    ];
    let path = fixture.config("run", &lines);
    let config = tunesmith::config::load(&path, &[], &[], &[]).unwrap().config;
    let arch = tunesmith::config::arch::Arch::from_dir(&fixture.path("model")).unwrap();
    let job = budget::job(&config, &arch, Storage::F32, None).unwrap();
    let narrow = Predictor::new(Job { narrow_gradients: true, ..job.clone() }, Device::Cpu);
    let wide = Predictor::new(job, Device::Cpu);
    let pass = Pass { tokens: 20, longest: 20, labelled: 10 };
    for (predictor, ranks, kept) in [(&wide, 2, "float32"), (&wide, 4, "float32"), (&narrow, 2, "bfloat16")] {
        for (strategy, planned) in [
            ("dp", strategies::Strategy::Ddp),
            ("zero1", strategies::Strategy::Zero1),
            ("zero2", strategies::Strategy::Zero2),
        ] {
            let machine = Machine { device: Device::Cpu, ranks, memory: u64::MAX };
            let way = Way { strategy: planned, offload_optimizer: false, offload_weights: false };
            let rank = strategies::rank(predictor, &machine, way, &pass);
            // The program's own memory is not the allocator's.
            let predicted = (ranks * (rank.total() - rank.program)) as f64;
            let (strategy, count) = (format!("train.strategy={strategy}"), format!("train.dp_ranks={ranks}"));
            let kept = format!("train.grad_dtype={kept}");
            let output = train(&path, &[&strategy, &count, &kept, "--overwrite"]);
            let text = said(&output);
            assert!(output.status.success(), "{text}");
            let ratio = held(&text) / predicted;
            println!(
                "{strategy}, {ranks} ranks, {kept}: {:.1} MiB held, {ratio:.3} of the plan",
                held(&text) / f64::from(1 << 20)
            );
            assert!((0.9..1.1).contains(&ratio), "{strategy}, {ranks} ranks, {kept}: {ratio:.3} of {rank:?}");
        }
    }
}
