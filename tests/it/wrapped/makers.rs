//! Multimodal checkpoints whose language model is stored in a maker's format, as Qwen3-VL's in FP8: the models of
//! `tests/golden/makers` inside the Qwen3-VL of `tests/golden/vision`, whose encoder stays dense.
use super::{Raw, read, write};
use crate::makers;
use crate::pictures::{self, picture, write_rows};
use crate::run::fixture::{said, train, tunesmith};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use tunesmith::config::arch::Arch;
use tunesmith::model::weights::WeightFiles;

const CASES: [&str; 9] = ["fp8", "gptq", "gptq8", "awq", "ct_int4", "ct_int8", "ct_fp8", "ct_nvfp4", "nvfp4"];

/// Wraps a case of `makers` into the model in `folder`, a Qwen3-VL whose language model has half as many features.
fn wrap(case: &str, folder: &Path) {
    let text = makers::golden(case).join("model");
    let mut own: Value = serde_json::from_slice(&fs::read(text.join("config.json")).unwrap()).unwrap();
    let mut whole: Value = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
    let mut quantization = own["quantization_config"].take();
    // Each method has a word of its own for what stays dense.
    let (list, stays) = match quantization["quant_method"].as_str().unwrap() {
        "compressed-tensors" => ("ignore", "re:.*visual.*"),
        "modelopt" => ("ignore", "model.visual*"),
        _ => ("modules_to_not_convert", "visual"),
    };
    let dense = quantization[list].as_array().cloned().unwrap_or_default();
    quantization[list] = dense.into_iter().chain([json!(stays)]).collect();
    own["model_type"] = json!("qwen3_vl_text");
    own["rope_parameters"]["mrope_section"] = json!([4, 2, 2]);
    own.as_object_mut().unwrap().remove("quantization_config");
    let hidden = own["hidden_size"].as_u64().unwrap() as usize;
    let doubled = hidden / whole["text_config"]["hidden_size"].as_u64().unwrap() as usize;
    whole["vision_config"]["out_hidden_size"] = hidden.into();
    // Of two blocks only the first takes features of an inner layer.
    whole["vision_config"]["deepstack_visual_indexes"] = json!([0]);
    whole["tie_word_embeddings"] = own["tie_word_embeddings"].clone();
    whole["text_config"] = own;
    whole["quantization_config"] = quantization;
    let visual = |name: &str| name.starts_with("model.visual.") && !name.contains("deepstack_merger_list.1.");
    let mut tensors: Raw = read(folder).into_iter().filter(|(name, _)| visual(name)).collect();
    for (name, (_, shape, bytes)) in &mut tensors {
        // The last matrices of the mergers write the language model's features.
        if name.contains("merger") && name.contains("linear_fc2") {
            shape[0] *= doubled;
            *bytes = bytes.repeat(doubled);
        }
    }
    for (name, tensor) in read(&text) {
        let inner = name.strip_prefix("model.").map(|rest| format!("model.language_model.{rest}"));
        tensors.insert(inner.unwrap_or(name), tensor);
    }
    fs::write(folder.join("config.json"), whole.to_string()).unwrap();
    write(&folder.join("model.safetensors"), &tensors);
}

fn done(args: &[&str]) -> String {
    let output = tunesmith(args).env_remove("CONFIG").output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", said(&output));
    said(&output)
}

#[test]
fn a_language_model_in_a_maker_s_format_is_read_inside_its_wrapper() {
    for case in CASES {
        let fixture = pictures::seeing("qwen3_vl");
        wrap(case, &fixture.path("model"));
        let plain = makers::golden(case).join("model");
        let open = |dir: &Path| {
            let arch = Arch::from_dir(dir).unwrap();
            (
                WeightFiles::open_model(dir, &arch, &arch.tensors()).unwrap_or_else(|error| panic!("{case}: {error}")),
                arch,
            )
        };
        let ((inside, arch), (alone, _)) = (open(&fixture.path("model")), open(&plain));
        assert_eq!(inside.quantization(), alone.quantization(), "{case}");
        for spec in arch.tensors() {
            assert!(inside.read(&spec.name).unwrap() == alone.read(&spec.name).unwrap(), "{case}: {}", spec.name);
            let quantized = [&inside, &alone].map(|files| files.layout(&spec.name).is_some());
            assert_eq!(quantized[0], quantized[1], "{case}: {}", spec.name);
        }
    }
}

#[test]
fn such_a_model_trains_on_images_as_its_dequantized_weights_do() {
    for case in ["fp8", "gptq", "ct_nvfp4"] {
        let fixture = pictures::seeing("qwen3_vl");
        wrap(case, &fixture.path("model"));
        let row = |answer: &str| json!({"image": picture("rgb.png"), "question": "what is it?", "answer": answer});
        write_rows(&fixture.path("train.jsonl"), ["a cat", "the sea", "a tree"].map(row));
        let lines = ["train.max_steps: 2", "tuning.freeze_connector: false", "train.eval_strategy: no"];
        let mut adapters = Vec::new();
        for quantization in ["auto", "none"] {
            let out = fixture.path(quantization).display().to_string();
            let config = fixture.config("run", &lines);
            let args = [format!("model.quantization={quantization}"), format!("train.output_dir={out}")];
            let trained = train(&config, &args.each_ref().map(String::as_str));
            assert!(trained.status.success(), "{case}: {}", said(&trained));
            adapters.push(read(&Path::new(&out).join("adapter")));
        }
        assert!(adapters[0] == adapters[1], "{case}: other bits");
        let config = fixture.path("run.yaml").display().to_string();
        let out = format!("train.output_dir={}", fixture.path("auto").display());
        let merged = fixture.path("merged").display().to_string();
        // Integers have no room for what was learned, FP8 has.
        let dtype: &[&str] = if case == "fp8" { &[] } else { &["--dtype", "bfloat16"] };
        done(&[&["merge", &config, &out, "--output", &merged][..], dtype].concat());
        let (before, after) = (read(&fixture.path("model")), read(Path::new(&merged)));
        assert!(before.keys().filter(|name| name.starts_with("model.visual.")).all(|name| after.contains_key(name)));
        if case == "fp8" {
            assert!(before.keys().eq(after.keys()), "the same tensors");
        }
        done(&[
            "infer",
            &config,
            "--base",
            &format!("model.name={merged}"),
            "--image",
            &picture("rgb.png"),
            "--prompt",
            "what is it?",
        ]);
    }
}
