//! Merges foreign configurations with our own: which value wins, and which contradictions are refused.
use super::foreign::{
    Condition, Foreign, ForeignSetting, Format, KEYS, KeyOutcome, NotNeeded, Outcome, format_of, read, read_trainer_key,
};
use super::lookup::find;
use super::resolved::Resolved;
use super::resolver::Resolver;
use super::schema::{Config, OptionDef, TrainConfig};
use super::source::{Setting, Source};
use super::value::{ConfigValue as _, Node};
use super::yaml::Document;
use std::path::Path;
use tunesmith_base::error::{Error, Result};

impl Resolver {
    /// Reads a configuration file of DeepSpeed, Accelerate or FSDP as if the matching key, such as `train.deepspeed`, named it. Returns
    /// false for any other file, which is left unread.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn foreign_file(&mut self, path: &Path) -> Result<bool> {
        let Some(format) = format_of(&Document::read(path)?.entries) else { return Ok(false) };
        let named = || Node::Str(path.display().to_string());
        let (title, settings) = match format {
            Format::DeepSpeed => (format.title(), vec![("train.deepspeed", named())]),
            Format::Accelerate => (format.title(), vec![("train.accelerate", named())]),
            Format::Fsdp => ("FSDP", vec![("train.fsdp", Node::Bool(true)), ("train.fsdp_config", named())]),
            Format::Trainer => return Ok(false),
        };
        let source = || Source::File { path: path.to_owned(), line: 1, column: 1 };
        let key = settings.last().map_or("", |(key, _)| *key);
        self.notes.push(format!("{}: a configuration of {title}, read as {key}", path.display()));
        for (key, node) in settings {
            if let Some(def) = find(key) {
                self.put(def, key, node, source())?;
            }
        }
        Ok(true)
    }

    /// Reads a key of [`Format::Trainer`], and returns the keys of ours that it sets; `None` for any other key.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: the value is refused.
    pub(super) fn take_trainer(&mut self, spelled: &str, node: &Node, source: &Source) -> Result<Option<Vec<String>>> {
        let Some(taken) = read_trainer_key(spelled, node, source)? else { return Ok(None) };
        match taken.why {
            Some(note) => {
                let entry = NotNeeded { key: spelled.to_owned(), value: node.to_json(), source: source.clone(), note };
                self.not_needed.insert(spelled.to_owned(), entry);
            }
            None => drop(self.not_needed.remove(spelled)),
        }
        let mut ours = Vec::new();
        for (key, node) in taken.settings {
            if let Some(def) = find(&key) {
                self.put(def, spelled, node, source.clone())?;
                ours.push(key);
            }
        }
        Ok(Some(ours))
    }

    /// Reads the foreign files that the settings name. Their values replace defaults and `auto`, but not values from the shell. A value
    /// that our own file gives too must be the same.
    ///
    /// # Errors
    /// Those of [`read`]; a contradiction, with both sides.
    pub(super) fn take_foreign(&mut self) -> Result<()> {
        let named = KEYS.iter().filter_map(|key| {
            let found = self.found.get(*key)?;
            Some((*key, found.node.clone(), found.source.clone()))
        });
        let named: Vec<_> = named.collect();
        self.foreign = read(&named)?;
        self.notes.append(&mut self.foreign.notes);
        let settings = std::mem::take(&mut self.foreign.settings);
        // Unconditional values first: the others depend on them.
        let (first, later): (Vec<ForeignSetting>, Vec<ForeignSetting>) =
            settings.into_iter().partition(|setting| setting.condition == Condition::None);
        for setting in first.into_iter().chain(later) {
            self.take_setting(setting)?;
        }
        self.rows_of_a_step()
    }

    fn take_setting(&mut self, theirs: ForeignSetting) -> Result<()> {
        let def =
            find(&theirs.key).ok_or_else(|| Error::config(format!("{}: unknown key {}", theirs.source, theirs.key)))?;
        if let Condition::SwitchedOn(switch) = theirs.condition
            && !self.is_on(switch)
        {
            self.foreign.overrule(&theirs, Outcome::Same, format!("{} is read only with {switch}", theirs.key));
            return Ok(());
        }
        let open = |node: &Node| matches!(node, Node::Str(word) if word == "auto");
        if let Some(found) = self.found.get(&theirs.key).filter(|found| !open(&found.node)) {
            if value_of(def, &found.node) == value_of(def, &theirs.node) {
                return Ok(());
            }
            if theirs.condition == Condition::Unset || found.source.is_shell() {
                let text = format!("{}: {} ({})", theirs.key, shown(def, &found.node), found.source);
                self.foreign.overrule(&theirs, Outcome::Overridden, text);
                return Ok(());
            }
            // A foreign file that the shell names takes precedence over our own file.
            if !(theirs.named_by.is_shell() && matches!(found.source, Source::File { .. })) {
                let sides = [(&found.node, &found.source), (&theirs.node, &theirs.source)];
                let [ours, other] =
                    sides.map(|(node, source)| format!("{}: {} ({source})", theirs.key, shown(def, node)));
                return Err(Error::config(format!("{ours} contradicts {other}")).hint(
                    "make them the same, or set \"auto\" in the file; a KEY=VALUE override or an environment variable takes precedence over both",
                ));
            }
        }
        self.put(def, &theirs.key, theirs.node, theirs.source)
    }

    fn is_on(&self, key: &str) -> bool {
        match self.found.get(key) {
            Some(found) => found.node == Node::Bool(true),
            None => find(key).is_some_and(|def| (def.get)(&Config::default()) == serde_json::Value::Bool(true)),
        }
    }

    /// Sets `train.effective_batch` to DeepSpeed's `train_batch_size`, if the batch size or accumulation count is `auto`.
    fn rows_of_a_step(&mut self) -> Result<()> {
        let Some((rows, source)) = self.foreign.claims.rows.clone() else { return Ok(()) };
        let open = |key: &str| matches!(self.found.get(key), Some(found) if matches!(&found.node, Node::Str(word) if word == "auto"));
        if !open("train.batch_size") && !open("train.grad_accum") {
            return Ok(());
        }
        let key = "train.effective_batch";
        let Some(def) = find(key) else { return Ok(()) };
        let rows = Node::Int(rows as i128);
        if let Some(found) = self.found.get(key)
            && value_of(def, &found.node) != value_of(def, &rows)
        {
            let (ours, theirs) = (shown(def, &found.node), shown(def, &rows));
            return Err(Error::config(format!("{key}: {ours} ({}) contradicts {theirs} ({source})", found.source)));
        }
        self.put(def, key, rows, source)
    }
}

