//! Merging, blending and exporting: against PEFT's results, and what is refused.
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tunesmith::checkpoint::loaded_adapter::LoadedAdapter;
use tunesmith::config::DeviceChoice;
use tunesmith::config::arch::Arch;
use tunesmith::export::blend::{BlendMethod, BlendRecipe, blend};
use tunesmith::model::weights::WeightFiles;

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path)
}

fn tunesmith(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tunesmith")).args(args).env_remove("CONFIG").output().unwrap()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[track_caller]
fn works(args: &[&str]) -> String {
    let output = tunesmith(args);
    assert!(output.status.success(), "{args:?}: {}", text(&output));
    text(&output)
}

#[track_caller]
fn fails(args: &[&str], code: i32, wanted: &str) {
    let output = tunesmith(args);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {}", text(&output));
    assert!(text(&output).contains(wanted), "{args:?}: {}", text(&output));
}

/// A golden model's folder and an adapter of it, as arguments.
fn parts(name: &str) -> [String; 4] {
    let path = |part: &str| golden(&format!("a/{name}/{part}")).display().to_string();
    ["--base".into(), path("model"), "--adapter".into(), path("adapter_init")]
}

/// Models whose merge is compared with the logits that PEFT's adapter gives.
pub const MERGED: [&str; 27] = [
    "llama",
    "gpt2",
    "gemma2",
    "phi3",
    "mixtral",
    "qwen2_moe",
    "qwen3_5",
    "lfm2",
    "gpt_oss",
    "granitemoehybrid",
    "granite4_moe",
    "olmo_hybrid",
    "nemotron_h",
    "nemotron3_nano",
    "nemotron3_super",
    "glm4_moe",
    "qwen3_next",
    "lfm2_moe",
    "afmoe",
    "minimax_m2",
    "lfm3",
    "muse_glimmer",
    "gemma4_e2b",
    "gemma3n",
    "gemma3n_odd",
    "gemma4_31b",
    "gemma4_a4b",
];

#[test]
fn merged_models_have_the_adapter_s_logits() {
    let root = tempfile::tempdir().unwrap();
    for name in MERGED {
        let target = root.path().join(name).display().to_string();
        let parts = parts(name);
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        works(&[&["merge", "--output", &target, "--dtype", "float32", "--shard-size", "0.0002"], &parts[..]].concat());
        let model = tunesmith::export::merge::plain_model(Path::new(&target), None, DeviceChoice::Cpu).unwrap();
        let forward = WeightFiles::open_file(&golden(&format!("a/{name}/forward.safetensors"))).unwrap();
        let (shape, wanted) = forward.read("logits_lora").unwrap();
        let ids = raw_i64(&golden(&format!("a/{name}/forward.safetensors")), "input_ids");
        let (rows, positions) = (
            raw_i64(&golden(&format!("a/{name}/forward.safetensors")), "sel_row"),
            raw_i64(&golden(&format!("a/{name}/forward.safetensors")), "sel_pos"),
        );
        let width = ids.len() / 3;
        for (index, (&row, &position)) in rows.iter().zip(&positions).enumerate() {
            let (row, position) = (row as usize, position as usize);
            let tokens: Vec<u32> = ids[row * width..=row * width + position].iter().map(|&id| id as u32).collect();
            let batch = tunesmith::data::Batch { cu_seqlens: vec![0, tokens.len()], tokens, ..Default::default() };
            let logits = model.logits(&batch, &[position]).unwrap();
            let wanted = &wanted[index * shape[1]..][..shape[1]];
            let most = logits.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
            assert!(most < 5e-5, "{name} at {row}, {position}: {most}");
        }
        assert!(Path::new(&target).join("model.safetensors.index.json").is_file(), "in shards");
    }
}

/// A tensor of I64 numbers, which weights never are.
fn raw_i64(path: &Path, name: &str) -> Vec<i64> {
    let bytes = fs::read(path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = tensors.tensor(name).unwrap();
    if tensor.dtype() == safetensors::Dtype::I64 {
        tensor.data().chunks_exact(8).map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap())).collect()
    } else {
        let small = tensor.data().chunks_exact(4).map(|bytes| i32::from_le_bytes(bytes.try_into().unwrap()));
        small.map(i64::from).collect()
    }
}

