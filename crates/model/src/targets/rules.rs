//! PEFT's rules on names, compiled: which module gets an adapter, of which rank and scale.
//!
//! PEFT matches an expression with one name of a module, its name in Transformers. Here, an expression that matches no
//! module under these names is also tried with the modules' other names, unless it excludes something by a negative
//! look-around.
use super::{modules, show};
use crate::adapters::{Method, Placement, Rank, Site, Stacked, Targets};
use crate::names::ends_with_module;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::{Arch, LinearSpec};
use tunesmith_config::{ModuleKey, Pattern, TargetModules};

/// An expression, and the names of a module that it is matched with.
pub(super) struct Matcher<T> {
    expression: T,
    /// Whether it is also matched with the names of the plain language model, and those before Transformers 4.52.
    any_name: bool,
}

/// Decides which names an expression is matched with.
struct Names {
    /// The names of every module and of every parameter that can have an adapter, in Transformers. Empty where no
    /// module has other names.
    theirs: Vec<String>,
}

impl Names {
    fn of(arch: &Arch) -> Self {
        if arch.wrapper.is_none() && !arch.is_renamed() {
            return Self { theirs: Vec::new() };
        }
        let experts = (0..arch.num_hidden_layers).filter_map(|layer| Some((layer, arch.experts_of(layer)?)));
        let experts = experts.flat_map(|(layer, experts)| {
            let module = format!("model.layers.{layer}.{}", experts.module());
            experts.parameters().map(|parameter| format!("{module}.{parameter}"))
        });
        let linears = arch.linear_modules().into_iter().chain(arch.routers());
        let weights = linears.map(|linear| format!("{}.weight", linear.name));
        let of_vision = arch.vision.iter().flat_map(|vision| vision.adapted_linears()).map(|linear| linear.name);
        let all = modules(arch).into_iter().chain(weights).chain(experts).chain(of_vision);
        Self { theirs: all.map(|name| arch.transformers_name(&name)).collect() }
    }

    fn matcher<T>(&self, written: &str, expression: T, is_match: impl Fn(&T, &str) -> bool) -> Matcher<T> {
        let excludes = ["(?!", "(?<!"].iter().any(|negative| written.contains(negative));
        let any_name =
            !self.theirs.is_empty() && !excludes && !self.theirs.iter().any(|name| is_match(&expression, name));
        Matcher { expression, any_name }
    }
}

impl<T> Matcher<T> {
    /// The names of a module with which the expression is matched.
    fn names(&self, arch: &Arch, module: &str) -> Vec<String> {
        if self.any_name { arch.names(module) } else { vec![arch.transformers_name(module)] }
    }
}

impl Matcher<ModuleKey> {
    /// Whether a key of `rank_pattern` or `alpha_pattern` matches a module of these names ([`Rules::known_as`]).
    pub(super) fn is_key_of(&self, (theirs, all): &(String, Vec<String>)) -> bool {
        let is = |name: &String| self.expression.is_match(name);
        if self.any_name { all.iter().any(is) } else { is(theirs) }
    }
}

/// [`Targets`] with its expressions compiled.
pub(super) struct Rules<'a> {
    targets: &'a Targets,
    arch: &'a Arch,
    target: Option<Matcher<Pattern>>,
    exclude: Option<Matcher<Pattern>>,
    feedforward: Option<Matcher<Pattern>>,
    saved: Vec<Pattern>,
    layers: Vec<Matcher<Pattern>>,
    pub(super) ranks: Vec<(Matcher<ModuleKey>, usize)>,
    pub(super) alphas: Vec<(Matcher<ModuleKey>, f64)>,
}

