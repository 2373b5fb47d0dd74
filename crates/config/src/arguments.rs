//! `train.optim_args` and `train.lr_scheduler_kwargs`: named arguments, which each optimizer or schedule reads itself.
use super::suggest::nearest;
use super::value::{ConfigValue, Node, Refusal, quoted};
use serde_json::{Value as Json, json};
use tunesmith_base::error::{Error, Result};

/// Named arguments, in file order: a mapping, or as Hugging Face writes it, one string `name=value,name=value`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Arguments(pub(crate) Vec<(String, Argument)>);

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Argument {
    Number(f64),
    Flag(bool),
    Word(String),
}

impl Argument {
    fn to_json(&self) -> Json {
        match self {
            Self::Number(number) => (*number).into(),
            Self::Flag(flag) => (*flag).into(),
            Self::Word(word) => word.as_str().into(),
        }
    }

    /// From the text after `name=`.
    fn parse(text: &str) -> Self {
        match (text.parse::<f64>(), text) {
            (Ok(number), _) if number.is_finite() => Self::Number(number),
            (_, "true" | "True") => Self::Flag(true),
            (_, "false" | "False") => Self::Flag(false),
            _ => Self::Word(text.to_owned()),
        }
    }
}

impl ConfigValue for Arguments {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        let refusal = || Refusal::new(node, Self::expected());
        let arguments: Option<Vec<_>> = match node {
            Node::Null => Some(Vec::new()),
            Node::Map(entries) => {
                let entry = |(name, node): &(String, Node)| {
                    let argument = match node {
                        Node::Int(number) => Argument::Number(*number as f64),
                        Node::Float(number) if number.is_finite() => Argument::Number(*number),
                        Node::Bool(flag) => Argument::Flag(*flag),
                        Node::Str(word) => Argument::parse(word),
                        _ => return None,
                    };
                    Some((name.clone(), argument))
                };
                entries.iter().map(entry).collect()
            }
            Node::Str(text) if !text.trim().is_empty() => {
                let pair = |pair: &str| {
                    let (name, value) = pair.split_once('=')?;
                    let (name, value) = (name.trim(), value.trim());
                    (!name.is_empty() && !value.is_empty()).then(|| (name.to_owned(), Argument::parse(value)))
                };
                text.split(',').map(pair).collect()
            }
            _ => None,
        };
        let arguments = arguments.ok_or_else(refusal)?;
        let twice = (1..arguments.len()).find(|&at| arguments[..at].iter().any(|(name, _)| *name == arguments[at].0));
        match twice {
            Some(at) => Err(refusal().hint(format!("{} is given twice", quoted(&arguments[at].0)))),
            None => Ok(Self(arguments)),
        }
    }

    fn to_json(&self) -> Json {
        self.0.iter().map(|(name, value)| (name.clone(), value.to_json())).collect::<serde_json::Map<_, _>>().into()
    }

    fn expected() -> String {
        "a mapping from name to value, or a string name=value,name=value".to_owned()
    }

    fn schema() -> Json {
        let value = json!({ "type": ["number", "boolean", "string"] });
        json!({ "anyOf": [{ "type": "object", "additionalProperties": value }, { "type": "string" }, { "type": "null" }] })
    }
}

impl Arguments {
    /// A reader for them. Errors name `key` and `owner`, such as `optim = sgd`.
    pub fn reader<'a>(&'a self, key: &'static str, owner: &'a str) -> Reader<'a> {
        Reader { key, owner, arguments: &self.0, known: Vec::new() }
    }
}

/// Reads arguments one by one. [`Reader::finish`] refuses those that were not read.
#[derive(Debug)]
pub struct Reader<'a> {
    key: &'static str,
    owner: &'a str,
    arguments: &'a [(String, Argument)],
    known: Vec<&'static str>,
}

