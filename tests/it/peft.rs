//! Reading and writing adapters in PEFT's format, against files that PEFT wrote.
use crate::parity::other_kinds;
use std::fs;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use serde_json::{Value, json};
use tunesmith::checkpoint::AdapterConfig;
use tunesmith::checkpoint::loaded_adapter::LoadedAdapter;
use tunesmith::checkpoint::peft::{check_tensors, load_adapter, refuse_frozen_tables, save_adapter, vocabulary};
use tunesmith::config::adapters::lora::LoraConfig;
use tunesmith::config::arch::{Arch, TokenRows, Vocabulary};
use tunesmith::config::{Mode, Patterns, TargetModules, TuningConfig};
use tunesmith::model::targets::{Placement, Targets, place, placed};
use tunesmith::{Error, Kind};

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/a").join(path)
}

const ADAPTERS: [&str; 11] = [
    "phi3/adapter_final",
    "mixtral/adapter_final",
    "qwen2_moe/adapter_final",
    "qwen3_moe/adapter_final",
    "llama/adapter_final",
    "qwen2/adapter_final",
    "qwen3/adapter_final",
    "variants/rslora/adapter_final",
    "variants/patterns/adapter_final",
    "variants/modules_to_save/adapter_final",
    "variants/dora/adapter_final",
];

fn arch_of(adapter: &str) -> Arch {
    let other = other_kinds().iter().any(|name| adapter == format!("variants/{name}/adapter_final"));
    let family = adapter.split('/').next().unwrap().replace("variants", if other { "qwen2" } else { "llama" });
    Arch::from_dir(&golden(&family).join("model")).unwrap()
}

fn tuning(lora: &LoraConfig) -> TuningConfig {
    TuningConfig { lora: lora.clone(), ..TuningConfig::default() }
}

/// What an adapter must hold on its model.
fn expected(config: &AdapterConfig, arch: &Arch) -> Vec<(String, Vec<usize>)> {
    let saved = config.saved_tensors(arch).unwrap();
    let whole =
        arch.tensors().into_iter().filter(|spec| saved.contains(&spec.name)).map(|spec| (spec.name, spec.shape));
    let placements = config.place(arch).unwrap();
    let adapters = placements.iter().flat_map(Placement::tensors);
    adapters.chain(whole).collect()
}

#[test]
fn golden_adapters_fit_their_models_and_are_written_byte_for_byte() {
    let others = other_kinds().into_iter().map(|name| format!("variants/{name}/adapter_final"));
    for name in ADAPTERS.into_iter().map(str::to_owned).chain(others) {
        let name = name.as_str();
        let dir = golden(name);
        let (config, tensors) = load_adapter(&dir).unwrap();
        check_tensors(&dir, &tensors, &expected(&config, &arch_of(name))).unwrap_or_else(|error| panic!("{error}"));
        let copy = tempfile::tempdir().unwrap();
        let named: Vec<_> =
            tensors.iter().map(|(name, (shape, values))| (name.clone(), shape.clone(), &values[..])).collect();
        save_adapter(copy.path(), &config, &named).unwrap();
        let read = |dir: &Path, file: &str| fs::read(dir.join(file)).unwrap();
        let weights = "adapter_model.safetensors";
        assert!(read(copy.path(), weights) == read(&dir, weights), "{name}");
        let text = |dir: &Path| String::from_utf8(read(dir, "adapter_config.json")).unwrap().trim_end().to_owned();
        // Python has another way to write small numbers.
        assert_eq!(text(copy.path()), text(&dir).replace("6e-05", "0.00006"), "{name}");
    }
}

#[test]
fn the_scale_is_pefts() {
    let placed = |name: &str| {
        let (config, _) = load_adapter(&golden(name)).unwrap();
        config.place(&arch_of(name)).unwrap()
    };
    let scales = |name: &str, scale: f32| placed(name).iter().all(|it| it.adapter.rank().unwrap().scale == scale);
    assert!(scales("llama/adapter_final", 2.0) && scales("variants/rslora/adapter_final", 4.0));
    let patterns = placed("variants/patterns/adapter_final");
    let of = |module: &str| patterns.iter().find(|it| it.module == module).unwrap().adapter.rank().unwrap();
    assert_eq!((of("model.layers.0.mlp.down_proj").r, of("model.layers.0.mlp.down_proj").scale), (2, 4.0));
    assert_eq!(of("model.layers.1.self_attn.v_proj").scale, 0.75);
    assert_eq!(of("model.layers.0.self_attn.v_proj").scale, 2.0);
}

