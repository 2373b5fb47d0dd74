//! Importing configurations of other toolkits: every key has an outcome, and the written file loads or is refused by name.
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use proptest::prelude::*;
use serde_json::{Value, json};
use tunesmith::Kind;
use tunesmith::config::{self, Node};
use tunesmith::import::{self, Imported, Outcome, Toolkit};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/import")
}

fn read(name: &str) -> Imported {
    import::read(&folder().join(name), None).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The value that the written file has under a key, as the configuration reads it.
fn value(made: &Imported, key: &str) -> Value {
    let loaded =
        config::load_text(Path::new("made.yaml"), &made.yaml).unwrap_or_else(|error| panic!("{error}\n{}", made.yaml));
    let setting = loaded.settings.iter().find(|setting| setting.key == key);
    setting.unwrap_or_else(|| panic!("{key} is no key")).value.clone()
}

/// The value of the line `key:` in the written text, for keys of files that this version refuses.
fn line<'a>(made: &'a Imported, key: &str) -> &'a str {
    let found = made.yaml.lines().find_map(|line| line.trim().strip_prefix(key)?.strip_prefix(": "));
    found.unwrap_or_else(|| panic!("{key} is not in\n{}", made.yaml))
}

fn outcome_of<'a>(made: &'a Imported, key: &str) -> &'a import::KeyOutcome {
    let found = made.outcomes.iter().find(|one| one.given() == key || one.given().starts_with(&format!("{key}: ")));
    found.unwrap_or_else(|| panic!("no outcome of {key} in {:#?}", made.outcomes))
}

#[test]
fn every_example_is_recognised_and_loads_or_is_refused_as_it_says() {
    let mut seen = 0;
    for entry in std::fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|end| end != "yaml") {
            continue;
        }
        seen += 1;
        let text = std::fs::read_to_string(&path).unwrap();
        let header = text.lines().next().unwrap().strip_prefix("# expects: ").unwrap().to_owned();
        let (toolkit, end) = header.split_once(", ").unwrap();
        let made = import::read(&path, None).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert_eq!(made.toolkit.title().to_lowercase(), toolkit, "{}", path.display());
        let refused: Vec<&str> = made.refused.iter().map(|one| one.setting.as_str()).collect();
        match end.strip_prefix("refused ") {
            Some(expected) => assert_eq!(refused.join("; "), expected, "{}\n{}", path.display(), made.yaml),
            None => assert!(refused.is_empty(), "{}: {refused:?}\n{}", path.display(), made.yaml),
        }
        let loaded = config::load_text(Path::new("made.yaml"), &made.yaml);
        match loaded {
            // What others include names no model; each of them was loaded with it.
            Err(error) if end == "a base" => assert!(error.message().contains("model.name is not set"), "{error}"),
            loaded => assert_eq!(loaded.is_ok(), refused.is_empty(), "{}: {loaded:?}", path.display()),
        }
    }
    assert!(seen >= 13, "{seen}");
}

#[test]
fn a_configuration_of_another_toolkit_in_the_place_of_ours_is_told_with_the_command_that_turns_it_into_one() {
    let root = tempfile::tempdir().unwrap();
    let texts = [
        ("axo lotl.yaml", "Axolotl", "base_model: x\nadapter: lora\ndatasets: [{path: a.jsonl, type: alpaca}]\n"),
        ("factory.yaml", "LLaMA-Factory", "model_name_or_path: x\nstage: sft\nfinetuning_type: lora\ndataset: a\n"),
        ("swift.yaml", "ms-swift", "model: x\ntuner_type: lora\ndataset: a.jsonl\n"),
        ("trl.yaml", "TRL", "model_name_or_path: x\nuse_peft: true\ndataset_name: owner/rows\n"),
        ("ours.yaml", "", "adapter: lora\ntrain: {max_steps: 1}\n"),
    ];
    for (name, toolkit, text) in texts {
        let path = root.path().join(name);
        std::fs::write(&path, text).unwrap();
        for command in ["train", "config", "data", "eval"] {
            let output = Command::new(env!("CARGO_BIN_EXE_tunesmith"))
                .args([command, name])
                .current_dir(root.path())
                .env_remove("CONFIG")
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(2), "{command} {name}: {said}");
            let stem = name.trim_end_matches(".yaml");
            let paste = match stem {
                "axo lotl" => "`tunesmith import 'axo lotl.yaml' --out 'axo lotl.tunesmith.yaml'`".to_owned(),
                stem => format!("`tunesmith import {stem}.yaml --out {stem}.tunesmith.yaml`"),
            };
            let told = said.contains(&format!("a configuration of {toolkit}: {paste}"));
            assert_eq!(told, !toolkit.is_empty(), "{command} {name}: {said}");
        }
    }
}

