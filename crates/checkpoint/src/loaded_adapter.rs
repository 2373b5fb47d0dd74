//! Reads adapters from a folder, checks them against the model that they belong to, and prepares them for being merged
//! or run.
use std::path::{Path, PathBuf};

use super::adapter_config::AdapterConfig;
use super::peft::{self, Tensors};
use super::stamp::describe_adapter;
use super::stamp_check::AdapterStamp;
use super::untouched::Untouched;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;
use tunesmith_config::arch::{Arch, SCORE, ScoreHead};
use tunesmith_config::{Bias, Mode};
use tunesmith_model::adapters::{self, Method};
use tunesmith_model::stack::Frozen;
use tunesmith_model::targets::Placement;

/// An adapter that was read from a folder and fits its model.
#[derive(Debug)]
pub struct LoadedAdapter {
    /// The folder that it was read from.
    pub dir: PathBuf,
    /// Its settings, in the form for this model ([`AdapterConfig::on`]).
    pub config: AdapterConfig,
    /// The modules that it changes, in model order.
    pub placements: Vec<Placement>,
    /// Its tensors, by their names in its file without PEFT's prefix.
    pub tensors: Tensors,
}

impl LoadedAdapter {
    /// The first feature that the adapter has beyond the matrices A and B of plain LoRA, for messages; `None` if it is
    /// plain LoRA.
    pub fn beyond_matrices(&self) -> Option<&'static str> {
        let (tuning, about) = (&self.config.tuning, adapters::of(&self.config.tuning).map(Method::about));
        let other = about.filter(|about| about.mode != Mode::Lora).map_or("", |about| about.parts);
        let more = [
            (!other.is_empty(), other),
            (tuning.lora.use_dora, "DoRA's magnitudes"),
            (tuning.lora.bias != Bias::None, "trained biases"),
            (!tuning.lora.modules_to_save.is_empty(), "modules_to_save"),
            (self.placements.iter().any(|placement| placement.experts.is_some()), "adapters on experts"),
            (!self.config.token_rows.is_empty(), "rows of tokens"),
            (self.config.scores, "a classification head"),
        ];
        more.into_iter().find_map(|(has, what)| has.then_some(what))
    }

    /// A sentence about modules that its settings list in `modules_to_save` and that the model does not have; `None` if
    /// there are none.
    pub fn idle_modules(&self, arch: &Arch) -> Option<String> {
        let idle = self.config.targets().idle_modules(arch);
        (!idle.is_empty()).then(|| {
            format!(
                "{}: no module of the model has the name of modules_to_save = {idle:?}: ignored, as in PEFT",
                self.dir.display()
            )
        })
    }

    /// Reads the adapter in `dir`; `arch` has room for its tokens ([`Arch::fit`]).
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`]: the adapter cannot be read, does not fit the model, or fits only a base
    /// that `PiSSA` has changed.
    pub fn open(dir: &Path, arch: &Arch) -> Result<Self> {
        let (config, tensors) = peft::open_adapter(dir, arch)?;
        if adapters::of(&config.tuning).is_some_and(Method::takes_from_base) {
            let message = "an adapter in PiSSA's form, which fits a base that it has taken something out of";
            return Err(Error::checkpoint(format!("{}: not yet: {message}", dir.display())).hint(
                "take the run's adapter/ folder, which is plain LoRA; PEFT saves such with path_initial_model_for_weight_conversion",
            ));
        }
        let placements = config.place(arch)?;
        peft::check_tensors(dir, &tensors, &config.tensors(arch)?)?;
        let untouched = Untouched::of_adapter(dir, arch)?.into();
        let config = AdapterConfig { untouched, ..config.on(arch)? };
        Ok(Self { dir: dir.to_owned(), config, placements, tensors })
    }

    /// What the field `adapter` of a stamp would say about this adapter; `None` if the field describes another form
    /// (`PiSSA`) or is missing.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`]: the settings do not fit the model.
    pub fn described(&self, stamp: &AdapterStamp, arch: &Arch) -> Result<Option<String>> {
        if stamp.field("adapter").is_none_or(|text| text.contains("; pissa")) {
            return Ok(None);
        }
        let names = self.config.names_beside(arch, &self.placements)?;
        Ok(Some(describe_adapter(&self.placements, &names)))
    }

    /// Converts the adapter into what a model merges into its base while it loads.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`]: its settings do not fit the model.
    pub fn frozen(self, arch: &Arch) -> Result<Frozen> {
        let Self { dir, config, placements, mut tensors } = self;
        for (tensor, name) in config.renamed(arch, &placements)? {
            if let Some(values) = tensors.remove(&name) {
                tensors.insert(tensor, values);
            }
        }
        let placements = placements.into_iter().map(|placement| (placement.key.clone(), placement)).collect();
        let (origin, tokens) = (dir.display().to_string(), config.token_rows);
        Ok(Frozen { origin, placements, tensors, tokens, shared_head: arch.ties_head() })
    }
}

/// The classification head of the adapter in `dir`, if it has one. Labels come from a `config.json` beside it, else from the
/// run's stamp, else they are `LABEL_0` and so on, as in Transformers.
///
/// # Errors
/// [`tunesmith_base::Kind::Checkpoint`]: its settings or weights cannot be read. [`tunesmith_base::Kind::Model`]: its `config.json`
/// cannot be read.
pub fn score_head(dir: &Path) -> Result<Option<ScoreHead>> {
    if !AdapterConfig::from_dir(dir)?.scores {
        return Ok(None);
    }
    if files::is_there(&dir.join("config.json"))
        && let Some(head) = Arch::from_dir(dir)?.score
    {
        return Ok(Some(head));
    }
    let weights = peft::open_weights(dir)?;
    let Some(&[outputs, _]) = weights.shape(&format!("{}{SCORE}", peft::PREFIX)) else {
        let message = format!("{}: no tensor {SCORE:?}, which task SEQ_CLS has", dir.display());
        return Err(Error::checkpoint(message)
            .hint("save the head with the adapter (PEFT: modules_to_save=[\"score\"]), or take another adapter"));
    };
    let labels = AdapterStamp::of(dir)?.and_then(|origin| origin.labels());
    if let Some(head) = labels.map(|labels| ScoreHead { labels }).filter(|head| head.outputs() == outputs) {
        return Ok(Some(head));
    }
    Ok(Some(match outputs {
        1 => ScoreHead::number(),
        _ => ScoreHead { labels: (0..outputs).map(|id| format!("LABEL_{id}")).collect() },
    }))
}