/// The value of a setting after reading `node`, as JSON; null if the setting does not take it.
fn value_of(def: &OptionDef, node: &Node) -> serde_json::Value {
    let mut scratch = Config::default();
    match (def.set)(&mut scratch, node) {
        Ok(()) => (def.get)(&scratch),
        Err(_) => serde_json::Value::Null,
    }
}

fn shown(def: &OptionDef, node: &Node) -> String {
    value_of(def, node).to_string()
}

impl Foreign {
    /// Changes the outcome of the key that gave a setting, which does not count.
    fn overrule(&mut self, setting: &ForeignSetting, outcome: Outcome, why: String) {
        let of_key = |one: &&mut KeyOutcome| one.source == setting.source && one.ours.as_ref() == Some(&setting.key);
        if let Some(found) = self.outcomes.iter_mut().find(of_key) {
            (found.outcome, found.setting, found.why) = (outcome, String::new(), why);
        }
    }

    /// Fills in the values that hold for keys that are `auto`.
    pub(super) fn show_auto(&mut self, settings: &[Setting]) {
        for auto in self.outcomes.iter_mut().filter(|one| one.outcome == Outcome::Auto) {
            let setting = settings.iter().find(|setting| Some(&setting.key) == auto.ours.as_ref());
            let Some(Setting { key, value, source }) = setting else { continue };
            auto.setting = match (key.as_str(), value.is_null()) {
                ("train.effective_batch", true) => "train.batch_size x train.grad_accum x ranks".to_owned(),
                ("train.max_steps", _) if *value == TrainConfig::default().max_steps.to_json() => {
                    "as many as the epochs have".to_owned()
                }
                _ => format!("{key}: {value} ({source})"),
            };
        }
    }
}

impl Resolved {
    /// The configuration for `world` ranks, of which `local` are on this machine: claims of foreign files are checked, and sizes that
    /// follow from them are filled in ([`crate::foreign::Claims::check_ranks`]).
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: a claim does not hold; the error names both sides.
    pub fn in_world(&self, world: usize, local: usize, launcher: Option<&str>) -> Result<Self> {
        let mut settled = self.clone();
        self.foreign.claims.check_ranks(&mut settled.config, world, local, launcher)?;
        for setting in &mut settled.settings {
            let train = &settled.config.train;
            match setting.key.as_str() {
                "train.batch_size" => setting.value = train.batch_size.to_json(),
                "train.grad_accum" => setting.value = train.grad_accum.to_json(),
                "train.effective_batch" => setting.value = train.effective_batch.to_json(),
                _ => {}
            }
        }
        Ok(settled)
    }
}
