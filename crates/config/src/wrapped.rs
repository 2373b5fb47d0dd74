//! Checkpoints of multimodal models, in which the language model is one of several parts. `config.json` describes it
//! under `text_config`, or at the top level in Qwen2-VL's files, and its tensors have another prefix. The engine uses
//! the names of a plain language model (`model.layers.0…`, `lm_head`); [`Naming`] converts between the two.

/// A multimodal class of Transformers whose language model belongs to a supported family.
pub struct Wrapper {
    /// The `model_type` in `config.json`, by which a file is recognised.
    pub model_type: &'static str,
    /// The entry of `architectures`, which is the class that loads it.
    pub class_name: &'static str,
    /// Known models of the class, for `tunesmith models`.
    pub models: &'static str,
    /// Tensor names of the decoder in Transformers 5, which PEFT uses too.
    pub naming: Naming,
    /// The `model_type` of the language model if `text_config` has none.
    pub(super) text: &'static str,
    pub(super) tied: bool,
    /// Whether `tie_word_embeddings` in `text_config` also ties the head.
    pub(super) text_ties: bool,
    /// Whether the class applies the language model's soft cap on logits and its factor on them. Most classes apply
    /// neither.
    pub(super) caps_logits: bool,
}

/// How a checkpoint, or an adapter, names the tensors of its decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Naming {
    /// The prefix of the blocks, the embedding and the final norm.
    base: &'static str,
    /// The name of the embedding after this prefix.
    embedding: &'static str,
    /// The name of the list of blocks after this prefix.
    blocks: &'static str,
    /// The name of the head's module.
    head: &'static str,
}

/// Names of Transformers before 4.52, which most checkpoints have on disk.
const OLD: Naming = Naming { base: "language_model.model.", head: "language_model.lm_head", ..NEW };
const NEW: Naming =
    Naming { base: "model.language_model.", embedding: "embed_tokens", blocks: "layers", head: "lm_head" };
/// Names since Transformers 4.52 in classes that call the decoder `text_model`.
const TEXT: Naming = Naming { base: "model.text_model.", ..NEW };
/// Nemotron-H's names on disk, and in Transformers 5.
const BACKBONE: Naming = Naming { base: "backbone.", embedding: EMBEDDINGS, ..NEW };
const MODEL: Naming = Naming { base: "model.", ..BACKBONE };
/// Nemotron-H's embedding.
const EMBEDDINGS: &str = "embeddings";
/// The prefix of the encoder's tensors in a `VisionEncoderDecoderModel`.
pub(super) const ENCODER: &str = "encoder.";
/// The linear module from the encoder's width to the decoder's in a `VisionEncoderDecoderModel`.
pub(super) const PROJECTION: &str = "enc_to_dec_proj";
/// GPT-2's names in a `VisionEncoderDecoderModel`.
const DECODER: Naming = Naming { base: "decoder.transformer.", head: "decoder.lm_head", ..Naming::GPT2 };
/// GPT-2's names without their first part, as the files of the class without a head have them.
const BARE_GPT2: Naming = Naming { base: "", ..Naming::GPT2 };

/// An image encoder and a GPT-2 whose blocks read its output by cross-attention. `config.json` describes the decoder under `decoder`.
pub static ENCODER_DECODER: Wrapper = Wrapper {
    model_type: "vision-encoder-decoder",
    class_name: "VisionEncoderDecoderModel",
    models: "ViT-GPT2 captioners",
    naming: DECODER,
    text: "gpt2",
    tied: true,
    text_ties: true,
    caps_logits: true,
};

const LLAVA: Wrapper = Wrapper {
    model_type: "llava",
    class_name: "LlavaForConditionalGeneration",
    models: "LLaVA 1.5, Pixtral 12B",
    naming: NEW,
    text: "llama",
    tied: false,
    text_ties: true,
    caps_logits: false,
};

