//! Turns configurations of other toolkits into ours, with one table for each toolkit. Every key of the source has a
//! [`KeyOutcome`], so that none is dropped silently.
//!
//! A setting that this version refuses is written too, and [`Imported::refused`] names it. The file loads once a version supports the
//! setting.
mod axolotl;
mod data_set;
mod import;
mod llama_factory;
mod ms_swift;
mod names;
mod nodes;
mod ranks;
mod refusal;
mod report;
mod sft_play;
mod source_file;
mod toolkit;
mod trl;
mod write;

pub use report::{Imported, Refused};
pub use toolkit::Toolkit;

use import::{Import, Rules};
use source_file::entries;
use std::path::Path;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::Node;
use tunesmith_config::foreign::rules::key_names;
pub use tunesmith_config::foreign::{KeyOutcome, Outcome};

impl Toolkit {
    const fn rules(self) -> Rules {
        match self {
            Self::Axolotl => axolotl::RULES,
            Self::LlamaFactory => llama_factory::RULES,
            Self::MsSwift => ms_swift::RULES,
            Self::SftPlay => sft_play::RULES,
            Self::Trl => trl::RULES,
        }
    }

    /// The toolkit whose table knows the most of these keys; `None` on a tie.
    fn recognise(entries: &[(String, Node)]) -> Option<Self> {
        let known = |toolkit: Self| {
            let own = toolkit.own_keys();
            if !entries.iter().any(|(key, _)| own.contains(&key.as_str())) {
                return 0;
            }
            entries.iter().filter(|(key, _)| key_names(toolkit.rules()).any(|name| name == key)).count()
        };
        let mut ranked: Vec<(usize, Self)> = Self::ALL.into_iter().map(|toolkit| (known(toolkit), toolkit)).collect();
        ranked.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
        (ranked[0].0 > ranked[1].0).then_some(ranked[0].1)
    }
}

/// Imports a configuration of another toolkit. Without `toolkit`, its keys say which one it is.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: not YAML, keys of no toolkit, a task other than supervised fine-tuning, or settings
/// that contradict each other.
pub fn read(path: &Path, toolkit: Option<Toolkit>) -> Result<Imported> {
    let entries = entries(path)?;
    let Some(toolkit) = toolkit.or_else(|| Toolkit::recognise(&entries)) else {
        return Err(Error::config(format!(
            "{}: its keys are not those of Axolotl, LLaMA-Factory, ms-swift, SFT-Play or TRL",
            path.display()
        ))
        .hint(
            "if it is one of them, say which: --from axolotl, llama-factory, ms-swift, sft-play or trl; arguments of Transformers \
             have the same names here, in the section train (`tunesmith config --docs`)",
        ));
    };
    let mut import = Import::new(path, toolkit, toolkit.rules(), entries);
    let begin: fn(&mut Import) -> Result<()> = match toolkit {
        Toolkit::Axolotl => axolotl::read,
        Toolkit::LlamaFactory => llama_factory::read,
        Toolkit::MsSwift => ms_swift::read,
        Toolkit::SftPlay => sft_play::read,
        Toolkit::Trl => trl::read,
    };
    begin(&mut import)?;
    if import.written("model.device").is_none() {
        let auto = Node::Str("auto".to_owned());
        import.default("model.device", auto, "the first GPU that can be used, or else the CPU");
    }
    import.finish()
}

/// The toolkit of a file that did not load as one of ours; `None` if it may be one of ours, or if its keys do not say it.
pub fn toolkit_of(path: &Path) -> Option<Toolkit> {
    let entries = entries(path).ok()?;
    // SFT-Play's sections have the names of ours; elsewhere `model` is a name.
    let ours = entries.iter().any(|(key, node)| {
        Toolkit::SftPlay.own_keys().contains(&key.as_str()) && (key != "model" || !matches!(node, Node::Str(_)))
    });
    Toolkit::recognise(&entries).filter(|_| !ours)
}