#[test]
fn narrow_merges_say_what_rounding_did_and_nothing_is_overwritten() {
    let root = tempfile::tempdir().unwrap();
    let target = root.path().join("out").display().to_string();
    let parts = parts("qwen2");
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    let merge = [&["merge", "--output", &target, "--dtype", "bfloat16"], &parts[..]].concat();
    let said = works(&merge);
    assert!(said.contains("merged, float32") && said.contains("as written"), "{said}");
    let config = fs::read_to_string(Path::new(&target).join("config.json")).unwrap();
    assert!(config.contains("\"bfloat16\""), "{config}");
    fails(&merge, 2, "is there already");
    works(&[&merge[..], &["--overwrite"]].concat());
    fs::remove_file(Path::new(&target).join("manifest.json")).unwrap();
    fails(&[&merge[..], &["--overwrite"]].concat(), 2, "not a folder that tunesmith wrote");
    fails(&["merge", "--adapter", parts[3], "--output", "x"], 2, "no base model is named");
    fails(&["merge", "--base", parts[1], "--output", "x"], 2, "no adapter is named");
    fails(
        &[&["merge", "--output", "x", "--max-difference", "0"], &parts[..]].concat(),
        8,
        "the merged model differs from the adapter",
    );
}

#[test]
fn a_wrong_base_is_refused_with_both_sides() {
    let root = tempfile::tempdir().unwrap();
    let adapter = root.path().join("adapter");
    fs::create_dir(&adapter).unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(golden("a/llama/adapter_init").join(file), adapter.join(file)).unwrap();
    }
    fs::write(root.path().join("backend.json"), r#"{"base_model": "another"}"#).unwrap();
    let base = golden("a/llama/model").display().to_string();
    let adapter = adapter.display().to_string();
    fails(
        &["merge", "--base", &base, "--adapter", &adapter, "--output", "x"],
        5,
        "base_model: another in its backend.json",
    );
}

#[test]
fn blends_are_those_of_peft() {
    let arch = Arch::from_dir(&golden("a/llama/model")).unwrap();
    let adapters = ["adapter_init", "adapter_final"]
        .map(|name| LoadedAdapter::open(&golden(&format!("a/llama/{name}")), &arch).unwrap());
    let wanted = WeightFiles::open_file(&golden("peft/blend.safetensors")).unwrap();
    for (name, method, density) in [
        ("cat", BlendMethod::Cat, 0.5),
        ("linear", BlendMethod::Linear, 0.5),
        ("ties", BlendMethod::Ties, 0.4),
        ("magnitude_prune", BlendMethod::MagnitudePrune, 0.4),
        ("dare_linear", BlendMethod::DareLinear, 1.0),
        ("dare_ties", BlendMethod::DareTies, 1.0),
    ] {
        let recipe = BlendRecipe { method, weights: vec![0.7, -0.4], density, seed: 1 };
        let (config, tensors) = blend(&adapters, &recipe).unwrap();
        assert_eq!(config.tuning.lora.lora_alpha, config.tuning.lora.r as f64, "{name}: a scale of 1");
        for module in ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"] {
            for side in ["lora_A", "lora_B"] {
                let (shape, want) = wanted.read(&format!("{name}.{module}.{side}")).unwrap();
                let (own, got) = &tensors[&format!("{module}.{side}.weight")];
                assert_eq!(own, &shape, "{name} {module} {side}");
                let most = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
                assert!(most < 1e-6, "{name} {module} {side}: {most}");
            }
        }
    }
    let one = BlendRecipe { method: BlendMethod::Cat, weights: vec![1.0], density: 1.0, seed: 1 };
    assert!(blend(&adapters, &one).unwrap_err().message().contains("1 weight for 2 adapters"));
}

#[test]
fn a_blend_is_an_adapter_and_merges() {
    let root = tempfile::tempdir().unwrap();
    let (blend, merged) = (root.path().join("blend"), root.path().join("merged"));
    let base = golden("a/llama/model").display().to_string();
    let [first, second] =
        ["adapter_init", "adapter_final"].map(|name| golden(&format!("a/llama/{name}")).display().to_string());
    let both = ["merge", "--base", &base, "--adapter", &first, "--adapter", &second, "--weights", "0.5,-0.25"];
    works(&[&both[..], &["--output", blend.to_str().unwrap(), "--adapter-only"]].concat());
    let arch = Arch::from_dir(&golden("a/llama/model")).unwrap();
    assert_eq!(LoadedAdapter::open(&blend, &arch).unwrap().config.tuning.lora.r, 8, "ranks add up");
    works(&[&both[..], &["--output", merged.to_str().unwrap()]].concat());
    fails(&[&both[..], &["--output", "x", "--combine", "svd"]].concat(), 2, "--combine svd");
}