const GEMMA4: Wrapper = Wrapper {
    model_type: "gemma4",
    class_name: "Gemma4ForConditionalGeneration",
    models: "Gemma 4 E2B, E4B, 26B-A4B and 31B",
    text: "gemma4_text",
    tied: true,
    text_ties: false,
    caps_logits: true,
    ..LLAVA
};

/// The multimodal classes whose language models are supported.
pub static WRAPPERS: &[Wrapper] = &[
    Wrapper {
        model_type: "gemma3",
        class_name: "Gemma3ForConditionalGeneration",
        models: "Gemma 3 4B, 12B and 27B",
        text: "gemma3_text",
        tied: true,
        text_ties: false,
        ..LLAVA
    },
    Wrapper {
        model_type: "gemma3n",
        class_name: "Gemma3nForConditionalGeneration",
        models: "Gemma 3n E2B and E4B",
        text: "gemma3n_text",
        tied: true,
        text_ties: false,
        caps_logits: true,
        ..LLAVA
    },
    LLAVA,
    Wrapper {
        model_type: "llava_next",
        class_name: "LlavaNextForConditionalGeneration",
        models: "LLaVA-NeXT, Granite Vision 3",
        text_ties: false,
        ..LLAVA
    },
    Wrapper {
        model_type: "llava_next_video",
        class_name: "LlavaNextVideoForConditionalGeneration",
        models: "LLaVA-NeXT-Video",
        ..LLAVA
    },
    Wrapper {
        model_type: "llava_onevision",
        class_name: "LlavaOnevisionForConditionalGeneration",
        models: "LLaVA-OneVision",
        text: "qwen2",
        ..LLAVA
    },
    Wrapper {
        model_type: "vipllava",
        class_name: "VipLlavaForConditionalGeneration",
        models: "ViP-LLaVA",
        text_ties: false,
        ..LLAVA
    },
    Wrapper {
        model_type: "video_llava",
        class_name: "VideoLlavaForConditionalGeneration",
        models: "Video-LLaVA",
        text_ties: false,
        ..LLAVA
    },
    Wrapper {
        model_type: "mistral3",
        class_name: "Mistral3ForConditionalGeneration",
        models: "Mistral Small 3.1, 3.2 and 4, Ministral 3",
        text: "mistral",
        tied: true,
        text_ties: false,
        ..LLAVA
    },
    Wrapper {
        model_type: "paligemma",
        class_name: "PaliGemmaForConditionalGeneration",
        models: "PaliGemma, PaliGemma 2",
        text: "gemma",
        tied: true,
        text_ties: false,
        caps_logits: true,
        ..LLAVA
    },
    Wrapper {
        model_type: "idefics2",
        class_name: "Idefics2ForConditionalGeneration",
        models: "Idefics2",
        naming: TEXT,
        text: "mistral",
        text_ties: false,
        ..LLAVA
    },
    Wrapper {
        model_type: "idefics3",
        class_name: "Idefics3ForConditionalGeneration",
        models: "Idefics3",
        naming: TEXT,
        text_ties: false,
        ..LLAVA
    },
    Wrapper {
        model_type: "smolvlm",
        class_name: "SmolVLMForConditionalGeneration",
        models: "SmolVLM, SmolVLM2",
        naming: TEXT,
        text_ties: false,
        ..LLAVA
    },
    Wrapper {
        model_type: "internvl",
        class_name: "InternVLForConditionalGeneration",
        models: "InternVL3 and 3.5 in Transformers' form",
        text: "qwen2",
        tied: true,
        text_ties: false,
        ..LLAVA
    },
    Wrapper {
        model_type: "qwen2_vl",
        class_name: "Qwen2VLForConditionalGeneration",
        models: "Qwen2-VL",
        text: "qwen2_vl_text",
        ..LLAVA
    },
    Wrapper {
        model_type: "qwen2_5_vl",
        class_name: "Qwen2_5_VLForConditionalGeneration",
        models: "Qwen2.5-VL",
        text: "qwen2_5_vl_text",
        ..LLAVA
    },
    Wrapper {
        model_type: "qwen3_vl",
        class_name: "Qwen3VLForConditionalGeneration",
        models: "Qwen3-VL (dense)",
        text: "qwen3_vl_text",
        text_ties: false,
        ..LLAVA
    },
    GEMMA4,
    Wrapper {
        model_type: "gemma4_unified",
        class_name: "Gemma4UnifiedForConditionalGeneration",
        models: "Gemma 4 12B",
        text: "gemma4_unified_text",
        ..GEMMA4
    },
    Wrapper {
        model_type: "qwen3_5",
        class_name: "Qwen3_5ForConditionalGeneration",
        models: "Qwen3.5 0.8B to 27B, Qwen3.6 and Qwen3.8 27B",
        text: "qwen3_5_text",
        text_ties: false,
        ..LLAVA
    },
    Wrapper {
        model_type: "qwen3_5_moe",
        class_name: "Qwen3_5MoeForConditionalGeneration",
        models: "Qwen3.5 35B-A3B, 122B-A10B and 397B-A17B, Qwen3.6 35B-A3B",
        text: "qwen3_5_moe_text",
        text_ties: false,
        ..LLAVA
    },
    Wrapper {
        model_type: "muse_glimmer",
        class_name: "MuseGlimmerForConditionalGeneration",
        models: "Muse Glimmer 30B",
        text: "muse_glimmer_text",
        text_ties: false,
        caps_logits: true,
        ..LLAVA
    },
];

