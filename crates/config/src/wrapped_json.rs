//! The `config.json` of a multimodal model: the part that describes its language model, with what Transformers' classes assume
//! where that part leaves a key out.
use serde_json::{Map, Value};

use super::arch::Arch;
use super::families::FAMILIES;
use super::hf_json::Source;
use super::wrapped::{ENCODER_DECODER, WRAPPERS, Wrapper};
use tunesmith_base::error::{Error, Result};

/// Defaults of a text configuration's class in Transformers, beyond those that the family's reader has already.
struct Text {
    model_type: &'static str,
    /// The entry of [`FAMILIES`] that reads it. Qwen's VL models are read as plain ones: on text their three positions are equal.
    family: &'static str,
    /// `vocab_size`, `hidden_size`, `intermediate_size`, `num_hidden_layers`, `num_attention_heads`.
    sizes: [u64; 5],
    ends: [Option<u64>; 2],
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

/// A test compares it with `tests/golden/wrapped/defaults.json`, which Transformers' classes wrote.
static TEXTS: &[Text] = &[
    text("llama", [32_000, 4096, 11_008, 32, 32], [Some(1), Some(2)]),
    text("qwen2", [151_936, 4096, 22_016, 32, 32], [None, None]),
    text("qwen3", [151_936, 4096, 22_016, 32, 32], [None, None]),
    text("gemma", [256_000, 3072, 24_576, 28, 16], [Some(2), Some(1)]),
    text("gemma2", [256_000, 2304, 9216, 26, 8], [Some(2), Some(1)]),
    text("gemma3_text", [262_208, 2304, 9216, 26, 8], [Some(2), Some(1)]),
    text("gemma3n_text", [262_400, 2048, 16_384, 35, 8], [Some(2), Some(1)]),
    text("mistral", [32_000, 4096, 14_336, 32, 32], [Some(1), Some(2)]),
    text("phi3", [32_064, 3072, 8192, 32, 32], [Some(1), Some(32_000)]),
    text("smollm3", [128_256, 2048, 11_008, 36, 16], [Some(128_000), Some(128_001)]),
    text("olmo2", [50_304, 4096, 11_008, 32, 32], [None, Some(50_279)]),
    text("olmo3", [50_304, 4096, 11_008, 32, 32], [None, Some(50_279)]),
    text("granite", [32_000, 4096, 11_008, 32, 32], [Some(1), Some(2)]),
    text("qwen3_5_text", [248_320, 4096, 12_288, 32, 16], [None, None]),
    // Its class has no MLP, and so no width of one.
    text("qwen3_5_moe_text", [248_320, 2048, 512, 40, 16], [None, None]),
    text("lfm2", [65_536, 2560, 12_288, 32, 32], [Some(1), Some(2)]),
    text("ministral3", [131_072, 4096, 14_336, 34, 32], [Some(1), Some(2)]),
    text("mistral4", [131_072, 4096, 12_288, 36, 32], [Some(1), Some(2)]),
    text("hunyuan_v1_dense", [290_943, 4096, 11_008, 32, 32], [Some(1), Some(2)]),
    text("gemma4_text", [262_144, 2304, 9216, 30, 8], [Some(2), Some(1)]),
    text("gemma4_unified_text", [262_144, 2304, 9216, 30, 8], [Some(2), Some(1)]),
    text("muse_glimmer_text", [202_048, 6656, 19_968, 52, 32], [Some(200_000), Some(200_001)]),
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

impl Wrapper {
    /// Whether `config.json` ties the head to the embedding. `text` is the part that describes the language model.
    fn ties(&self, whole: &Source<'_>, text: &Map<String, Value>) -> Result<bool> {
        let key = "tie_word_embeddings";
        let of_text = text.get(key).and_then(Value::as_bool) == Some(true);
        let counts = self.text_ties || whole.get(key).is_none();
        Ok(whole.flag(key, self.tied)? || (counts && of_text))
    }

    /// Applies what the multimodal class computes differently from its language model on its own.
    pub(super) fn adjust(&self, arch: &mut Arch) {
        if *self == ENCODER_DECODER {
            super::encoder_decoder::add_cross_attention(arch);
        }
        if !self.caps_logits {
            arch.logit_softcap = None;
            arch.logit_scale = 1.0;
        }
    }
}

impl Source<'_> {
    /// The part that describes the language model, completed by its class's defaults, and the multimodal class around it.
    pub(super) fn language_model(self) -> Result<(Self, Option<&'static Wrapper>)> {
        let kind = self.text("model_type")?.unwrap_or_default();
        if kind == ENCODER_DECODER.model_type {
            return Ok((self.decoder_part()?, Some(&ENCODER_DECODER)));
        }
        let Some(wrapper) = WRAPPERS.iter().find(|wrapper| wrapper.model_type == kind) else {
            let known = FAMILIES.iter().any(|family| family.model_type == kind);
            return match self.get("text_config").filter(|_| !known && !kind.is_empty()) {
                Some(_) => Err(self.unknown_wrapper(kind)),
                None => Ok((self, None)),
            };
        };
        self.check_class(&[wrapper.class_name])?;
        self.check_types(wrapper.model_type)?;
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
        text.check_types(kind)?;
        text = text.renamed(kind);
        text.complete(about);
        if wrapper.model_type == "paligemma" {
            // Its class sets this for the tokens before an answer, which see each other: `VisionArch::prefix`.
            text.map.remove("use_bidirectional_attention");
        }
        text.map.insert("model_type".into(), about.family.into());
        text.map.insert("tie_word_embeddings".into(), tied.into());
        // Keys that stand beside `text_config` and hold for the whole model.
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

    /// The first token id that its class embeds by the table of an encoder, whether or not there is an image or sound.
    pub(super) fn media_ids(&self, wrapper: &Wrapper) -> Result<Option<usize>> {
        if wrapper.model_type != "gemma3n" {
            return Ok(None);
        }
        let offset = |part: &str, default: usize| match self.get(part).and_then(|part| part.get("vocab_offset")) {
            None | Some(Value::Null) => Ok(default),
            Some(first) => first
                .as_u64()
                .and_then(|first| usize::try_from(first).ok())
                .ok_or_else(|| self.mismatch(&format!("{part}.vocab_offset"), "a token id")),
        };
        Ok(Some(offset("vision_config", 262_144)?.min(offset("audio_config", 262_272)?)))
    }

    /// The language model's keys in a file without `text_config` (old Qwen2-VL), where they stand at the top level.
    fn flat(&self) -> Map<String, Value> {
        let whole =
            |key: &str| ["architectures", "vision_config", "tie_word_embeddings", "quantization_config"].contains(&key);
        self.map.iter().filter(|(key, _)| !whole(key)).map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    /// Adds the defaults of the language model's class for absent keys.
    fn complete(&mut self, about: &Text) {
        // Names the class that the language model was trained as, not the one of this file.
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
