//! Runs on a base in 4 or 8 bits: they equal runs on a dense base of the same numbers, also with several ranks on a cold cache,
//! and can be merged.
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use half::bf16;
use serde_json::Value;
use tunesmith::checkpoint::stamp_check::as_set;
use tunesmith::config::arch::{Arch, TensorSpec};
use tunesmith::model::quantize;
use tunesmith::model::weights::{WeightFiles, write_safetensors};
use tunesmith::ops::quant::{Format, encode};

use super::crash::shim;
use super::fixture::{Fixture, said, train, tunesmith};
use super::resume::{go, straight_equals_stopped, timeless};

fn open(dir: &Path) -> (Arch, WeightFiles) {
    let arch = Arch::from_dir(dir).unwrap();
    let files = WeightFiles::open(dir, &arch.tensors()).unwrap();
    (arch, files)
}

/// Every tensor of a model folder in float32.
fn tensors(dir: &Path) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let (arch, files) = open(dir);
    let read = |TensorSpec { name, shape }| {
        let values = files.read(&name).unwrap().1;
        (name, shape, values)
    };
    arch.tensors().into_iter().map(read).collect()
}

/// A copy of the fixture's model in the folder `name`, with other numbers.
fn copy(fixture: &Fixture, name: &str, change: impl Fn(&str, &[usize], &mut Vec<f32>)) -> PathBuf {
    let (from, to) = (fixture.path("model"), fixture.path(name));
    std::fs::create_dir(&to).unwrap();
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(from.join(file), to.join(file)).unwrap();
    }
    let mut all = tensors(&from);
    for (name, shape, values) in &mut all {
        change(name, shape, values);
    }
    let all: Vec<_> = all.iter().map(|(name, shape, values)| (name.clone(), shape.clone(), &values[..])).collect();
    write_safetensors(&to.join("model.safetensors"), &all, &[("format", "pt")]).unwrap();
    to
}

/// A dense copy of the fixture's model with its numbers quantized and dequantized.
fn widened(fixture: &Fixture, format: Format) -> PathBuf {
    let matrices = quantize::matrices(&open(&fixture.path("model")).0, &[]).unwrap();
    copy(fixture, &format!("wide-{}", format.name()), |name, shape, values| {
        if matrices.contains(name) {
            *values = encode::quantize(values, shape[1], format, true).unwrap().dequantize();
        }
    })
}

#[test]
fn runs_on_codes_are_runs_on_the_same_numbers_dense() {
    let fixture = Fixture::new();
    let packed = ["data.packing: true", "model.max_seq_len: 32", "train.batch_size: 1"];
    let cases: [(&str, Format, &[&str]); 9] = [
        ("packing", Format::Nf4, &packed),
        ("average", Format::Nf4, &["train.ema_decay: 0.8"]),
        ("tokens", Format::Nf4, &["tuning.new_tokens: [\"ab\", \"xyz\"]"]),
        ("factors", Format::Nf4, &["tuning.mode: ia3"]),
        ("dora", Format::Nf4, &["tuning.lora.use_dora: true", "train.gradient_checkpointing: true"]),
        ("rslora", Format::Fp4, &["tuning.lora.use_rslora: true", "tuning.lora.loraplus_lr_ratio: 4"]),
        ("recomputation", Format::Int8, &["train.gradient_checkpointing: true", "train.max_tokens_per_pass: 24"]),
        ("bf16", Format::Nf4, &["train.bf16: true", "tuning.lora.modules_to_save: [\"norm\"]"]),
        (
            "all at once",
            Format::Nf4,
            &[
                "data.packing: true",
                "model.max_seq_len: 32",
                "train.batch_size: 1",
                "train.ema_decay: 0.8",
                "tuning.new_tokens: [\"ab\"]",
                "tuning.lora.use_dora: true",
                "tuning.lora.use_rslora: true",
                "train.gradient_checkpointing: true",
                "train.optim: adamw_8bit",
            ],
        ),
    ];
    let wide = [Format::Nf4, Format::Fp4, Format::Int8].map(|format| (format, widened(&fixture, format)));
    for (name, format, extra) in cases {
        let model = &wide.iter().find(|(of, _)| *of == format).unwrap().1;
        let (dense, coded) =
            (format!("model.name: {}", model.display()), format!("model.quantization: {}", format.name()));
        let mut outs = Vec::new();
        for (side, line) in [("dense", &dense), ("coded", &coded)] {
            let out = fixture.path(&format!("{name}-{side}"));
            let out_line = format!("train.output_dir: {}", out.display());
            let lines = [extra, &[line.as_str(), &out_line]].concat();
            assert!(go(&fixture.config("run", &lines), &[], u64::MAX));
            outs.push(out);
        }
        let adapter = |out: &PathBuf| std::fs::read(out.join("adapter/adapter_model.safetensors")).unwrap();
        assert!(adapter(&outs[0]) == adapter(&outs[1]), "{name}: the adapter's bytes");
        assert_eq!(timeless(&outs[0]), timeless(&outs[1]), "{name}: losses and norms");
    }
}