impl PartialEq for Wrapper {
    fn eq(&self, other: &Self) -> bool {
        self.model_type == other.model_type
    }
}

impl std::fmt::Debug for Wrapper {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(self.model_type)
    }
}

impl Wrapper {
    /// A module's name in Transformers 5, from its name in a plain language model.
    pub fn module(&self, plain: &str) -> String {
        self.naming.stored(plain)
    }

    /// Names under which a user's pattern may match a module: as in Transformers 5, then as before 4.52.
    pub fn aliases(&self, plain: &str) -> [String; 2] {
        [self.naming.stored(plain), OLD.stored(plain)]
    }
}

impl Naming {
    /// GPT-2's names on disk, and in Transformers and PEFT.
    pub const GPT2: Self = Self { base: "transformer.", embedding: "wte", blocks: "h", head: "lm_head" };

    /// The naming that a checkpoint uses; `None` for a plain language model. `has` says whether the checkpoint has a
    /// tensor.
    pub fn find(has: &dyn Fn(&str) -> bool) -> Option<Self> {
        let has_embedding = |naming: &Self| has(&format!("{}{}.weight", naming.base, naming.embedding));
        let found =
            [OLD, NEW, TEXT, BACKBONE, MODEL, DECODER, Self::GPT2, BARE_GPT2].into_iter().find(has_embedding)?;
        // Each name of the head occurs with each prefix.
        let other = [OLD.head, NEW.head].into_iter().find(|head| has(&format!("{head}.weight")));
        Some(Self { head: other.unwrap_or(found.head), ..found })
    }

    /// The names that a stored tensor may have in a plain language model, if its name is in any of the namings.
    pub fn plain_in_any(stored: &str) -> impl Iterator<Item = String> {
        [OLD, NEW, TEXT, BACKBONE, MODEL, DECODER, Self::GPT2].into_iter().filter_map(|naming| naming.plain(stored))
    }

    /// Converts a key of `rank_pattern` or `alpha_pattern` that begins with one of the engine's names (perhaps after
    /// `^`) to the stored names. Any other key stays as it is.
    pub fn pattern(self, key: &str) -> String {
        let (anchor, rest) = key.strip_prefix('^').map_or(("", key), |rest| ("^", rest));
        let blocks =
            |rest: &str| rest.strip_prefix("layers").map_or(rest.to_owned(), |rest| format!("{}{rest}", self.blocks));
        match (rest.strip_prefix("model."), rest.strip_prefix(r"model\.")) {
            (Some(rest), _) => format!("{anchor}{}{}", self.base, blocks(rest)),
            (None, Some(rest)) => format!("{anchor}{}{}", self.base.replace('.', r"\."), blocks(rest)),
            (None, None) => key.to_owned(),
        }
    }

