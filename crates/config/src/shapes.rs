//! The `config.json` of models that the shipped configurations name, so that a run of them can be planned without a network. They are
//! what the models' pages show, less what no plan reads.

const SHAPES: &[(&str, &str)] = &[
    ("Qwen/Qwen2.5-14B-Instruct", include_str!("shapes/qwen2.5-14b-instruct.json")),
    ("google/gemma-3-27b-it", include_str!("shapes/gemma-3-27b-it.json")),
    ("meta-llama/Llama-3.1-70B-Instruct", include_str!("shapes/llama-3.1-70b-instruct.json")),
];

/// The `config.json` of a model of the hub, if it is one of these.
pub fn shape(name: &str) -> Option<&'static str> {
    SHAPES.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, json)| *json)
}
