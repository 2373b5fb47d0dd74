//! Muse Glimmer, text: normed embeddings, norms without weights on each head of q and k, and a gate on the output of
//! attention. Both parts of a block have norms before and after. Every fourth block, counted from the last, has full
//! attention without positions.
use crate::arch::{Arch, GateSpec, NormPlacement, QkNorm};
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "muse_glimmer_text",
    class_name: "MuseGlimmerForCausalLM",
    models: "the text part of Muse Glimmer 30B",
    features: "normed embeddings, four norms a block, norms without weights on each head of q and k, a gate on the output of \
               attention, a sliding window with rotary positions in three of four blocks and no positions in the others, a soft cap \
               on logits",
    sparse: false,
    classifier: None,
    gguf: Some(Gguf {
        pairs: true,
        listed_windows: true,
        turns: |_, window| window,
        multiplied_logits: true,
        bare: true,
        untied: true,
        ..Gguf::named("muse-glimmer")
    }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let defaults = Defaults {
        kv_heads: Some(2),
        head_dim: Some(128),
        context: 131_072,
        eps: 1e-5,
        activation_key: "hidden_activation",
        ..Defaults::default()
    };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    (arch.qkv_bias, arch.o_bias) = source.attention_bias()?;
    (arch.norm_offset, arch.plain_final_norm, arch.embedding_norm) = (1.0, true, true);
    arch.set_norms(NormPlacement::Sandwich);
    arch.post_norm_eps = Some(source.positive("post_norm_eps", 1e-8)?);
    arch.qk_norm = QkNorm::Weightless;
    // Nothing but a turn is between this factor on queries and the one on scores.
    arch.attention_scale *= source.positive("qk_scale_factor", 3.87)?;
    arch.logit_scale = source.positive("output_multiplier", 0.196_116_135_138_184_04)?;
    arch.logit_softcap = Some(source.positive("final_logit_softcapping", 20.0)?);
    let (window, last) = (source.window(Some(2048))?, arch.num_hidden_layers - 1);
    source.layer_windows(&mut arch, window, |layer| !(last - layer).is_multiple_of(4))?;
    let theta = arch.ropes.first().map_or(0.0, |rope| rope.theta);
    // The class turns all blocks by one base, or not.
    let turns = source.layer_list("layer_rope_theta", &arch, |base| match base.as_f64() {
        Some(0.0) => Some(false),
        Some(base) if base == theta => Some(true),
        _ => None,
    })?;
    for (layer, block) in arch.blocks.iter_mut().enumerate() {
        let Some(attention) = block.attention_mut() else { continue };
        attention.gate = GateSpec::Own;
        if !turns.as_ref().map_or_else(|| !(last - layer).is_multiple_of(4), |turns| turns[layer]) {
            attention.rope = None;
        }
    }
    Ok(arch)
}
