//! Refuses models that llama.cpp would compute differently, because it has a rule or a constant of its own for their family.
use super::keys::{Yarn, interval};
use super::names::is_mixer;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::{
    Arch, AttentionSpec, BlockSpec, Experts, Gguf, HiddenAct, MambaSpec, PartSpec, QkNorm, RopeScaling,
};
use tunesmith_config::vision::Pointwise;

pub(super) const HINT: &str = "serve the merged folder with Transformers or vLLM instead";

pub(super) fn refuse(family: &str, what: &str) -> Error {
    Error::model(format!("GGUF of a {family} model: llama.cpp does not compute {what}")).hint(HINT)
}

/// Refuses a model that differs from a fixed rule of llama.cpp for its family.
pub(super) fn check(arch: &Arch, gguf: &Gguf) -> Result<()> {
    let found = constants(arch, gguf)
        .or_else(|| attention(arch, gguf))
        .or_else(|| mixers(arch))
        .or_else(|| arch.experts.as_ref().and_then(|experts| of_experts(arch, gguf, experts)))
        .or_else(|| streams(arch))
        .or_else(|| rotary(arch, gguf));
    found.map_or(Ok(()), |what| Err(refuse(arch.family.model_type, &what)))
}

/// What llama.cpp does not compute of the model's constants, activations, and biases, in words. `None` if it computes all of
/// it. The other functions here return the same for other parts of a model.
fn constants(arch: &Arch, gguf: &Gguf) -> Option<String> {
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-6 * b.abs();
    if arch.reads_images_across() {
        return Some("cross-attention over an image's rows".into());
    }
    let embedding = if gguf.rooted_embedding { (arch.hidden_size as f64).sqrt() } else { 1.0 };
    if !gguf.scales && !near(arch.embedding_scale, embedding) {
        return Some(format!("an embedding scaled by {}", arch.embedding_scale));
    }
    if !gguf.scales && !gguf.multiplied_logits && !near(arch.logit_scale, 1.0) {
        return Some(format!("logits scaled by {}", arch.logit_scale));
    }
    if gguf.tied && !arch.tie_word_embeddings {
        return Some("an output head with its own matrix".into());
    }
    if gguf.untied && arch.tie_word_embeddings {
        return Some("an output head that shares the embedding's matrix".into());
    }
    if (arch.activation == HiddenAct::GeluTanh) != gguf.gelu {
        return Some(if gguf.gelu { "SiLU in this family" } else { "GELU in this family" }.into());
    }
    let other_function = |part: &PartSpec| match part {
        PartSpec::PlainMlp { function, .. } => gguf.gelu && *function != Pointwise::GeluTanh,
        _ => false,
    };
    if arch.blocks.iter().flat_map(|block| &block.branches).any(|branch| other_function(&branch.part)) {
        return Some("an activation_function other than gelu_new".into());
    }
    if gguf.bare && (arch.o_bias || arch.mlp_bias) {
        return Some("biases on modules other than q, k and v".into());
    }
    if arch.post_norm_eps.is_some_and(|eps| !near(eps, 1e-8)) {
        return Some("a post_norm_eps other than 1e-8".into());
    }
    None
}