impl<'a> Rules<'a> {
    pub(super) fn compile(targets: &'a Targets, arch: &'a Arch) -> Result<Self> {
        let section = targets.section;
        let compile_as =
            |option: &str, written: &str, pattern: &str| Pattern::new(&format!("{section}.{option}"), written, pattern);
        let names = Names::of(arch);
        let whole = |option: &str, modules: Option<&TargetModules>| match modules {
            Some(TargetModules::Regex(pattern)) => compile_as(option, pattern, &format!("^(?:{pattern})$"))
                .map(|compiled| Some(names.matcher(pattern, compiled, Pattern::is_match))),
            _ => Ok(None),
        };
        if matches!(targets.target_modules, TargetModules::Regex(_)) && targets.layers_to_transform.is_some() {
            return Err(Error::config(format!(
                "{section}.layers_to_transform cannot be used when target_modules is a regular expression"
            ))
            .hint("write the blocks into the expression, or give target_modules as a list"));
        }
        if let Some(word @ (TargetModules::Auto | TargetModules::AllLinear)) = &targets.exclude_modules {
            return Err(Error::config(format!("{section}.exclude_modules: {} leaves nothing to train", show(word)))
                .hint("name the modules, such as [down_proj]"));
        }
        let narrowed = targets.layers_to_transform.as_ref().is_some_and(|layers| !layers.is_empty());
        if targets.strict && narrowed && targets.target_modules == TargetModules::AllLinear {
            return Err(Error::config(format!("{section}.layers_to_transform with target_modules: all-linear"))
                .hint("PEFT takes them together for an error: set target_modules: auto, or a list of names"));
        }
        let key = |option: &str, key: &str| -> Result<_> {
            let compiled = ModuleKey::new(&format!("{section}.{option}"), key)?;
            Ok(names.matcher(key, compiled, ModuleKey::is_match))
        };
        let layer = |written: &str, pattern: &str| -> Result<_> {
            let compiled = compile_as("layers_pattern", written, pattern)?;
            Ok(names.matcher(written, compiled, Pattern::is_match))
        };
        let layers = match targets.layers_pattern.as_slice() {
            [] => vec![layer("", r"^.*?\.[^.]*\.(?P<idx>\d+)\.")?],
            patterns => patterns
                .iter()
                .map(|pattern| layer(pattern, &format!(r"^(?:.*?\.)??(?:{pattern})\.(?P<idx>\d+)\.")))
                .collect::<Result<_>>()?,
        };
        Ok(Self {
            targets,
            arch,
            target: whole("target_modules", Some(&targets.target_modules))?,
            exclude: whole("exclude_modules", targets.exclude_modules.as_ref())?,
            feedforward: whole("feedforward_modules", targets.feedforward.as_ref())?,
            saved: (targets.modules_to_save.iter())
                .map(|module| compile_as("modules_to_save", module, &format!(r"^(?:|.*\.)(?:{module})(?:$|\.)")))
                .collect::<Result<_>>()?,
            layers,
            ranks: (targets.ranks.iter().flat_map(|ranks| &ranks.rank_pattern.0))
                .map(|(pattern, rank)| Ok((key("rank_pattern", pattern)?, *rank)))
                .collect::<Result<_>>()?,
            alphas: (targets.ranks.iter().flat_map(|ranks| &ranks.alpha_pattern.0))
                .map(|(pattern, alpha)| Ok((key("alpha_pattern", pattern)?, *alpha)))
                .collect::<Result<_>>()?,
        })
    }

    fn matches(&self, pattern: &Matcher<Pattern>, module: &str) -> bool {
        pattern.names(self.arch, module).iter().any(|name| pattern.expression.is_match(name))
    }

    /// A module's name in Transformers, and all its names.
    pub(super) fn known_as(&self, module: &str) -> (String, Vec<String>) {
        (self.arch.transformers_name(module), self.arch.names(module))
    }

    /// Whether an expression matches only names that Transformers does not have, so that PEFT would not find them.
    pub(super) fn needs_other_names(&self) -> bool {
        let expressions = [&self.target, &self.exclude, &self.feedforward].into_iter().flatten().chain(&self.layers);
        let mut keys = self.ranks.iter().map(|(key, _)| key).chain(self.alphas.iter().map(|(key, _)| key));
        expressions.into_iter().any(|pattern| pattern.any_name) || keys.any(|key| key.any_name)
    }

    /// Whether an entry of a list names a module: it is one of its names, or the end of one after a dot.
    pub(super) fn is_named(&self, module: &str, entries: &[String]) -> bool {
        let names = self.arch.names(module);
        entries.iter().any(|entry| names.iter().any(|name| ends_with_module(name, entry)))
    }

