//! The definition of one setting as data ([`OptionDef`]), and the macro that makes a section's struct, its defaults and the
//! definitions of its keys from one text.
use super::suggest::not_yet;
use super::value::{ConfigValue, NATURAL, Node, Refusal};

/// A section of the YAML file, whose values the configuration `C` holds.
#[derive(Debug)]
pub struct Section<C: 'static> {
    /// The path, such as `train` or `tuning.lora`; empty for keys outside of sections.
    pub name: &'static str,
    /// The documentation of the section, as Markdown.
    pub doc: &'static str,
    /// Its keys, in the order of the documentation.
    pub options: &'static [OptionDef<C>],
}

/// The definition of one setting, for the resolver, the documentation and the JSON Schema.
#[derive(Debug)]
pub struct OptionDef<C> {
    /// The path of the section that has it.
    pub section: &'static str,
    /// The key within the section.
    pub name: &'static str,
    /// Aliases: keys of the same section, or full keys with a dot.
    pub aliases: &'static [&'static str],
    /// Its documentation; the first line is a summary.
    pub doc: &'static str,
    /// The range of a number; [`Range::ANY`] for other types.
    pub range: Range,
    /// Words that are refused as not yet supported.
    pub later: &'static [&'static str],
    /// What is accepted, in words: `a number`, `one of no, steps, epoch`.
    pub expected: fn() -> String,
    /// What is accepted, as JSON Schema.
    pub schema: fn() -> serde_json::Value,
    /// Reads a value into the configuration.
    pub set: fn(&mut C, &Node) -> Result<(), Refusal>,
    /// The value that the configuration holds.
    pub get: fn(&C) -> serde_json::Value,
}

impl<C> OptionDef<C> {
    /// The full key: `train.batch_size`, or the bare name of a key outside any section.
    pub fn path(&self) -> String {
        self.spelled(self.name)
    }

    fn spelled(&self, name: &str) -> String {
        if self.section.is_empty() || name.contains('.') { name.to_owned() } else { format!("{}.{name}", self.section) }
    }

    /// The environment variable that sets it, such as `TRAIN_BATCH_SIZE`.
    pub fn env(&self) -> String {
        variable(&self.path())
    }

    /// The key and its aliases, each as a full key; the key comes first.
    pub fn spellings(&self) -> impl Iterator<Item = String> + '_ {
        std::iter::once(self.name).chain(self.aliases.iter().copied()).map(|name| self.spelled(name))
    }

    /// What is accepted, in words, with the bounds.
    pub fn expectation(&self) -> String {
        format!("{}{}", (self.expected)(), self.range)
    }
}

/// The environment variable of a full key: the path in upper snake case.
pub fn env_name(path: &str) -> String {
    path.replace('.', "_").to_uppercase()
}

/// The environment variable that sets a full key. A key without a section gets a prefix, since `TASK` alone would be too common:
/// `TUNESMITH_TASK`.
pub fn variable(key: &str) -> String {
    if key.contains('.') { env_name(key) } else { format!("TUNESMITH_{}", env_name(key)) }
}

/// A plain value in the tables of other toolkits' keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scalar {
    /// YAML's `null`.
    Null,
    /// YAML's `true` or `false`.
    Bool(bool),
    /// A string without quotes.
    Str(&'static str),
}

/// The bounds of a number; [`Range::ANY`] for everything else.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Range {
    /// The smallest value that is allowed.
    pub min: Option<f64>,
    /// Values must be greater than this.
    pub above: Option<f64>,
    /// The largest value that is allowed.
    pub max: Option<f64>,
    /// Values must be less than this.
    pub below: Option<f64>,
}

impl Range {
    /// Allows every number, also infinite ones.
    pub const ANY: Self = Self { min: None, above: None, max: None, below: None };

    /// Allows `min` and every greater number.
    pub const fn at_least(min: f64) -> Self {
        Self { min: Some(min), ..Self::ANY }
    }

    /// Allows every number greater than `above`.
    pub const fn greater_than(above: f64) -> Self {
        Self { above: Some(above), ..Self::ANY }
    }

    /// From `min` to `max`, both included.
    pub const fn within(min: f64, max: f64) -> Self {
        Self { min: Some(min), max: Some(max), ..Self::ANY }
    }

    /// From `min`, included, to `below`, excluded.
    pub const fn from_to_below(min: f64, below: f64) -> Self {
        Self { min: Some(min), below: Some(below), ..Self::ANY }
    }

