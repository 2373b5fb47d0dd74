//! Mixtures of experts: stacked and by themselves on disk, biases of the choice that nothing trains, heads that predict ahead, and what
//! is refused.
use crate::parity::{Forward, Tensors, golden, json};
use crate::run::fixture::{said, tunesmith};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use tunesmith::Kind;
use tunesmith::config::arch::Arch;
use tunesmith::config::{Config, Mode, load_text};
use tunesmith::model::Model;
use tunesmith::model::weights::{Numbers, StackedTensor, WeightFiles, write_numbers_to};

/// Families whose files may hold experts stacked or not.
const FAMILIES: [&str; 8] =
    ["glm4_moe", "qwen3_5_moe", "qwen3_next", "lfm2_moe", "afmoe", "minimax_m2", "granite4_moe", "nemotron3_nano"];
/// How names of stacked gates and ups end.
const STACKED: [&str; 3] = [".experts.gate_up_proj", ".mixer.experts.up_proj", ".block_sparse_moe.input_linear.weight"];

fn opened(dir: &Path) -> (Arch, WeightFiles) {
    let arch = Arch::from_dir(dir).unwrap();
    let weights = WeightFiles::open_model(dir, &arch, &arch.tensors()).unwrap();
    (arch, weights)
}

fn specs(arch: &Arch) -> Vec<(String, Vec<usize>)> {
    arch.tensors().into_iter().map(|spec| (spec.name, spec.shape)).collect()
}

/// Every tensor of a golden model in float32.
fn tensors_of(arch: &Arch, weights: &WeightFiles) -> Tensors {
    arch.tensors().into_iter().map(|spec| (spec.name.clone(), weights.read(&spec.name).unwrap())).collect()
}

fn write(dir: &Path, config: &Value, tensors: &Tensors) {
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let numbers: Vec<_> = (tensors.iter())
        .map(|(name, (shape, values))| (name.clone(), shape.clone(), Numbers::F32(values.as_slice().into())))
        .collect();
    let mut file = std::fs::File::create(dir.join("model.safetensors")).unwrap();
    write_numbers_to(&mut file, &numbers, &[("format", "pt")]).unwrap();
}

/// With the experts of each block in two tensors.
fn stacked(arch: &Arch, mut tensors: Tensors) -> Tensors {
    let specs = specs(arch);
    let all = StackedTensor::in_rows(specs.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())));
    assert!(!all.is_empty());
    for it in all {
        let mut values = Vec::new();
        for expert in &it.experts {
            let parts: Vec<Vec<f32>> = expert.iter().map(|part| tensors.remove(part).unwrap().1).collect();
            values.extend(it.joined(&parts));
        }
        tensors.insert(it.name, (it.shape, values));
    }
    tensors
}

/// The names in a folder's weights.
fn names(dir: &Path) -> Vec<String> {
    let file = WeightFiles::open_file(&dir.join("model.safetensors")).unwrap();
    file.names().map(str::to_owned).collect()
}

/// Merges, and returns what the program said.
fn merged(base: &Path, adapter: &Path, target: &Path) -> String {
    let paths = [base, adapter, target].map(|path| path.display().to_string());
    let args = ["merge", "--base", &paths[0], "--adapter", &paths[1], "--output", &paths[2]];
    let output = tunesmith(&args).env_remove("CONFIG").output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    said(&output)
}

#[test]
fn stacked_experts_are_those_of_their_parts_and_written_as_they_were_read() {
    for family in FAMILIES {
        let (arch, weights) = opened(&golden(family).join("model"));
        let tensors = tensors_of(&arch, &weights);
        let root = tempfile::tempdir().unwrap();
        let dirs = ["apart", "stacked"].map(|name| root.path().join(name));
        for dir in &dirs {
            std::fs::create_dir(dir).unwrap();
        }
        let config = json(&golden(family).join("model/config.json"));
        write(&dirs[0], &config, &tensors);
        let together = stacked(&arch, tensors.clone());
        write(&dirs[1], &config, &together);
        assert!(names(&dirs[1]).iter().any(|name| STACKED.iter().any(|end| name.ends_with(end))), "{family}");
        let (_, found) = opened(&dirs[1]);
        assert!(tensors_of(&arch, &found) == tensors, "{family}");
        // An adapter on experts, merged into both.
        let results = ["a", "b"].map(|name| root.path().join(name));
        for (dir, result) in dirs.iter().zip(&results) {
            merged(dir, &golden(family).join("adapter_init"), result);
            assert_eq!(names(dir), names(result), "{family}: as they were read");
        }
        let [apart, found] = results.each_ref().map(|result| opened(result).1);
        assert!(tensors_of(&arch, &apart) == tensors_of(&arch, &found), "{family}");
        assert!(tensors_of(&arch, &apart) != tensors, "{family}: something is merged");
    }
}

