//! A decoder as it is run: its family, its sizes, and the names and shapes of its tensors. All of it is checked when a
//! `config.json` is read.
pub use super::classification_head::{SCORE, ScoreHead};
pub use super::family::{Family, Gguf};
pub use super::rope::{Frequencies, Rope, RopeScaling};
pub use super::vocabulary::{EMBEDDING, LM_HEAD, TokenRows, Vocabulary};
pub use super::wrapped::{Naming, WRAPPERS, Wrapper, is_decoders, plain_name};

/// What stands in a model folder beside `config.json` and the weights, and does not change in training.
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

/// Where a block has its norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormPlacement {
    /// Before attention and before the MLP (Llama).
    Pre,
    /// Before and after both (Gemma 2 and 3).
    Sandwich,
    /// After both, before they join the residual stream (OLMo 2).
    Post,
}

impl NormPlacement {
    /// The names of the norms within a block: before attention, after it, before the MLP, after it.
    pub const fn names(self) -> [Option<&'static str>; 4] {
        match self {
            Self::Pre => [Some("input_layernorm"), None, Some("post_attention_layernorm"), None],
            Self::Sandwich => [
                Some("input_layernorm"),
                Some("post_attention_layernorm"),
                Some("pre_feedforward_layernorm"),
                Some("post_feedforward_layernorm"),
            ],
            Self::Post => [None, Some("post_attention_layernorm"), None, Some("post_feedforward_layernorm")],
        }
    }
}

/// Norms on queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// None.
    None,
    /// One weight of `head_dim` for every head.
    Head,
    /// One weight over all heads.
    Whole,
}

/// What the MLP's gate goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x sigmoid(x)`.
    Silu,
    /// GELU by tanh.
    GeluTanh,
}

/// The experts of the blocks that have them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// How many.
    pub count: usize,
    /// How many of them a token goes through.
    pub per_token: usize,
    /// Width inside an expert.
    pub width: usize,
    /// The weights of a token's experts are made to sum to 1.
    pub normalised: bool,
    /// Width inside the expert that every token goes through, where there is one.
    pub shared: Option<usize>,
    /// The coefficient of the loss for uneven use of experts, where it is switched on.
    pub balance: Option<f64>,
    /// The tensors' names are Mixtral's.
    pub mixtral: bool,
}

impl Experts {
    /// The names of an expert's gate, up and down matrices within a block, and of the router's.
    pub fn names(&self, expert: usize) -> [String; 3] {
        if self.mixtral {
            ["w1", "w3", "w2"].map(|name| format!("block_sparse_moe.experts.{expert}.{name}.weight"))
        } else {
            ["gate", "up", "down"].map(|name| format!("mlp.experts.{expert}.{name}_proj.weight"))
        }
    }

    /// The name of the router's matrix within a block.
    pub const fn router(&self) -> &'static str {
        if self.mixtral { "block_sparse_moe.gate.weight" } else { "mlp.gate.weight" }
    }
}

/// What differs from block to block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockKind {
    /// The MLP is made of [`Arch::experts`].
    pub sparse: bool,
    /// A query sees this many keys up to its own; none means all.
    pub window: Option<usize>,
    /// Which of [`Arch::ropes`] turns queries and keys; none means no positions.
    pub rope: Option<usize>,
}

/// A tensor that a model folder must hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Hugging Face's name, such as `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Row-major sizes.
    pub shape: Vec<usize>,
}

/// A linear module of the model: its weight is `[out_features, in_features]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinearSpec {
    /// Module name, such as `model.layers.0.self_attn.q_proj`.
    pub name: String,
    /// Rows of the weight.
    pub out_features: usize,
    /// Columns of the weight.
    pub in_features: usize,
    /// Whether the module adds a bias.
    pub bias: bool,
    /// Number of the decoder block; none for `lm_head`.
    pub layer: Option<usize>,
}

