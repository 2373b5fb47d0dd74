//! Settings that may be left to measurement, and sizes in bytes.
use super::value::{ConfigValue, Node, Refusal};
use serde_json::{Value as Json, json};

/// A value, or `auto`: found by measuring before step 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Auto<T> {
    /// To be found.
    Auto,
    /// This.
    Given(T),
}

impl<T: Copy> Auto<T> {
    /// The value, unless it is to be found.
    pub const fn given(self) -> Option<T> {
        match self {
            Self::Auto => None,
            Self::Given(value) => Some(value),
        }
    }

    /// The value, or `other` as long as it is to be found.
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

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Units and what they stand for; those of two letters count in thousands.
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

    /// Reads `12GiB`, `1.5 GB` or `4096`.
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

/// What one decoder block keeps between its forward and its backward pass, beside its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Everything that backward needs: nothing is computed again.
    None,
    /// What products of matrices gave; norms and activation functions are computed again.
    Cheap,
    /// Nothing: the block is run again.
    Full,
}

/// What each block keeps for its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checkpointing {
    /// To be found: the fastest that fits.
    Auto,
    /// The first `full` blocks are run again, the last `none` keep everything, those between compute again what is cheap.
    Blocks {
        /// From the first block on.
        full: usize,
        /// From the last block back.
        none: usize,
    },
}

impl Checkpointing {
    /// Every block computes again what is cheap.
    pub const CHEAP: Self = Self::Blocks { full: 0, none: 0 };
    /// Every block is run again.
    pub const FULL: Self = Self::Blocks { full: usize::MAX, none: 0 };
    /// Every block keeps everything.
    pub const NONE: Self = Self::Blocks { full: 0, none: usize::MAX };

    /// What block `index` of `count` does; while it is to be found, what is cheap is computed again.
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
