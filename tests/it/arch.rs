//! Reading `config.json` as Transformers 4 and 5 spell it. A setting that is not supported is refused by name.
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tunesmith::Kind;
use tunesmith::config::FAMILIES;
use tunesmith::config::arch::{AltUpSpec, Arch, BlockSpec, HiddenAct, PartSpec, QkNorm, RopeScaling};
use tunesmith::model::weights::WeightFiles;

use crate::parity::families;

fn model_dir(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/a").join(name).join("model")
}

fn config(name: &str, file: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(model_dir(name).join(file)).unwrap()).unwrap()
}

fn parse(value: &Value) -> tunesmith::Result<Arch> {
    Arch::from_json(&value.to_string(), Path::new("some/config.json"))
}

#[test]
fn both_spellings_give_one_arch() {
    for name in &families() {
        let new = parse(&config(name, "config.json")).unwrap();
        let old = parse(&config(name, "config_v4.json")).unwrap();
        assert_eq!(new, old, "{name}");
        assert_eq!(new, Arch::from_dir(&model_dir(name)).unwrap(), "{name}");
    }
}

#[test]
fn every_family_has_a_golden_model() {
    let found: Vec<Arch> = families().iter().map(|name| Arch::from_dir(&model_dir(name)).unwrap()).collect();
    for family in FAMILIES {
        assert!(found.iter().any(|arch| arch.family == *family), "{family:?}");
    }
}

#[test]
fn golden_families_have_their_features() {
    let llama = Arch::from_dir(&model_dir("llama")).unwrap();
    assert_eq!((llama.family.model_type, llama.hidden_size), ("llama", 64));
    let attention = llama.uniform_attention().unwrap();
    assert_eq!((attention.num_heads, attention.num_kv_heads, attention.head_dim), (4, 2, 16));
    assert!(!llama.tie_word_embeddings && !llama.qkv_bias && llama.qk_norm == QkNorm::None);
    assert_eq!(llama.ropes[0].theta, 10_000.0);
    assert_eq!(
        llama.ropes[0].scaling,
        RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 32
        }
    );
    assert_eq!((llama.bos_token_id, llama.pad_token_id, &llama.eos_token_ids[..]), (Some(1), Some(0), &[2][..]));
    let qwen2 = Arch::from_dir(&model_dir("qwen2")).unwrap();
    assert!(qwen2.tie_word_embeddings && qwen2.qkv_bias && !qwen2.o_bias && qwen2.qk_norm == QkNorm::None);
    let qwen3 = Arch::from_dir(&model_dir("qwen3")).unwrap();
    assert!(qwen3.qk_norm == QkNorm::Head && !qwen3.qkv_bias);
    assert_eq!(qwen3.uniform_attention().unwrap().head_dim, 24);
}