/// A decoder's family and sizes, all checked.
#[allow(clippy::struct_excessive_bools)] // each is a fact of the architecture of its own
#[derive(Debug, Clone, PartialEq)]
pub struct Arch {
    /// Which family.
    pub family: &'static Family,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the MLP.
    pub intermediate_size: usize,
    /// Number of decoder blocks.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f64,
    /// Added to every norm weight.
    pub norm_offset: f64,
    /// Where the norms are.
    pub norms: NormPlacement,
    /// Norms on queries and keys.
    pub qk_norm: QkNorm,
    /// One entry a block.
    pub blocks: Vec<BlockKind>,
    /// The rotary rules that blocks refer to.
    pub ropes: Vec<Rope>,
    /// What scores are multiplied by.
    pub attention_scale: f64,
    /// Scores go through `cap * tanh(score / cap)`.
    pub attention_softcap: Option<f64>,
    /// Logits go through `cap * tanh(logit / cap)`.
    pub logit_softcap: Option<f64>,
    /// What embeddings are multiplied by.
    pub embedding_scale: f64,
    /// The embedding module itself does not know its scale: noise on its output is scaled too.
    pub embedding_scaled_outside: bool,
    /// What attention and MLP are multiplied by before they join the residual stream.
    pub residual_scale: f64,
    /// What logits are multiplied by.
    pub logit_scale: f64,
    /// The MLP's activation.
    pub activation: Activation,
    /// q, k and v are one module, gate and up another.
    pub fused: bool,
    /// The experts, in families that have them.
    pub experts: Option<Experts>,
    /// The head uses the embedding's matrix.
    pub tie_word_embeddings: bool,
    /// The head has a matrix of its own that starts as the embedding's, which a `config.json` says they share.
    pub separated: bool,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// Bias on o.
    pub o_bias: bool,
    /// Biases in the MLP.
    pub mlp_bias: bool,
    /// Longest context that the model was made for.
    pub max_position_embeddings: usize,
    /// Standard deviation of a fresh weight.
    pub initializer_range: f64,
    /// Beginning of text.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a generation.
    pub eos_token_ids: Vec<u32>,
    /// Padding. Its embedding row takes no gradient from the input side in Transformers.
    pub pad_token_id: Option<u32>,
    /// The ids of `tuning.new_tokens`, whose rows start as the mean of the others; none in a `config.json`.
    pub new_tokens: Vec<u32>,
    /// The rows that are trained by themselves, where their table is not trained whole; none in a `config.json`.
    pub token_rows: TokenRows,
    /// A head of scores in the place of the language model's.
    pub score: Option<ScoreHead>,
    /// The multimodal class that the decoder is a part of, if it is one.
    pub wrapper: Option<&'static Wrapper>,
}

impl Arch {
    /// The longest row: `max_position_embeddings`, or more where the rotary rule of every block stretches it.
    pub fn reach(&self) -> usize {
        let reach = self.ropes.iter().map(|rope| rope.scaling.reach(self.max_position_embeddings)).min();
        reach.unwrap_or(self.max_position_embeddings)
    }

