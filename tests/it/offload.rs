//! `train.offload_embedding` on the CPU: the table of token embeddings stays in the model's files.
use crate::run::fixture::{Fixture, said, train, tunesmith};
use serde_json::Value;
use std::path::Path;
use tunesmith::config::arch::{Arch, EMBEDDING};
use tunesmith::config::{Config, load_text};
use tunesmith::data::batch::{Batch, Example};
use tunesmith::model::Model;
use tunesmith::model::weights::WeightFiles;
use tunesmith::plan::memory::{Device, Pass, Predictor, Storage};
use tunesmith::train::memory_prediction;

fn config(text: &str, offloads: bool) -> Config {
    let mut config = load_text(Path::new("case"), text).unwrap().config;
    config.train.offload_embedding = offloads;
    config
}

/// Two rows of 40 tokens, some of them alike.
fn batch(vocabulary: usize) -> Batch {
    let row = |row: usize| {
        let input_ids: Vec<u32> = (0..40).map(|at| ((row * 31 + at / 2 * 17) % vocabulary) as u32).collect();
        Example { labels: input_ids.iter().map(|&id| id as i32).collect(), input_ids }
    };
    Batch::from_examples(&[row(0), row(1)])
}

#[test]
fn a_table_that_stays_in_the_files_changes_no_bit_and_is_not_planned_as_held() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/a/mistral/model");
    let arch = Arch::from_dir(&dir).unwrap();
    assert!(!arch.tie_word_embeddings);
    let weights = WeightFiles::open(&dir, &arch.tensors()).unwrap();
    let table = arch.tensors().into_iter().find(|spec| spec.name == EMBEDDING).unwrap().len() as u64;
    let batch = batch(arch.vocab_size);
    for (text, each) in [
        ("{model: {dtype: float32}, tuning: {lora: {r: 4}}}", 4),
        ("{model: {dtype: bfloat16}, tuning: {lora: {r: 4}}}", 2),
        ("{model: {dtype: float32}, tuning: {mode: freeze, freeze: {trainable_layers: 1}}}", 4),
    ] {
        let run = |offloads: bool| {
            let mut model = Model::load(&arch, Some(&weights), &config(text, offloads)).unwrap();
            model.params.zero_grads();
            let loss = model.forward_backward(&batch, 0.01, 1.0, 0).unwrap();
            let next = model.extend(&mut [(&mut model.cache(), &[5, 3, 9])]).unwrap().row(0);
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            (loss, bits(&model.params.grads().read()), bits(&next), model.loss(&batch).unwrap())
        };
        assert_eq!(run(true), run(false), "{text}");
        let weights_planned = |offloads: bool| {
            let job = memory_prediction::job(&config(text, offloads), &arch, Storage::F32, Some(&weights)).unwrap();
            Predictor::new(job, Device::Cpu).predict(&Pass { tokens: 80, longest: 40, labelled: 80 }).weights
        };
        assert_eq!(weights_planned(false) - weights_planned(true), each * table, "{text}");
    }
}

#[test]
fn runs_read_the_rows_of_a_table_that_stays_in_the_files() {
    let fixture = Fixture::untied();
    let losses = |out: &str, lines: &[&str]| {
        let config = fixture.config(out, lines);
        let done = train(&config, &[&format!("train.output_dir={}", fixture.path(out).display())]);
        assert!(done.status.success(), "{out}: {}", said(&done));
        let metrics = std::fs::read_to_string(fixture.path(out).join("metrics.jsonl")).unwrap();
        let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let losses: Vec<f64> = lines.filter_map(|line| line["loss"].as_f64()).collect();
        assert_eq!(losses.len(), 6, "{out}");
        losses
    };
    let offloads = "train.offload_embedding: true";
    assert_eq!(losses("there", &[offloads]), losses("held", &[]));
    let shares = ["train.strategy: zero3", "train.dp_ranks: 2", "train.grad_accum: 1"];
    assert_eq!(losses("shared_there", &[&shares[..], &[offloads]].concat()), losses("shared", &shares));
    // New tokens have rows that the files lack: the table is held.
    let grown = "tuning.new_tokens: [\"<a>\"]";
    let config = fixture.config("grown", &[offloads, grown]);
    let done = train(&config, &[&format!("train.output_dir={}", fixture.path("grown").display())]);
    assert!(done.status.code() == Some(2) && said(&done).contains("its embedding is trained"), "{}", said(&done));
    // A tied table is the head's.
    let tied = Fixture::new();
    let done = train(&tied.config("tied", &[offloads]), &[]);
    assert!(done.status.code() == Some(2) && said(&done).contains("shares its embedding"), "{}", said(&done));
    let asked = |out: &str| {
        let [config, out] =
            [format!("{out}.yaml"), out.to_owned()].map(|name| fixture.path(&name).display().to_string());
        let done =
            tunesmith(&["infer", &config, &format!("train.output_dir={out}"), "--prompt", "ab"]).output().unwrap();
        assert!(done.status.success(), "{}", said(&done));
        String::from_utf8(done.stdout).unwrap()
    };
    assert_eq!(asked("there"), asked("held"));
}
