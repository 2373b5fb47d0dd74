//! Builds a [`Resolved`] configuration from files, environment, `KEY=VALUE` overrides and flags.
//!
//! Later sources win: defaults, the file with its `include`s, the environment, `KEY=VALUE` overrides, flags.
//! Every value is checked, even one that a later source replaces.
use super::auto_values::Auto;
use super::enums::Quantization;
use super::foreign::{self, NotNeeded};
use super::lookup::{check, find, refused};
use super::option::{env_name, variable};
use super::resolved::{Resolved, set_by};
use super::resolver::{Resolver, SourcedValue};
use super::schema::{Config, OptionDef, SECTIONS, VARIABLES, options};
use super::source::{Setting, Source};
use super::suggest::nearest;
use super::unsupported_keys::LATER;
use super::validate;
use super::value::{ConfigValue, Node, Refusal};
use super::yaml::{self, Document};
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use tunesmith_base::error::{Error, Result};

/// The deepest chain of includes.
const MAX_INCLUDE_DEPTH: usize = 16;
/// The most files that one configuration may be made of.
const MAX_FILES: usize = 64;

/// A command-line flag that sets a key.
#[derive(Debug, Clone)]
pub struct Flag {
    /// As the user knows it: `--resume`.
    pub name: &'static str,
    /// The full key that it sets.
    pub key: &'static str,
    /// The value, as the user wrote it.
    pub value: String,
}

/// Reads a configuration for a run. Unlike [`load_partial`], it requires a model and training rows.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`], naming the file and line, variable or word, the key, what was found and what is expected.
pub fn load(path: &Path, words: &[String], env: &[(String, String)], flags: &[Flag]) -> Result<Resolved> {
    let resolved = load_partial(path, words, env, flags)?;
    resolved.check_runnable()?;
    Ok(resolved)
}

/// Reads a configuration that may lack the model or the training rows.
///
/// # Errors
/// As [`load`].
pub fn load_partial(path: &Path, words: &[String], env: &[(String, String)], flags: &[Flag]) -> Result<Resolved> {
    load_optional(Some(path), words, env, flags)
}

/// As [`load_partial`], but without a file all other keys have their defaults.
///
/// # Errors
/// As [`load`].
pub fn load_optional(
    path: Option<&Path>,
    words: &[String],
    env: &[(String, String)],
    flags: &[Flag],
) -> Result<Resolved> {
    let mut resolver = Resolver::default();
    if let Some(path) = path
        && !resolver.foreign_file(path)?
    {
        resolver.file(path, None, &mut Vec::new())?;
    }
    resolver.environment(env)?;
    words.iter().try_for_each(|word| resolver.word(word))?;
    for flag in flags {
        let source = Source::Flag(flag.name.to_owned());
        let def = find(flag.key).ok_or_else(|| unknown(&source, flag.key))?;
        resolver.text(def, flag.key, &flag.value, source)?;
    }
    resolver.take_foreign()?;
    resolver.of_nccl(env)?;
    let mut resolved = resolver.finish(path.unwrap_or(Path::new("the command line")))?;
    validate::disable_empty_validation(&mut resolved);
    validate::ranks_as_threads(&mut resolved);
    validate::contradictions(&resolved)?;
    Ok(resolved)
}

/// Reads a configuration from its text, without includes and environment. Messages call it `path`. It may lack the model or the
/// training rows.
///
/// # Errors
/// As [`load`].
pub fn load_text(path: &Path, text: &str) -> Result<Resolved> {
    let mut resolver = Resolver::default();
    let document = Document::parse(path, text.as_bytes().to_vec())?;
    resolver.section(&document, "", &document.entries, &mut Vec::new(), &mut BTreeMap::new())?;
    resolver.take_foreign()?;
    let resolved = resolver.finish(path)?;
    validate::contradictions(&resolved)?;
    Ok(resolved)
}

/// Whether this version accepts a value under a full key.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`], with why not.
pub fn try_setting(key: &str, node: &Node) -> Result<()> {
    let source = Source::Word(key.to_owned());
    let def = find(key).ok_or_else(|| unknown(&source, key))?;
    check(def, key, node, &source)
}

