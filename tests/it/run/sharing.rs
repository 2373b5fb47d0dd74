//! Ranks that shard the optimizer's state and the gradients (ZeRO): they compute the same bits as DDP, have the losses of one
//! process, and write checkpoints that any number of ranks can resume.
use std::ops::Range;
use std::path::Path;

use tunesmith::checkpoint;
use tunesmith::comm::single::Single;
use tunesmith::comm::{Collectives, Limits, threads};
use tunesmith::config::{Config, Optim, Strategy, TrainConfig, load_text};
use tunesmith::data::batch::{Batch, Example, IGNORE};
use tunesmith::model::Model;
use tunesmith::model::stack::Stack;
use tunesmith::optim::{State, StateTensor, rule};
use tunesmith::parallel::fsdp::Gatherer;
use tunesmith::parallel::{ParallelPlan, optimizer};
use tunesmith::plan::memory::{Breakdown, Device, Job, Pass, Predictor, Storage};
use tunesmith::plan::strategies::{self, Machine, Way};
use tunesmith::train::memory_prediction;
use tunesmith::train::step::{Attempt, StepStats, attempt};

use super::ends::metrics;
use super::fixture::{Fixture, model_config, said, train};
use super::quantized::rank;
use super::ranks::{apart, curve, launch};
use super::resume::{assert_same_ending, go, timeless};
use crate::comm::gloo_is_there;
use crate::parity::optimizer_plan;

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

/// Checks that ranks as threads leave the same files and metrics, to the bit, whether they hold copies or shards.
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
        let most = wide.abs() / 256.0 + 2e-7;
        assert!((wide - narrow).abs() <= most, "{wide} {narrow}");
        moved += usize::from((wide - narrow).abs() > 2e-7);
    }
    assert!(moved > 100, "{moved} of {} were rounded", wide.len());
}

/// A rank of a machine with nothing to train on goes its way through the weights only with the others, which must not wait for
/// its gradients before: five blocks, so that it cannot be ahead of all of theirs.
#[test]
fn ranks_of_a_machine_that_share_weights_wait_for_nobody_in_vain() {
    let fixture = Fixture::new();
    let mut shape = model_config();
    shape["num_hidden_layers"] = serde_json::json!(5);
    std::fs::write(fixture.path("model/config.json"), shape.to_string()).unwrap();
    let lines = ["model.init: random", "train.max_steps: 6", "data.max_rows: 22", "train.ddp_timeout: 20"];
    for (name, more) in [("lora", "tuning.mode: lora"), ("full", "tuning.mode: full")] {
        let config = fixture.config(name, &[&lines[..], &[more]].concat());
        for (how, strategy) in [("zero2", "zero2"), ("hybrid_shard", "fsdp"), ("full_shard", "fsdp")] {
            let sharding = format!("train.fsdp_sharding_strategy={how}");
            let ranks = ranks(strategy, 2, 2);
            let mut all = words(&ranks);
            all.extend((strategy == "fsdp").then_some(&*sharding));
            assert!(run(&fixture, &config, &format!("{name}-{how}"), &all, END), "{name}, {how}");
            let file = if name == "lora" { "adapter/adapter_model.safetensors" } else { "model/model.safetensors" };
            let weights = |how: &str| std::fs::read(fixture.path(&format!("{name}-{how}")).join(file)).unwrap();
            assert!(weights("zero2") == weights(how), "{name}, {how}");
        }
    }
}

/// What `words` make of two ranks that are processes, each with a folder of its own.
fn apart_on_disk(config: &Path, outs: [&Path; 2], words: &[&str]) -> [std::process::Output; 2] {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |(number, out): (usize, &Path)| {
        let to = format!("train.output_dir={}", out.display());
        let words: Vec<String> = words.iter().copied().chain([&*to]).map(str::to_owned).collect();
        rank(number, port, config, &words)
    };
    [(0, outs[0]), (1, outs[1])].map(start).map(|child| child.wait_with_output().unwrap())
}

