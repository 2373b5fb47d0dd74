//! Reads from `quantization_config` of `config.json` how a checkpoint stores its quantized matrices.
//!
//! | `quant_method` | what the files have |
//! |---|---|
//! | `fp8` | E4M3 with a scale for each block (`weight_block_size`), row or matrix: `DeepSeek`, Qwen, Mistral |
//! | `gptq`, `awq` | integers of 4 bits (GPTQ also 8) with a scale and a zero point for each group of a row |
//! | `compressed-tensors` | integers of 4 or 8 bits, FP8, NVFP4 |
//! | `modelopt` | FP8, NVFP4 |
//!
//! The files themselves say more: which matrices are quantized, and in which groups. What is read here is enough to
//! open them, and to know how much memory they take if there are no files.
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::hf_json::{Source, brief, read_text};
use super::pattern::Pattern;
use tunesmith_base::error::{Error, Result};

/// The largest group or block that is accepted, in numbers. Real ones are smaller.
const MAX_GROUP: usize = 1 << 24;

/// How the numbers of a matrix `[rows, columns]` are stored in a maker's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// 4-bit floating-point numbers, with a byte of exponent for each 32 numbers of a row.
    Mxfp4,
    /// 4-bit floating-point numbers, with a byte of scale for each 16 numbers of a row.
    Nvfp4,
    /// 8-bit floating-point numbers (E4M3), with a scale for each tile.
    Fp8 {
        /// Rows and columns of a tile.
        tile: [usize; 2],
    },
    /// Integers with a scale for each group of a row.
    Integers {
        /// Bits of a number: 4 or 8.
        bits: usize,
        /// Numbers of a row that share a scale.
        group: usize,
        /// Whether each group has a zero point of its own.
        zeros: bool,
        /// Whether each column stores the number of its group, because columns were sorted (`desc_act`).
        grouped: bool,
    },
}

impl Layout {
    /// The bytes that a matrix of this shape takes in memory. A scale takes four bytes, except in MXFP4 and NVFP4.
    pub fn bytes(self, shape: &[usize]) -> u64 {
        let width = shape.last().copied().unwrap_or(1).max(1) as u64;
        let numbers: u64 = shape.iter().map(|&size| size as u64).product();
        let rows = numbers / width;
        match self {
            Self::Mxfp4 => numbers.div_ceil(2) + numbers.div_ceil(32),
            Self::Nvfp4 => numbers.div_ceil(2) + numbers.div_ceil(16) + 4,
            Self::Fp8 { tile } => {
                let [high, wide] = tile.map(|size| size.max(1) as u64);
                numbers + 4 * rows.div_ceil(high) * width.div_ceil(wide)
            }
            Self::Integers { bits, group, zeros, grouped } => {
                let groups = rows * width.div_ceil(group.max(1) as u64);
                let named = if grouped { 4 * width } else { 0 };
                (numbers * bits as u64).div_ceil(8) + groups * if zeros { 5 } else { 4 } + named
            }
        }
    }

    /// The format's name in tables and messages, such as `MXFP4`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mxfp4 => "MXFP4",
            Self::Nvfp4 => "NVFP4",
            Self::Fp8 { .. } => "FP8 with a scale a tile",
            Self::Integers { bits: 4, .. } => "int4 in groups",
            Self::Integers { .. } => "int8 in groups",
        }
    }
}

/// The format of a checkpoint's quantized matrices, as `config.json` describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredFormat {
    /// The quantization method, with the settings that are needed to read its files.
    pub method: Method,
    /// Modules that are not quantized.
    skip: Vec<String>,
    /// The quantized matrices that were found in the files, if these were opened. They take precedence over
    /// `config.json`.
    found: Option<Arc<BTreeMap<String, Layout>>>,
}

