//! The memory budget: steps that are repeated in smaller passes, sizes chosen by measuring, and what both write to checkpoints
//! and records. Each run is a process of its own, because memory is counted per process.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::Mutex;

mod ranks;

use serde_json::{Value, json};
use tunesmith::config::Checkpointing;
use tunesmith::data::batch::Batch;
use tunesmith::model::Model;

use crate::parity;
use crate::run::fixture::{Fixture, model_config, said, tunesmith};

/// How far a printed size may be from what it stands for.
const ROUNDING: u64 = 64 << 10;
/// Longest row in tokens.
const LONGEST: usize = 400;

/// A model whose activations weigh more than the rest of the program, and rows of 16 to 111 tokens, one of 400.
struct Large(Fixture);

impl Large {
    fn new() -> Self {
        Self::of(48, 128)
    }

    /// With blocks of this width and that of their MLP.
    fn of(hidden: usize, inner: usize) -> Self {
        let fixture = Fixture::new();
        let mut config = model_config();
        for (key, value) in [
            ("hidden_size", hidden),
            ("intermediate_size", inner),
            ("num_hidden_layers", 6),
            ("max_position_embeddings", 512),
        ] {
            config[key] = json!(value);
        }
        std::fs::write(fixture.path("model/config.json"), config.to_string()).unwrap();
        let rows = |numbers: std::ops::Range<usize>| -> String {
            numbers
                .map(|row| {
                    let length = if row == 5 { LONGEST } else { 16 + row * 37 % 96 };
                    let ids: Vec<usize> = (0..length).map(|at| (row * 131 + at * 37) % 250).collect();
                    json!({ "input_ids": ids, "labels": ids }).to_string() + "\n"
                })
                .collect()
        };
        std::fs::write(fixture.path("train.jsonl"), rows(0..96)).unwrap();
        std::fs::write(fixture.path("val.jsonl"), rows(200..216)).unwrap();
        Self(fixture)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path(name)
    }

    /// `tunesmith train` into the folder `out`, with these lines and the budget.
    fn train(&self, out: &str, extra: &[&str], budget: Option<u64>) -> Output {
        let output = format!("train.output_dir: {}", self.path(out).display());
        let mut lines = vec![
            "model.init: random",
            "model.max_seq_len: 512",
            "data.format: tokenized",
            "train.batch_size: 16",
            "train.grad_accum: 2",
            "train.max_steps: 4",
            "train.num_threads: 2",
            "logging.report: false",
            "logging.tensorboard: false",
            output.as_str(),
        ];
        lines.extend(extra);
        let config = self.0.config(out, &lines);
        let mut command = tunesmith(&["train", config.to_str().unwrap()]);
        // With a budget the summary says how much of it was in use.
        command.env("TUNESMITH_MEMORY_BUDGET", budget.unwrap_or(8 << 30).to_string());
        command.output().unwrap()
    }

    fn good(&self, out: &str, extra: &[&str], budget: Option<u64>) -> Run {
        let output = self.train(out, extra, budget);
        assert!(output.status.success(), "{}", said(&output));
        Run { text: said(&output), dir: self.path(out) }
    }
}

struct Run {
    text: String,
    dir: PathBuf,
}

impl Run {
    /// The most bytes that the process had in use, as its summary says.
    fn held(&self) -> u64 {
        let line = self.text.lines().find(|line| line.ends_with("in use at most")).expect("a summary");
        let words: Vec<&str> = line.split_whitespace().collect();
        let at = words.iter().position(|&word| word == "of").unwrap();
        let unit = match words[at - 1] {
            "KiB" => 1u64 << 10,
            "MiB" => 1 << 20,
            "GiB" => 1 << 30,
            other => panic!("{other}"),
        };
        (words[at - 2].parse::<f64>().unwrap() * unit as f64) as u64
    }

