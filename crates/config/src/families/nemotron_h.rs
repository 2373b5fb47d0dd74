//! Nemotron-H: a block is one mixer: Mamba 2, attention without positions, an MLP without a gate, or experts of such MLPs.
use crate::arch::{Arch, BlockSpec, BranchSpec, ExpertNames, Experts, MambaSpec, ModuleNames, PartSpec, SharedExpert};
use crate::decoder_json::{DeepSeekDefaults, Defaults, ExpertDefaults};
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use crate::mixers_json::{MAX_KERNEL, MAX_ROWS};
use crate::vision::Pointwise;
use serde_json::Value;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "nemotron_h",
    class_name: "NemotronHForCausalLM",
    models: "Nemotron-H 4B to 56B, Nemotron Nano 9B v2 and 12B v2, Nemotron 3 Nano 30B-A3B and Super 120B-A12B",
    features: "one part a block: Mamba 2, attention without positions, an MLP with the squared ReLU, or experts with \
               the squared ReLU, chosen by sigmoids and a bias, with an MLP beside them",
    sparse: true,
    classifier: None,
    gguf: Some(Gguf {
        variant: |_, sparse| sparse.then_some("nemotron_h_moe"),
        turns: |_, _| false,
        router_keys: true,
        uneven: true,
        ..Gguf::named("nemotron_h")
    }),
};

/// The kinds of blocks, as `layers_block_type` and `hybrid_override_pattern` write them.
#[derive(Clone, Copy)]
enum Kind {
    Mamba,
    Attention,
    Mlp,
    Experts,
}

impl Kind {
    fn of_word(word: &str) -> Option<Self> {
        match word {
            "mamba" | "linear_attention" | "M" => Some(Self::Mamba),
            "attention" | "full_attention" | "*" => Some(Self::Attention),
            "mlp" | "-" => Some(Self::Mlp),
            "moe" | "E" => Some(Self::Experts),
            _ => None,
        }
    }
}

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let kinds = source.nemotron_blocks()?;
    // The class derives the number of blocks from their kinds.
    let mut map = source.map.clone();
    map.insert("num_hidden_layers".into(), kinds.len().into());
    if source.get("intermediate_size").is_none() {
        map.insert("intermediate_size".into(), 21_504.into());
    }
    let source = &Source { origin: source.origin, map, prefix: source.prefix.clone() };
    let defaults = Defaults {
        kv_heads: Some(8),
        head_dim: Some(128),
        context: 4096,
        eps: 1e-5,
        eps_key: "layer_norm_epsilon",
        // Its MLP has a key of its own.
        activation_key: "",
        rotary: false,
        ..Defaults::default()
    };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    // Its embedding has no padding row.
    arch.pad_token_id = None;
    arch.module_names = &ModuleNames::NEMOTRON_H;
    arch.mlp_bias = source.flag("mlp_bias", false)?;
    source.refuse_others("mlp_hidden_act", "relu2")?;
    source.refuse_others("mamba_hidden_act", "silu")?;
    if source.get("sliding_window").is_some() || source.flag("attention_bias", false)? {
        return Err(source.not_yet("sliding_window or attention_bias, which its class in Transformers does not read"));
    }
    if kinds.iter().any(|kind| matches!(kind, Kind::Experts)) {
        source.nemotron_experts(&mut arch)?;
    }
    let Some(attention) = arch.attentions().next().cloned() else { return Ok(arch) };
    let mamba = source.nemotron_mamba()?;
    let width = arch.intermediate_size;
    let block = |kind: &Kind| {
        let part = match kind {
            Kind::Mamba => PartSpec::Mamba(mamba.clone()),
            Kind::Attention => PartSpec::Attention(attention.clone()),
            Kind::Mlp => PartSpec::PlainMlp { intermediate_size: width, function: Pointwise::Relu2 },
            Kind::Experts => PartSpec::Experts,
        };
        BlockSpec { branches: vec![BranchSpec { norm: Some("norm"), part, post_norm: None }] }
    };
    arch.blocks = kinds.iter().map(block).collect();
    Ok(arch)
}

