//! A decoder as it is run: its family, its sizes, and the names and shapes of its tensors. All of it is checked when a
//! `config.json` is read.
pub use super::arch_parts::{
    AttentionSpec, BlockSpec, BranchSpec, Experts, HiddenAct, NormPlacement, PartSpec, QkNorm, SharedExpert,
};
pub use super::classification_head::{SCORE, ScoreHead};
pub use super::family::{Family, Gguf};
pub use super::rope::{Frequencies, Rope, RopeScaling};
pub use super::tensor_specs::{LinearSpec, TensorSpec};
pub use super::vocabulary::{EMBEDDING, LM_HEAD, TokenRows, Vocabulary};
pub use super::wrapped::{Naming, WRAPPERS, Wrapper, is_beside, is_decoders, plain_name};

use super::vision::VisionArch;
use std::sync::Arc;

/// Files of a model folder that training does not change. A checkpoint gets copies of those that exist.
pub const COMPANIONS: [&str; 14] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "image_preprocessor_config.json",
    "video_preprocessor_config.json",
];

/// A decoder's architecture. Every field was checked when `config.json` was read.
#[allow(clippy::struct_excessive_bools)] // each is a fact of the architecture of its own
#[derive(Debug, Clone, PartialEq)]
pub struct Arch {
    /// The family, which fixes the class in Transformers and the format in GGUF.
    pub family: &'static Family,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// `intermediate_size` of `config.json`: the width of an MLP whose block does not say otherwise.
    pub intermediate_size: usize,
    /// Number of decoder blocks, and of entries in `blocks`.
    pub num_hidden_layers: usize,
    /// Rows of the embedding, which may exceed the tokens of the tokenizer.
    pub vocab_size: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f64,
    /// Added to every norm weight: 1 in Gemma, whose weights count from 1; else 0.
    pub norm_offset: f64,
    /// Norms on queries and keys.
    pub qk_norm: QkNorm,
    /// One entry for each of the `num_hidden_layers` blocks.
    pub blocks: Vec<BlockSpec>,
    /// The rotary embeddings that [`AttentionSpec::rope`] refers to.
    pub ropes: Vec<Rope>,
    /// Factor on attention scores, before the softmax.
    pub attention_scale: f64,
    /// Soft cap of attention scores: `cap * tanh(score / cap)`.
    pub attention_softcap: Option<f64>,
    /// Soft cap of logits: `cap * tanh(logit / cap)`.
    pub logit_softcap: Option<f64>,
    /// Factor on the embedding's output.
    pub embedding_scale: f64,
    /// Whether Transformers applies `embedding_scale` outside the embedding module. Noise on the module's output (`NEFTune`) is then
    /// scaled too.
    pub embedding_scaled_outside: bool,
    /// Factor on the output of attention and MLP, before it is added to the residual stream.
    pub residual_scale: f64,
    /// Factor on the output of the head.
    pub logit_scale: f64,
    /// Activation on the gate of the MLP.
    pub activation: HiddenAct,
    /// Whether `qkv_proj` and `gate_up_proj` are fused modules (Phi-3).
    pub fused: bool,
    /// The experts of sparse blocks; `None` in a dense model.
    pub experts: Option<Experts>,
    /// Whether `lm_head` shares the embedding's matrix.
    pub tie_word_embeddings: bool,
    /// Whether training gave a head that was tied a matrix of its own, which starts as a copy of the embedding's.
    pub separated: bool,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// Bias on the attention's output projection.
    pub o_bias: bool,
    /// Biases on the projections of the MLP.
    pub mlp_bias: bool,
    /// Context length of the pretraining, in tokens.
    pub max_position_embeddings: usize,
    /// Standard deviation of newly initialised weights.
    pub initializer_range: f64,
    /// Token at the beginning of a text.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a generation.
    pub eos_token_ids: Vec<u32>,
    /// Padding token. As in PyTorch's `padding_idx`, its embedding row gets no gradient from the input side.
    pub pad_token_id: Option<u32>,
    /// Ids of `tuning.new_tokens`. Their rows start as the mean of all rows. Empty after reading a `config.json`.
    pub new_tokens: Vec<u32>,
    /// Rows of embedding and head that are trained while the rest of the table is frozen. Empty after reading a `config.json`.
    pub token_rows: TokenRows,
    /// The classification head, where it replaces `lm_head`.
    pub score: Option<ScoreHead>,
    /// The multimodal class that holds the decoder; `None` for a plain language model.
    pub wrapper: Option<&'static Wrapper>,
    /// How it sees pictures, in a run that has some. Empty after reading a `config.json`.
    pub vision: Option<Arc<VisionArch>>,
}

impl Arch {
    /// The longest sequence in tokens: `max_position_embeddings`, or more where rotary scaling extends every block.
    pub fn reach(&self) -> usize {
        let reach = self.ropes.iter().map(|rope| rope.scaling.reach(self.max_position_embeddings)).min();
        reach.unwrap_or(self.max_position_embeddings)
    }

