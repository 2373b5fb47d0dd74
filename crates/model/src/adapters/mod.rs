//! The kinds of adapters (LoRA with `DoRA`, (IA)³, OFT), a file each. The file has the settings, the formula forward
//! and backward, merging into a weight, memory, and the names in PEFT's files. A new kind is a file and its line in
//! [`tunesmith_base::registry`].
mod adapter;
pub(crate) mod dora;
mod factors;
pub mod loftq;
pub(crate) mod low_rank;
mod method;
pub mod start;

use tunesmith_config::{Mode, Patterns, TargetModules, TuningConfig};

pub use adapter::{Adapter, Attach, Part, Rank, Site, Stacked};
pub use method::{About, Method, Placement, Ranks, Targets};

macro_rules! kinds {
    ($( $module:ident: $settings:ident = $mode:ident, $word:literal $( | $alias:literal ($alias_doc:literal) )?, $doc:literal; )*) => {
        $( pub mod $module; )*

        /// Every kind of adapter, in the order of the registry.
        pub static KINDS: &[&About] = &[$( &$module::ABOUT ),*];

        /// The kind of adapter that is trained, with its settings; `None` with `tuning.mode: full` or `freeze`, which
        /// train weights of the model itself.
        pub fn of(tuning: &TuningConfig) -> Option<&dyn Method> {
            match tuning.mode {
                $( Mode::$mode => Some(&tuning.$module), )*
                Mode::Full | Mode::Freeze => None,
            }
        }
    };
}
tunesmith_base::registry::adapters!(kinds);

/// The `rank_pattern` and the `alpha_pattern` of these placements: those whose rank is not `r`, and those whose alpha
/// is not `alpha`, by name.
pub fn ranks(placements: &[Placement], r: usize, alpha: f64) -> (Patterns<usize>, Patterns<f64>) {
    let key = |placement: &Placement| format!("^{}", regex::escape(&placement.key));
    let each = || placements.iter().filter_map(|placement| Some((key(placement), placement.adapter.rank()?)));
    let ranks = each().map(|(key, rank)| (key, rank.r)).filter(|(_, rank)| *rank != r);
    let alphas = each().map(|(key, rank)| (key, rank.alpha)).filter(|(_, own)| *own != alpha);
    (Patterns(ranks.collect()), Patterns(alphas.collect()))
}

/// The full names of the modules that have an adapter, without those of parameters.
pub fn names(placements: &[Placement]) -> TargetModules {
    let modules = placements.iter().filter(|placement| !placement.is_on_parameter());
    listed(modules.map(|placement| placement.module.clone()).collect())
}

/// These modules as a configuration names them, in which a list is never empty.
fn listed(modules: Vec<String>) -> TargetModules {
    if modules.is_empty() { TargetModules::Regex(NO_MODULE.to_owned()) } else { TargetModules::List(modules) }
}

/// A regular expression that matches no module: it stands for an empty list of modules, which a configuration cannot
/// have.
pub const NO_MODULE: &str = "^$";

/// The full names of the parameters that have an adapter: experts, routers.
pub fn parameters(placements: &[Placement]) -> Vec<String> {
    let parameters = placements.iter().filter(|placement| placement.is_on_parameter());
    parameters.map(|placement| placement.key.clone()).collect()
}
