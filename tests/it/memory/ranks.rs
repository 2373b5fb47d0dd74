//! The memory budget with several ranks: all measure and the worst figures count, and if one rank has no room for a pass, all
//! use smaller passes.
use std::ops::Range;

use tunesmith::comm::single::Single;
use tunesmith::comm::{Collectives, Group, Limits, World};
use tunesmith::config::Checkpointing;
use tunesmith::data::{Sampler, SamplerOptions, Split};
use tunesmith::error::Result;
use tunesmith::train::autobatch::measure_pass::PassMeasurer;

use super::{Large, ROUNDING, Run};
use crate::comm::gloo_is_there;
use crate::parity;
use crate::processes::alone;
use crate::run::fixture::{said, tunesmith};

/// The first of two ranks. Its peer always sends the same numbers.
struct Peer {
    budget: u64,
    bytes: f64,
    seconds: f64,
}

impl Collectives for Peer {
    fn world(&self) -> World {
        World { size: 2, ..World::ALONE }
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn name(&self) -> &'static str {
        "peer"
    }

    fn all_to_all_bytes(&self, _: &[u8], _: &[Range<usize>], _: &mut [u8]) -> Result<()> {
        Ok(())
    }

    fn all_gather_bytes(&self, data: &mut [u8], parts: &[Range<usize>]) -> Result<()> {
        let said = match parts[1].len() {
            8 => self.budget.to_ne_bytes().to_vec(),
            _ => [self.bytes.to_ne_bytes(), self.seconds.to_ne_bytes()].concat(),
        };
        data[parts[1].clone()].copy_from_slice(&said);
        Ok(())
    }

    fn broadcast_bytes(&self, _: &mut [u8], _: usize) -> Result<()> {
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        Ok(())
    }

    fn new_group(&self, _: Group) -> Result<Box<dyn Collectives>> {
        Ok(Box::new(Single))
    }
}

#[test]
fn the_worst_rank_counts() {
    // What other tests free meanwhile would be taken off what the pass takes.
    if !alone("memory::ranks::the_worst_rank_counts") {
        return;
    }
    let mut model = parity::adapted("llama", &parity::golden("llama").join("adapter_init"), 0);
    let rows = [40, 30].map(|length| tunesmith::data::batch::Example {
        input_ids: (0..length).collect(),
        labels: (0..length as i32).collect(),
    });
    let split = Split::from_examples(&rows).unwrap();
    let options =
        SamplerOptions { batch_size: 1, grad_accum: 1, seed: 1, shuffle: true, group_by_length: false, packing: None };
    let sampler = Sampler::new(&split.lengths(), options);
    // Budgets far beyond what this process's other tests hold, and not theirs.
    let mut pass = |peer: &Peer, tokens| {
        let mut gauge = PassMeasurer::new(&mut model, &split, &sampler, (None, 7), peer).unwrap();
        (gauge.pass(tokens, Checkpointing::CHEAP).unwrap(), gauge.limit())
    };
    let slow = Peer { budget: 1 << 45, bytes: 3e12, seconds: 4.0 };
    let (found, limit) = pass(&slow, 64);
    assert_eq!((found.bytes, found.seconds), (Some(3_000_000_000_007), 4.0));
    assert_eq!(limit, (1 << 45) - (1 << 40), "the least budget, less a thirty-second");
    let (found, _) = pass(&Peer { bytes: 0.0, ..slow }, 64);
    assert!(found.bytes.unwrap() > 7 && found.bytes.unwrap() < 3_000_000_000_000, "{found:?}");
    let (found, _) = pass(&Peer { bytes: f64::INFINITY, ..slow }, 48);
    assert_eq!((found.bytes, found.seconds), (None, 0.0), "it does not fit there");
    let (found, _) = pass(&Peer { budget: 1 << 41, ..slow }, 32);
    assert_eq!(found.bytes, None, "more than the least budget");
}

const AUTO: [&str; 4] = [
    "train.batch_size: auto",
    "train.grad_accum: auto",
    "train.gradient_checkpointing: auto",
    "train.effective_batch: 48",
];
const DP: [&str; 2] = ["train.strategy: dp", "train.dp_ranks: 2"];