#[test]
fn a_configuration_becomes_pefts_and_comes_back() {
    let arch = arch_of("llama/x");
    let lora = LoraConfig {
        r: 4,
        lora_alpha: 8.5,
        rank_pattern: Patterns(vec![("down_proj".into(), 2)]),
        alpha_pattern: Patterns(vec![("layers.1.self_attn.v_proj".into(), 3.0)]),
        ..LoraConfig::default()
    };
    let placements = place(&arch, &lora).unwrap();
    let config = AdapterConfig::of(&tuning(&lora), &placements, Some("models/base"));
    let text = config.to_json();
    assert_eq!(text["target_modules"].as_array().unwrap().len(), 14, "auto is written as full names");
    assert_eq!((&text["lora_alpha"], &text["alpha_pattern"]["layers.1.self_attn.v_proj"]), (&json!(8.5), &json!(3)));
    assert_eq!(text["base_model_name_or_path"], "models/base");
    let again = AdapterConfig::from_json(&text.to_string(), Path::new("x")).unwrap();
    assert_eq!(again.place(&arch).unwrap(), placements);
    let back = again.settings(&arch, &TuningConfig::default()).unwrap();
    assert_eq!(placed(&arch, &back).unwrap(), placements, "a run that goes on from the adapter places it the same");
}

#[test]
fn factors_become_pefts_and_come_back() {
    for family in ["llama", "phi3"] {
        let arch = arch_of(&format!("{family}/x"));
        let mut tuning = TuningConfig { mode: Mode::Ia3, ..TuningConfig::default() };
        let placements = placed(&arch, &tuning).unwrap();
        let config = AdapterConfig::of(&tuning, &placements, None);
        let text = config.to_json();
        let named = |key: &str| -> Vec<String> { serde_json::from_value(text[key].clone()).unwrap() };
        let (all, inputs) = (named("target_modules"), named("feedforward_modules"));
        assert!(inputs.iter().all(|name| name.ends_with("down_proj") && all.contains(name)), "PEFT wants them in both");
        assert_eq!(inputs.len() * if family == "llama" { 3 } else { 2 }, all.len());
        let again = AdapterConfig::from_json(&text.to_string(), Path::new("x")).unwrap();
        assert_eq!(again.place(&arch).unwrap(), placements);
        tuning = again.settings(&arch, &tuning).unwrap();
        assert_eq!(placed(&arch, &tuning).unwrap(), placements);
    }
    let refused = |targets: &[&str], inputs: &[&str]| {
        let words = |words: &[&str]| Some(TargetModules::List(words.iter().map(|&word| word.to_owned()).collect()));
        let mut tuning = TuningConfig { mode: Mode::Ia3, ..TuningConfig::default() };
        (tuning.ia3.target_modules, tuning.ia3.feedforward_modules) = (words(targets), words(inputs));
        placed(&arch_of("llama/x"), &tuning).unwrap_err().to_string()
    };
    assert!(refused(&["k_proj"], &["down_proj"]).contains("tuning.ia3.feedforward_modules"));
    assert!(refused(&["k_porj"], &["k_porj"]).contains("did you mean k_proj?"));
}

