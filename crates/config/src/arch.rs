//! A decoder's architecture: its family, its sizes, and the names and shapes of its tensors. Everything is checked when
//! `config.json` is read.
pub use super::arch_parts::{
    AltUpSpec, AttentionSpec, BlockSpec, BranchSpec, CrossAttentionSpec, GateSpec, HiddenAct, NormPlacement, PartSpec,
    PerLayerSpec, QkNorm,
};
pub use super::classification_head::{SCORE, ScoreHead};
pub use super::experts::{Clamp, ExpertGroups, ExpertNames, Experts, RouterSpec, SharedExpert};
pub use super::family::{Family, Gguf};
pub use super::mixers::{DeltaNetNames, DeltaNetSpec, LatentSpec, MambaSpec, ShortConvSpec};
pub use super::module_names::ModuleNames;
pub use super::rope::{Frequencies, QueryScaling, Rope, RopeScaling};
pub use super::tensor_specs::{LinearSpec, TensorSpec};
pub use super::vocabulary::{EMBEDDING, LM_HEAD, TokenRows, Vocabulary};
pub use super::wrapped::{ENCODER_DECODER, Naming, WRAPPERS, Wrapper, is_beside, is_decoders, plain_name};

use super::bitsandbytes::Bitsandbytes;
use super::stored_format::StoredFormat;
use super::vision::VisionArch;
use std::sync::Arc;

/// The end of the name of the tensor that a block's output is multiplied by.
pub const LAYER_SCALAR: &str = ".layer_scalar";
/// Tensor name of the table of learned positions, `[max_position_embeddings, hidden_size]`.
pub const POSITIONS: &str = "model.wpe.weight";
/// Tensor name of the per-layer embeddings, `[per_layer.vocab_size, num_hidden_layers * per_layer.width]`.
pub const PER_LAYER_EMBEDDING: &str = "model.embed_tokens_per_layer.weight";
/// Module name of the projection from the token embedding to the per-layer embeddings.
pub const PER_LAYER_PROJECTION: &str = "model.per_layer_model_projection";
/// Tensor name of the norm on the output of this projection, `[per_layer.width]`.
pub const PER_LAYER_NORM: &str = "model.per_layer_projection_norm.weight";

/// Module name of the projections that make further streams from the embedding (`AltUp`). They are numbered.
pub const ALTUP_PROJECTIONS: &str = "model.altup_projections";
/// Module name of the projections that join the streams after the last block (`AltUp`). They are numbered.
pub const ALTUP_UNEMBED_PROJECTIONS: &str = "model.altup_unembed_projections";

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
    /// The names of its modules.
    pub module_names: &'static ModuleNames,
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
    /// Whether the final norm multiplies by its weights as they are, although other norms add 1 to theirs (Muse
    /// Glimmer).
    pub plain_final_norm: bool,
    /// Added to the mean square in the norms on the outputs of branches; `None` if it is `rms_norm_eps`.
    pub post_norm_eps: Option<f64>,
    /// Whether norms are `LayerNorm`s, which have a bias (GPT-2).
    pub layer_norms: bool,
    /// Whether each position has an embedding of its own, which is added to the token's (GPT-2). There are none beyond
    /// `max_position_embeddings`.
    pub learned_positions: bool,
    /// Norms on queries and keys.
    pub qk_norm: QkNorm,
    /// Whether these norms follow the rotary embedding.
    pub qk_norm_after_rope: bool,
    /// One entry for each of the `num_hidden_layers` blocks.
    pub blocks: Vec<BlockSpec>,
    /// The rotary embeddings that [`AttentionSpec::rope`] refers to.
    pub ropes: Vec<Rope>,
    /// Factor on attention scores, before the softmax.
    pub attention_scale: f64,
    /// Whether scores of the block with index `i` are also divided by `i + 1` (GPT-2).
    pub scale_by_layer: bool,
    /// How queries of late positions are scaled.
    pub query_scaling: Option<QueryScaling>,
    /// Soft cap of attention scores: `cap * tanh(score / cap)`.
    pub attention_softcap: Option<f64>,
    /// Soft cap of logits: `cap * tanh(logit / cap)`.
    pub logit_softcap: Option<f64>,
    /// Factor on the embedding's output.
    pub embedding_scale: f64,
    /// Whether Transformers applies `embedding_scale` outside the embedding module. Noise on the module's output (`NEFTune`) is then
    /// scaled too.
    pub embedding_scaled_outside: bool,
    /// Whether the embedding module ends with a norm without weights (Muse Glimmer).
    pub embedding_norm: bool,
    /// Factor on the output of attention and MLP, before it is added to the residual stream.
    pub residual_scale: f64,
    /// Factor on the output of the head.
    pub logit_scale: f64,
    /// Activation on the gate of the MLP.
    pub activation: HiddenAct,
    /// Whether q, k and v are one module, `qkv_proj` (Phi-3).
    pub fused: bool,
    /// The experts of sparse blocks; `None` in a dense model.
    pub experts: Option<Experts>,
    /// Whether files may have heads that predict further tokens (`mtp.*`, or blocks after the last one). They are
    /// neither run nor trained.
    pub predicts_ahead: bool,
    /// Per-layer embeddings; `None` without them.
    pub per_layer: Option<PerLayerSpec>,
    /// The first token id that stands for an image or sound (Gemma 3n). An encoder's table embeds this id and all
    /// higher ones. `None` if every id is text.
    pub media_ids: Option<usize>,
    /// Several residual streams (`AltUp`); `None` for a single one.
    pub altup: Option<AltUpSpec>,
    /// Whether each block's output is multiplied by a number from the checkpoint, which is not trained (Gemma 4).
    pub layer_scalar: bool,
    /// Whether `lm_head` shares the embedding's matrix.
    pub tie_word_embeddings: bool,
    /// Whether a tied head has been given a matrix of its own for training, which starts as a copy of the embedding's.
    pub separated: bool,
    /// Whether each query head has a sink: a logit that only adds to the denominator of the softmax (gpt-oss).
    pub sinks: bool,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// Bias on the attention's output projection.
    pub o_bias: bool,
    /// Biases on the projections of the MLP.
    pub mlp_bias: bool,
    /// Context length of the pretraining, in tokens.
    pub max_position_embeddings: usize,
    /// A key of `config.json` that asks for dropout in training, with its rate. Only the check before training reads
    /// it.
    pub dropout: Option<(&'static str, f64)>,
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
    /// The classification head, if it replaces `lm_head`.
    pub score: Option<ScoreHead>,
    /// The multimodal class that holds the decoder; `None` for a plain language model.
    pub wrapper: Option<&'static Wrapper>,
    /// How the files store quantized matrices, in the format of their maker; `None` if they are not quantized so.
    pub stored: Option<StoredFormat>,
    /// How bitsandbytes has quantized the matrices; `None` if it has not.
    pub bitsandbytes: Option<Bitsandbytes>,
    /// How the model reads images, in a run that has some. `None` after reading a `config.json`.
    pub vision: Option<Arc<VisionArch>>,
}