#[test]
fn axolotls_defaults_and_words_become_ours() {
    let made = read("axolotl_lora.yaml");
    let expected = [
        ("model.name", "\"models/support-1b\""),
        ("model.max_seq_len", "1024"),
        ("tuning.mode", "\"lora\""),
        ("tuning.lora.r", "32"),
        ("tuning.lora.lora_alpha", "16.0"),
        ("tuning.lora.target_modules", "\"auto\""),
        ("tuning.lora.modules_to_save", "[\"lm_head\"]"),
        ("train.batch_size", "2"),
        ("train.eval_batch_size", "2"),
        ("train.grad_accum", "4"),
        ("train.optim", "\"adamw_torch\""),
        ("train.learning_rate", "0.0002"),
        ("train.warmup_steps", "10"),
        ("train.eval_strategy", "\"epoch\""),
        ("train.save_strategy", "\"epoch\""),
        ("train.save_total_limit", "4"),
        ("train.bf16", "true"),
        ("data.train_path", "[\"./rows/tickets.jsonl\"]"),
        ("data.format", "\"messages\""),
        ("data.truncation", "\"drop\""),
        ("data.packing", "true"),
        ("data.split", "0.05"),
        ("data.loss_on", "\"assistant\""),
        ("logging.run_name", "\"first-try\""),
    ];
    for (key, expected) in expected {
        assert_eq!(value(&made, key).to_string(), expected, "{key}");
    }
    let outcomes = [
        ("micro_batch_size", Outcome::Taken),
        ("optimizer", Outcome::Changed),
        ("bf16", Outcome::Changed),
        ("flash_attention", Outcome::NotNeeded),
        ("special_tokens", Outcome::NotNeeded),
        ("lora_model_dir", Outcome::NotNeeded),
        ("wandb_project", Outcome::Unsupported),
        ("deepspeed", Outcome::Taken),
        ("lora_dropouts", Outcome::Unsupported),
    ];
    for (key, outcome) in outcomes {
        assert_eq!(outcome_of(&made, key).outcome, outcome, "{key}");
    }
    assert!(outcome_of(&made, "lora_dropouts").why.contains("lora_dropout"), "the nearest key is named");
    assert_eq!(value(&made, "train.strategy"), "zero1", "its file is read");
}

#[test]
fn raw_text_muon_and_a_cosine_with_a_floor() {
    let made = read("axolotl_full.yaml");
    assert_eq!(line(&made, "mode"), "full # Axolotl: no adapter: every weight is trained");
    assert!(line(&made, "loss_on").starts_with("all") && line(&made, "format").starts_with("text"));
    assert!(line(&made, "lr_scheduler_type").starts_with("cosine_with_min_lr"));
    assert_eq!(line(&made, "lr_scheduler_kwargs"), "{min_lr_rate: 0.1}");
    assert_eq!(line(&made, "learning_rate"), "0.0003", "a number in quotes is one");
    assert!(line(&made, "warmup_ratio").starts_with("0.03"));
    assert_eq!(line(&made, "fp16"), "true");
}

#[test]
fn raw_text_is_cut_into_pieces_and_long_chats_are_left_out() {
    let truncation = |name: &str| line(&read(name), "truncation").split(' ').next().unwrap().to_owned();
    assert_eq!(truncation("axolotl_full.yaml"), "split", "pretraining_dataset");
    assert_eq!(truncation("axolotl_lora.yaml"), "drop", "chats");
    assert_eq!(truncation("axolotl_unfrozen.yaml"), "split", "raw text beside chats");
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("theirs.yaml");
    let text = |more: &str| {
        std::fs::write(
            &path,
            format!("base_model: m\nsequence_len: 128\nmicro_batch_size: 2\nadapter: lora\ndatasets:\n{more}"),
        )
        .unwrap();
        import::read(&path, Some(Toolkit::Axolotl)).unwrap()
    };
    let rows = "  - {path: a.jsonl, type: completion}\n";
    assert_eq!(value(&text(rows), "data.truncation"), "split");
    // It is about chats alone: texts are in pieces before it is looked at.
    for word in ["drop", "truncate", "raise"] {
        let made = text(&format!("{rows}excess_length_strategy: {word}\n"));
        assert_eq!(value(&made, "data.truncation"), "split", "{word}");
        assert_eq!(outcome_of(&made, "excess_length_strategy").outcome, Outcome::Changed);
    }
    let mixed = text(&format!("{rows}  - {{path: b.jsonl, type: chat_template}}\n"));
    assert_eq!(value(&mixed, "data.truncation"), "split");
    assert!(line(&mixed, "truncation").contains("left out there"), "{}", mixed.yaml);
}

#[test]
fn a_data_set_of_the_hub_keeps_its_configuration_and_form() {
    let made = read("axolotl_unfrozen.yaml");
    assert!(
        made.yaml.contains("- {name: owner/chats, config: clean, split: train, format: sharegpt}"),
        "{}",
        made.yaml
    );
    assert!(made.yaml.contains("- {path: rows/extra.jsonl, format: text}"), "{}", made.yaml);
    assert_eq!(line(&made, "trainable_patterns"), "[\"^lm_head.weight$\", \"model.layers.(10|11).mlp\"]");
    assert!(outcome_of(&made, "warmup_steps").why.contains("no warm-up"));
}

#[test]
fn llama_factorys_names_and_defaults_become_ours() {
    let made = read("factory_lora.yaml");
    let expected = [
        ("tuning.lora.r", "8"),
        ("tuning.lora.lora_alpha", "16.0"),
        ("tuning.lora.use_rslora", "true"),
        ("model.max_seq_len", "1024"),
        ("data.chat_template", "\"llama3\""),
        ("data.format", "\"messages\""),
        ("data.loss_on", "\"completion\""),
        ("data.packing", "true"),
        ("data.num_proc", "4"),
        ("data.max_rows", "1000"),
        ("data.split", "0.1"),
        ("train.grad_accum", "8"),
        ("train.lr_scheduler_type", "\"cosine\""),
        ("train.save_total_limit", "null"),
        ("train.eval_steps", "500"),
        ("logging.tensorboard", "false"),
    ];
    for (key, expected) in expected {
        assert_eq!(value(&made, key).to_string(), expected, "{key}");
    }
    let paths = value(&made, "data.datasets").to_string();
    assert!(paths.contains("data/tickets.json") && paths.contains("data/letters.json"), "{paths}");
}