impl Source<'_> {
    /// The kind of each block.
    fn nemotron_blocks(&self) -> Result<Vec<Kind>> {
        let unknown = |word: &str| self.not_yet(format!("a block of the kind {word:?}"));
        let listed = ["layers_block_type", "layer_types"].into_iter().find(|key| self.get(key).is_some());
        let kinds = match (listed, self.text("hybrid_override_pattern")?) {
            (Some(key), _) => {
                let kinds = self.get(key).and_then(Value::as_array);
                let kinds = kinds.ok_or_else(|| self.mismatch(key, "a list of kinds of blocks"))?;
                let kind = |kind: &Value| {
                    let word = kind.as_str().ok_or_else(|| self.mismatch(key, "a list of kinds of blocks"))?;
                    Kind::of_word(word).ok_or_else(|| unknown(word))
                };
                kinds.iter().map(kind).collect::<Result<Vec<_>>>()?
            }
            (None, Some(pattern)) => {
                let kind = |letter: char| {
                    let word = letter.to_string();
                    Kind::of_word(&word).ok_or_else(|| unknown(&word))
                };
                pattern.chars().map(kind).collect::<Result<Vec<_>>>()?
            }
            (None, None) => return Err(self.mismatch("layers_block_type", "a list of kinds of blocks")),
        };
        if kinds.is_empty() { Err(self.error("no kinds of blocks, expected at least one")) } else { Ok(kinds) }
    }

    /// Its experts, which have no gates, with the MLP beside them.
    fn nemotron_experts(&self, arch: &mut Arch) -> Result<()> {
        let experts = ExpertDefaults { count: 8, per_token: 2, width: 7688 };
        self.deepseek_experts(arch, DeepSeekDefaults { experts, scale: 1.0, groups: (1, 1), dense: 0 })?;
        if self.size("n_shared_experts", Some(1))? != 1 {
            return Err(self.not_yet("n_shared_experts other than 1").hint("the class in Transformers has one"));
        }
        let shared = self.size("moe_shared_expert_intermediate_size", Some(7688))?;
        let latent = self.get("moe_latent_size").map(|_| self.size("moe_latent_size", None)).transpose()?;
        arch.experts = arch.experts.take().map(|experts| Experts {
            shared: Some(SharedExpert { width: shared, gated: false }),
            names: ExpertNames::Nemotron,
            gated: false,
            latent,
            ..experts
        });
        Ok(())
    }

    /// A key by its older name, or by this one.
    fn older<'k>(&self, older: &'k str, key: &'k str) -> &'k str {
        if self.has(older) { older } else { key }
    }

    /// The keys of its Mamba 2 mixers.
    fn nemotron_mamba(&self) -> Result<MambaSpec> {
        // It does not matter here.
        self.size(self.older("mamba_chunk_size", "chunk_size"), Some(128))?;
        let groups = self.older("mamba_n_groups", "n_groups");
        let least = self.number_or(self.older("mamba_dt_min", "time_step_min"), 0.001)?;
        self.checked_mamba(
            ["mamba_num_heads", groups],
            MambaSpec {
                heads: self.size("mamba_num_heads", Some(128))?,
                groups: self.size(groups, Some(8))?,
                dim: self.size("mamba_head_dim", Some(64))?,
                state: self.size_up_to("ssm_state_size", Some(128), MAX_ROWS)?,
                kernel: self.size_up_to(self.older("mamba_d_conv", "conv_kernel"), Some(4), MAX_KERNEL)?,
                conv_bias: self.flag(self.older("mamba_conv_bias", "use_conv_bias"), true)?,
                bias: self.flag("use_bias", false)?,
                limits: [least, f64::INFINITY],
            },
        )
    }
}