fn attention(arch: &Arch, gguf: &Gguf) -> Option<String> {
    let first = arch.attentions().next()?;
    let like = |it: &AttentionSpec| AttentionSpec { window: first.window, rope: first.rope, ..it.clone() } == *first;
    if !gguf.uneven && !arch.attentions().all(like) {
        return Some("heads that differ from block to block".into());
    }
    let side =
        if gguf.wide == Some(arch.num_hidden_layers) { arch.hidden_size / first.num_heads } else { first.head_dim };
    let scale = gguf.score_scale.unwrap_or_else(|| (side as f64).powf(-0.5));
    // The scale of latent attention contains YaRN's factor. A norm without weights can take up any scale.
    let free = gguf.scales || first.latent.is_some() || arch.qk_norm == QkNorm::Weightless;
    if arch.scale_by_layer {
        return Some("scores that are scaled by the number of their block".into());
    }
    if !free && (arch.attention_scale - scale).abs() > 1e-6 {
        return Some(format!("scores scaled by {}", arch.attention_scale));
    }
    let windowed = |rule: &fn(usize) -> bool| {
        arch.blocks
            .iter()
            .enumerate()
            .all(|(layer, block)| block.attention().is_none_or(|attention| attention.window.is_some() == rule(layer)))
    };
    // A window at least as long as the context has no effect.
    let none = || arch.attentions().all(|it| it.window.is_none_or(|window| window >= arch.max_position_embeddings));
    if !(gguf.listed_windows || gguf.windows.iter().any(windowed) || gguf.windows.is_empty() && none()) {
        return Some("a sliding window in these blocks".into());
    }
    let turned = |(layer, block): (usize, &BlockSpec)| {
        block.attention().is_none_or(|it| it.rope.is_some() == (gguf.turns)(layer, it.window.is_some()))
    };
    let all_or_none = || arch.ropes.is_empty() || arch.attentions().all(|attention| attention.rope.is_some());
    if !(if gguf.stated_turns { all_or_none() } else { arch.blocks.iter().enumerate().all(turned) }) {
        return Some("positions in only some blocks".into());
    }
    let short = LITE.contains(&arch.num_hidden_layers);
    if gguf.name == "deepseek2" && first.latent.is_some_and(|latent| latent.query_rank.is_none() != short) {
        return Some(
            if short {
                "a q_lora_rank with this number of blocks"
            } else {
                "q_lora_rank null with this number of blocks"
            }
            .into(),
        );
    }
    shared_keys(arch)
}

/// Numbers of blocks for which llama.cpp assumes queries without a latent, `q_lora_rank: null` (`DeepSeek` V2 Lite,
/// Moonlight).
const LITE: [usize; 2] = [26, 27];

/// Blocks that reuse the keys of another block. Of the blocks with keys of their own, llama.cpp takes the last but one for
/// attention with a window, and the last for attention without.
fn shared_keys(arch: &Arch) -> Option<String> {
    let owners = arch.attentions().take_while(|attention| attention.kv_from.is_none()).count();
    let fits = |attention: &AttentionSpec| {
        let from = owners.checked_sub(if attention.window.is_some() { 2 } else { 1 });
        attention.kv_from.is_none_or(|other| Some(other) == from)
    };
    (!arch.attentions().all(fits)).then(|| "keys shared by these blocks".into())
}

/// Mixers other than attention.
fn mixers(arch: &Arch) -> Option<String> {
    let parts = || arch.blocks.iter().flat_map(|block| &block.branches).map(|branch| &branch.part);
    for part in parts() {
        match part {
            PartSpec::DeltaNet(spec) if spec.key_dim != spec.value_dim => {
                return Some("heads of keys and of values of different widths in linear attention".into());
            }
            PartSpec::DeltaNet(_) if interval(arch).is_none() => {
                return Some("attention in other blocks than every n-th".into());
            }
            PartSpec::ShortConv(spec) if spec.bias => return Some("biases in short convolutions".into()),
            PartSpec::Mamba(MambaSpec { bias: true, .. }) => {
                return Some("biases on the projections of Mamba 2".into());
            }
            PartSpec::Mamba(MambaSpec { conv_bias: false, .. }) => {
                return Some("a convolution without a bias in Mamba 2".into());
            }
            // llama.cpp has no limits on time steps. The lower limit of Nemotron-H, 0.001, is below nearly all of them.
            PartSpec::Mamba(MambaSpec { limits: [least, most], .. }) if *least > 0.001 || most.is_finite() => {
                return Some("limits on the time steps of Mamba 2".into());
            }
            _ => {}
        }
    }
    let attends = arch.attentions().next().is_some();
    (!attends && parts().any(is_mixer)).then(|| "a model without attention".into())
}