#[test]
fn stacked_experts_of_other_shapes_are_refused_by_name() {
    let (arch, weights) = opened(&golden("glm4_moe").join("model"));
    let config = json(&golden("glm4_moe").join("model/config.json"));
    let together = stacked(&arch, tensors_of(&arch, &weights));
    let name = "model.layers.1.mlp.experts.gate_up_proj";
    for shape in [vec![5, 57, 64], vec![together[name].1.len()], vec![0, 48, 64]] {
        let root = tempfile::tempdir().unwrap();
        let mut tensors = together.clone();
        let values = vec![0.0; shape.iter().product()];
        tensors.insert(name.into(), (shape.clone(), values));
        write(root.path(), &config, &tensors);
        let arch = Arch::from_dir(root.path()).unwrap();
        let error = WeightFiles::open_model(root.path(), &arch, &arch.tensors()).unwrap_err();
        assert!(error.kind() == Kind::Model && error.to_string().contains("model.layers.1.mlp.experts"), "{error}");
    }
}

fn full() -> Config {
    let mut config = Config::default();
    config.tuning.mode = Mode::Full;
    config
}

#[test]
fn the_bias_of_a_choice_moves_it_and_is_never_trained() {
    for (family, ends) in [
        ("glm4_moe", "mlp.gate.e_score_correction_bias"),
        ("lfm2_moe", "feed_forward.expert_bias"),
        ("afmoe", "mlp.expert_bias"),
        ("minimax_m2", "block_sparse_moe.e_score_correction_bias"),
        ("nemotron3_nano", "mixer.gate.e_score_correction_bias"),
    ] {
        let dir = golden(family).join("model");
        let (arch, weights) = opened(&dir);
        let is_bias = |name: &str| name.ends_with(ends);
        let sparse = (0..arch.num_hidden_layers).filter(|&layer| arch.experts_of(layer).is_some()).count();
        assert_eq!(arch.tensors().iter().filter(|spec| is_bias(&spec.name)).count(), sparse, "{family}");
        let model = Model::load(&arch, Some(&weights), &full()).unwrap();
        assert_eq!(model.params.specs.len(), arch.tensors().len() - sparse, "{family}");
        assert!(model.params.specs.iter().all(|spec| !is_bias(&spec.name)), "{family}");
        // Without it other experts are chosen.
        let mut tensors = tensors_of(&arch, &weights);
        tensors.iter_mut().filter(|(name, _)| is_bias(name)).for_each(|(_, (_, values))| values.fill(0.0));
        let root = tempfile::tempdir().unwrap();
        write(root.path(), &json(&dir.join("config.json")), &tensors);
        let (arch, changed) = opened(root.path());
        let batch = Forward::read(family).batch();
        let losses = [&weights, &changed].map(|weights| {
            let config = load_text(Path::new("case"), "tuning: {lora: {r: 4}}").unwrap().config;
            Model::load(&arch, Some(weights), &config).unwrap().loss(&batch).unwrap()
        });
        assert!((losses[0] - losses[1]).abs() > 1e-4, "{family}: {losses:?}");
        // Freezing by names reaches none.
        let pattern = format!("tuning: {{mode: freeze, freeze: {{trainable_patterns: [\".*{ends}\"]}}}}");
        let config = load_text(Path::new("case"), &pattern).unwrap().config;
        let error = Model::load(&arch, Some(&changed), &config).unwrap_err();
        assert!(error.message().contains("matches no tensor"), "{family}: {error}");
    }
}

#[test]
fn heads_that_predict_ahead_are_neither_run_nor_lost() {
    for (family, further) in [
        ("glm4_moe", "model.layers.3.eh_proj.weight"),
        ("deepseek_v3", "model.layers.2.eh_proj.weight"),
        ("glm4_moe_lite", "model.layers.3.self_attn.kv_b_proj.weight"),
        ("qwen3_next", "mtp.fc.weight"),
    ] {
        let dir = golden(family).join("model");
        let (arch, weights) = opened(&dir);
        let mut tensors = tensors_of(&arch, &weights);
        tensors.insert(further.into(), (vec![2, 3], vec![0.5, -1.0, 2.0, 3.0, 4.0, 5.0]));
        let root = tempfile::tempdir().unwrap();
        let base = root.path().join("base");
        std::fs::create_dir(&base).unwrap();
        write(&base, &json(&dir.join("config.json")), &tensors);
        let (arch, found) = opened(&base);
        assert_eq!(found.fingerprint().unwrap(), fingerprint_of(&arch, &tensors, further), "{family}");
        let target = root.path().join("merged");
        let text = merged(&base, &golden(family).join("adapter_init"), &target);
        assert!(text.contains("copied as they were, and do not fit the tuned model"), "{family}: {text}");
        let file = WeightFiles::open_file(&target.join("model.safetensors")).unwrap();
        assert_eq!(file.read(further).unwrap(), tensors[further], "{family}");
    }
}

