//! A tiny llama with a byte-level tokenizer and a task it can learn, made in a temporary folder; and the binary run on it.
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;
use tunesmith::config::arch::Arch;

/// 256 bytes, then `<|user|>`, `<|assistant|>`, `<|end|>`, `<|pad|>`.
const VOCABULARY: usize = 260;
const FIRST_SPECIAL: u32 = 256;
const END: u32 = 258;

/// A folder with `model/`, `train.jsonl` and `val.jsonl`.
pub struct Fixture {
    pub root: TempDir,
}

impl Fixture {
    pub fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        write_model(&root.path().join("model"));
        write_rows(&root.path().join("train.jsonl"), 0..24);
        write_rows(&root.path().join("val.jsonl"), 24..30);
        Self { root }
    }

    /// As [`Fixture::new`], the model's head a matrix of its own.
    pub fn untied() -> Self {
        let fixture = Self::new();
        let mut config = model_config();
        config["tie_word_embeddings"] = json!(false);
        write_model_of(&fixture.path("model"), &config);
        fixture
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// A LoRA run of a few seconds, writing to `out`; `extra` are lines of the form `section.key: value`, of which the value
    /// `UNSET` takes a key away.
    pub fn config(&self, name: &str, extra: &[&str]) -> PathBuf {
        let lines = [
            "model.name: MODEL",
            "model.max_seq_len: 64",
            "tuning.lora.r: 4",
            "tuning.lora.lora_dropout: 0.1",
            "train.output_dir: OUT",
            "train.batch_size: 2",
            "train.grad_accum: 2",
            "train.max_steps: 6",
            "train.learning_rate: 0.01",
            "train.lr_scheduler_type: cosine",
            "train.warmup_steps: 2",
            "train.save_strategy: \"no\"",
            "data.train_path: TRAIN",
            "data.val_path: VAL",
            "data.cache_dir: CACHE",
            "gen.num_samples: 0",
        ];
        // YAML sections out of dotted keys; a later line replaces an earlier one.
        let mut config: Value = json!({});
        // In one pass: the folder's random name may have such a word itself.
        let words = regex::Regex::new("MODEL|OUT|TRAIN|VAL|CACHE").unwrap();
        for line in lines.iter().chain(extra) {
            let (key, value) = line.split_once(": ").unwrap();
            let value = words.replace_all(value, |found: &regex::Captures<'_>| {
                let name = match &found[0] {
                    "MODEL" => "model",
                    "OUT" => "out",
                    "TRAIN" => "train.jsonl",
                    "VAL" => "val.jsonl",
                    _ => "cache",
                };
                self.path(name).to_str().unwrap().to_owned()
            });
            let value = value.into_owned();
            let value = serde_json::from_str(&value).unwrap_or(Value::String(value));
            let (sections, last) = key.rsplit_once('.').unwrap_or(("", key));
            let section =
                sections.split('.').filter(|part| !part.is_empty()).fold(&mut config, |node, part| &mut node[part]);
            section[last] = value;
            if section[last] == "UNSET" {
                section.as_object_mut().unwrap().remove(last);
            }
        }
        // The adapter above is of no use to a mode without one.
        let adapted = matches!(config["tuning"]["mode"].as_str(), None | Some("lora" | "qlora"));
        if !adapted && extra.iter().all(|line| !line.starts_with("tuning.lora.")) {
            config["tuning"]["lora"] = json!({});
        }
        let path = self.path(&format!("{name}.yaml"));
        // JSON is YAML.
        std::fs::write(&path, serde_json::to_string_pretty(&config).unwrap()).unwrap();
        path
    }
}

/// `tunesmith ARGS`, its environment free of settings. `TUNESMITH_TEST_BINARY` names the program for tests that were built elsewhere.
pub fn tunesmith<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Command {
    let program = std::env::var_os("TUNESMITH_TEST_BINARY");
    let mut command = Command::new(program.unwrap_or_else(|| env!("CARGO_BIN_EXE_tunesmith").into()));
    let sections = ["MODEL_", "TUNING_", "TRAIN_", "DATA_", "LOGGING_", "GEN_", "TUNESMITH_MEMORY_BUDGET"];
    for (name, _) in std::env::vars().filter(|(name, _)| sections.iter().any(|section| name.starts_with(section))) {
        command.env_remove(name);
    }
    command.args(args);
    command
}

/// Runs `tunesmith train CONFIG WORDS` to its end.
pub fn train(config: &Path, words: &[&str]) -> Output {
    let mut args = vec!["train", config.to_str().unwrap()];
    args.extend(words);
    tunesmith(&args).output().unwrap()
}

/// Standard error and output together, for messages of failed assertions.
pub fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Rows whose answer repeats the question's letters backwards.
fn write_rows(path: &Path, numbers: std::ops::Range<usize>) {
    let mut text = String::new();
    for number in numbers {
        let word: String =
            (0..2 + number % 5).map(|index| char::from(b'a' + ((number * 7 + index * 3) % 26) as u8)).collect();
        let answer: String = word.chars().rev().collect();
        let row =
            json!({ "messages": [{ "role": "user", "content": word }, { "role": "assistant", "content": answer }] });
        writeln!(text, "{row}").unwrap();
    }
    std::fs::write(path, text).unwrap();
}

pub fn write_model(directory: &Path) {
    write_model_of(directory, &model_config());
}

pub fn write_model_of(directory: &Path, config: &Value) {
    std::fs::create_dir_all(directory).unwrap();
    let write = |name: &str, value: &Value| std::fs::write(directory.join(name), value.to_string()).unwrap();
    write("config.json", config);
    write("tokenizer.json", &tokenizer());
    write(
        "tokenizer_config.json",
        &json!({
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|pad|>", "bos_token": null,
            "chat_template": "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}\
                              {% if add_generation_prompt %}<|assistant|>{% endif %}",
        }),
    );
    let arch = Arch::from_dir(directory).unwrap();
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = arch
        .tensors()
        .into_iter()
        .map(|spec| {
            let norm = spec.shape.len() == 1;
            let count = spec.shape.iter().product();
            let values = (0..count).map(|_| if norm { 1.0 + 0.1 * uniform() } else { 0.3 * uniform() });
            (spec.name, spec.shape, values.flat_map(f32::to_le_bytes).collect())
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name.as_str(), safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &directory.join("model.safetensors")).unwrap();
}

pub fn model_config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": true,
        "max_position_embeddings": 128, "initializer_range": 0.02, "bos_token_id": null, "eos_token_id": END,
        "pad_token_id": 259, "torch_dtype": "float32",
    })
}

/// Byte-level BPE without merges: a token a byte.
fn tokenizer() -> Value {
    let mut vocabulary = serde_json::Map::new();
    let mut above = 256u32;
    for byte in 0..=255u32 {
        let printable = matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let shown = if printable { byte } else { above };
        above += u32::from(!printable);
        vocabulary.insert(char::from_u32(shown).unwrap().to_string(), byte.into());
    }
    let specials = ["<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"];
    let added: Vec<Value> = specials
        .iter()
        .zip(FIRST_SPECIAL..)
        .map(|(content, id)| {
            json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true })
        })
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                   "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary, "merges": [] },
    })
}
