//! Gemma 4, text: norms with plain weights, also on each head of q, k and v. Blocks with full attention have wider
//! heads, of which only a quarter is rotated. Small models have per-layer embeddings, and last blocks without their own
//! keys and values. The sparse one has experts beside the MLP.
use super::gemma;
use crate::arch::{Arch, BlockSpec, BranchSpec, ExpertNames, Experts, NormPlacement, PartSpec, PerLayerSpec, QkNorm};
use crate::decoder_json::{Defaults, ExpertDefaults};
use crate::family::{Family, Gguf};
use crate::hf_json::{MAX_SIZE, Source, brief};
use serde_json::{Map, Value};
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "gemma4_text",
    class_name: "Gemma4ForCausalLM",
    models: "the text part of Gemma 4 E2B, E4B, 26B-A4B and 31B",
    features: "GeGLU, four norms a block, norms on each head of q, k and v, a sliding window in five of six blocks; \
               in the others wider heads, which may take their values from k_proj; per-layer embeddings; last blocks \
               that share keys and values; experts beside the MLP",
    sparse: true,
    classifier: None,
    gguf: Some(Gguf {
        score_scale: Some(1.0),
        rooted_embedding: true,
        gelu: true,
        listed_windows: true,
        ropes: &["proportional"],
        bare: true,
        uneven: true,
        ..Gguf::named("gemma4")
    }),
};

/// The rope parameters of a file without any.
const ROPE: &str = r#"{"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}}"#;
/// Keys of other families' rope parameters, which these classes do not read.
const UNREAD: [&str; 4] = ["rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"];

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let defaults = Defaults { context: 131_072, two_ropes: true, ..gemma::defaults() };
    let mut arch = dense(source, &FAMILY, &defaults, 512)?;
    experts(source, &mut arch)?;
    per_layer(source, &mut arch)?;
    Ok(arch)
}

/// What all sizes have in common. `window` is the default of `sliding_window`.
pub(super) fn dense(source: &Source<'_>, family: &'static Family, defaults: &Defaults, window: usize) -> Result<Arch> {
    // A null of this key takes the rules away.
    let unread = UNREAD
        .into_iter()
        .find(|key| source.get(key).is_some())
        .or(source.has("rope_scaling").then_some("rope_scaling"));
    if let Some(key) = unread {
        return Err(source.mismatch(key, "no such key: Gemma 4's positions are in rope_parameters"));
    }
    let with_rope = source.with_rope(ROPE);
    let mut arch = source.decoder(family, defaults)?;
    if let Some(kind) = source.text("use_bidirectional_attention")?.filter(|kind| *kind != "vision") {
        return Err(source
            .not_yet(format!("use_bidirectional_attention {kind:?}"))
            .hint("null, or \"vision\", which does not concern text"));
    }
    if source.get("attention_chunk_size").is_some() {
        return Err(source.mismatch("attention_chunk_size", "no such key: blocks with a window cannot have chunks too"));
    }
    (arch.qkv_bias, arch.o_bias) = source.attention_bias()?;
    arch.embedding_scale = (arch.hidden_size as f64).sqrt();
    arch.set_norms(NormPlacement::Sandwich);
    arch.qk_norm = QkNorm::Head;
    arch.attention_scale = 1.0;
    arch.layer_scalar = true;
    arch.logit_softcap = source.optional_positive("final_logit_softcapping", None)?;
    let window = source.window(Some(window))?;
    let last = arch.num_hidden_layers - 1;
    source.layer_windows(&mut arch, window, |layer| (layer + 1) % 6 != 0)?;
    // As the class does it, whatever `layer_types` says.
    arch.blocks[last].attention_mut().into_iter().for_each(|attention| attention.window = None);
    full_attention(source, &mut arch)?;
    let context = arch.max_position_embeddings;
    let rope = |kind: &str, full: bool| {
        let attention = arch.attentions().find(|attention| attention.window.is_none() == full);
        attention.map(|attention| with_rope.rope_of(kind, attention.head_dim, context)).transpose()
    };
    let (full, sliding) = (rope("full_attention", true)?, rope("sliding_attention", false)?);
    let heads = [&full, &sliding].map(|rope| rope.as_ref().map(|rope| rope.rotary_dim));
    arch.ropes = full.into_iter().chain(sliding).collect();
    for attention in arch.attentions_mut() {
        attention.v_norm = true;
        attention.rope = Some(usize::from(attention.window.is_some()));
        if heads[usize::from(attention.window.is_some())] != Some(attention.head_dim) {
            return Err(source.not_yet(format!("rope_parameters that turn a part of a head in {}", family.model_type)));
        }
    }
    if source.count("num_kv_shared_layers", 0)? > 0 && source.flag("attention_k_eq_v", false)? {
        return Err(source.not_yet("num_kv_shared_layers with attention_k_eq_v"));
    }
    shared_keys(source, &mut arch, 0)?;
    wide_mlps(source, &mut arch)?;
    Ok(arch)
}