#[test]
fn a_stopped_run_on_four_bits_goes_on_to_the_bit() {
    straight_equals_stopped(
        &[
            "tuning.mode: qlora",
            "data.packing: true",
            "model.max_seq_len: 32",
            "train.batch_size: 1",
            "train.ema_decay: 0.9",
            "tuning.lora.use_dora: true",
        ],
        &[2, 5, 11],
    );
}

#[test]
fn a_cold_base_is_coded_once_by_the_ranks_of_a_machine() {
    let fixture = Fixture::new();
    let extra =
        ["tuning.mode: qlora", "train.max_steps: 2", "train.strategy: dp", "train.dp_ranks: 2", "train.batch_size: 1"];
    let config = fixture.config("run", &extra);
    let operations = fixture.path("operations");
    let output = tunesmith(&["train", config.to_str().unwrap()])
        .env("LD_PRELOAD", shim())
        .env("CRASH_DIR", fixture.path("cache"))
        .envs([("CRASH_HOW", "kill"), ("CRASH_AT", "0")])
        .env("CRASH_LOG", &operations)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let log = std::fs::read_to_string(&operations).unwrap();
    let kept: Vec<&str> =
        log.lines().filter(|line| line.contains(" rename ") && line.ends_with(".weight.safetensors")).collect();
    assert_eq!(kept.len(), 14, "each matrix once: {kept:?}");
}

fn merge(args: &[&str]) -> Output {
    tunesmith(&[&["merge"], args].concat()).env_remove("CONFIG").output().unwrap()
}

#[track_caller]
fn merges(args: &[&str]) -> String {
    let output = merge(args);
    assert!(output.status.success(), "{args:?}: {}", said(&output));
    said(&output)
}

#[track_caller]
fn refuses(args: &[&str], code: i32, wanted: &[&str]) {
    let output = merge(args);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {}", said(&output));
    for text in wanted {
        assert!(said(&output).contains(text), "{text:?} is missing: {}", said(&output));
    }
}

