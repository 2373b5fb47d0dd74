//! Settings that may be `auto`, which a measurement before step 1 decides: numbers and activation checkpointing. Also sizes in bytes.
use super::value::{ConfigValue, Node, Refusal};
use serde_json::{Value as Json, json};

/// A value, or `auto`, which a measurement before step 1 decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Auto<T> {
    /// The word `auto`: measured before the first step.
    Auto,
    /// The user's value, or the measured one.
    Given(T),
}

impl<T: Copy> Auto<T> {
    /// The value; `None` for `auto`.
    pub const fn given(self) -> Option<T> {
        match self {
            Self::Auto => None,
            Self::Given(value) => Some(value),
        }
    }

    /// The value; `other` for `auto`.
    pub const fn or(self, other: T) -> T {
        match self {
            Self::Auto => other,
            Self::Given(value) => value,
        }
    }
}

impl<T: ConfigValue> ConfigValue for Auto<T> {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        match node {
            Node::Str(word) if word == "auto" => Ok(Self::Auto),
            _ => T::from_node(node).map(Self::Given).map_err(|mut refusal| {
                if refusal.expected == T::expected() {
                    refusal.expected = Self::expected();
                }
                refusal
            }),
        }
    }

    fn to_json(&self) -> Json {
        match self {
            Self::Auto => "auto".into(),
            Self::Given(value) => value.to_json(),
        }
    }

    fn expected() -> String {
        format!("{} or auto", T::expected())
    }

    fn schema() -> Json {
        json!({ "anyOf": [T::schema(), { "const": "auto" }] })
    }

    fn numbers(&self) -> Vec<f64> {
        match self {
            Self::Auto => Vec::new(),
            Self::Given(value) => value.numbers(),
        }
    }
}

/// A number of bytes, above 0 when read from a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Units in bytes: `KiB` counts in 1024, `KB` in 1000.
    const UNITS: [(&str, u64); 9] = [
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("TiB", 1 << 40),
        ("KB", 1000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("TB", 1_000_000_000_000),
        ("B", 1),
    ];

    /// Reads `12GiB`, `1.5 GB` or `4096`; `None` for anything else.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        if let Ok(bytes) = text.parse() {
            return Some(Self(bytes));
        }
        let (number, unit) =
            Self::UNITS.iter().find_map(|(name, unit)| text.strip_suffix(name).map(|number| (number, *unit)))?;
        let number: f64 = number.trim_end().parse().ok()?;
        let bytes = number * unit as f64;
        ((0.0..=1e18).contains(&bytes)).then_some(Self(bytes as u64))
    }
}

impl ConfigValue for Bytes {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        let read = match node {
            Node::Int(bytes) => u64::try_from(*bytes).ok().map(Self),
            Node::Str(text) => Self::parse(text),
            _ => None,
        };
        read.filter(|bytes| bytes.0 > 0).ok_or_else(|| Refusal::new(node, Self::expected()))
    }

    fn to_json(&self) -> Json {
        self.0.into()
    }

    fn expected() -> String {
        "bytes, as a number or with a unit: 12GiB".to_owned()
    }

    fn schema() -> Json {
        json!({ "anyOf": [
            { "type": "integer", "minimum": 1 },
            { "type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?( *([KMGT]i?)?B)?$" },
        ] })
    }
}

/// Activation checkpointing of one decoder block: what it keeps from forward to backward besides its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// It keeps everything; nothing is recomputed.
    None,
    /// It keeps the results of matrix products; norms and activation functions are recomputed.
    Cheap,
    /// It keeps nothing; the forward pass of the block is recomputed.
    Full,
}

/// Activation checkpointing of all decoder blocks, `train.gradient_checkpointing`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checkpointing {
    /// `auto`: the fastest that fits in memory.
    Auto,
    /// [`Policy::Full`] in the first blocks, [`Policy::None`] in the last, [`Policy::Cheap`] between.
    Blocks {
        /// Number of blocks at the beginning.
        full: usize,
        /// Number of blocks at the end.
        none: usize,
    },
}

impl Checkpointing {
    /// Every block keeps the results of matrix products.
    pub const CHEAP: Self = Self::Blocks { full: 0, none: 0 };
    /// Every block is recomputed in the backward pass.
    pub const FULL: Self = Self::Blocks { full: usize::MAX, none: 0 };
    /// Every block keeps all of its activations.
    pub const NONE: Self = Self::Blocks { full: 0, none: usize::MAX };