    /// Whether `exclude_modules` names the module of this name.
    pub(super) fn excludes(&self, name: &str) -> bool {
        match &self.targets.exclude_modules {
            Some(TargetModules::List(entries)) => self.is_named(name, entries),
            _ => self.exclude.as_ref().is_some_and(|pattern| self.matches(pattern, name)),
        }
    }

    /// Whether the module of this name gets an adapter.
    pub(super) fn targets(&self, name: &str) -> bool {
        let is_saved = |pattern: &Pattern| self.arch.names(name).iter().any(|name| pattern.is_match(name));
        if self.excludes(name) || self.saved.iter().any(is_saved) {
            return false;
        }
        match &self.targets.target_modules {
            TargetModules::Auto => self.in_layers(name),
            // PEFT lists them by their full names, which count whatever their layer is.
            TargetModules::AllLinear => true,
            TargetModules::Regex(_) => self.target.as_ref().is_some_and(|pattern| self.matches(pattern, name)),
            TargetModules::List(entries) => {
                self.arch.names(name).iter().any(|name| entries.contains(name))
                    || (self.is_named(name, entries) && self.in_layers(name))
            }
        }
    }

    fn in_layers(&self, module: &str) -> bool {
        match self.targets.layers_to_transform.as_deref() {
            None | Some([]) => true,
            Some(layers) => {
                let number = |pattern: &Matcher<Pattern>| {
                    let mut names = pattern.names(self.arch, module).into_iter();
                    names.find_map(|name| pattern.expression.capture(&name, "idx").map(str::to_owned))
                };
                let number = self.layers.iter().find_map(number).and_then(|digits| digits.parse::<usize>().ok());
                number.is_some_and(|number| layers.contains(&number))
            }
        }
    }

    /// Whether `target_modules` names a former module of that name: a router, or an expert's matrix, which are parameters in
    /// Transformers 5. PEFT looks neither at exclusions nor at layers there.
    pub(super) fn names(&self, former: &str) -> bool {
        match &self.targets.target_modules {
            TargetModules::Auto => false,
            TargetModules::AllLinear => true,
            TargetModules::Regex(_) => self.target.as_ref().is_some_and(|pattern| self.matches(pattern, former)),
            TargetModules::List(entries) => entries.iter().any(|entry| ends_with_module(former, entry)),
        }
    }

    /// Whether `feedforward_modules` names the module.
    fn is_feedforward(&self, module: &str) -> bool {
        self.targets.feedforward.as_ref().is_some_and(|modules| match modules {
            TargetModules::Auto | TargetModules::AllLinear => true,
            TargetModules::Regex(_) => self.feedforward.as_ref().is_some_and(|pattern| self.matches(pattern, module)),
            TargetModules::List(entries) => {
                let names = self.arch.names(module);
                entries.iter().any(|entry| names.iter().any(|name| name.ends_with(entry.as_str())))
            }
        })
    }

    /// The adapter of `method` on a module, or on a stacked matrix of `experts`. `joined` is the number of former
    /// modules in that matrix: their ranks and alphas add up.
    pub(super) fn placement(
        &self,
        linear: &LinearSpec,
        method: &dyn Method,
        experts: Option<Stacked>,
        joined: usize,
    ) -> Placement {
        let name = &linear.name;
        let rank = self.targets.ranks.as_ref().map_or(Rank { r: 0, alpha: 0.0, scale: 1.0 }, |usual| {
            let known = self.known_as(name);
            let is = |key: &Matcher<ModuleKey>| key.is_key_of(&known);
            let own = self.ranks.iter().find(|(key, _)| is(key));
            let r = own.map_or(usual.r.saturating_mul(joined), |(_, rank)| *rank);
            let own = self.alphas.iter().find(|(key, _)| is(key));
            let alpha = own.map_or(usual.alpha * joined as f64, |(_, alpha)| *alpha);
            let scale = if usual.rslora { alpha / (r as f64).sqrt() } else { alpha / r as f64 };
            Rank { r, alpha, scale: scale as f32 }
        });
        let site = Site { module: linear, rank, feedforward: self.is_feedforward(name), experts };
        Placement {
            module: name.clone(),
            key: name.clone(),
            out_features: linear.out_features,
            in_features: linear.in_features,
            experts,
            adapter: method.adapter(&site),
        }
    }
}