    /// Whether a checkpoint belongs to a family whose files name the decoder's tensors differently from the engine:
    /// Nemotron-H and GPT-2.
    pub fn is_own(has: &dyn Fn(&str) -> bool) -> bool {
        let has_embedding = |naming: &Self| has(&format!("{}{}.weight", naming.base, naming.embedding));
        [BACKBONE, MODEL, Self::GPT2, BARE_GPT2].iter().any(has_embedding)
    }

    /// The naming under which such a checkpoint is written again.
    #[must_use]
    pub fn written(self) -> Self {
        if self.base.is_empty() { Self { base: Self::GPT2.base, ..self } } else { self }
    }

    /// The name of a tensor or module in a plain language model; `None` for what is not part of the decoder, such as the vision tower.
    pub fn plain(self, stored: &str) -> Option<String> {
        let inner = stored.strip_prefix(self.base).map(|rest| {
            let in_blocks = rest.strip_prefix(self.blocks).filter(|rest| rest.is_empty() || rest.starts_with('.'));
            match (rest.strip_prefix(self.embedding), in_blocks) {
                (Some(rest), _) => format!("model.embed_tokens{rest}"),
                (None, Some(rest)) => format!("model.layers{rest}"),
                (None, None) => format!("model.{rest}"),
            }
        });
        let head = stored.strip_prefix(self.head).map(|rest| format!("lm_head{rest}"));
        // A classification head has one name everywhere.
        let score = stored.starts_with("score.").then(|| stored.to_owned());
        inner.into_iter().chain(head).chain(score).find(|name| is_decoders(name))
    }

    /// The stored name of a tensor or module: the inverse of [`Naming::plain`]. Encoder and connector have the same
    /// name in both.
    pub fn stored(self, plain: &str) -> String {
        if is_beside(plain) {
            return plain.to_owned();
        }
        match (plain.strip_prefix("model."), plain.strip_prefix("lm_head")) {
            (Some(rest), _) => match (rest.strip_prefix("embed_tokens"), rest.strip_prefix("layers")) {
                (Some(rest), _) => format!("{}{}{rest}", self.base, self.embedding),
                (None, Some(rest)) => format!("{}{}{rest}", self.base, self.blocks),
                (None, None) => format!("{}{rest}", self.base),
            },
            (None, Some(rest)) => format!("{}{rest}", self.head),
            (None, None) => plain.to_owned(),
        }
    }
}

/// Whether a tensor or module belongs to the vision or audio part of a multimodal model.
pub fn is_beside(plain: &str) -> bool {
    let parts = ["vision", "visual", "image", "video", "audio", "projector", "connector", "perceiver", "world_encoder"];
    let of_pair =
        [ENCODER, PROJECTION].iter().any(|part| plain.starts_with(part)) || plain == ENCODER.trim_end_matches('.');
    !is_decoders(plain) && (of_pair || parts.iter().any(|part| plain.contains(part)))
}

/// Whether a tensor or module belongs to the decoder; `plain` is its name in a plain language model.
pub fn is_decoders(plain: &str) -> bool {
    let parts = [
        "model.embed_tokens",
        "model.embed_tokens_per_layer",
        "model.per_layer_model_projection",
        "model.per_layer_projection_norm",
        "model.altup_projections",
        "model.altup_unembed_projections",
        "model.layers",
        "model.norm",
        "model.embedding_norm",
        "model.norm_f",
        "model.wpe",
        "model.ln_f",
        "model.rotary_emb",
        "lm_head",
        "score",
    ];
    parts.iter().any(|part| plain.strip_prefix(part).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
}

/// The name of a tensor or module in a plain language model, whatever naming `name` follows. Any other name stays as it
/// is.
pub fn plain_name(name: &str) -> String {
    [OLD, NEW, TEXT, MODEL, DECODER, Naming::GPT2]
        .into_iter()
        .find_map(|naming| naming.plain(name))
        .unwrap_or_else(|| name.to_owned())
}