/// A model folder with the tokenizer of the text goldens: the tiny Llama with as many rows as it has tokens.
fn with_tokenizer(root: &Path) -> PathBuf {
    let dir = root.join("model");
    fs::create_dir(&dir).unwrap();
    let mut config: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(golden("a/llama/model/config.json")).unwrap()).unwrap();
    config["vocab_size"] = 640.into();
    config["bos_token_id"] = serde_json::Value::Null;
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(golden("c/tokenizer_bpe_gpt2").join(file), dir.join(file)).unwrap();
    }
    let files = WeightFiles::open_file(&golden("a/llama/model/model.safetensors")).unwrap();
    let tensors: Vec<_> = files
        .names()
        .map(|name| {
            let (mut shape, mut values) = files.read(name).unwrap();
            if shape[0] == 512 && shape.len() == 2 {
                shape[0] = 640;
                values.extend_from_within(..128 * shape[1]);
            }
            (name.to_owned(), shape, values)
        })
        .collect();
    let tensors: Vec<_> =
        tensors.iter().map(|(name, shape, values)| (name.clone(), shape.clone(), &values[..])).collect();
    tunesmith::model::weights::write_safetensors(&dir.join("model.safetensors"), &tensors, &[("format", "pt")])
        .unwrap();
    dir
}