#[test]
fn trained_tokens_are_written_and_read_as_peft_does() {
    let mut arch = arch_of("llama/x");
    arch.grow(vec![512, 513]);
    let lora = LoraConfig { modules_to_save: vec!["lm_head".into()], ..LoraConfig::default() };
    for (lora, written) in [
        (LoraConfig::default(), json!({"embed_tokens": [512, 513], "lm_head": [512, 513]})),
        (lora, json!({"embed_tokens": [512, 513]})),
    ] {
        let config = AdapterConfig::of(&tuning(&lora), &place(&arch, &lora).unwrap(), None).with_tokens(&arch).unwrap();
        let text = config.to_json();
        assert_eq!(text["trainable_token_indices"], written);
        let again = AdapterConfig::from_json(&text.to_string(), Path::new("x")).unwrap();
        assert_eq!(again.token_rows, config.token_rows);
    }
    let rows = |value: Value| with("trainable_token_indices", value).unwrap().token_rows;
    assert_eq!(rows(json!([3, 1])), TokenRows { embedding: vec![3, 1], head: Vec::new() });
    assert_eq!(rows(json!({"model.embed_tokens": [3]})), TokenRows { embedding: vec![3], head: Vec::new() });
    let apart = rows(json!({"embed_tokens": [1], "lm_head": [2]}));
    assert_eq!(apart, TokenRows { embedding: vec![1], head: vec![2] });
    // An id is a claim that is not allocated for.
    let far = |id: u32| Vocabulary { rows: TokenRows::both(&[id]), origin: "x".into(), ..Vocabulary::default() };
    let error = arch_of("llama/x").fit(&far(u32::MAX)).unwrap_err();
    assert_says(&error, &["4294967295", "512 tokens"]);
}

/// PEFT trains copies of a matrix that embedding and head share, unless it ensures the tie; the same rows of both it trains as one.
#[test]
fn a_head_gets_a_matrix_of_its_own_where_peft_gives_it_one() {
    let fitted = |rows: [&[u32]; 2], apart: &[&str]| {
        let mut arch = arch_of("variants/ia3/adapter_final");
        assert!(arch.tie_word_embeddings);
        let [embedding, head] = rows.map(<[u32]>::to_vec);
        let apart = apart.iter().map(|&module| module.to_owned()).collect();
        arch.fit(&Vocabulary { rows: TokenRows { embedding, head }, apart, ..Vocabulary::default() }).unwrap();
        assert_eq!(arch.separated, !arch.tie_word_embeddings);
        let last = arch.tensors().pop().unwrap().name;
        assert_eq!(last, if arch.separated { "lm_head.weight" } else { "model.norm.weight" });
        arch.separated
    };
    for rows in [[&[][..], &[]], [&[3], &[]], [&[3, 1], &[3, 1]]] {
        assert!(!fitted(rows, &[]) && !fitted(rows, &["model.norm", "q_proj"]), "{rows:?}");
        for module in ["lm_head", "embed_tokens", "model.embed_tokens", "model"] {
            assert!(fitted(rows, &["q_proj", module]), "{rows:?} {module}");
        }
    }
    assert!(fitted([&[1], &[2]], &[]) && fitted([&[], &[2]], &[]) && fitted([&[1, 2], &[2, 1]], &[]));
    let own = |name: &str| {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/adapters").join(name).join("adapter");
        tunesmith::checkpoint::peft::vocabulary(&dir).unwrap().apart
    };
    assert_eq!(own("tied_both"), ["embed_tokens", "lm_head"]);
    assert!(own("tied_ensured").is_empty() && own("tied_grown_beside").is_empty());
    // A head that is there already, or one of scores, stays.
    let mut untied = arch_of("llama/x");
    untied.separate(&["lm_head".to_owned()]);
    assert!(!untied.separated);
}

/// What PEFT writes with `ensure_weight_tying`: the matrix under both names.
#[test]
fn a_shared_matrix_is_written_under_both_names_and_read_as_one() {
    let golden = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/adapters").join(name);
    let (arch, dir) = (arch_of("variants/ia3/adapter_final"), golden("tied_ensured").join("adapter"));
    let own = LoadedAdapter::open(&dir, &arch).unwrap();
    assert!(own.config.shares_head && !own.tensors.contains_key("lm_head.weight"));
    let copy = tempfile::tempdir().unwrap();
    let tensors: Vec<_> =
        own.tensors.iter().map(|(name, (shape, values))| (name.clone(), shape.clone(), &values[..])).collect();
    save_adapter(copy.path(), &own.config, &tensors).unwrap();
    let (stored, again) = (load_adapter(&dir).unwrap().1, load_adapter(copy.path()).unwrap().1);
    assert!(stored == again && stored["lm_head.weight"] == stored["model.embed_tokens.weight"]);
    // Two matrices are no shared one.
    let mut apart = again;
    apart.get_mut("lm_head.weight").unwrap().1[7] += 1.0;
    let both = AdapterConfig { shares_head: false, ..own.config };
    let tensors: Vec<_> =
        apart.iter().map(|(name, (shape, values))| (name.clone(), shape.clone(), &values[..])).collect();
    let other = tempfile::tempdir().unwrap();
    save_adapter(other.path(), &both, &tensors).unwrap();
    let error = LoadedAdapter::open(other.path(), &arch).unwrap_err();
    assert_says(&error, &["lm_head.weight", "is not \"model.embed_tokens.weight\""]);
}