    fn losses(&self) -> Vec<f64> {
        let text = std::fs::read_to_string(self.dir.join("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.map(|line| line.get("loss").or(line.get("eval_loss")).and_then(Value::as_f64).unwrap()).collect()
    }

    fn weights(&self) -> Vec<u8> {
        std::fs::read(self.dir.join("adapter/adapter_model.safetensors")).unwrap()
    }

    /// A setting as the run used it.
    fn setting(&self, key: &str) -> String {
        let text = std::fs::read_to_string(self.dir.join("config.resolved.yaml")).unwrap();
        let line = text.lines().find_map(|line| line.trim_start().strip_prefix(&format!("{key}: "))).unwrap();
        line.split("  #").next().unwrap().to_owned()
    }
}

/// About what a run with passes of so many tokens holds; found once for all tests.
fn held_with(tokens: usize) -> u64 {
    static FOUND: Mutex<BTreeMap<usize, u64>> = Mutex::new(BTreeMap::new());
    *FOUND.lock().unwrap().entry(tokens).or_insert_with(|| held_by(&Large::new(), tokens))
}

/// A budget between two sizes that prints without rounding, in tenths of a MiB, so that it can be found in a run's output.
fn between(one: u64, other: u64) -> u64 {
    let tenth = f64::from(1 << 20) / 10.0;
    ((u64::midpoint(one, other) as f64 / tenth).floor() * tenth) as u64
}

fn held_by(large: &Large, tokens: usize) -> u64 {
    let limit = format!("train.max_tokens_per_pass: {tokens}");
    large.good(&format!("with-{tokens}"), &[&limit, "train.max_steps: 3"], None).held()
}

#[test]
fn a_step_that_does_not_fit_is_done_again_in_smaller_passes_and_the_losses_stay() {
    let large = Large::new();
    let (wide, narrow) = (held_with(768), held_with(200));
    assert!(wide > narrow + (4 << 20), "activations must show: {wide} and {narrow}");
    let budget = between(wide, narrow);
    let evaluated = ["train.eval_strategy: steps", "train.eval_steps: 2", "train.eval_batch_size: 16"];
    let (free, tight) = (large.good("free", &evaluated, None), large.good("tight", &evaluated, Some(budget)));
    assert_eq!(tight.text.matches("from now on in passes of at most").count(), 1, "said once: {}", tight.text);
    assert!(tight.held() <= budget + ROUNDING, "{} held, {budget} allowed: {}", tight.held(), tight.text);
    let (free, tight) = (free.losses(), tight.losses());
    assert_eq!((free.len(), tight.len()), (6, 6));
    for (free, tight) in free.iter().zip(&tight) {
        assert!((free - tight).abs() < 2e-5, "{free} and {tight}");
    }
}

#[test]
fn gradients_in_bfloat16_take_the_memory_that_is_predicted_and_train_the_same_curve() {
    let large = Large::new();
    let (layers, hidden, inner) = (24, 96, 256);
    let mut config = model_config();
    for (key, value) in [
        ("hidden_size", hidden),
        ("intermediate_size", inner),
        ("num_hidden_layers", layers),
        ("max_position_embeddings", 512),
    ] {
        config[key] = json!(value);
    }
    std::fs::write(large.path("model/config.json"), config.to_string()).unwrap();
    let full = [
        "tuning.mode: full",
        "train.learning_rate: 0.001",
        "train.max_tokens_per_pass: 400",
        "train.batch_size: 8",
        "train.grad_accum: 1",
        "train.max_steps: 3",
        // The longest row is in the first step.
        "data.shuffle: false",
    ];
    let wide = large.good("wide", &full, None);
    let narrow = large.good("narrow", &[&full[..], &["train.grad_dtype: bfloat16"]].concat(), None);
    // Two bytes a value less; four a value of the shared table and of a block, which have rooms.
    let (table, block) = (260 * hidden, hidden * (2 * hidden + 2 * hidden / 2 + 3 * inner + 2));
    let fewer = 2 * (table + layers * block + hidden) - 4 * (table + block);
    let saved = wide.held() - narrow.held();
    assert!(saved.abs_diff(fewer) < fewer / 10, "{saved} saved, {fewer} expected");
    let predicted = |run: &Run| {
        let line = run.text.lines().find(|line| line.contains("at most, predicted")).expect("a prediction");
        let words: Vec<&str> = line.split_whitespace().collect();
        let at = words.iter().position(|&word| word == "MiB").unwrap();
        (words[at - 1].parse::<f64>().unwrap() * f64::from(1 << 20)) as u64
    };
    for run in [&wide, &narrow] {
        // The program's own pages are predicted too, and not counted here.
        let (predicted, held) = (predicted(run) - tunesmith::plan::memory::PROGRAM, run.held());
        assert!(predicted.abs_diff(held) < held / 10, "{predicted} predicted, {held} held");
    }
    assert!((predicted(&wide) - predicted(&narrow)).abs_diff(fewer) < fewer / 10 + (200 << 10));
    let (wide, narrow) = (wide.losses(), narrow.losses());
    assert_ne!(wide, narrow, "gradients are rounded");
    for (wide, narrow) in wide.iter().zip(&narrow) {
        assert!((wide - narrow).abs() < 5e-3 * wide, "{wide} and {narrow}");
    }
}

#[test]
fn ranks_that_share_weights_go_to_the_end_of_a_pass_that_does_not_fit_and_do_the_step_again() {
    let large = Large::new();
    let ranks = ["train.strategy: zero3", "train.dp_ranks: 2", "train.grad_accum: 1"];
    let held = |tokens: usize| {
        let limit = format!("train.max_tokens_per_pass: {tokens}");
        let words = [&ranks[..], &[&limit, "train.max_steps: 2"]].concat();
        large.good(&format!("with-{tokens}"), &words, None).held()
    };
    let (wide, narrow) = (held(768), held(200));
    assert!(wide > narrow + (4 << 20), "activations must show: {wide} and {narrow}");
    let evaluated =
        [&ranks[..], &["train.eval_strategy: steps", "train.eval_steps: 2", "train.eval_batch_size: 4"]].concat();
    let free = large.good("free", &evaluated, None);
    let tight = large.good("tight", &evaluated, Some(u64::midpoint(wide, narrow)));
    assert!(tight.text.contains("passes of at most") || tight.text.contains("repeating it"), "{}", tight.text);
    let (free, tight) = (free.losses(), tight.losses());
    assert_eq!((free.len(), tight.len()), (6, 6));
    for (free, tight) in free.iter().zip(&tight) {
        assert!((free - tight).abs() < 2e-5, "{free} and {tight}");
    }
}

#[test]
fn a_shrink_is_resumed_and_the_resumed_run_is_the_same_to_the_bit() {
    let large = Large::new();
    let budget = u64::midpoint(held_with(768), held_with(200));
    let saving = ["train.save_strategy: steps", "train.save_steps: 2", "train.save_total_limit: null"];
    let straight = large.good("straight", &saving, Some(budget));
    let from = format!("train.resume_from_checkpoint: {}", large.path("straight/checkpoint-000002").display());
    let resumed = large.good("resumed", &[&saving[..], &[&from]].concat(), Some(budget));
    assert!(straight.text.contains("from now on in passes"), "{}", straight.text);
    assert!(!resumed.text.contains("from now on in passes"), "it is known already: {}", resumed.text);
    assert!(straight.weights() == resumed.weights());
}

#[test]
fn a_row_that_does_not_fit_is_refused_with_what_helps() {
    let large = Large::new();
    let one_row = held_with(1);
    let short = ["train.max_tokens_per_pass: 1", "train.max_steps: 3", "model.max_seq_len: 16"];
    let short = large.good("short", &short, None).held();
    let budget = u64::midpoint(short, one_row);
    for extra in [&[][..], &["train.batch_size: auto"]] {
        let output = large.train("none", extra, Some(budget));
        assert_eq!(output.status.code(), Some(9), "{}", said(&output));
        let text = said(&output);
        for part in [
            "a row of 400 tokens does not fit into the memory budget of",
            "per token",
            "use one of these: train.gradient_checkpointing: true (then ",
            "model.max_seq_len: ",
            "tuning.mode: qlora (saves about",
            "model.dtype: bfloat16 (saves about",
            "train.bf16: true (saves about",
            "tuning.lora.r: 2 (saves about",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("enough alone"), "{text}");
    }
    // Where little is lacking, some of it is enough.
    let output = large.train("little", &[], Some(one_row - (one_row - short) / 8));
    assert_eq!(output.status.code(), Some(9), "{}", said(&output));
    assert!(said(&output).contains(", enough alone); "), "{}", said(&output));
    // Where it may, the run goes on with blocks that are run again, found before step 1 or when it is needed.
    let may = ["train.gradient_checkpointing: auto", "data.use_cache: false"];
    let run = large.good("may", &may, Some(budget));
    assert!(run.text.contains("does not fit without recomputing blocks"), "{}", run.text);
    assert!(run.held() <= budget + ROUNDING, "{} held, {budget} allowed: {}", run.held(), run.text);
}

#[test]
fn chosen_sizes_are_the_same_run_as_the_numbers_given_by_hand() {
    let large = Large::new();
    let auto = [
        "train.batch_size: auto",
        "train.grad_accum: auto",
        "train.gradient_checkpointing: auto",
        "train.target_tokens_per_device_step: 1500",
    ];
    let first = large.good("first", &auto, None);
    for part in ["measured passes", "tokens/s", "chosen: batch_size: ", "per token of the largest pass"] {
        assert!(first.text.contains(part), "{part}: {}", first.text);
    }
    let again = large.good("again", &auto, None);
    assert!(again.text.contains("sizes from an earlier probe"), "{}", again.text);
    assert!(first.weights() == again.weights());
    let keys = ["batch_size", "grad_accum", "gradient_checkpointing", "max_tokens_per_pass"];
    let lines: Vec<String> = keys.map(|key| format!("train.{key}: {}", first.setting(key))).to_vec();
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let by_hand = large.good("by-hand", &lines, None);
    assert!(!by_hand.text.contains("measured passes"), "{}", by_hand.text);
    assert!(first.losses() == by_hand.losses() && first.weights() == by_hand.weights());
    // The record of a run is a configuration of the same run.
    let record = large.path("first/config.resolved.yaml");
    let into = format!("train.output_dir={}", large.path("record").display());
    let output = tunesmith(&["train", record.to_str().unwrap(), &into]).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(Run { text: String::new(), dir: large.path("record") }.weights() == first.weights());
}

#[test]
fn rows_that_are_measured_make_steps_of_the_tokens_that_are_asked_for() {
    let large = Large::new();
    let alone = ["train.batch_size: auto", "train.grad_accum: UNSET", "train.target_tokens_per_device_step: 1500"];
    let run = large.good("alone", &alone, None);
    let rows = |run: &Run| {
        let number = |key: &str| run.setting(key).parse::<usize>().unwrap();
        number("batch_size") * number("grad_accum")
    };
    // 96 rows of 66.6 tokens on average: 22.5 would do, 24 can be cut in many ways.
    assert!(run.text.contains("rows per step and rank: 24, about 1,598 tokens"), "{}", run.text);
    assert_eq!(rows(&run), 24, "{}", run.text);
    // However little memory there is, and whatever is fastest within it.
    let budget = u64::midpoint(held_with(768), held_with(1));
    let tight = large.good("tight", &[&alone[..], &["data.use_cache: false"]].concat(), Some(budget));
    assert!(tight.text.contains("passes are limited to"), "{}", tight.text);
    assert_eq!(rows(&tight), 24, "{}", tight.text);
    for (one, other) in run.losses().iter().zip(tight.losses()) {
        assert!((one - other).abs() < 2e-5, "{one} and {other}");
    }
    // The record says it in numbers.
    assert!(!run.setting("grad_accum").contains("auto") && run.dir.join("config.resolved.yaml").is_file());
}

#[test]
fn a_resumed_run_keeps_the_sizes_of_its_checkpoint() {
    let large = Large::new();
    let auto = [
        "train.batch_size: auto",
        "train.grad_accum: auto",
        "train.gradient_checkpointing: auto",
        "train.effective_batch: 24",
        "data.use_cache: false",
        "train.save_strategy: steps",
        "train.save_steps: 2",
        "train.save_total_limit: null",
    ];
    let straight = large.good("straight", &auto, None);
    let batch: usize = straight.setting("batch_size").parse().unwrap();
    assert_eq!(batch * straight.setting("grad_accum").parse::<usize>().unwrap(), 24);
    let from = format!("train.resume_from_checkpoint: {}", large.path("straight/checkpoint-000002").display());
    let resumed = large.good("resumed", &[&auto[..], &[&from]].concat(), None);
    assert!(resumed.text.contains("sizes as in the checkpoint"), "{}", resumed.text);
    assert!(straight.weights() == resumed.weights());
    let other = format!("train.batch_size: {}", batch + 1);
    let refused = large.train("resumed-otherwise", &[&auto[1..3], &auto[4..], &[&from, &other]].concat(), None);
    assert_eq!(refused.status.code(), Some(5), "{}", said(&refused));
}

#[test]
fn chosen_sizes_stay_within_the_budget_in_the_whole_run() {
    let large = Large::new();
    let (wide, narrow) = (held_with(768), held_with(1));
    let auto = [
        "train.batch_size: auto",
        "train.grad_accum: auto",
        "train.gradient_checkpointing: auto",
        "data.use_cache: false",
    ];
    for part in [2, 4] {
        // The least is that of one row; a thirty-second is left for what no pass shows.
        let budget = narrow + narrow / 16 + (wide - narrow) / part;
        let run = large.good(&format!("part-{part}"), &auto, Some(budget));
        assert!(run.held() <= budget + ROUNDING, "{} held, {budget} allowed: {}", run.held(), run.text);
        assert!(!run.text.contains("repeating it"), "{}", run.text);
        assert!(run.text.contains("passes are limited to"), "{}", run.text);
    }
}

#[test]
fn experts_are_cut_too() {
    let large = Large::new();
    let mut config: Value =
        serde_json::from_str(&std::fs::read_to_string(large.path("model/config.json")).unwrap()).unwrap();
    for (key, value) in [
        ("architectures", json!(["MixtralForCausalLM"])),
        ("model_type", json!("mixtral")),
        ("num_local_experts", json!(4)),
        ("num_experts_per_tok", json!(2)),
        ("tie_word_embeddings", json!(false)),
    ] {
        config[key] = value;
    }
    std::fs::write(large.path("model/config.json"), config.to_string()).unwrap();
    let (wide, narrow) = (held_by(&large, 768), held_by(&large, 200));
    let budget = between(wide, narrow);
    let (free, tight) = (large.good("free", &[], None), large.good("tight", &[], Some(budget)));
    assert!(tight.text.contains("repeating it with the same rows"), "{}", tight.text);
    assert!(tight.held() <= budget + ROUNDING, "{} held, {budget} allowed: {}", tight.held(), tight.text);
    for (free, tight) in free.losses().iter().zip(tight.losses()) {
        assert!((free - tight).abs() < 2e-5, "{free} and {tight}");
    }
}

#[test]
fn answers_that_do_not_fit_side_by_side_are_made_in_turns_and_are_the_same() {
    let large = Large::new();
    let rows: String = (0..16)
        .map(|row| {
            let ids: Vec<usize> = (0..120).map(|at| (row * 131 + at * 37) % 250).collect();
            let labels: Vec<i64> = (0..120).map(|at| if at < 112 { -100 } else { ids[at] as i64 }).collect();
            json!({ "input_ids": ids, "labels": labels }).to_string() + "\n"
        })
        .collect();
    std::fs::write(large.path("val.jsonl"), rows).unwrap();
    let evaluates = [
        "train.max_steps: 1",
        "train.max_tokens_per_pass: 1",
        "model.max_seq_len: 128",
        "train.eval_strategy: steps",
        "train.eval_steps: 1",
        "train.eval_batch_size: 1",
    ];
    let answers = ["train.predict_with_generate: true", "train.generation_max_new_tokens: 200"];
    let silent = large.good("silent", &evaluates, None).held();
    let asks = [&evaluates[..], &answers].concat();
    let free = large.good("free", &asks, None);
    assert!(free.held() > silent + (4 << 20), "caches must show: {} and {silent}", free.held());
    let budget = between(silent, free.held());
    let tight = large.good("tight", &asks, Some(budget));
    assert!(tight.held() <= budget + ROUNDING, "{} held, {budget} allowed: {}", tight.held(), tight.text);
    let scores = |run: &Run| {
        let text = std::fs::read_to_string(run.dir.join("metrics.jsonl")).unwrap();
        let line = text.lines().find(|line| line.contains("eval_scores")).expect("scores").to_owned();
        let mut line: Value = serde_json::from_str(&line).unwrap();
        line.as_object_mut().unwrap().retain(|key, _| key != "eval_seconds");
        line
    };
    assert_eq!(scores(&free), scores(&tight));
}

/// A step's gradients with this kept in blocks.
fn gradients(model: &mut Model, batch: &Batch, checkpointing: Checkpointing) -> (f64, Vec<f32>) {
    model.set_checkpointing(checkpointing);
    model.params.zero_grads();
    let loss = model.forward_backward(batch, 1.0 / batch.label_tokens() as f32, 1.0, 0).unwrap();
    (loss, model.params.grads().read())
}

#[test]
fn gradients_do_not_depend_on_what_blocks_keep() {
    for family in [
        "llama",
        "gemma2",
        "phi3",
        "qwen3",
        "qwen3_moe",
        "qwen3_5",
        "lfm2",
        "granitemoehybrid",
        "granite4_moe",
        "olmo_hybrid",
        "nemotron_h",
        "nemotron3_nano",
        "nemotron3_super",
        "gemma4_e2b",
        "gemma3n",
        "lfm3",
        "muse_glimmer",
        "gemma4_a4b",
    ] {
        let dir: &Path = &parity::golden(family).join("adapter_init");
        let mut model = parity::adapted(family, dir, 0);
        let batch = parity::Forward::read(family).batch();
        let usual = gradients(&mut model, &batch, Checkpointing::CHEAP);
        let mixed = Checkpointing::Blocks { full: 1, none: 1 };
        for other in [Checkpointing::NONE, Checkpointing::FULL, mixed] {
            assert!(gradients(&mut model, &batch, other) == usual, "{family}: {other}");
        }
    }
}

#[test]
fn gpu_info_and_memory_check_read_a_driver_and_do_without() {
    let large = Large::new();
    let bin = large.path("bin");
    std::fs::create_dir(&bin).unwrap();
    let script = "#!/bin/sh\ncase $1 in\n\
        --query-gpu*) echo '0, GPU-aa, NVIDIA L4, 580.65.06, 512, 23034, 31, 8.9'; echo '1, GPU-bb, NVIDIA L4, 580.65.06, 1, 23034, 0, 8.9';;\n\
        --query-compute*) echo 'GPU-aa, 77, 500, python3';;\n\
        topo) printf '\\tGPU0\\tGPU1\\nGPU0\\t X \\tPHB\\nGPU1\\tPHB\\t X \\n';;\n\
        *) echo '| CUDA Version: 13.0 |';;\nesac\n";
    let program = bin.join("nvidia-smi");
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let ask = |words: &[&str], path: &Path| {
        let path = format!("{}:/usr/bin:/bin", path.display());
        let output = tunesmith(words).env("PATH", path).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        said(&output)
    };
    let text = ask(&["gpu-info", "--no-measure"], &bin);
    for part in [
        "580.65.06",
        "13.0",
        "NVIDIA L4, 22.5 GiB (22.0 GiB free, a run may hold 19.8 GiB), compute capability 8.9",
        "PHB",
        "cores",
        "control group",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let text = ask(&["memory-check"], &bin);
    for part in ["cpu ", "512 MiB   22.5 GiB   31 %  77 python3 500 MiB", "a run may hold"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let nowhere = large.path("nowhere");
    if !Path::new("/usr/bin/nvidia-smi").exists() {
        assert!(ask(&["gpu-info", "--no-measure"], &nowhere).contains("GPUs: none (no nvidia-smi on PATH"));
        assert!(ask(&["memory-check"], &nowhere).contains("no GPU: no nvidia-smi on PATH"));
    }
    let config = large.0.config("check", &["model.init: random", "model.max_seq_len: 512", "data.format: tokenized"]);
    let text = ask(&["memory-check", config.to_str().unwrap()], &nowhere);
    for part in
        ["largest pass has 511 tokens", "predicted", "measured", "optimizer, copy to save", "each further token costs"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let line = text.lines().find(|line| line.trim_start().starts_with("at most")).expect("a total");
    let off: f64 = line.split(['(', ')']).nth(1).unwrap().trim_end_matches(" %").parse().unwrap();
    assert!(off.abs() < 10.0, "{text}");
    assert!(!large.path("out").exists(), "nothing is written where the run would write");
}