#[test]
fn a_merge_takes_the_base_as_it_was_trained_on_and_codes_it_again() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["tuning.mode: qlora"]);
    assert!(go(&config, &[], u64::MAX));
    let path = |name: &str| fixture.path(name).display().to_string();
    let (config, dense) = (config.to_str().unwrap().to_owned(), path("dense"));
    let text = merges(&[&config, "--output", &dense]);
    assert!(text.contains("quantized to nf4 with double quantization and dequantized, as in training"), "{text}");
    // The same as onto a dense base with these numbers.
    let (wide, same, adapter) =
        (widened(&fixture, Format::Nf4).display().to_string(), path("same"), path("out/adapter"));
    let onto =
        ["--base", &wide, "--adapter", &adapter, "--output", &same, "--allow", "base_model", "--allow", "quantization"];
    merges(&onto);
    let weights = |dir: &str| std::fs::read(Path::new(dir).join("model.safetensors")).unwrap();
    assert!(weights(&dense) == weights(&same));
    let stored = path("stored");
    let text = merges(&[&config, "--output", &stored, "--allow", "quantization"]);
    assert!(!text.contains("taken in nf4") && weights(&stored) != weights(&dense), "{text}");

    let whole = tensors(Path::new(&dense));
    for (format, skip) in [(Format::Nf4, &[][..]), (Format::Fp4, &["down_proj".to_owned()]), (Format::Int8, &[])] {
        let out = path(format.name());
        let word = format!("model.quantization_skip_modules={}", if skip.is_empty() { "[]" } else { "[down_proj]" });
        let allow: &[&str] = if skip.is_empty() { &[] } else { &["--allow", "quantization", &word] };
        let whole = if skip.is_empty() { whole.clone() } else { tensors(Path::new(&stored)) };
        let args =
            [&[&*config, "--requantize", format.name(), "--output", &out, "--shard-size", "0.00001"], allow].concat();
        let text = merges(&args);
        assert!(text.contains("requantized     ") && text.contains("a weight changes by"), "{text}");
        assert!(text.contains("as written      largest logit difference from the adapter"), "{text}");
        let (arch, files) = open(Path::new(&out));
        assert!(Path::new(&out).join("model.safetensors.index.json").is_file(), "in shards");
        assert_eq!(files.quantization(), Some(format));
        let matrices = quantize::matrices(&arch, skip).unwrap();
        assert_eq!(matrices.len(), 14 - 2 * skip.len());
        let (mut largest, mut sum, mut count) = (0.0f32, 0.0f64, 0);
        for (name, shape, values) in &whole {
            let (_, read) = files.read(name).unwrap();
            if matrices.contains(name) {
                let coded = encode::quantize(values, shape[1], format, true).unwrap().dequantize();
                assert!(read == coded, "{name} in {}", format.name());
                for (value, coded) in values.iter().zip(&coded) {
                    largest = largest.max((value - coded).abs());
                    (sum, count) = (sum + f64::from((value - coded).abs()), count + 1);
                }
            } else {
                assert!(read == *values && files.format_of(name).is_none(), "{name} stays as it was");
            }
        }
        let loss = format!("a weight changes by {largest:.2e} at most, by {:.2e} on average", sum / f64::from(count));
        assert!(text.contains(&loss), "{loss}: {text}");
        let file: Value = serde_json::from_slice(&std::fs::read(Path::new(&out).join("config.json")).unwrap()).unwrap();
        assert_eq!(file["quantization_config"]["load_in_8bit"], format == Format::Int8);
    }
    refuses(&[&config, "--output", "x", "--requantize", "q4_0"], 2, &["expected nf4, fp4 or int8"]);

    // An adapter of a base that is stored in 4 bits: trained and merged, dense and in codes.
    let second = fixture
        .config("second", &[&format!("model.name: {}", path("nf4")), &format!("train.output_dir: {}", path("again"))]);
    let output = train(&second, &[]);
    assert!(output.status.success() && said(&output).contains("QLoRA on 14 modules"), "{}", said(&output));
    let second = second.to_str().unwrap();
    merges(&[second, "--output", &path("again-dense")]);
    let text = merges(&[
        "--base",
        &path("nf4"),
        "--adapter",
        &path("again/adapter"),
        "--requantize",
        "nf4",
        "--output",
        &path("again-nf4"),
    ]);
    assert!(text.contains("nf4 with double quantization, 14 matrices"), "{text}");
    let (_, coded) = open(Path::new(&path("again-nf4")));
    for (name, shape, values) in tensors(Path::new(&path("again-dense"))) {
        let wanted = match coded.format_of(&name) {
            Some(format) => encode::quantize(&values, shape[1], format, true).unwrap().dequantize(),
            None => values,
        };
        assert!(coded.read(&name).unwrap().1 == wanted, "{name}");
    }
    // What `eval` asks: the base in 4 bits alone, and with its adapter.
    for words in [&["--base"][..], &[]] {
        let asked = tunesmith(&[&["eval", second, "gen.max_new_tokens=4"], words].concat()).output().unwrap();
        assert!(asked.status.success(), "{words:?}: {}", said(&asked));
    }
}