#[test]
fn gguf_files_hold_the_model_and_its_tokenizer() {
    use candle_core::quantized::gguf_file::{Content, Value};
    let root = tempfile::tempdir().unwrap();
    let base = with_tokenizer(root.path()).display().to_string();
    for (format, limit) in [("f32", 0.0f32), ("f16", 1e-2), ("q8_0", 5e-2), ("q4_0", 0.8)] {
        let path = root.path().join(format!("m.{format}.gguf"));
        works(&["export", "--base", &base, "--gguf", format, "--output", path.to_str().unwrap()]);
        let mut file = fs::File::open(&path).unwrap();
        let content = Content::read(&mut file).unwrap();
        let text = |key: &str| match &content.metadata[key] {
            Value::String(text) => text.clone(),
            other => panic!("{key}: {other:?}"),
        };
        assert_eq!((text("general.architecture"), text("tokenizer.ggml.pre")), ("llama".into(), "gpt-2".into()));
        assert!(text("tokenizer.chat_template").contains("<|im_start|>"));
        assert_eq!(content.metadata["tokenizer.ggml.tokens"].to_vec().unwrap().len(), 640);
        assert_eq!(content.metadata["tokenizer.ggml.eos_token_id"].to_u32().unwrap(), 2);
        let own = WeightFiles::open_file(&Path::new(&base).join("model.safetensors")).unwrap();
        let tensor = content.tensor(&mut file, "blk.0.ffn_up.weight", &candle_core::Device::Cpu).unwrap();
        let got: Vec<f32> =
            tensor.dequantize(&candle_core::Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        let (_, want) = own.read("model.layers.0.mlp.up_proj.weight").unwrap();
        let most = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
        assert!(most <= limit, "{format}: {most}");
        assert!(content.tensor_infos.contains_key("rope_freqs.weight"), "llama3 scaling");
    }
    let first = root.path().join("m.f16.gguf");
    fails(&["export", "--base", &base, "--gguf", "f16", "--output", first.to_str().unwrap()], 2, "is there already");
    fails(&["export", "--base", &base, "--gguf", "q2_k", "--output", "x"], 2, "expected f16, q8_0, q4_0 or f32");
    fails(&["export", "--base", &base, "--output", "x"], 2, "no format is named");
    let gemma3 = golden("a/gemma3/model").display().to_string();
    fails(&["export", "--base", &gemma3, "--gguf", "f16", "--output", "x", "--pre-tokenizer", "gpt-2"], 4, "tokenizer");
}

#[test]
fn adapters_become_gguf_and_peft_folders_with_a_card() {
    let root = tempfile::tempdir().unwrap();
    let parts = parts("llama");
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    let file = root.path().join("a.gguf");
    let said = works(
        &[&["export", "--gguf", "f32", "--adapter-only", "--output", file.to_str().unwrap()], &parts[..]].concat(),
    );
    assert!(said.contains(&format!("use it          llama-cli -m BASE.gguf --lora {}", file.display())), "{said}");
    let content = candle_core::quantized::gguf_file::Content::read(&mut fs::File::open(&file).unwrap()).unwrap();
    assert_eq!(content.metadata["adapter.lora.alpha"].to_f32().unwrap(), 8.0);
    assert_eq!(content.tensor_infos["blk.1.attn_q.weight.lora_a"].shape.dims()[0], 4, "the rank");
    let folder = root.path().join("peft");
    let said = works(
        &[&["export", "--peft", "--push", "me/mine", "--dry-run", "--output", folder.to_str().unwrap()], &parts[..]]
            .concat(),
    );
    assert!(said.contains("would upload to me/mine") && said.contains("adapter_model.safetensors"), "{said}");
    let pipeline = |dir: &Path| format!("print(pipeline(\"text-generation\", \"{}\")(\"Hello\"))", dir.display());
    assert!(
        said.contains("use it          python3 -c 'from transformers") && said.contains(&pipeline(&folder)),
        "{said}"
    );
    let whole = root.path().join("hf");
    let said = works(&[&["export", "--hf", "--output", whole.to_str().unwrap()], &parts[..]].concat());
    assert!(said.contains(&pipeline(&whole)), "{said}");
    let card = fs::read_to_string(folder.join("README.md")).unwrap();
    assert!(card.contains("library_name: peft"), "{card}");
    fails(
        &[
            &["export", "--peft", "--push", "mine", "--dry-run", "--overwrite", "--output", folder.to_str().unwrap()],
            &parts[..],
        ]
        .concat(),
        2,
        "owner/name",
    );
    // What a form does not read is refused with it.
    for (words, wanted) in [
        (&["--hf", "--dry-run"][..], "--push"),
        (&["--gguf", "q4_0", "--adapter-only"], "f16 or f32"),
        (&["--gguf", "f16", "--dtype", "float32"], "--dtype"),
        (&["--peft", "--dtype", "float32"], "--dtype"),
        (&["--hf", "--pre-tokenizer", "gpt-2"], "--pre-tokenizer"),
        (&["--gguf", "f16", "--adapter-only", "--pre-tokenizer", "gpt-2"], "--pre-tokenizer"),
        (&["--peft", "--max-difference", "1"], "--max-difference"),
    ] {
        fails(&[&["export", "--output", "x"], words, &parts[..]].concat(), 2, wanted);
    }
}

/// The quickstart's tokenizer splits text by a rule of its own, with which GPT-2's makes the same tokens.
#[test]
fn a_tokenizer_with_a_rule_of_its_own_takes_the_one_that_makes_the_same_tokens() {
    let root = tempfile::tempdir().unwrap();
    let quickstart = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/quickstart/model");
    let export = |model: &Path, name: &str| -> Vec<String> {
        let output = root.path().join(name).display().to_string();
        ["export", "--base", &model.display().to_string(), "--gguf", "q8_0", "--output", &output]
            .map(str::to_owned)
            .to_vec()
    };
    let words = export(&quickstart, "small");
    let said = works(&words.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(said.contains("llama.cpp's gpt-2 made the same tokens of 3"), "{said}");
    // A name without the extension gets it.
    let mut file = fs::File::open(root.path().join("small.gguf")).unwrap();
    let content = candle_core::quantized::gguf_file::Content::read(&mut file).unwrap();
    assert_eq!(content.metadata["tokenizer.ggml.pre"].to_string().unwrap(), "gpt-2");
    // One that never merges across vowels has no equal there.
    let other = root.path().join("other");
    fs::create_dir(&other).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer_config.json"] {
        fs::copy(quickstart.join(name), other.join(name)).unwrap();
    }
    let text = fs::read_to_string(quickstart.join("tokenizer.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "[aeiou]|[^aeiou]+".into();
    fs::write(other.join("tokenizer.json"), json.to_string()).unwrap();
    let words = export(&other, "none");
    fails(&words.iter().map(String::as_str).collect::<Vec<_>>(), 4, "llama.cpp has no name for this tokenizer");
    assert!(!root.path().join("none.gguf").exists());
}
