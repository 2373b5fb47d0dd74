//! What only GPT-2 has: its file layout, learned positions, and the dropout that its `config.json` asks for.
use crate::parity::{golden, load, recipe, tensors};
use crate::pictures::{encoder, paired, picture};
use crate::run::fixture::{Fixture, said, train, tunesmith};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use tunesmith::Kind;
use tunesmith::config::Mode;
use tunesmith::config::arch::Arch;
use tunesmith::data::batch::Batch;
use tunesmith::model::Model;
use tunesmith::model::targets::{Targets, placed};
use tunesmith::model::weights::{WeightFiles, write_safetensors};

/// Every tensor of a file, by its name there.
type Stored = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn stored(dir: &Path) -> Stored {
    tensors(&dir.join("model.safetensors")).into_iter().collect()
}

fn write(dir: &Path, tensors: &Stored) {
    let all: Vec<_> =
        tensors.iter().map(|(name, (shape, values))| (name.clone(), shape.clone(), &values[..])).collect();
    let file = dir.join("model.safetensors");
    if file.exists() {
        fs::remove_file(&file).unwrap();
    }
    write_safetensors(&file, &all, &[("format", "pt")]).unwrap();
}

fn config() -> Value {
    serde_json::from_str(&fs::read_to_string(golden("gpt2/model/config.json")).unwrap()).unwrap()
}

fn row(tokens: usize) -> Batch {
    Batch {
        tokens: (0..tokens as u32).map(|at| 3 + at % 500).collect(),
        targets: vec![7; tokens],
        cu_seqlens: vec![0, tokens],
        ..Batch::default()
    }
}

#[test]
fn files_without_the_first_part_of_names_and_with_old_masks_are_read() {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(golden("gpt2/model/config.json"), folder.path().join("config.json")).unwrap();
    let mut old: Stored = stored(&golden("gpt2/model"))
        .into_iter()
        .map(|(name, tensor)| (name.trim_start_matches("transformer.").to_owned(), tensor))
        .collect();
    for block in 0..2 {
        old.insert(format!("h.{block}.attn.bias"), (vec![1, 1, 128, 128], vec![1.0; 128 * 128]));
        old.insert(format!("h.{block}.attn.masked_bias"), (vec![1], vec![-1e4]));
    }
    write(folder.path(), &old);
    let arch = Arch::from_dir(folder.path()).unwrap();
    let weights = WeightFiles::open_model(folder.path(), &arch, &arch.tensors()).unwrap();
    let model = Model::load(&arch, Some(&weights), &recipe()).unwrap();
    let (expected, rows) = (load("gpt2", &recipe()), [0, 5, 19]);
    assert_eq!(model.logits(&row(20), &rows).unwrap(), expected.logits(&row(20), &rows).unwrap());
    // Another shape is no mask: nothing else of the block may be left out.
    old.remove("h.1.attn.c_attn.bias");
    write(folder.path(), &old);
    let error = WeightFiles::open_model(folder.path(), &arch, &arch.tensors()).unwrap_err().to_string();
    assert!(error.contains("transformer.h.1.attn.c_attn.bias"), "{error}");
}

#[test]
fn a_folder_is_written_as_transformers_writes_it() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["gpt2", "gpt2_scaled"] {
        let target = folder.path().join(name);
        let base = golden(name).join("model");
        let words = ["export", "--base", base.to_str().unwrap(), "--hf", "--output", target.to_str().unwrap()];
        let output = tunesmith(&words).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        let bytes = |dir: &Path| fs::read(dir.join("model.safetensors")).unwrap();
        let (own, theirs) = (bytes(&target), bytes(&base));
        let [own, theirs] = [&own, &theirs].map(|bytes| safetensors::SafeTensors::deserialize(bytes).unwrap());
        let names = [&own, &theirs].map(|file| {
            let mut names = file.names();
            names.sort_unstable();
            names
        });
        assert_eq!(names[0], names[1], "{name}");
        for tensor in &names[0] {
            let [own, theirs] = [&own, &theirs].map(|file| file.tensor(tensor).unwrap());
            assert_eq!((own.shape(), own.dtype()), (theirs.shape(), theirs.dtype()), "{name}: {tensor}");
            assert!(own.data() == theirs.data(), "{name}: {tensor}");
        }
    }
}

