//! The goldens of metrics with several references, for tests.
use serde_json::Value;

/// `tests/golden/metrics/captions.json`, which `scripts/golden/metrics.py` writes.
pub(super) fn captions() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/metrics/captions.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The answer and the references of a row.
pub(super) fn texts(row: &Value) -> (&str, Vec<&str>) {
    let references = row["references"].as_array().unwrap().iter();
    (row["answer"].as_str().unwrap(), references.map(|text| text.as_str().unwrap()).collect())
}
