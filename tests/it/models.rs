//! `tunesmith models DIR`: which modules get adapters, and how much memory of a GPU a run takes.
use crate::parity::{golden, json};
use crate::run::fixture::{Fixture, said, tunesmith};
use serde_json::Value;

fn described(family: &str) -> String {
    let output = tunesmith(&["models", &golden(family).join("model").display().to_string()]).output().unwrap();
    assert!(output.status.success(), "{family}: {}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn line<'t>(text: &'t str, label: &str) -> &'t str {
    let found = text.lines().find_map(|line| line.strip_prefix(&format!("{label:18}  ")));
    found.unwrap_or_else(|| panic!("{label}: {text}"))
}

#[test]
fn models_says_how_auto_and_all_linear_differ() {
    let dense = described("llama");
    assert_eq!(
        line(&dense, "auto adapts"),
        "self_attn.q_proj, k_proj, v_proj, o_proj; mlp.gate_proj, up_proj, down_proj"
    );
    assert_eq!(line(&dense, "all-linear adapts"), "the same");
    assert!(!dense.contains("target_parameters"), "{dense}");
    let mixtral = described("mixtral");
    assert_eq!(line(&mixtral, "auto adapts"), "self_attn.q_proj, k_proj, v_proj, o_proj");
    assert_eq!(
        line(&mixtral, "all-linear adapts"),
        "also mlp.gate; mlp.experts.gate_up_proj (2 r and 2 lora_alpha), down_proj"
    );
    let gpt_oss = described("gpt_oss");
    assert_eq!(line(&gpt_oss, "all-linear adapts"), "the same");
    assert_eq!(
        line(&gpt_oss, "experts by"),
        "tuning.lora.target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]"
    );
    assert!(line(&described("nemotron_h"), "all-linear adapts").starts_with("refused, as by PEFT: "));
}

#[test]
fn models_says_what_a_run_takes_of_a_gpu_as_plan_does() {
    let text = described("llama");
    assert!(line(&text, "memory on a GPU").starts_with("a row of 256 tokens"), "{text}");
    let model = golden("llama").join("model").display().to_string();
    for (label, mode, checkpointing) in [
        ("LoRA", "lora", "false"),
        ("LoRA, recomputed", "lora", "true"),
        ("QLoRA", "qlora", "false"),
        ("QLoRA, recomputed", "qlora", "true"),
    ] {
        let mode = format!("TUNING_MODE={mode}");
        let checkpointing = format!("TRAIN_GRADIENT_CHECKPOINTING={checkpointing}");
        let words = ["plan", "--model", &model, "--gpus", "1", "--json", &mode, &checkpointing];
        let output = tunesmith(&words)
            .args(["MODEL_MAX_SEQ_LEN=256", "TRAIN_BF16=true", "TRAIN_BATCH_SIZE=1"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", said(&output));
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        let total = tunesmith::plan::human_bytes(plan["plan"]["rows"][0]["total"].as_u64().unwrap());
        assert_eq!(line(&text, label), format!("{total}, fits 24, 48, 80, 141 GiB"), "{text}");
    }
}

#[test]
fn models_says_what_to_do_with_an_image_encoder() {
    let refused = tunesmith(&["models", "examples/caption/encoder"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(4), "{}", said(&refused));
    assert!(said(&refused).contains("it is an image encoder: name it in vision.encoder"), "{}", said(&refused));
}

/// The numbers are counted on a model that is built without values: what cannot be built is said before.
#[test]
fn what_no_engine_can_build_is_refused_in_plans_too() {
    let fixture = Fixture::new();
    let model = fixture.path("model");
    let mut config = json(&golden("mixtral").join("model/config.json"));
    // 4 experts of 20 features: their matrices make no whole blocks of NF4.
    for (key, value) in [("hidden_size", 52), ("intermediate_size", 20), ("num_attention_heads", 4), ("head_dim", 16)] {
        config[key] = value.into();
    }
    std::fs::write(model.join("config.json"), config.to_string()).unwrap();
    let model = model.display().to_string();
    let reason = "no whole number of blocks";
    let planned = tunesmith(&["plan", "--model", &model, "tuning.mode=qlora"]).output().unwrap();
    let text = said(&planned);
    assert!(planned.status.code() == Some(4) && text.contains(reason), "{text}");
    let described = tunesmith(&["models", &model]).output().unwrap();
    let text = String::from_utf8(described.stdout).unwrap();
    assert!(described.status.success() && line(&text, "QLoRA").contains(reason), "{text}");
    assert!(line(&text, "LoRA").contains("fits"), "{text}");
}