    /// Whether a number is within the bounds.
    pub fn contains(&self, number: f64) -> bool {
        self.min.is_none_or(|bound| number >= bound)
            && self.above.is_none_or(|bound| number > bound)
            && self.max.is_none_or(|bound| number <= bound)
            && self.below.is_none_or(|bound| number < bound)
    }

    /// The bounds as JSON Schema keywords.
    pub fn keywords(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let words = [
            ("minimum", self.min),
            ("exclusiveMinimum", self.above),
            ("maximum", self.max),
            ("exclusiveMaximum", self.below),
        ];
        words.into_iter().filter_map(|(word, bound)| bound.map(|bound| (word, bound)))
    }
}

impl std::fmt::Display for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let (Some(min), Some(max)) = (self.min, self.max) {
            return write!(f, ", {min} to {max}");
        }
        let words =
            [("at least", self.min), ("greater than", self.above), ("at most", self.max), ("below", self.below)];
        let words: Vec<String> =
            words.iter().filter_map(|(word, bound)| bound.map(|bound| format!("{word} {bound}"))).collect();
        if words.is_empty() { Ok(()) } else { write!(f, ", {}", words.join(" and ")) }
    }
}

/// Reads a value of the setting's type and checks it against the bounds.
pub(crate) fn read<T: ConfigValue>(node: &Node, range: &Range, later: &[&str]) -> Result<T, Refusal> {
    let expected = || format!("{}{range}", T::expected());
    let value = T::from_node(node).map_err(|mut refusal| {
        if refusal.expected == T::expected() || (refusal.expected == NATURAL && *range != Range::ANY) {
            refusal.expected = expected();
        }
        match node {
            Node::Str(word) if later.contains(&word.as_str()) => refusal.hint(not_yet(word)),
            _ => refusal,
        }
    })?;
    if value.numbers().iter().all(|&number| range.contains(number)) {
        Ok(value)
    } else {
        Err(Refusal::new(node, expected()))
    }
}

/// Makes the settings of one section: the struct with its documentation, its `Default`, and `section()`, which defines each key.
/// The definition of the configuration `C` says which field holds the struct.
///
/// `key: type = default, aliases […], range …, later […];` gives a field.
macro_rules! section {
    (
        $(#[doc = $section_doc:literal])*
        $name:ident = $section:literal {
            $(
                $(#[doc = $doc:literal])*
                $field:ident: $type:ty = $default:expr $(, aliases $aliases:expr)? $(, range $range:expr)? $(, later $later:expr)?;
            )*
        }
        $( nested { $( $(#[doc = $nested_doc:literal])* $nested:ident: $nested_type:ty; )* } )?
    ) => {
        $(#[doc = $section_doc])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct $name {
            $( $(#[doc = $doc])* pub $field: $type, )*
            $( $( $(#[doc = $nested_doc])* pub $nested: $nested_type, )* )?
        }

        impl Default for $name {
            fn default() -> Self {
                Self {
                    $( $field: $default, )*
                    $( $( $nested: <$nested_type>::default(), )* )?
                }
            }
        }

        impl $name {
            #[doc = concat!("The section's path in the YAML file: `", $section, "`.")]
            pub const SECTION: &'static str = $section;

            /// The definition of each key, for a configuration that holds these settings.
            pub const fn section<C: AsRef<Self> + AsMut<Self> + 'static>() -> $crate::option::Section<C> {
                $crate::option::Section {
                    name: $section,
                    doc: concat!($($section_doc, "\n",)*),
                    options: const { &[
                        $( $crate::option::OptionDef {
                            section: $section,
                            name: stringify!($field),
                            aliases: $crate::option::section!(@or &[], $(&$aliases)?),
                            doc: concat!($($doc, "\n",)*),
                            range: $crate::option::section!(@or $crate::option::Range::ANY, $($range)?),
                            later: $crate::option::section!(@or &[], $(&$later)?),
                            expected: <$type as $crate::value::ConfigValue>::expected,
                            schema: <$type as $crate::value::ConfigValue>::schema,
                            set: |config: &mut C, node| {
                                const RANGE: $crate::option::Range =
                                    $crate::option::section!(@or $crate::option::Range::ANY, $($range)?);
                                const LATER: &[&str] = $crate::option::section!(@or &[], $(&$later)?);
                                AsMut::<$name>::as_mut(config).$field = $crate::option::read(node, &RANGE, LATER)?;
                                Ok(())
                            },
                            get: |config: &C| $crate::value::ConfigValue::to_json(&AsRef::<$name>::as_ref(config).$field),
                        }, )*
                    ] },
                }
            }
        }
    };
    (@or $default:expr,) => { $default };
    (@or $default:expr, $given:expr) => { $given };
}
pub(crate) use section;
