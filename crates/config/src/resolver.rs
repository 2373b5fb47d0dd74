//! The values so far while a configuration is resolved. A later source replaces an earlier one.
use super::foreign::{Foreign, NULL_IS_DEFAULT, NotNeeded};
use super::lookup::refused;
use super::schema::{Config, OptionDef};
use super::source::Source;
use super::unsupported_keys::WORDS;
use super::value::{Node, quoted};
use std::collections::{BTreeMap, HashMap};
use tunesmith_base::error::{Error, Result};

/// A value with its source; a later source may replace it.
pub(super) struct SourcedValue {
    pub node: Node,
    pub source: Source,
}

/// A configuration while its sources are read, one after the other.
#[derive(Default)]
pub(super) struct Resolver {
    /// Values by the schema's key, not by an alias.
    pub found: BTreeMap<String, SourcedValue>,
    /// How many files have been read, included ones among them.
    pub files: usize,
    /// Notes for the user, one sentence each.
    pub notes: Vec<String>,
    /// The outcome of each key in files of DeepSpeed, Accelerate and FSDP.
    pub foreign: Foreign,
    /// Keys of other toolkits that are accepted without effect, by the full key as it was given.
    pub not_needed: BTreeMap<String, NotNeeded>,
}

impl Resolver {
    /// Checks a value and lets it replace an earlier one. Mappings of two files are merged key by key.
    pub fn put(&mut self, def: &'static OptionDef, spelled: &str, node: Node, source: Source) -> Result<()> {
        if let Some((place, name)) = node.given_twice() {
            let message = format!("{}: {spelled}{place}: {} is given twice", source.place(), quoted(name));
            return Err(Error::config(message).hint("keep one"));
        }
        if node == Node::Null && NULL_IS_DEFAULT.contains(&def.path().as_str()) {
            self.found.remove(&def.path());
            return Ok(());
        }
        (def.set)(&mut Config::default(), &node).map_err(|refusal| {
            let refusal = match instead(&def.path(), &node) {
                Some(how) => refusal.hint(how),
                None => refusal,
            };
            refused(&source, spelled, refusal)
        })?;
        let node = match (self.found.remove(&def.path()), node, &source) {
            (Some(SourcedValue { node: Node::Map(below), .. }), Node::Map(above), Source::File { .. }) => {
                merge(below, above)
            }
            (_, node, _) => node,
        };
        self.found.insert(def.path(), SourcedValue { node, source });
        Ok(())
    }
}

/// What to write instead of a value of another toolkit that a setting does not take.
fn instead(key: &str, node: &Node) -> Option<String> {
    match node {
        Node::Str(given) => {
            let given = given.to_lowercase();
            WORDS.iter().find(|(of, word, _)| *of == key && *word == given).map(|(.., how)| (*how).to_owned())
        }
        // Transformers takes a share of all steps here.
        Node::Float(share) if key == "train.warmup_steps" && (0.0..1.0).contains(share) => {
            Some(format!("set train.warmup_ratio: {share}"))
        }
        _ => None,
    }
}

/// Two mappings as one. A key that both have keeps its place and gets the value from `above`.
fn merge(mut below: Vec<(String, Node)>, above: Vec<(String, Node)>) -> Node {
    let places: HashMap<String, usize> = below.iter().enumerate().map(|(at, (key, _))| (key.clone(), at)).collect();
    for (key, node) in above {
        match places.get(&key) {
            Some(&at) => below[at].1 = node,
            None => below.push((key, node)),
        }
    }
    Node::Map(below)
}
