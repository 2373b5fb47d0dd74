//! Checkpoints in which the language model is one part of several: `config.json` describes it under `text_config`, or, in
//! Qwen2-VL's files, beside the rest, and the names of its tensors have another beginning. The engine knows the decoder by
//! the names that it has alone (`model.layers.0…`, `lm_head`); [`Naming`] turns one into the other.
use serde_json::{Map, Value};

use super::arch::{Arch, FAMILIES};
use super::hf_json::Source;
use tunesmith_base::error::{Error, Result};

/// A multimodal class of Transformers whose language model is one of [`FAMILIES`].
pub struct Wrapper {
    /// The `model_type` of `config.json`.
    pub model_type: &'static str,
    /// The entry of `architectures`, which is the class that loads it.
    pub class_name: &'static str,
    /// Models that come in this form, as people call them.
    pub models: &'static str,
    /// How Transformers 5 names the decoder's tensors, and PEFT with it.
    pub naming: Naming,
    /// The language model where `text_config` does not name one.
    text: &'static str,
    /// `tie_word_embeddings` where the key is absent.
    tied: bool,
    /// A `tie_word_embeddings` of `text_config` counts too.
    text_ties: bool,
    /// The class caps logits as the language model alone does; others multiply by the head and leave it at that.
    caps_logits: bool,
}

/// How a checkpoint, or an adapter, names the tensors of its decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Naming {
    /// What stands before `layers`, `embed_tokens` and `norm`.
    base: &'static str,
    /// The head.
    head: &'static str,
}

/// Names of Transformers before 4.52, which most checkpoints have on disk.
const OLD: Naming = Naming { base: "language_model.model.", head: "language_model.lm_head" };
/// Names of Transformers since.
const NEW: Naming = Naming { base: "model.language_model.", head: "lm_head" };
/// The same, where the part has another name.
const TEXT: Naming = Naming { base: "model.text_model.", head: "lm_head" };

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

/// Every multimodal class that is read.
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
        models: "Mistral Small 3.1 and 3.2",
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
];

/// What a text configuration's class in Transformers assumes where `text_config` leaves a key out, beyond what the family's
/// reader assumes already. `family`: as which of [`FAMILIES`] it is read: on text the three positions of Qwen's VL models are
/// the same, and turn heads as plain ones do.
struct Text {
    model_type: &'static str,
    family: &'static str,
    /// `vocab_size`, `hidden_size`, `intermediate_size`, `num_hidden_layers`, `num_attention_heads`.
    sizes: [u64; 5],
    /// `bos_token_id`, `eos_token_id`.
    ends: [Option<u64>; 2],
    /// Further keys, as JSON.
    more: &'static str,
}

const SIZES: [&str; 5] = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"];

const fn text(name: &'static str, sizes: [u64; 5], ends: [Option<u64>; 2]) -> Text {
    Text { model_type: name, family: name, sizes, ends, more: "{}" }
}

const QWEN_VL: Text = Text {
    model_type: "qwen2_vl_text",
    family: "qwen2",
    sizes: [152_064, 8192, 29_568, 80, 64],
    ends: [Some(151_643), Some(151_645)],
    more: r#"{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}"#,
};