#[test]
fn a_merge_across_what_was_trained_is_refused_with_both_sides() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["tuning.mode: qlora", "train.max_steps: 2"]);
    assert!(go(&config, &["model.dtype=bfloat16"], u64::MAX));
    let path = |name: &str| fixture.path(name).display().to_string();
    let config = config.to_str().unwrap();
    let refused = |words: &[&str], wanted: &[&str]| refuses(&[&[config, "--output", "x"], words].concat(), 5, wanted);
    refused(
        &["model.quantization=fp4"],
        &["quantization: nf4 with double_quant: true in its backend.json, fp4 with double_quant: true here"],
    );
    refused(&["model.double_quant=false"], &["nf4 with double_quant: true", "nf4 with double_quant: false"]);
    refused(&["tuning.backend=reference"], &["backend: fused in its backend.json, reference here", "--allow backend"]);
    let accepted = path("accepted");
    let text = merges(&[config, "--output", &accepted, "--allow", "backend", "tuning.backend=reference"]);
    assert!(text.contains("backend: fused in its backend.json, reference here"), "{text}");
    refuses(&[config, "--output", "x", "--allow", "backnd"], 2, &["did you mean backend?"]);

    let base = copy(&fixture, "other", |name, _, values| {
        if name == "model.norm.weight" {
            values[0] += 1.0;
        }
    });
    let adapter = path("out/adapter");
    let base = base.display().to_string();
    refuses(
        &["--base", &base, "--adapter", &adapter, "--output", "x"],
        5,
        &["base_model: ", " here", "--allow base_model"],
    );

    let changed = |file: &str, from: &str, to: &str, wanted: &[&str]| {
        let file = fixture.path("out/adapter").join(file);
        let whole = std::fs::read_to_string(&file).unwrap();
        assert!(whole.contains(from), "{whole}");
        std::fs::write(&file, whole.replacen(from, to, 1)).unwrap();
        refused(&[], wanted);
        std::fs::write(&file, whole).unwrap();
    };
    changed("tokenizer.json", "{", "{ ", &["tokenizer: ", "in its backend.json", "--allow tokenizer"]);
    changed(
        "tokenizer_config.json",
        "add_generation_prompt",
        "messages",
        &["chat_template: ", "--allow chat_template"],
    );
    // With its manifest, the file would be refused because it was changed.
    std::fs::remove_file(fixture.path("out/adapter/manifest.json")).unwrap();
    changed(
        "adapter_config.json",
        "\"lora_alpha\": 32",
        "\"lora_alpha\": 33",
        &["adapter: 14 modules, rank 4, alpha 32", "alpha 33"],
    );
}

#[test]
fn a_merge_rounds_a_float32_base_as_its_run_did() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["model.dtype: bfloat16", "train.max_steps: 2"]);
    assert!(go(&config, &[], u64::MAX));
    let path = |name: &str| fixture.path(name).display().to_string();
    let config = config.to_str().unwrap();
    let text = merges(&[config, "--output", &path("rounded")]);
    assert!(text.contains("rounded to bfloat16, as in training"), "{text}");
    let text = merges(&[config, "--output", &path("stored"), "--allow", "dtype"]);
    assert!(!text.contains("rounded"), "{text}");
    let [base, rounded, stored] = ["model", "rounded", "stored"].map(|name| tensors(&fixture.path(name)));
    for (((name, shape, base), (_, _, rounded)), (_, _, stored)) in base.iter().zip(&rounded).zip(&stored) {
        for ((base, rounded), stored) in base.iter().zip(rounded).zip(stored) {
            let trained_on = if shape.len() > 1 { bf16::from_f32(*base).to_f32() } else { *base };
            let [of_rounded, of_stored] = [rounded - trained_on, stored - base];
            assert!((of_rounded - of_stored).abs() < 1e-6, "{name}: the adapter adds {of_rounded} and {of_stored}");
        }
    }
}

#[test]
fn a_model_of_freeze_has_the_weights_that_it_was_trained_with() {
    let fixture = Fixture::new();
    let lines = ["tuning.mode: freeze", "tuning.freeze.trainable_layers: 1", "train.max_steps: 2"];
    for (name, extra) in [("dtype", "model.dtype: bfloat16"), ("operands", "train.bf16: true")] {
        let out = format!("train.output_dir: {}", fixture.path(name).display());
        let config = fixture.config(name, &[&lines[..], &[extra, &out]].concat());
        assert!(go(&config, &[], u64::MAX));
        let [base, saved] = ["model".to_owned(), format!("{name}/model")].map(|dir| tensors(&fixture.path(&dir)));
        for ((tensor, shape, base), (_, _, saved)) in base.iter().zip(&saved) {
            if tensor.starts_with("model.layers.1.") {
                assert!(saved != base, "{name}: {tensor} is trained");
                continue;
            }
            let narrow = name == "dtype" && shape.len() > 1;
            let held = |value: &f32| if narrow { bf16::from_f32(*value).to_f32() } else { *value };
            assert!(base.iter().map(held).eq(saved.iter().copied()), "{name}: {tensor} is as it was held");
        }
    }
}

