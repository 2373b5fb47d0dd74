//! `tuning.backend`: a run uses the backend that is asked for, checkpoints record it, and they resume only with the same one.
use serde_json::Value;

use super::fixture::{Fixture, said, train};

fn stamp(fixture: &Fixture, out: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture.path(out).join("backend.json")).unwrap()).unwrap()
}

#[test]
fn the_reference_kernels_are_other_kernels_and_a_resume_across_is_refused() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.save_strategy: steps", "train.save_steps: 3"]);
    let fused = train(&config, &[]);
    assert!(fused.status.success(), "{}", said(&fused));
    let vectors = stamp(&fixture, "out")["simd"].as_str().unwrap().to_owned();
    assert!(said(&fused).contains(&format!("fused, {vectors}")), "{}", said(&fused));

    let other = format!("TRAIN_OUTPUT_DIR={}", fixture.path("plain").display());
    let plain = train(&config, &[&other, "TUNING_BACKEND=reference"]);
    assert!(plain.status.success() && said(&plain).contains("reference, portable"), "{}", said(&plain));
    let found = stamp(&fixture, "plain");
    assert_eq!((&found["backend"], &found["simd"]), (&"reference".into(), &"portable".into()));
    let weights = |out: &str| std::fs::read(fixture.path(out).join("adapter/adapter_model.safetensors")).unwrap();
    assert_eq!(weights("out") == weights("plain"), vectors == "portable", "rounding tells kernels apart");

    let refused = train(&config, &["--resume", "TUNING_BACKEND=reference", "TRAIN_MAX_STEPS=9"]);
    assert_eq!(refused.status.code(), Some(5), "{}", said(&refused));
    let text = said(&refused);
    assert!(text.contains("backend: fused in the checkpoint, reference now"), "{text}");
    assert!(
        vectors == "portable" || text.contains(&format!("simd: {vectors} in the checkpoint, portable now")),
        "{text}"
    );
    let words = ["--resume", "TUNING_BACKEND=reference", "TRAIN_MAX_STEPS=9", "--allow", "backend", "--allow", "simd"];
    let allowed = train(&config, &words);
    assert!(allowed.status.success() && said(&allowed).contains("backend differs: fused"), "{}", said(&allowed));
}

#[test]
fn a_resume_on_another_quantization_is_refused_with_both_sides() {
    let fixture = Fixture::new();
    let saves = ["train.max_steps: 2", "train.save_strategy: steps", "tuning.mode: qlora", "tuning.backend: bnb"];
    let config = fixture.config("run", &saves);
    let output = train(&config, &[]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("tuning.backend = bnb means fused kernels"), "{}", said(&output));
    assert!(said(&output).contains("base weights in nf4"), "{}", said(&output));
    let found = stamp(&fixture, "out")["quantization"].as_str().unwrap().to_owned();
    assert!(found.starts_with("nf4"), "{found}");
    let refused = train(&config, &["--resume", "MODEL_QUANTIZATION=fp4", "TRAIN_MAX_STEPS=4"]);
    assert_eq!(refused.status.code(), Some(5), "{}", said(&refused));
    let expected = "quantization: nf4 with double_quant: true in the checkpoint, fp4 with double_quant: true now";
    assert!(said(&refused).contains(expected), "{}", said(&refused));
}

#[test]
fn names_of_other_toolkits_say_what_they_stand_for() {
    let fixture = Fixture::new();
    for name in ["unsloth", "bnb"] {
        let config = fixture.config(name, &["train.max_steps: 1", &format!("tuning.backend: {name}")]);
        let out = format!("TRAIN_OUTPUT_DIR={}", fixture.path(name).display());
        let output = train(&config, &[&out]);
        assert!(output.status.success(), "{}", said(&output));
        let expected = format!("tuning.backend = {name} means fused kernels");
        assert!(
            said(&output).contains(&expected) && said(&output).contains("nothing is quantized"),
            "{}",
            said(&output)
        );
        let found = stamp(&fixture, name);
        assert_eq!((&found["backend"], &found["quantization"]), (&"fused".into(), &"none".into()));
        assert_eq!(found["dtype"], "base float32, activations float32");
    }
}

/// The names of two toolkits stand for the same kernels; a run that began under one goes on under the other only where that is allowed.
#[test]
fn a_run_for_one_toolkit_does_not_go_on_for_another_unasked() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 2", "train.save_strategy: steps", "tuning.backend: bnb"]);
    let output = train(&config, &[]);
    assert!(output.status.success(), "{}", said(&output));
    let words = ["--resume", "TUNING_BACKEND=unsloth", "TRAIN_MAX_STEPS=4"];
    let refused = train(&config, &words);
    assert_eq!(refused.status.code(), Some(5), "{}", said(&refused));
    let expected = ["tuning.backend: bnb in the checkpoint, unsloth now", "--allow tuning.backend"];
    assert!(expected.iter().all(|text| said(&refused).contains(text)), "{}", said(&refused));
    let allowed = train(&config, &[&words[..], &["--allow", "tuning.backend"]].concat());
    assert!(allowed.status.success(), "{}", said(&allowed));
    assert!(said(&allowed).contains("tuning.backend differs: bnb"), "{}", said(&allowed));
}