#[test]
fn the_first_rank_s_folder_is_enough_for_the_best_weights_and_a_resume_without_one_is_refused() {
    if !gloo_is_there() {
        return;
    }
    let fixture = Fixture::new();
    let lines = [
        "train.max_steps: 6",
        // The one evaluation is not of the last step.
        "train.final_eval: false",
        "train.learning_rate: 0.003",
        "train.lr_scheduler_type: constant",
        "train.warmup_steps: 0",
        "train.grad_accum: 1",
        "train.eval_strategy: steps",
        "train.eval_steps: 4",
        "train.save_strategy: steps",
        "train.save_steps: 4",
        "train.load_best_model_at_end: true",
        "train.ddp_bucket_cap_mb: 1",
    ];
    let weights = |out: &Path| {
        let file = ["adapter/adapter_model.safetensors", "model/model.safetensors"].map(|file| out.join(file));
        std::fs::read(file.iter().find(|file| file.exists()).unwrap()).unwrap()
    };
    for (mode, strategy) in [("lora", "fsdp"), ("full", "zero3")] {
        let mode_line = format!("tuning.mode: {mode}");
        let config = fixture.config(mode, &[&lines[..], &[&*mode_line]].concat());
        let seen = fixture.path(&format!("{mode}-seen"));
        let to = format!("train.output_dir={}", seen.display());
        let output = train(&config, &["train.strategy=dp", "train.dp_ranks=2", &to]);
        assert!(said(&output).contains("back to the best weights: step "), "{}", said(&output));
        assert!(output.status.success(), "{}", said(&output));
        let outs = [fixture.path(&format!("{mode}-0")), fixture.path(&format!("{mode}-1"))];
        let strategy = format!("train.strategy={strategy}");
        for output in apart_on_disk(&config, [&outs[0], &outs[1]], &[&strategy]) {
            assert!(output.status.success(), "{}", said(&output));
        }
        assert!(weights(&seen) == weights(&outs[0]), "{mode}: the best of all ranks' weights");
        assert!(!outs[1].exists(), "only the first rank writes");
        // To go on every rank needs the checkpoint.
        let more = [&*strategy, "--resume", "train.max_steps=8"];
        for output in apart_on_disk(&config, [&outs[0], &outs[1]], &more) {
            assert_eq!(output.status.code(), Some(5), "{}", said(&output));
            let told = "the checkpoint to resume is that of step 6 on rank 0 and none on rank 1";
            assert!(said(&output).contains(told), "{}", said(&output));
        }
        let saved = "checkpoint-000006";
        std::fs::create_dir_all(outs[1].join(saved)).unwrap();
        for entry in std::fs::read_dir(outs[0].join(saved)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), outs[1].join(saved).join(entry.file_name())).unwrap();
        }
        for output in apart_on_disk(&config, [&outs[0], &outs[1]], &more) {
            assert!(output.status.success(), "{}", said(&output));
        }
        assert_eq!(curve(&outs[0], "loss").len(), 8, "{mode}: with a copy it goes on");
    }
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
    copies_and_shares(&["train.fp16: true", "train.initial_scale_power: 21"], 2, 1);
    copies_and_shares(&["tuning.mode: freeze", "tuning.freeze.trainable_layers: 1"], 2, 1);
}