/// PEFT's `save_embedding_layers` stores tables that stay frozen; they are not trained further in silence.
#[test]
fn tables_that_modules_to_save_does_not_name_are_not_trained_further() {
    for (name, tied) in [("llama/adapter_final", false), ("variants/ia3/adapter_final", true)] {
        let mut arch = arch_of(name);
        assert_eq!(arch.ties_head(), tied);
        for grown in [0, 2] {
            arch.vocab_size += grown;
            let table = vec![0.5; arch.vocab_size * arch.hidden_size];
            for (stored, saved, refused) in [
                (&["model.embed_tokens.weight", "lm_head.weight"][..], &[][..], Some("model.embed_tokens.weight")),
                (&["model.embed_tokens.weight", "lm_head.weight"], &["lm_head"], Some("model.embed_tokens.weight")),
                (&["lm_head.weight"], &[], Some("lm_head.weight")),
                (&["model.embed_tokens.weight", "lm_head.weight"], &["lm_head", "embed_tokens"], None),
                (&["lm_head.weight"], &["lm_head"], None),
            ] {
                let modules_to_save = saved.iter().map(|&module| module.to_owned()).collect();
                let lora = LoraConfig { modules_to_save, ..LoraConfig::default() };
                let config = AdapterConfig::of(&tuning(&lora), &place(&arch, &lora).unwrap(), None);
                let shape = vec![arch.vocab_size, arch.hidden_size];
                let tensors: Vec<_> = stored.iter().map(|&name| (name.to_owned(), shape.clone(), &table[..])).collect();
                let dir = tempfile::tempdir().unwrap();
                save_adapter(dir.path(), &config, &tensors).unwrap();
                let mut fitted = arch.clone();
                fitted.fit(&vocabulary(dir.path()).unwrap()).unwrap();
                match (refuse_frozen_tables(dir.path(), &fitted), refused) {
                    (Ok(()), None) => {}
                    (Err(error), Some(table)) => {
                        assert_says(&error, &[table, "modules_to_save"]);
                        assert!(error.hint_text().unwrap().contains("tunesmith merge"), "{error}");
                    }
                    (other, _) => panic!("{name} {stored:?} {saved:?}: {other:?}"),
                }
            }
        }
    }
}

/// Of two tables, the one is named whose size is not the model's.
#[test]
fn a_table_of_another_size_than_the_model_is_named() {
    for (sizes, named) in
        [([512, 513], "\"lm_head.weight\" has 513"), ([513, 512], "\"model.embed_tokens.weight\" has 513")]
    {
        let tables = Vocabulary { whole: 513, tables: Some(sizes), origin: "x".into(), ..Vocabulary::default() };
        assert_says(&arch_of("llama/x").fit(&tables).unwrap_err(), &[named, "expected 512"]);
    }
}

#[test]
fn a_tensor_of_integers_is_a_fault_of_the_adapter() {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(golden("llama/adapter_final/adapter_config.json"), dir.path().join("adapter_config.json")).unwrap();
    let name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
    let header = json!({name: {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}).to_string();
    let header = format!("{header:<0$}", header.len().next_multiple_of(8));
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 8]].concat();
    fs::write(dir.path().join("adapter_model.safetensors"), bytes).unwrap();
    let error = load_adapter(dir.path()).unwrap_err();
    assert_says(&error, &["I64", name]);
    assert!(error.hint_text().unwrap().contains("damaged or of another kind"), "{error}");
}

#[test]
fn exclusions_of_an_adapter_survive_in_the_configuration() {
    let arch = arch_of("llama/x");
    let mut text: Value =
        serde_json::from_slice(&fs::read(golden("llama/adapter_final/adapter_config.json")).unwrap()).unwrap();
    text["target_modules"] = "all-linear".into();
    text["exclude_modules"] = json!(["layers.0.mlp.up_proj", "q_proj"]);
    let config = AdapterConfig::from_json(&text.to_string(), Path::new("x")).unwrap();
    let placements = config.place(&arch).unwrap();
    assert_eq!(placements.len(), 11);
    let settings = config.settings(&arch, &TuningConfig::default()).unwrap();
    assert_eq!(placed(&arch, &settings).unwrap(), placements);
}