/// The format or tool that `quant_method` of `quantization_config` names, with its settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Method {
    /// FP8 as `DeepSeek`, Qwen and Mistral store it.
    Fp8 {
        /// The rows and columns of a block; `None` if there is one scale per row or per matrix.
        block: Option<[usize; 2]>,
    },
    /// GPTQ (Frantar et al., 2022), as `AutoGPTQ` and `GPTQModel` store it.
    Gptq(Grouped),
    /// AWQ (Lin et al., 2023), as `AutoAWQ` packs it for its GEMM kernel.
    Awq(Grouped),
    /// compressed-tensors, as llm-compressor writes it: its groups, in order.
    CompressedTensors(Vec<Compressed>),
    /// NVIDIA's Model Optimizer, `quant_method: modelopt`.
    ModelOpt {
        /// Whether it is NVFP4; else it is FP8.
        nvfp4: bool,
    },
}

/// Integers with a scale for each group of a row, as GPTQ and AWQ store them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grouped {
    /// Bits of a number: 4 or 8, with AWQ only 4.
    pub bits: usize,
    /// How many numbers of a row share a scale; `None` for the whole row.
    pub group: Option<usize>,
    /// Whether the file says that all zero points are the same.
    pub symmetric: bool,
    /// Whether columns were sorted before they were cut into groups.
    pub sorted: bool,
    /// Whether zero points are stored as they are. Version 1 of GPTQ stores one less.
    pub plain_zeros: bool,
}

/// A group of compressed-tensors: the modules that it applies to, and how their weights are quantized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compressed {
    targets: Vec<String>,
    bits: usize,
    float: bool,
    symmetric: bool,
    sorted: bool,
    /// Rows and columns that share a scale.
    pub tile: [usize; 2],
}

impl Method {
    /// The value of `quant_method` in `quantization_config`, such as `gptq`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Fp8 { .. } => "fp8",
            Self::Gptq(_) => "gptq",
            Self::Awq(_) => "awq",
            Self::CompressedTensors(_) => "compressed-tensors",
            Self::ModelOpt { .. } => "modelopt",
        }
    }
}

impl StoredFormat {
    /// Reads `config.json` in a model's folder. `None` if there is none, or if it does not describe a maker's format.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the file cannot be read, or what it describes is not supported.
    pub fn from_dir(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join("config.json");
        let Some(text) = read_text(&path)? else { return Ok(None) };
        let source = Source::parse(&text, &path)?;
        if source.has("quantization_config") {
            return source.stored_format();
        }
        match source.get("text_config").and_then(Value::as_object) {
            Some(map) => Source { origin: &path, map: map.clone(), prefix: "text_config.".into() }.stored_format(),
            None => Ok(None),
        }
    }

    /// Replaces what `config.json` says by the matrices and layouts that were found in the files.
    #[must_use]
    pub fn with_found(mut self, found: Arc<BTreeMap<String, Layout>>) -> Self {
        self.found = Some(found);
        self
    }

    /// How the matrix of a linear layer or an expert is stored; `None` if it is not quantized.
    pub fn layout(&self, tensor: &str) -> Option<Layout> {
        if let Some(found) = &self.found {
            return found.get(tensor).copied();
        }
        let module = tensor.strip_suffix(".weight").unwrap_or(tensor);
        if self.skip.iter().any(|entry| names(entry, module)) {
            return None;
        }
        let whole = [usize::MAX; 2];
        match &self.method {
            Method::Fp8 { block } => Some(Layout::Fp8 { tile: block.unwrap_or(whole) }),
            Method::Gptq(grouped) | Method::Awq(grouped) => Some(Layout::Integers {
                bits: grouped.bits,
                group: grouped.group.unwrap_or(usize::MAX),
                zeros: !grouped.symmetric,
                grouped: grouped.sorted && grouped.group.is_some(),
            }),
            Method::CompressedTensors(groups) => {
                groups.iter().find(|group| group.is_of(module)).map(Compressed::layout)
            }
            Method::ModelOpt { nvfp4: true } => Some(Layout::Nvfp4),
            Method::ModelOpt { nvfp4: false } => Some(Layout::Fp8 { tile: whole }),
        }
    }

    /// The layouts that the groups of compressed-tensors describe for a matrix; empty for other formats, and for modules
    /// that no group names.
    pub fn described(&self, tensor: &str) -> Vec<Layout> {
        let Method::CompressedTensors(groups) = &self.method else { return Vec::new() };
        let module = tensor.strip_suffix(".weight").unwrap_or(tensor);
        if self.skip.iter().any(|entry| names(entry, module)) {
            return Vec::new();
        }
        groups.iter().filter(|group| group.is_of(module)).map(Compressed::layout).collect()
    }

