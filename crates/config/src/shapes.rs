//! The `config.json` of models that the shipped configurations name, so that `tunesmith plan` works on them without a network. Keys
//! that no plan reads are left out.

const SHAPES: &[(&str, &str)] = &[
    ("Qwen/Qwen2.5-14B-Instruct", include_str!("shapes/qwen2.5-14b-instruct.json")),
    ("google/gemma-3-27b-it", include_str!("shapes/gemma-3-27b-it.json")),
    ("meta-llama/Llama-3.1-70B-Instruct", include_str!("shapes/llama-3.1-70b-instruct.json")),
];

/// The built-in `config.json` of a hub model; `None` for a model that is not built in.
pub fn shape(name: &str) -> Option<&'static str> {
    SHAPES.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, json)| *json)
}