    /// Every tensor of the model in the order of the forward pass. A tied `lm_head.weight` is left out.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let mut tensors = vec![tensor(EMBEDDING, &[self.vocab_size, self.hidden_size])];
        tensors.extend((0..self.num_hidden_layers).flat_map(|layer| self.layer_tensors(layer)));
        tensors.push(tensor("model.norm.weight", &[self.hidden_size]));
        if self.head_tensor() != EMBEDDING {
            tensors.push(tensor(self.head_tensor(), &[self.outputs(), self.hidden_size]));
        }
        tensors
    }

    /// Rows of the head: `vocab_size`, or the outputs of the classification head.
    pub fn outputs(&self) -> usize {
        self.score.as_ref().map_or(self.vocab_size, ScoreHead::outputs)
    }

    /// Name of the tensor that the head multiplies by: the embedding's when tied.
    pub const fn head_tensor(&self) -> &'static str {
        match (&self.score, self.tie_word_embeddings) {
            (Some(_), _) => SCORE,
            (None, true) => EMBEDDING,
            (None, false) => LM_HEAD,
        }
    }

    /// Whether the head multiplies by the embedding's matrix.
    pub const fn ties_head(&self) -> bool {
        self.tie_word_embeddings && self.score.is_none()
    }

    /// The padding token, or else the first end-of-sequence token. Transformers classifies at the last token of a row that is no
    /// padding.
    pub fn padding(&self) -> Option<u32> {
        self.pad_token_id.or_else(|| self.eos_token_ids.first().copied())
    }

    pub(super) fn layer_tensors(&self, layer: usize) -> Vec<TensorSpec> {
        let prefix = format!("model.layers.{layer}");
        let mut tensors = Vec::new();
        let norm = |tensors: &mut Vec<TensorSpec>, name: Option<&str>, size: usize| {
            tensors.extend(name.map(|name| tensor(&format!("{prefix}.{name}.weight"), &[size])));
        };
        for branch in &self.blocks[layer].branches {
            norm(&mut tensors, branch.norm, self.hidden_size);
            for linear in self.part_linears(layer, &branch.part) {
                tensors.push(tensor(&format!("{}.weight", linear.name), &[linear.out_features, linear.in_features]));
                if linear.bias {
                    tensors.push(tensor(&format!("{}.bias", linear.name), &[linear.out_features]));
                }
                if let PartSpec::Attention(attention) = &branch.part {
                    let [query, key] = self.qk_norm_sizes(attention);
                    // Queries of a block without keys of its own have a norm too.
                    let last = if attention.kv_from.is_some() { ".q_proj" } else { ".k_proj" };
                    if linear.name.ends_with(last) {
                        norm(&mut tensors, query.map(|_| "self_attn.q_norm"), query.unwrap_or_default());
                        let key = key.filter(|_| attention.kv_from.is_none());
                        norm(&mut tensors, key.map(|_| "self_attn.k_norm"), key.unwrap_or_default());
                    }
                }
            }
            if let (PartSpec::Experts, Some(experts)) = (&branch.part, &self.experts) {
                let hidden = self.hidden_size;
                tensors.push(tensor(&format!("{prefix}.{}", experts.router()), &[experts.count, hidden]));
                for expert in 0..experts.count {
                    let [gate, up, down] = experts.names(expert).map(|name| format!("{prefix}.{name}"));
                    tensors.push(tensor(&gate, &[experts.width, hidden]));
                    tensors.push(tensor(&up, &[experts.width, hidden]));
                    tensors.push(tensor(&down, &[hidden, experts.width]));
                }
            }
            norm(&mut tensors, branch.post_norm, self.hidden_size);
        }
        tensors
    }

    /// Whether a run with pictures trains nothing of the decoder.
    pub fn freezes_language(&self) -> bool {
        self.vision.as_ref().is_some_and(|vision| vision.training.freeze_language)
    }

    /// The auto class of Transformers that loads the whole model.
    pub const fn auto_class(&self) -> &'static str {
        match (&self.score, self.wrapper) {
            (Some(_), _) => "AutoModelForSequenceClassification",
            (None, Some(_)) => "AutoModelForImageTextToText",
            (None, None) => "AutoModelForCausalLM",
        }
    }

    /// The names of a module: as in a plain language model, then those inside the multimodal model.
    pub fn names(&self, module: &str) -> Vec<String> {
        let aliases = self.wrapper.map(|wrapper| wrapper.aliases(module));
        std::iter::once(module.to_owned()).chain(aliases.into_iter().flatten()).collect()
    }

    /// The experts of block `layer`; `None` for a dense block.
    pub fn experts_of(&self, layer: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|_| self.blocks[layer].has_experts())
    }

    /// The attention of each block that has one, in order.
    pub fn attentions(&self) -> impl Iterator<Item = &AttentionSpec> {
        self.blocks.iter().filter_map(BlockSpec::attention)
    }

    /// As [`Arch::attentions`], to change them.
    pub fn attentions_mut(&mut self) -> impl Iterator<Item = &mut AttentionSpec> {
        self.blocks.iter_mut().filter_map(BlockSpec::attention_mut)
    }

    /// The attention that all blocks have, but for windows and rotary embeddings; `None` where they differ.
    pub fn uniform_attention(&self) -> Option<&AttentionSpec> {
        let first = self.blocks.first()?.attention()?;
        let like =
            |it: &AttentionSpec| AttentionSpec { window: first.window, rope: first.rope, ..it.clone() } == *first;
        self.blocks.iter().all(|block| block.attention().is_some_and(like)).then_some(first)
    }

    /// Names the norms of every block.
    pub fn set_norms(&mut self, norms: NormPlacement) {
        self.blocks.iter_mut().for_each(|block| block.set_norms(norms));
    }

    /// The routers of sparse blocks, under their module names in Transformers 5.
    pub fn routers(&self) -> impl Iterator<Item = LinearSpec> + '_ {
        let of = |layer| {
            let experts = self.experts_of(layer)?;
            Some(LinearSpec {
                name: format!("model.layers.{layer}.mlp.gate"),
                out_features: experts.count,
                in_features: self.hidden_size,
                bias: false,
                layer: Some(layer),
            })
        };
        (0..self.num_hidden_layers).filter_map(of)
    }

    /// Lengths of the q and k norm weights of a block.
    fn qk_norm_sizes(&self, attention: &AttentionSpec) -> [Option<usize>; 2] {
        match self.qk_norm {
            QkNorm::None => [None; 2],
            QkNorm::Head => [Some(attention.head_dim); 2],
            QkNorm::Whole => [Some(attention.query_size()), Some(attention.kv_size())],
        }
    }

    /// Every linear module in model order: attention and MLP of each block, then `lm_head` (tied or not) or `score`. Routers and routed
    /// experts are not among them.
    pub fn linear_modules(&self) -> Vec<LinearSpec> {
        let mut modules: Vec<_> = (0..self.num_hidden_layers).flat_map(|layer| self.layer_linears(layer)).collect();
        modules.push(LinearSpec {
            name: if self.score.is_some() { "score" } else { "lm_head" }.into(),
            out_features: self.outputs(),
            in_features: self.hidden_size,
            bias: false,
            layer: None,
        });
        modules
    }

    fn layer_linears(&self, layer: usize) -> impl Iterator<Item = LinearSpec> {
        self.blocks[layer].branches.iter().flat_map(move |branch| self.part_linears(layer, &branch.part))
    }

    /// The linear modules of a part of block `layer`.
    fn part_linears(&self, layer: usize, part: &PartSpec) -> Vec<LinearSpec> {
        let hidden = self.hidden_size;
        let linears = match part {
            PartSpec::Attention(attention) => {
                let (query, key) = (attention.query_size(), attention.kv_size());
                let mut linears = match (attention.kv_from, self.fused) {
                    (Some(_), _) => vec![("self_attn.q_proj", query, hidden, self.qkv_bias)],
                    (None, true) => vec![("self_attn.qkv_proj", query + 2 * key, hidden, self.qkv_bias)],
                    (None, false) => vec![
                        ("self_attn.q_proj", query, hidden, self.qkv_bias),
                        ("self_attn.k_proj", key, hidden, self.qkv_bias),
                        ("self_attn.v_proj", key, hidden, self.qkv_bias),
                    ],
                };
                linears.push(("self_attn.o_proj", hidden, query, self.o_bias));
                linears
            }
            PartSpec::Mlp { intermediate_size: inner } => {
                let mut linears = if self.fused {
                    vec![("mlp.gate_up_proj", 2 * inner, hidden, self.mlp_bias)]
                } else {
                    vec![
                        ("mlp.gate_proj", *inner, hidden, self.mlp_bias),
                        ("mlp.up_proj", *inner, hidden, self.mlp_bias),
                    ]
                };
                linears.push(("mlp.down_proj", hidden, *inner, self.mlp_bias));
                linears
            }
            PartSpec::Experts => match self.experts.as_ref().and_then(|experts| experts.shared) {
                Some(SharedExpert { width, gated }) => {
                    let mut linears = vec![
                        ("mlp.shared_expert.gate_proj", width, hidden, false),
                        ("mlp.shared_expert.up_proj", width, hidden, false),
                        ("mlp.shared_expert.down_proj", hidden, width, false),
                    ];
                    if gated {
                        linears.push(("mlp.shared_expert_gate", 1, hidden, false));
                    }
                    linears
                }
                None => Vec::new(),
            },
        };
        let spec = |(name, out_features, in_features, bias)| LinearSpec {
            name: format!("model.layers.{layer}.{name}"),
            out_features,
            in_features,
            bias,
            layer: Some(layer),
        };
        linears.into_iter().map(spec).collect()
    }
}

impl TensorSpec {
    /// Number of elements: the product of the shape.
    #[allow(clippy::len_without_is_empty)] // no tensor of a checked model is empty
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

fn tensor(name: &str, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: name.into(), shape: shape.to_vec() }
}
