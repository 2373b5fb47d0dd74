//! `tunesmith merge` of the result of each way of training: checks the printed difference between the logits of the merged model,
//! in memory and as written, and those of the unmerged adapter.
use crate::parity::{golden, json, other_kinds};
use crate::run::fixture::{Fixture, said, train, tunesmith};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tunesmith::config::DeviceChoice;
use tunesmith::config::arch::Arch;
use tunesmith::export::merge::{compare, plain_model, sample_logits};
use tunesmith::model::adapters::KINDS;
use tunesmith::model::weights::WeightFiles;

fn merge(args: &[&str]) -> String {
    let output = tunesmith(&[&["merge"], args].concat()).env_remove("CONFIG").output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", said(&output));
    said(&output)
}

/// The differences that were printed: of the model in memory, and of the folder.
fn differences(text: &str) -> [f32; 2] {
    ["merged, float32", "as written"].map(|start| {
        let line = text.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("no {start}: {text}"));
        let number = line.split("from the adapter: ").nth(1).unwrap().split(' ').next().unwrap();
        number.parse().unwrap()
    })
}

#[track_caller]
fn equal(what: &str, text: &str) {
    for difference in differences(text) {
        assert!(difference < 1e-4, "{what}: {text}");
    }
}

/// The largest difference of a logit between two model folders.
fn apart(left: &Path, right: &Path) -> f32 {
    let logits = |dir: &Path| sample_logits(&plain_model(dir, None, DeviceChoice::Cpu).unwrap()).unwrap();
    compare(&logits(left), &logits(right), Arch::from_dir(left).unwrap().vocab_size).largest
}

#[test]
fn what_a_run_leaves_merges_whatever_was_trained() {
    let fixture = Fixture::new();
    let modes: Vec<_> = KINDS.iter().map(|kind| (kind.mode.as_str(), format!("tuning.mode: {}", kind.mode))).collect();
    let other =
        |(name, mode): &'_ (&'static str, String)| (*name, vec![mode.clone(), "train.learning_rate: 0.05".into()]);
    let others = modes.iter().filter(|(name, _)| *name != "lora").map(other);
    let cases: [(&str, &[&str]); 8] = [
        ("lora", &[]),
        ("dora", &["tuning.lora.use_dora: true", "tuning.lora.lora_dropout: 0.0"]),
        ("dora_rslora", &["tuning.lora.use_dora: true", "tuning.lora.use_rslora: true"]),
        ("biases", &["tuning.lora.bias: all"]),
        ("pissa", &["tuning.lora.init_lora_weights: pissa"]),
        ("patterns", &["tuning.lora.rank_pattern: {\"q_proj\": 2}", "tuning.lora.alpha_pattern: {\"down_proj\": 3}"]),
        ("tokens", &["tuning.new_tokens: [\"<one>\", \"<two>\"]"]),
        ("qlora", &["tuning.mode: qlora"]),
    ];
    let cases = cases.into_iter().map(|(name, extra)| (name, extra.iter().map(|&line| line.to_owned()).collect()));
    for (name, extra) in cases.chain(others) {
        let extra: Vec<&str> = extra.iter().map(String::as_str).collect();
        let extra = &extra[..];
        let out = format!("train.output_dir: {}", fixture.path(name).display());
        let lines = [extra, &["train.max_steps: 2", "train.warmup_steps: 0", &out]].concat();
        let config = fixture.config(name, &lines);
        let trained = train(&config, &[]);
        assert!(trained.status.success(), "{name}: {}", said(&trained));
        let text = merge(&[config.to_str().unwrap(), "--dtype", "float32"]);
        equal(name, &text);
        let merged = fixture.path(name).join("merged");
        let about: Value = serde_json::from_str(&std::fs::read_to_string(merged.join("config.json")).unwrap()).unwrap();
        let new = extra
            .iter()
            .filter(|line| line.contains("new_tokens"))
            .map(|line| line.matches('<').count())
            .sum::<usize>();
        assert_eq!(about["vocab_size"], 260 + new, "{name}");
        if new == 0 {
            assert!(apart(&merged, &fixture.path("model")) > 1e-3, "{name}: training shows");
        } else {
            let tokenizer = std::fs::read_to_string(merged.join("tokenizer.json")).unwrap();
            assert!(tokenizer.contains("<one>"), "{name}: the tokenizer has the new tokens");
        }
        // QLoRA's adapter was trained on widened codes, and goes onto them: a note says so.
        assert_eq!(text.contains("and dequantized, as in training"), name == "qlora", "{text}");
    }
    // What a card says of a run, whatever its configuration says by now.
    let config = fixture.path("lora.yaml").display().to_string();
    let target = fixture.path("card").display().to_string();
    let exported = tunesmith(&["export", &config, "train.max_steps=9", "--hf", "--output", &target])
        .env_remove("CONFIG")
        .output()
        .unwrap();
    assert!(exported.status.success(), "{}", said(&exported));
    let card = std::fs::read_to_string(fixture.path("card/README.md")).unwrap();
    for wanted in [
        "## Results",
        "| steps | 2 |",
        "training loss of the last step",
        "## Data",
        "train.jsonl",
        "| train.max_steps | 2 |",
    ] {
        assert!(card.contains(wanted), "no {wanted}: {card}");
    }
    // An adapter on top of a merged one below, named by flags and not by a configuration.
    let path = |name: &str| fixture.path(name).display().to_string();
    let (base, below, merged) = (path("model"), path("dora/adapter"), path("stacked"));
    let on_top = format!("tuning.adapters: [{below:?}]");
    let config = fixture.config("top", &[&on_top, "train.max_steps: 2", &format!("train.output_dir: {}", path("top"))]);
    let trained = train(&config, &[]);
    assert!(trained.status.success(), "{}", said(&trained));
    let top = path("top/adapter");
    let parts = ["--base", &base, "--adapter", &top, "--output", &merged, "--dtype", "float32"];
    let refused = tunesmith(&[&["merge"], &parts[..]].concat()).env_remove("CONFIG").output().unwrap();
    assert_eq!(refused.status.code(), Some(5), "the adapter below is missing: {}", said(&refused));
    equal("stacked", &merge(&[&parts[..], &["--below", &below]].concat()));
}