/// Losses and norms of `steps` steps under each strategy against those of one process with the same rows a step; and, at the
/// same number of ranks, those of shares against those of copies, to the bit.
fn curves(steps: u64, (mode, lines): &(&str, &[&str]), worlds: &[usize], accumulations: &[usize], processes: bool) {
    let mut most = 0f64;
    for (&accumulation, &count) in accumulations.iter().flat_map(|one| worlds.iter().map(move |other| (one, other))) {
        let fixture = Fixture::new();
        let steps = format!("train.max_steps: {steps}");
        let mut extra = vec![&*steps, "data.max_rows: 22", "train.learning_rate: 0.003"];
        extra.extend(*lines);
        let config = fixture.config("run", &extra);
        let one = format!("train.grad_accum={}", accumulation * count);
        assert!(run(&fixture, &config, "one", &[&one], END));
        let mut found = Vec::new();
        // In the fixed order, sums are made after every pass, as where gradients are shared.
        let in_order = "train.reduce_every_pass=true";
        for (name, strategy, more) in [
            ("dp", "dp", &[][..]),
            ("dp in order", "dp", &[in_order]),
            ("zero1", "zero1", &[]),
            ("zero2", "zero2", &[]),
            ("zero3", "zero3", &[]),
            ("fsdp", "fsdp", &["train.fsdp_sharding_strategy=shard_grad_op"]),
        ] {
            let ranks = ranks(strategy, count, accumulation);
            assert!(run(&fixture, &config, name, &[&words(&ranks), more].concat(), END));
            found.push((name.to_owned(), strategy, !more.contains(&in_order)));
        }
        if processes && gloo_is_there() {
            for (name, strategy, more) in [
                ("ddp over gloo", "ddp", &[][..]),
                ("ddp over gloo in order", "ddp", &[in_order]),
                ("zero1 over gloo", "zero1", &[]),
                ("zero2 over gloo", "zero2", &[]),
                ("zero3 over gloo", "zero3", &[]),
                ("fsdp over gloo", "fsdp", &[]),
            ] {
                let to = format!("train.output_dir={}", fixture.path(name).display());
                let how = format!("train.strategy={strategy}");
                let accumulation = format!("train.grad_accum={accumulation}");
                let words = [&[&*to, &*how, &*accumulation], more].concat();
                let output = launch(&config, count, &words).wait_with_output().unwrap();
                assert!(output.status.success(), "{}", said(&output));
                found.push((name.to_owned(), strategy, !more.contains(&in_order)));
            }
        }
        for (name, strategy, late) in found {
            for key in ["loss", "grad_norm"] {
                let difference = apart(&curve(&fixture.path("one"), key), &curve(&fixture.path(&name), key));
                println!("{mode}, {count} ranks, accumulation {accumulation}, {name}: {key} {difference:.1e}");
                // A norm is no loss: it grows with each value's last bits.
                let limit = if key == "loss" { 1e-5 } else { 1e-4 };
                assert!(difference < limit, "{mode}, {count} x {accumulation}, {name}: {key} {difference:e}");
                most = if key == "loss" { most.max(difference) } else { most };
                let same = if late && matches!(strategy, "dp" | "ddp" | "zero1") { "dp" } else { "dp in order" };
                let same = curve(&fixture.path(same), key) == curve(&fixture.path(&name), key);
                assert!(same, "{mode}, {count} x {accumulation}, {name}: {key} is not that of copies to the bit");
            }
            let tokens = |name: &str| curve(&fixture.path(name), "tokens");
            assert_eq!(tokens("one"), tokens(&name), "every row once");
        }
    }
    println!("{mode}: losses at most {most:.1e} from those of one process; shares and copies equal to the bit");
}

const LORA: (&str, &[&str]) = ("lora", &[]);
const QLORA: (&str, &[&str]) = ("qlora", &["tuning.mode: qlora"]);
const FULL: (&str, &[&str]) = ("full", &["tuning.mode: full", "train.learning_rate: 0.0005"]);

#[test]
fn strategies_have_the_curve_of_one_process() {
    curves(8, &LORA, &[2], &[4], true);
    curves(8, &QLORA, &[4], &[1], false);
}

/// `just rank-curves`.
#[test]
#[ignore = "minutes"]
fn strategies_have_the_curve_of_one_process_over_fifty_steps_of_lora() {
    assert!(gloo_is_there(), "this test is asked for by name");
    curves(50, &LORA, &[2, 4], &[1, 4], true);
}

/// `just rank-curves`.
#[test]
#[ignore = "minutes"]
fn strategies_have_the_curve_of_one_process_over_fifty_steps_of_qlora() {
    assert!(gloo_is_there(), "this test is asked for by name");
    curves(50, &QLORA, &[2, 4], &[1, 4], true);
}

