//! Axolotl's rarer keys, grouped by outcome, and settings that consist of several keys. A name that ends with `*` stands for all
//! keys that begin so.
use super::{CACHE, KERNEL, TRACKER, UPLOAD};
use crate::ranks::{LAUNCHED, SPLIT};
use crate::work::Act::{self, Lost, Needless};
use crate::work::Work;
use tunesmith_config::Node;

const PREFERENCES: &str = "preference and reinforcement training are not part of this version";
const TEXT: &str = "text models only";
const WIDE: &str = "products are computed in float32, and what is trained is kept so";
const PADDING: &str = "there is no padding; packing sees every row";
const MEASURES: &[&str] = &["sacrebleu", "chrf"];

/// Keys, grouped by their outcome.
pub(crate) const OTHERS: &[(Act, &[&str])] = &[
    (Needless("fields that are not named are not read"), &["remove_unused_columns"]),
    (Needless("the family is told by config.json"), &["is_qwen_derived_model", "type_of_model"]),
    (Needless("tokens/s are shown"), &["include_tokens_per_second", "include_tkps"]),
    (Needless("tokens are counted"), &["total_supervised_tokens"]),
    (Needless("memory is given back as it goes"), &["gc_steps", "gc_collect_steps", "torch_empty_cache_steps"]),
    (Needless("memory is measured: train.memory_budget"), &["max_memory", "experimental_skip_move_to_device"]),
    (Needless(LAUNCHED), &["world_size"]),
    (Needless("weights are mapped, not copied"), &["qlora_sharded_model_loading", "torchdistx_path"]),
    (Needless("the whole set is shuffled"), &["shuffle_before_merging_datasets", "streaming_multipack_buffer_size"]),
    (Needless(CACHE), &["num_dataset_shards_to_save", "is_preprocess", "preprocess_iterable", "axolotl_config_path"]),
    (Needless("no page is served"), &["gradio_*"]),
    (
        Needless(WIDE),
        &["float32", "fp32_norms", "fp32_norm_classes", "embeddings_skip_upcast", "peft_autocast_adapter_dtype"],
    ),
    (
        Needless(PADDING),
        &[
            "batch_flattening",
            "pad_to_multiple_of",
            "pretrain_multipack_attn",
            "pretrain_multipack_buffer_size",
            "pretraining_sample_concatenation",
            "sample_packing_mp_start_method",
            "sample_packing_seq_len_multiplier",
        ],
    ),
    (
        Needless(KERNEL),
        &[
            "chunked_cross_entropy*",
            "cut_cross_entropy",
            "experts_implementation",
            "flash_attn_d512",
            "flash_optimum",
            "flex_attn_compile_kwargs",
            "fused_attn_kernel",
            "gemma4_hybrid_attn_impl",
            "large_head_attention",
            "liger_*",
            "llama4_linearized_experts",
            "sage_attention",
            "sdpa_varlen",
            "tiled_mlp*",
            "use_dsv4_kernels",
            "use_glm_dsa_kernels",
            "use_kernels",
            "use_scattermoe",
            "use_sonicmoe",
        ],
    ),
    (Needless("there is nothing to compile"), &["torch_compile_*", "deepcompile"]),
    (
        Lost("each rank takes its part of every step's micro-batches; train.batch_size is a rank's"),
        &["accelerator_config"],
    ),
    (Lost(SPLIT), &["expert_parallel_*", "heads_k_stride", "ring_attn_func"]),
    (Lost(LAUNCHED), &["use_ray", "ray_*", "resources_per_worker"]),
    (Lost("values travel between ranks in float32"), &["fp8_enable_fsdp_*"]),
    (Lost(TEXT), &["processor_*", "freeze_mm_modules", "image_*", "role_boundaries"]),
    (
        Lost(PREFERENCES),
        &[
            "center_rewards_coefficient",
            "cpo_alpha",
            "dpo_*",
            "ebft",
            "kto_*",
            "max_prompt_len",
            "orpo_alpha",
            "precompute_ref_log_probs",
            "rl_beta",
            "rpo_alpha",
            "simpo_gamma",
            "trl",
            "vllm",
        ],
    ),
    (
        Lost("other ways to quantize than bitsandbytes' are not part of this version"),
        &[
            "gptq_*",
            "model_quantization_*",
            "nvfp4_merge_aware",
            "qat",
            "quantization",
            "quantize_moe_experts",
            "llmcompressor",
            "use_onebitllms",
        ],
    ),
    (Lost("another loss is not part of this version"), &["diffusion", "use_eaft", "eaft_*"]),
    (Lost("the model's own config.json counts"), &["model_config", "cls_model_config", "overrides_of_model_kwargs"]),
    (Lost("a head of scores is task: classification, for rows {text, label}"), &["num_labels"]),
    (Lost("the tokenizer is that of tokenizer.json"), &["tokenizer_use_mistral_common", "tokenizer_save_jinja_files"]),
    (Lost("the end of each learned turn is learned, as the template writes it"), &["eot_tokens"]),
    (Lost("write them into a template: data.template_path"), &["chat_template_kwargs"]),
    (Lost("untrained tokens are left as they are"), &["fix_untrained_tokens"]),
    (Lost("training the embeddings of tokens that exist is not yet part of this version"), &["peft_trainable_token_*"]),
    (Lost("layers are always counted along model.layers"), &["peft_layers_pattern"]),
    (
        Lost("the optimizer it belongs to is not part of this version"),
        &["adam_beta3", "adam_epsilon2", "dion_*", "qgalore_*"],
    ),
    (Lost("the schedule it belongs to is not part of this version"), &["lr_div_factor", "jagged_restart_*"]),
    (Lost("ReLoRA and LISA are not part of this version"), &["relora_*", "lisa_*"]),
    (Lost("longer contexts by skipped positions are not part of this version"), &["use_pose", "pose_*"]),
    (Lost("another attention is not part of this version"), &["scaling_softmax*"]),
    (Lost("blocks are run again whole: train.gradient_checkpointing: {full: N}"), &["selective_checkpointing"]),
    (Lost("nothing is offloaded"), &["layer_offloading"]),
    (
        Lost("a signal at any time saves a checkpoint; train.save_steps says when else"),
        &["dynamic_checkpoint", "save_first_step"],
    ),
    (Lost("there is one trainer"), &["trainer_cls"]),
    (Lost("see `tunesmith bench`"), &["profiler_*"]),
    (
        Lost("benchmarks are not part of a run; train.predict_with_generate scores answers"),
        &["bench_*", "do_bench_eval"],
    ),
    (Lost("whole prompts are answered"), &["generation_prompt_ratio"]),
    (Lost("a step of its own: `tunesmith merge`"), &["merge_method"]),
    (Lost(UPLOAD), &["hub_revision"]),
    (
        Lost(TRACKER),
        &[
            "comet_*",
            "hf_mlflow_log_artifacts",
            "mlflow_*",
            "otel_*",
            "swanlab_*",
            "trackio_*",
            "use_mlflow",
            "use_otel_metrics",
            "use_swanlab",
            "use_trackio",
        ],
    ),
];