/// `tests/golden/wrapped/defaults.json` has what the classes say.
static TEXTS: &[Text] = &[
    text("llama", [32_000, 4096, 11_008, 32, 32], [Some(1), Some(2)]),
    text("qwen2", [151_936, 4096, 22_016, 32, 32], [None, None]),
    text("qwen3", [151_936, 4096, 22_016, 32, 32], [None, None]),
    text("gemma", [256_000, 3072, 24_576, 28, 16], [Some(2), Some(1)]),
    text("gemma2", [256_000, 2304, 9216, 26, 8], [Some(2), Some(1)]),
    text("gemma3_text", [262_208, 2304, 9216, 26, 8], [Some(2), Some(1)]),
    text("mistral", [32_000, 4096, 14_336, 32, 32], [Some(1), Some(2)]),
    text("phi3", [32_064, 3072, 8192, 32, 32], [Some(1), Some(32_000)]),
    text("smollm3", [128_256, 2048, 11_008, 36, 16], [Some(128_000), Some(128_001)]),
    text("olmo2", [50_304, 4096, 11_008, 32, 32], [None, Some(50_279)]),
    text("olmo3", [50_304, 4096, 11_008, 32, 32], [None, Some(50_279)]),
    text("granite", [32_000, 4096, 11_008, 32, 32], [Some(1), Some(2)]),
    QWEN_VL,
    Text { model_type: "qwen2_5_vl_text", ..QWEN_VL },
    Text {
        model_type: "qwen3_vl_text",
        family: "qwen3",
        sizes: [151_936, 4096, 22_016, 32, 32],
        ends: [None, None],
        more: r#"{"max_position_embeddings": 128000, "rope_theta": 5e5}"#,
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
    /// Whether a `config.json` says that the head is the embedding; the part of it that is the language model's.
    fn ties(&self, whole: &Source<'_>, text: &Map<String, Value>) -> Result<bool> {
        let key = "tie_word_embeddings";
        let of_text = text.get(key).and_then(Value::as_bool) == Some(true);
        let counts = self.text_ties || whole.get(key).is_none();
        Ok(whole.flag(key, self.tied)? || (counts && of_text))
    }

    /// What the class computes otherwise than the language model alone.
    pub(super) fn adjust(&self, arch: &mut Arch) {
        if !self.caps_logits {
            arch.logit_softcap = None;
        }
        arch.logit_scale = 1.0;
    }

    /// A module's name in Transformers.
    pub fn module(&self, plain: &str) -> String {
        self.naming.stored(plain)
    }

    /// A key of PEFT's patterns with a name that it begins with as in Transformers.
    pub fn pattern(&self, key: &str) -> String {
        let (anchor, rest) = key.strip_prefix('^').map_or(("", key), |rest| ("^", rest));
        let base = self.naming.base;
        match (rest.strip_prefix("model."), rest.strip_prefix(r"model\.")) {
            (Some(rest), _) => format!("{anchor}{base}{rest}"),
            (None, Some(rest)) => format!("{anchor}{}{rest}", base.replace('.', r"\.")),
            (None, None) => key.to_owned(),
        }
    }

    /// The names by which a pattern may mean a module: its own in Transformers 5, then in older versions.
    pub fn aliases(&self, plain: &str) -> [String; 2] {
        [self.naming.stored(plain), OLD.stored(plain)]
    }
}

impl Arch {
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
}

impl Naming {
    /// How the tensors of a checkpoint are named, if not as those of a language model alone. `has`: whether it holds a tensor.
    pub fn find(has: &dyn Fn(&str) -> bool) -> Option<Self> {
        let found = [OLD, NEW, TEXT].into_iter().find(|naming| has(&format!("{}embed_tokens.weight", naming.base)))?;
        // Either head may stand beside either base.
        let other = [OLD.head, NEW.head].into_iter().find(|head| has(&format!("{head}.weight")));
        Some(Self { head: other.unwrap_or(found.head), ..found })
    }

    /// The name that a tensor or module of the decoder has in a language model alone; nothing for what is no part of one.
    pub fn plain(self, stored: &str) -> Option<String> {
        let inner = stored.strip_prefix(self.base).map(|rest| format!("model.{rest}"));
        let head = || stored.strip_prefix(self.head).map(|rest| format!("lm_head{rest}"));
        inner.or_else(head).filter(|name| is_decoders(name))
    }

    /// The opposite of [`Naming::plain`].
    pub fn stored(self, plain: &str) -> String {
        match (plain.strip_prefix("model."), plain.strip_prefix("lm_head")) {
            (Some(rest), _) => format!("{}{rest}", self.base),
            (None, Some(rest)) => format!("{}{rest}", self.head),
            (None, None) => plain.to_owned(),
        }
    }
}

/// Whether a tensor or module is of a decoder, by the name that it has in a language model alone.
pub fn is_decoders(plain: &str) -> bool {
    let parts = ["model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head", "score"];
    parts.iter().any(|part| plain.strip_prefix(part).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
}

/// The name that a tensor or module has in a language model alone, whichever way it is written.
pub fn plain_name(name: &str) -> String {
    [OLD, NEW, TEXT].into_iter().find_map(|naming| naming.plain(name)).unwrap_or_else(|| name.to_owned())
}

impl Source<'_> {
    /// The part that describes the language model, completed by what the classes assume; and what it is wrapped in.
    pub(super) fn language_model(self) -> Result<(Self, Option<&'static Wrapper>)> {
        let kind = self.text("model_type")?.unwrap_or_default();
        let Some(wrapper) = WRAPPERS.iter().find(|wrapper| wrapper.model_type == kind) else {
            let known = FAMILIES.iter().any(|family| family.model_type == kind);
            return match self.get("text_config").filter(|_| !known && !kind.is_empty()) {
                Some(_) => Err(self.unknown_wrapper(kind)),
                None => Ok((self, None)),
            };
        };
        self.check_class(&[wrapper.class_name])?;
        let own = match self.get("text_config") {
            Some(Value::Object(text)) => text.clone(),
            None if !self.has("text_config") && wrapper.text.ends_with("_vl_text") => self.flat(),
            Some(_) | None => return Err(self.mismatch("text_config", "an object that describes the language model")),
        };
        let tied = wrapper.ties(&self, &own)?;
        let prefix = if self.has("text_config") { "text_config." } else { "" };
        let mut text = Source { origin: self.origin, map: own, prefix: prefix.into() };
        let kind = text.text("model_type")?.unwrap_or(wrapper.text).to_owned();
        let kind = if prefix.is_empty() { wrapper.text } else { kind.as_str() };
        let about = TEXTS.iter().find(|about| about.model_type == kind);
        let about = about.ok_or_else(|| self.unknown_text(wrapper, kind))?;
        text.complete(about);
        text.map.insert("model_type".into(), about.family.into());
        text.map.insert("tie_word_embeddings".into(), tied.into());
        // Said of the whole.
        for key in ["quantization_config", "eos_token_id", "bos_token_id"] {
            if let Some(value) = self.get(key).filter(|_| text.get(key).is_none()) {
                text.map.insert(key.into(), value.clone());
            }
        }
        for (key, id) in ["bos_token_id", "eos_token_id"].into_iter().zip(about.ends) {
            if let Some(id) = id {
                text.map.entry(key).or_insert_with(|| id.into());
            }
        }
        Ok((text, Some(wrapper)))
    }

    /// The keys of a file that has those of the language model beside those of the rest.
    fn flat(&self) -> Map<String, Value> {
        let whole =
            |key: &str| ["architectures", "vision_config", "tie_word_embeddings", "quantization_config"].contains(&key);
        self.map.iter().filter(|(key, _)| !whole(key)).map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    /// Puts in what the class of the language model assumes where a key is absent.
    fn complete(&mut self, about: &Text) {
        // The class of the language model alone, where it was trained: it says nothing of this file.
        self.map.remove("architectures");
        for (key, size) in SIZES.into_iter().zip(about.sizes) {
            self.map.entry(key).or_insert_with(|| size.into());
        }
        let more: Map<String, Value> = serde_json::from_str(about.more).unwrap_or_default();
        for (key, value) in more {
            self.map.entry(key).or_insert(value);
        }
        if about.model_type == about.family {
            return;
        }
        for key in ["rope_scaling", "rope_parameters"] {
            let Some(Value::Object(rope)) = self.map.get_mut(key) else { continue };
            for kind in ["type", "rope_type"] {
                if rope.get(kind).is_some_and(|kind| kind == "mrope") {
                    rope.insert(kind.into(), "default".into());
                }
            }
        }
    }

    fn unknown_wrapper(&self, kind: &str) -> Error {
        let known: Vec<_> = WRAPPERS.iter().map(|wrapper| wrapper.model_type).collect();
        self.not_yet(format!("model_type {kind:?}, a multimodal model"))
            .hint(format!("multimodal models whose text can be trained: {}", known.join(", ")))
    }

    fn unknown_text(&self, wrapper: &Wrapper, kind: &str) -> Error {
        let known: Vec<_> = TEXTS.iter().map(|about| about.model_type).collect();
        self.not_yet(format!("text_config.model_type {kind:?} in a {} model", wrapper.model_type))
            .hint(format!("language models that can be trained inside a multimodal one: {}", known.join(", ")))
    }
}