const NEW_TOKENS: &str = "tuning.new_tokens: [\"<one>\", \"<two>\"]";

/// Checks that every command takes the result of the run that `lines` describe: train, resume, merge, infer, eval, export, and
/// training further.
fn is_taken_everywhere(fixture: &Fixture, name: &str, lines: &[&str]) {
    let out = fixture.path(name);
    let place = format!("train.output_dir: {}", out.display());
    let common = [
        place.as_str(),
        "train.save_strategy: steps",
        "train.save_steps: 2",
        "train.max_steps: 4",
        "gen.max_new_tokens: 3",
        "eval.bootstrap_samples: 20",
    ];
    let config = fixture.config(name, &[lines, &common].concat());
    let done = |args: &[&str]| {
        let output = tunesmith(args).env_remove("CONFIG").output().unwrap();
        assert!(output.status.success(), "{name}: {args:?}: {}", said(&output));
        said(&output)
    };
    let words = config.to_str().unwrap();
    done(&["train", words]);
    let adapter = |out: &Path| std::fs::read(out.join("adapter/adapter_model.safetensors")).unwrap();
    let straight = adapter(&out);
    std::fs::remove_dir_all(out.join("checkpoint-000004")).unwrap();
    std::fs::remove_file(out.join("latest")).unwrap();
    done(&["train", words, "--resume"]);
    assert!(adapter(&out) == straight, "{name}: resumed");
    equal(name, &merge(&[words, "--dtype", "float32"]));
    let merged = out.join("merged").display().to_string();
    let grown = lines.contains(&NEW_TOKENS);
    assert_eq!(Arch::from_dir(Path::new(&merged)).unwrap().vocab_size, if grown { 262 } else { 260 }, "{name}");
    let answer = done(&["infer", words, "--prompt", "abc"]);
    assert_eq!(answer, done(&["infer", "--model", &merged, "--prompt", "abc", "gen.max_new_tokens=3"]), "{name}");
    done(&["eval", words]);
    let to = |what: &str| out.join(what).display().to_string();
    for form in ["--hf", "--peft"] {
        done(&["export", words, form, "--output", &to(form)]);
    }
    let peft = std::fs::read(out.join("--peft/adapter_model.safetensors")).unwrap();
    assert!(peft == straight, "{name}: PEFT's file is the adapter's");
    let card = |folder: &str| std::fs::read_to_string(out.join(folder).join("README.md")).unwrap();
    let (model, adapter) = (card("--hf"), card("--peft"));
    assert!(model.contains("| loss (") && adapter.contains("| loss ("), "{name}: the scores of `eval`: {adapter}");
    assert_eq!(adapter.contains("base.resize_token_embeddings(len(tokenizer))"), grown, "{name}: {adapter}");
    let from = format!("tuning.adapter={}", out.join("adapter").display());
    done(&["train", words, &from, &format!("train.output_dir={}", to("more"))]);
    // Other weights in the same folder: what was made from the earlier ones is named, and their scores are on no card.
    let again = done(&["train", words, "--overwrite", "train.max_steps=1", "train.warmup_steps=0"]);
    let left = again.lines().find(|line| line.starts_with("note: ") && line.contains("of the earlier run"));
    assert!(left.is_some_and(|line| line.contains("eval, merged")), "{name}: {again}");
    let said = done(&["export", words, "--peft", "--output", &to("other")]);
    assert!(said.contains("eval/metrics.json is of other weights"), "{name}: {said}");
    assert!(!card("other").contains("| loss ("), "{name}: {}", card("other"));
}