    /// In words, such as `gptq: integers of 4 bits in groups of 128`.
    pub fn describe(&self) -> String {
        let scales = |tile: [usize; 2]| match tile {
            [usize::MAX, _] => "with a scale a matrix or row".to_owned(),
            [1, usize::MAX] => "with a scale a row".to_owned(),
            [1, group] => format!("in groups of {group}"),
            [rows, columns] => format!("in blocks of {rows} x {columns}"),
        };
        let integers = |bits: usize, group: usize| format!("integers of {bits} bits {}", scales([1, group]));
        let text = match &self.method {
            Method::Fp8 { block } => format!("FP8 {}", scales(block.unwrap_or([usize::MAX; 2]))),
            Method::Gptq(it) | Method::Awq(it) => integers(it.bits, it.group.unwrap_or(usize::MAX)),
            Method::CompressedTensors(groups) => {
                let words = groups.iter().map(|it| match it.layout() {
                    Layout::Integers { bits, group, .. } => integers(bits, group),
                    Layout::Fp8 { tile } => format!("FP8 {}", scales(tile)),
                    layout => layout.name().to_owned(),
                });
                let mut words: Vec<String> = words.collect();
                words.dedup();
                words.join("; ")
            }
            Method::ModelOpt { nvfp4 } => if *nvfp4 { "NVFP4" } else { "FP8" }.to_owned(),
        };
        format!("{}: {text}", self.method.name())
    }
}

impl Compressed {
    fn is_of(&self, module: &str) -> bool {
        self.targets.iter().any(|entry| entry == "Linear" || names(entry, module))
    }

    const fn layout(&self) -> Layout {
        let Self { bits, float, symmetric, sorted, tile, .. } = self;
        match (*bits, *float) {
            (4, true) => Layout::Nvfp4,
            (_, true) => Layout::Fp8 { tile: *tile },
            (bits, false) => {
                let grouped = *sorted && tile[1] != usize::MAX;
                Layout::Integers { bits, group: tile[1], zeros: !*symmetric, grouped }
            }
        }
    }
}

/// Whether an entry of a list of modules applies to `module`: it is its whole name, a module that contains it, the end
/// of its name, or a regular expression (`re:`).
pub(super) fn names(entry: &str, module: &str) -> bool {
    if let Some(expression) = entry.strip_prefix("re:") {
        return Pattern::compile(&format!("^(?:{expression})")).is_ok_and(|pattern| pattern.is_match(module));
    }
    // Lists of multimodal models name the language model inside its wrapper.
    let entry = entry.replacen("language_model.", "", 1);
    let entry = entry.trim_end_matches('.');
    module == entry || module.starts_with(&format!("{entry}.")) || module.ends_with(&format!(".{entry}"))
}

