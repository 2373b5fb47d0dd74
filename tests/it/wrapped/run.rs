//! Whole runs on a tiny `LLaVA`, with the tensor names of Transformers' files and with those that it has in memory.
use super::{Raw, read, renamed, write};
use crate::parity::json;
use crate::run::fixture::{Fixture, model_config, said, train, tunesmith};
use serde_json::{Value, json};
use std::path::Path;
use tunesmith::config::DeviceChoice;
use tunesmith::config::arch::Arch;
use tunesmith::export::merge::{compare, plain_model, sample_logits};

const OLD: [&str; 2] = ["language_model.model.", ""];
const NEW: [&str; 2] = ["model.language_model.", "model."];

/// The tensors beside the language model: of a dtype that is not computed with, of one number, of no numbers.
fn beside(start: &str) -> Raw {
    let bytes = |count: usize| (0..count).map(|at| (at * 37 % 251) as u8).collect::<Vec<u8>>();
    let all = [
        ("vision_tower.encoder.layers.0.self_attn.q_proj.weight", safetensors::Dtype::BF16, vec![3, 5], bytes(30)),
        ("vision_tower.position_ids", safetensors::Dtype::I64, vec![1, 4], bytes(32)),
        ("vision_tower.norm", safetensors::Dtype::F8_E4M3, vec![7], bytes(7)),
        ("multi_modal_projector.linear.bias", safetensors::Dtype::F16, vec![1], bytes(2)),
        ("image_newline", safetensors::Dtype::F32, vec![0], bytes(0)),
    ];
    all.into_iter().map(|(name, dtype, shape, bytes)| (format!("{start}{name}"), (dtype, shape, bytes))).collect()
}

/// Wraps the fixture's model, in two files where it is `sharded`.
fn wrap(fixture: &Fixture, [text, other]: [&str; 2], sharded: bool) -> Raw {
    let dir = fixture.path("model");
    let mut language = model_config();
    // The class's own values need not be written.
    for key in ["hidden_act", "rope_theta", "pad_token_id", "bos_token_id"] {
        language.as_object_mut().unwrap().remove(key);
    }
    language["architectures"] = json!(["LlamaForCausalLM"]);
    let config = json!({ "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": language,
        "tie_word_embeddings": true, "image_token_index": 7, "torch_dtype": "float32",
        "vision_config": { "model_type": "clip_vision_model", "torch_dtype": "bfloat16" } });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    std::fs::write(dir.join("preprocessor_config.json"), "{\"size\": 336}").unwrap();
    let own = read(&dir);
    let mut all = renamed(&own, |name| name.replacen("model.", text, 1));
    all.extend(beside(other));
    if sharded {
        std::fs::remove_file(dir.join("model.safetensors")).unwrap();
        let file = |name: &str| if name.contains("layers.1.") { "two.safetensors" } else { "one.safetensors" };
        for part in ["one.safetensors", "two.safetensors"] {
            let tensors = all.iter().filter(|(name, _)| file(name) == part);
            write(&dir.join(part), &tensors.map(|(name, tensor)| (name.clone(), tensor.clone())).collect());
        }
        let map: serde_json::Map<_, _> = all.keys().map(|name| (name.clone(), file(name).into())).collect();
        let index = json!({ "metadata": {}, "weight_map": map });
        std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    } else {
        write(&dir.join("model.safetensors"), &all);
    }
    all
}

fn run(args: &[&str]) -> String {
    let output = tunesmith(args).env_remove("CONFIG").output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", said(&output));
    said(&output)
}

/// Holds a model folder that was written against the base: the same names, all beside the language model byte for byte, the
/// wrapper in `config.json`.
fn check_written(dir: &Path, base: &Raw, [_, other]: [&str; 2], what: &str) {
    let written = read(dir);
    assert!(written.keys().eq(base.keys()), "{what}: {:?}", written.keys().collect::<Vec<_>>());
    for name in beside(other).keys() {
        assert_eq!(written[name], base[name], "{what}: {name}");
    }
    let config = json(&dir.join("config.json"));
    assert_eq!(config["architectures"], json!(["LlavaForConditionalGeneration"]), "{what}");
    assert_eq!(
        (&config["model_type"], &config["text_config"]["model_type"]),
        (&json!("llava"), &json!("llama")),
        "{what}"
    );
    assert_eq!(config["vision_config"]["torch_dtype"], "bfloat16", "{what}");
    assert_eq!(std::fs::read_to_string(dir.join("preprocessor_config.json")).unwrap(), "{\"size\": 336}", "{what}");
    assert!(dir.join("tokenizer.json").is_file());
    Arch::from_dir(dir).unwrap();
}