fn with(key: &str, value: Value) -> tunesmith::Result<AdapterConfig> {
    let mut text: Value =
        serde_json::from_slice(&fs::read(golden("llama/adapter_final/adapter_config.json")).unwrap()).unwrap();
    text[key] = value;
    AdapterConfig::from_json(&text.to_string(), Path::new("dir/adapter_config.json"))
}

fn assert_says(error: &Error, fragments: &[&str]) {
    assert_eq!(error.kind(), Kind::Checkpoint, "{error}");
    for fragment in fragments {
        assert!(error.to_string().contains(fragment), "{fragment:?} is not in: {error}");
    }
}

#[test]
fn features_that_change_the_numbers_are_refused_by_name() {
    for (key, value) in [
        ("peft_type", json!("VERA")),
        ("task_type", json!("TOKEN_CLS")),
        ("lora_bias", json!(true)),
        ("layer_replication", json!([[0, 1]])),
        ("alora_invocation_tokens", json!([5])),
        ("kasa_config", json!({"beta": 1})),
        ("init_lora_weights", json!("pissa_niter_4")),
        ("init_lora_weights", json!("olora")),
        ("use_something_new", json!(true)),
    ] {
        let error = with(key, value).expect_err(key);
        assert_says(&error, &["dir/adapter_config.json", "not yet", key]);
    }
    for (key, value, instead) in [
        ("init_lora_weights", json!("olora"), "path_initial_model_for_weight_conversion"),
        ("lora_bias", json!(true), "merge the adapter in PEFT"),
        ("layer_replication", json!([[0, 1]]), "this version reads"),
    ] {
        let error = with(key, value).expect_err(key);
        assert!(error.hint_text().is_some_and(|hint| hint.contains(instead)), "{key}: {error}");
    }
    // PEFT sets it to what the adapted modules are.
    with("fan_in_fan_out", json!(true)).unwrap();
    for (key, value) in [
        ("r", json!(0)),
        ("r", json!(-1)),
        ("r", json!(1u64 << 40)),
        ("lora_alpha", json!("x")),
        ("lora_dropout", json!(1.0)),
        ("rank_pattern", json!({"a": 1.5})),
        ("alpha_pattern", json!([1])),
        ("layers_to_transform", json!(["a"])),
        ("target_modules", json!(null)),
        ("target_modules", json!([1])),
        ("peft_type", json!(null)),
        ("bias", json!("some")),
        ("trainable_token_indices", json!({"embed_tokens": [1], "score": [2]})),
        ("trainable_token_indices", json!([-1])),
    ] {
        assert_says(&with(key, value).expect_err(key), &["dir/adapter_config.json", key, "expected"]);
    }
}

#[test]
fn settings_that_do_not_fit_the_model_are_refused_with_the_file_and_the_key() {
    let arch = arch_of("llama/x");
    let mut tried = 0;
    for (key, value) in [
        ("target_modules", json!("(q_proj")),
        ("target_modules", json!("no_such_module")),
        ("target_modules", json!(["lm_head.weight"])),
        ("exclude_modules", json!("*")),
        ("exclude_modules", json!("all-linear")),
        ("rank_pattern", json!({"q_proj)": 2})),
        ("rank_pattern", json!({"q_proj": 0})),
        ("rank_pattern", json!({"q_proj": 1_u64 << 40})),
        ("alpha_pattern", json!({"[": 2})),
        ("layers_pattern", json!("(")),
        ("modules_to_save", json!(["("])),
        ("target_parameters", json!(["no.such.parameter"])),
        ("r", json!(u32::MAX)),
    ] {
        let error = with(key, value.clone()).and_then(|config| {
            config.place(&arch)?;
            config.tensors(&arch)?;
            config.clone().with_tokens(&arch)?;
            config.settings(&arch, &TuningConfig::default())
        });
        let Err(error) = error else { panic!("{key}: {value}") };
        let named = if value["q_proj"] == 1_u64 << 40 { "rank " } else { key };
        assert_says(&error, &["dir/adapter_config.json: ", named]);
        assert_eq!(error.message().matches("dir/adapter_config.json").count(), 1, "{error}");
        assert!(!error.message().contains("tuning.lora.") && !error.message().contains("(?:"), "{error}");
        tried += 1;
    }
    assert_eq!(tried, 13);
    // PEFT ignores a module that the model does not have.
    let idle = with("modules_to_save", json!(["no_such_module", "lm_head"])).unwrap();
    assert_eq!(idle.saved_tensors(&arch).unwrap(), ["lm_head.weight"]);
    let settings = idle.settings(&arch, &TuningConfig::default()).unwrap();
    assert_eq!(settings.lora.modules_to_save, ["lm_head"]);
    let error = Targets { strict: true, ..Targets::of(&idle.tuning) }.saved_tensors(&arch).unwrap_err();
    assert_eq!(error.kind(), Kind::Config, "{error}");
    assert!(error.message().contains("tuning.lora.modules_to_save: \"no_such_module\""), "{error}");
}