impl Resolver {
    /// Reads a file, its includes first. `includer` is the line that includes it, `stack` the files that are being read.
    fn file(&mut self, path: &Path, includer: Option<&Source>, stack: &mut Vec<PathBuf>) -> Result<()> {
        let blame = |error: Error| match includer {
            Some(line) => error.context(format!("{}: include", line.place())),
            None => error,
        };
        let identity = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        if stack.contains(&identity) {
            return Err(blame(Error::config(format!("{} includes itself", path.display())).hint("break the circle")));
        }
        self.files += 1;
        if stack.len() >= MAX_INCLUDE_DEPTH || self.files > MAX_FILES {
            let limits = format!("more than {MAX_INCLUDE_DEPTH} levels or {MAX_FILES} files");
            return Err(blame(Error::config(limits)));
        }
        let document = Document::read(path).map_err(blame)?;
        stack.push(identity);
        for (index, (_, node)) in document.entries.iter().enumerate().filter(|(_, (key, _))| key == "include") {
            let source = source_in(&document, &[index]);
            let names = Vec::<PathBuf>::from_node(node).map_err(|refusal| refused(&source, "include", refusal))?;
            for name in names {
                self.file(&path.with_file_name(name), Some(&source), stack)?;
            }
        }
        stack.pop();
        self.section(&document, "", &document.entries, &mut Vec::new(), &mut BTreeMap::new())
    }

    /// Reads one section of a file. `steps` are the indices that lead to the section, `seen` the file's keys so far.
    fn section(
        &mut self,
        document: &Document,
        section: &str,
        entries: &[(String, Node)],
        steps: &mut Vec<usize>,
        seen: &mut BTreeMap<String, (String, Source)>,
    ) -> Result<()> {
        for (index, (key, node)) in entries.iter().enumerate() {
            steps.push(index);
            let spelled = if section.is_empty() { key.clone() } else { format!("{section}.{key}") };
            let source = source_in(document, steps);
            let def = find(&spelled);
            // SFT-Play's `data.split: {val_ratio: 0.1}`.
            let parts = matches!(node, Node::Map(_)) && spelled == "data.split";
            let canonical = match def {
                Some(def) if !parts => def.path(),
                _ => spelled.clone(),
            };
            let canonical = if parts { format!("{canonical}.") } else { canonical };
            if let Some((earlier, at)) = seen.get(&canonical) {
                let what = if *earlier == spelled {
                    format!("{spelled} is given twice")
                } else {
                    format!("{spelled} and {earlier} are the same setting")
                };
                return Err(Error::config(format!("{}: {what}; the first is at {at}", source.place())).hint("keep one"));
            }
            seen.insert(canonical, (spelled.clone(), source.clone()));
            if is_section(&spelled) || parts {
                match node {
                    Node::Map(entries) => self.section(document, &spelled, entries, steps, seen)?,
                    Node::Null => {}
                    other => {
                        let error = refused(&source, &spelled, Refusal::new(other, "keys, indented below it"));
                        return Err(match other {
                            Node::Str(text) => yaml::with_colon_hint(error, text),
                            _ => error,
                        });
                    }
                }
            } else if let Some(def) = def {
                self.put(def, &spelled, node.clone(), source)?;
            } else if let Some(set) = self.take_trainer(&spelled, node, &source)? {
                for ours in set {
                    if let Some((earlier, at)) = seen.insert(ours, (spelled.clone(), source.clone())) {
                        let what = format!("{spelled} and {earlier} are the same setting; the first is at {at}");
                        return Err(Error::config(format!("{}: {what}", source.place())).hint("keep one"));
                    }
                }
            } else if spelled != "include" {
                return Err(unknown(&source, &spelled));
            }
            steps.pop();
        }
        Ok(())
    }

    /// Reads the environment. An empty variable counts as unset.
    fn environment(&mut self, env: &[(String, String)]) -> Result<()> {
        let env: BTreeMap<&str, &str> =
            env.iter().filter(|(_, value)| !value.is_empty()).map(|(name, value)| (&**name, &**value)).collect();
        let mut known = HashSet::new();
        for def in options() {
            let mut earlier: Option<String> = None;
            for (name, spelled) in variables(def) {
                if let Some(value) = env.get(&*name) {
                    if let Some(earlier) = earlier {
                        return Err(Error::config(format!("env {earlier} and env {name} are the same setting"))
                            .hint("unset one of them"));
                    }
                    self.text(def, &spelled, value, Source::Env(name.clone()))?;
                    earlier = Some(name.clone());
                }
                known.insert(name);
            }
        }
        for key in foreign::trainer_names() {
            let name = variable(&key);
            if let Some(value) = env.get(&*name) {
                self.take_trainer(&key, &yaml::parse_value(value), &Source::Env(name.clone()))?;
            }
            known.insert(name);
        }
        for name in env.keys().filter(|name| !known.contains(**name)) {
            self.notes.extend(check_foreign(name, &known)?);
        }
        Ok(())
    }