/// `just rank-curves`.
#[test]
#[ignore = "minutes"]
fn strategies_have_the_curve_of_one_process_over_fifty_steps_of_full() {
    assert!(gloo_is_there(), "this test is asked for by name");
    curves(50, &FULL, &[2, 4], &[1, 4], true);
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
    // Saved by one and by two, gone on from by more.
    assert!(!run(&fixture, &config, "alone", &["train.grad_accum=4"], 4));
    assert!(!run(&fixture, &config, "pair", &words(&ranks("zero1", 2, 2)), 4));
    for (saved, name, ranks) in [
        ("alone", "by 2", ranks("zero2", 2, 2)),
        ("alone", "by 4", ranks("dp", 4, 1)),
        ("pair", "of 2 by 4", ranks("fsdp", 4, 1)),
    ] {
        let saved = fixture.path(saved).join("checkpoint-000004");
        let from = format!("train.resume_from_checkpoint={}", saved.display());
        assert!(run(&fixture, &config, name, &[&words(&ranks)[..], &[&*from]].concat(), END));
        let rest = &curve(&fixture.path("one"), "loss")[4..];
        let difference = apart(rest, &curve(&fixture.path(name), "loss"));
        assert!(difference < 1e-4, "{name}: {difference:e}");
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
        let (mut optimizer, mut sharing) = optimizer::shared(
            &optimizer_plan(&config, &model),
            &ParallelPlan::new(&config.train, world.size),
            &mut model.params,
            world,
        )
        .unwrap();
        let mut last = None;
        for step in 0..4 {
            // The last step has one batch less: some rank has nothing to do, or less.
            let all = (0..passes - usize::from(step == 3)).map(|at| batches[(at + step) % batches.len()].clone());
            let own: Vec<Batch> =
                all.enumerate().filter(|(at, _)| at % world.size == world.rank).map(|(_, batch)| batch).collect();
            match attempt(&mut model, &mut optimizer, comm, &mut sharing, &own, 0.01, 0.5).unwrap() {
                Attempt::Done(stats) => last = Some(stats.wait()),
                Attempt::TooLarge { error, .. } => panic!("{error}"),
            }
        }
        (last.unwrap(), model.params.values().read())
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
                let plans = (optimizer_plan(&config, &model), ParallelPlan::new(&config.train, comm.world().size));
                let (mut optimizer, mut sharing) =
                    optimizer::shared(&plans.0, &plans.1, &mut model.params, comm.world()).unwrap();
                let mut own = vec![batches[0].clone(), batches[1].clone()];
                if comm.world().rank == 1 {
                    own[1].tokens[0] = 1 << 20;
                }
                attempt(&mut model, &mut optimizer, &comm, &mut sharing, &own, 0.01, 0.5).unwrap_err()
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

/// What a rank has of a tensor's file: the first byte of each stretch, and its bytes.
type Stretches = Vec<(usize, Vec<u8>)>;

/// What a rank has after it has loaded a checkpoint: of the values, of their averages, of each tensor of the optimizer's state.
struct Loaded {
    values: Stretches,
    averages: Stretches,
    state: Vec<(String, usize, Stretches)>,
}

fn little(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// `values` lie at `ranges`, end to end.
fn stretches(ranges: &[Range<usize>], values: &[f32]) -> Stretches {
    let mut rest = values;
    let mut next = |range: &Range<usize>| {
        let (now, later) = rest.split_at(range.len());
        rest = later;
        (4 * range.start, little(now))
    };
    let found = ranges.iter().map(&mut next).collect();
    assert!(rest.is_empty());
    found
}

/// Puts together what ranks have, which must fit where they have the same; and says how many bytes they have together.
fn together<'a>(bytes: usize, ranks: impl Iterator<Item = &'a Stretches>) -> (Vec<u8>, usize) {
    let (mut whole, mut filled, mut sum) = (vec![0; bytes], vec![false; bytes], 0);
    for (start, stretch) in ranks.flatten() {
        let place = *start..start + stretch.len();
        for ((byte, filled), own) in whole[place.clone()].iter_mut().zip(&mut filled[place]).zip(stretch) {
            assert!(!*filled || byte == own, "ranks differ");
            (*byte, *filled) = (*own, true);
        }
        sum += stretch.len();
    }
    assert!(filled.into_iter().all(|filled| filled), "a byte that nobody has");
    (whole, sum)
}

#[test]
fn a_checkpoint_of_four_that_share_all_loads_into_any_number_under_any_strategy_byte_for_byte() {
    for (mode, optim) in [("full", Optim::AdamW8bit), ("lora", Optim::AdamW)] {
        let fixture = Fixture::new();
        let name = if mode == "full" { "adamw_8bit" } else { "adamw" };
        let (mode_line, optim_line) = (format!("tuning.mode: {mode}"), format!("train.optim: {name}"));
        let extra = [&*mode_line, &*optim_line, "train.ema_decay: 0.5", "train.max_steps: 3"];
        let path = fixture.config("run", &extra);
        assert!(run(&fixture, &path, "four", &words(&ranks("zero3", 4, 1)), END));
        let dir = fixture.path("four/checkpoint-000003");
        let saved = checkpoint::load(&dir).unwrap();
        let mut config = tunesmith::config::load(&path, &[], &[], &[]).unwrap().config;
        assert_eq!(config.train.optim, optim);
        let arch = tunesmith::config::arch::Arch::from_dir(&fixture.path("model")).unwrap();
        let (weights, prefix) = match mode {
            "full" => ("model.safetensors", ""),
            _ => ("adapter_model.safetensors", checkpoint::peft::PREFIX),
        };
        let [weights, state] = [weights, "optimizer.safetensors"].map(|name| std::fs::read(dir.join(name)).unwrap());
        let weights = safetensors::SafeTensors::deserialize(&weights).unwrap();
        let state = safetensors::SafeTensors::deserialize(&state).unwrap();
        for (strategy, size) in [Strategy::Ddp, Strategy::Zero1, Strategy::Fsdp]
            .into_iter()
            .flat_map(|one| [1, 2, 4].map(|size| (one, size)))
        {
            config.train.strategy = strategy;
            let load = |comm: &dyn Collectives| {
                let parallel = ParallelPlan::new(&config.train, comm.world().size);
                let gatherer = Gatherer::new(&parallel, &rule(&config.train).unwrap().into(), comm).unwrap();
                let shards = gatherer.as_ref().map(Gatherer::shards).unwrap_or_default();
                let mut model = Model::load_with(&arch, None, &config, &Stack::default(), None, shards).unwrap();
                let plan = optimizer_plan(&config, &model);
                let (mut optimizer, sharing) =
                    optimizer::shared(&plan, &parallel, &mut model.params, comm.world()).unwrap();
                let mut ema = optimizer::average(&plan, &model.params, &sharing);
                let (specs, kept) = (model.params.specs.clone(), model.params.ranges());
                saved.restore_kept(&specs, model.params.values_mut(), &kept, &mut optimizer, ema.as_mut()).unwrap();
                assert_eq!(optimizer.step, saved.state.optimizer_step);
                let ema = ema.unwrap();
                let of_state = |tensor: &StateTensor| {
                    let width = tensor.spec.bytes() as usize / tensor.spec.count();
                    let own = optimizer.owned(tensor).map(|(range, state)| {
                        let bytes = match state {
                            State::F32(values) => little(&values.read()),
                            State::U8(values) => values.read(),
                        };
                        (range.start * width, bytes)
                    });
                    (tensor.name.clone(), tensor.spec.bytes() as usize, own.collect::<Stretches>())
                };
                let loaded = Loaded {
                    values: stretches(&kept, &model.params.values().read()),
                    averages: stretches(ema.owned(), &ema.values.read()),
                    state: optimizer.state().iter().map(of_state).collect(),
                };
                (loaded, specs)
            };
            let all = on_ranks(size, &load);
            let specs = &all[0].1;
            let all: Vec<&Loaded> = all.iter().map(|(loaded, _)| loaded).collect();
            let bytes = 4 * specs.iter().map(|spec| spec.range().len()).sum::<usize>();
            let case = format!("{mode}, {strategy} of {size}");
            let copies = |shared: bool| if shared { 1 } else { size };
            let (values, held) = together(bytes, all.iter().map(|rank| &rank.values));
            assert_eq!(held, bytes * copies(strategy == Strategy::Fsdp), "{case}: values");
            let (averages, held) = together(bytes, all.iter().map(|rank| &rank.averages));
            assert_eq!(held, bytes * copies(strategy != Strategy::Ddp), "{case}: averages");
            for spec in specs {
                let place = 4 * spec.range().start..4 * spec.range().end;
                // What is published are the averages.
                let published = weights.tensor(&format!("{prefix}{}", spec.name)).unwrap();
                assert!(published.data() == &averages[place.clone()], "{case}: {}", spec.name);
                let trained = state.tensor(&format!("{}{}", spec.name, checkpoint::TRAINED)).unwrap();
                assert!(trained.data() == &values[place], "{case}: {}", spec.name);
            }
            assert_eq!(state.len(), specs.len() + all[0].state.len(), "{case}: every tensor of the file");
            for (at, (name, bytes, _)) in all[0].state.iter().enumerate() {
                let (whole, held) = together(*bytes, all.iter().map(|rank| &rank.state[at].2));
                assert_eq!(held, bytes * copies(strategy != Strategy::Ddp), "{case}: {name}");
                assert!(state.tensor(name).unwrap().data() == &whole[..], "{case}: {name}");
            }
        }
    }
}

/// Runs `work` on each of `size` ranks, which are threads, and returns the results in their order.
fn on_ranks<T: Send>(size: usize, work: &(dyn Fn(&dyn Collectives) -> T + Sync)) -> Vec<T> {
    if size == 1 {
        return vec![work(&Single)];
    }
    std::thread::scope(|scope| {
        let seats = threads::world(size, Limits::default()).into_iter();
        let running: Vec<_> = seats.map(|rank| scope.spawn(move || work(&rank))).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
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
    assert!(refused(&["train.strategy=zero1", "train.reduce_every_pass=true"]).contains("are strategy: zero2"));
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

/// The peak bytes of a run's process with a memory budget, as its summary reports them.
pub(super) fn held(text: &str) -> f64 {
    let line = text.lines().find(|line| line.trim_end().ends_with("in use at most")).expect("a summary");
    let words: Vec<&str> = line.split_whitespace().collect();
    let at = words.iter().position(|&word| word == "of").unwrap();
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
        "train.memory_budget: 8GiB",
        "logging.report: false",
        "logging.tensorboard: false",
    ];
    let path = fixture.config("run", &lines);
    let config = tunesmith::config::load(&path, &[], &[], &[]).unwrap().config;
    let arch = tunesmith::config::arch::Arch::from_dir(&fixture.path("model")).unwrap();
    let job = memory_prediction::job(&config, &arch, Storage::F32, None).unwrap();
    let narrow = Predictor::new(Job { narrow_gradients: true, ..job.clone() }, Device::Cpu);
    let wide = Predictor::new(job, Device::Cpu);
    let pass = Pass { tokens: 20, longest: 20, labelled: 10 };
    let program = |rank: &Breakdown| rank.total() - rank.program;
    for (predictor, ranks, kept) in [(&wide, 2, "float32"), (&wide, 4, "float32"), (&narrow, 2, "bfloat16")] {
        let mut before: Option<(f64, f64)> = None;
        let kept = format!("train.grad_dtype={kept}");
        for (strategy, planned) in [
            ("dp", strategies::Strategy::Dp),
            ("zero1", strategies::Strategy::Zero1),
            ("zero2", strategies::Strategy::Zero2),
            ("zero3", strategies::Strategy::Zero3),
        ] {
            let machine = Machine { device: Device::Cpu, ranks, memory: u64::MAX };
            let way = Way { strategy: planned, offload_optimizer: false };
            let rank = strategies::rank(predictor, &machine, way, &pass);
            // The program's own memory is not the allocator's.
            let process = program(&rank) as f64;
            // Threads look into each other's memory, where processes have two messages on their way.
            let predicted = if planned.shards_optimizer() { process - f64::from(2 << 20) } else { process };
            let (how, count) = (format!("train.strategy={strategy}"), format!("train.dp_ranks={ranks}"));
            let output = train(&path, &[&how, &count, &kept, "--overwrite"]);
            let text = said(&output);
            assert!(output.status.success(), "{text}");
            // Threads hold alike, and the process counts them together.
            let found = held(&text) / ranks as f64;
            let mib = |bytes: f64| bytes / f64::from(1 << 20);
            println!(
                "{strategy}, {ranks} ranks, {kept}: {:.2} MiB a rank, {:.3} of the plan",
                mib(found),
                found / predicted
            );
            assert!(
                (0.9..1.1).contains(&(found / predicted)),
                "{strategy}, {ranks} ranks, {kept}: {found} of {rank:?}"
            );
            // What this strategy shares beyond the one before: the optimizer's state, the gradients, the weights.
            if let Some(before) = before.replace((found, predicted)) {
                let (less, planned) = (before.0 - found, before.1 - predicted);
                println!("    {:.2} MiB less than the one before, {:.3} of the plan", mib(less), less / planned);
                // The summary rounds, and what is little is so to half a mebibyte.
                assert!(
                    (less - planned).abs() < 0.1 * planned.abs() + f64::from(1 << 19),
                    "{strategy}, {ranks} ranks, {kept}: {less} less, {planned} planned"
                );
            }
            // As a process of its own.
            let launched = if ranks == 2 { planned.shards_optimizer() } else { planned == strategies::Strategy::Zero3 };
            if launched && gloo_is_there() {
                let output = launch(&path, ranks as usize, &[&how, &kept, "--overwrite"]).wait_with_output().unwrap();
                assert!(output.status.success(), "{}", said(&output));
                let found = held(&said(&output).replace("[rank 0] ", ""));
                println!("    {:.2} MiB as a process, {:.3} of the plan", mib(found), found / process);
                assert!((0.9..1.1).contains(&(found / process)), "{strategy}, a process: {found} of {rank:?}");
            }
        }
    }
}