/// New tokens whose tables are trained whole: everything takes what the run has saved.
#[test]
fn new_tokens_with_whole_tables_are_taken_everywhere() {
    let fixture = Fixture::untied();
    for (name, saved) in [("both", "[\"embed_tokens\", \"lm_head\"]"), ("one", "[\"lm_head\"]")] {
        let saved = format!("tuning.lora.modules_to_save: {saved}");
        is_taken_everywhere(&fixture, name, &[NEW_TOKENS, &saved]);
        // Without the tokens the adapter fits no model.
        let adapter = fixture.path(name).join("adapter");
        let lines = ["train.max_steps: 2", &format!("tuning.adapter: {}", adapter.display())];
        let refused = train(&fixture.config("without", &lines), &[]);
        assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
        assert!(said(&refused).contains("set tuning.new_tokens to the tokens"), "{}", said(&refused));
    }
}

/// Tables of a model whose embedding and head share one: two matrices from then on, or one where the tie is ensured.
#[test]
fn whole_tables_of_a_tied_model_are_taken_everywhere() {
    let fixture = Fixture::new();
    let (both, head, embedding) = (
        "tuning.lora.modules_to_save: [\"embed_tokens\", \"lm_head\"]",
        "tuning.lora.modules_to_save: [\"lm_head\"]",
        "tuning.lora.modules_to_save: [\"embed_tokens\"]",
    );
    let ensured = "tuning.lora.ensure_weight_tying: true";
    let tables = ["model.embed_tokens.weight", "lm_head.weight"];
    for (name, lines) in [
        ("head", &[head][..]),
        ("embedding", &[embedding]),
        ("new_both", &[both, NEW_TOKENS]),
        ("new_head", &[head, NEW_TOKENS]),
        ("new_embedding", &[embedding, NEW_TOKENS]),
        ("new_ensured", &[head, ensured, NEW_TOKENS]),
    ] {
        is_taken_everywhere(&fixture, name, lines);
        let out = fixture.path(name);
        let shared = lines.contains(&ensured);
        for folder in ["merged", "--hf"] {
            let config = json(&out.join(folder).join("config.json"));
            assert_eq!(config["tie_word_embeddings"], shared, "{name}");
            let weights = WeightFiles::open_file(&out.join(folder).join("model.safetensors")).unwrap();
            assert_eq!(weights.shape(tables[1]).is_none(), shared, "{name}");
            if !shared {
                assert!(weights.read(tables[0]).unwrap() != weights.read(tables[1]).unwrap(), "{name}");
            }
        }
        // What is not trained stays the base's; with new tokens rows of it are trained by themselves.
        let base = WeightFiles::open_file(&fixture.path("model/model.safetensors")).unwrap().read(tables[0]).unwrap().1;
        let merged = WeightFiles::open_file(&out.join("merged/model.safetensors")).unwrap();
        for (table, kept) in [(tables[0], lines.contains(&head)), (tables[1], lines.contains(&embedding))] {
            if !shared {
                assert_eq!(merged.read(table).unwrap().1[..base.len()] == base, kept, "{name}: {table}");
            }
        }
        let adapter = WeightFiles::open_file(&out.join("adapter/adapter_model.safetensors")).unwrap();
        let stored = tables.map(|table| adapter.read(&format!("base_model.model.{table}")).ok());
        let [embedded, headed] = &stored;
        assert_eq!(embedded.is_some() && embedded == headed, shared, "{name}: PEFT's file has it twice");
        assert_eq!(embedded.is_some(), shared || !lines.contains(&head), "{name}");
        assert_eq!(headed.is_some(), shared || !lines.contains(&embedding), "{name}");
        let rows = json(&out.join("adapter/adapter_config.json"))["trainable_token_indices"].clone();
        assert_eq!(
            rows,
            match name {
                "new_head" => json!({ "embed_tokens": [260, 261] }),
                "new_embedding" => json!({ "lm_head": [260, 261] }),
                _ => Value::Null,
            }
        );
    }
    // A run of the one kind does not go on as the other.
    let words = ["train.max_steps=6", "--resume", "tuning.lora.ensure_weight_tying=true"];
    let refused = train(&fixture.path("embedding.yaml"), &words);
    assert_eq!(refused.status.code(), Some(5), "{}", said(&refused));
    assert!(said(&refused).contains("belongs to another run"), "{}", said(&refused));
    // Nor does an adapter.
    let from = format!("tuning.adapter={}", fixture.path("embedding/adapter").display());
    let other = format!("train.output_dir={}", fixture.path("other").display());
    let refused = train(&fixture.path("embedding.yaml"), &[&from, &other, "tuning.lora.ensure_weight_tying=true"]);
    assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
    assert!(said(&refused).contains("tuning.lora.ensure_weight_tying"), "{}", said(&refused));
    // Full training on top of an adapter that has made two matrices of one; llama.cpp's file has both.
    let path = |name: &str| fixture.path(name).display().to_string();
    let below = format!("tuning.adapters: [{:?}]", path("head/adapter"));
    let place = format!("train.output_dir: {}", path("full"));
    let lines = ["tuning.mode: full", &below, "train.max_steps: 1", "train.warmup_steps: 0", &place];
    let trained = train(&fixture.config("full", &lines), &[]);
    assert!(trained.status.success(), "{}", said(&trained));
    assert_eq!(json(&fixture.path("full/model/config.json"))["tie_word_embeddings"], false);
    assert!(!Arch::from_dir(&fixture.path("full/model")).unwrap().tie_word_embeddings);
    let file = path("head.gguf");
    let base = ["--base", &path("model"), "--adapter", &path("head/adapter")];
    let exported = [&["export"], &base[..], &["--gguf", "f32", "--output", &file, "--pre-tokenizer", "gpt-2"]].concat();
    let exported = tunesmith(&exported).env_remove("CONFIG").output().unwrap();
    assert!(exported.status.success(), "{}", said(&exported));
    let bytes = std::fs::read(&file).unwrap();
    let has = |name: &str| bytes.windows(name.len()).any(|window| window == name.as_bytes());
    assert!(has("token_embd.weight") && has("output.weight"));
    // Such adapters are no matrices to blend, which is what is said.
    let (second, blend) = (path("embedding/adapter"), path("blend"));
    let two = [&base[..], &["--adapter", &second, "--output", &blend]].concat();
    let refused = tunesmith(&[&["merge"], &two[..]].concat()).env_remove("CONFIG").output().unwrap();
    assert_eq!(refused.status.code(), Some(5), "{}", said(&refused));
    assert!(said(&refused).contains("modules_to_save, which cannot be blended"), "{}", said(&refused));
}

