//! [`choices`]: a macro for settings that are one of a few words.
use super::suggest::{nearest, not_yet};
use super::value::{Node, Refusal};

/// Makes an enum that is written as a word in the configuration. `later` lists words that are refused as not yet supported.
macro_rules! choices {
    ($(
        $(#[doc = $doc:literal])*
        $name:ident { $( $(#[doc = $variant_doc:literal])* $variant:ident = $word:literal $( | $alias:literal $( ($alias_doc:literal) )? )*, )+ } $( later $later:expr )?;
    )*) => {$(
        $(#[doc = $doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name { $( $(#[doc = $variant_doc])* $variant, )+ }

        impl $name {
            /// The accepted words, without aliases.
            pub const WORDS: &'static [&'static str] = &[$($word),+];
            /// The words that a message lists: also those aliases that are documented.
            const LISTED: &'static [&'static str] = &[$($word, $( $( choices!(@listed $alias $alias_doc), )? )*)+];
            /// The accepted words, with aliases.
            const ACCEPTED: &'static [&'static str] = &[$($word, $( $alias, )*)+];
            const LATER: &'static [&'static str] = choices!(@or $($later)?);
            /// Every variant, in the order of the documentation.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The word in the configuration.
            pub const fn as_str(self) -> &'static str {
                match self { $( Self::$variant => $word, )+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl $crate::value::ConfigValue for $name {
            fn from_node(node: &$crate::value::Node) -> Result<Self, $crate::value::Refusal> {
                match node {
                    $( $crate::value::Node::Str(word) if [$word $(, $alias)*].contains(&word.as_str()) => Ok(Self::$variant), )+
                    _ => Err($crate::enum_macro::refuse_word(node, Self::LISTED, Self::ACCEPTED, Self::LATER)),
                }
            }

            fn to_json(&self) -> serde_json::Value {
                self.as_str().into()
            }

            fn expected() -> String {
                $crate::enum_macro::one_of(Self::LISTED)
            }

            fn schema() -> serde_json::Value {
                serde_json::json!({ "oneOf": [
                    $(
                        { "const": $word, "description": concat!($($variant_doc),*).trim() },
                        $( { "const": $alias, "description": choices!(@alias $word $($alias_doc)?) }, )*
                    )+
                ] })
            }
        }
    )*};
    (@alias $word:literal) => { concat!("The same as `", $word, "`.") };
    (@alias $word:literal $doc:literal) => { $doc };
    (@listed $alias:literal $doc:literal) => { $alias };
    (@or) => { &[] };
    (@or $later:expr) => { &$later };
}

pub(super) use choices;

/// The words as a message lists them.
pub(super) fn one_of(words: &[&str]) -> String {
    format!("one of {}", words.join(", "))
}

/// The refusal of a value that is not an accepted word, with the most similar word as a hint. The message lists `listed`.
pub(super) fn refuse_word(node: &Node, listed: &[&str], accepted: &[&str], later: &[&str]) -> Refusal {
    let refusal = Refusal::new(node, one_of(listed));
    let Node::Str(word) = node else { return refusal };
    if later.contains(&word.as_str()) {
        return refusal.hint(not_yet(word));
    }
    match nearest(word, accepted.iter().copied()) {
        Some(near) => refusal.hint(format!("did you mean {near}?")),
        None => refusal,
    }
}