/// Starts a rank by hand, as one of two, in a configuration of its own.
pub(super) fn rank(number: usize, port: u16, config: &Path, words: &[String]) -> std::process::Child {
    let mut args = vec!["train".to_owned(), config.display().to_string()];
    args.extend_from_slice(words);
    tunesmith(&args)
        .envs([("RANK", number.to_string()), ("WORLD_SIZE", "2".into()), ("MASTER_PORT", port.to_string())])
        .envs([("MASTER_ADDR", "127.0.0.1"), ("TUNESMITH_TOKEN", "0123456789abcdef")])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Words that make another run of the fixture's, and the fields of the stamp that they change.
fn other_runs(fixture: &Fixture) -> Vec<(String, &'static str)> {
    let other = copy(fixture, "other", |_, _, values| values[0] += 0.5);
    let blank = copy(fixture, "blank", |_, _, _| {});
    let tokenizer = std::fs::read_to_string(blank.join("tokenizer.json")).unwrap();
    std::fs::write(blank.join("tokenizer.json"), tokenizer.replacen('{', "{ ", 1)).unwrap();
    let template = copy(fixture, "template", |_, _, _| {});
    let text = std::fs::read_to_string(template.join("tokenizer_config.json")).unwrap();
    std::fs::write(template.join("tokenizer_config.json"), text.replacen("{% for", " {% for", 1)).unwrap();
    let rows = std::fs::read_to_string(fixture.path("train.jsonl")).unwrap();
    let changed = rows.replacen("\"content\":\"", "\"content\":\"q", 1);
    assert_ne!(rows, changed);
    std::fs::write(fixture.path("rows.jsonl"), changed).unwrap();
    let model = |dir: &Path| format!("model.name={}", dir.display());
    vec![
        (model(&other), "base_model"),
        (model(&blank), "tokenizer"),
        (model(&template), "chat_template"),
        (format!("data.train_path={}", fixture.path("rows.jsonl").display()), "data"),
        ("tuning.backend=reference".into(), "backend"),
        ("model.quantization=nf4".into(), "quantization"),
        ("model.dtype=bfloat16".into(), "dtype"),
        ("tuning.lora.r=2".into(), "adapter"),
    ]
}

/// A field of a stamp.
fn field(dir: &Path, key: &str) -> String {
    let stamp: Value = serde_json::from_slice(&std::fs::read(dir.join("backend.json")).unwrap()).unwrap();
    stamp[key].as_str().unwrap().to_owned()
}

#[test]
fn a_resume_of_another_run_is_refused_with_both_sides() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.save_strategy: steps", "train.save_steps: 2", "train.max_steps: 2"]);
    assert!(go(&config, &[], u64::MAX));
    for (word, key) in other_runs(&fixture) {
        let elsewhere = format!("train.output_dir={}", fixture.path(key).display());
        let output = train(&config, &[&word, &elsewhere, "train.max_steps=1"]);
        assert!(output.status.success(), "{word}: {}", said(&output));
        let [saved, now] = ["out", key].map(|out| field(&fixture.path(out), key));
        assert_ne!(saved, now, "{word}");
        let output = train(&config, &[&word, "--resume", "train.max_steps=4"]);
        assert_eq!(output.status.code(), Some(5), "{word}: {}", said(&output));
        let [saved, now] = [saved, now].map(|text| as_set(key, &text));
        let sides = format!("{key}: {saved} in the checkpoint, {now} now");
        assert!(said(&output).contains(&sides), "{sides}: {}", said(&output));
    }
}

#[test]
fn a_rank_of_another_run_is_named_with_both_sides() {
    if !crate::comm::gloo_is_there() {
        return;
    }
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 2"]);
    for (word, key) in other_runs(&fixture) {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let seats = [rank(0, port, &config, &[]), rank(1, port, &config, std::slice::from_ref(&word))];
        let [first, second] = seats.map(|seat| seat.wait_with_output().unwrap());
        for output in [&first, &second] {
            let text = said(output);
            assert_eq!(output.status.code(), Some(2), "{word}: {text}");
        }
        let text = said(&first);
        assert!(text.contains("rank 1 would train differently from rank 0"), "{word}: {text}");
        let line = text.lines().find(|line| line.trim().starts_with(&format!("{key}: ")));
        let line = line.unwrap_or_else(|| panic!("{word}: {text}"));
        assert!(line.contains(" on rank 0, ") && line.ends_with(" on rank 1"), "{word}: {text}");
    }
    assert!(!fixture.path("out/metrics.jsonl").exists(), "nothing was trained");
}