/// LFM2's own files say that the head is tied in a key of their own.
#[test]
fn a_tied_head_of_lfm2_that_was_trained_merges_to_a_folder_that_loads() {
    let fixture = Fixture::new();
    let model = fixture.path("model");
    let write = |config: &Value| std::fs::write(model.join("config.json"), config.to_string()).unwrap();
    let mut config = json(&golden("lfm2").join("model/config.json"));
    config["vocab_size"] = 260.into();
    write(&config);
    let steps = ["train.max_steps: 2", "train.warmup_steps: 0", "train.learning_rate: 0.05"];
    let lines = [&steps[..], &["model.init: random", "tuning.mode: full"]].concat();
    let trained = train(&fixture.config("whole", &lines), &[]);
    assert!(trained.status.success(), "{}", said(&trained));
    std::fs::rename(fixture.path("out/model/model.safetensors"), model.join("model.safetensors")).unwrap();
    std::fs::remove_dir_all(fixture.path("out")).unwrap();
    config.as_object_mut().unwrap().remove("tie_word_embeddings");
    config["tie_embedding"] = true.into();
    write(&config);
    let config = fixture.config("run", &[&steps[..], &["tuning.lora.modules_to_save: [\"lm_head\"]"]].concat());
    let trained = train(&config, &[]);
    assert!(trained.status.success(), "{}", said(&trained));
    equal("lfm2", &merge(&[config.to_str().unwrap(), "--dtype", "float32"]));
    let merged = fixture.path("out/merged");
    assert!(!Arch::from_dir(&merged).unwrap().tie_word_embeddings);
    assert_eq!(json(&merged.join("config.json"))["tie_embedding"], false);
    assert!(apart(&merged, &model) > 1e-3, "training shows");
}