    fn word(&mut self, word: &str) -> Result<()> {
        let source = Source::Word(word.to_owned());
        let Some((key, value)) = word.split_once('=') else {
            return Err(Error::config(format!("{}: expected KEY=VALUE", source.place()))
                .hint("one configuration file, then words such as train.batch_size=1 or TRAIN_BATCH_SIZE=1"));
        };
        let name = env_name(key);
        if let Some((def, spelled)) = find_env(&name).or_else(|| find_env(&variable(&name))) {
            return self.text(def, &spelled, value, source);
        }
        match foreign::trainer_names().find(|key| variable(key) == name) {
            Some(key) => self.take_trainer(&key, &yaml::parse_value(value), &source).map(drop),
            None if is_secret(key) => Err(unknown(&Source::Word(format!("{key}=***")), &dotted(key))),
            None => Err(unknown(&source, &dotted(key))),
        }
    }

    /// Reads a value from the shell: as YAML, as the text itself, or as a list at its commas, whichever the key takes.
    fn text(&mut self, def: &'static OptionDef, spelled: &str, text: &str, source: Source) -> Result<()> {
        let mut scratch = Config::default();
        let node = yaml::parse_value(text);
        let literal = Node::Str(text.to_owned());
        let plain = !matches!(node, Node::List(_));
        if plain && (def.set)(&mut scratch, &node).is_err() && (def.set)(&mut scratch, &literal).is_ok() {
            return self.put(def, spelled, literal, source);
        }
        let node = match comma_list(text).filter(|list| (def.set)(&mut scratch, list).is_ok()) {
            Some(list) if matches!(node, Node::Str(_)) && !Path::new(text).exists() => list,
            _ => node,
        };
        self.put(def, spelled, node, source)
    }

    fn finish(mut self, path: &Path) -> Result<Resolved> {
        let mut config = Config::default();
        let mut settings = Vec::new();
        for def in options() {
            let key = def.path();
            let (source, word) = match self.found.remove(&key) {
                Some(SourcedValue { node, source }) => {
                    (def.set)(&mut config, &node).map_err(|refusal| refused(&source, &key, refusal))?;
                    (source, Some(node))
                }
                None => (Source::Default, None),
            };
            // `qlora` is `lora` on a base of 4 bits; the word stays as it was asked for.
            let qlora = key == "tuning.mode" && matches!(&word, Some(Node::Str(word)) if word == "qlora");
            let value = if qlora { "qlora".into() } else { (def.get)(&config) };
            if qlora && config.model.quantization == Quantization::Auto {
                config.model.quantization = Quantization::Nf4;
                set_by(&mut settings, "model.quantization", config.model.quantization.to_json(), &source);
            }
            settings.push(Setting { key, value, source });
        }
        // With `batch_size: auto`, a `grad_accum` that nobody set is found by measuring too.
        let open = |setting: &&mut Setting| setting.key == "train.grad_accum" && setting.source == Source::Default;
        if let (Auto::Auto, Some(setting)) = (config.train.batch_size, settings.iter_mut().find(open)) {
            config.train.grad_accum = Auto::Auto;
            setting.value = config.train.grad_accum.to_json();
        }
        self.foreign.show_auto(&settings);
        let not_needed: Vec<NotNeeded> = self.not_needed.into_values().collect();
        self.notes.extend(not_needed.iter().map(NotNeeded::text));
        Ok(Resolved { config, settings, path: path.to_owned(), notes: self.notes, foreign: self.foreign, not_needed })
    }
}

/// `a,b` as a list; `None` where there is no comma, or brackets, so that regular expressions keep their commas.
fn comma_list(text: &str) -> Option<Node> {
    let items: Vec<&str> = text.split(',').map(str::trim).collect();
    let plain = items.len() > 1 && !text.contains(['(', '[', '{']) && items.iter().all(|item| !item.is_empty());
    plain.then(|| Node::List(items.into_iter().map(yaml::parse_value).collect()))
}

fn source_in(document: &Document, steps: &[usize]) -> Source {
    let position = document.position(steps);
    Source::File { path: document.path().to_owned(), line: position.line, column: position.column }
}

/// The setting that an environment variable sets, and the spelling of the key that the variable is made from.
fn find_env(name: &str) -> Option<(&'static OptionDef, String)> {
    options().find_map(|def| variables(def).find(|(variable, _)| variable == name).map(|(_, spelled)| (def, spelled)))
}