/// The fingerprint of a model of these tensors without one.
fn fingerprint_of(arch: &Arch, tensors: &Tensors, without: &str) -> String {
    let root = tempfile::tempdir().unwrap();
    let mut tensors = tensors.clone();
    tensors.remove(without);
    std::fs::write(root.path().join("config.json"), "{}").unwrap();
    write(root.path(), &json!({}), &tensors);
    WeightFiles::open(root.path(), &arch.tensors()).unwrap().fingerprint().unwrap()
}

/// The language model in Qwen's multimodal class, whose files hold experts stacked.
#[test]
fn experts_inside_a_multimodal_model_are_those_outside() {
    let dir = golden("qwen3_5_moe").join("model");
    let (alone, weights) = opened(&dir);
    let tensors = tensors_of(&alone, &weights);
    let mut wrapped: Tensors = BTreeMap::new();
    for (name, tensor) in stacked(&alone, tensors.clone()) {
        wrapped.insert(name.replace("model.", "model.language_model."), tensor);
    }
    for beside in ["model.visual.patch_embed.proj.weight", "mtp.fc.weight"] {
        wrapped.insert(beside.into(), (vec![2, 2], vec![1.0, 2.0, 3.0, 4.0]));
    }
    let text = json(&dir.join("config.json"));
    let config = json!({"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "tie_word_embeddings": text["tie_word_embeddings"], "text_config": text, "vision_config": {}});
    let root = tempfile::tempdir().unwrap();
    let base = root.path().join("base");
    std::fs::create_dir(&base).unwrap();
    write(&base, &config, &wrapped);
    let (arch, found) = opened(&base);
    assert_eq!(arch.wrapper.unwrap().model_type, "qwen3_5_moe");
    assert_eq!(Arch { wrapper: None, eos_token_ids: alone.eos_token_ids.clone(), ..arch.clone() }, alone);
    assert!(tensors_of(&arch, &found) == tensors);
    let target = root.path().join("merged");
    merged(&base, &golden("qwen3_5_moe").join("adapter_init"), &target);
    assert_eq!(names(&base), names(&target));
}

/// The golden's `config.json` with one key changed is refused, and the message names it.
#[test]
fn what_a_router_does_not_do_is_refused_by_name() {
    for (family, key, value) in [
        ("glm4_moe", "scoring_func", json!("softmax")),
        ("glm4_moe", "topk_method", json!("greedy")),
        ("glm4_moe", "output_router_logits", json!(true)),
        ("glm4_moe", "n_group", json!(4)),
        ("glm4_moe", "topk_group", json!(0)),
        ("glm4_moe", "topk_group", json!(4)),
        ("glm4_moe", "first_k_dense_replace", json!(-1)),
        ("glm4_moe", "moe_layer_freq", json!(2)),
        ("glm4_moe", "n_shared_experts", json!(0)),
        ("glm4_moe", "sliding_window", json!(7)),
        ("afmoe", "score_func", json!("softmax")),
        ("afmoe", "route_norm", json!(false)),
        ("afmoe", "n_group", json!(2)),
        ("afmoe", "route_scale", json!(0)),
        ("lfm2_moe", "output_router_logits", json!(true)),
        ("lfm2_moe", "layer_types", json!(null)),
        ("lfm2_moe", "num_dense_layers", json!("two")),
        ("minimax_m2", "shared_intermediate_size", json!(64)),
        ("minimax_m2", "use_routing_bias", json!(false)),
        ("minimax_m2", "attn_type_list", json!([1, 0])),
        ("minimax_m2", "qk_norm_type", json!("per_head")),
        ("minimax_m2", "rotary_dim", json!(7)),
        ("minimax_m2", "router_jitter_noise", json!(0.1)),
        ("qwen3_5_moe", "norm_topk_prob", json!(false)),
        ("glm4", "num_experts", json!(4)),
    ] {
        let mut config = json(&golden(family).join("model/config.json"));
        config[key] = value.clone();
        if key == "rotary_dim" {
            config.as_object_mut().unwrap().remove("rope_parameters");
        }
        let error = Arch::from_json(&config.to_string(), Path::new("config.json")).expect_err(key);
        let named = if key == "rotary_dim" { "partial_rotary_factor" } else { key };
        assert!(error.kind() == Kind::Model && error.to_string().contains(named), "{family}, {key}: {error}");
    }
}