#[test]
fn texts_end_where_positions_do() {
    let model = load("gpt2", &recipe());
    model.logits(&row(128), &[127]).unwrap();
    let error = model.logits(&row(129), &[128]).unwrap_err();
    assert_eq!(error.kind(), Kind::Data);
    assert!(error.to_string().contains("129 tokens, and the model has 128 positions"), "{error}");
    let mut cache = model.cache();
    model.extend(&mut [(&mut cache, &row(128).tokens)]).unwrap();
    let error = model.extend(&mut [(&mut cache, &[5])]).unwrap_err();
    assert!(error.to_string().contains("128 positions"), "{error}");
    // What was refused is not in the cache.
    cache.truncate(127);
    model.extend(&mut [(&mut cache, &[5])]).unwrap();
}

#[test]
fn dropout_is_refused_in_training_alone_and_cross_attention_without_an_encoder() {
    let read = |change: &dyn Fn(&mut Value)| {
        let mut config = config();
        change(&mut config);
        Arch::from_json(&config.to_string(), Path::new("config.json"))
    };
    read(&|_| {}).unwrap().refuse_dropout(false).unwrap();
    for key in ["attn_pdrop", "embd_pdrop", "resid_pdrop"] {
        // Without the key the class has a tenth.
        for (value, rate) in [(Some(json!(0.2)), "0.2"), (None, "0.1")] {
            let arch = read(&|config| match &value {
                Some(value) => config[key] = value.clone(),
                None => drop(config.as_object_mut().unwrap().remove(key)),
            });
            let arch = arch.unwrap();
            let error = arch.refuse_dropout(false).unwrap_err();
            assert!(error.to_string().contains(&format!("{key} {rate}")), "{error}");
            assert!(error.hint_text().is_some_and(|hint| hint.contains("train.disable_dropout")));
            arch.refuse_dropout(true).unwrap();
        }
        for wrong in [json!(1.5), json!(-0.1), json!("0.1")] {
            read(&|config| config[key] = wrong.clone()).unwrap_err();
        }
    }
    let error = read(&|config| config["add_cross_attention"] = true.into()).unwrap_err().to_string();
    assert!(error.contains("not yet: add_cross_attention"), "{error}");
    let whole = json!({"model_type": "vision-encoder-decoder", "decoder": config(), "encoder": {"model_type": "vit"}});
    let error = Arch::from_json(&whole.to_string(), Path::new("config.json")).unwrap_err().to_string();
    assert!(error.contains("decoder.add_cross_attention is false, expected true"), "{error}");
}

#[test]
fn what_peft_or_llama_cpp_lack_is_refused_by_name() {
    let arch = Arch::from_dir(&golden("gpt2").join("model")).unwrap();
    let mut tuning = recipe().tuning;
    tuning.lora.modules_to_save = vec!["c_fc".to_owned()];
    let error = Targets::of(&tuning).saved_tensors(&arch).unwrap_err().to_string();
    assert!(error.contains("modules_to_save") && error.contains("transposed"), "{error}");
    tuning.lora.modules_to_save = vec!["wpe".to_owned(), "ln_f".to_owned()];
    let saved = Targets::of(&tuning).saved_tensors(&arch).unwrap();
    assert_eq!(saved, ["model.wpe.weight", "model.ln_f.weight", "model.ln_f.bias"]);
    tuning.mode = Mode::Oft;
    let error = placed(&arch, &tuning).unwrap_err().to_string();
    assert!(error.contains("tuning.oft on gpt2"), "{error}");
    // With the fixture's tokenizer.
    let fixture = Fixture::new();
    let (base, file) = (fixture.path("model"), fixture.path("model.gguf"));
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden("gpt2_scaled").join("model").join(name), base.join(name)).unwrap();
    }
    let words = ["export", "--base", base.to_str().unwrap(), "--gguf", "f32", "--output", file.to_str().unwrap()];
    let output = tunesmith(&words).output().unwrap();
    assert!(!output.status.success() && said(&output).contains("activation_function"), "{}", said(&output));
}