#[test]
fn the_tensors_are_those_of_the_golden_files() {
    for name in &families() {
        let arch = Arch::from_dir(&model_dir(name)).unwrap();
        let mut found: Vec<(String, Vec<usize>)> = Vec::new();
        for entry in std::fs::read_dir(model_dir(name)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                let bytes = std::fs::read(path).unwrap();
                let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
                found.extend(file.iter().map(|(name, view)| (name.to_owned(), view.shape().to_vec())));
            }
        }
        let specs = arch.tensors();
        let files = WeightFiles::open(&model_dir(name), &specs).unwrap();
        if ["nemotron_h", "olmo_hybrid", "lfm3", "gpt2"].contains(&arch.family.model_type) {
            // Transformers names and cuts them otherwise: they are held against each other where files are opened.
            continue;
        }
        let stacked = files.stacking().again(specs.iter().map(|spec| (spec.name.as_str(), spec.shape.as_slice())));
        let parts: Vec<&String> = stacked.iter().flat_map(|it| it.experts.iter().flatten()).collect();
        let alone = specs.iter().filter(|spec| !parts.contains(&&spec.name));
        let mut expected: Vec<_> = alone.map(|spec| (spec.name.clone(), spec.shape.clone())).collect();
        expected.extend(stacked.iter().map(|it| (it.name.clone(), it.shape.clone())));
        found.sort();
        expected.sort();
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn linear_modules_carry_shapes_and_layers() {
    let arch = Arch::from_dir(&model_dir("qwen3")).unwrap();
    let linears = arch.linear_modules();
    assert_eq!(linears.len(), 15);
    assert_eq!((linears[0].name.as_str(), linears[0].out_features), ("model.layers.0.self_attn.q_proj", 96));
    assert_eq!((linears[3].name.as_str(), linears[3].in_features), ("model.layers.0.self_attn.o_proj", 96));
    assert_eq!((linears[13].layer, linears[14].layer), (Some(1), None));
    assert_eq!(linears[14].name, "lm_head");
}

/// Checks that a changed `config.json` is refused with every fragment in the message.
fn refused(name: &str, change: &[(&str, Value)], fragments: &[&str]) {
    let mut value = config(name, "config.json");
    for (key, to) in change {
        value[key] = to.clone();
    }
    let error = parse(&value).expect_err(&format!("{change:?} must be refused"));
    assert_eq!(error.kind(), Kind::Model);
    let text = error.to_string();
    for fragment in [&["some/config.json"], fragments].concat() {
        assert!(text.contains(fragment), "{change:?}: {text}");
    }
}

#[test]
fn unsupported_features_are_refused_by_name() {
    refused("llama", &[("model_type", json!("mamba"))], &["not yet", "mamba", "llama, qwen2, qwen3"]);
    refused("llama", &[("hidden_act", json!("gelu"))], &["not yet", "hidden_act", "gelu"]);
    // Transformers reads it in every class, and takes null for false.
    for causal in [json!(false), json!(null)] {
        refused("qwen3", &[("is_causal", causal)], &["is_causal", "a causal language model", "embeds texts"]);
    }
    refused("qwen3_5", &[("mlp_layer_types", json!(["dense"]))], &["mlp_layer_types", "list of 3"]);
    refused("gemma4_31b", &[("attention_chunk_size", json!(4))], &["attention_chunk_size", "window"]);
    refused("phi3_longrope", &[("original_max_position_embeddings", json!(1))], &["expected at least 2"]);
    refused(
        "llama",
        &[("quantization_config", json!({"quant_method": "hqq"}))],
        &["not yet: quantized base", "hqq", "bitsandbytes"],
    );
    refused("llama", &[("rope_parameters", json!({"rope_type": "mrope"}))], &["not yet", "mrope", "yarn"]);
    refused(
        "llama",
        &[("rope_parameters", json!(null)), ("rope_scaling", json!({"type": "linear"}))],
        &["rope_scaling.factor"],
    );
    refused("llama", &[("partial_rotary_factor", json!(1.5))], &["partial_rotary_factor is 1.5"]);
    refused("llama", &[("partial_rotary_factor", json!(0.2))], &["partial_rotary_factor is 0.2", "even"]);
    refused("llama", &[("partial_rotary_factor", json!(0.5))], &["partial_rotary_factor in llama", "Transformers"]);
    refused("llama", &[("rope_parameters", json!({"rope_type": "yarn"}))], &["rope_parameters.factor"]);
    refused("gemma3", &[("attn_logit_softcapping", json!(50.0))], &["attn_logit_softcapping in gemma3_text"]);
    refused(
        "phi3",
        &[("rope_parameters", json!({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}))],
        &["rope_parameters.short_factor", "8 numbers"],
    );
    refused("gemma2", &[("use_bidirectional_attention", json!(true))], &["use_bidirectional_attention"]);
    refused("gemma3", &[("sliding_window", json!(null))], &["layer 0", "sliding_window"]);
    refused("smollm3", &[("no_rope_layers", json!([1, 2]))], &["no_rope_layers", "2"]);
    refused("llama", &[("attention_dropout", json!(0.1))], &["attention_dropout"]);
    // Transformers fails on these whenever they run.
    for name in ["qwen2_moe", "qwen3_moe", "qwen3_next"] {
        let dense = [("decoder_sparse_step", json!(9)), ("output_router_logits", json!(true))];
        refused(name, &dense, &["output_router_logits is true", "no block has experts"]);
        let mut silent = config(name, "config.json");
        silent["decoder_sparse_step"] = json!(9);
        silent["output_router_logits"] = json!(false);
        assert!(parse(&silent).is_ok(), "{name}");
    }
    let latent = |key: &str, value: Value, words: &[&str]| refused("deepseek_v3_dense", &[(key, value)], words);
    latent("num_key_value_heads", json!(2), &["num_key_value_heads is 2", "num_attention_heads, 4"]);
    latent("qk_rope_head_dim", json!(5), &["qk_rope_head_dim is 5", "even"]);
    latent("kv_lora_rank", json!(0), &["kv_lora_rank is 0"]);
    latent("q_lora_rank", json!("many"), &["q_lora_rank"]);
    latent("v_head_dim", json!(1 << 23), &["num_attention_heads * head_dim"]);
    latent(
        "rope_parameters",
        json!({"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}),
        &["mscale_all_dim"],
    );
    refused("llama", &[("architectures", json!(["LlamaForTokenClassification"]))], &["LlamaForCausalLM"]);
    refused("llama", &[("sliding_window", json!(4096))], &["sliding_window is 4096", "no window"]);
    let kinds = json!(["full_attention", "sliding_attention"]);
    refused("qwen2", &[("layer_types", kinds)], &["layer 1", "sliding_window is not set or not used"]);
    refused("qwen2", &[("layer_types", json!(["full_attention", "chunked_attention"]))], &["chunked_attention"]);
    refused("qwen3", &[("num_experts", json!(8))], &["num_experts is 8", "no experts"]);
    refused("mixtral", &[("num_experts_per_tok", json!(5))], &["4 experts, 5 of them a token"]);
    refused("mixtral", &[("num_local_experts", json!(1 << 17))], &["experts", "at most 65536"]);
    refused("mixtral", &[("router_jitter_noise", json!(0.1))], &["not yet", "router_jitter_noise"]);
    refused("granite4_moe", &[("num_experts_per_tok", json!(9))], &["6 experts, 9 of them a token"]);
    refused("granite4_moe", &[("num_local_experts", json!("six"))], &["num_local_experts", "whole number"]);
    refused("granitemoehybrid", &[("mamba_n_heads", json!(7))], &["mamba_n_heads 7", "128"]);
    refused("granitemoehybrid", &[("mamba_n_groups", json!(3))], &["mamba_n_heads 8", "mamba_n_groups 3"]);
    refused("granitemoehybrid", &[("hidden_act", json!("gelu_pytorch_tanh"))], &["not yet", "hidden_act", "Mamba 2"]);
    refused("granitemoehybrid", &[("time_step_limit", json!([0.5, 0.1]))], &["time steps from 0.5 to 0.1"]);
    refused("granitemoehybrid", &[("time_step_limit", json!([0.0]))], &["time_step_limit", "two numbers"]);
    let kinds = json!(["linear_attention", "moe", "mlp"]);
    refused(
        "nemotron_h",
        &[("layers_block_type", kinds), ("n_shared_experts", json!(2))],
        &["not yet: n_shared_experts"],
    );
    refused("nemotron3_nano", &[("output_router_logits", json!(true))], &["not yet: output_router_logits"]);
    refused("nemotron3_nano", &[("moe_latent_size", json!(0))], &["moe_latent_size", "whole number"]);
    refused("nemotron3_super", &[("n_group", json!(4))], &["6 experts in n_group 4"]);
    let kinds = json!(["conv", "chunked_attention", "full_attention", "conv", "conv"]);
    refused("lfm3", &[("layer_types", kinds)], &["chunked_attention"]);
    refused("lfm3", &[("sliding_window", json!(null))], &["layer 1", "sliding_window is null"]);
    refused("lfm3", &[("conv_L_cache", json!(17))], &["conv_L_cache is 17", "16"]);
    refused("lfm3", &[("rope_theta", json!(1e6))], &["rope_theta", "rope_parameters"]);
    refused(
        "muse_glimmer",
        &[("layer_rope_theta", json!([0, 1e4, 1e4, 5e5, 0]))],
        &["not yet: layer_rope_theta", "500000"],
    );
    refused("muse_glimmer", &[("layer_rope_theta", json!([0, 1e4]))], &["layer_rope_theta has 2 entries"]);
    refused("muse_glimmer", &[("hidden_activation", json!("relu"))], &["not yet: hidden_activation"]);
    refused("nemotron_h", &[("layers_block_type", json!(["rwkv"]))], &["not yet", "rwkv"]);
    refused("nemotron_h", &[("mlp_hidden_act", json!("silu"))], &["not yet: mlp_hidden_act \"silu\"", "relu2"]);
    refused("nemotron_h", &[("sliding_window", json!(64))], &["not yet: sliding_window"]);
    refused("nemotron_h", &[("ssm_state_size", json!(512))], &["ssm_state_size is 512", "256"]);
    refused("olmo_hybrid", &[("linear_num_value_heads", json!(6))], &["linear_num_value_heads 6"]);
}

#[test]
fn numbers_that_only_python_writes_are_read() {
    let text = std::fs::read_to_string(model_dir("granitemoehybrid").join("config.json")).unwrap();
    let tagged = serde_json::to_string(&json!({"__float__": "Infinity"})).unwrap();
    let plain: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let bare = plain.replace(&tagged.replace(':', ": ").replace('{', "{ ").replace('}', " }"), "Infinity");
    assert!(bare.contains("[ 0.0, Infinity ]"), "{bare}");
    let read = |text: &str| Arch::from_json(text, Path::new("some/config.json"));
    assert_eq!(read(&bare).unwrap(), read(&text).unwrap());
    let error =
        read(&bare.replace("\"model_type\"", "\"Infinity\": NaN, \"model_type\"").replace("64,", "64")).unwrap_err();
    assert!(error.to_string().contains("not valid JSON"), "{error}");
}

#[test]
fn a_pattern_of_blocks_is_read_as_their_list() {
    let mut value = config("nemotron_h", "config.json");
    let listed = parse(&value).unwrap();
    value.as_object_mut().unwrap().remove("layers_block_type");
    value["hybrid_override_pattern"] = json!("M*-M");
    assert_eq!(parse(&value).unwrap(), listed);
    value["hybrid_override_pattern"] = json!("M*X");
    assert!(parse(&value).unwrap_err().to_string().contains("\"X\""));
}

/// The `config.json` of a golden with keys as files on the hub have them. Transformers 5 writes them differently.
fn with_global_keys(name: &str) -> Value {
    let mut value = config(name, "config.json");
    value.as_object_mut().unwrap().remove("per_layer_config").unwrap();
    let old = config(name, "config_v4.json");
    for key in ["global_head_dim", "num_global_key_value_heads"] {
        value[key] = old[key].clone();
    }
    value
}

#[test]
fn gemma_4_is_read_as_its_class_reads_it() {
    let arch = Arch::from_dir(&model_dir("gemma4_e2b")).unwrap();
    let of = |arch: &Arch| {
        let of = |it: &tunesmith::config::arch::AttentionSpec| (it.head_dim, it.num_kv_heads, it.kv_from, it.k_eq_v);
        arch.attentions().map(of).collect::<Vec<_>>()
    };
    let expected = [(16, None), (24, None), (16, None), (16, Some(2)), (24, Some(1))];
    assert_eq!(of(&arch), expected.map(|(width, from)| (width, 2, from, false)));
    let spec = arch.per_layer.unwrap();
    assert_eq!((spec.vocab_size, spec.width, arch.layer_scalar), (512, 32, true));
    let frequencies = arch.ropes[0].frequencies(0).inv_freq;
    assert_eq!((frequencies.len(), frequencies.iter().filter(|&&it| it > 0.0).count()), (12, 3));
    let names: Vec<String> = arch.tensors().into_iter().map(|spec| spec.name).collect();
    assert!(names.contains(&"model.layers.4.layer_scalar".to_owned()));
    assert!(!names.iter().any(|name| name.contains("layers.4.self_attn.k_")));
    assert!(!arch.parameters().iter().any(|spec| spec.name.ends_with("layer_scalar")));
    for name in ["gemma4_e2b", "gemma4_31b", "gemma4_a4b", "gemma4_unified"] {
        let arch = Arch::from_dir(&model_dir(name)).unwrap();
        assert_eq!(parse(&with_global_keys(name)).unwrap(), arch, "{name}");
        // The class makes the last block one with full attention.
        let mut value = with_global_keys(name);
        *value["layer_types"].as_array_mut().unwrap().last_mut().unwrap() = json!("sliding_attention");
        assert_eq!(parse(&value).unwrap(), arch, "{name}");
    }
    // Transformers writes numbers of blocks in one width.
    let mut value = config("gemma4_e2b", "config.json");
    let own = value["per_layer_config"]["1"].clone();
    value["per_layer_config"] = json!({"01": own.clone(), "04": own});
    assert_eq!(parse(&value).unwrap(), arch);
    let large = Arch::from_dir(&model_dir("gemma4_31b")).unwrap();
    assert_eq!(of(&large)[..2], [(16, 2, None, false), (32, 1, None, true)]);
    // Without keys as values the class does not look at their number.
    let mut value = with_global_keys("gemma4_31b");
    value["attention_k_eq_v"] = json!(false);
    assert_eq!(of(&parse(&value).unwrap())[1], (32, 2, None, false));
}

#[test]
fn what_gemma_4_s_class_does_not_do_is_refused_by_name() {
    let e2b = "gemma4_e2b";
    refused(e2b, &[("use_bidirectional_attention", json!("all"))], &["not yet", "use_bidirectional_attention", "all"]);
    refused(e2b, &[("rope_theta", json!(1e4))], &["rope_theta is", "rope_parameters"]);
    refused(e2b, &[("rope_scaling", json!({"rope_type": "linear", "factor": 2.0}))], &["rope_scaling"]);
    let plain = json!({"rope_type": "default", "rope_theta": 1e4});
    refused(e2b, &[("rope_parameters", plain.clone())], &["rope_parameters is", "full_attention"]);
    let half = json!({"full_attention": plain});
    refused(e2b, &[("rope_parameters", half)], &["sliding_attention"]);
    refused(e2b, &[("num_kv_shared_layers", json!(6))], &["num_kv_shared_layers is 6", "at most 5"]);
    refused(e2b, &[("num_kv_shared_layers", json!(4))], &["num_kv_shared_layers is 4", "full_attention"]);
    refused(e2b, &[("vocab_size_per_layer_input", json!(511))], &["vocab_size_per_layer_input is 511", "512"]);
    refused(e2b, &[("hidden_size_per_layer_input", json!(-1))], &["hidden_size_per_layer_input is -1"]);
    refused(e2b, &[("hidden_size_per_layer_input", json!(1 << 23))], &["hidden_size_per_layer_input"]);
    refused(e2b, &[("per_layer_config", json!({"1": {"head_dim": 24}}))], &["per_layer_config"]);
    let uneven = json!({"1": {"head_dim": 24}, "4": {"head_dim": 32}});
    refused(e2b, &[("per_layer_config", uneven)], &["per_layer_config"]);
    let other = json!({"1": {"num_attention_heads": 2}, "4": {"num_attention_heads": 2}});
    refused(e2b, &[("per_layer_config", other)], &["not yet", "num_attention_heads"]);
    let odd = json!({"1": {"head_dim": 25}, "4": {"head_dim": 25}});
    refused(e2b, &[("per_layer_config", odd)], &["per_layer_config.head_dim is 25"]);
    refused(e2b, &[("attention_dropout", json!(0.1))], &["attention_dropout"]);
    refused("gemma4_a4b", &[("top_k_experts", json!(7))], &["6 experts, 7 of them a token"]);
    refused("gemma4_a4b", &[("num_experts", json!(null))], &["num_experts is null"]);
    refused("gemma4_unified", &[("num_experts", json!(4))], &["num_experts is 4", "no experts"]);
}

#[test]
fn gemma_3n_is_read_as_its_class_reads_it() {
    let arch = Arch::from_dir(&model_dir("gemma3n")).unwrap();
    let mlps: Vec<(usize, Option<f32>)> = arch
        .blocks
        .iter()
        .flat_map(|block| &block.branches)
        .filter_map(|branch| match branch.part {
            PartSpec::Mlp { intermediate_size, cut } => Some((intermediate_size, cut)),
            _ => None,
        })
        .collect();
    // Normal(0, 1).icdf of PyTorch.
    let cuts = [Some(0.524_400_5), Some(0.0), None, Some(0.841_621_3), None];
    for ((width, cut), (expected, wanted)) in mlps.iter().zip([72, 72, 80, 72, 88].into_iter().zip(cuts)) {
        assert_eq!(*width, expected);
        assert!(cut.zip(wanted).map_or(*cut == wanted, |(cut, wanted)| (cut - wanted).abs() < 1e-6), "{cut:?}");
    }
    let shares: Vec<Option<usize>> = arch.attentions().map(|attention| attention.kv_from).collect();
    assert_eq!(shares, [None, None, None, Some(2), Some(1)]);
    let spec = arch.per_layer.unwrap();
    assert_eq!((spec.vocab_size, spec.width, spec.tokens), (400, 32, 512));
    assert_eq!(arch.altup, Some(AltUpSpec { streams: 4, active: 0, laurel_rank: 8, coef_clip: 120.0 }));
    // What the class takes for keys that a file leaves out.
    let mut value = config("gemma3n", "config.json");
    for key in ["altup_num_inputs", "altup_active_idx", "laurel_rank", "activation_sparsity_pattern", "layer_types"] {
        value.as_object_mut().unwrap().remove(key);
    }
    (value["num_hidden_layers"], value["intermediate_size"]) = (json!(20), json!(96));
    value.as_object_mut().unwrap().remove("num_kv_shared_layers");
    let usual = parse(&value).unwrap();
    assert_eq!(usual.altup, Some(AltUpSpec { streams: 4, active: 0, laurel_rank: 64, coef_clip: 120.0 }));
    let full = |arch: &Arch| arch.attentions().filter(|attention| attention.window.is_none()).count();
    assert_eq!((full(&usual), usual.attentions().filter(|it| it.kv_from.is_some()).count()), (4, 15));
    let cut = |block: &BlockSpec| block.branches.iter().any(|it| matches!(it.part, PartSpec::Mlp { cut: Some(_), .. }));
    assert_eq!(usual.blocks.iter().filter(|block| cut(block)).count(), 10);
}

#[test]
fn what_gemma_3n_s_class_does_not_do_is_refused_by_name() {
    let name = "gemma3n";
    refused(name, &[("altup_active_idx", json!(4))], &["altup_active_idx 4"]);
    refused(name, &[("altup_num_inputs", json!(1))], &["altup_num_inputs is 1"]);
    refused(name, &[("altup_correct_scale", json!(false))], &["not yet", "altup_correct_scale"]);
    refused(name, &[("activation_sparsity_pattern", json!(0.95))], &["activation_sparsity_pattern"]);
    refused(
        name,
        &[("activation_sparsity_pattern", json!([0.5, 0.5]))],
        &["activation_sparsity_pattern has 2 entries"],
    );
    refused(name, &[("activation_sparsity_pattern", json!([1.0, 0.0, 0.0, 0.0, 0.0]))], &["numbers below 1"]);
    refused(name, &[("intermediate_size", json!([72, 72]))], &["intermediate_size has 2 entries"]);
    refused(name, &[("intermediate_size", json!([]))], &["intermediate_size"]);
    refused(name, &[("num_kv_shared_layers", json!(6))], &["num_kv_shared_layers is 6", "at most 5"]);
    refused(name, &[("hidden_size_per_layer_input", json!(0))], &["hidden_size_per_layer_input is 0"]);
    refused(name, &[("final_logit_softcapping", json!(null))], &["final_logit_softcapping"]);
}

#[test]
fn keys_that_a_class_does_not_read_change_nothing() {
    let with = |name: &str, key: &str, to: Value| {
        let mut value = config(name, "config.json");
        value[key] = to;
        parse(&value).unwrap()
    };
    let llama = with("llama", "hidden_activation", json!("gelu_pytorch_tanh"));
    assert_eq!(llama.activation, HiddenAct::Silu, "only Gemma 2 and 3 read this key");
    assert_eq!(with("gemma", "hidden_act", json!("gelu")).activation, HiddenAct::GeluTanh, "as the first files say");
    assert_eq!(with("gemma", "hidden_act", json!("silu")).activation, HiddenAct::Silu);
    assert_eq!(with("gemma2", "hidden_act", json!("silu")).activation, HiddenAct::GeluTanh);
    refused("gemma2", &[("hidden_activation", json!(null))], &["hidden_activation is null"]);
    let mistral = with("mistral", "layer_types", json!(["full_attention", "sliding_attention"]));
    let windows: Vec<bool> = mistral.attentions().map(|attention| attention.window.is_some()).collect();
    assert_eq!(windows[..2], [false, true]);
}

#[test]
fn impossible_sizes_are_refused() {
    refused("llama", &[("hidden_size", json!(0))], &["hidden_size is 0"]);
    refused("llama", &[("hidden_size", json!(-64))], &["hidden_size is -64"]);
    refused("llama", &[("hidden_size", json!(64.5))], &["hidden_size is 64.5"]);
    refused("llama", &[("hidden_size", json!("64"))], &["hidden_size"]);
    refused("llama", &[("hidden_size", json!(null))], &["hidden_size is null"]);
    refused("llama", &[("vocab_size", json!(u64::MAX))], &["vocab_size"]);
    refused("llama", &[("num_hidden_layers", json!(1_000_000))], &["num_hidden_layers"]);
    refused("llama", &[("num_key_value_heads", json!(3))], &["num_attention_heads 4", "num_key_value_heads 3"]);
    refused("llama", &[("head_dim", json!(15))], &["head_dim is 15"]);
    refused("llama", &[("rms_norm_eps", json!(0.0))], &["rms_norm_eps"]);
    refused("llama", &[("rope_parameters", json!({"rope_theta": -1.0}))], &["rope_parameters.rope_theta"]);
    refused("llama", &[("rope_parameters", json!({"rope_type": "llama3"}))], &["low_freq_factor"]);
    refused("llama", &[("eos_token_id", json!([2, "x"]))], &["eos_token_id"]);
    refused("llama", &[("tie_word_embeddings", json!(1))], &["tie_word_embeddings is 1"]);
    refused("qwen2", &[("num_attention_heads", json!(6))], &["hidden_size 64", "num_attention_heads 6"]);
    refused("qwen2", &[("layer_types", json!(["full_attention"]))], &["layer_types has 1"]);
    let huge = (1 << 24) - 1;
    let all = ["hidden_size", "intermediate_size", "vocab_size"].map(|key| (key, json!(huge)));
    refused("llama", &[&all[..], &[("num_hidden_layers", json!(4096))]].concat(), &["address"]);
}

#[test]
fn harmless_keys_pass() {
    let mut value = config("qwen2", "config.json");
    // As Qwen2.5 is published: a window that is switched off, and late blocks only.
    value["sliding_window"] = json!(131_072);
    assert!(parse(&value).is_ok());
    value["use_sliding_window"] = json!(true);
    value["layer_types"] = json!(null);
    assert!(parse(&value).is_ok(), "max_window_layers 28 of 2 blocks");
    value["max_window_layers"] = json!(1);
    let windows = |arch: Arch| arch.attentions().map(|attention| attention.window).collect::<Vec<_>>();
    assert_eq!(windows(parse(&value).unwrap()), [None, Some(131_072)]);
    let mut value = config("llama", "config.json");
    value["pad_token_id"] = json!(-1);
    value["some_new_key"] = json!({"a": 1});
    value["eos_token_id"] = json!([2, 5]);
    let arch = parse(&value).unwrap();
    assert_eq!((arch.pad_token_id, arch.eos_token_ids), (None, vec![2, 5]));
}

#[test]
fn broken_files_name_the_file() {
    for (text, fragment) in [("", "not valid JSON"), ("[1]", "expected a JSON object"), ("{\"a\":", "line 1")] {
        let text = Arch::from_json(text, Path::new("d/config.json")).unwrap_err().to_string();
        assert!(text.contains("d/config.json") && text.contains(fragment), "{text}");
    }
    let dir = tempfile::tempdir().unwrap();
    let error = Arch::from_dir(dir.path()).unwrap_err();
    assert_eq!(error.kind(), Kind::Model);
    assert!(error.to_string().contains("config.json"), "{error}");
    std::fs::write(dir.path().join("config.json"), b"{\"a\": \"\xff\"}").unwrap();
    assert!(Arch::from_dir(dir.path()).unwrap_err().to_string().contains("not UTF-8 at byte 7"));
}

#[test]
fn stop_tokens_of_the_generation_config_win() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(model_dir("llama").join("config.json"), dir.path().join("config.json")).unwrap();
    std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": [7, 8]}"#).unwrap();
    assert_eq!(Arch::from_dir(dir.path()).unwrap().eos_token_ids, [7, 8]);
}

/// As in Transformers, whose `standardize_rope_params` reads the key beside `rope_parameters` only where one rule is for all blocks.
#[test]
fn an_original_length_beside_rules_for_kinds_of_blocks_counts_nothing() {
    let mut value = config("olmo3", "config.json");
    let yarn = json!({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32});
    value["rope_parameters"] =
        json!({"full_attention": yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}});
    let own = parse(&value).unwrap().ropes;
    assert!(own.iter().any(|rope| matches!(rope.scaling, RopeScaling::Yarn { .. })));
    for beside in [json!(16), json!(null)] {
        value["original_max_position_embeddings"] = beside;
        assert_eq!(parse(&value).unwrap().ropes, own);
    }
}

/// `tests/golden/rope/inv_freq.json`: the bits of the inverse frequencies that Transformers computes.
#[test]
fn inverse_frequencies_are_those_of_transformers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/rope/inv_freq.json");
    let cases: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert!(cases.len() > 15);
    for case in cases {
        // GLM-4 turns a part of each head.
        let whole = case["rope"]["partial_rotary_factor"].is_null();
        let mut value = config(if whole { "llama" } else { "glm4" }, "config.json");
        for key in ["head_dim", "max_position_embeddings", "original_max_position_embeddings"] {
            if !case[key].is_null() {
                value[key] = case[key].clone();
            }
        }
        value["rope_parameters"] = case["rope"].clone();
        let arch = parse(&value).unwrap();
        let found = arch.ropes[0].frequencies(case["seq_len"].as_u64().unwrap_or(0) as usize);
        let factor = case["attention_factor"].as_f64().unwrap();
        assert!((f64::from(found.attention_factor) - factor).abs() < 1e-6, "{case}");
        let expected: Vec<u32> = case["bits"].as_array().unwrap().iter().map(|b| b.as_u64().unwrap() as u32).collect();
        assert_eq!(found.inv_freq.len(), expected.len());
        for (index, (found, expected)) in found.inv_freq.iter().zip(expected).enumerate() {
            // A unit or two in the last place: PyTorch's vectorized pow is not correctly rounded everywhere.
            let distance = found.to_bits().abs_diff(expected);
            assert!(distance <= 2, "{case} [{index}]: {found} against {}", f32::from_bits(expected));
        }
    }
}