fn of_experts(arch: &Arch, gguf: &Gguf, experts: &Experts) -> Option<String> {
    let sparse = |block: &BlockSpec| block.has_experts();
    let feeds = |block: &&BlockSpec| block.branches.iter().any(|branch| !is_mixer(&branch.part));
    let uniform = if gguf.dense_first {
        arch.blocks.iter().skip_while(|block| !sparse(block)).all(sparse)
    } else {
        arch.blocks.iter().filter(feeds).all(sparse)
    };
    if !uniform {
        return Some("dense blocks between expert blocks".into());
    }
    if gguf.router_keys {
        return experts
            .router
            .groups
            .filter(|groups| groups.by_best)
            .map(|_| "groups of experts chosen by their best one".into());
    }
    if experts.normalised != gguf.normalised {
        return Some("this weighting of experts".into());
    }
    if (experts.router.scale - 1.0).abs() > 1e-6 {
        return Some(format!("experts' weights scaled by {}", experts.router.scale));
    }
    match experts.clamp {
        Some(clamp) if (clamp.alpha - 1.702).abs() > 1e-6 || (clamp.limit - 7.0).abs() > 1e-6 => {
            Some(format!("swiglu_alpha {} and swiglu_limit {}", clamp.alpha, clamp.limit))
        }
        _ => None,
    }
}

/// What differs from the constants that llama.cpp has for Gemma 3n.
fn streams(arch: &Arch) -> Option<String> {
    let altup = arch.altup.as_ref()?;
    let owners = arch.attentions().filter(|attention| attention.kv_from.is_none()).count();
    let mut widths = arch.blocks.iter().flat_map(|block| &block.branches).filter_map(|branch| match branch.part {
        PartSpec::Mlp { intermediate_size, .. } => Some(intermediate_size),
        _ => None,
    });
    let first = widths.next();
    let cut = |(layer, block): (usize, &BlockSpec)| {
        let expected = (layer < 10).then_some(SPARSITY);
        block.branches.iter().all(|branch| match branch.part {
            PartSpec::Mlp { cut, .. } => match (cut, expected) {
                (Some(cut), Some(expected)) => (cut - expected).abs() < 1e-4,
                (cut, expected) => cut.is_none() && expected.is_none(),
            },
            _ => true,
        })
    };
    let rules = [
        (altup.streams == 4 && altup.active == 0, "other than four streams, of which blocks compute the first"),
        (altup.laurel_rank == 64, "a laurel_rank other than 64"),
        (
            arch.per_layer.as_ref().is_some_and(|table| table.width == 256),
            "per-layer embeddings of a width other than 256",
        ),
        (owners == 20, "keys and values of their own in other than the first 20 blocks"),
        (widths.all(|width| Some(width) == first), "MLPs of different widths"),
        (arch.blocks.iter().enumerate().all(cut), "a sparsity other than 0.95 in the first ten blocks alone"),
    ];
    rules.into_iter().find_map(|(fits, what)| (!fits).then(|| what.into()))
}

/// 5 % of a normal distribution lie more than this many standard deviations above the mean.
const SPARSITY: f32 = 1.644_853_6;

fn rotary(arch: &Arch, gguf: &Gguf) -> Option<String> {
    let head =
        arch.attentions().next().map_or(0, |attention| attention.latent.map_or(attention.head_dim, |it| it.rope_dim));
    let lacks = |what: &str| !gguf.ropes.contains(&what);
    if arch.ropes.is_empty() && !lacks("partial") {
        return Some("attention without a rotary embedding (partial_rotary_factor 0)".into());
    }
    for rope in &arch.ropes {
        let what = match &rope.scaling {
            RopeScaling::Dynamic { .. } => "rope_type dynamic",
            RopeScaling::Proportional { .. } if lacks("proportional") => "rope_type proportional",
            RopeScaling::LongRope { .. } if lacks("longrope") => "rope_type longrope",
            RopeScaling::Llama3 { .. } if lacks("llama3") => "rope_type llama3",
            RopeScaling::Yarn { .. } if !Yarn::fits(arch, gguf) => "these factors of yarn",
            _ if rope.rotary_dim != head && lacks("partial") && !gguf.uneven => "partial rotary embeddings",
            _ => continue,
        };
        return Some(what.into());
    }
    match (&arch.query_scaling, arch.ropes.first().map(|rope| &rope.scaling)) {
        (Some(scaling), Some(RopeScaling::Yarn { original_max_position_embeddings: original, .. }))
            if scaling.original_max_position_embeddings != *original =>
        {
            Some("queries scaled beyond another context than yarn's".into())
        }
        _ => None,
    }
}
