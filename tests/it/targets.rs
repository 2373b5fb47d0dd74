//! Adapter placement against PEFT's own (`tests/golden/peft/placement.json`), and the settings that are refused.
use std::collections::BTreeMap;
use std::path::Path;

use crate::parity::golden;
use serde_json::{Value, json};
use tunesmith::Kind;
use tunesmith::checkpoint::AdapterConfig;
use tunesmith::config::adapters::lora::LoraConfig;
use tunesmith::config::arch::{Arch, ScoreHead, TokenRows};
use tunesmith::config::{Patterns, TargetModules, TuningConfig};
use tunesmith::model::adapters::Method;
use tunesmith::model::targets::{Targets, place};

/// The 12-block model of the golden cases.
fn arch(tied: bool) -> Arch {
    let config = json!({"model_type": "qwen3", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "tie_word_embeddings": tied});
    Arch::from_json(&config.to_string(), Path::new("config.json")).unwrap()
}

fn strings(value: &Value) -> Vec<String> {
    serde_json::from_value(value.clone()).unwrap()
}

fn modules(value: &Value) -> TargetModules {
    match value.as_str() {
        Some("all-linear") => TargetModules::AllLinear,
        Some(pattern) => TargetModules::Regex(pattern.into()),
        None if strings(value).is_empty() => TargetModules::Regex("^$".into()),
        None => TargetModules::List(strings(value)),
    }
}

fn patterns<T>(value: &Value, read: impl Fn(&Value) -> T) -> Patterns<T> {
    Patterns(value.as_object().into_iter().flatten().map(|(key, value)| (key.clone(), read(value))).collect())
}

/// The model of a golden case.
fn arch_of(case: &Value) -> Arch {
    let mut arch = Arch::from_json(&case["model"].to_string(), Path::new("config.json")).unwrap();
    arch.score = (case["task"] == "SEQ_CLS").then(|| ScoreHead { labels: vec!["a".into(), "b".into()] });
    arch
}

fn settings(config: &Value) -> LoraConfig {
    let given = |key: &str| config.get(key);
    LoraConfig {
        target_modules: modules(&config["target_modules"]),
        exclude_modules: given("exclude_modules").map(modules),
        layers_to_transform: given("layers_to_transform").map(|layers| match layers.as_u64() {
            Some(layer) => vec![layer as usize],
            None => serde_json::from_value(layers.clone()).unwrap(),
        }),
        target_parameters: given("target_parameters").map(strings).unwrap_or_default(),
        modules_to_save: given("modules_to_save").map(strings).unwrap_or_default(),
        r: 4,
        lora_alpha: 8.0,
        use_rslora: config["use_rslora"] == true,
        rank_pattern: patterns(&config["rank_pattern"], |rank| rank.as_u64().unwrap() as usize),
        alpha_pattern: patterns(&config["alpha_pattern"], |alpha| alpha.as_f64().unwrap()),
        ..LoraConfig::default()
    }
}

#[test]
fn adapters_go_where_peft_puts_them() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/peft/placement.json");
    let cases: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(cases.len(), 51);
    for case in cases {
        let arch = arch_of(&case);
        let lora = settings(&case["config"]);
        let pattern = case["config"].get("layers_pattern").map(|pattern| pattern.as_str().unwrap().into());
        let targets = Targets { strict: false, layers_pattern: pattern.into_iter().collect(), ..lora.targets() };
        let found: BTreeMap<_, _> = (targets.place(&arch, &lora).unwrap().into_iter())
            .map(|placement| (placement.module, placement.adapter.rank().unwrap()))
            .map(|(module, rank)| (module, (rank.r as u64, rank.alpha, rank.scale)))
            .collect();
        let expected: BTreeMap<_, _> = (case["placed"].as_object().unwrap().iter())
            .map(|(name, numbers)| {
                let number = |index: usize| numbers[index].as_f64().unwrap();
                (name.clone(), (number(0) as u64, number(1), number(2) as f32))
            })
            .collect();
        let what = format!("{} {} {}", case["model"]["model_type"], case["task"], case["config"]);
        assert_eq!(found, expected, "{what}");
        let mut saved = targets.saved_tensors(&arch).unwrap();
        saved.sort();
        assert_eq!(saved, strings(&case["saved"]), "{what}");
        // What is written for PEFT, and what a run goes on with, has the same adapters.
        let tuning = TuningConfig { lora: lora.clone(), ..TuningConfig::default() };
        let placed = targets.place(&arch, &lora).unwrap();
        let written = AdapterConfig::of(&tuning, &placed, None).to_json().to_string();
        if targets.layers_pattern.is_empty() {
            let again = AdapterConfig::from_json(&written, Path::new("x")).unwrap();
            assert_eq!(again.place(&arch).unwrap(), placed, "{what}: {written}");
            let back = again.settings(&arch, &TuningConfig::default()).unwrap();
            let back = Targets { strict: false, ..Targets::of(&back) }.place(&arch, &back.lora).unwrap();
            assert_eq!(back, placed, "{what}");
        }
    }
}

