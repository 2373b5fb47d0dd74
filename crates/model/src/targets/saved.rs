//! `modules_to_save`: modules that are trained in full beside adapters.
use std::collections::BTreeSet;

use super::super::names::peft_name;
use super::{Targets, hint_nearest, last, modules};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::{Arch, SCORE};

impl Targets {
    /// The tensors that are trained in full beside the adapters: those of every module whose name ends with an entry of
    /// `modules_to_save`. As in PEFT, the end need not begin after a dot. For a head that shares the embedding's
    /// matrix, that matrix is the embedding.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: an entry matches nothing, unless it is of an adapter's file, or cannot be trained yet.
    pub fn saved_tensors(&self, arch: &Arch) -> Result<Vec<String>> {
        if (self.modules_to_save.is_empty() && arch.score.is_none()) || arch.freezes_language() {
            return Ok(Vec::new());
        }
        let modules = modules(arch);
        let mut saved = BTreeSet::new();
        for entry in &self.modules_to_save {
            let found: Vec<_> = modules.iter().filter(|name| ends_with(arch, name, entry)).collect();
            if found.is_empty() && is_saved_of_vision(arch, entry) {
                continue;
            }
            if found.is_empty() && self.strict {
                let section = self.section;
                let error = Error::config(format!("{section}.modules_to_save: {entry:?} is no module of the model"));
                return Err(hint_nearest(error, entry, modules.iter().map(|name| last(name))));
            }
            saved.extend(found);
        }
        let embedding = "model.embed_tokens".to_owned();
        if arch.naming().is_none() && arch.is_renamed() && saved.contains(&embedding) {
            return Err(Error::config(format!(
                "{}.modules_to_save: not yet: the embedding of {} beside adapters",
                self.section, arch.family.model_type
            ))
            .hint("set tuning.mode: full or freeze to train it"));
        }
        if arch.ties_head() && saved.iter().any(|module| *module == "lm_head") {
            saved.insert(&embedding);
        }
        let is_saved = |tensor: &str| {
            let tensor = peft_name(tensor);
            saved.iter().any(|module| tensor.strip_prefix(module.as_str()).is_some_and(|rest| rest.starts_with('.')))
        };
        // A head of scores is always trained in full, as PEFT does it for SEQ_CLS.
        let saved_whole = |name: &String| name == SCORE || is_saved(name);
        let tensors: Vec<_> = arch.parameters().into_iter().map(|spec| spec.name).filter(saved_whole).collect();
        let transposed =
            arch.module_names.transposed.then(|| tensors.iter().find(|name| of_matrix(arch, name))).flatten();
        if let Some(matrix) = transposed {
            return Err(Error::config(format!(
                "{}.modules_to_save: not yet: {matrix}, which Transformers holds transposed",
                self.section
            ))
            .hint("train matrices of blocks by adapters, or by mode: freeze"));
        }
        // Their module in Transformers 5 is none here.
        let experts_end_with = |name: &str, entry: &String| {
            name.find(".experts.").is_some_and(|at| name[..at + ".experts".len()].ends_with(entry.as_str()))
        };
        let names_experts = |name: &&String| self.modules_to_save.iter().any(|entry| experts_end_with(name, entry));
        let all: Vec<String> = arch.parameters().into_iter().map(|spec| spec.name).collect();
        if let Some(router) = self.biased_router(arch, &tensors) {
            return Err(Error::config(format!(
                "{}.modules_to_save: not yet: the router {router}, whose buffer e_score_correction_bias PEFT expects in the file",
                self.section
            ))
            .hint("leave it out, or train it by mode: freeze"));
        }
        // Files of OLMo Hybrid name these modules otherwise than its class in Transformers, where PEFT looks for them.
        let renamed = |name: &&String| ["layer_norm", "layernorm", "conv1d"].iter().any(|part| name.contains(part));
        let of_olmo = tensors.iter().find(renamed).filter(|_| self.strict && arch.family.model_type == "olmo_hybrid");
        if let Some(name) = of_olmo {
            return Err(Error::config(format!("{}.modules_to_save: not yet: {name} of olmo_hybrid", self.section))
                .hint("train the norms and convolutions of blocks by mode: freeze"));
        }
        let expert = tensors.iter().find(|name| name.contains(".experts.")).or_else(|| all.iter().find(names_experts));
        if let Some(expert) = expert {
            return Err(Error::config(format!("{}.modules_to_save: not yet: experts ({expert})", self.section))
                .hint("name the router as mlp.gate; experts are trained by target_parameters or by mode: freeze"));
        }
        Ok(tensors)
    }

    /// The first router among `tensors` whose module also holds the bias of the choice, a buffer that is not trained.
    fn biased_router(&self, arch: &Arch, tensors: &[String]) -> Option<String> {
        let bias = arch.experts.as_ref()?.choice_bias()?;
        let module = format!(".{}.weight", bias.strip_suffix(".e_score_correction_bias")?);
        let router = tensors.iter().find(|name| self.strict && name.ends_with(&module))?;
        router.strip_suffix(".weight").map(str::to_owned)
    }
}

/// PEFT's rule for `modules_to_save`: the end of a module's name, without regard to dots.
pub(super) fn ends_with(arch: &Arch, module: &str, entry: &str) -> bool {
    arch.names(module).iter().any(|name| name.ends_with(entry))
}

/// Whether an entry of `modules_to_save` is a module that an encoder or a connector trains.
pub(super) fn is_saved_of_vision(arch: &Arch, entry: &String) -> bool {
    arch.vision.as_ref().is_some_and(|vision| vision.saved_modules().contains(entry))
}

/// Whether a tensor is the matrix of a linear module in a block.
fn of_matrix(arch: &Arch, tensor: &str) -> bool {
    arch.linear_modules().iter().any(|linear| linear.layer.is_some() && linear.weight() == tensor)
}
