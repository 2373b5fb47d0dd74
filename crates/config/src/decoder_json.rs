//! The keys of `config.json` that all families share, read as Llama's class reads them, and the refusal of features that this version
//! does not compute. The family's file then changes what its class does differently.
use serde_json::Value;

use super::arch::{
    Arch, AttentionSpec, BlockSpec, ExpertGroups, ExpertNames, Experts, GateSpec, HiddenAct, ModuleNames, QkNorm,
    RouterSpec, SharedExpert,
};
use super::family::Family;
use super::hf_json::{Source, brief};
use super::key_types::allows_null;
use super::vocabulary::TokenRows;
use tunesmith_base::error::Result;

/// Bound of the number of decoder blocks.
const MAX_LAYERS: usize = 4096;
/// Bound of the number of experts of all blocks.
const MAX_EXPERTS: usize = 1 << 16;

/// A hundred times as many heads as any model has: tokens times heads stay countable in 32 bits.
const MOST_HEADS: usize = 1 << 14;

impl Source<'_> {
    /// Refuses features that would change the numbers and that this version does not compute.
    pub(super) fn refuse_unsupported(&self, family: &Family) -> Result<()> {
        let classes = [Some(family.class_name), family.classifier];
        self.check_class(&classes.into_iter().flatten().collect::<Vec<_>>())?;
        self.refuse_quantization(family)?;
        // Transformers' masks read it in every class.
        if self.has("is_causal") && !self.flag("is_causal", true)? {
            return Err(self.mismatch("is_causal", "true: a causal language model").hint(
                "a model whose tokens see those after them, such as one that embeds texts, is not trained here",
            ));
        }
        let per_layer =
            self.get("per_layer_config").filter(|found| found.as_object().is_none_or(|map| !map.is_empty()));
        if per_layer.is_some() && !family.model_type.starts_with("gemma4") {
            return Err(self.not_yet(format!("per_layer_config in {}", family.model_type)));
        }
        // GPT-2 has keys of its own, which matter in training alone.
        let keys = ["attention_dropout", "hidden_dropout", "residual_dropout", "embd_pdrop", "resid_pdrop"];
        for key in keys.into_iter().filter(|_| family.model_type != "gpt2") {
            if self.number(key)?.unwrap_or(0.0) != 0.0 {
                return Err(self.not_yet(format!("{key} other than 0")).hint("set it to 0.0 in config.json"));
            }
        }
        let experts = ["num_experts", "num_local_experts"].into_iter().find(|key| self.get(key).is_some());
        match experts.filter(|_| !family.sparse) {
            Some(key) => Err(self.mismatch(key, "no such key: this family has no experts")),
            None => Ok(()),
        }
    }

    /// Refuses a quantized base in a format that is not read. The tensors are checked when the weights are opened.
    fn refuse_quantization(&self, family: &Family) -> Result<()> {
        let method = self.get("quantization_config").and_then(|found| found.get("quant_method"));
        if method.is_some_and(|method| method == "mxfp4") && family.model_type != "gpt_oss" {
            return Err(self.no_such_format(method));
        }
        self.stored_format().map(drop)
    }

    /// Refuses a sliding window in families whose Transformers code has none.
    pub(super) fn refuse_window(&self) -> Result<()> {
        if let Some(kinds) = self.get("layer_types") {
            let kinds = kinds.as_array().ok_or_else(|| self.mismatch("layer_types", "a list"))?;
            if let Some(kind) = kinds.iter().find(|kind| kind.as_str() != Some("full_attention")) {
                return Err(self.error(format!("layer_types has {}, expected \"full_attention\"", brief(kind))));
            }
        }
        if self.get("sliding_window").is_none() || !self.flag("use_sliding_window", true)? {
            return Ok(());
        }
        Err(self
            .mismatch("sliding_window", "null: this family's code has no window")
            .hint("if the model attends to the full context, set sliding_window to null in config.json"))
    }

    /// Refuses attention that is not causal (`use_bidirectional_attention`).
    pub(super) fn refuse_bidirectional(&self) -> Result<()> {
        if self.flag("use_bidirectional_attention", false)? {
            return Err(self.mismatch("use_bidirectional_attention", "false: a causal language model"));
        }
        Ok(())
    }

    fn activation(&self, key: &str, default: HiddenAct) -> Result<HiddenAct> {
        match self.text(key)? {
            None => Ok(default),
            Some("silu" | "swish") => Ok(HiddenAct::Silu),
            // The first files of Gemma said so and meant the tanh form, which is what Transformers takes.
            Some("gelu") if key == "hidden_act" && default == HiddenAct::GeluTanh => Ok(default),
            Some("gelu_pytorch_tanh" | "gelu_new") => Ok(HiddenAct::GeluTanh),
            Some(act) => Err(self.not_yet(format!("{key} {act:?}")).hint("supported: \"silu\", \"gelu_pytorch_tanh\"")),
        }
    }

    /// The architecture that the shared keys describe, with Llama's choices for everything else.
    pub(super) fn decoder(&self, family: &'static Family, defaults: &Defaults) -> Result<Arch> {
        let hidden_size = self.size("hidden_size", None)?;
        let num_attention_heads = self.size_up_to("num_attention_heads", None, MOST_HEADS)?;
        // A key that is written as null means as many as query heads, whatever the class's default is.
        let kv_heads = if self.has("num_key_value_heads") { None } else { defaults.kv_heads };
        // Where the class has no such key, its code takes the null for the width.
        if self.is_null("head_dim") && !allows_null(family.model_type, "head_dim") {
            return Err(self.mismatch("head_dim", "a whole number, or no such key"));
        }
        let head_dim = self.head_dim(defaults.head_dim, hidden_size, num_attention_heads)?;
        if defaults.rotary && defaults.partial_rotary.is_none() && !head_dim.is_multiple_of(2) {
            return Err(self.error(format!("head_dim is {head_dim}, expected an even number")));
        }
        let num_hidden_layers = self.size_up_to("num_hidden_layers", None, MAX_LAYERS)?;
        let max_position_embeddings =
            self.size_up_to("max_position_embeddings", Some(defaults.context), usize::MAX >> 1)?;
        let pad_token_id = self.token_ids("pad_token_id")?.first().copied();
        let partial = defaults.partial_rotary.unwrap_or(1.0);
        // Transformers checks rope_parameters of a class without rotary positions too, whatever the width of its heads.
        let width = if defaults.rotary { head_dim } else { head_dim.next_multiple_of(2) };
        let rope = self.rope(width, max_position_embeddings, defaults.theta, partial, defaults.two_ropes)?;
        if rope.rotary_dim != width && defaults.partial_rotary.is_none() {
            return Err(self
                .not_yet(format!("partial_rotary_factor in {}", family.model_type))
                .hint("the class in Transformers always rotates whole heads: remove the key"));
        }
        let intermediate_size = self.size("intermediate_size", defaults.intermediate)?;
        let attention = AttentionSpec {
            num_heads: num_attention_heads,
            num_kv_heads: self.size_or("num_key_value_heads", kv_heads.unwrap_or(num_attention_heads))?,
            head_dim,
            window: None,
            rope: defaults.rotary.then_some(0),
            kv_from: None,
            gate: GateSpec::None,
            v_norm: false,
            k_eq_v: false,
            latent: None,
        };
        Ok(Arch {
            family,
            module_names: &ModuleNames::LLAMA,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            vocab_size: self.size("vocab_size", None)?,
            rms_norm_eps: self.positive(defaults.eps_key, defaults.eps)?,
            norm_offset: 0.0,
            plain_final_norm: false,
            post_norm_eps: None,
            layer_norms: false,
            learned_positions: false,
            qk_norm: QkNorm::None,
            qk_norm_after_rope: false,
            blocks: vec![BlockSpec::new(attention, intermediate_size); num_hidden_layers],
            experts: None,
            predicts_ahead: false,
            media_ids: None,
            per_layer: None,
            altup: None,
            layer_scalar: false,
            ropes: if defaults.rotary { vec![rope] } else { Vec::new() },
            attention_scale: (head_dim as f64).powf(-0.5),
            scale_by_layer: false,
            query_scaling: None,
            attention_softcap: None,
            logit_softcap: None,
            embedding_scale: 1.0,
            embedding_scaled_outside: false,
            embedding_norm: false,
            residual_scale: 1.0,
            logit_scale: 1.0,
            activation: self.activation(defaults.activation_key, defaults.activation)?,
            fused: false,
            tie_word_embeddings: self.flag("tie_word_embeddings", defaults.tied)?,
            sinks: false,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            max_position_embeddings,
            dropout: None,
            initializer_range: self.positive("initializer_range", 0.02)?,
            bos_token_id: self.token_ids("bos_token_id")?.first().copied(),
            eos_token_ids: self.token_ids("eos_token_id")?,
            pad_token_id: if self.has("pad_token_id") { pad_token_id } else { defaults.pad },
            new_tokens: Vec::new(),
            separated: false,
            token_rows: TokenRows::default(),
            score: None,
            wrapper: None,
            stored: None,
            bitsandbytes: None,
            vision: None,
        })
    }

    /// `attention_bias` as (q, k, v; o).
    pub(super) fn attention_bias(&self) -> Result<(bool, bool)> {
        self.flag("attention_bias", false).map(|bias| (bias, bias))
    }

    /// `sliding_window` in tokens. Null means no window; an absent key means `default`.
    pub(super) fn window(&self, default: Option<usize>) -> Result<Option<usize>> {
        match self.get("sliding_window") {
            Some(_) => self.size_up_to("sliding_window", None, usize::MAX >> 1).map(Some),
            None if self.has("sliding_window") => Ok(None),
            None => Ok(default),
        }
    }

    /// Qwen's sliding windows: with `use_sliding_window`, in the blocks from `max_window_layers` on.
    pub(super) fn late_windows(&self, arch: &mut Arch) -> Result<()> {
        let window = if self.flag("use_sliding_window", false)? { self.window(Some(4096))? } else { None };
        let first = match self.get("max_window_layers") {
            Some(value) => value.as_u64().ok_or_else(|| self.mismatch("max_window_layers", "a whole number"))?,
            None => 28,
        };
        self.layer_windows(arch, window, |layer| window.is_some() && layer as u64 >= first)
    }

    /// Qwen2-MoE's sliding windows: with `use_sliding_window`, in every other block before `max_window_layers`.
    pub(super) fn early_windows(&self, arch: &mut Arch) -> Result<()> {
        let window = if self.flag("use_sliding_window", false)? { self.window(Some(4096))? } else { None };
        let end = self.count("max_window_layers", 28)?;
        self.layer_windows(arch, window, |layer| window.is_some() && layer % 2 == 0 && layer < end)
    }

    /// Gives the window to the blocks that `layer_types` names, or that `default` names where the key is absent.
    pub(super) fn layer_windows(
        &self,
        arch: &mut Arch,
        window: Option<usize>,
        default: impl Fn(usize) -> bool,
    ) -> Result<()> {
        let slides = self.layer_list("layer_types", arch, |kind| match kind.as_str() {
            Some("sliding_attention") => Some(true),
            Some("full_attention") => Some(false),
            _ => None,
        })?;
        for (layer, block) in arch.blocks.iter_mut().enumerate() {
            let Some(attention) = block.attention_mut() else { continue };
            if slides.as_ref().map_or_else(|| default(layer), |slides| slides[layer]) {
                attention.window = Some(window.ok_or_else(|| {
                    self.error(format!("layer {layer} has a sliding window, and sliding_window is not set or not used"))
                })?);
            }
        }
        Ok(())
    }

    /// A list of 0 and 1, or of true and false, with one entry for each block.
    pub(super) fn layer_flags(&self, key: &str, arch: &Arch, default: impl Fn(usize) -> bool) -> Result<Vec<bool>> {
        let flags = self.layer_list(key, arch, |value| match value.as_u64() {
            Some(0) => Some(false),
            Some(1) => Some(true),
            _ => value.as_bool(),
        })?;
        Ok(flags.unwrap_or_else(|| (0..arch.num_hidden_layers).map(default).collect()))
    }

    /// A list with one entry for each block; `None` where the key is absent.
    pub(super) fn layer_list<T>(
        &self,
        key: &str,
        arch: &Arch,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let values = value.as_array().ok_or_else(|| self.mismatch(key, "a list"))?;
        let layers = arch.num_hidden_layers;
        if values.len() != layers {
            return Err(self.error(format!("{key} has {} entries, num_hidden_layers is {layers}", values.len())));
        }
        let entry = |value| read(value).ok_or_else(|| self.not_yet(format!("{key} with {}", brief(value))));
        values.iter().map(entry).collect::<Result<_>>().map(Some)
    }

    fn head_dim(&self, default: Option<usize>, hidden_size: usize, heads: usize) -> Result<usize> {
        if self.get("head_dim").is_some() || (default.is_some() && !self.has("head_dim")) {
            return self.size("head_dim", default);
        }
        if hidden_size.is_multiple_of(heads) {
            Ok(hidden_size / heads)
        } else {
            Err(self.error(format!(
                "hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}, and there is no head_dim"
            )))
        }
    }
}