impl Reader<'_> {
    fn take(&mut self, name: &'static str) -> Option<&Argument> {
        self.known.push(name);
        self.arguments.iter().find(|(given, _)| given == name).map(|(_, argument)| argument)
    }

    fn refuse<T>(&self, name: &str, found: &Argument, expected: &str) -> Result<T> {
        let found = found.to_json();
        Err(Error::config(format!("{}: {name}: found {found}, expected {expected} ({})", self.key, self.owner)))
    }

    /// A number for which `fits` holds; `None` if it is not given. `expected` describes such a number in errors.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: another value.
    pub fn number(&mut self, name: &'static str, expected: &str, fits: impl Fn(f64) -> bool) -> Result<Option<f64>> {
        match self.take(name).cloned() {
            None => Ok(None),
            Some(Argument::Number(number)) if fits(number) => Ok(Some(number)),
            Some(other) => self.refuse(name, &other, expected),
        }
    }

    /// An integer of at least `least`; `None` if it is not given.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: another value.
    pub fn count(&mut self, name: &'static str, least: u64) -> Result<Option<u64>> {
        let fits = |number: f64| number >= least as f64 && number.fract() == 0.0 && number < 1e15;
        let number = self.number(name, &format!("an integer of at least {least}"), fits)?;
        Ok(number.map(|number| number as u64))
    }

    /// `true` or `false`; `None` if it is not given.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: another value.
    pub fn flag(&mut self, name: &'static str) -> Result<Option<bool>> {
        match self.take(name).cloned() {
            None => Ok(None),
            Some(Argument::Flag(flag)) => Ok(Some(flag)),
            Some(other) => self.refuse(name, &other, "true or false"),
        }
    }

    /// The value of one of `words`; the first is the default.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: another word.
    pub fn word<T: Copy>(&mut self, name: &'static str, words: &[(&str, T)]) -> Result<T> {
        match self.take(name).cloned() {
            None => Ok(words[0].1),
            Some(found) => {
                let chosen = match &found {
                    Argument::Word(word) => words.iter().find(|(known, _)| known == word),
                    _ => None,
                };
                let names: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
                chosen.map_or_else(
                    || self.refuse(name, &found, &format!("one of {}", names.join(", "))),
                    |(_, value)| Ok(*value),
                )
            }
        }
    }

    /// Refuses arguments that were not read.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`], with the most similar name.
    pub fn finish(self) -> Result<()> {
        let unknown = self.arguments.iter().find(|(name, _)| !self.known.contains(&name.as_str()));
        let Some((name, _)) = unknown else { return Ok(()) };
        let error = Error::config(format!("{}: {} has no argument {}", self.key, self.owner, quoted(name)));
        Err(match nearest(name, self.known.iter().copied()) {
            Some(near) => error.hint(format!("did you mean {near}?")),
            None if self.known.is_empty() => error.hint("it takes none; remove the key"),
            None => error.hint(format!("it takes {}", self.known.join(", "))),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Arguments {
        Arguments::from_node(&Node::Str(text.to_owned())).unwrap()
    }

    #[test]
    fn both_spellings_say_the_same() {
        let entries = vec![
            ("momentum".to_owned(), Node::Float(0.9)),
            ("nesterov".to_owned(), Node::Bool(true)),
            ("kind".to_owned(), Node::Str("cosine".into())),
        ];
        let mapping = Arguments::from_node(&Node::Map(entries)).unwrap();
        assert_eq!(read("momentum=0.9, nesterov=true,kind=cosine"), mapping);
        for bad in ["momentum", "=1", "a=1,a=2", "a=1,,b=2"] {
            assert!(Arguments::from_node(&Node::Str(bad.into())).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_nobody_asked_for_is_refused_with_its_neighbour() {
        let arguments = read("momentun=0.9");
        let mut reader = arguments.reader("train.optim_args", "optim = sgd");
        assert_eq!(reader.number("momentum", "a number", |_| true).unwrap(), None);
        let error = reader.finish().unwrap_err();
        assert!(
            error.to_string().contains("momentun") && error.to_string().contains("did you mean momentum"),
            "{error}"
        );
        let arguments = read("momentum=fast");
        let mut reader = arguments.reader("train.optim_args", "optim = sgd");
        assert!(reader.number("momentum", "a number", |_| true).is_err());
    }
}