#[test]
fn a_mix_keeps_its_weights_and_frozen_blocks_their_names() {
    let made = read("factory_mix.yaml");
    assert!(
        made.yaml.contains("{name: owner/rows, config: clean, split: train, format: sharegpt, weight: 0.3}")
            || made.yaml.contains("weight: 0.3}"),
        "{}",
        made.yaml
    );
    assert_eq!(line(&made, "mix_strategy"), "interleave_over");
    assert_eq!(line(&made, "adapter"), "saves/first");
    let made = read("factory_freeze.yaml");
    assert_eq!(line(&made, "mode"), "freeze");
    assert_eq!(line(&made, "trainable_layers"), "2");
    assert_eq!(line(&made, "trainable_modules"), "[mlp, self_attn]");
    assert!(line(&made, "trainable_patterns").contains("embed_tokens"));
    let made = read("factory_qlora.yaml");
    assert!(outcome_of(&made, "dataset").why.contains("unknown_name"));
    let made = read("factory_freeze.yaml");
    assert_eq!(value(&made, "train.strategy"), "zero3", "a file that is not here has a name");
    assert_eq!(outcome_of(&made, "deepspeed").outcome, Outcome::Changed);
    let made = read("axolotl_qlora.yaml");
    assert_eq!(value(&made, "train.strategy"), "fsdp");
    assert!(made.yaml.contains("fsdp_config: {offload_params: true}"), "{}", made.yaml);
    let made = read("factory_qlora.yaml");
    assert_eq!(line(&made, "loraplus_lr_ratio"), "16.0");
}

#[test]
fn sft_plays_includes_are_merged_and_its_broken_keys_are_right() {
    let made = read("play_run.yaml");
    let expected = [
        ("train.seed", "7"),
        ("train.batch_size", "4"),
        ("train.learning_rate", "0.0002"),
        ("train.lr_scheduler_type", "\"cosine\""),
        ("train.warmup_ratio", "0.06"),
        ("train.logging_steps", "2"),
        ("train.eval_strategy", "\"steps\""),
        ("train.load_best_model_at_end", "true"),
        ("tuning.lora.lora_alpha", "16.0"),
        ("data.val_path", "[\"data/val.jsonl\"]"),
        ("data.split", "0.0"),
        ("train.generation_max_new_tokens", "48"),
        ("train.predict_with_generate", "true"),
    ];
    for (key, expected) in expected {
        assert_eq!(value(&made, key).to_string(), expected, "{key}");
    }
    assert_eq!(value(&made, "train.metric_for_best_model"), "rougeL", "answers are scored");
    assert_eq!(outcome_of(&made, "tuning.backend").outcome, Outcome::NotNeeded);
    assert!(outcome_of(&made, "data.template_path").why.contains("messages"), "its templates are given other names");
    let made = read("play_dapt.yaml");
    assert!(made.yaml.contains("- {path: data/papers.jsonl, format: text, weight: 0.75}"), "{}", made.yaml);
    assert!(made.yaml.contains("packing: true") && made.yaml.contains("truncation: split"), "{}", made.yaml);
}