impl Source<'_> {
    /// The experts of Qwen's mixture-of-experts models, and which blocks are sparse. `shared`: intermediate size of the shared expert.
    pub(super) fn qwen_experts(&self, arch: &mut Arch, shared: Option<usize>, defaults: ExpertDefaults) -> Result<()> {
        let key = if self.get("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
        arch.experts = Some(Experts {
            normalised: self.flag("norm_topk_prob", false)?,
            shared: shared.map(|width| SharedExpert { width, gated: true }),
            ..self.experts(key, "moe_intermediate_size", defaults)?
        });
        let step = self.size("decoder_sparse_step", Some(1))?;
        let dense = match self.get("mlp_only_layers") {
            Some(value) => {
                value.as_array().ok_or_else(|| self.mismatch("mlp_only_layers", "a list of block numbers"))?
            }
            None => &Vec::new(),
        };
        let mut sparse = false;
        for (layer, block) in arch.blocks.iter_mut().enumerate() {
            let listed = dense.iter().any(|number| number.as_u64() == Some(layer as u64));
            if !listed && (layer + 1) % step == 0 {
                block.set_experts();
                sparse = true;
            }
        }
        // Transformers fails in every pass of such a model.
        if !sparse && self.flag("output_router_logits", false)? {
            return Err(self.mismatch("output_router_logits", "false: no block has experts"));
        }
        Ok(())
    }

    /// The experts of DeepSeek-V3 and of those that route as it does: groups, a bias for the choice, an MLP beside them, and dense MLPs
    /// in the first blocks.
    pub(super) fn deepseek_experts(&self, arch: &mut Arch, defaults: DeepSeekDefaults) -> Result<()> {
        let DeepSeekDefaults { experts, scale, groups, dense } = defaults;
        let key = if self.get("n_routed_experts").is_some() { "n_routed_experts" } else { "num_local_experts" };
        let experts = self.experts(key, "moe_intermediate_size", experts)?;
        self.refuse_balance(&experts)?;
        self.refuse_others("scoring_func", "sigmoid")?;
        self.refuse_others("topk_method", "noaux_tc")?;
        if self.size("moe_layer_freq", Some(1))? != 1 {
            return Err(self.not_yet("moe_layer_freq other than 1"));
        }
        arch.predicts_ahead = true;
        let shared = self.size("n_shared_experts", Some(1))? * experts.width;
        let groups = self.expert_groups(&experts, [Some(groups.0), Some(groups.1)], false)?;
        arch.experts = Some(Experts {
            normalised: self.flag("norm_topk_prob", true)?,
            router: RouterSpec {
                groups,
                eps: 1e-20,
                scale: self.positive("routed_scaling_factor", scale)?,
                ..RouterSpec::SIGMOID
            },
            shared: Some(SharedExpert { width: shared, gated: false }),
            names: ExpertNames::DeepSeek,
            ..experts
        });
        let dense = self.count("first_k_dense_replace", dense)?;
        arch.blocks.iter_mut().skip(dense).for_each(BlockSpec::set_experts);
        Ok(())
    }

    /// The groups of `experts`, from `n_group` and `topk_group` with these defaults; `None` where a token may go to all of them.
    /// `by_best`: the score of a group is that of its best expert.
    pub(super) fn expert_groups(
        &self,
        experts: &Experts,
        defaults: [Option<usize>; 2],
        by_best: bool,
    ) -> Result<Option<ExpertGroups>> {
        let (count, chosen) = (self.size("n_group", defaults[0])?, self.size("topk_group", defaults[1])?);
        let Experts { count: all, per_token, .. } = *experts;
        let fewest = if by_best { 1 } else { 2 };
        if !all.is_multiple_of(count) || all / count < fewest || chosen > count || chosen * (all / count) < per_token {
            let fewest = if by_best { "" } else { " with two experts or more" };
            return Err(self.error(format!(
                "{all} experts in n_group {count} groups, topk_group {chosen} of them for {per_token} experts a token: expected \
                 groups of one size{fewest}, and enough of them"
            )));
        }
        // All groups are no choice of groups.
        Ok((chosen < count).then_some(ExpertGroups { count, chosen, by_best }))
    }

    /// Refuses a load-balancing loss where the class in Transformers has none.
    pub(super) fn refuse_balance(&self, experts: &Experts) -> Result<()> {
        if experts.balance.is_none() {
            return Ok(());
        }
        Err(self
            .not_yet("output_router_logits in this family")
            .hint("the class in Transformers has no load-balancing loss: set it to false"))
    }

    /// Refuses a word other than the one that the class in Transformers computes, whatever the file says.
    pub(super) fn refuse_others(&self, key: &str, only: &str) -> Result<()> {
        match self.text(key)? {
            Some(other) if other != only => {
                Err(self.not_yet(format!("{key} {other:?}")).hint(format!("supported: {only:?}")))
            }
            None if self.is_null(key) => Err(self.mismatch(key, &format!("{only:?}"))),
            _ => Ok(()),
        }
    }

    /// The experts, from the keys `count` and `width`.
    pub(super) fn experts(&self, count: &str, width: &str, defaults: ExpertDefaults) -> Result<Experts> {
        let (count, width) = (self.size(count, Some(defaults.count))?, self.size(width, Some(defaults.width))?);
        let per_token = self.size("num_experts_per_tok", Some(defaults.per_token))?;
        let layers = self.size_up_to("num_hidden_layers", None, MAX_LAYERS)?;
        if count * layers > MAX_EXPERTS || per_token > count {
            return Err(self.error(format!(
                "{count} experts, {per_token} of them a token, in {layers} blocks, expected at most {MAX_EXPERTS} in all, and no more a token than there are"
            )));
        }
        if self.number("router_jitter_noise")?.unwrap_or(0.0) != 0.0 {
            return Err(self.not_yet("router_jitter_noise other than 0").hint("set it to 0.0 in config.json"));
        }
        let balance = if self.flag("output_router_logits", false)? {
            Some(self.number_or("router_aux_loss_coef", 0.001)?)
        } else {
            None
        };
        Ok(Experts {
            count,
            per_token,
            width,
            normalised: true,
            router: RouterSpec::SOFTMAX,
            shared: None,
            balance,
            names: ExpertNames::Qwen,
            clamp: None,
            biased: false,
            gated: true,
            latent: None,
            mxfp4: false,
        })
    }
}