/// What `all-linear` means for every family, from PEFT itself (`scripts/golden/all_linear.py`).
#[test]
fn all_linear_is_pefts_in_every_family() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let text = std::fs::read_to_string(root.join("peft/all_linear.json")).unwrap();
    let table: BTreeMap<String, Value> = serde_json::from_str(&text).unwrap();
    assert!(table.len() >= 44, "a line for each model of goldens: {}", table.len());
    for (name, expected) in table {
        let arch = Arch::from_dir(&root.join("a").join(&name).join("model")).unwrap();
        let target_modules = TargetModules::AllLinear;
        let lora = LoraConfig { r: 4, lora_alpha: 8.0, target_modules, ..LoraConfig::default() };
        let placed = place(&arch, &lora);
        if let Some(message) = expected.get("refused") {
            assert!(placed.is_err(), "{name}: PEFT says {message}");
            continue;
        }
        let mut found: BTreeMap<String, (Vec<u64>, Vec<u64>)> = BTreeMap::new();
        for placement in placed.unwrap_or_else(|error| panic!("{name}: {error}")) {
            let rank = placement.adapter.rank().unwrap();
            let inside = placement.module.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
            let (layer, module) =
                inside.map_or((None, placement.module.as_str()), |(layer, module)| (Some(layer), module));
            let entry = found.entry(module.to_owned()).or_insert((vec![rank.r as u64, rank.alpha as u64], Vec::new()));
            entry.1.extend(layer.map(|layer| layer.parse::<u64>().unwrap()));
        }
        let expected: BTreeMap<String, (Vec<u64>, Vec<u64>)> =
            serde_json::from_value(expected["adapted"].clone()).unwrap();
        assert_eq!(found, expected, "{name}");
    }
}

/// `auto` is our choice: the linear modules of the blocks, whatever the model; `all-linear` is PEFT's.
#[test]
fn auto_and_all_linear_are_two_things() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/a/mixtral/model");
    let mixtral = Arch::from_dir(&dir).unwrap();
    let count = |arch: &Arch, targets: TargetModules| {
        let lora = LoraConfig { r: 4, target_modules: targets, ..LoraConfig::default() };
        place(arch, &lora).map(|placed| (placed.len(), placed.iter().filter(|it| it.is_on_parameter()).count()))
    };
    assert_eq!(LoraConfig::default().target_modules, TargetModules::Auto);
    assert_eq!(count(&mixtral, TargetModules::Auto).unwrap(), (8, 0));
    assert_eq!(count(&mixtral, TargetModules::AllLinear).unwrap(), (14, 6));
    assert_eq!(count(&arch(false), TargetModules::AllLinear).unwrap(), (84, 0));
    // PEFT takes neither blocks nor dropout with it there.
    let refused = |lora: LoraConfig| place(&mixtral, &lora).unwrap_err().to_string();
    let all = LoraConfig { target_modules: TargetModules::AllLinear, ..LoraConfig::default() };
    let error = refused(LoraConfig { layers_to_transform: Some(vec![0]), ..all.clone() });
    assert!(error.contains("target_modules: auto"), "{error}");
    let error = refused(LoraConfig { lora_dropout: 0.1, ..all.clone() });
    assert!(error.contains("mlp.gate.weight") && error.contains("target_modules: auto"), "{error}");
    let error = refused(LoraConfig { modules_to_save: vec!["mlp.gate".into()], ..all });
    assert!(error.contains("also trained by modules_to_save"), "{error}");
    let half = LoraConfig { target_modules: TargetModules::List(vec!["w1".into()]), ..LoraConfig::default() };
    assert!(refused(half).contains("has w1 and not w3"));
    // Where PEFT knows a router only as a parameter, its name says so.
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/a/qwen2_moe/model");
    let qwen = Arch::from_dir(&dir).unwrap();
    let error = count(&qwen, TargetModules::List(vec!["q_proj".into(), "gate".into()])).unwrap_err().to_string();
    assert!(error.contains("target_parameters: [mlp.gate.weight]"), "{error}");
}