#[test]
fn of_twenty_thousand_patterns_the_first_that_matches_counts() {
    let arch = arch_of("llama/x");
    let mut patterns = serde_json::Map::new();
    patterns.insert("layers.1.self_attn.q_proj".to_owned(), json!(5));
    patterns.insert("q_proj".to_owned(), json!(6));
    for number in (0..20_000).filter(|&number| number != 4) {
        patterns.insert(format!("layers.{}.self_attn.{}_proj", number / 4, ["q", "k", "v", "o"][number % 4]), json!(7));
    }
    let config = with("rank_pattern", Value::Object(patterns)).unwrap();
    let placements = config.place(&arch).unwrap();
    let rank = |module: &str| {
        let found = placements.iter().find(|placement| placement.module == module).unwrap();
        found.adapter.rank().unwrap().r
    };
    assert_eq!(rank("model.layers.1.self_attn.q_proj"), 5);
    assert_eq!(rank("model.layers.0.self_attn.q_proj"), 6);
    assert_eq!(rank("model.layers.1.self_attn.v_proj"), 7);
}

#[test]
fn what_of_another_kind_is_not_computed_is_refused_by_name() {
    let text = fs::read_to_string(golden("variants/oft/adapter_final/adapter_config.json")).unwrap();
    let with = |key: &str, value: Value| {
        let mut text: Value = serde_json::from_str(&text).unwrap();
        text[key] = value;
        AdapterConfig::from_json(&text.to_string(), Path::new("dir/adapter_config.json"))
    };
    for (key, value) in [("coft", json!(true)), ("bias", json!("all")), ("fan_in_fan_out", json!(true))] {
        assert_says(&with(key, value).expect_err(key), &["dir/adapter_config.json", "not yet", key]);
    }
    for (key, value) in [("eps", json!(1e-4)), ("module_dropout", json!(0.1)), ("oft_block_size", json!(16))] {
        with(key, value).unwrap_or_else(|error| panic!("{key}: {error}"));
    }
    let arch = arch_of("variants/oft/adapter_final");
    for (key, value) in [("r", json!(4)), ("oft_block_size", json!(0))] {
        let error = with(key, value).unwrap().place(&arch).unwrap_err();
        assert_says(&error, &["tuning.oft", "expected one of them"]);
    }
}

#[test]
fn harmless_fields_of_other_versions_are_read_over() {
    for (key, value) in [
        ("some_new_field", json!({"a": 1})),
        ("some_new_size", json!(16)),
        ("use_new_thing", json!(false)),
        ("use_new_config", json!(null)),
        ("init_lora_weights", json!("eva")),
        ("eva_config", json!({"rho": 2.0})),
        ("loftq_config", json!({"loftq_bits": 4})),
        ("peft_version", json!("0.99")),
        ("task_type", json!(null)),
        ("layers_to_transform", json!(1)),
        ("layers_pattern", json!("layers")),
    ] {
        with(key, value).unwrap_or_else(|error| panic!("{key}: {error}"));
    }
    let old = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "query"]});
    let old = AdapterConfig::from_json(&old.to_string(), Path::new("x")).unwrap();
    assert_eq!(old.place(&arch_of("llama/x")).unwrap().len(), 2, "names of other architectures do no harm");
}