/// Defaults of the keys of a mixture of experts, in a family's configuration class of Transformers.
#[derive(Clone, Copy)]
pub(super) struct ExpertDefaults {
    /// Number of routed experts in a block.
    pub count: usize,
    /// Experts that the router chooses for a token.
    pub per_token: usize,
    /// Intermediate size of an expert.
    pub width: usize,
}

/// As [`ExpertDefaults`], of a family that routes as DeepSeek-V3 does.
#[derive(Clone, Copy)]
pub(super) struct DeepSeekDefaults {
    pub experts: ExpertDefaults,
    /// `routed_scaling_factor`.
    pub scale: f64,
    /// `n_group` and `topk_group`.
    pub groups: (usize, usize),
    /// `first_k_dense_replace`.
    pub dense: usize,
}

/// Defaults of a family's configuration class in Transformers, for absent keys.
pub(super) struct Defaults {
    /// Key and value heads; `None`: as many as query heads.
    pub kv_heads: Option<usize>,
    /// Width of a head; `None`: `hidden_size / num_attention_heads`.
    pub head_dim: Option<usize>,
    /// Width of an MLP; `None`: the file has to say it.
    pub intermediate: Option<usize>,
    pub context: usize,
    /// Base of the rotary embedding, `rope_theta`.
    pub theta: f64,
    pub eps: f64,
    /// The key of `config.json` that gives `eps`, such as `rms_norm_eps`.
    pub eps_key: &'static str,
    pub tied: bool,
    pub pad: Option<u32>,
    /// The key that names the activation.
    pub activation_key: &'static str,
    pub activation: HiddenAct,
    /// `partial_rotary_factor`; `None` where the class does not read it.
    pub partial_rotary: Option<f64>,
    /// Whether the rope parameters have an object for each kind of block.
    pub two_ropes: bool,
    /// Whether queries and keys get rotary positions.
    pub rotary: bool,
}

