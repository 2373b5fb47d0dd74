//! Settings that are one of a few words, or a value of another type.
use super::pattern::Pattern;
use super::value::{ConfigValue, Node, Refusal};
use serde_json::{Value as Json, json};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Which linear layers get an adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TargetModules {
    /// `auto`: every linear layer of the decoder blocks.
    Auto,
    /// `all-linear`, as in PEFT. With experts, these and the router have adapters too.
    AllLinear,
    /// Layers whose name ends with one of these; an empty list, or `null`, is none.
    List(Vec<String>),
    /// Layers whose whole name matches.
    Regex(String),
}

impl ConfigValue for TargetModules {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        match node {
            Node::Str(word) if word == "auto" => Ok(Self::Auto),
            Node::Str(word) if word.eq_ignore_ascii_case("all-linear") => Ok(Self::AllLinear),
            Node::Str(pattern) if !pattern.is_empty() => match Pattern::compile(pattern) {
                Ok(_) => Ok(Self::Regex(pattern.clone())),
                Err(error) => {
                    let expected = format!("a valid regular expression ({})", error.message());
                    Err(Refusal::new(node, expected).hint("a list of names needs [brackets]"))
                }
            },
            Node::Null => Ok(Self::List(Vec::new())),
            Node::List(_) => Vec::from_node(node).map(Self::List),
            _ => Err(Refusal::new(node, Self::expected())),
        }
    }

    fn to_json(&self) -> Json {
        match self {
            Self::Auto => "auto".into(),
            Self::AllLinear => "all-linear".into(),
            Self::List(names) => names.to_json(),
            Self::Regex(pattern) => pattern.as_str().into(),
        }
    }

    fn expected() -> String {
        "auto, all-linear, a list of module names, or a regular expression".to_owned()
    }

    fn schema() -> Json {
        json!({ "anyOf": [String::schema(), { "type": "array", "items": String::schema() }] })
    }
}

/// Initialization of LoRA's A and B.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InitLora {
    /// `true`: A uniform as Kaiming's rule says, B zero.
    Kaiming,
    /// `"gaussian"`: A normal with deviation 1/r, B zero.
    Gaussian,
    /// `false`: A and B both random, so that the adapter changes the model from the start (for tests).
    Random,
    /// `"pissa"`: the largest singular values of the weight; the base keeps the rest (`PiSSA`).
    Pissa,
    /// `"pissa_niter_N"`: the same by N rounds of a randomized method: much faster, nearly as exact.
    PissaRounds(u32),
    /// `"loftq"`: the error of the weight's quantization, up to the rank (`LoftQ`).
    Loftq,
}

/// Initializations of PEFT that are refused as not yet supported.
const LATER_INITS: [&str; 6] = ["olora", "eva", "corda", "orthogonal", "lora_ga", "mica"];

impl InitLora {
    /// Whether the adapter's initial product is subtracted from the base weight (`PiSSA`).
    pub const fn is_pissa(self) -> bool {
        matches!(self, Self::Pissa | Self::PissaRounds(_))
    }
}

impl ConfigValue for InitLora {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        match node {
            Node::Bool(true) => Ok(Self::Kaiming),
            Node::Bool(false) => Ok(Self::Random),
            Node::Str(word) if word == "gaussian" => Ok(Self::Gaussian),
            Node::Str(word) if word == "pissa" => Ok(Self::Pissa),
            Node::Str(word) if word == "loftq" => Ok(Self::Loftq),
            Node::Str(word) if LATER_INITS.contains(&word.as_str()) => {
                let instead = "pissa_niter_4 starts at the largest singular values, true as PEFT by default";
                Err(Refusal::new(node, Self::expected()).hint(format!("{}; {instead}", super::suggest::not_yet(word))))
            }
            Node::Str(word) => match word.strip_prefix("pissa_niter_").map(str::parse) {
                Some(Ok(rounds @ 0..=1000)) => Ok(Self::PissaRounds(rounds)),
                _ => Err(Refusal::new(node, Self::expected())),
            },
            _ => Err(Refusal::new(node, Self::expected())),
        }
    }

    fn to_json(&self) -> Json {
        match self {
            Self::Kaiming => true.into(),
            Self::Random => false.into(),
            Self::Gaussian => "gaussian".into(),
            Self::Pissa => "pissa".into(),
            Self::Loftq => "loftq".into(),
            Self::PissaRounds(rounds) => format!("pissa_niter_{rounds}").into(),
        }
    }

    fn expected() -> String {
        "true, false, gaussian, pissa, pissa_niter_N or loftq".to_owned()
    }

    fn schema() -> Json {
        json!({ "anyOf": [{ "enum": [true, false, "gaussian", "pissa", "loftq"] }, { "type": "string", "pattern": "^pissa_niter_[0-9]+$" }] })
    }
}