#[test]
fn placements_come_in_model_order_with_their_shapes() {
    let lora = LoraConfig { r: 4, ..LoraConfig::default() };
    let placed = place(&arch(false), &lora).unwrap();
    assert_eq!(placed.len(), 84);
    let (a, b) = ("model.layers.0.self_attn.o_proj.lora_A.weight", "model.layers.0.self_attn.o_proj.lora_B.weight");
    assert_eq!(placed[3].tensors(), [(a.to_owned(), vec![4, 16]), (b.to_owned(), vec![16, 4])]);
    assert_eq!(placed[83].module, "model.layers.11.mlp.down_proj");
    let some = LoraConfig { layers_to_transform: Some(vec![2]), ..lora };
    assert_eq!(place(&arch(false), &some).unwrap().len(), 7, "auto heeds layers_to_transform");
}

#[test]
fn settings_without_effect_or_beyond_this_version_are_refused() {
    let refused = |change: &dyn Fn(&mut LoraConfig), fragments: &[&str]| {
        let mut lora = LoraConfig::default();
        change(&mut lora);
        let error = place(&arch(false), &lora).expect_err(&format!("{fragments:?}"));
        assert_eq!(error.kind(), Kind::Config);
        for fragment in fragments {
            assert!(error.to_string().contains(fragment), "{error}");
        }
    };
    let list = |names: &[&str]| TargetModules::List(names.iter().map(|name| (*name).into()).collect());
    refused(&|lora| lora.target_modules = list(&["q_porj"]), &["no module matches", "did you mean q_proj?"]);
    refused(&|lora| lora.target_modules = list(&["q_proj", "v_prj"]), &["\"v_prj\"", "did you mean v_proj?"]);
    refused(&|lora| lora.target_modules = TargetModules::Regex("q_proj".into()), &["the expression", "[q_proj]"]);
    refused(&|lora| lora.target_modules = list(&["q_proj", "lm_head"]), &["not yet", "lm_head", "modules_to_save"]);
    refused(&|lora| lora.target_modules = list(&["embed_tokens"]), &["not yet", "embed_tokens"]);
    refused(&|lora| lora.target_modules = list(&["mlp"]), &["model.layers.0.mlp", "not a linear module"]);
    refused(&|lora| lora.target_modules = TargetModules::Regex(".*".into()), &["not a linear module"]);
    refused(&|lora| lora.rank_pattern = Patterns(vec![("(".into(), 2)]), &["rank_pattern", "regular expression"]);
    refused(&|lora| lora.rank_pattern = Patterns(vec![("head".into(), 2)]), &["rank_pattern", "head"]);
    refused(&|lora| lora.alpha_pattern = Patterns(vec![("x".into(), 2.0)]), &["alpha_pattern", "no module"]);
    refused(&|lora| lora.layers_to_transform = Some(vec![12]), &["no block 12", "0 to 11"]);
    refused(&|lora| lora.r = 1 << 40, &["rank 1099511627776"]);
    let regex = |lora: &mut LoraConfig| {
        lora.target_modules = TargetModules::Regex(".*q_proj".into());
        lora.layers_to_transform = Some(vec![1]);
    };
    refused(&regex, &["layers_to_transform", "regular expression"]);
}