impl Default for Defaults {
    fn default() -> Self {
        Self {
            kv_heads: None,
            head_dim: None,
            intermediate: None,
            context: 32_768,
            theta: 1e4,
            eps: 1e-6,
            eps_key: "rms_norm_eps",
            tied: false,
            pad: None,
            activation_key: "hidden_act",
            activation: HiddenAct::Silu,
            partial_rotary: None,
            two_ropes: false,
            rotary: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::arch::Arch;
    use serde_json::{Map, Value, json};
    use std::path::Path;

    /// A small model of a class, with more keys.
    fn read(model_type: &str, more: &Value) -> Result<Arch, String> {
        let mut config: Map<String, Value> = Map::new();
        for sizes in [
            &json!({"model_type": model_type, "vocab_size": 97, "hidden_size": 52, "intermediate_size": 50,
                "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}),
            more,
        ] {
            config.extend(sizes.as_object().into_iter().flatten().map(|(key, value)| (key.clone(), value.clone())));
        }
        Arch::from_json(&Value::from(config).to_string(), Path::new("config.json")).map_err(|error| error.to_string())
    }

    fn width(arch: &Arch) -> usize {
        arch.attentions().next().map_or(0, |attention| attention.head_dim)
    }

    #[test]
    fn the_width_of_heads_is_even_where_whole_heads_are_rotated() {
        let gpt2 = read("gpt2", &json!({"n_embd": 52, "n_head": 4, "n_layer": 1, "n_positions": 64})).unwrap();
        assert_eq!((width(&gpt2), gpt2.ropes.len(), gpt2.reach()), (13, 0, 64));
        let granite = json!({"layer_types": ["attention"], "shared_intermediate_size": 50, "num_local_experts": 0});
        let plain = read("granitemoehybrid", &granite).unwrap();
        assert_eq!((width(&plain), plain.ropes.len()), (13, 0));
        let mut rotary = granite;
        rotary["position_embedding_type"] = json!("rope");
        for (model_type, more) in [("granitemoehybrid", &rotary), ("llama", &json!({}))] {
            let error = read(model_type, more).unwrap_err();
            assert!(error.contains("head_dim is 13, expected an even number"), "{model_type}: {error}");
        }
    }

    #[test]
    fn of_latent_heads_only_the_rotated_part_is_even() {
        let sizes = json!({"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 7, "qk_rope_head_dim": 4, "v_head_dim": 10,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24});
        let arch = read("mistral4", &sizes).unwrap();
        assert_eq!((width(&arch), arch.ropes[0].rotary_dim), (11, 4));
        let mut odd = sizes;
        odd["qk_rope_head_dim"] = json!(5);
        assert!(read("mistral4", &odd).unwrap_err().contains("qk_rope_head_dim is 5, expected an even number"));
    }

    #[test]
    fn windows_of_qwen2_moe_may_end_before_the_first_block() {
        let sizes = json!({"hidden_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24, "use_sliding_window": true, "sliding_window": 4, "max_window_layers": 0});
        let arch = read("qwen2_moe", &sizes).unwrap();
        assert!(arch.attentions().all(|attention| attention.window.is_none()));
    }

    #[test]
    fn a_text_is_as_long_as_scaling_lets_it_be_and_learned_positions_end() {
        let rope = json!({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0});
        let sizes = json!({"hidden_size": 64, "max_position_embeddings": 32, "rope_parameters": rope});
        assert_eq!(read("llama", &sizes).unwrap().reach(), 256);
        let gpt2 = json!({"n_embd": 52, "n_head": 4, "n_layer": 1, "n_positions": 64, "rope_parameters": rope});
        assert_eq!(read("gpt2", &gpt2).unwrap().reach(), 64);
    }
}
