//! LFM3: LFM2's convolutions over more tokens, and attention with a gate for each head, in some blocks with a window.
//! Both parts of a block have norms before and after.
use crate::arch::{Arch, GateSpec, ModuleNames, PartSpec, QkNorm, ShortConvSpec};
use crate::decoder_json::Defaults;
use crate::family::Family;
use crate::hf_json::Source;
use crate::mixers_json::MAX_KERNEL;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "lfm3",
    class_name: "Lfm3ForCausalLM",
    models: "LFM3 1.7B",
    features: "short convolutions between gates in half of the blocks; in the others attention with norms on each \
               head of q and k and a gate for each head; a sliding window in half of these, and half of each head \
               rotated in those without a window; four norms a block",
    sparse: false,
    classifier: None,
    gguf: None,
};

/// The rope parameters of a file without any.
const ROPE: &str = r#"{"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6}}"#;
/// Keys of other families' rope parameters, which its class does not read.
const UNREAD: [&str; 4] = ["rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"];

/// What takes from other tokens in a block.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Conv,
    Sliding,
    Full,
}

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    if let Some(key) = UNREAD.into_iter().find(|key| source.get(key).is_some()) {
        return Err(source.mismatch(key, "no such key: LFM3's positions are in rope_parameters"));
    }
    let defaults = Defaults {
        kv_heads: Some(4),
        head_dim: Some(128),
        intermediate: Some(7680),
        context: 128_000,
        theta: 1e6,
        two_ropes: true,
        eps: 1e-5,
        eps_key: "norm_eps",
        // Its class has no key for it.
        activation_key: "",
        tied: true,
        pad: Some(124_893),
        ..Defaults::default()
    };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    (arch.qkv_bias, arch.o_bias) = source.attention_bias()?;
    arch.module_names = &ModuleNames::LFM3;
    arch.qk_norm = QkNorm::Head;
    let kinds = source.layer_list("layer_types", &arch, |kind| match kind.as_str() {
        Some("conv") => Some(Kind::Conv),
        Some("sliding_attention") => Some(Kind::Sliding),
        Some("full_attention") => Some(Kind::Full),
        _ => None,
    })?;
    let kinds = kinds.unwrap_or_else(|| (0..arch.num_hidden_layers).map(usual).collect());
    ropes(source, &mut arch, &kinds)?;
    let kernel = source.size_up_to("conv_L_cache", Some(7), MAX_KERNEL)?;
    let mixer = PartSpec::ShortConv(ShortConvSpec { kernel, bias: source.flag("conv_bias", false)? });
    let (window, gated) = (source.window(Some(256))?, source.flag("use_attention_gate", true)?);
    let sandwich = source.flag("use_sandwich_norm", true)?;
    for (layer, (block, kind)) in arch.blocks.iter_mut().zip(&kinds).enumerate() {
        if *kind == Kind::Conv {
            block.set_mixer(&mixer);
        }
        if let Some(attention) = block.attention_mut() {
            attention.gate = if gated { GateSpec::Heads } else { GateSpec::None };
            if *kind == Kind::Sliding {
                let missing =
                    || source.error(format!("layer {layer} has a sliding window, and sliding_window is null"));
                attention.window = Some(window.ok_or_else(missing)?);
            }
        }
        for branch in &mut block.branches {
            let (norm, post_norm) = match branch.part {
                PartSpec::Mlp { .. } => ("ffn_norm", "post_ffn_norm"),
                _ => ("operator_norm", "post_operator_norm"),
            };
            (branch.norm, branch.post_norm) = (Some(norm), sandwich.then_some(post_norm));
        }
    }
    Ok(arch)
}

/// The kind of a block where the file does not say it.
const fn usual(layer: usize) -> Kind {
    match layer % 4 {
        2 => Kind::Full,
        0 if layer > 0 => Kind::Sliding,
        _ => Kind::Conv,
    }
}

/// A rotary embedding for each kind of attention that there is.
fn ropes(source: &Source<'_>, arch: &mut Arch, kinds: &[Kind]) -> Result<()> {
    let (with_rope, context) = (source.with_rope(ROPE), arch.max_position_embeddings);
    let Some(head_dim) = arch.attentions().next().map(|attention| attention.head_dim) else { return Ok(()) };
    arch.ropes.clear();
    for (kind, name) in [(Kind::Full, "full_attention"), (Kind::Sliding, "sliding_attention")] {
        if !kinds.contains(&kind) {
            continue;
        }
        let rope = with_rope.rope_of(name, head_dim, context)?;
        if rope.rotary_dim != head_dim {
            return Err(source.not_yet("rope_parameters that turn a part of a head in lfm3"));
        }
        for (block, other) in arch.blocks.iter_mut().zip(kinds) {
            if let (Some(attention), true) = (block.attention_mut(), *other == kind) {
                attention.rope = Some(arch.ropes.len());
            }
        }
        arch.ropes.push(rope);
    }
    Ok(())
}