fn with<'a>(first: &[&'a str], second: &[&'a str]) -> Vec<&'a str> {
    [first, second].concat()
}

/// About what two threads hold with passes of so many tokens.
fn held_by_two(large: &Large, tokens: usize) -> u64 {
    let limit = format!("train.max_tokens_per_pass: {tokens}");
    let lines = with(&DP, &[&limit, "train.batch_size: 12", "train.max_steps: 3"]);
    large.good(&format!("two-{tokens}"), &lines, None).held()
}

#[test]
fn threads_measure_for_all_and_stay_within_the_budget_of_their_process() {
    let large = Large::new();
    let (wide, narrow) = (held_by_two(&large, 768), held_by_two(&large, 1));
    assert!(wide > narrow + (8 << 20), "activations of both must show: {wide} and {narrow}");
    let budget = narrow + narrow / 16 + (wide - narrow) / 2;
    let run = large.good("run", &with(&AUTO, &DP), Some(budget));
    assert!(run.text.contains("measured passes") && run.text.contains("passes are limited to"), "{}", run.text);
    assert!(!run.text.contains("repeating it"), "{}", run.text);
    assert!(run.held() <= budget + ROUNDING, "{} held, {budget} allowed: {}", run.held(), run.text);
    let rows = |run: &Run| {
        let number = |key: &str| run.setting(key).parse::<usize>().unwrap();
        2 * number("batch_size") * number("grad_accum")
    };
    assert_eq!(rows(&run), 48);
    let again = large.good("again", &with(&AUTO, &DP), Some(budget));
    assert!(again.text.contains("sizes from an earlier probe"), "{}", again.text);
    assert!(run.weights() == again.weights());
    // One rank with the same rows a step has the same curve.
    let one = large.good("one", &AUTO, None);
    for (one, two) in one.losses().iter().zip(run.losses()) {
        assert!((one - two).abs() < 2e-5, "{one} and {two}");
    }
    // What is predicted is predicted for the process.
    assert!(run.text.contains("2 ranks in one process, "), "{}", run.text);
}

#[test]
fn passes_are_measured_with_shared_weights_brought_together() {
    let large = Large::new();
    let one = large.good("one", &AUTO, None);
    for strategy in ["train.strategy: zero2", "train.strategy: zero3"] {
        let shared = with(&AUTO, &[strategy, "train.dp_ranks: 2", "train.ddp_timeout: 60", "data.use_cache: false"]);
        let shared = large.good("shared", &shared, None);
        assert!(shared.text.contains("measured passes"), "{}", shared.text);
        for (one, two) in one.losses().iter().zip(shared.losses()) {
            assert!((one - two).abs() < 2e-5, "{strategy}: {one} and {two}");
        }
        std::fs::remove_dir_all(&shared.dir).unwrap();
    }
}

#[test]
fn what_one_thread_has_no_room_for_all_cut() {
    // What threads take unasked is a small part of this one.
    let large = Large::of(96, 256);
    let budget = u64::midpoint(held_by_two(&large, 768), held_by_two(&large, 200));
    let lines = with(&DP, &["train.batch_size: 12"]);
    let (free, tight) = (large.good("free", &lines, None), large.good("tight", &lines, Some(budget)));
    assert!(tight.text.contains("from now on") && tight.text.contains("passes of at most"), "{}", tight.text);
    // Each of the four threads hands its count over in pieces of so much.
    let allowed = budget + 4 * ROUNDING;
    assert!(tight.held() <= allowed, "{} held, {allowed} allowed: {}", tight.held(), tight.text);
    for (free, tight) in free.losses().iter().zip(tight.losses()) {
        assert!((free - tight).abs() < 2e-5, "{free} and {tight}");
    }
    // A row that does not fit even so ends all of them, with what helps.
    let none = large.train("none", &lines, Some(held_by_two(&large, 1) * 2 / 3));
    assert_eq!(none.status.code(), Some(9), "{}", said(&none));
    assert!(said(&none).contains("use one of these: "), "{}", said(&none));
}

#[test]
fn processes_measure_and_agree() {
    if !gloo_is_there() {
        return;
    }
    let large = Large::new();
    let launch = |out: &str, lines: &[&str]| {
        let output = format!("train.output_dir: {}", large.path(out).display());
        let common = [
            "model.init: random",
            "model.max_seq_len: 512",
            "data.format: tokenized",
            "train.max_steps: 4",
            "train.num_threads: 1",
            "logging.report: false",
            "logging.tensorboard: false",
            &output,
        ];
        let config = large.0.config(out, &with(&common, lines));
        let done = tunesmith(&["launch", "--nproc", "2", "--", "train", config.to_str().unwrap()]).output().unwrap();
        assert!(done.status.success(), "{}", said(&done));
        Run { text: said(&done), dir: large.path(out) }
    };
    let measured = launch("measured", &AUTO);
    assert_eq!(measured.text.matches("chosen: ").count(), 1, "one rank speaks: {}", measured.text);
    let keys = ["batch_size", "grad_accum", "gradient_checkpointing", "max_tokens_per_pass"];
    let lines: Vec<String> = keys.map(|key| format!("train.{key}: {}", measured.setting(key))).to_vec();
    let given = launch("given", &lines.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(measured.weights() == given.weights());
    let again = launch("again", &AUTO);
    assert!(again.text.contains("sizes from an earlier probe"), "{}", again.text);
    assert!(measured.weights() == again.weights());
}