#[test]
fn target_modules_that_number_blocks_are_told_of_layers_to_transform() {
    let layers = "tuning.lora.layers_to_transform: [0]";
    let refused = |target_modules: TargetModules, fragments: &[&str]| {
        let error = place(&arch(false), &LoraConfig { target_modules, ..LoraConfig::default() }).unwrap_err();
        for fragment in [fragments, &["blocks 0 to 11", layers]].concat() {
            assert!(error.to_string().contains(fragment), "{error}");
        }
    };
    let list = |names: &[&str]| TargetModules::List(names.iter().map(|name| (*name).into()).collect());
    refused(list(&["layers.12.self_attn.q_proj"]), &["no module matches"]);
    refused(list(&["v_proj", "layers.12.self_attn.q_proj"]), &["\"layers.12.self_attn.q_proj\" is no linear module"]);
    refused(list(&["layers.0"]), &["model.layers.0 matches, which is not a linear module"]);
    let pattern = |pattern: &str| TargetModules::Regex(pattern.into());
    refused(pattern(r"layers\.[01]\.self_attn\.q_proj"), &["a whole name, such as model.layers.0.self_attn.q_proj"]);
    refused(pattern(r"model.layers.0"), &["not a linear module"]);
    let one = LoraConfig { target_modules: list(&["layers.0.self_attn.q_proj"]), ..LoraConfig::default() };
    assert_eq!(place(&arch(false), &one).unwrap().len(), 1, "a name with its block is PEFT's too");
}

#[test]
fn modules_to_save_must_exist_and_be_trainable() {
    let save = |name: &str| LoraConfig { modules_to_save: vec![name.into()], ..LoraConfig::default() };
    let error = save("lm_haed").targets().saved_tensors(&arch(false)).unwrap_err();
    assert!(error.to_string().contains("did you mean lm_head?"), "{error}");
    for name in ["lm_head", "embed_tokens"] {
        assert_eq!(save(name).targets().saved_tensors(&arch(false)).unwrap().len(), 1);
    }
}

/// Of a matrix that embedding and head share each gets a copy, unless the tie is ensured: then it is one, whichever is named.
#[test]
fn a_shared_matrix_is_trained_apart_or_as_one() {
    let (embedding, head) = ("model.embed_tokens.weight", "lm_head.weight");
    for (named, apart) in [
        (&["embed_tokens"][..], &[embedding][..]),
        (&["lm_head"], &[head]),
        (&["lm_head", "embed_tokens"], &[embedding, head]),
    ] {
        let modules_to_save = named.iter().map(|&name| name.to_owned()).collect();
        let mut lora = LoraConfig { modules_to_save, ..LoraConfig::default() };
        let mut own = arch(true);
        own.separate(lora.targets().apart());
        assert!(own.separated);
        assert_eq!(lora.targets().saved_tensors(&own).unwrap(), apart);
        let names = lora.targets().names_beside(&own, &[]).unwrap();
        assert_eq!(names, apart);
        lora.ensure_weight_tying = true;
        let mut shared = arch(true);
        shared.separate(lora.targets().apart());
        assert!(!shared.separated);
        assert_eq!(lora.targets().saved_tensors(&shared).unwrap(), [embedding]);
        // A checkpoint of the one is none of the other.
        assert_eq!(lora.targets().names_beside(&shared, &[]).unwrap(), [embedding, head]);
        // Where there are two matrices, there is nothing to ensure.
        assert_eq!(lora.targets().saved_tensors(&arch(false)).unwrap(), apart);
    }
}

