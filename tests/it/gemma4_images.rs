//! Gemma 4's images: files that are refused by name, and an encoder that stands beside no other text model.
use crate::pictures::{encoder, golden, paired, seeing};
use crate::run::fixture::{said, train};
use serde_json::{Value, json};
use std::fs;

#[test]
fn what_is_not_computed_is_refused_by_name() {
    let null = Value::Null;
    for (file, place, value, wanted) in [
        ("config.json", "/vision_config", null.clone(), "vision_config"),
        ("config.json", "/vision_config/rope_parameters/rope_type", json!("default"), "rope_type"),
        ("config.json", "/vision_config/head_dim", json!(6), "head_dim"),
        ("config.json", "/vision_config/num_key_value_heads", json!(3), "num_key_value_heads"),
        ("config.json", "/vision_config/attention_dropout", json!(0.5), "attention_dropout"),
        (
            "config.json",
            "/vision_config/pooling_kernel_size",
            json!(1),
            "multiples of 16 pixels, but an embedding of the model covers 8 x 8",
        ),
        ("config.json", "/vision_config/position_embedding_size", json!(63), "position_embedding_table"),
        ("config.json", "/text_config/pad_token_id", null, "pad_token_id"),
        ("preprocessor_config.json", "/max_soft_tokens", json!(100), "max_soft_tokens"),
        (
            "preprocessor_config.json",
            "/patch_size",
            json!(4),
            "multiples of 8 pixels, but an embedding of the model covers 16 x 16",
        ),
        ("preprocessor_config.json", "/resample", json!(0), "resample: 0"),
        ("preprocessor_config.json", "/do_resize", json!(false), "do_resize"),
    ] {
        let fixture = seeing("gemma4");
        let path = fixture.path("model").join(file);
        let mut changed: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        *changed.pointer_mut(place).unwrap() = value;
        fs::write(&path, changed.to_string()).unwrap();
        let refused = train(&fixture.config("run", &["train.max_steps: 1"]), &[]);
        let text = said(&refused);
        assert!(refused.status.code() == Some(4) && text.contains(wanted), "{place}: {text}");
    }
}

#[test]
fn its_encoder_is_no_part_of_a_pair_and_the_largest_size_sees_none() {
    let fixture = paired();
    let config = fs::read(golden("vision/gemma4/model/config.json")).unwrap();
    let mut vision = serde_json::from_slice::<Value>(&config).unwrap()["vision_config"].take();
    vision["architectures"] = json!(["Gemma4VisionModel"]);
    fs::write(fixture.path("encoder").join("config.json"), vision.to_string()).unwrap();
    let refused = train(&fixture.config("run", &["train.max_steps: 1", &encoder(&fixture)]), &[]);
    let text = said(&refused);
    assert!(refused.status.code() == Some(4) && text.contains("gemma4_vision beside another text model"), "{text}");
    let fixture = seeing("gemma4_31b");
    let path = fixture.path("model").join("config.json");
    let text = fs::read_to_string(&path).unwrap();
    let text = text
        .replace("\"gemma4\"", "\"gemma4_unified\"")
        .replace("Gemma4For", "Gemma4UnifiedFor")
        .replace("\"gemma4_text\"", "\"gemma4_unified_text\"");
    fs::write(&path, text).unwrap();
    let refused = train(&fixture.config("run", &["train.max_steps: 1"]), &[]);
    let text = said(&refused);
    assert!(refused.status.code() == Some(4) && text.contains("gemma4_unified"), "{text}");
}
