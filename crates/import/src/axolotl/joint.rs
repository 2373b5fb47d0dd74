//! Settings of ours that several keys of Axolotl set together: quantization, rates of groups, answers.
use crate::import::{Import, is_off_or_zero};
use tunesmith_config::Node;

const MEASURES: &[&str] = &["sacrebleu", "chrf"];

/// `bnb_config_kwargs`, and `LoftQ` in `peft`.
pub(super) fn quantization(import: &mut Import) {
    if let Some((key, node)) = import.get(&["bnb_config_kwargs"]) {
        let Node::Map(entries) = node else { return import.unsupported(&key, "expected a mapping") };
        import.not_needed(&key, "each of its keys has a line of its own");
        for (name, node) in entries {
            let from = format!("{key}.{name}");
            match name.as_str() {
                "bnb_4bit_quant_type" => import.put(&from, "model.quantization", node, ""),
                "bnb_4bit_use_double_quant" => import.put(&from, "model.double_quant", node, ""),
                "llm_int8_skip_modules" => import.put(&from, "model.quantization_skip_modules", node, ""),
                "load_in_4bit" | "load_in_8bit" => import.not_needed(&from, "the key of that name decides it"),
                "bnb_4bit_compute_dtype" => import.not_needed(&from, "products are computed in float32"),
                "bnb_4bit_quant_storage" => import.not_needed(&from, "codes are kept in bytes"),
                "llm_int8_has_fp16_weight" | "llm_int8_enable_fp32_cpu_offload" => {
                    import.not_needed(&from, "weights stay where the model is computed, each rank its part");
                }
                "llm_int8_threshold" => {
                    import.not_needed(&from, "8-bit weights are dequantized, so no outlier is lost");
                }
                _ => import.unsupported(&from, "unknown to this import"),
            }
        }
    }
    let Some((key, node)) = import.get(&["peft"]) else { return };
    let inner = |node: &Node, name: &str| match node {
        Node::Map(entries) => entries.iter().find(|(key, _)| key == name).map(|(_, node)| node.clone()),
        _ => None,
    };
    match inner(&node, "loftq_config") {
        Some(loftq) if matches!(inner(&loftq, "loftq_bits"), None | Some(Node::Int(4))) => {
            import.put(&key, "tuning.lora.init_lora_weights", Node::Str("loftq".into()), "on a base of 4 bits");
            if import.written("model.quantization").is_none() {
                import.default("model.quantization", Node::Str("nf4".into()), "LoftQ quantizes the base as it starts");
            }
        }
        Some(_) => import.unsupported(&key, "LoftQ needs a base of 4 bits"),
        None => import.unsupported(&key, "unknown to this import"),
    }
}

/// `embedding_lr`, `embedding_lr_scale` and `lr_groups`. Embedding and head take precedence over groups; of groups that match, the
/// first counts.
pub(super) fn rates(import: &mut Import) {
    let mut rates: Vec<(String, Node)> = Vec::new();
    let mut sources: Vec<String> = Vec::new();
    let number = |node: &Node| match node {
        Node::Int(number) => Some(*number as f64),
        Node::Float(number) => Some(*number),
        Node::Str(text) => text.trim().parse().ok(),
        _ => None,
    };
    let whole = import.written("train.learning_rate").and_then(number);
    let scaled = import.get(&["embedding_lr_scale"]).and_then(|(key, node)| Some((key, number(&node)? * whole?)));
    let given = import.get(&["embedding_lr"]).and_then(|(key, node)| Some((key, number(&node)?)));
    // There the factor goes before the rate.
    if let Some((key, rate)) = scaled.or(given) {
        rates.push(("(embed_tokens|lm_head).*".to_owned(), Node::Float(rate)));
        sources.push(key);
    }
    if let Some((key, Node::List(groups))) = import.get(&["lr_groups"]) {
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
            import.unsupported(key, "expected a list of {name, modules, lr}");
        } else {
            let why = if *key == "embedding_lr_scale" { "the rate itself, not a factor" } else { "" };
            import.put(key, "train.learning_rates", Node::Map(rates.clone()), why);
        }
    }
}

/// Imports the settings of generated answers: those to validation rows with their metrics, and samples.
pub(super) fn answers(import: &mut Import, validates: bool) {
    let scores = import.is_on("do_causal_lm_eval");
    if scores && validates {
        import.put("do_causal_lm_eval", "train.predict_with_generate", Node::Bool(true), "");
        if import.written("train.generation_max_new_tokens").is_none() {
            import.default("train.generation_max_new_tokens", Node::Int(128), "its default");
        }
    } else if scores {
        import.changed("do_causal_lm_eval", "", "there are no validation rows");
    }
    match import.get(&["eval_causal_lm_metrics"]) {
        Some((key, Node::List(names))) if scores && validates => {
            let known = |name: &&Node| matches!(name, Node::Str(word) if MEASURES.contains(&word.as_str()));
            let ours = |name: &Node| match name {
                Node::Str(word) => Node::Str(word.trim_start_matches("sacre").to_owned()),
                other => other.clone(),
            };
            let kept: Vec<Node> = names.iter().filter(known).map(ours).collect();
            let dropped = names.len() - kept.len();
            let why = if dropped == 0 { "" } else { "perplexity is always measured; COMET and TER are not supported" };
            if kept.is_empty() {
                import.changed(&key, "", why);
            } else {
                import.put(&key, "eval.metrics", Node::List(kept), why);
            }
        }
        Some((key, _)) => import.not_needed(&key, "no answers are scored"),
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
    let on = import.is_on("generate_samples");
    if on {
        import.changed("generate_samples", "", "the report shows answers before and after: gen.num_samples");
    }
    let greedy = matches!(import.get(&["generation_do_sample"]), Some((_, Node::Bool(false))))
        || matches!(import.get(&["generation_temperature"]), Some((_, zero)) if is_off_or_zero(&zero));
    for (key, ours, default) in samples {
        let draws = ["gen.temperature", "gen.top_p", "gen.top_k"].contains(&ours);
        match (import.get(&[key]), default) {
            (Some(_), _) if !on => import.not_needed(key, "no samples are asked for"),
            (Some(_), _) if greedy && draws => import.not_needed(key, "samples are greedy"),
            (_, Some(_)) if on && greedy && ours == "gen.do_sample" => {
                import.default(ours, Node::Bool(false), "a temperature of 0 is greedy");
                if import.get(&[key]).is_some() {
                    import.put(key, ours, Node::Bool(false), "");
                }
            }
            (Some((_, node)), _) => import.put(key, ours, node, ""),
            (None, Some(default)) if on && !(greedy && draws) => import.default(ours, default, "its default"),
            (None, _) => {}
        }
    }
}
