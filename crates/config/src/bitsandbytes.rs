//! How bitsandbytes has quantized a checkpoint, as `quantization_config` of `config.json` says. The files say it themselves, matrix by
//! matrix; this is for a plan that has no files.
use super::enums::Quantization;
use super::hf_json::Source;
use super::stored_format::names;
use std::collections::BTreeSet;
use std::sync::Arc;
use tunesmith_base::error::Result;

/// The format of a checkpoint that bitsandbytes has quantized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bitsandbytes {
    /// The format of the quantized matrices: NF4, FP4 or int8.
    pub quantization: Quantization,
    /// Whether scales of 4 bits are quantized too.
    pub double_quant: bool,
    /// Modules that are not quantized.
    skip: Vec<String>,
    /// The matrices that the files hold so, where these were opened: they decide.
    found: Option<Arc<BTreeSet<String>>>,
}

impl Bitsandbytes {
    /// What files say: they hold these matrices so.
    pub const fn of_files(quantization: Quantization, double_quant: bool, found: Arc<BTreeSet<String>>) -> Self {
        Self { quantization, double_quant, skip: Vec::new(), found: Some(found) }
    }

    /// Whether the matrix of a linear layer or an expert is quantized.
    pub fn holds(&self, tensor: &str) -> bool {
        if let Some(found) = &self.found {
            return found.contains(tensor);
        }
        let module = tensor.strip_suffix(".weight").unwrap_or(tensor);
        // As in the versions of Transformers that checkpoints were made with, an entry names what is within such a module too.
        let within = |entry: &String| module.contains(&format!(".{}.", entry.trim_matches('.')));
        !self.skip.iter().any(|entry| names(entry, module) || within(entry))
    }
}

impl Source<'_> {
    /// What `quantization_config` says of bitsandbytes; nothing where it names another method. Defaults are those of Transformers'
    /// `BitsAndBytesConfig`.
    ///
    /// # Errors
    /// A type of 4 bits that bitsandbytes does not have, or a value of another kind.
    pub(super) fn bitsandbytes(&self) -> Result<Option<Bitsandbytes>> {
        let map = self.get("quantization_config").and_then(serde_json::Value::as_object);
        let Some(map) = map.filter(|map| map.get("quant_method").is_some_and(|it| it == "bitsandbytes")) else {
            return Ok(None);
        };
        let prefix = format!("{}quantization_config.", self.prefix);
        let inner = Source { origin: self.origin, map: map.clone(), prefix };
        let key = "llm_int8_skip_modules";
        let skip = if inner.get(key).is_some() { inner.texts(key)? } else { Vec::new() };
        if !inner.flag("load_in_4bit", false)? {
            return Ok(Some(Bitsandbytes { quantization: Quantization::Int8, double_quant: false, skip, found: None }));
        }
        let quantization = match inner.text("bnb_4bit_quant_type")? {
            Some("fp4") | None => Quantization::Fp4,
            Some("nf4") => Quantization::Nf4,
            Some(_) => return Err(inner.mismatch("bnb_4bit_quant_type", "nf4 or fp4")),
        };
        let double_quant = inner.flag("bnb_4bit_use_double_quant", false)?;
        Ok(Some(Bitsandbytes { quantization, double_quant, skip, found: None }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn types_and_their_defaults_are_those_of_transformers() {
        let read = |inner: &str| {
            let text = format!(r#"{{"quantization_config": {{"quant_method": {inner}}}}}"#);
            Source::parse(&text, Path::new("config.json")).unwrap().bitsandbytes()
        };
        let of = |quantization, double_quant| {
            Some(Bitsandbytes { quantization, double_quant, skip: Vec::new(), found: None })
        };
        for (inner, wanted) in [
            (r#""bitsandbytes", "load_in_4bit": true"#, of(Quantization::Fp4, false)),
            (
                r#""bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": true"#,
                of(Quantization::Nf4, true),
            ),
            (r#""bitsandbytes", "load_in_8bit": true, "bnb_4bit_quant_type": "nf4""#, of(Quantization::Int8, false)),
            (r#""mxfp4""#, None),
        ] {
            assert_eq!(read(inner).unwrap(), wanted, "{inner}");
        }
        for (inner, key) in [
            (r#""bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf5""#, "bnb_4bit_quant_type"),
            (r#""bitsandbytes", "load_in_4bit": "yes""#, "load_in_4bit"),
            (r#""bitsandbytes", "load_in_8bit": true, "llm_int8_skip_modules": [1]"#, "llm_int8_skip_modules"),
        ] {
            assert!(read(inner).unwrap_err().message().contains(key), "{inner}");
        }
        let skips = read(r#""bitsandbytes", "load_in_8bit": true, "llm_int8_skip_modules": ["lm_head", "self_attn"]"#);
        let skips = skips.unwrap().unwrap();
        assert!(skips.holds("model.layers.0.mlp.up_proj.weight"));
        assert!(!skips.holds("model.layers.0.self_attn.q_proj.weight"));
    }
}
