//! From a model folder's `config.json` to an [`Arch`].
//!
//! Both spellings are read: Transformers 4 (`rope_theta`, `rope_scaling`) and Transformers 5 (`rope_parameters`). A feature that would
//! change the numbers and is not implemented is refused by name.
use std::path::Path;

use serde_json::Value;

use super::arch::{Arch, AttentionSpec, BlockSpec, Experts, TensorSpec};
use super::families::family_of;
use super::gguf_input::refuse_gguf;
use super::hf_json::{MAX_SIZE, Source, read_text};
use super::tied;
use tunesmith_base::error::{Error, Result};

impl Arch {
    /// Reads `dir/config.json`. Stop tokens of `dir/generation_config.json` take precedence, as in Transformers' `generate`.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: a missing or malformed file, an impossible size, or an unsupported feature by name.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        refuse_gguf(dir)?;
        let path = dir.join("config.json");
        let text = read_text(&path)?.ok_or_else(|| {
            Error::model(format!("{}: no such file", path.display())).hint(
                "a model is a folder in Hugging Face's form: config.json, *.safetensors, tokenizer.json, tokenizer_config.json",
            )
        })?;
        let mut arch = Self::from_json(&text, &path)?;
        if arch.wrapper.is_some() {
            arch.tie_word_embeddings = tied::ties(dir, arch.tie_word_embeddings);
        }
        let path = dir.join("generation_config.json");
        if let Some(text) = read_text(&path)? {
            let ids = Source::parse(&text, &path)?.token_ids("eos_token_id")?;
            if !ids.is_empty() {
                arch.eos_token_ids = ids;
            }
        }
        Ok(arch)
    }

    /// Reads the text of a `config.json`; `origin` is named in errors.
    ///
    /// # Errors
    /// As [`Arch::from_dir`].
    pub fn from_json(text: &str, origin: &Path) -> Result<Self> {
        let (written, wrapper) = Source::parse(text, origin)?.language_model()?;
        let (family, read) = family_of(&written)?;
        let source = if wrapper.is_none() { written.renamed(family.model_type) } else { written.clone() };
        source.refuse_unsupported(family)?;
        let mut arch = read(&source)?;
        arch.drop_still_rope();
        if wrapper.is_none() {
            written.check_types(family.model_type)?;
        }
        arch.score = source.score_head(family)?;
        arch.wrapper = wrapper;
        arch.stored = source.stored_format()?;
        arch.bitsandbytes = source.bitsandbytes()?;
        if let Some(wrapper) = wrapper {
            wrapper.adjust(&mut arch);
            let whole = Source::parse(text, origin)?;
            arch.media_ids = whole.media_ids(wrapper)?.filter(|&first| first < arch.vocab_size);
        }
        arch.check(&source)?;
        Ok(arch)
    }

    /// Refuses to train a model whose `config.json` asks for dropout, unless that is `disabled`.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`], naming the key.
    pub fn refuse_dropout(&self, disabled: bool) -> Result<()> {
        match self.dropout.filter(|_| !disabled) {
            Some((key, rate)) => Err(Error::config(format!("not yet: training with {key} {rate} of config.json"))
                .hint(
                    "train.disable_dropout: true trains without the dropout of the base model; lora_dropout is another",
                )),
            None => Ok(()),
        }
    }

    /// Refuses sizes that contradict each other, or that overflow the memory arithmetic.
    fn check(&self, origin: &Source<'_>) -> Result<()> {
        if let Some(pad) = self.pad_token_id.filter(|&pad| pad as usize >= self.vocab_size) {
            return Err(origin
                .error(format!("pad_token_id is {pad}, vocab_size is {}", self.vocab_size))
                .hint("where the file has no pad_token_id, it is what the class in Transformers assumes: set it, or set it to null"));
        }
        let kinds = origin.get("layer_types").and_then(Value::as_array);
        if kinds.is_some_and(|kinds| kinds.len() != self.num_hidden_layers) {
            return Err(
                origin.error(format!("layer_types is not a list of {} kinds of blocks", self.num_hidden_layers))
            );
        }
        let mlps = origin.get("mlp_layer_types").and_then(Value::as_array);
        let is_mlp = |kind: &Value| matches!(kind.as_str(), Some("dense" | "sparse"));
        if mlps.is_some_and(|mlps| mlps.len() != self.num_hidden_layers || !mlps.iter().all(is_mlp)) {
            let layers = self.num_hidden_layers;
            return Err(
                origin.error(format!("mlp_layer_types is not a list of {layers} words \"dense\" or \"sparse\""))
            );
        }
        for attention in self.attentions() {
            let (heads, kv) = (attention.num_heads, attention.num_kv_heads);
            let width = attention.head_dim.max(attention.value_dim());
            if !heads.is_multiple_of(kv) {
                return Err(
                    origin.error(format!("num_attention_heads {heads} is not a multiple of num_key_value_heads {kv}"))
                );
            }
            if heads * width > MAX_SIZE {
                let found = heads * width;
                return Err(
                    origin.error(format!("num_attention_heads * head_dim is {found}, expected at most {MAX_SIZE}"))
                );
            }
        }
        for (layer, block) in self.blocks.iter().enumerate() {
            let Some((attention, from)) = block.attention().and_then(|it| Some((it, it.kv_from?))) else { continue };
            let keys = |it: &AttentionSpec| (it.num_kv_heads, it.head_dim, it.window);
            let source = self.blocks[..layer].get(from).and_then(BlockSpec::attention);
            if source.is_none_or(|source| source.kv_from.is_some() || keys(source) != keys(attention)) {
                return Err(origin.error(format!("block {layer} cannot take the keys and values of block {from}")));
            }
        }
        // The largest block; its experts are counted, since a list of them could be huge.
        let expert = |experts: &Experts| 3 * experts.width * self.hidden_size + self.hidden_size;
        let experts = self.experts.as_ref().map_or(Some(0), |experts| experts.count.checked_mul(expert(experts)));
        let dense = Self { experts: None, ..self.clone() };
        let numbers = |layer| dense.layer_tensors(layer).iter().map(TensorSpec::len).sum();
        let layer: usize = (0..self.num_hidden_layers).map(numbers).max().unwrap_or(0);
        let rest = 2 * self.vocab_size * self.hidden_size;
        let layer = experts.and_then(|experts| layer.checked_add(experts));
        let bytes =
            layer.and_then(|layer| layer.checked_mul(self.num_hidden_layers)?.checked_add(rest)?.checked_mul(16));
        match bytes {
            Some(_) => Ok(()),
            None => Err(origin.error("the sizes describe a model beyond what this machine can address")),
        }
    }
}