/// Where a model is kept and computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
    /// `auto`: the first GPU that can be used, or else the CPU.
    Auto,
    /// `cpu`: main memory and the processor.
    Cpu,
    /// `cuda:N`: the NVIDIA GPU of this number; `cuda`: the first one, or of several ranks on a machine to each its own in turn.
    Cuda(Option<u8>),
}

impl ConfigValue for DeviceChoice {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        let Node::Str(word) = node else { return Err(Refusal::new(node, Self::expected())) };
        word.parse().map_err(|expected: String| Refusal::new(node, expected))
    }

    fn to_json(&self) -> Json {
        self.to_string().into()
    }

    fn expected() -> String {
        "auto, cpu, cuda, or cuda:N with the number of a GPU".to_owned()
    }

    fn schema() -> Json {
        json!({ "type": "string", "pattern": "^(auto|cpu|cuda(:[0-9]{1,3})?)$" })
    }
}

impl FromStr for DeviceChoice {
    /// What was expected.
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(None)),
            other => {
                let number = other.strip_prefix("cuda:").filter(|number| number.bytes().all(|it| it.is_ascii_digit()));
                let number = number.and_then(|number| number.parse().ok());
                number.map(|number| Self::Cuda(Some(number))).ok_or_else(Self::expected)
            }
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(number)) => write!(f, "cuda:{number}"),
        }
    }
}

/// When a beam search ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BeamStop {
    /// `false`: when the best running beam, scored by its length so far, is below the worst finished one.
    False,
    /// `true`: as soon as there are as many finished answers as beams.
    True,
    /// `"never"`: when no running beam can rise above the worst finished one.
    Never,
}

impl ConfigValue for BeamStop {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        match node {
            Node::Bool(false) => Ok(Self::False),
            Node::Bool(true) => Ok(Self::True),
            Node::Str(word) if word == "never" => Ok(Self::Never),
            _ => Err(Refusal::new(node, Self::expected())),
        }
    }

    fn to_json(&self) -> Json {
        match self {
            Self::False => false.into(),
            Self::True => true.into(),
            Self::Never => "never".into(),
        }
    }

    fn expected() -> String {
        "true, false or never".to_owned()
    }

    fn schema() -> Json {
        json!({ "enum": [true, false, "never"] })
    }
}

/// The checkpoint that a run resumes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// The newest complete one in the output directory.
    Latest,
    /// This one, or the one that this file of a run (`latest`, `best`) names.
    Dir(PathBuf),
}

impl ConfigValue for Resume {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        match node {
            Node::Bool(true) => Ok(Self::Latest),
            Node::Str(word) if word == "latest" => Ok(Self::Latest),
            Node::Str(_) => PathBuf::from_node(node).map(Self::Dir),
            _ => Err(Refusal::new(node, Self::expected())),
        }
    }

    fn to_json(&self) -> Json {
        match self {
            Self::Latest => "latest".into(),
            Self::Dir(path) => path.to_json(),
        }
    }

    fn expected() -> String {
        "latest or a checkpoint folder".to_owned()
    }

    fn schema() -> Json {
        json!({ "anyOf": [String::schema(), { "const": true }] })
    }
}