/// The heads of blocks with full attention, which Transformers' older files give as `global_head_dim` and
/// `num_global_key_value_heads`, and its newer ones for each block in `per_layer_config`.
fn full_attention(source: &Source<'_>, arch: &mut Arch) -> Result<()> {
    let k_eq_v = source.flag("attention_k_eq_v", false)?;
    let full: Vec<usize> = (0..arch.num_hidden_layers).filter(|&layer| is_full(&arch.blocks[layer])).collect();
    // Null is a newer file too, one without a difference.
    let of_blocks = match source.map.get("per_layer_config") {
        Some(found) => Some(per_layer_config(source, found, &full)?),
        None => None,
    };
    let source = of_blocks.as_ref().unwrap_or(source);
    let [head_dim, heads] = match of_blocks {
        Some(_) => ["head_dim", "num_key_value_heads"],
        None => ["global_head_dim", "num_global_key_value_heads"],
    };
    for layer in full {
        let Some(attention) = arch.blocks[layer].attention_mut() else { continue };
        // A file for each block that leaves it out means the others' width.
        let width = if of_blocks.is_some() { attention.head_dim } else { 512 };
        attention.head_dim = source.size(head_dim, Some(width))?;
        // Without keys as values the class does not read the older key.
        if k_eq_v || of_blocks.is_some() {
            attention.num_kv_heads = source.size(heads, Some(attention.num_kv_heads))?;
        }
        attention.k_eq_v = k_eq_v;
        if !attention.head_dim.is_multiple_of(2) {
            return Err(source.mismatch(head_dim, "an even number"));
        }
    }
    Ok(())
}

fn is_full(block: &BlockSpec) -> bool {
    block.attention().is_some_and(|attention| attention.window.is_none())
}

/// The entry that all blocks with full attention have in `per_layer_config`; an empty one where their heads are as the others'.
fn per_layer_config<'a>(source: &Source<'a>, found: &Value, full: &[usize]) -> Result<Source<'a>> {
    let expected =
        || source.mismatch("per_layer_config", "an object with an object for each block with full attention");
    let alike = Map::new();
    let entries = if found.is_null() { &alike } else { found.as_object().ok_or_else(expected)? };
    // Transformers writes numbers of one width: "05" beside "11".
    let number = |key: &String| key.parse::<usize>().ok();
    let entry = |layer: &usize| {
        let (_, found) = entries.iter().find(|(key, _)| number(key) == Some(*layer))?;
        found.as_object()
    };
    let first: Map<String, Value> = full.first().and_then(entry).cloned().unwrap_or_default();
    let differs = entries.len() != full.len() || full.iter().any(|layer| entry(layer) != Some(&first));
    if !entries.is_empty() && differs {
        return Err(expected().hint("all of them must be alike, and no other block may have one"));
    }
    if let Some(key) = first.keys().find(|key| !["head_dim", "num_key_value_heads"].contains(&key.as_str())) {
        return Err(source.not_yet(format!("per_layer_config with {key} {}", brief(&first[key]))));
    }
    Ok(Source { origin: source.origin, map: first, prefix: format!("{}per_layer_config.", source.prefix) })
}

/// The last `num_kv_shared_layers` blocks take keys and values from the last block before them that has attention of their kind.
pub(super) fn shared_keys(source: &Source<'_>, arch: &mut Arch, default: usize) -> Result<()> {
    let shared = source.count("num_kv_shared_layers", default)?;
    let layers = arch.num_hidden_layers;
    if shared > layers {
        return Err(source.mismatch("num_kv_shared_layers", &format!("at most {layers}, the number of blocks")));
    }
    let (owners, rest) = arch.blocks.split_at_mut(layers - shared);
    for block in rest {
        let full = is_full(block);
        let from = owners.iter().rposition(|owner| is_full(owner) == full).ok_or_else(|| {
            let kind = if full { "full_attention" } else { "sliding_attention" };
            source.error(format!("num_kv_shared_layers is {shared}: no block before the last {shared} has {kind}"))
        })?;
        block.attention_mut().into_iter().for_each(|attention| attention.kv_from = Some(from));
    }
    Ok(())
}

/// With `use_double_wide_mlp`, blocks without their own keys have MLPs twice as wide.
fn wide_mlps(source: &Source<'_>, arch: &mut Arch) -> Result<()> {
    if !source.flag("use_double_wide_mlp", false)? {
        return Ok(());
    }
    let shares = |block: &BlockSpec| block.attention().is_some_and(|attention| attention.kv_from.is_some());
    for branch in arch.blocks.iter_mut().filter(|block| shares(block)).flat_map(|block| &mut block.branches) {
        if let PartSpec::Mlp { intermediate_size, .. } = &mut branch.part {
            *intermediate_size = twice(source, *intermediate_size)?;
        }
    }
    Ok(())
}

