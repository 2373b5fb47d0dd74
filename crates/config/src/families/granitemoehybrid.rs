//! Granite 4: Granite's constants, Mamba 2 in most blocks, attention mostly without positions, an MLP that all tokens share.
use crate::arch::{Arch, BlockSpec, ExpertNames, Experts, HiddenAct, MambaSpec, ModuleNames, PartSpec, SharedExpert};
use crate::decoder_json::{Defaults, ExpertDefaults};
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use crate::mixers_json::{MAX_KERNEL, MAX_ROWS};
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "granitemoehybrid",
    class_name: "GraniteMoeHybridForCausalLM",
    models: "Granite 4.0 350M and 1B, Micro and H-Micro, H-Tiny and H-Small",
    features: "Granite's constants; Mamba 2 in most blocks of the H models; attention without positions, or with a rotary \
               embedding; experts beside an MLP in H-Tiny and H-Small",
    sparse: true,
    classifier: None,
    gguf: Some(Gguf {
        variant: |hybrid, sparse| match (hybrid, sparse) {
            (true, _) => None,
            (false, true) => Some("granitemoe"),
            (false, false) => Some("granite"),
        },
        pairs: true,
        scales: true,
        stated_turns: true,
        ..Gguf::named("granitehybrid")
    }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let rotary = source.text("position_embedding_type")? == Some("rope");
    let defaults = Defaults { intermediate: Some(11_008), context: 2048, rotary, ..Defaults::default() };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    source.granite_constants(&mut arch)?;
    (arch.qkv_bias, arch.o_bias) = source.attention_bias()?;
    arch.module_names = &ModuleNames::GRANITE4;
    arch.intermediate_size = source.size("shared_intermediate_size", Some(1024))?;
    let key = if source.get("layer_types").is_some() { "layer_types" } else { "layers_block_type" };
    let kinds = source.layer_list(key, &arch, |kind| match kind.as_str() {
        Some("mamba" | "linear_attention") => Some(true),
        Some("attention" | "full_attention") => Some(false),
        _ => None,
    })?;
    let width = arch.intermediate_size;
    for (layer, block) in arch.blocks.iter_mut().enumerate() {
        if kinds.as_ref().is_none_or(|kinds| kinds[layer]) {
            if arch.activation != HiddenAct::Silu {
                return Err(source.not_yet("hidden_act other than \"silu\" in blocks with Mamba 2"));
            }
            block.set_mixer(&PartSpec::Mamba(source.granite_mamba(arch.hidden_size)?));
        }
        for branch in &mut block.branches {
            if let PartSpec::Mlp { intermediate_size, .. } = &mut branch.part {
                *intermediate_size = width;
            }
        }
    }
    if source.get("num_local_experts").is_none_or(|count| count.as_u64() != Some(0)) {
        let defaults = ExpertDefaults { count: 8, per_token: 2, width: 11_008 };
        arch.experts = Some(Experts {
            shared: Some(SharedExpert { width, gated: false }),
            names: ExpertNames::Granite,
            ..source.experts("num_local_experts", "intermediate_size", defaults)?
        });
        arch.blocks.iter_mut().for_each(BlockSpec::set_experts);
    } else if source.flag("output_router_logits", false)? {
        return Err(source.mismatch("output_router_logits", "false: there are no experts"));
    }
    Ok(arch)
}

impl Source<'_> {
    /// The `mamba_*` keys.
    fn granite_mamba(&self, hidden: usize) -> Result<MambaSpec> {
        let heads = self.size("mamba_n_heads", Some(128))?;
        let inner = self.size("mamba_expand", Some(2))?.saturating_mul(hidden);
        // It does not matter here.
        self.size("mamba_chunk_size", Some(256))?;
        let dim = match self.map.get("mamba_d_head") {
            None => inner / heads,
            Some(word) if word.as_str() == Some("auto") => inner / heads,
            Some(_) => self.size("mamba_d_head", None)?,
        };
        if dim.checked_mul(heads) != Some(inner) {
            return Err(self.error(format!(
                "mamba_n_heads {heads} times mamba_d_head {dim} is not mamba_expand times hidden_size, {inner}"
            )));
        }
        self.checked_mamba(
            ["mamba_n_heads", "mamba_n_groups"],
            MambaSpec {
                heads,
                groups: self.size("mamba_n_groups", Some(1))?,
                dim,
                state: self.size_up_to("mamba_d_state", Some(256), MAX_ROWS)?,
                kernel: self.size_up_to("mamba_d_conv", Some(4), MAX_KERNEL)?,
                conv_bias: self.flag("mamba_conv_bias", true)?,
                bias: self.flag("mamba_proj_bias", false)?,
                limits: self.range("time_step_limit", [0.0, f64::INFINITY])?,
            },
        )
    }
}