    /// The policy of block `index` of `count`; for `auto` it is [`Policy::Cheap`].
    pub fn of(self, index: usize, count: usize) -> Policy {
        match self {
            Self::Blocks { full, .. } if index < full => Policy::Full,
            Self::Blocks { none, .. } if count - index <= none => Policy::None,
            Self::Auto | Self::Blocks { .. } => Policy::Cheap,
        }
    }
}

impl From<bool> for Checkpointing {
    fn from(full: bool) -> Self {
        if full { Self::FULL } else { Self::CHEAP }
    }
}

impl ConfigValue for Checkpointing {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        let refuse = || Refusal::new(node, Self::expected());
        match node {
            Node::Bool(full) => Ok((*full).into()),
            Node::Str(word) if word == "auto" => Ok(Self::Auto),
            Node::Str(word) if word == "none" => Ok(Self::NONE),
            Node::Map(entries) if !entries.is_empty() => {
                let (mut full, mut none) = (0, 0);
                for (key, value) in entries {
                    let blocks = match key.as_str() {
                        "full" => &mut full,
                        "none" => &mut none,
                        _ => return Err(refuse()),
                    };
                    *blocks = usize::from_node(value).map_err(|_| refuse())?;
                }
                Ok(Self::Blocks { full, none })
            }
            _ => Err(refuse()),
        }
    }

    fn to_json(&self) -> Json {
        match *self {
            Self::Auto => "auto".into(),
            Self::CHEAP => false.into(),
            Self::FULL => true.into(),
            Self::NONE => "none".into(),
            Self::Blocks { full, none } => json!({ "full": full, "none": none }),
        }
    }

    fn expected() -> String {
        "true, false, auto, none, or {full: N, none: N} in blocks".to_owned()
    }

    fn schema() -> Json {
        let blocks = json!({ "type": "integer", "minimum": 0 });
        json!({ "anyOf": [
            { "type": "boolean" },
            { "enum": ["auto", "none"] },
            { "type": "object", "properties": { "full": blocks, "none": blocks }, "additionalProperties": false, "minProperties": 1 },
        ] })
    }
}

impl std::fmt::Display for Checkpointing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Self::Auto => f.write_str("auto"),
            Self::CHEAP => f.write_str("false"),
            Self::FULL => f.write_str("true"),
            Self::NONE => f.write_str("none"),
            Self::Blocks { full, none } => write!(f, "{{full: {full}, none: {none}}}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_units() {
        let read = |text: &str| Bytes::parse(text).map(|bytes| bytes.0);
        assert_eq!(read("12GiB"), Some(12 << 30));
        assert_eq!(read(" 1.5 GB "), Some(1_500_000_000));
        assert_eq!(read("4096"), Some(4096));
        assert_eq!(read("10 B"), Some(10));
        for bad in ["", "GiB", "-1GiB", "12 gigs", "1e40TiB", "NaNB", "infGiB"] {
            assert_eq!(read(bad), None, "{bad}");
        }
        assert!(Bytes::from_node(&Node::Int(0)).is_err() && Bytes::from_node(&Node::Int(-1)).is_err());
    }

    #[test]
    fn every_form_of_checkpointing_reads_back() {
        let map = |entries: &[(&str, i128)]| {
            Node::Map(entries.iter().map(|(key, blocks)| ((*key).to_owned(), Node::Int(*blocks))).collect())
        };
        let read = |node: &Node| Checkpointing::from_node(node).unwrap();
        assert_eq!(read(&Node::Bool(true)), Checkpointing::FULL);
        let mixed = read(&map(&[("full", 2), ("none", 1)]));
        let policies: Vec<Policy> = (0..5).map(|index| mixed.of(index, 5)).collect();
        assert_eq!(policies, [Policy::Full, Policy::Full, Policy::Cheap, Policy::Cheap, Policy::None]);
        assert_eq!(mixed.to_json(), json!({ "full": 2, "none": 1 }));
        assert_eq!(read(&map(&[("full", 0)])).to_json(), json!(false));
        assert!((0..3).all(|index| Checkpointing::NONE.of(index, 3) == Policy::None));
        assert!((0..3).all(|index| Checkpointing::FULL.of(index, 3) == Policy::Full));
        for bad in [Node::Int(1), Node::Str("some".into()), map(&[]), map(&[("half", 1)]), map(&[("full", -1)])] {
            assert!(Checkpointing::from_node(&bad).is_err(), "{bad:?}");
        }
    }
}