#[test]
fn half_precision_adapters_are_read() {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(golden("llama/adapter_final/adapter_config.json"), dir.path().join("adapter_config.json")).unwrap();
    let numbers = [0.5f32, -1.25, 3.0, 65504.0];
    for (dtype, bytes) in [
        ("BF16", numbers.map(|x| bf16::from_f32(x).to_le_bytes()).concat()),
        ("F16", numbers.map(|x| f16::from_f32(x).to_le_bytes()).concat()),
    ] {
        let header =
            json!({"base_model.model.x.lora_A.weight": {"dtype": dtype, "shape": [2, 2], "data_offsets": [0, 8]}});
        let header = header.to_string();
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes].concat();
        fs::write(dir.path().join("adapter_model.safetensors"), file).unwrap();
        let (_, tensors) = load_adapter(dir.path()).unwrap();
        let (shape, values) = &tensors["x.lora_A.weight"];
        assert_eq!(shape, &[2, 2]);
        let widen = |x: f32| if dtype == "BF16" { bf16::from_f32(x).to_f32() } else { f16::from_f32(x).to_f32() };
        assert_eq!(values[..], numbers.map(widen));
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused_with_both_sides() {
    let name = "llama/adapter_final";
    let (config, tensors) = load_adapter(&golden(name)).unwrap();
    let expected = expected(&config, &arch_of(name));
    let (first, shape) = expected[0].clone();
    let mut missing = tensors.clone();
    missing.remove(&first);
    assert_says(
        &check_tensors(Path::new("d"), &missing, &expected).unwrap_err(),
        &[&first, "27 tensors there, 28 expected"],
    );
    let mut extra = tensors.clone();
    extra.insert("model.layers.0.self_attn.q_proj.lora_magnitude_vector".into(), (vec![64], vec![0.0; 64]));
    assert_says(&check_tensors(Path::new("d"), &extra, &expected).unwrap_err(), &["lora_magnitude_vector", "no place"]);
    let mut turned = tensors.clone();
    turned.get_mut(&first).unwrap().0.reverse();
    let found = format!("is {:?}, expected {shape:?}", [shape[1], shape[0]]);
    assert_says(&check_tensors(Path::new("d"), &turned, &expected).unwrap_err(), &[&first, &found]);
    let foreign = tempfile::tempdir().unwrap();
    fs::copy(golden(name).join("adapter_config.json"), foreign.path().join("adapter_config.json")).unwrap();
    fs::copy(golden("llama/model/model.safetensors"), foreign.path().join("adapter_model.safetensors")).unwrap();
    assert_says(&load_adapter(foreign.path()).unwrap_err(), &["expected names that begin with", "base_model.model."]);
    fs::remove_file(foreign.path().join("adapter_model.safetensors")).unwrap();
    fs::write(foreign.path().join("adapter_model.bin"), "x").unwrap();
    assert_says(&load_adapter(foreign.path()).unwrap_err(), &["not yet: adapter_model.bin"]);
    assert_says(&load_adapter(Path::new("nowhere")).unwrap_err(), &["nowhere", "hint"]);
}

#[test]
fn a_regular_expression_stays_one() {
    let lora = LoraConfig { target_modules: TargetModules::Regex(".*q_proj".into()), ..LoraConfig::default() };
    let placements = place(&arch_of("llama/x"), &lora).unwrap();
    assert_eq!(AdapterConfig::of(&tuning(&lora), &placements, None).to_json()["target_modules"], ".*q_proj");
}

#[test]
fn mutated_configurations_never_panic() {
    let arch = arch_of("llama/x");
    let text = fs::read(golden("variants/patterns/adapter_final/adapter_config.json")).unwrap();
    let mut read = 0;
    for at in 0..text.len() {
        for bit in 0..8 {
            let mut bytes = text.clone();
            bytes[at] ^= 1 << bit;
            let Ok(mutated) = String::from_utf8(bytes) else { continue };
            if let Ok(config) = AdapterConfig::from_json(&mutated, Path::new("x")) {
                read += 1;
                let _ = config.place(&arch);
                let _ = config.saved_tensors(&arch);
            }
        }
    }
    assert!(read > 100, "{read}");
}
