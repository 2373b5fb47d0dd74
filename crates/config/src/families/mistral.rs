//! Mistral: Llama with a sliding window in every block, unless `sliding_window` is null.
use crate::arch::Arch;
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "mistral",
    class_name: "MistralForCausalLM",
    models: "Mistral 7B, Mistral Nemo 12B, Mistral Small 2409 22B, Zephyr 7B",
    features: "a sliding window in every block, unless it is null",
    sparse: false,
    classifier: Some("MistralForSequenceClassification"),
    gguf: Some(Gguf { pairs: true, ropes: &["llama3"], ..Gguf::named("llama") }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let mut arch =
        source.decoder(&FAMILY, &Defaults { kv_heads: Some(8), context: 4096 * 32, ..Defaults::default() })?;
    let window = source.window(Some(4096))?;
    source.layer_windows(&mut arch, window, |_| window.is_some())?;
    Ok(arch)
}