/// Experts are parameters: patterns match their names, each block has those that are named, and what PEFT lacks there is
/// refused.
#[test]
fn adapters_on_experts_go_where_their_parameters_are_named() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/a/mixtral/model");
    let arch = Arch::from_dir(&dir).unwrap();
    let lora = |parameters: &[&str]| LoraConfig {
        r: 4,
        target_modules: TargetModules::List(vec!["q_proj".into()]),
        target_parameters: parameters.iter().map(|&name| name.to_owned()).collect(),
        ..Default::default()
    };
    let parameters = ["layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"];
    let mut config = tunesmith::config::Config::default();
    config.tuning.lora = lora(&parameters);
    config.tuning.lora.alpha_pattern = Patterns(vec![("layers.0.mlp.experts.gate_up_proj".into(), 4.0)]);
    let placed = place(&arch, &config.tuning.lora).unwrap();
    let experts: Vec<_> = placed.iter().filter(|placement| placement.experts.is_some_and(|it| it.count == 4)).collect();
    assert_eq!(experts.len(), 2);
    assert_eq!((experts[0].module.as_str(), experts[0].in_features), ("model.layers.0.mlp.experts", 64));
    assert_eq!((experts[1].module.as_str(), experts[1].in_features), ("model.layers.1.mlp.experts", 48));
    let alpha = |index: usize| experts[index].adapter.rank().unwrap().alpha;
    assert_eq!((alpha(0), alpha(1)), (4.0, 32.0));
    // Each adapter is on its own matrix: it alone moves the loss.
    let weights = tunesmith::model::weights::WeightFiles::open(&dir, &arch.tensors()).unwrap();
    config.tuning.lora.init_lora_weights = tunesmith::config::InitLora::Random;
    let mut model = tunesmith::model::Model::load(&arch, Some(&weights), &config).unwrap();
    let mut batch = tunesmith::data::Batch { cu_seqlens: vec![0], ..Default::default() };
    batch.push(&[3, 9, 40, 7, 300, 12], &[3, 9, 40, 7, 300, 12]);
    model.params.zero_grads();
    model.forward_backward(&batch, 1.0, 1.0, 0).unwrap();
    for spec in model.params.specs.iter().filter(|spec| spec.name.contains("experts")) {
        assert!(model.params.grads().slice(spec.range()).read().iter().any(|&value| value != 0.0), "{}", spec.name);
    }

    let refused = |change: &dyn Fn(&mut LoraConfig), what: &str| {
        let mut lora = lora(&parameters);
        change(&mut lora);
        let error = place(&arch, &lora).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    refused(&|lora| lora.lora_dropout = 0.1, "lora_dropout with target_parameters");
    refused(&|lora| lora.use_dora = true, "use_dora with target_parameters");
    refused(&|lora| lora.init_lora_weights = tunesmith::config::InitLora::Pissa, "pissa with target_parameters");
    refused(&|lora| lora.layers_to_transform = Some(vec![1]), "layers_to_transform");
    refused(&|lora| lora.target_parameters.push("mlp.experts.up".into()), "\"mlp.experts.up\"");
    let router = LoraConfig { modules_to_save: vec!["gate".into()], ..lora(&parameters) };
    assert_eq!(
        router.targets().saved_tensors(&arch).unwrap(),
        [0, 1].map(|layer| format!("model.layers.{layer}.block_sparse_moe.gate.weight"))
    );
    let targets = router.targets();
    let beside = targets.beside(&arch, &[]).unwrap();
    assert_eq!(beside[1].0, "model.layers.1.mlp.gate.weight", "as PEFT calls it");
    let whole = LoraConfig { modules_to_save: vec!["mlp".into()], ..router };
    assert!(whole.targets().saved_tensors(&arch).unwrap_err().to_string().contains("not yet: experts"));
}