#[test]
fn mutated_files_never_panic() {
    let mut read = 0;
    for name in ["llama", "qwen3", "gemma3", "phi3"] {
        let text = std::fs::read(model_dir(name).join("config_v4.json")).unwrap();
        for at in 0..text.len() {
            for bit in 0..8 {
                let mut bytes = text.clone();
                bytes[at] ^= 1 << bit;
                let Ok(mutated) = String::from_utf8(bytes) else { continue };
                if let Ok(arch) = Arch::from_json(&mutated, Path::new("x")) {
                    read += 1;
                    for rope in &arch.ropes {
                        assert_eq!(rope.frequencies(40).inv_freq.len(), rope.rotary_dim / 2);
                    }
                    assert!(!arch.tensors().is_empty());
                }
            }
        }
    }
    assert!(read > 100, "{read}");
}

#[test]
fn the_table_of_families_is_the_documented_one() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/models.md");
    let text = std::fs::read_to_string(path).unwrap();
    let table = text.split_once("<!-- tunesmith models --docs -->\n").unwrap().1.split_once("<!-- end -->").unwrap().0;
    assert_eq!(table, tunesmith::cmd::models::table(), "paste the output of `tunesmith models --docs`");
    let table = text.split_once("<!-- tunesmith models --docs, multimodal -->\n").unwrap().1;
    let table = table.split_once("<!-- end -->").unwrap().0;
    assert_eq!(table, tunesmith::cmd::models::wrappers(), "paste the output of `tunesmith models --docs`");
}