#[test]
fn what_peft_wrote_merges_too() {
    let root = tempfile::tempdir().unwrap();
    let golden =
        |path: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/a").join(path).display().to_string();
    let lora = ["dora", "rslora", "modules_to_save", "patterns"].map(|variant| (variant.to_owned(), "llama"));
    let others = other_kinds().into_iter().map(|variant| (variant, "qwen2"));
    for (variant, family) in lora.into_iter().chain(others) {
        let variant = variant.as_str();
        let (base, adapter) =
            (golden(&format!("{family}/model")), golden(&format!("variants/{variant}/adapter_final")));
        let merged = root.path().join(variant);
        let target = merged.display().to_string();
        equal(variant, &merge(&["--base", &base, "--adapter", &adapter, "--output", &target, "--dtype", "float32"]));
        assert!(apart(&merged, Path::new(&base)) > 1e-3, "{variant}: training shows");
    }
    // Where the base shares a matrix between embedding and head.
    for (case, shared) in [
        ("tied_both", false),
        ("tied_embedding", false),
        ("tied_rows_of_the_head", false),
        ("tied_ensured", true),
        ("rows_tied", true),
    ] {
        let (base, adapter) = (golden("qwen2/model"), golden(&format!("../adapters/{case}/adapter")));
        let merged = root.path().join(case);
        let target = merged.display().to_string();
        equal(case, &merge(&["--base", &base, "--adapter", &adapter, "--output", &target, "--dtype", "float32"]));
        assert_eq!(json(&merged.join("config.json"))["tie_word_embeddings"], shared, "{case}");
        assert!(apart(&merged, Path::new(&base)) > 1e-3, "{case}: training shows");
    }
}