/// PEFT 0.21 takes `down_proj` and its like on Qwen3-MoE for the experts', however the module is named.
#[test]
fn dense_mlps_among_experts_have_adapters_only_as_parameters() {
    let config = json!({"model_type": "qwen3_moe", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
        "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0],
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8});
    let arch = Arch::from_json(&config.to_string(), Path::new("config.json")).unwrap();
    let dense = "model.layers.0.mlp.down_proj";
    let placed = |lora: &LoraConfig| {
        place(&arch, lora).map(|all| all.into_iter().map(|one| one.module).filter(|module| module.contains("mlp")))
    };
    let modules = |target_modules| LoraConfig { r: 4, target_modules, ..LoraConfig::default() };
    assert_eq!(placed(&modules(TargetModules::Auto)).unwrap().count(), 0);
    for named in [
        TargetModules::List(vec![dense.into(), "q_proj".into()]),
        TargetModules::Regex(r".*layers\.0\.mlp\.down_proj".into()),
    ] {
        let error = placed(&modules(named)).err().unwrap();
        assert!(error.kind() == Kind::Config && error.message().contains(dense), "{error}");
        assert!(error.hint_text().unwrap().contains("target_parameters: [model.layers.0.mlp.down_proj.weight]"));
    }
    let parameter = LoraConfig {
        target_parameters: vec![format!("{dense}.weight")],
        ..modules(TargetModules::List(vec!["q_proj".into()]))
    };
    assert_eq!(placed(&parameter).unwrap().collect::<Vec<_>>(), [dense]);
    // An adapter that lists it, of another version, is still read.
    let listed = modules(TargetModules::List(vec![dense.into()]));
    let targets = Targets { strict: false, ..listed.targets() };
    assert_eq!(targets.place(&arch, &listed).unwrap().len(), 1);
}

#[test]
fn expressions_may_look_around_as_pythons_do() {
    let lora = settings(&json!({"target_modules": r"^(?!.*mlp).*(?<!k)_proj$"}));
    let placed = place(&arch(true), &lora).unwrap();
    let names = |name: &str| placed.iter().filter(|one| one.module.ends_with(name)).count();
    assert_eq!((placed.len(), names("q_proj"), names("v_proj"), names("o_proj")), (36, 12, 12, 12));
}

/// A `DeepSeek` model with an MLP beside its experts, whose names PEFT takes for those of the experts, and a router with a buffer.
#[test]
fn what_peft_would_not_load_of_shared_experts_and_routers_is_refused() {
    let config = json!({"model_type": "deepseek_v3", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
        "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 2, "num_attention_heads": 2, "q_lora_rank": 8,
        "num_key_value_heads": 2, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8});
    let arch = Arch::from_json(&config.to_string(), Path::new("config.json")).unwrap();
    for entry in ["shared_experts.down_proj", "mlp.shared_experts.gate_proj"] {
        let target_modules = TargetModules::List(vec!["o_proj".into(), entry.into()]);
        let error = place(&arch, &LoraConfig { r: 4, target_modules, ..LoraConfig::default() }).err().unwrap();
        assert!(error.message().contains("shared_experts"), "{error}");
    }
    for (entry, part) in [("experts", "not yet: experts"), ("gate", "e_score_correction_bias")] {
        let saved = LoraConfig { modules_to_save: vec![entry.into()], ..LoraConfig::default() };
        let error = saved.targets().saved_tensors(&arch).unwrap_err();
        assert!(error.kind() == Kind::Config && error.message().contains(part), "{error}");
    }
}

#[test]
fn what_peft_would_look_for_by_another_name_is_refused() {
    let family = |name: &str| Arch::from_dir(&golden(name).join("model")).unwrap();
    let save = |entry: &str| LoraConfig { modules_to_save: vec![entry.into()], ..LoraConfig::default() };
    let olmo = family("olmo_hybrid");
    for entry in ["attention_layer_norm", "post_feedforward_layernorm", "q_conv1d"] {
        let error = save(entry).targets().saved_tensors(&olmo).unwrap_err();
        assert!(error.kind() == Kind::Config && error.message().contains("of olmo_hybrid"), "{entry}: {error}");
    }
    assert_eq!(save("model.norm").targets().saved_tensors(&olmo).unwrap(), ["model.norm.weight"]);
    let mut nemotron = family("nemotron_h");
    nemotron.token_rows = TokenRows::both(&[1, 2]);
    let error = LoraConfig::default().targets().token_tensors(&nemotron).unwrap_err();
    assert!(error.kind() == Kind::Config && error.message().contains("rows of tokens of nemotron_h"), "{error}");
}