/// What a text becomes that lies beside two files of DeepSpeed's.
fn imported(toolkit: Toolkit, text: &str) -> Imported {
    let temporary = tempfile::tempdir().unwrap();
    std::fs::write(temporary.path().join("ds.json"), r#"{"zero_optimization": {"stage": 2}}"#).unwrap();
    std::fs::write(temporary.path().join("odd.json"), r#"{"zero_optimisation": {"stage": 2}}"#).unwrap();
    let path = temporary.path().join("theirs.yaml");
    let base = match toolkit {
        Toolkit::Axolotl => "base_model: m\nsequence_len: 64\nlearning_rate: 0.001\nmicro_batch_size: 1\n",
        Toolkit::LlamaFactory => "model_name_or_path: m\nstage: sft\ndo_train: true\n",
        Toolkit::MsSwift => "model: m\ndataset: a.jsonl\n",
        Toolkit::SftPlay => "model: {name: m}\n",
        Toolkit::Trl => "model_name_or_path: m\ndataset_name: owner/rows\n",
    };
    std::fs::write(&path, format!("{base}{text}")).unwrap();
    let made = import::read(&path, Some(toolkit)).unwrap_or_else(|error| panic!("{text}: {error}"));
    if made.refused.is_empty() {
        value(&made, "train.seed");
    }
    made
}

#[test]
fn rows_that_cannot_be_read_as_they_are_are_named() {
    let entry = |more: &str| format!("datasets:\n- {{path: a.jsonl, type: chat_template, {more}}}\n");
    let of = |more: &str, key: &str| {
        let made = imported(Toolkit::Axolotl, &entry(more));
        let found = outcome_of(&made, &format!("datasets[0].{key}"));
        (found.outcome, found.why.clone())
    };
    assert_eq!(of("roles: {user: [human], assistant: [gpt, model]}", "roles").0, Outcome::NotNeeded);
    assert_eq!(of("roles: {assistant: [bot]}", "roles").0, Outcome::Unsupported);
    assert_eq!(of("train_on_eos: last", "train_on_eos").0, Outcome::Unsupported);
    assert!(of("fild: x", "fild").1.contains("unknown"));
    assert!(of("field_system: rules", "field_system").1.contains("rename"));

    let data = folder().join("data");
    let factory =
        |name: &str| imported(Toolkit::LlamaFactory, &format!("dataset_dir: {}\ndataset: {name}\n", data.display()));
    assert!(outcome_of(&factory("wiki"), "dataset.wiki.file_name").why.contains("one {\"text\": …} a line"));
    let told = factory("told");
    assert_eq!(value(&told, "data.format"), "auto", "rows may have earlier turns");
    assert!(outcome_of(&told, "dataset.told.columns.system").why.contains("rename the field to system"));
}

#[test]
fn rows_and_settings_of_pictures_become_ours() {
    let data = folder().join("data").display().to_string();
    let rows = format!("dataset_dir: {data}\ndataset: pictures\n");
    let told = format!("dataset_dir: {data}\ndataset: told\n");
    let made = imported(Toolkit::LlamaFactory, &format!("{rows}media_dir: img\nfreeze_vision_tower: true\n"));
    assert!(made.refused.is_empty() && value(&made, "data.train_path")[0].as_str().unwrap().ends_with("pictures.json"));
    assert_eq!(value(&made, "data.image_dir"), "img");
    assert_eq!(outcome_of(&made, "freeze_vision_tower").outcome, Outcome::NotNeeded);
    let frozen = ["freeze_vision", "freeze_connector", "freeze_language"];
    let of = |made: &Imported| frozen.map(|key| value(made, &format!("tuning.{key}")));
    assert_eq!(of(&made), [Value::Bool(true), Value::Null, Value::Bool(false)]);
    let other = "freeze_vision_tower: false\nfreeze_multi_modal_projector: false\nfreeze_language_model: true\nimage_max_pixels: 3000\n";
    let made = imported(Toolkit::LlamaFactory, &format!("{rows}{other}"));
    assert_eq!(of(&made), [Value::Bool(false), Value::Bool(false), Value::Bool(true)]);
    assert_eq!(value(&made, "vision.max_pixels"), 3000);
    // Its default limit is lower than that of the models.
    for (template, rows, pixels) in
        [("qwen2_vl", &rows, json!(589_824)), ("llava", &rows, Value::Null), ("qwen3_5", &told, Value::Null)]
    {
        let made = imported(Toolkit::LlamaFactory, &format!("{rows}template: {template}\n"));
        assert_eq!(value(&made, "vision.max_pixels"), pixels, "{template}");
    }
    let made = imported(Toolkit::LlamaFactory, &format!("{rows}{other}template: qwen2_vl\n"));
    assert_eq!(value(&made, "vision.max_pixels"), 3000);
    let made = imported(Toolkit::Axolotl, "freeze_mm_modules: false\nprocessor_type: AutoProcessor\nimage_size: 512\n");
    assert_eq!(of(&made)[..2], [Value::Bool(false), Value::Bool(false)]);
    assert_eq!(outcome_of(&made, "image_size").outcome, Outcome::Unsupported);
}

#[test]
fn ms_swifts_names_and_defaults_become_ours() {
    let made = read("swift_lora.yaml");
    let rates = r#"{"(multi_modal_projector|connector|merger|deepstack_merger_list).*":0.00002,"(vision_tower|vision_model|visual).*":0.00001}"#;
    let expected = [
        ("model.name", "\"Qwen/Qwen2.5-VL-3B-Instruct\""),
        ("model.max_seq_len", "4096"),
        ("vision.max_pixels", "1003520"),
        ("tuning.mode", "\"lora\""),
        ("tuning.lora.r", "16"),
        ("tuning.lora.lora_alpha", "32.0"),
        ("tuning.lora.lora_dropout", "0.05"),
        ("tuning.lora.target_modules", "\"auto\""),
        ("tuning.vision_target_modules", "[\"all-linear\"]"),
        ("tuning.freeze_vision", "true"),
        ("tuning.freeze_connector", "false"),
        ("train.learning_rates", rates),
        ("train.adam_beta2", "0.95"),
        ("train.weight_decay", "0.1"),
        ("train.lr_scheduler_type", "\"cosine\""),
        ("train.lr_scheduler_kwargs", "{\"num_cycles\":0.5}"),
        ("train.warmup_ratio", "0.05"),
        ("train.eval_strategy", "\"steps\""),
        ("train.eval_steps", "200"),
        ("train.bf16", "true"),
        ("train.strategy", "\"zero2\""),
        ("train.ddp_bucket_cap_mb", "30"),
        ("data.truncation", "\"drop\""),
        ("data.loss_on", "\"completion\""),
        ("data.max_rows", "1000"),
        ("data.val_path", "[\"rows/val.jsonl\"]"),
    ];
    for (key, expected) in expected {
        assert_eq!(value(&made, key).to_string(), expected, "{key}");
    }
    assert!(made.yaml.contains("- {path: rows/pictures.jsonl}"), "{}", made.yaml);
    let outcomes = [
        ("system", Outcome::Unsupported),
        ("attn_impl", Outcome::NotNeeded),
        ("ENV.CUDA_VISIBLE_DEVICES", Outcome::NotNeeded),
        ("dataloader_num_workers", Outcome::NotNeeded),
        ("loss_scale", Outcome::Changed),
    ];
    for (key, outcome) in outcomes {
        assert_eq!(outcome_of(&made, key).outcome, outcome, "{key}");
    }
    let made = read("swift_full.yaml");
    assert_eq!(line(&made, "mode").split(' ').next(), Some("freeze"));
    assert_eq!(value(&made, "tuning.freeze.trainable_patterns"), json!([r"lm_head.*", r"model\.norm.*"]));
    assert!(made.yaml.contains("- {path: rows/a.jsonl, weight: 0.7}"), "{}", made.yaml);
    assert_eq!(value(&made, "data.mix_strategy"), "interleave_over");
    assert_eq!(value(&made, "train.eval_strategy"), "epoch", "it validates when it saves");
    assert_eq!(value(&made, "train.effective_batch"), 16);
    assert_eq!(value(&made, "train.learning_rate").to_string(), "0.00001");
    assert_eq!(value(&made, "eval.metrics").to_string(), r#"["rouge","bleu"]"#);
}

#[test]
fn parts_of_ms_swift_depend_on_each_other() {
    let of = |text: &str| imported(Toolkit::MsSwift, text);
    let made = of("tuner_type: full\nfreeze_vit: false\nfreeze_llm: true\nvit_lr: 1e-6\n");
    assert_eq!(value(&made, "tuning.freeze_vision"), false);
    assert_eq!(value(&made, "tuning.freeze_language"), true);
    let made = of("train_type: lora\nquant_method: bnb\nquant_bits: 4\ntarget_modules: [q_proj, v_proj]\n");
    assert_eq!(value(&made, "tuning.mode"), "qlora");
    assert_eq!(value(&made, "tuning.lora.target_modules"), json!(["q_proj", "v_proj"]));
    let made = of("torch_dtype: float16\nlearning_rate: 1e-5\nvit_lr: 1e-6\n");
    assert_eq!((value(&made, "train.fp16"), value(&made, "train.bf16")), (json!(true), json!(false)));
    // Without a rate of its own, a connector inside of the encoder keeps that of the model.
    let rates = value(&made, "train.learning_rates").to_string();
    assert!(
        rates.starts_with(r#"{"(multi_modal_projector|connector|merger|deepstack_merger_list).*":0.00001"#),
        "{rates}"
    );
    let made = of("per_device_train_batch_size: 3\nmodel_kwargs: '{\"min_pixels\": 3136, \"fps\": 2}'\n");
    assert_eq!(value(&made, "train.grad_accum"), 6);
    assert_eq!(value(&made, "vision.min_pixels"), 3136);
    assert_eq!(outcome_of(&made, "model_kwargs.fps").outcome, Outcome::Unsupported);
    assert!(outcome_of(&of("lora_ranks: 8\n"), "lora_ranks").why.contains("lora_rank"));
}

/// The list of its keys comes from its sources (`scripts/golden/ms_swift_keys.py`).
#[test]
fn every_key_of_ms_swift_is_known() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/foreign/ms_swift.json");
    let list: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let keys = list["keys"].as_object().unwrap();
    assert!(keys.len() > 240, "{}", keys.len());
    for key in keys.keys().filter(|key| !["model", "dataset"].contains(&key.as_str())) {
        let made = imported_whatever(&format!("{key}: 3\n"));
        let found = outcome_of(&made, key);
        assert!(!found.why.starts_with("unknown"), "{found:?}");
    }
}

/// As [`imported`], where the result need not load.
fn imported_whatever(text: &str) -> Imported {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("theirs.yaml");
    std::fs::write(&path, format!("model: m\ndataset: a.jsonl\n{text}")).unwrap();
    import::read(&path, Some(Toolkit::MsSwift)).unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn trls_names_and_defaults_become_ours() {
    let made = read("trl_lora.yaml");
    let expected = [
        ("model.name", "\"Qwen/Qwen2.5-0.5B\""),
        ("model.double_quant", "false"),
        ("tuning.mode", "\"qlora\""),
        ("tuning.lora.r", "32"),
        ("tuning.lora.lora_dropout", "0.05"),
        ("train.batch_size", "2"),
        ("train.adam_beta2", "0.95"),
        ("train.warmup_ratio", "0.03"),
        ("train.bf16", "true"),
        ("train.gradient_checkpointing", "true"),
        ("train.strategy", "\"zero2\""),
        ("data.loss_on", "\"assistant\""),
        ("data.packing", "true"),
    ];
    for (key, expected) in expected {
        assert_eq!(value(&made, key).to_string(), expected, "{key}");
    }
    assert!(made.yaml.contains("- {name: trl-lib/Capybara, split: train}"), "{}", made.yaml);
    for (key, outcome) in [
        ("attn_implementation", Outcome::NotNeeded),
        ("dataloader_num_workers", Outcome::NotNeeded),
        ("auto_find_batch_size", Outcome::NotNeeded),
        ("eos_token", Outcome::Unsupported),
    ] {
        assert_eq!(outcome_of(&made, key).outcome, outcome, "{key}");
    }
    let made = read("trl_full.yaml");
    assert_eq!((value(&made, "tuning.mode"), value(&made, "train.bf16")), (json!("full"), json!(false)));
    assert_eq!((value(&made, "data.split"), value(&made, "data.loss_on")), (json!(0.05), json!("all")));
    assert_eq!(value(&made, "train.learning_rate"), 2e-5);
    assert!(made.yaml.contains("- {path: rows/a.jsonl}"), "{}", made.yaml);
    let of = |text: &str| imported(Toolkit::Trl, text);
    let made = of("completion_only_loss: true\nlora_r: 4\nload_in_4bit: true\nauto_find_batch_size: true\n");
    assert_eq!(value(&made, "data.loss_on"), "completion");
    assert_eq!(outcome_of(&made, "lora_r").outcome, Outcome::NotNeeded, "there is no adapter");
    for key in ["load_in_4bit", "auto_find_batch_size"] {
        assert_eq!(outcome_of(&made, key).outcome, Outcome::Unsupported, "{key}");
    }
    let made = of("use_peft: true\nload_in_8bit: true\n");
    assert_eq!((value(&made, "tuning.mode"), value(&made, "model.quantization")), (json!("lora"), json!("int8")));
    assert_eq!(value(&made, "tuning.lora.target_modules"), json!(["q_proj", "v_proj"]));
}

/// The list of its keys comes from its classes (`scripts/golden/trl_keys.py`).
#[test]
fn every_key_of_trl_is_known() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/foreign/trl.json");
    let list: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let keys = list["keys"].as_object().unwrap();
    assert!(keys.len() > 150, "{}", keys.len());
    let text: String = keys.keys().flat_map(|key| [key, ": 3\n"]).collect();
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("theirs.yaml");
    std::fs::write(&path, text.replace("model_name_or_path: 3", "model_name_or_path: m")).unwrap();
    let made = import::read(&path, Some(Toolkit::Trl)).unwrap();
    for key in keys.keys() {
        let found = outcome_of(&made, key);
        assert!(!found.why.starts_with("unknown"), "{found:?}");
    }
}

#[test]
fn deepspeeds_files_are_taken_as_they_are() {
    for (toolkit, section) in
        [(Toolkit::Axolotl, ""), (Toolkit::LlamaFactory, ""), (Toolkit::MsSwift, ""), (Toolkit::SftPlay, "train.")]
    {
        let text = |file: &str| match toolkit {
            Toolkit::SftPlay => format!("train: {{deepspeed: {file}}}\n"),
            _ => format!("deepspeed: {file}\n"),
        };
        let key = format!("{section}deepspeed");
        let made = imported(toolkit, &text("ds.json"));
        assert!(outcome_of(&made, &key).setting.starts_with("train.deepspeed: "), "{:?}", made.outcomes);
        assert!(line(&made, "deepspeed").contains("/ds.json"), "{}", made.yaml);
        let made = imported(toolkit, &text("odd.json"));
        assert!(made.refused[0].why.contains("zero_optimisation: unknown"), "{:?}", made.refused);
        let made = imported(toolkit, &text("nowhere/zero3_bf16.json"));
        assert_eq!(value(&made, "train.strategy"), "zero3");
        let made = imported(toolkit, &text("nowhere/other.json"));
        assert_eq!(outcome_of(&made, &key).outcome, Outcome::Unsupported);
        let made = imported(toolkit, &text("{zero_optimization: {stage: 1}}"));
        assert_eq!(value(&made, "train.strategy"), "zero1");
    }
    assert_eq!(value(&imported(Toolkit::SftPlay, "train: {}\ndeepspeed: a/zero2.json\n"), "train.strategy"), "zero2");
}

#[test]
fn fsdp_becomes_ours_and_what_splits_models_otherwise_is_named() {
    let made = imported(
        Toolkit::Axolotl,
        "gradient_checkpointing: false\nfsdp_version: 2\ndp_shard_size: 2\ncontext_parallel_size: 1\ntensor_parallel_size: 2\n\
         fsdp_config: {fsdp_activation_checkpointing: true, cpu_offload_pin_memory: false, reshard_after_forward: false, odd: 1}\n",
    );
    assert_eq!(value(&made, "train.strategy"), "fsdp");
    assert_eq!(value(&made, "train.fsdp_sharding_strategy"), "shard_grad_op");
    assert_eq!(value(&made, "train.gradient_checkpointing").to_string(), "true");
    let outcomes = [
        ("fsdp_config.odd", Outcome::Unsupported),
        ("fsdp_config.cpu_offload_pin_memory", Outcome::NotNeeded),
        ("dp_shard_size", Outcome::Changed),
        ("context_parallel_size", Outcome::NotNeeded),
        ("tensor_parallel_size", Outcome::Unsupported),
    ];
    for (key, outcome) in outcomes {
        assert_eq!(outcome_of(&made, key).outcome, outcome, "{key}");
    }
    let text = "fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD}\n";
    assert_eq!(line(&imported(Toolkit::Axolotl, text), "fsdp"), "\"full_shard auto_wrap\"");
    let made = imported(Toolkit::Axolotl, &format!("{text}dp_replicate_size: 2\n"));
    assert_eq!(value(&made, "train.fsdp_sharding_strategy"), "hybrid_shard");
    let made = imported(Toolkit::LlamaFactory, "fsdp: full_shard auto_wrap offload\n");
    assert_eq!(value(&made, "train.strategy"), "fsdp");
    let made = imported(Toolkit::LlamaFactory, "fsdp_config: {min_num_params: 0}\n");
    assert_eq!(value(&made, "train.strategy"), "auto", "there it takes `fsdp` too");
    assert!(imported(Toolkit::LlamaFactory, "fsdp: whole_shard\n").refused[0].why.contains("whole_shard"));
}

#[test]
fn scored_answers_and_samples_become_ours() {
    let scores = "do_causal_lm_eval: true\neval_causal_lm_metrics: [sacrebleu, comet, chrf]\n";
    let made = imported(Toolkit::Axolotl, &format!("{scores}val_set_size: 0.1\neval_strategy: epoch\n"));
    assert_eq!(value(&made, "train.predict_with_generate"), true);
    assert_eq!(value(&made, "train.generation_max_new_tokens"), 128);
    assert_eq!(value(&made, "eval.metrics").to_string(), r#"["bleu","chrf"]"#);
    assert_eq!(value(&imported(Toolkit::Axolotl, scores), "train.predict_with_generate"), false);
    let made = imported(Toolkit::Axolotl, "generate_samples: true\ngeneration_top_p: 0.9\n");
    for (key, expected) in [
        ("num_samples", "3"),
        ("max_new_tokens", "50"),
        ("do_sample", "true"),
        ("temperature", "0.7"),
        ("top_p", "0.9"),
    ] {
        assert_eq!(value(&made, &format!("gen.{key}")).to_string(), expected, "{key}");
    }
    let made = imported(Toolkit::Axolotl, "generate_samples: true\ngeneration_temperature: 0.0\n");
    assert_eq!(value(&made, "gen.do_sample"), false);
    let made = imported(
        Toolkit::LlamaFactory,
        "predict_with_generate: true\nval_size: 0.1\neval_strategy: epoch\nrepetition_penalty: 1.1\n",
    );
    for (key, expected) in [("max_new_tokens", "1024"), ("top_p", "0.7"), ("repetition_penalty", "1.1")] {
        assert_eq!(value(&made, &format!("gen.{key}")).to_string(), expected, "{key}");
    }
    let made = imported(Toolkit::LlamaFactory, "do_sample: false\ntemperature: 0.3\n");
    assert_eq!(outcome_of(&made, "temperature").outcome, Outcome::NotNeeded);
}

#[test]
fn rotations_become_ours() {
    let made = imported(
        Toolkit::LlamaFactory,
        "finetuning_type: oft\nquantization_bit: 4\noft_block_size: 16\noft_target: q_proj,v_proj\nadditional_target: lm_head\n",
    );
    assert_eq!((value(&made, "tuning.mode"), value(&made, "model.quantization")), (json!("oft"), json!("nf4")));
    assert_eq!(value(&made, "tuning.oft.oft_block_size"), 16);
    assert_eq!(value(&made, "tuning.oft.target_modules"), json!(["q_proj", "v_proj"]));
    assert_eq!(value(&made, "tuning.oft.modules_to_save"), json!(["lm_head"]));
    let made = imported(Toolkit::LlamaFactory, "finetuning_type: oft\n");
    assert_eq!(value(&made, "tuning.oft.target_modules"), "auto");
}

#[test]
fn four_bits_rates_and_loftq_become_ours() {
    let made = imported(
        Toolkit::Axolotl,
        "adapter: qlora\nload_in_4bit: true\nbnb_config_kwargs: {bnb_4bit_quant_type: fp4, bnb_4bit_use_double_quant: false}\n",
    );
    assert_eq!(value(&made, "model.quantization"), "fp4");
    assert_eq!(value(&made, "model.double_quant"), false);
    let made = imported(Toolkit::Axolotl, "adapter: lora\npeft: {loftq_config: {loftq_bits: 4}}\n");
    assert_eq!(value(&made, "tuning.lora.init_lora_weights"), "loftq");
    assert_eq!(value(&made, "model.quantization"), "nf4");
    let made = imported(
        Toolkit::Axolotl,
        "embedding_lr_scale: 0.5\nlr_groups: [{name: o, modules: [self_attn.o_proj.weight], lr: 0.003}]\n",
    );
    let rates = value(&made, "train.learning_rates").to_string();
    assert_eq!(rates, r#"{"(embed_tokens|lm_head).*":0.0005,"self_attn\\.o_proj\\.weight.*":0.003}"#);
    let made = imported(
        Toolkit::LlamaFactory,
        "finetuning_type: lora\nquantization_bit: 4\nquantization_type: fp4\ndouble_quantization: false\n",
    );
    assert_eq!(value(&made, "model.quantization"), "fp4");
    assert_eq!(value(&made, "model.double_quant"), false);
    // A matrix has one format.
    let both = "load_in_4bit: true\nload_in_8bit: true\n";
    for (toolkit, text) in [(Toolkit::Axolotl, "adapter: qlora\n"), (Toolkit::Trl, "use_peft: true\n")] {
        let made = imported(toolkit, &format!("{text}{both}"));
        assert_eq!(outcome_of(&made, "load_in_8bit").outcome, Outcome::Unsupported);
    }
}

#[test]
fn sft_plays_mixes_take_the_place_of_its_rows() {
    let made = imported(
        Toolkit::SftPlay,
        "task_mode: cpt_mixed\ndata: {train_path: a.jsonl}\ndatasets: [{path: b.jsonl, type: cpt, weight: 1.0}]\n",
    );
    assert_eq!(outcome_of(&made, "data.train_path").outcome, Outcome::NotNeeded);
    assert_eq!(value(&made, "data.train_path").to_string(), "[]");
}

#[test]
fn what_is_no_supervised_fine_tuning_is_refused_whole() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("a.yaml");
    let refusal = |text: &str, toolkit: Option<Toolkit>| {
        std::fs::write(&path, text).unwrap();
        let error = import::read(&path, toolkit).expect_err(text);
        assert_eq!(error.kind(), Kind::Config);
        error.to_string()
    };
    assert!(refusal("base_model: m\nsequence_len: 8\nrl: dpo\n", None).contains("rl: found the string \"dpo\""));
    assert!(refusal("model: m\ndataset: a\nrlhf_type: dpo\n", None).contains("rlhf_type: \"dpo\""));
    assert!(refusal("model: m\ntuner_type: lora\n", None).contains("dataset is not set"));
    assert!(refusal("model: m\ndataset: a\ntask_type: seq_cls\n", None).contains("classification"));
    assert!(refusal("model_name_or_path: m\nstage: kto\n", None).contains("stage: \"kto\""));
    assert!(refusal("model_name_or_path: m\nuse_peft: true\nbeta: 0.1\n", None).contains("trl dpo"));
    assert!(refusal("dataset_name: a/b\n", None).contains("model_name_or_path is not set"));
    assert!(refusal("model: {type: seq2seq}\ntrain: {}\n", None).contains("seq2seq"));
    assert!(refusal("a: 1\n", None).contains("--from"));
    assert!(refusal("base_model: m\nbase_model: n\n", None).contains("given twice"));
    let inner = "base_model: m\ndatasets: [{path: a, type: alpaca, path: b}]\n";
    assert!(refusal(inner, None).contains("datasets[0]: \"path\" is given twice"));
    assert!(refusal("include: a.yaml\nmodel: {name: x}\n", None).contains("includes itself"));
    assert!(refusal("base_model: [\n", None).contains("a.yaml"));
    assert!(refusal("- 1\n", Some(Toolkit::Axolotl)).contains("expected sections"));
    let bomb = (1..12).fold("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned(), |text, level| {
        format!("{text}a{level}: &a{level} [{}]\n", vec![format!("*a{}", level - 1); 10].join(", "))
    });
    assert!(refusal(&bomb, Some(Toolkit::Axolotl)).contains("more than 100000 values"));
}

#[test]
fn hostile_texts_stay_in_their_line() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("a.yaml");
    let text = "base_model: \"x\\ntrain: {seed: 9}\\x1b[2J\"\n\"odd\\n#\": 1\nsequence_len: 8\nmicro_batch_size: 1\nwandb_project: \"a\\nb: c\"\n";
    std::fs::write(&path, text).unwrap();
    let made = import::read(&path, None).unwrap();
    assert_eq!(value(&made, "train.seed").to_string(), "42");
    assert_eq!(value(&made, "model.name"), "x\ntrain: {seed: 9}\u{1b}[2J");
    for one in &made.outcomes {
        assert!(!one.given().contains(char::is_control), "{one:?}");
    }
}

proptest! {
    /// Any values under any known keys: an error or a file that reads back; and each key has its note.
    #[test]
    fn no_value_breaks_an_import(pairs in prop::collection::btree_map("[a-z_]{1,12}|micro_batch_size|datasets|adapter|val_set_size|stage|dataset|lora_target|train|data|include|warmup_steps|lr_scheduler|model|target_modules|model_kwargs|loss_scale|torch_dtype|vit_lr", "[a-z0-9.\\[\\]{}:, -]{0,16}", 1..8)) {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("a.yaml");
        let text: String = pairs.iter().flat_map(|(key, value)| [key, ": ", value, "\n"]).collect();
        std::fs::write(&path, text).unwrap();
        for toolkit in Toolkit::ALL {
            if let Ok(made) = import::read(&path, Some(toolkit)) {
                let loads = config::load_text(Path::new("made"), &made.yaml).is_ok();
                prop_assert_eq!(loads, made.refused.is_empty(), "{}", made.yaml);
                if toolkit != Toolkit::SftPlay {
                    let given: Vec<String> = made.outcomes.iter().map(import::KeyOutcome::given).collect();
                    let noted: BTreeSet<&str> = given.iter().filter_map(|one| one.split(": ").next()).collect();
                    for key in pairs.keys() {
                        let inside = |name: &&str| name.starts_with(&format!("{key}["));
                        prop_assert!(noted.contains(key.as_str()) || noted.iter().any(inside), "{} of {:?}", key, made.outcomes);
                    }
                }
            }
        }
    }
}

fn tunesmith(args: &[&str], directory: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tunesmith"))
        .args(args)
        .current_dir(directory)
        .env_remove("CONFIG")
        .output()
        .unwrap()
}

#[test]
fn the_program_writes_a_file_that_it_accepts_and_never_over_another() {
    let temporary = tempfile::tempdir().unwrap();
    let source = folder().join("axolotl_lora.yaml");
    let args = ["import", source.to_str().unwrap(), "--out", "ours.yaml"];
    let said = |output: &Output| {
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    };
    let first = tunesmith(&args, temporary.path());
    assert!(first.status.success(), "{}", said(&first));
    assert!(said(&first).contains("could not") && said(&first).contains("wandb_project"), "{}", said(&first));
    let shown = tunesmith(&["config", "ours.yaml"], temporary.path());
    assert!(shown.status.success(), "{}", said(&shown));
    let again = tunesmith(&args, temporary.path());
    assert_eq!(again.status.code(), Some(6), "{}", said(&again));
    assert!(said(&again).contains("--force"), "{}", said(&again));
    let forced = tunesmith(&[&args[..], &["--force"]].concat(), temporary.path());
    assert!(forced.status.success(), "{}", said(&forced));
    let text = std::fs::read_to_string(folder().join("axolotl_qlora.yaml")).unwrap();
    std::fs::write(temporary.path().join("lomo.yaml"), text.replace("adamw_bnb_8bit", "lomo")).unwrap();
    let refused = tunesmith(&["import", "lomo.yaml"], temporary.path());
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        String::from_utf8_lossy(&refused.stderr).contains("this version refuses what the file says: train.optim: lomo")
    );
    assert!(String::from_utf8_lossy(&refused.stdout).contains("mode: qlora"), "the file is there all the same");
    assert_eq!(config::try_setting("train.optim", &Node::Str("lomo".into())).unwrap_err().kind(), Kind::Config);
}

/// Fragments that name no rows, as guides print them: what they say of validations is kept for the rows that are to come.
#[test]
fn a_configuration_without_rows_is_imported() {
    let printed = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/config/printed");
    for name in ["a100_pair", "fast_eval", "h200_quad", "multi_gpu_config", "rtx4090_sli"] {
        let made =
            import::read(&printed.join(format!("{name}.yaml")), None).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(made.toolkit, Toolkit::SftPlay, "{name}");
        assert!(
            made.refused.is_empty() && !made.outcomes.iter().any(|one| one.outcome == Outcome::Unsupported),
            "{name}: {:#?}",
            made.outcomes
        );
        config::load_text(Path::new("made.yaml"), &made.yaml)
            .unwrap_or_else(|error| panic!("{name}: {error}\n{}", made.yaml));
    }
    let made = import::read(&printed.join("multi_gpu_config.yaml"), None).unwrap();
    assert_eq!(value(&made, "train.eval_strategy"), "steps");
    assert_eq!(value(&made, "train.predict_with_generate"), true);
    assert_eq!(outcome_of(&made, "train.dataloader_num_workers").outcome, Outcome::NotNeeded);
}

#[test]
fn arguments_of_transformers_are_none_of_them() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("trl.yaml");
    for text in [
        "learning_rate: 2.0e-5\nnum_train_epochs: 1\npacking: true\n",
        "model_name_or_path: gpt2\nper_device_train_batch_size: 4\nlearning_rate: 1e-4\nseed: 1\n",
    ] {
        std::fs::write(&path, text).unwrap();
        let error = import::read(&path, None).unwrap_err();
        assert!(error.message().contains("not those of Axolotl, LLaMA-Factory, ms-swift, SFT-Play or TRL"), "{error}");
        assert!(error.hint_text().unwrap().contains("arguments of Transformers"), "{error}");
    }
}

#[test]
fn a_malformed_dataset_info_is_named_with_line_and_column() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("dataset_info.json"), "{\"a\": {\"file_name\": \"a.json\"},\n  ]").unwrap();
    let yaml = "model_name_or_path: m\nstage: sft\ndo_train: true\nfinetuning_type: lora\ntemplate: qwen\noutput_dir: o\ndataset: a\n";
    let path = root.path().join("train.yaml");
    std::fs::write(&path, yaml).unwrap();
    let made = import::read(&path, None).unwrap();
    let found = format!("{:?}", outcome_of(&made, "dataset"));
    assert!(found.contains("dataset_info.json: malformed JSON: ") && found.contains("at line 2 column 3"), "{found}");
}