/// Checks that a run which resumes from its first checkpoint ends with the same weights.
fn resumes(fixture: &Fixture, name: &str, result: &str) {
    let again = fixture.path("resumed");
    let from = fixture.path(name).join("checkpoint-000001").display().to_string();
    let words = [format!("train.output_dir={}", again.display()), format!("train.resume_from_checkpoint={from}")];
    let resumed = train(&fixture.path(&format!("{name}.yaml")), &words.each_ref().map(String::as_str));
    assert!(resumed.status.success(), "{name}: {}", said(&resumed));
    let bytes = |root: &Path| std::fs::read(root.join(result)).unwrap();
    assert!(bytes(&again) == bytes(&fixture.path(name)), "{name}");
    std::fs::remove_dir_all(&again).unwrap();
}

fn apart(left: &Path, right: &Path) -> f32 {
    let logits = |dir: &Path| sample_logits(&plain_model(dir, None, DeviceChoice::Cpu).unwrap()).unwrap();
    compare(&logits(left), &logits(right), Arch::from_dir(left).unwrap().vocab_size).largest
}

#[test]
fn adapters_merge_into_the_whole_checkpoint() {
    for (naming, sharded) in [(OLD, true), (NEW, false)] {
        let fixture = Fixture::new();
        let base = wrap(&fixture, naming, sharded);
        let cases: [(&str, &[&str]); 6] = [
            ("ia3", &["tuning.mode: ia3"]),
            (
                "lora",
                &[
                    "tuning.lora.target_modules: [\"q_proj\", \"v_proj\"]",
                    "tuning.lora.modules_to_save: [\"norm\"]",
                    "train.save_strategy: steps",
                    "train.save_steps: 1",
                ],
            ),
            (
                "regex",
                &[
                    r"tuning.lora.target_modules: .*language_model.*\.(up|down)_proj",
                    "tuning.lora.rank_pattern: {\"layers.0.mlp.up_proj\": 2}",
                ],
            ),
            ("blocks", &["tuning.lora.layers_to_transform: [1]", "tuning.lora.use_dora: true"]),
            ("qlora", &["tuning.mode: qlora"]),
            ("tokens", &["tuning.new_tokens: [\"<one>\"]"]),
        ];
        for (name, extra) in cases {
            let out = format!("train.output_dir: {}", fixture.path(name).display());
            let lines = [extra, &["train.max_steps: 2", "train.warmup_steps: 0", &out]].concat();
            let config = fixture.config(name, &lines);
            let trained = train(&config, &[]);
            assert!(trained.status.success(), "{name}: {}", said(&trained));
            let adapter = fixture.path(name).join("adapter");
            let names = read(&adapter.join("adapter_model.safetensors"));
            let start = "base_model.model.model.language_model.";
            assert!(names.keys().all(|name| name.starts_with(start)), "{name}: {:?}", names.keys().next());
            let about = json(&adapter.join("adapter_config.json"));
            let layers = r"model\.language_model\.layers\.\d+\.";
            match (name, &about["target_modules"]) {
                ("lora", found) => {
                    assert_eq!(*found, format!(r"{layers}(self_attn\.q_proj|self_attn\.v_proj)"));
                    let saved = &about["modules_to_save"];
                    assert!(saved.as_array().unwrap().contains(&"model.language_model.norm".into()), "{saved}");
                }
                ("ia3", _) => {
                    let inner = about["feedforward_modules"].as_array().unwrap();
                    assert!(inner.iter().all(|name| !name.as_str().unwrap().starts_with("model.layers")), "{inner:?}");
                }
                ("regex", found) => assert_eq!(*found, format!(r"{layers}(mlp\.down_proj|mlp\.up_proj)")),
                ("blocks", Value::Array(found)) => {
                    assert!(
                        found.iter().all(|name| name.as_str().unwrap().starts_with("model.language_model.layers.1."))
                    );
                    assert!(found.len() == 7 && about["layers_to_transform"].is_null());
                }
                (_, found) => assert!(found.as_str().is_some_and(|found| found.starts_with(layers)), "{found}"),
            }
            let text = run(&["merge", config.to_str().unwrap(), "--dtype", "float32"]);
            assert!(text.contains("AutoModelForImageTextToText"), "{text}");
            let merged = fixture.path(name).join("merged");
            let config_of = json(&merged.join("config.json"));
            assert_eq!(config_of["text_config"]["vocab_size"], if name == "tokens" { 261 } else { 260 });
            check_written(&merged, &base, naming, name);
            if name != "tokens" {
                assert!(apart(&merged, &fixture.path("model")) > 1e-4, "{name}: training shows");
            }
            let asked = run(&["infer", config.to_str().unwrap(), "-p", "abc", "gen.max_new_tokens=3"]);
            assert!(!asked.is_empty());
        }
        resumes(&fixture, "lora", "adapter/adapter_model.safetensors");
        // Training goes on from an adapter.
        let adapter = format!("tuning.adapter={}", fixture.path("regex/adapter").display());
        let again = train(&fixture.config("again", &["train.max_steps: 1"]), &[&adapter, "train.warmup_steps=0"]);
        assert!(again.status.success(), "{}", said(&again));
    }
}