    /// Every tensor of the model in its order, the head's last; `lm_head.weight` is absent when tied.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let mut tensors = vec![tensor(EMBEDDING, &[self.vocab_size, self.hidden_size])];
        tensors.extend((0..self.num_hidden_layers).flat_map(|layer| self.layer_tensors(layer)));
        tensors.push(tensor("model.norm.weight", &[self.hidden_size]));
        if self.head_tensor() != EMBEDDING {
            tensors.push(tensor(self.head_tensor(), &[self.outputs(), self.hidden_size]));
        }
        tensors
    }

    /// How many numbers the head gives for a token: a logit for each entry of the vocabulary, or the scores.
    pub fn outputs(&self) -> usize {
        self.score.as_ref().map_or(self.vocab_size, ScoreHead::outputs)
    }

    /// The tensor that the head multiplies by.
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

    /// What rows are padded with in Transformers, which looks for a row's last token that is another: the end of text where
    /// `config.json` names no padding.
    pub fn padding(&self) -> Option<u32> {
        self.pad_token_id.or_else(|| self.eos_token_ids.first().copied())
    }

    pub(super) fn layer_tensors(&self, layer: usize) -> Vec<TensorSpec> {
        let prefix = format!("model.layers.{layer}");
        let [before_attention, after_attention, before_mlp, after_mlp] = self.norms.names();
        let mut tensors = Vec::new();
        let norm = |tensors: &mut Vec<TensorSpec>, name: Option<&str>, size: usize| {
            tensors.extend(name.map(|name| tensor(&format!("{prefix}.{name}.weight"), &[size])));
        };
        norm(&mut tensors, before_attention, self.hidden_size);
        let mut inside = false;
        for linear in self.layer_linears(layer) {
            if !inside && !linear.name.contains(".self_attn.") {
                inside = true;
                norm(&mut tensors, after_attention, self.hidden_size);
                norm(&mut tensors, before_mlp, self.hidden_size);
            }
            tensors.push(tensor(&format!("{}.weight", linear.name), &[linear.out_features, linear.in_features]));
            if linear.bias {
                tensors.push(tensor(&format!("{}.bias", linear.name), &[linear.out_features]));
            }
            if let Some([query, key]) = self.qk_norm_sizes().filter(|_| linear.name.ends_with(".k_proj")) {
                norm(&mut tensors, Some("self_attn.q_norm"), query);
                norm(&mut tensors, Some("self_attn.k_norm"), key);
            }
        }
        if !inside {
            norm(&mut tensors, after_attention, self.hidden_size);
            norm(&mut tensors, before_mlp, self.hidden_size);
        }
        if let Some(experts) = self.experts_of(layer) {
            let hidden = self.hidden_size;
            tensors.push(tensor(&format!("{prefix}.{}", experts.router()), &[experts.count, hidden]));
            for expert in 0..experts.count {
                let [gate, up, down] = experts.names(expert).map(|name| format!("{prefix}.{name}"));
                tensors.push(tensor(&gate, &[experts.width, hidden]));
                tensors.push(tensor(&up, &[experts.width, hidden]));
                tensors.push(tensor(&down, &[hidden, experts.width]));
            }
        }
        norm(&mut tensors, after_mlp, self.hidden_size);
        tensors
    }

    /// The class of Transformers that loads the model whole.
    pub const fn auto_class(&self) -> &'static str {
        match (&self.score, self.wrapper) {
            (Some(_), _) => "AutoModelForSequenceClassification",
            (None, Some(_)) => "AutoModelForImageTextToText",
            (None, None) => "AutoModelForCausalLM",
        }
    }

    /// The names of a module: its own here, and those that it has inside a multimodal model.
    pub fn names(&self, module: &str) -> Vec<String> {
        let aliases = self.wrapper.map(|wrapper| wrapper.aliases(module));
        std::iter::once(module.to_owned()).chain(aliases.into_iter().flatten()).collect()
    }

    /// The experts of a block, if it has them.
    pub fn experts_of(&self, layer: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|_| self.blocks[layer].sparse)
    }

    /// The routers of the blocks with experts, under their names in Transformers 5.
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

    /// How long the weights of the norms on queries and keys are.
    fn qk_norm_sizes(&self) -> Option<[usize; 2]> {
        match self.qk_norm {
            QkNorm::None => None,
            QkNorm::Head => Some([self.head_dim; 2]),
            QkNorm::Whole => {
                Some([self.num_attention_heads, self.num_key_value_heads].map(|heads| heads * self.head_dim))
            }
        }
    }

    /// Every linear module in model order: those of attention and MLP of each block, then `lm_head` (tied or not), or the scores.
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

    fn layer_linears(&self, layer: usize) -> Vec<LinearSpec> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let experts = self.experts_of(layer);
        let shared = experts.and_then(|experts| experts.shared);
        let (query, key) = (self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim);
        let o = ("self_attn.o_proj", hidden, query, self.o_bias);
        let down = ("mlp.down_proj", hidden, inner, self.mlp_bias);
        let mut linears = if self.fused {
            vec![
                ("self_attn.qkv_proj", query + 2 * key, hidden, self.qkv_bias),
                o,
                ("mlp.gate_up_proj", 2 * inner, hidden, self.mlp_bias),
                down,
            ]
        } else {
            vec![
                ("self_attn.q_proj", query, hidden, self.qkv_bias),
                ("self_attn.k_proj", key, hidden, self.qkv_bias),
                ("self_attn.v_proj", key, hidden, self.qkv_bias),
                o,
                ("mlp.gate_proj", inner, hidden, self.mlp_bias),
                ("mlp.up_proj", inner, hidden, self.mlp_bias),
                down,
            ]
        };
        if experts.is_some() {
            linears.retain(|(name, ..)| name.starts_with("self_attn."));
        }
        if let Some(width) = shared {
            linears.extend([
                ("mlp.shared_expert.gate_proj", width, hidden, false),
                ("mlp.shared_expert.up_proj", width, hidden, false),
                ("mlp.shared_expert.down_proj", hidden, width, false),
                ("mlp.shared_expert_gate", 1, hidden, false),
            ]);
        }
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
    /// How many numbers the tensor holds.
    #[allow(clippy::len_without_is_empty)] // no tensor of a checked model is empty
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

fn tensor(name: &str, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: name.into(), shape: shape.to_vec() }
}
