//! Checks that an adapter was trained on the base, tokenizer and chat template that it is now used with.
use std::path::{Path, PathBuf};

use super::terminal::print_note;
use crate::checkpoint::loaded_adapter::LoadedAdapter;
use crate::checkpoint::stamp_check::{self, AdapterStamp};
use crate::config::{Backend, Config};
use crate::data::{ChatTemplate, Tokenizer};
use crate::error::Result;
use crate::export::merge::Parts;
use crate::files;
use crate::model::quantize::{self, Held};
use crate::train::engine;

/// Hashes of the result's tokenizer and chat template, as stamps record them.
pub struct Texts(Vec<(&'static str, String)>);

impl Texts {
    /// Hashes the tokenizer in `dir`, if there is one, and `template`, which replaces its own.
    ///
    /// # Errors
    /// [`crate::Kind::Data`]: they cannot be read.
    pub fn of(dir: &Path, template: Option<&str>) -> Result<Self> {
        if !files::is_there(&dir.join("tokenizer.json")) {
            return Ok(Self(Vec::new()));
        }
        let tokenizer = Tokenizer::load(dir)?;
        let own = match template {
            Some(_) => None,
            None => ChatTemplate::find(dir, &tokenizer, None, None)?,
        };
        let template = template.or(own.as_ref().map(ChatTemplate::source)).unwrap_or_default();
        let template = blake3::hash(template.as_bytes()).to_hex().to_string();
        Ok(Self(vec![("tokenizer", tokenizer.hash().to_hex().to_string()), ("chat_template", template)]))
    }

    /// The hashes to compare with a stamp. The template is left out if the run used none.
    fn compared(&self, stamp: &AdapterStamp) -> Vec<(&'static str, String)> {
        let none = blake3::hash(b"").to_hex().to_string();
        let counts = |key: &str| key != "chat_template" || stamp.field(key) != Some(&none);
        self.0.iter().filter(|(key, _)| counts(key)).cloned().collect()
    }
}

/// Refuses every `--allow` except `base_model`, the only field that is compared when an adapter runs.
///
/// # Errors
/// [`crate::Kind::Config`].
pub fn check_allowed(allow: &[String]) -> Result<()> {
    stamp_check::check_allowed(allow, &[stamp_check::BASE_MODEL])
}

/// Checks that the adapter in `dir` was trained on this base, and reports a difference that `allow` accepts.
///
/// # Errors
/// [`crate::Kind::Checkpoint`], with both sides: it is another base, and `allow` does not accept it.
pub fn check_base(parts: &Parts, dir: &Path, allow: &[String]) -> Result<()> {
    let Some(passed) = parts.check_stamp(dir, allow)? else {
        print_note(&format!("no backend.json in or beside {}: its base cannot be checked", dir.display()));
        return Ok(());
    };
    for difference in passed {
        print_note(&format!("{}: {difference}", dir.display()));
    }
    let stamp = AdapterStamp::of(dir)?;
    if let Some((_, rounds)) = stamp.iter().find_map(|stamp| stamp.field("adapter")?.rsplit_once("; loftq of ")) {
        print_note(&format!(
            "{}: trained on a base that LoftQ changed in {rounds}, and used on the base without these changes",
            dir.display()
        ));
    }
    Ok(())
}

/// Adapters that fit the base, and how their runs held it.
pub struct Checked {
    pub adapters: Vec<LoadedAdapter>,
    /// The quantization of the base: the configuration's, else the runs'.
    pub held: Option<Held>,
    /// The modules that `PiSSA` kept in float32, if the runs rounded all other matrices of the base to bfloat16.
    pub rounded_but: Option<Vec<String>>,
}

/// Opens the adapters and compares each with the stamp of its run.
///
/// # Errors
/// [`crate::Kind::Checkpoint`], with both sides: an adapter was trained on something else than `allow` accepts.
pub fn check(
    parts: &Parts,
    adapters: &[PathBuf],
    config: Option<&Config>,
    texts: &Texts,
    allow: &[String],
) -> Result<Checked> {
    let backend = config.map_or(Backend::Fused, |config| config.tuning.backend);
    if let Some(config) = config {
        engine::choose(config.tuning.backend);
    }
    let mut held = match config {
        Some(config) if !adapters.is_empty() => Some(quantize::held(&parts.arch, config, &parts.weights)?),
        _ => None,
    };
    let (mut opened, mut base, mut rounded) = (Vec::new(), None, None);
    let mut wide = Vec::new();
    for dir in adapters {
        let adapter = LoadedAdapter::open(dir, &parts.arch)?;
        if let Some(idle) = adapter.idle_modules(&parts.arch) {
            print_note(&idle);
        }
        let Some(stamp) = AdapterStamp::of(dir)? else {
            print_note(&format!(
                "no backend.json in or beside {}: whether it was trained on this base cannot be checked",
                dir.display()
            ));
            opened.push(adapter);
            continue;
        };
        let base = match &base {
            Some(base) => base,
            None => base.insert(parts.fingerprint()?),
        };
        let form = match &held {
            Some(form) => form,
            None => held.insert(stamp.held()?),
        };
        let mut now = vec![
            ("base_model", base.clone()),
            ("backend", engine::engine(backend).to_owned()),
            ("quantization", Held::describe(form.as_ref())),
        ];
        now.extend(adapter.described(&stamp, &parts.arch)?.map(|shape| ("adapter", shape)));
        // The first adapter's run says whether the base is rounded; the others must have trained on the same.
        let was_rounded = parts.was_rounded(stamp.field("dtype"));
        if was_rounded != *rounded.get_or_insert(was_rounded) {
            let other = if was_rounded { "base float32" } else { "base bfloat16" };
            now.push(("dtype", other.to_owned()));
        }
        if stamp.field("adapter").is_some_and(|text| text.contains("; pissa")) {
            wide.extend(adapter.placements.iter().map(|placement| placement.module.clone()));
        }
        now.extend(texts.compared(&stamp));
        for passed in stamp.compare(dir, &now, allow)? {
            print_note(&format!("{}: {passed}", dir.display()));
        }
        opened.push(adapter);
    }
    let as_stored = |field: &str| allow.iter().any(|key| key == field);
    let rounded = rounded == Some(true) && !as_stored("dtype");
    Ok(Checked {
        adapters: opened,
        held: held.flatten().filter(|_| !as_stored("quantization")),
        rounded_but: rounded.then_some(wide),
    })
}