/// `bnb_config_kwargs`, and `LoftQ` in `peft`.
pub(super) fn quantization(work: &mut Work) {
    if let Some((key, node)) = work.get(&["bnb_config_kwargs"]) {
        let Node::Map(entries) = node else { return work.lost(&key, "expected a mapping") };
        work.needless(&key, "each of its keys has a line of its own");
        for (name, node) in entries {
            let from = format!("{key}.{name}");
            match name.as_str() {
                "bnb_4bit_quant_type" => work.put(&from, "model.quantization", node, ""),
                "bnb_4bit_use_double_quant" => work.put(&from, "model.double_quant", node, ""),
                "llm_int8_skip_modules" => work.put(&from, "model.quantization_skip_modules", node, ""),
                "load_in_4bit" | "load_in_8bit" => work.needless(&from, "the key of that name says it"),
                "bnb_4bit_compute_dtype" => work.needless(&from, "products are computed in float32"),
                "bnb_4bit_quant_storage" => work.needless(&from, "codes are kept in bytes"),
                "llm_int8_has_fp16_weight" | "llm_int8_enable_fp32_cpu_offload" => {
                    work.needless(&from, "on the CPU weights lie in main memory");
                }
                "llm_int8_threshold" => work.needless(&from, "8-bit weights are widened, so that no outlier is lost"),
                _ => work.lost(&from, "unknown to this import"),
            }
        }
    }
    let Some((key, node)) = work.get(&["peft"]) else { return };
    let inner = |node: &Node, name: &str| match node {
        Node::Map(entries) => entries.iter().find(|(key, _)| key == name).map(|(_, node)| node.clone()),
        _ => None,
    };
    match inner(&node, "loftq_config") {
        Some(loftq) if matches!(inner(&loftq, "loftq_bits"), None | Some(Node::Int(4))) => {
            work.put(&key, "tuning.lora.init_lora_weights", Node::Str("loftq".into()), "on a base of 4 bits");
            if work.written("model.quantization").is_none() {
                work.implied("model.quantization", Node::Str("nf4".into()), "LoftQ quantizes the base as it starts");
            }
        }
        Some(_) => work.lost(&key, "LoftQ makes up for a quantization of 4 bits"),
        None => work.lost(&key, "unknown to this import"),
    }
}