/// The environment variables of a setting, each with the spelling of the key that it is made from.
fn variables(def: &'static OptionDef) -> impl Iterator<Item = (String, String)> {
    let further =
        VARIABLES.iter().filter(|(_, key)| def.path() == *key).map(|(name, key)| ((*name).into(), (*key).into()));
    def.spellings().map(|spelled| (variable(&spelled), spelled)).chain(further)
}

fn is_section(path: &str) -> bool {
    SECTIONS.iter().any(|section| section.name == path)
}

/// `TRAIN_BATCH_SIZE` as the full key `train.batch_size`, for messages. The longest section name that fits is the section.
fn dotted(key: &str) -> String {
    if key.contains('.') {
        return key.to_owned();
    }
    let lower = key.to_lowercase();
    let sections = SECTIONS.iter().filter_map(|section| {
        let rest = lower.strip_prefix(&section.name.replace('.', "_"))?.strip_prefix('_')?;
        Some((section.name.len(), format!("{}.{rest}", section.name)))
    });
    sections.max_by_key(|(length, _)| *length).map_or(lower.clone(), |(_, key)| key)
}

/// Whether an unknown key may hold a secret, so that no message may show its value.
fn is_secret(key: &str) -> bool {
    let of_text = ["new_tokens", "max_tokens", "min_tokens", "eos_token", "bos_token", "pad_token", "unk_token"];
    let key = of_text.iter().fold(key.to_lowercase(), |key, word| key.replace(word, ""));
    ["token", "secret", "password", "api_key"].iter().any(|word| key.contains(word))
}

/// The error for a key that does not exist: what takes its place, or the most similar key.
fn unknown(source: &Source, key: &str) -> Error {
    // A whole section may be one of a later version.
    let refused = |name: &str| key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    if let Some((_, reason)) = LATER.iter().find(|(name, _)| refused(name)) {
        return Error::config(format!("{}: {key} is not supported", source.place())).hint(*reason);
    }
    let error = Error::config(format!("{}: unknown key {key}", source.place()));
    if let Some(def) = options().find(|def| def.section == key) {
        return error.hint(format!("{key} is a section; did you mean {}, or another key of it?", def.env()));
    }
    match suggestion(key) {
        Some(near) => error.hint(format!("did you mean {near}?")),
        None => error.hint("`tunesmith config --docs` lists every key"),
    }
}

fn suggestion(key: &str) -> Option<String> {
    let (section, leaf) = key.rsplit_once('.').unwrap_or(("", key));
    // The right name in the wrong section.
    let everything: Vec<String> = options().flat_map(OptionDef::spellings).chain(foreign::trainer_names()).collect();
    let parts = |path: &'_ str| path.rsplit_once('.').map(|(section, leaf)| (section.to_owned(), leaf.to_owned()));
    if let Some(misplaced) = everything.iter().find(|path| parts(path).is_some_and(|(_, name)| name == leaf)) {
        return Some(misplaced.clone());
    }
    let leaves = everything.iter().filter_map(|path| path.rsplit_once('.').filter(|(place, _)| *place == section));
    if let Some(near) = nearest(leaf, leaves.map(|(_, leaf)| leaf)) {
        return Some(format!("{section}.{near}"));
    }
    let names = everything.iter().map(String::as_str).chain(SECTIONS.iter().map(|section| section.name));
    nearest(key, names.chain(["include"]).filter(|name| !name.is_empty())).map(str::to_owned)
}

/// Refuses an environment variable that is almost one of ours, or that stands for an unsupported key. Every other is ignored; a note
/// says so if it begins with the name of a section.
fn check_foreign(name: &str, known: &HashSet<String>) -> Result<Option<String>> {
    let mut named = SECTIONS.iter().filter(|section| !section.name.is_empty());
    let ours = named.any(|section| name.starts_with(&format!("{}_", env_name(section.name))));
    if !ours {
        return Ok(None);
    }
    if let Some((key, reason)) = LATER.iter().find(|(key, _)| key.contains('.') && env_name(key) == name) {
        return Err(Error::config(format!("env {name}: {key} is not supported")).hint(*reason));
    }
    // Short names are near to everything: the allowed distance grows with the part after the section.
    let near = known.iter().filter_map(|candidate| {
        let leaf = candidate.split_once('_').map_or(0, |(_, rest)| rest.len());
        let distance = strsim::osa_distance(name, candidate);
        (distance <= 2.min(leaf / 3)).then_some((distance, candidate))
    });
    match near.min() {
        Some((_, candidate)) => Err(Error::config(format!("env {name}: unknown setting"))
            .hint(format!("did you mean {candidate}? (unset {name} if it is not meant for tunesmith)"))),
        None => Ok(Some(format!("env {name} is ignored: no key reads it"))),
    }
}