/// A head that gets a matrix of its own: the checkpoint then holds it, and says so of the whole and of its language model.
#[test]
fn a_shared_matrix_becomes_two_in_the_whole_checkpoint() {
    for (naming, head) in [(OLD, "language_model.lm_head.weight"), (NEW, "lm_head.weight")] {
        let fixture = Fixture::new();
        let base = wrap(&fixture, naming, false);
        let out = fixture.path("head");
        let place = format!("train.output_dir: {}", out.display());
        let lines = [
            "tuning.lora.modules_to_save: [\"lm_head\"]",
            "train.save_strategy: steps",
            "train.save_steps: 1",
            "train.max_steps: 2",
            "train.warmup_steps: 0",
            &place,
        ];
        let config = fixture.config("head", &lines);
        let trained = train(&config, &[]);
        assert!(trained.status.success(), "{}", said(&trained));
        let adapter = read(&out.join("adapter/adapter_model.safetensors"));
        assert!(adapter.contains_key("base_model.model.lm_head.weight"), "{:?}", adapter.keys().next_back());
        assert_eq!(json(&out.join("adapter/adapter_config.json"))["modules_to_save"], json!(["lm_head"]));
        run(&["merge", config.to_str().unwrap(), "--dtype", "float32"]);
        let merged = out.join("merged");
        let mut written = read(&merged);
        let about = json(&merged.join("config.json"));
        assert_eq!(
            (&about["tie_word_embeddings"], &about["text_config"]["tie_word_embeddings"]),
            (&json!(false), &json!(false))
        );
        assert!(!Arch::from_dir(&merged).unwrap().tie_word_embeddings);
        let (own, embedding) = (written.remove(head).unwrap(), format!("{}embed_tokens.weight", naming[0]));
        assert!(own != written[&embedding] && written[&embedding] == base[&embedding]);
        assert!(written.keys().eq(base.keys()), "{:?}", written.keys().collect::<Vec<_>>());
        for name in beside(naming[1]).keys() {
            assert_eq!(written[name], base[name], "{name}");
        }
        resumes(&fixture, "head", "adapter/adapter_model.safetensors");
    }
}

#[test]
fn weights_of_the_language_model_are_trained_and_the_rest_stays() {
    for naming in [OLD, NEW] {
        let fixture = Fixture::new();
        let base = wrap(&fixture, naming, false);
        let cases: [(&str, &[&str]); 2] = [
            ("full", &["tuning.mode: full", "train.save_strategy: steps", "train.save_steps: 1"]),
            (
                "freeze",
                &["tuning.mode: freeze", "tuning.freeze.trainable_patterns: [\"model.language_model.layers.1.\"]"],
            ),
        ];
        for (name, extra) in cases {
            let out = format!("train.output_dir: {}", fixture.path(name).display());
            let config =
                fixture.config(name, &[extra, &["train.max_steps: 2", "train.warmup_steps: 0", &out]].concat());
            let trained = train(&config, &[]);
            assert!(trained.status.success(), "{name}: {}", said(&trained));
            let class = "AutoModelForImageTextToText.from_pretrained(";
            assert!(said(&trained).contains(class), "{name}: {}", said(&trained));
            let result = fixture.path(name).join("model");
            check_written(&result, &base, naming, name);
            assert!(apart(&result, &fixture.path("model")) > 1e-4, "{name}: training shows");
            run(&["infer", config.to_str().unwrap(), "-p", "abc", "gen.max_new_tokens=3"]);
        }
        resumes(&fixture, "full", "model/model.safetensors");
    }
}

