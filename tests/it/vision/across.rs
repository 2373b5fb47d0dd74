//! Models whose decoder reads an image by cross-attention (`vision-encoder-decoder`), from the command line: training, answers, resumed
//! runs, what is written, and what is refused.
use super::golden::{Run, golden};
use super::{check_cuts, close, config, everything, tensors};
use crate::pictures::{self, copy, picture, write_rows};
use crate::run::fixture::{Fixture, said, train, tunesmith};
use crate::run::resume::straight_equals_stopped_on;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use tunesmith::Kind;
use tunesmith::config::arch::Arch;
use tunesmith::config::vision::VisionArch;
use tunesmith::model::Model;
use tunesmith::model::weights::WeightFiles;

/// A golden model with a tokenizer and an image processor, and rows of captions.
pub fn captioner(name: &str) -> Fixture {
    let fixture = Fixture::new();
    let folder = fixture.path("model");
    fs::remove_dir_all(&folder).unwrap();
    copy(&golden(name).join("model"), &folder);
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(pictures::golden("picture_chats/llava").join(file), folder.join(file)).unwrap();
    }
    let processor = json!({"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}});
    fs::write(folder.join("preprocessor_config.json"), processor.to_string()).unwrap();
    let row = |number: usize| match number % 3 {
        0 => json!({"image": picture("rgb.png"), "caption": "a cat"}),
        1 => json!({"image": picture("wide.png"), "alt_text": ["the sea", "the blue sea"]}),
        _ => json!({"image": picture("tall.png"), "caption": "a tree"}),
    };
    write_rows(&fixture.path("train.jsonl"), (0..24).map(row));
    write_rows(&fixture.path("val.jsonl"), (24..30).map(row));
    fixture
}

fn done(words: &[&str]) -> String {
    let output = tunesmith(words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", said(&output));
    said(&output)
}

fn stored(dir: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    tensors(&dir.join("model.safetensors")).into_iter().collect()
}

#[test]
fn a_captioner_trains_is_evaluated_merged_and_written_with_the_names_of_its_files() {
    for name in ["across_vit", "across_dinov2"] {
        let fixture = captioner(name);
        let lines =
            ["train.max_steps: 12", "train.eval_strategy: steps", "train.eval_steps: 6", "tuning.freeze_vision: false"];
        let config = fixture.config("run", &[&lines[..], &["tuning.freeze_connector: false"]].concat());
        let trained = train(&config, &[]);
        assert!(trained.status.success(), "{name}: {}", said(&trained));
        let config = config.to_str().unwrap();
        done(&["eval", config]);
        let answer = done(&["infer", config, "--image", &picture("rgb.png")]);
        let merged = fixture.path("merged");
        let report = done(&["merge", config, "--output", merged.to_str().unwrap(), "--dtype", "float32"]);
        assert!(report.contains("merged, float32"), "{report}");
        // All tensors of the base under their names there; of the encoder what pictures come through has changed.
        let (base, found) = (stored(&fixture.path("model")), stored(&merged));
        assert_eq!(found.keys().collect::<Vec<_>>(), base.keys().collect::<Vec<_>>(), "{name}");
        let unused = |tensor: &str| ["pooler", "mask_token"].iter().any(|part| tensor.contains(part));
        for (tensor, (shape, values)) in &base {
            assert_eq!(shape, &found[tensor].0, "{name}: {tensor}");
            let beside = tensor.starts_with("enc");
            // Keys' biases shift all scores of a query alike.
            if beside && !tensor.contains("key.bias") {
                assert_eq!(values == &found[tensor].1, unused(tensor), "{name}: {tensor}");
            }
        }
        let again = done(&["infer", "--model", merged.to_str().unwrap(), "--image", &picture("rgb.png")]);
        assert_eq!(answer.lines().last(), again.lines().last(), "{name}");
        done(&["export", config, "--peft", "--output", fixture.path("peft").to_str().unwrap()]);
        let merged = merged.to_str().unwrap();
        for what in [&[config][..], &["--base", merged][..]] {
            for flags in [&[][..] as &[&str], &["--mmproj", "none"], &["--mmproj", "f16"]] {
                let own = ["export", "--gguf", "f32", "--pre-tokenizer", "gpt-2", "--output", "x.gguf"];
                let refused = tunesmith(&[&own[..], what, flags].concat()).output().unwrap();
                let text = said(&refused);
                let wanted = "--gguf: llama.cpp has no vision-encoder-decoder models, whose decoder reads images by cross-attention";
                assert!(refused.status.code() == Some(4) && text.contains(wanted) && text.contains("--hf"), "{text}");
            }
        }
    }
}

#[test]
fn a_captioner_trained_in_full_has_the_names_of_its_files() {
    let fixture = captioner("across_vit");
    let lines = ["tuning.mode: full", "tuning.freeze_vision: false", "tuning.freeze_connector: false"];
    let output = train(&fixture.config("run", &lines), &[]);
    assert!(output.status.success(), "{}", said(&output));
    let (base, found) = (stored(&fixture.path("model")), stored(&fixture.path("out/model")));
    assert_eq!(found.keys().collect::<Vec<_>>(), base.keys().collect::<Vec<_>>());
    let changed = |tensor: &str| base[tensor].1 != found[tensor].1;
    for tensor in [
        "encoder.encoder.layer.0.attention.attention.query.weight",
        "enc_to_dec_proj.weight",
        "decoder.transformer.h.1.crossattention.c_attn.weight",
        "decoder.transformer.wte.weight",
    ] {
        assert!(changed(tensor), "{tensor}");
    }
    let model = fixture.path("out/model");
    done(&["infer", "--model", model.to_str().unwrap(), "--image", &picture("rgb.png")]);
}

#[test]
fn a_stopped_run_of_a_captioner_ends_with_the_same_bits() {
    let lines = ["tuning.freeze_connector: false", "tuning.vision_unfreeze_layers: 1", "data.packing: true"];
    straight_equals_stopped_on(&captioner("across_vit"), &lines, &[3, 8]);
}

#[test]
fn a_text_without_its_image_is_refused() {
    let fixture = captioner("across_vit");
    let config = fixture.config("run", &["data.val_path: UNSET"]);
    let refuse = |rows: &[Value], expected: &str| {
        write_rows(&fixture.path("train.jsonl"), rows.iter().cloned());
        let output = train(&config, &[]);
        assert_eq!(output.status.code(), Some(3), "{}", said(&output));
        assert!(said(&output).contains(expected), "{}", said(&output));
    };
    let caption = json!({"image": picture("rgb.png"), "caption": "a cat"});
    refuse(&[json!({"text": "a cat"})], "no row shows one");
    refuse(&[caption.clone(), json!({"text": "a cat"})], "a row without an image");
    let asked = json!([{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a cat"}]);
    refuse(
        &[caption, json!({"image": picture("rgb.png"), "messages": asked})],
        "the model folder has no chat template",
    );
    let planned = tunesmith(&["plan", config.to_str().unwrap(), "vision.load=false"]).output().unwrap();
    assert!(!planned.status.success() && said(&planned).contains("no row shows one"), "{}", said(&planned));
    let model = fixture.path("model");
    let asked = tunesmith(&["infer", "--model", model.to_str().unwrap(), "--prompt", "a", "--raw"]).output().unwrap();
    assert!(!asked.status.success() && said(&asked).contains("reads one beside each text"), "{}", said(&asked));
}

/// Of the golden model: its description with changes.
fn read(change: &dyn Fn(&mut Value)) -> Result<VisionArch, tunesmith::Error> {
    let folder = tempfile::tempdir().unwrap();
    copy(&golden("across_vit").join("model"), folder.path());
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(&path, config.to_string()).unwrap();
    let arch = Arch::from_dir(folder.path())?;
    VisionArch::of_model(folder.path(), arch.hidden_size)
}

/// A change of a configuration, and what its refusal says.
type Case<'a> = (&'a dyn Fn(&mut Value), &'a str);

#[test]
fn what_is_not_computed_is_refused_by_name() {
    let vision = read(&|_| {}).unwrap();
    assert_eq!(
        (vision.start_token, vision.rows([(4, 4)], None), vision.connector_rows([(4, 4)], None)),
        (Some(1), 1, 17)
    );
    let cases: [Case<'_>; 9] = [
        (&|config| config["decoder"]["model_type"] = json!("bert"), "not yet: decoder.model_type \"bert\""),
        (&|config| config["decoder"] = Value::Null, "no key decoder"),
        (&|config| config["decoder"]["add_cross_attention"] = json!(false), "decoder.add_cross_attention is false"),
        (&|config| config["encoder"]["model_type"] = json!("swin"), "not yet: encoder.model_type \"swin\""),
        (&|config| config["encoder"]["model_type"] = json!("pixtral"), "not yet: encoder.model_type \"pixtral\""),
        (
            &|config| config["decoder"]["cross_attention_hidden_size"] = json!(32),
            "decoder.cross_attention_hidden_size is 32",
        ),
        (&|config| config["decoder_start_token_id"] = json!(5), "decoder_start_token_id is 5, expected 1"),
        (&|config| config["quantization_config"] = json!({"quant_method": "gptq"}), "not yet: quantization_config"),
        (&|config| config["architectures"] = json!(["TrOCRForCausalLM"]), "architectures"),
    ];
    for (change, expected) in cases {
        let error = read(change).unwrap_err();
        assert_eq!(error.kind(), Kind::Model);
        assert!(error.to_string().contains(expected) || expected.starts_with("no key"), "{expected}: {error}");
    }
}

fn loaded(change: impl Fn(&mut tunesmith::config::Config)) -> Model {
    let dir = golden("across_vit/model");
    let mut arch = Arch::from_dir(&dir).unwrap();
    let weights = WeightFiles::open_model(&dir, &arch, &arch.tensors()).unwrap();
    let vision = VisionArch::of_model(&dir, arch.hidden_size).unwrap();
    arch.vision = Some(Arc::new(VisionArch { training: everything(), ..vision }));
    let mut config = config("across_vit");
    change(&mut config);
    Model::load(&arch, Some(&weights), &config).unwrap()
}

/// Dropout on keys and values, whose rows are images', does not depend on how a step is cut into micro-batches.
#[test]
fn adapters_over_rows_of_images_drop_the_same_values_however_a_step_is_cut() {
    let mut model = loaded(|config| config.tuning.lora.lora_dropout = 0.25);
    let values: Vec<f32> = (0..model.params.len()).map(|at| (at as f32 * 0.37).sin() * 0.1).collect();
    model.params.put(&(0..values.len()), &values);
    check_cuts("across_vit", model, 1e-4);
}

/// What a text attends to is its own image: another one in the batch changes nothing, and another of its own does.
#[test]
fn a_text_reads_its_own_image_alone() {
    let model = loaded(|_| {});
    let run = Run::read("across_vit", &model);
    let rows = &run.rows()[..3];
    let whole = model.token_losses(&run.batch(rows)).unwrap();
    let parts: Vec<f32> =
        rows.iter().flat_map(|row| model.token_losses(&run.batch(std::slice::from_ref(row))).unwrap()).collect();
    close("packed", &whole, &parts, 1e-5);
    let mut other = rows.to_vec();
    other[1]["images"] = json!([(other[1]["images"][0].as_u64().unwrap() + 1) % 6]);
    let changed = model.token_losses(&run.batch(&other)).unwrap();
    let first = model.token_losses(&run.batch(&rows[..1])).unwrap().len();
    let second = model.token_losses(&run.batch(&rows[1..2])).unwrap().len();
    let differs = |range: std::ops::Range<usize>| range.clone().any(|at| (whole[at] - changed[at]).abs() > 1e-3);
    assert!(!differs(0..first) && differs(first..first + second) && !differs(first + second..whole.len()));
    // A row with none, or with two.
    let mut none = run.batch(rows);
    none.images.remove(1);
    let error = model.token_losses(&none).unwrap_err();
    assert!(error.kind() == Kind::Data && error.message().contains("a text with 0 images"), "{error}");
    let mut two = run.batch(rows);
    two.cu_seqlens.remove(1);
    let error = model.token_losses(&two).unwrap_err();
    assert!(error.message().contains("a text with 2 images"), "{error}");
    // A text goes on with its image alone, and from a copy as from itself; one that was given up is read again.
    let error = model.extend(&mut [(&mut model.cache(), &[1])]).unwrap_err();
    assert!(error.message().contains("a text with 0 images"), "{error}");
    let batch = run.batch(&rows[..1]);
    let mut cache = model.cache_with_images(&batch.images).unwrap();
    model.extend(&mut [(&mut cache, &[1, 5])]).unwrap();
    let mut copy = cache.clone();
    let wanted = model.extend(&mut [(&mut cache, &[6])]).unwrap().row(0);
    assert_eq!(model.extend(&mut [(&mut copy, &[6])]).unwrap().row(0), wanted);
    let tokens = copy.give_up();
    assert_eq!(model.extend(&mut [(&mut copy, &tokens)]).unwrap().row(0), wanted);
    assert!(copy.truncate(2));
    assert_eq!(model.extend(&mut [(&mut copy, &[6])]).unwrap().row(0), wanted);
}
