//! GPT-2: learned positions, layer norms, and an MLP without a gate. Attention's three projections are one module, and files
//! hold the matrices of blocks transposed.
use crate::arch::{Arch, BlockSpec, BranchSpec, HiddenAct, ModuleNames, PartSpec};
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use crate::vision::Pointwise;
use serde_json::Map;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "gpt2",
    class_name: "GPT2LMHeadModel",
    models: "GPT-2 124M, 355M, 774M and 1.5B, DistilGPT2, DialoGPT",
    features: "learned positions, no rotary embedding; LayerNorms; q, k, v in one matrix; an MLP without a gate; biases; \
               matrices stored transposed",
    sparse: false,
    classifier: Some("GPT2ForSequenceClassification"),
    gguf: Some(Gguf { gelu: true, turns: |_, _| false, ..Gguf::named("gpt2") }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let source = source.gpt2_keys()?;
    let defaults = Defaults {
        eps: 1e-5,
        eps_key: "layer_norm_epsilon",
        tied: true,
        // It has a key of its own.
        activation_key: "",
        activation: HiddenAct::GeluTanh,
        rotary: false,
        ..Defaults::default()
    };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    arch.module_names = &ModuleNames::GPT2;
    arch.layer_norms = true;
    arch.learned_positions = true;
    arch.fused = true;
    (arch.qkv_bias, arch.o_bias, arch.mlp_bias) = (true, true, true);
    if !source.flag("scale_attn_weights", true)? {
        arch.attention_scale = 1.0;
    }
    arch.scale_by_layer = source.flag("scale_attn_by_inverse_layer_idx", false)?;
    // Scores are in float32 here in any case.
    source.flag("reorder_and_upcast_attn", false)?;
    if source.flag("add_cross_attention", false)? {
        return Err(source
            .not_yet("add_cross_attention: a decoder whose blocks read the output of an encoder, without the encoder")
            .hint("an image encoder and such a decoder are one model of model_type vision-encoder-decoder; or pair an encoder with a plain GPT-2: vision.encoder"));
    }
    let function = source.text("activation_function")?.unwrap_or("gelu_new");
    let function =
        Pointwise::parse(function).ok_or_else(|| source.not_yet(format!("activation_function {function:?}")))?;
    for key in ["attn_pdrop", "embd_pdrop", "resid_pdrop"] {
        let rate = source.number_or(key, 0.1)?;
        if !(0.0..=1.0).contains(&rate) {
            return Err(source.mismatch(key, "a rate from 0 to 1"));
        }
        arch.dropout = arch.dropout.or((rate > 0.0).then_some((key, rate)));
    }
    let intermediate_size = arch.intermediate_size;
    for block in &mut arch.blocks {
        let Some(attention) = block.attention().cloned() else { continue };
        let branch = |norm, part| BranchSpec { norm: Some(norm), part, post_norm: None };
        let mlp = PartSpec::PlainMlp { intermediate_size, function };
        *block = BlockSpec { branches: vec![branch("ln_1", PartSpec::Attention(attention)), branch("ln_2", mlp)] };
    }
    Ok(arch)
}

impl Source<'_> {
    /// The keys that the class reads, those of all decoders by their usual names.
    fn gpt2_keys(&self) -> Result<Self> {
        let hidden = self.size("n_embd", Some(768))?;
        let own = [
            "vocab_size",
            "layer_norm_epsilon",
            "initializer_range",
            "tie_word_embeddings",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "scale_attn_weights",
            "scale_attn_by_inverse_layer_idx",
            "reorder_and_upcast_attn",
            "add_cross_attention",
            "activation_function",
            "attn_pdrop",
            "embd_pdrop",
            "resid_pdrop",
            // Transformers checks them in every class.
            "rope_parameters",
            "rope_scaling",
            "rope_theta",
        ];
        let mut map = Map::new();
        for (key, default) in [("vocab_size", 50_257), ("bos_token_id", 50_256), ("eos_token_id", 50_256)] {
            map.insert(key.into(), default.into());
        }
        let found = own.into_iter().filter_map(|key| Some((key.to_owned(), self.map.get(key)?.clone())));
        map.extend(found);
        for (key, value) in [
            ("hidden_size", hidden),
            ("num_hidden_layers", self.size("n_layer", Some(12))?),
            ("num_attention_heads", self.size("n_head", Some(12))?),
            ("max_position_embeddings", self.size("n_positions", Some(1024))?),
            ("intermediate_size", self.size_or("n_inner", 4 * hidden)?),
        ] {
            map.insert(key.into(), value.into());
        }
        Ok(Self { origin: self.origin, map, prefix: self.prefix.clone() })
    }
}