#[test]
fn a_multimodal_model_is_exported_planned_and_described() {
    let (plain, wrapped) = (Fixture::new(), Fixture::new());
    let base = wrap(&wrapped, OLD, true);
    let path = |name: &str| wrapped.path(name).display().to_string();
    // The language model as a file of llama.cpp is that of the language model alone.
    for (fixture, out) in [(&plain, path("plain.gguf")), (&wrapped, path("wrapped.gguf"))] {
        let dir = fixture.path("model").display().to_string();
        run(&["export", "--base", &dir, "--gguf", "q8_0", "--output", &out, "--pre-tokenizer", "gpt-2"]);
    }
    let bytes = |name: &str| std::fs::read(wrapped.path(name)).unwrap();
    assert!(bytes("plain.gguf").len().abs_diff(bytes("wrapped.gguf").len()) < 64);
    run(&["export", "--base", &path("model"), "--hf", "--output", &path("copy")]);
    assert_eq!(read(&wrapped.path("copy")), base, "an export of nothing new is the checkpoint");
    check_written(&wrapped.path("copy"), &base, OLD, "export");
    let described = run(&["models", &path("model")]);
    assert!(described.contains("llava") && described.contains("model.language_model.layers"), "{described}");
    let config = wrapped.config("run", &["train.max_steps: 1", "train.warmup_steps: 0"]);
    run(&["plan", config.to_str().unwrap()]);
    let trained = train(&config, &[]);
    assert!(trained.status.success(), "{}", said(&trained));
    // In 4 bits: what sees stays as it is, and is named so that bitsandbytes leaves it.
    let coded = path("coded");
    run(&["merge", config.to_str().unwrap(), "--requantize", "nf4", "--output", &coded]);
    let about = json(&wrapped.path("coded/config.json"));
    let skipped = &about["quantization_config"]["llm_int8_skip_modules"];
    for module in ["model.vision_tower", "model.multi_modal_projector", "lm_head"] {
        assert!(skipped.as_array().unwrap().contains(&module.into()), "{skipped}");
    }
    let written = read(&wrapped.path("coded"));
    assert!(written.contains_key("language_model.model.layers.0.self_attn.q_proj.weight.absmax"));
    assert!(beside("").iter().all(|(name, tensor)| written[name] == *tensor));
    // A blend of adapters keeps the names.
    let adapter = wrapped.path("out/adapter").display().to_string();
    run(&[
        "merge",
        "--base",
        &path("model"),
        "--adapter",
        &adapter,
        "--adapter",
        &adapter,
        "--adapter-only",
        "--output",
        &path("blend"),
    ]);
    let names = read(&wrapped.path("blend/adapter_model.safetensors"));
    assert!(names.keys().all(|name| name.starts_with("base_model.model.model.language_model.")));
}

/// Templates of multimodal models that read the content of messages as a list of parts, and stand in a file of their own.
#[test]
fn a_template_that_reads_parts_is_given_parts() {
    let fixture = Fixture::new();
    wrap(&fixture, NEW, false);
    let dir = fixture.path("model");
    let mut about = json(&dir.join("tokenizer_config.json"));
    about.as_object_mut().unwrap().remove("chat_template");
    std::fs::write(dir.join("tokenizer_config.json"), about.to_string()).unwrap();
    let template = "{% for message in messages %}<|{{ message['role'] }}|>{% for content in message['content'] | \
        selectattr('type', 'equalto', 'image') %}<image>{% endfor %}{% for content in message['content'] | \
        selectattr('type', 'equalto', 'text') %}{{ content['text'] }}{% endfor %}<|end|>{% endfor %}{% if \
        add_generation_prompt %}<|assistant|>{% endif %}";
    std::fs::write(dir.join("chat_template.json"), json!({ "chat_template": template }).to_string()).unwrap();
    let row = json!({ "messages": [{ "role": "user", "content": "abc" }, { "role": "assistant", "content": [{ "type": "text", "text": "xyz" }] }] });
    let plain =
        json!({ "messages": [{ "role": "user", "content": "abc" }, { "role": "assistant", "content": "xyz" }] });
    std::fs::write(fixture.path("train.jsonl"), format!("{plain}\n{row}\n")).unwrap();
    let config = fixture.config("parts", &["train.max_steps: 1", "train.warmup_steps: 0"]);
    let shown = run(&["data", config.to_str().unwrap()]);
    assert!(shown.contains("<|user|>abc<|end|><|assistant|>"), "{shown}");
    let trained = train(&config, &[]);
    assert!(trained.status.success(), "{}", said(&trained));
}

#[test]
fn what_no_model_reads_is_refused_by_name() {
    let fixture = Fixture::new();
    wrap(&fixture, NEW, false);
    let text = json!({ "type": "text", "text": "What is this?" });
    let answer = json!({ "role": "assistant", "content": "A cat." });
    let cases = [
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "video", "video": "x" }, text] }, answer] }),
            "video",
        ),
        (json!({ "messages": [{ "role": "user", "content": "Hi" }, answer], "audios": ["cat.wav"] }), "audios"),
        (json!({ "messages": [{ "role": "user", "content": [{ "type": "audio", "audio": "x" }] }, answer] }), "audio"),
    ];
    for (row, word) in cases {
        std::fs::write(fixture.path("train.jsonl"), format!("{row}\n")).unwrap();
        let refused = train(&fixture.config("images", &[]), &[]);
        let said = said(&refused);
        assert!(refused.status.code() == Some(3) && said.contains(word) && said.contains("text"), "{said}");
    }
}
