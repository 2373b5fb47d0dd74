//! Models with Pixtral's encoder: files that do not belong together, and images that nothing is left of.
use crate::pictures::seeing;
use crate::run::fixture::{said, train};
use serde_json::{Value, json};
use std::fs;

#[test]
fn files_that_do_not_belong_together_are_refused_by_name() {
    let cases = [
        (
            "mistral3",
            "processor_config.json",
            "spatial_merge_size",
            json!(1),
            "multiples of 8 pixels, but an embedding of the model covers 16 x 16",
        ),
        ("mistral3", "processor_config.json", "image_break_token", json!("[BREAK]"), "image_break_token"),
        ("mistral3", "processor_config.json", "image_end_token", json!("[END]"), "image_end_token"),
        ("mistral3", "preprocessor_config.json", "do_center_crop", json!(true), "do_center_crop"),
        ("mistral3", "preprocessor_config.json", "patch_size", json!({"height": 8, "width": 4}), "square patches"),
        ("mistral3", "config.json", "spatial_merge_size", json!(5), "spatial_merge_size"),
        ("mistral3", "config.json", "vision_feature_layer", json!([-1, -2]), "a list as vision_feature_layer"),
        ("pixtral", "config.json", "vision_feature_select_strategy", json!("default"), "\"full\""),
        ("pixtral", "config.json", "vision_feature_layer", json!(9), "vision_feature_layer"),
        ("qwen2_vl", "preprocessor_config.json", "merge_size", json!(4), "an embedding of the model covers 16 x 16"),
    ];
    for (name, file, key, value, wanted) in cases {
        let fixture = seeing(name);
        let path = fixture.path("model").join(file);
        let mut changed: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        changed[key] = value;
        fs::write(&path, changed.to_string()).unwrap();
        // The settings of the whole processor would count before these.
        let whole = fixture.path("model/processor_config.json");
        if file == "preprocessor_config.json" && whole.is_file() {
            let mut settings: Value = serde_json::from_slice(&fs::read(&whole).unwrap()).unwrap();
            settings.as_object_mut().unwrap().remove("image_processor");
            fs::write(&whole, settings.to_string()).unwrap();
        }
        let refused = train(&fixture.config("run", &["train.max_steps: 1"]), &[]);
        let text = said(&refused);
        assert!(refused.status.code() == Some(4) && text.contains(wanted), "{name}, {key}: {text}");
    }
}

#[test]
fn a_tokenizer_without_the_end_of_a_line_is_refused() {
    let fixture = seeing("mistral3");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        let path = fixture.path("model").join(file);
        let text = fs::read_to_string(&path).unwrap().replace("[IMG_BREAK]", "[IMG_BRAKE]");
        fs::write(&path, text).unwrap();
    }
    let refused = train(&fixture.config("run", &["train.max_steps: 1"]), &[]);
    let text = said(&refused);
    assert!(refused.status.code() == Some(4) && text.contains("no token [IMG_BREAK]"), "{text}");
}