fn twice(source: &Source<'_>, width: usize) -> Result<usize> {
    if 2 * width <= MAX_SIZE {
        return Ok(2 * width);
    }
    Err(source.error(format!("use_double_wide_mlp gives MLPs of width {}, expected at most {MAX_SIZE}", 2 * width)))
}

/// Experts beside the MLP of each block, with `enable_moe_block`.
fn experts(source: &Source<'_>, arch: &mut Arch) -> Result<()> {
    if !source.flag("enable_moe_block", false)? {
        return Ok(());
    }
    let sizes = ["num_experts", "top_k_experts", "moe_intermediate_size"].map(|key| source.size(key, None));
    let [count, per_token, width] = sizes;
    let defaults = ExpertDefaults { count: count?, per_token: per_token?, width: width? };
    // The keys that other families have for them.
    let mut map = source.map.clone();
    map.insert("num_experts_per_tok".into(), defaults.per_token.into());
    let source = &Source { origin: source.origin, map, prefix: source.prefix.clone() };
    let experts = source.experts("num_experts", "moe_intermediate_size", defaults)?;
    arch.experts = Some(Experts { names: ExpertNames::Gemma4, balance: None, ..experts });
    for branch in arch.blocks.iter_mut().flat_map(|block| &mut block.branches) {
        if let PartSpec::Mlp { intermediate_size, .. } = branch.part {
            branch.part = PartSpec::MlpAndExperts { intermediate_size };
        }
    }
    Ok(())
}

/// The embeddings of each block, unless `hidden_size_per_layer_input` is 0.
fn per_layer(source: &Source<'_>, arch: &mut Arch) -> Result<()> {
    let key = "hidden_size_per_layer_input";
    let width = source.count(key, 256)?;
    if width == 0 {
        return Ok(());
    }
    let vocab_size = source.size("vocab_size_per_layer_input", Some(262_144))?;
    if vocab_size < arch.vocab_size {
        let expected = format!("at least {}, the size of the vocabulary", arch.vocab_size);
        return Err(source.mismatch("vocab_size_per_layer_input", &expected));
    }
    add_per_layer(source, arch, vocab_size, width)
}

/// Gives each block embeddings of that width, from a table of so many rows.
pub(super) fn add_per_layer(source: &Source<'_>, arch: &mut Arch, vocab_size: usize, width: usize) -> Result<()> {
    let (key, all) = ("hidden_size_per_layer_input", width * arch.num_hidden_layers);
    if all > MAX_SIZE {
        return Err(source.error(format!("{key} {width} in all blocks is {all}, expected at most {MAX_SIZE}")));
    }
    arch.per_layer = Some(PerLayerSpec { vocab_size, width, tokens: arch.vocab_size });
    let branch = BranchSpec { norm: None, part: PartSpec::PerLayer, post_norm: Some("post_per_layer_input_norm") };
    arch.blocks.iter_mut().for_each(|block| block.branches.push(branch.clone()));
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::arch::Arch;
    use serde_json::{Value, json};
    use std::path::Path;

    fn read(per_layer: &Value, share: f64, head_dim: usize) -> Arch {
        let config = json!({"model_type": "gemma4_text", "vocab_size": 97, "hidden_size": 52, "intermediate_size": 50,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim,
            "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"],
            "per_layer_config": per_layer, "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": share},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}});
        Arch::from_json(&config.to_string(), Path::new("config.json")).unwrap()
    }

    #[test]
    fn without_entries_for_blocks_all_heads_are_alike() {
        let stated = read(&json!({"1": {"head_dim": 16}}), 0.25, 16);
        for alike in [json!({}), json!(null)] {
            let arch = read(&alike, 0.25, 16);
            assert!(arch.attentions().all(|attention| (attention.head_dim, attention.num_kv_heads) == (16, 2)));
            assert_eq!((&arch.blocks, &arch.ropes), (&stated.blocks, &stated.ropes));
        }
    }

    #[test]
    fn of_a_proportional_share_whole_pairs_are_rotated() {
        // `rope_angles` of Transformers' `_compute_proportional_rope_parameters`: int(share * head_dim // 2).
        for (head_dim, share, pairs) in [(18, 0.25, 2), (16, 0.19, 1), (6, 0.25, 0), (16, 0.1, 0)] {
            let arch = read(&json!({}), share, head_dim);
            let rotated = arch.ropes[0].frequencies(8).inv_freq;
            assert_eq!(rotated.len(), head_dim / 2);
            assert_eq!(rotated.iter().filter(|&&angle| angle != 0.0).count(), pairs, "{share} of {head_dim}");
        }
    }
}