#[test]
fn a_base_in_four_bits_is_merged_into_a_dense_model() {
    let golden =
        |path: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path).display().to_string();
    let root = tempfile::tempdir().unwrap();
    for label in ["nf4", "nf4dq"] {
        let (base, adapter) = (golden(&format!("b/llama_{label}/model")), golden("a/llama/adapter_init"));
        let merged = root.path().join(label);
        let target = merged.display().to_string();
        let text = merge(&["--base", &base, "--adapter", &adapter, "--output", &target, "--dtype", "float32"]);
        equal(label, &text);
        let config = std::fs::read_to_string(merged.join("config.json")).unwrap();
        assert!(!config.contains("quantization_config"), "{config}");
        let dense = root.path().join(format!("{label}_dense")).display().to_string();
        merge(&["--base", &golden("a/llama/model"), "--adapter", &adapter, "--output", &dense, "--dtype", "float32"]);
        let lost = apart(&merged, Path::new(&dense));
        assert!(lost > 1e-3, "{label}: the base is the coded one, whose numbers differ: {lost}");
    }
}

#[test]
fn blends_of_every_kind_merge() {
    let golden = |path: &str| {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/a/llama").join(path).display().to_string()
    };
    let root = tempfile::tempdir().unwrap();
    let (base, first, second) = (golden("model"), golden("adapter_init"), golden("adapter_final"));
    let mut before: Vec<PathBuf> = Vec::new();
    for how in ["cat", "linear", "ties", "dare_linear", "dare_ties", "magnitude_prune"] {
        let merged = root.path().join(how);
        let target = merged.display().to_string();
        let parts = ["--base", &base, "--adapter", &first, "--adapter", &second, "--weights", "0.8,0.4"];
        let keeps_all = ["cat", "linear"].contains(&how);
        let density: &[&str] = if keeps_all { &[] } else { &["--density", "0.4"] };
        let rest = ["--combine", how, "--output", &target, "--dtype", "float32"];
        equal(how, &merge(&[&parts[..], density, &rest].concat()));
        for other in &before {
            assert!(apart(&merged, other) > 1e-4, "{how} is {}", other.display());
        }
        before.push(merged);
    }
    let parts = ["merge", "--base", &base, "--adapter", &first, "--adapter", &second];
    let target = root.path().join("refused").display().to_string();
    for (flags, expected) in [
        (&["--weights", "nan,1"][..], "invalid value 'nan' for '--weights <W,…>': expected a number"),
        (&["--weights", "1,inf"], "invalid value 'inf' for '--weights <W,…>': expected a number"),
        (&["--density", "0.4"], "--density has no effect with --combine cat"),
        (&["--combine", "linear", "--density", "0.4"], "--density has no effect with --combine linear"),
        (&["--combine", "ties", "--seed", "1"], "--seed has no effect with --combine ties"),
    ] {
        let args = [&parts[..], flags, &["--output", &target]].concat();
        let ended = std::process::Command::new(env!("CARGO_BIN_EXE_tunesmith")).args(args).output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.code() == Some(2) && said.contains(expected), "{flags:?}: {said}");
        assert!(!Path::new(&target).exists());
    }
}

#[test]
fn an_adapter_that_overflows_is_told_as_what_it_is() {
    let root = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/a");
    let adapter = root.path().join("adapter");
    std::fs::create_dir(&adapter).unwrap();
    let from = golden.join("variants/rslora/adapter_final");
    std::fs::copy(from.join("adapter_model.safetensors"), adapter.join("adapter_model.safetensors")).unwrap();
    let mut config = json(&from.join("adapter_config.json"));
    config["lora_alpha"] = json!(1e308);
    std::fs::write(adapter.join("adapter_config.json"), config.to_string()).unwrap();
    let [base, adapter, output] =
        [golden.join("llama/model"), adapter, root.path().join("merged")].map(|path| path.display().to_string());
    let refused = tunesmith(&["merge", "--base", &base, "--adapter", &adapter, "--output", &output]).output().unwrap();
    assert_eq!(refused.status.code(), Some(8), "{}", said(&refused));
    assert!(said(&refused).contains("with its adapter are not finite"), "{}", said(&refused));
    assert!(said(&refused).contains("use an earlier checkpoint") && !Path::new(&output).exists(), "{}", said(&refused));
}