/// `embedding_lr`, `embedding_lr_scale` and `lr_groups`. Embedding and head take precedence over groups; of groups that match, the
/// first counts.
pub(super) fn rates(work: &mut Work) {
    let mut rates: Vec<(String, Node)> = Vec::new();
    let mut sources: Vec<String> = Vec::new();
    let number = |node: &Node| match node {
        Node::Int(number) => Some(*number as f64),
        Node::Float(number) => Some(*number),
        Node::Str(text) => text.trim().parse().ok(),
        _ => None,
    };
    let whole = work.written("train.learning_rate").and_then(number);
    let scaled = work.get(&["embedding_lr_scale"]).and_then(|(key, node)| Some((key, number(&node)? * whole?)));
    let given = work.get(&["embedding_lr"]).and_then(|(key, node)| Some((key, number(&node)?)));
    // There the factor goes before the rate.
    if let Some((key, rate)) = scaled.or(given) {
        rates.push(("(embed_tokens|lm_head).*".to_owned(), Node::Float(rate)));
        sources.push(key);
    }
    if let Some((key, Node::List(groups))) = work.get(&["lr_groups"]) {
        for group in groups {
            let Node::Map(entries) = group else { continue };
            let get = |name: &str| entries.iter().find(|(key, _)| key == name).map(|(_, node)| node);
            let (Some(Node::List(modules)), Some(rate)) = (get("modules"), get("lr").and_then(number)) else {
                continue;
            };
            for module in modules {
                let Node::Str(module) = module else { continue };
                rates.push((format!("{}.*", module.replace('.', r"\.")), Node::Float(rate)));
            }
        }
        sources.push(key);
    }
    for key in &sources {
        if rates.is_empty() {
            work.lost(key, "expected a list of {name, modules, lr}");
        } else {
            let why = if *key == "embedding_lr_scale" { "the rate itself, not a factor" } else { "" };
            work.put(key, "train.learning_rates", Node::Map(rates.clone()), why);
        }
    }
}

/// Generated answers: to validation rows, with their metrics, and samples.
pub(super) fn answers(work: &mut Work, validates: bool) {
    let scores = work.is_on("do_causal_lm_eval");
    if scores && validates {
        work.put("do_causal_lm_eval", "train.predict_with_generate", Node::Bool(true), "");
        if work.written("train.generation_max_new_tokens").is_none() {
            work.implied("train.generation_max_new_tokens", Node::Int(128), "its default");
        }
    } else if scores {
        work.changed("do_causal_lm_eval", "", "there are no validation rows");
    }
    match work.get(&["eval_causal_lm_metrics"]) {
        Some((key, Node::List(names))) if scores && validates => {
            let known = |name: &&Node| matches!(name, Node::Str(word) if MEASURES.contains(&word.as_str()));
            let ours = |name: &Node| match name {
                Node::Str(word) => Node::Str(word.trim_start_matches("sacre").to_owned()),
                other => other.clone(),
            };
            let kept: Vec<Node> = names.iter().filter(known).map(ours).collect();
            let lost = names.len() - kept.len();
            let why = if lost == 0 { "" } else { "perplexity is always told; COMET and TER are not measured" };
            if kept.is_empty() {
                work.changed(&key, "", why);
            } else {
                work.put(&key, "eval.metrics", Node::List(kept), why);
            }
        }
        Some((key, _)) => work.needless(&key, "no answers are scored"),
        None => {}
    }
    let samples = [
        ("num_generation_samples", "gen.num_samples", Some(Node::Int(3))),
        ("generation_max_new_tokens", "gen.max_new_tokens", Some(Node::Int(50))),
        ("generation_do_sample", "gen.do_sample", Some(Node::Bool(true))),
        ("generation_temperature", "gen.temperature", Some(Node::Float(0.7))),
        ("generation_top_p", "gen.top_p", None),
        ("generation_top_k", "gen.top_k", Some(Node::Int(0))),
    ];
    let on = work.is_on("generate_samples");
    if on {
        work.changed("generate_samples", "", "answers before and after stand in the report: gen.num_samples");
    }
    let greedy = matches!(work.get(&["generation_do_sample"]), Some((_, Node::Bool(false))))
        || matches!(work.get(&["generation_temperature"]), Some((_, zero)) if super::is_off(&zero));
    for (key, ours, default) in samples {
        let draws = ["gen.temperature", "gen.top_p", "gen.top_k"].contains(&ours);
        match (work.get(&[key]), default) {
            (Some(_), _) if !on => work.needless(key, "no samples are asked for"),
            (Some(_), _) if greedy && draws => work.needless(key, "samples are greedy"),
            (_, Some(_)) if on && greedy && ours == "gen.do_sample" => {
                work.implied(ours, Node::Bool(false), "a temperature of 0 is greedy");
                if work.get(&[key]).is_some() {
                    work.put(key, ours, Node::Bool(false), "");
                }
            }
            (Some((_, node)), _) => work.put(key, ours, node, ""),
            (None, Some(default)) if on && !(greedy && draws) => work.implied(ours, default, "its default"),
            (None, _) => {}
        }
    }
}