/// The token ids that a text may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextIds {
    /// All ids must be below this number.
    pub vocab_size: usize,
    /// The first id that stands for an image or sound ([`Arch::media_ids`]): ids of text are below it.
    /// `None`: all ids below `vocab_size` are text.
    pub media_ids: Option<usize>,
}

impl From<usize> for TextIds {
    /// All ids below `vocab_size` are text.
    fn from(vocab_size: usize) -> Self {
        Self { vocab_size, media_ids: None }
    }
}

impl Arch {
    /// The longest sequence in tokens: `max_position_embeddings`, or more if rotary scaling extends it in every block.
    pub fn reach(&self) -> usize {
        let reach = self.ropes.iter().map(|rope| rope.scaling.reach(self.max_position_embeddings)).min();
        reach.unwrap_or(self.max_position_embeddings)
    }

    /// Name of the tensor of the norm behind the last block.
    pub fn final_norm(&self) -> String {
        format!("model.{}.weight", self.module_names.final_norm)
    }

    /// Every tensor of the model in the order of the forward pass. A tied `lm_head.weight` is left out.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let mut tensors = vec![TensorSpec::new(EMBEDDING, &[self.vocab_size, self.hidden_size])];
        let matrix = |linear: LinearSpec| TensorSpec::new(&linear.weight(), &[linear.out_features, linear.in_features]);
        if self.learned_positions {
            tensors.push(TensorSpec::new(POSITIONS, &[self.max_position_embeddings, self.hidden_size]));
        }
        tensors.extend(self.per_layer_tensors());
        tensors.extend(self.stream_linears(ALTUP_PROJECTIONS).map(matrix));
        tensors.extend((0..self.num_hidden_layers).flat_map(|layer| self.layer_tensors(layer)));
        tensors.extend(self.stream_linears(ALTUP_UNEMBED_PROJECTIONS).map(matrix));
        tensors.extend(self.norm_tensors(&format!("model.{}", self.module_names.final_norm)));
        if self.head_tensor() != EMBEDDING {
            tensors.push(TensorSpec::new(self.head_tensor(), &[self.outputs(), self.hidden_size]));
        }
        tensors
    }

    /// The tensors that can be trained: all except buffers of Transformers.
    pub fn parameters(&self) -> Vec<TensorSpec> {
        self.tensors().into_iter().filter(|spec| !self.is_buffer(&spec.name)).collect()
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

    /// The token ids that a text may have.
    pub const fn text_ids(&self) -> TextIds {
        TextIds { vocab_size: self.vocab_size, media_ids: self.media_ids }
    }

    /// The padding token, or else the first end-of-sequence token. Transformers classifies by the last token of a row
    /// that is not padding.
    pub fn padding(&self) -> Option<u32> {
        self.pad_token_id.or_else(|| self.eos_token_ids.first().copied())
    }

    /// Whether a run with images freezes the decoder, except for rows of new tokens.
    pub fn freezes_language(&self) -> bool {
        self.vision.as_ref().is_some_and(|vision| vision.training.freeze_language)
    }

    /// The auto class of Transformers that loads the whole model. `None` if there is none: the image encoder is in files of its
    /// own, or there is a second one. `scripts/load_vision.py` loads these.
    pub fn auto_class(&self) -> Option<&'static str> {
        if self.vision.as_ref().is_some_and(|vision| vision.folder.is_some() || vision.world.is_some()) {
            return None;
        }
        Some(match (&self.score, self.wrapper) {
            (Some(_), _) => "AutoModelForSequenceClassification",
            (None, Some(_)) => "AutoModelForImageTextToText",
            (None, None) => "AutoModelForCausalLM",
        })
    }

    /// Weight and bias of the norm `module` on the stream.
    pub(super) fn norm_tensors(&self, module: &str) -> impl Iterator<Item = TensorSpec> {
        let bias = self.layer_norms.then_some("bias");
        let tensor = move |end| TensorSpec::new(&format!("{module}.{end}"), &[self.hidden_size]);
        std::iter::once("weight").chain(bias).map(tensor)
    }

    /// How Transformers and PEFT name the decoder's tensors, if they differ from the engine in more than the embedding.
    pub fn naming(&self) -> Option<Naming> {
        self.wrapper.map(|wrapper| wrapper.naming).or(self.module_names.naming)
    }

    /// Whether files name the decoder's tensors differently from the engine: in a multimodal model, or if the embedding
    /// has another name.
    pub fn is_renamed(&self) -> bool {
        self.wrapper.is_some() || self.module_names.embedding != ModuleNames::LLAMA.embedding
    }

    /// The name of a module in Transformers 5, which PEFT matches; `module` is the engine's.
    pub fn transformers_name(&self, module: &str) -> String {
        match (self.wrapper, self.module_names.naming) {
            (Some(wrapper), _) => wrapper.module(module),
            (None, Some(naming)) => naming.stored(module),
            (None, None) => self.names(module).pop().unwrap_or_else(|| module.to_owned()),
        }
    }

    /// All names by which a module may be called: that in a plain language model, then those in the multimodal model.
    pub fn names(&self, module: &str) -> Vec<String> {
        if let (Some(naming), None) = (self.module_names.naming, self.wrapper) {
            return vec![module.to_owned(), naming.stored(module)];
        }
        let aliases = self.wrapper.map(|wrapper| wrapper.aliases(module));
        let embedding =
            module.strip_prefix("model.embed_tokens").filter(|_| self.wrapper.is_none() && self.is_renamed());
        let embedding = embedding.map(|rest| format!("model.{}{rest}", self.module_names.embedding));
        std::iter::once(module.to_owned()).chain(aliases.into_iter().flatten()).chain(embedding).collect()
    }

    /// The experts of block `layer`; `None` for a dense block.
    pub fn experts_of(&self, layer: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|_| self.blocks[layer].has_experts())
    }

    /// The attention of each block that has one, in order.
    pub fn attentions(&self) -> impl Iterator<Item = &AttentionSpec> {
        self.blocks.iter().filter_map(BlockSpec::attention)
    }

    /// Whether its blocks read the rows of an image by cross-attention: each text then needs one image.
    pub fn reads_images_across(&self) -> bool {
        self.blocks.iter().any(|block| block.cross_attention().is_some())
    }

    /// As [`Arch::attentions`], to change them.
    pub fn attentions_mut(&mut self) -> impl Iterator<Item = &mut AttentionSpec> {
        self.blocks.iter_mut().filter_map(BlockSpec::attention_mut)
    }

    /// Removes a rotary embedding that rotates no feature (`partial_rotary_factor: 0`). The model then has no
    /// positions.
    pub(super) fn drop_still_rope(&mut self) {
        if self.ropes.len() == 1 && self.ropes[0].rotary_dim == 0 {
            self.attentions_mut().for_each(|attention| attention.rope = None);
            self.ropes.clear();
        }
    }

    /// The attention that all blocks have, apart from windows and rotary embeddings; `None` if blocks differ in more.
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
}