impl Source<'_> {
    /// The maker's format that `quantization_config` describes. `None` without this key, and for the formats of
    /// bitsandbytes and gpt-oss, which the files describe themselves.
    pub(super) fn stored_format(&self) -> Result<Option<StoredFormat>> {
        let Some(found) = self.get("quantization_config") else { return Ok(None) };
        let Some(map) = found.as_object() else { return Err(self.mismatch("quantization_config", "an object")) };
        let prefix = format!("{}quantization_config.", self.prefix);
        let inner = Source { origin: self.origin, map: map.clone(), prefix };
        let on = |key: &str| inner.get(key).and_then(Value::as_bool) == Some(true);
        let skip = |keys: &[&str]| {
            keys.iter().find(|key| inner.get(key).is_some()).map_or(Ok(Vec::new()), |key| inner.texts(key))
        };
        let (method, skip) = match inner.text("quant_method")? {
            Some("bitsandbytes") if on("load_in_4bit") || on("load_in_8bit") => return Ok(None),
            Some("mxfp4") => return Ok(None),
            Some("fp8") => (inner.fp8()?, skip(&["modules_to_not_convert", "ignored_layers"])?),
            Some("gptq") => (inner.gptq()?, Vec::new()),
            Some("awq") => (inner.awq()?, skip(&["modules_to_not_convert"])?),
            Some("compressed-tensors") => (inner.compressed_tensors()?, skip(&["ignore"])?),
            Some("modelopt") => (inner.model_opt()?, skip(&["ignore", "exclude_modules"])?),
            Some("bitsandbytes") => {
                return Err(self.not_yet("bitsandbytes' quantization_config without load_in_4bit or load_in_8bit"));
            }
            _ => return Err(self.no_such_format(found.get("quant_method"))),
        };
        Ok(Some(StoredFormat { method, skip, found: None }))
    }

    pub(super) fn no_such_format(&self, method: Option<&Value>) -> Error {
        let method = method.map_or_else(String::new, |method| format!(" (quant_method {})", brief(method)));
        self.not_yet(format!("quantized base: quantization_config{method}")).hint(
            "use the unquantized model, or one that is quantized as fp8, gptq, awq, compressed-tensors, modelopt or by bitsandbytes",
        )
    }

    pub(super) fn texts(&self, key: &str) -> Result<Vec<String>> {
        let list = self.get(key).and_then(Value::as_array).ok_or_else(|| self.mismatch(key, "a list of modules"))?;
        let text = |it: &Value| it.as_str().map(str::to_owned).ok_or_else(|| self.mismatch(key, "a list of modules"));
        list.iter().map(text).collect()
    }

    /// Refuses a key that has another value than those.
    fn expect(&self, key: &str, known: &[&str]) -> Result<()> {
        match self.text(key)? {
            Some(text) if !known.contains(&text) => Err(self.not_yet(format!("{}{key}: {text:?}", self.prefix))),
            _ => Ok(()),
        }
    }

    fn fp8(&self) -> Result<Method> {
        self.expect("fmt", &["e4m3", "float8_e4m3fn"])?;
        self.expect("expert_dtype", &["fp8"])?;
        self.expect("scale_fmt", &["float", "ue8m0"])?;
        Ok(Method::Fp8 { block: self.block("weight_block_size")? })
    }

    /// The rows and columns of a block; `None` if the key is absent or null.
    fn block(&self, key: &str) -> Result<Option<[usize; 2]>> {
        let Some(found) = self.get(key) else { return Ok(None) };
        let sizes: Option<Vec<u64>> = found.as_array().and_then(|list| list.iter().map(Value::as_u64).collect());
        match sizes.as_deref() {
            Some(&[rows, columns])
                if (1..=MAX_GROUP as u64).contains(&rows.min(columns)) && rows.max(columns) <= MAX_GROUP as u64 =>
            {
                Ok(Some([rows as usize, columns as usize]))
            }
            _ => Err(self.mismatch(key, "two sizes, as [128, 128]")),
        }
    }

    /// The size of a group; `None` if a group is a whole row.
    fn group(&self, key: &str) -> Result<Option<usize>> {
        match self.get(key).map(Value::as_i64) {
            None | Some(Some(-1)) => Ok(None),
            Some(Some(size)) if (1..=MAX_GROUP as i64).contains(&size) => Ok(Some(size as usize)),
            _ => Err(self.mismatch(key, "a size of groups, or -1")),
        }
    }

    fn bits(&self, key: &str, known: &[usize]) -> Result<usize> {
        let bits = self.size(key, None)?;
        if known.contains(&bits) { Ok(bits) } else { Err(self.not_yet(format!("{}{key}: {bits}", self.prefix))) }
    }

    fn gptq(&self) -> Result<Method> {
        self.expect("checkpoint_format", &["gptq", "gptq_v2"])?;
        if self.flag("is_marlin_format", false)? {
            return Err(self.not_yet(format!("{}is_marlin_format", self.prefix)));
        }
        Ok(Method::Gptq(Grouped {
            bits: self.bits("bits", &[4, 8])?,
            group: self.group("group_size")?,
            symmetric: self.flag("sym", true)?,
            sorted: self.flag("desc_act", false)?,
            plain_zeros: self.text("checkpoint_format")? == Some("gptq_v2"),
        }))
    }

    fn awq(&self) -> Result<Method> {
        self.expect("version", &["gemm", "GEMM"])?;
        Ok(Method::Awq(Grouped {
            bits: self.bits("bits", &[4])?,
            group: self.group("group_size")?,
            symmetric: !self.flag("zero_point", true)?,
            sorted: false,
            plain_zeros: true,
        }))
    }

    fn compressed_tensors(&self) -> Result<Method> {
        const FORMATS: [&str; 6] = [
            "pack-quantized",
            "int-quantized",
            "float-quantized",
            "naive-quantized",
            "nvfp4-pack-quantized",
            "mixed-precision",
        ];
        self.expect("format", &FORMATS)?;
        for key in ["sparsity_config", "transform_config"] {
            let nothing = |value: &Value| {
                value.as_object().is_some_and(|map| map.is_empty() || map.get("format").is_some_and(|it| it == "dense"))
            };
            if self.get(key).is_some_and(|value| !nothing(value)) {
                return Err(self.not_yet(format!("{}{key}", self.prefix)));
            }
        }
        let groups = self.get("config_groups").and_then(Value::as_object);
        let groups = groups.ok_or_else(|| self.mismatch("config_groups", "an object"))?;
        let group = |(name, value): (&String, &Value)| {
            let prefix = format!("{}config_groups.{name}.", self.prefix);
            let Some(map) = value.as_object() else { return Err(self.mismatch("config_groups", "objects")) };
            let group = Source { origin: self.origin, map: map.clone(), prefix };
            group.expect("format", &FORMATS)?;
            let prefix = format!("{}weights.", group.prefix);
            let Some(map) = group.get("weights").and_then(Value::as_object) else {
                return Err(group.mismatch("weights", "an object"));
            };
            Source { origin: self.origin, map: map.clone(), prefix }.compressed(group.texts("targets")?)
        };
        groups.iter().map(group).collect::<Result<_>>().map(Method::CompressedTensors)
    }

    fn compressed(&self, targets: Vec<String>) -> Result<Compressed> {
        self.expect("type", &["int", "float"])?;
        let (bits, float) = (self.bits("num_bits", &[4, 8])?, self.text("type")? == Some("float"));
        let group = self.group("group_size")?.unwrap_or(usize::MAX);
        let tile = match self.text("strategy")? {
            Some("channel") => [1, usize::MAX],
            Some("group" | "tensor_group") => [1, group],
            Some("block") => self
                .block("block_structure")?
                .ok_or_else(|| self.mismatch("block_structure", "two sizes, as [128, 128]"))?,
            None if group < usize::MAX => [1, group],
            Some("tensor") | None => [usize::MAX; 2],
            Some(other) => return Err(self.not_yet(format!("{}strategy: {other:?}", self.prefix))),
        };
        if bits == 4 && float && tile != [1, 16] {
            return Err(self
                .not_yet(format!("{}group_size: floating point of 4 bits, other than in groups of 16", self.prefix)));
        }
        let sorted = self
            .get("actorder")
            .is_some_and(|order| order == "group" || order == "dynamic" || *order == Value::Bool(true));
        Ok(Compressed { targets, bits, float, symmetric: self.flag("symmetric", true)?, sorted, tile })
    }

    fn model_opt(&self) -> Result<Method> {
        match self.text("quant_algo")? {
            Some("NVFP4") => Ok(Method::ModelOpt { nvfp4: true }),
            Some("FP8") => Ok(Method::ModelOpt { nvfp4: false }),
            other => Err(self.not_yet(format!("{}quant_algo: {}", self.prefix, other.unwrap_or("none")))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Option<StoredFormat>> {
        Source::parse(&format!(r#"{{"quantization_config": {text}}}"#), Path::new("config.json"))?.stored_format()
    }

    #[test]
    fn every_method_says_how_its_matrices_lie() {
        let q = "model.layers.3.self_attn.q_proj.weight";
        let fp8 = r#"{"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 64], "modules_to_not_convert": ["lm_head",
            "model.language_model.layers.3.mlp", "k_proj"]}"#;
        let format = read(fp8).unwrap().unwrap();
        assert_eq!(format.layout(q), Some(Layout::Fp8 { tile: [128, 64] }));
        assert_eq!(format.describe(), "fp8: FP8 in blocks of 128 x 64");
        for name in ["model.layers.3.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"] {
            assert_eq!(format.layout(name), None, "{name}");
        }
        let cases = [
            (r#"{"quant_method": "fp8", "weight_block_size": null}"#, Layout::Fp8 { tile: [usize::MAX; 2] }),
            (
                r#"{"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": true, "sym": false}"#,
                Layout::Integers { bits: 8, group: usize::MAX, zeros: true, grouped: false },
            ),
            (
                r#"{"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": true, "sym": true}"#,
                Layout::Integers { bits: 4, group: 64, zeros: false, grouped: true },
            ),
            (
                r#"{"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm"}"#,
                Layout::Integers { bits: 4, group: 128, zeros: true, grouped: false },
            ),
            (
                r#"{"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32}}}}"#,
                Layout::Integers { bits: 4, group: 32, zeros: false, grouped: false },
            ),
            (
                r#"{"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {"a": {"targets": ["re:.*gate"],
                    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}}, "b": {"targets":
                    ["re:model.layers.[0-9]+.self_attn.*"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}}"#,
                Layout::Fp8 { tile: [1, usize::MAX] },
            ),
            (r#"{"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}"#, Layout::Nvfp4),
        ];
        for (text, layout) in cases {
            assert_eq!(read(text).unwrap().unwrap().layout(q), Some(layout), "{text}");
        }
        assert_eq!(read(r#"{"quant_method": "bitsandbytes", "load_in_4bit": true}"#).unwrap(), None);
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        let cases = [
            ("[]", "an object"),
            (r#"{"quant_method": "hqq"}"#, "hqq"),
            (r#"{"quant_method": "fp8", "fmt": "e5m2"}"#, "e5m2"),
            (r#"{"quant_method": "fp8", "expert_dtype": "fp4"}"#, "expert_dtype"),
            (r#"{"quant_method": "fp8", "weight_block_size": [0, 128]}"#, "weight_block_size"),
            (r#"{"quant_method": "fp8", "modules_to_not_convert": "lm_head"}"#, "modules_to_not_convert"),
            (r#"{"quant_method": "gptq", "bits": 3, "group_size": 128}"#, "bits: 3"),
            (r#"{"quant_method": "gptq", "bits": 4, "group_size": 0}"#, "group_size"),
            (r#"{"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}"#, "marlin"),
            (r#"{"quant_method": "awq", "bits": 4, "version": "gemv"}"#, "gemv"),
            (r#"{"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}"#, "W4A8_AWQ"),
            (r#"{"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}}"#, "marlin-24"),
            (
                r#"{"quant_method": "compressed-tensors", "format": "pack-quantized", "transform_config": {"config_groups": {}}, "config_groups": {}}"#,
                "transform_config",
            ),
            (
                r#"{"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {"targets": ["Linear"],
                    "weights": {"num_bits": 3, "type": "int"}}}}"#,
                "num_bits: 3",
            ),
        ];
        for (text, part) in cases {
            let error = read(text).unwrap_err();
            assert!(error.kind() == tunesmith_base::Kind::Model && error.to_string().contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn layouts_know_their_bytes() {
        assert_eq!(Layout::Fp8 { tile: [128, 128] }.bytes(&[200, 300]), 200 * 300 + 4 * 2 * 3);
        assert_eq!(Layout::Fp8 { tile: [usize::MAX; 2] }.bytes(&[200, 300]), 200 * 300 + 4);
        let integers = |zeros, grouped| Layout::Integers { bits: 4, group: 64, zeros, grouped }.bytes(&[200, 300]);
        assert_eq!(integers(false, false), 200 * 150 + 4 * 200 * 5);
        assert_eq!(integers(true, true), 200 * 150 + 5 * 200 * 5 + 4 * 300);
        assert_eq!(Layout::Nvfp4.bytes(&[200, 320]), 200 * 160 + 200 * 20 + 4);
    }
}