/// Puts a GPT-2 without weights in the place of the fixture's model.
fn put_gpt2(fixture: &Fixture) {
    let model = fixture.path("model");
    let mut config = config();
    for (key, value) in [("vocab_size", json!(260)), ("eos_token_id", json!(258)), ("attn_pdrop", json!(0.1))] {
        config[key] = value;
    }
    fs::write(model.join("config.json"), config.to_string()).unwrap();
    fs::remove_file(model.join("model.safetensors")).unwrap();
}

/// A run from nothing in full precision, whose folder and adapter are read again.
#[test]
fn a_model_from_nothing_is_trained_and_written() {
    let fixture = Fixture::new();
    put_gpt2(&fixture);
    let full = ["tuning.mode: full", "model.init: random", "train.output_dir: OUT"];
    let refused = train(&fixture.config("refused", &full), &[]);
    assert!(!refused.status.success() && said(&refused).contains("train.disable_dropout"), "{}", said(&refused));
    let full = [&full[..], &["train.disable_dropout: true"]].concat();
    let output = train(&fixture.config("full", &full), &[]);
    assert!(output.status.success(), "{}", said(&output));
    let written = fixture.path("out").join("model");
    let found = stored(&written);
    assert_eq!(found["transformer.h.1.attn.c_attn.weight"].0, [64, 192]);
    assert!(found.keys().all(|name| name.starts_with("transformer.")), "{:?}", found.keys().next());
    let name = format!("model.name: {}", written.display());
    let out = format!("train.output_dir: {}", fixture.path("lora").display());
    let lora = ["train.disable_dropout: true", "model.max_seq_len: 64", &name, &out];
    let output = train(&fixture.config("lora", &lora), &[]);
    assert!(output.status.success(), "{}", said(&output));
    let adapter = fixture.path("lora").join("adapter");
    let settings: Value =
        serde_json::from_str(&fs::read_to_string(adapter.join("adapter_config.json")).unwrap()).unwrap();
    assert_eq!(settings["fan_in_fan_out"], true);
    let targets = settings["target_modules"].as_array().unwrap();
    assert!(targets.contains(&json!("transformer.h.0.attn.c_attn")) && targets.len() == 8, "{targets:?}");
    let names = tensors(&adapter.join("adapter_model.safetensors"));
    assert!(names.contains_key("base_model.model.transformer.h.0.mlp.c_fc.lora_A.weight"), "{:?}", names.keys().next());
}

/// Captions of an encoder's images, first with all of GPT-2 trained, then with adapters, which are merged.
#[test]
fn a_pair_with_gpt2_captions_images() {
    let fixture = paired();
    put_gpt2(&fixture);
    let path = |name: &str| fixture.path(name).display().to_string();
    let out = |name: &str| format!("train.output_dir: {}", path(name));
    let done = |words: &[&str]| {
        let output = tunesmith(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let (common, encoder) = ("train.disable_dropout: true", encoder(&fixture));
    let full = ["tuning.mode: full", "model.init: random", common, &encoder, &out("full")];
    let ran = train(&fixture.config("full", &full), &[]);
    assert!(ran.status.success(), "{}", said(&ran));
    let name = format!("model.name: {}", path("full/model"));
    let targets = r#"tuning.lora.target_modules: ["c_attn", "c_proj"]"#;
    let ran = train(&fixture.config("lora", &[&name, targets, common, &out("lora")]), &[]);
    assert!(ran.status.success(), "{}", said(&ran));
    let image = picture("rgb.png");
    let answer = done(&["infer", &path("lora.yaml"), "--image", &image]);
    done(&["merge", &path("lora.yaml"), "--output", &path("merged"), "--dtype", "float32"]);
    assert_eq!(done(&["infer", "--model", &path("merged"), "--image", &image]), answer);
}
