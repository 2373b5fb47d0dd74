//! Reads rotary position embeddings from `config.json`: `rope_scaling` (Transformers 4) or `rope_parameters`
//! (Transformers 5).
use serde_json::{Map, Value};

use super::arch::{Arch, QueryScaling, Rope, RopeScaling};
use super::hf_json::{Source, brief};
use tunesmith_base::error::Result;

/// The values of `config.json` outside of the rope parameters, which these may override.
struct Around {
    head_dim: usize,
    max_position_embeddings: usize,
    /// `rope_theta`; `None` if the file says null.
    theta: Option<f64>,
    partial: f64,
    /// `original_max_position_embeddings` outside of the rope parameters, which takes precedence; 0 if it is null.
    original: Option<usize>,
}

impl Source<'_> {
    /// Reads the rotary embedding of blocks with full attention. `partial` is the share of a head that is rotated, if
    /// the file does not say it. `two` says whether the class has parameters for each kind of block.
    pub(super) fn rope(
        &self,
        head_dim: usize,
        max_position_embeddings: usize,
        theta: f64,
        partial: f64,
        two: bool,
    ) -> Result<Rope> {
        let mut around = self.around(head_dim, max_position_embeddings, theta)?;
        // Null means no factor at all, and the class's own default does not apply either.
        around.partial = if self.is_null("partial_rotary_factor") { 1.0 } else { self.partial_rotary_factor(partial)? };
        self.check_kinds(two)?;
        if self.rope_object()?.is_some_and(|object| object.is_nested()) {
            // Transformers reads this key only if one rule is for all blocks.
            around.original = None;
        }
        match self.rope_entry("full_attention")? {
            Some(entry) => entry.read_rope(&around),
            None => Source::empty(self.origin).read_rope(&around),
        }
    }

    /// Reads the rotary embedding of sliding-window blocks, in families with two kinds: `sliding_attention` in
    /// `rope_parameters`, or `rope_local_base_freq`. `theta` is the base if neither sets one.
    pub(super) fn local_rope(&self, arch: &Arch, theta: f64) -> Result<Rope> {
        let theta = Some(self.positive("rope_local_base_freq", theta)?);
        let head_dim = arch.attentions().next().map_or(0, |attention| attention.head_dim);
        let mut around = self.around(head_dim, arch.max_position_embeddings, 1.0)?;
        (around.theta, around.original) = (theta, None);
        let rope = match self.rope_object()? {
            Some(object) if object.is_nested() => match object.inner("sliding_attention")? {
                Some(entry) => entry.read_rope(&around),
                None => Source::empty(self.origin).read_rope(&around),
            },
            _ => Source::empty(self.origin).read_rope(&around),
        }?;
        if rope.rotary_dim == 0 {
            return Err(self.not_yet("partial_rotary_factor 0 of sliding_attention"));
        }
        Ok(rope)
    }

    fn around(&self, head_dim: usize, max_position_embeddings: usize, theta: f64) -> Result<Around> {
        let key = "original_max_position_embeddings";
        let original = match self.get(key) {
            Some(_) => Some(self.size_up_to(key, None, usize::MAX >> 1)?),
            None => self.is_null(key).then_some(0),
        };
        let theta = self.optional_positive("rope_theta", Some(theta))?;
        Ok(Around { head_dim, max_position_embeddings, theta, partial: 1.0, original })
    }

    /// Refuses parameters for each kind of block if the class has one rule for all blocks (the class fails, or takes
    /// none of them), and refuses a single rule if the class has two.
    fn check_kinds(&self, two: bool) -> Result<()> {
        let filled = |key: &str| self.get(key).and_then(Value::as_object).filter(|map| !map.is_empty());
        let nested = |map: &Map<String, Value>| map.values().any(Value::is_object);
        let kinds =
            |map: &Map<String, Value>| map.contains_key("full_attention") || map.contains_key("sliding_attention");
        match (filled("rope_scaling"), filled("rope_parameters")) {
            (Some(map), _) if two && nested(map) => Err(self.mismatch("rope_scaling", "one rule")),
            (Some(_), Some(_)) if two => {
                Err(self.mismatch("rope_scaling", "no such key beside rope_parameters in this family"))
            }
            (None, Some(map)) if two && !kinds(map) => {
                Err(self.mismatch("rope_parameters", "full_attention and sliding_attention, each with its rule"))
            }
            (Some(map), _) if !two && (nested(map) || kinds(map)) => {
                Err(self.mismatch("rope_scaling", "one rule for all blocks in this family"))
            }
            (None, Some(map)) if !two && (nested(map) || kinds(map)) => {
                Err(self.mismatch("rope_parameters", "one rule for all blocks in this family"))
            }
            _ => Ok(()),
        }
    }

    /// The object with the rope parameters, in either spelling.
    fn rope_object(&self) -> Result<Option<Self>> {
        let filled = |key: &&str| match self.get(key) {
            Some(Value::Object(map)) => !map.is_empty(),
            Some(_) => true,
            None => false,
        };
        match ["rope_scaling", "rope_parameters"].into_iter().find(filled) {
            Some(key) => self.inner(key),
            None => Ok(None),
        }
    }

    /// A copy of the file, with these rope parameters (a JSON object) if it has none.
    pub(super) fn with_rope(&self, parameters: &str) -> Self {
        let mut map = self.map.clone();
        if ["rope_scaling", "rope_parameters"].iter().all(|key| self.get(key).is_none()) {
            let parameters: Map<String, Value> = serde_json::from_str(parameters).unwrap_or_default();
            map.insert("rope_parameters".into(), parameters.into());
        }
        Self { origin: self.origin, map, prefix: self.prefix.clone() }
    }

    /// The rotary embedding of one kind of block, which `rope_parameters` must have (Gemma 4).
    pub(super) fn rope_of(&self, kind: &str, head_dim: usize, max_position_embeddings: usize) -> Result<Rope> {
        let missing = || self.mismatch("rope_parameters", &format!("an object with {kind}, which has a rope_theta"));
        let entry = self.rope_entry(kind)?.ok_or_else(missing)?;
        entry.read_rope(&Around { head_dim, max_position_embeddings, theta: None, partial: 1.0, original: None })
    }

    /// A number among the rope parameters; `None` where it is absent.
    pub(super) fn rope_number(&self, key: &str) -> Result<Option<f64>> {
        match self.rope_entry("full_attention")? {
            Some(entry) => entry.optional_positive(key, None),
            None => Ok(None),
        }
    }

    /// The `rope_type`, if the file has one.
    pub(super) fn rope_kind(&self) -> Result<Option<String>> {
        match self.rope_object()? {
            Some(object) => Ok(object.text("rope_type")?.or(object.text("type")?).map(str::to_owned)),
            None => Ok(None),
        }
    }

    /// Whether the base of the rotary embedding is null. The class then rotates nothing.
    pub(super) fn has_null_base(&self) -> Result<bool> {
        let is_null = |source: &Self| source.has("rope_theta").then(|| source.is_null("rope_theta"));
        Ok(self.rope_object()?.as_ref().and_then(is_null).or_else(|| is_null(self)).unwrap_or(false))
    }

    /// How queries are scaled by their positions (`llama_4_scaling_beta`), in classes that need this key. `rope` is
    /// their rotary embedding.
    pub(super) fn query_scaling(&self, rope: &Rope) -> Result<QueryScaling> {
        let Some(beta) = self.rope_number("llama_4_scaling_beta")? else {
            return Err(self.error("no rope_parameters.llama_4_scaling_beta, which the class in Transformers needs"));
        };
        match rope.scaling {
            RopeScaling::Yarn { original_max_position_embeddings, .. } => {
                Ok(QueryScaling { beta, original_max_position_embeddings })
            }
            _ => Err(self.not_yet("llama_4_scaling_beta with a rope_type other than yarn")),
        }
    }

    fn is_nested(&self) -> bool {
        self.map.values().any(Value::is_object)
    }

    /// The parameters of one kind of block: the object itself, or its entry with this name if it has one for each kind.
    pub(super) fn rope_entry(&self, kind: &str) -> Result<Option<Self>> {
        match self.rope_object()? {
            Some(object) if object.is_nested() => {
                let mut entry = object.inner(kind)?;
                if let Some(entry) = &mut entry {
                    // Transformers reads `truncate` only from the outer object.
                    entry.map.remove("truncate");
                    entry.map.extend(object.map.get("truncate").map(|found| ("truncate".to_owned(), found.clone())));
                }
                Ok(entry)
            }
            object => Ok(object),
        }
    }

    fn read_rope(&self, around: &Around) -> Result<Rope> {
        let theta = match around.theta {
            Some(theta) => self.positive("rope_theta", theta)?,
            None => self.required("rope_theta")?,
        };
        let partial = self.partial_rotary_factor(around.partial)?;
        let key = if self.has("rope_type") { "rope_type" } else { "type" };
        if self.is_null(key) {
            return Err(self.mismatch(key, "a string"));
        }
        let kind = self.text("rope_type")?.or(self.text("type")?).unwrap_or("default");
        let share = (around.head_dim as f64 * partial) as usize;
        // Only a share of the pairs is rotated. The others have the frequency 0; so have all of them if the share is
        // less than a pair.
        let proportional = kind == "proportional";
        let rotary_dim = if proportional { around.head_dim } else { share };
        // Transformers then makes tables without frequencies, so nothing is rotated.
        let still = share == 0 && kind == "default";
        if partial > 1.0 || share < 2 && !proportional && !still || !rotary_dim.is_multiple_of(2) {
            return Err(self.error(format!(
                "partial_rotary_factor is {partial}, expected a share of head_dim {} that is an even number of features",
                around.head_dim
            )));
        }
        let required = |key: &str| self.required(key);
        let context = || match around.original {
            Some(0) => Err(self.error("original_max_position_embeddings is null, expected a whole number")),
            Some(original) => Ok(original),
            None => self.size_up_to(
                "original_max_position_embeddings",
                Some(around.max_position_embeddings),
                usize::MAX >> 1,
            ),
        };
        let stretch = |original: usize| around.max_position_embeddings as f64 / original as f64;
        let scaling = match kind {
            "default" => RopeScaling::None,
            "proportional" => RopeScaling::Proportional { pairs: share / 2, factor: self.positive("factor", 1.0)? },
            "linear" => RopeScaling::Linear { factor: required("factor")? },
            "dynamic" if rotary_dim > 2 => RopeScaling::Dynamic {
                factor: required("factor")?,
                max_position_embeddings: around.max_position_embeddings,
            },
            "yarn" if theta.to_bits() == 1.0_f64.to_bits() => {
                return Err(self.mismatch("rope_theta", "another number than 1"));
            }
            "yarn" => {
                let original = context()?;
                // Null means the ratio of the two contexts. If the key is absent, Transformers fails.
                let factor = if self.is_null("factor") { stretch(original) } else { required("factor")? };
                let share = |scale: f64, mscale: f64| if scale <= 1.0 { 1.0 } else { 0.1 * mscale * scale.ln() + 1.0 };
                let nonzero = |key: &str| self.number(key).map(|number| number.filter(|&value| value != 0.0));
                let or = |key: &str, default: f64| match nonzero(key)? {
                    Some(_) => self.positive(key, default),
                    None => Ok(default),
                };
                let (beta_fast, beta_slow) = (or("beta_fast", 32.0)?, or("beta_slow", 1.0)?);
                let attention_factor =
                    match (self.number("attention_factor")?, nonzero("mscale")?, nonzero("mscale_all_dim")?) {
                        (Some(_), ..) => self.positive("attention_factor", 1.0)?,
                        (None, Some(mscale), Some(all)) => share(factor, mscale) / share(factor, all),
                        _ => share(factor, 1.0),
                    };
                RopeScaling::Yarn {
                    factor,
                    beta_fast,
                    beta_slow,
                    truncate: self.flag("truncate", true)?,
                    attention_factor,
                    original_max_position_embeddings: original,
                }
            }
            "longrope" | "su" => {
                let original = context()?;
                let factor = self.optional_positive("factor", None)?.unwrap_or_else(|| stretch(original));
                let attention_factor = match self.number("attention_factor")? {
                    Some(_) => self.positive("attention_factor", 1.0)?,
                    None if factor <= 1.0 => 1.0,
                    // The attention factor divides by the logarithm of this number.
                    None if original == 1 => {
                        return Err(self.error("original_max_position_embeddings is 1, expected at least 2"));
                    }
                    None => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
                };
                RopeScaling::LongRope {
                    short_factor: self.factors("short_factor", rotary_dim / 2)?,
                    long_factor: self.factors("long_factor", rotary_dim / 2)?,
                    attention_factor,
                    original_max_position_embeddings: original,
                }
            }
            "llama3" => {
                let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
                if high <= low {
                    return Err(self.mismatch("high_freq_factor", &format!("more than low_freq_factor {low}")));
                }
                RopeScaling::Llama3 {
                    factor: required("factor")?,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original_max_position_embeddings: context()?,
                }
            }
            other => {
                return Err(self
                    .not_yet(format!("{}rope_type {other:?}", self.prefix))
                    .hint("supported: \"default\", \"linear\", \"dynamic\", \"yarn\", \"longrope\", \"llama3\", \"proportional\""));
            }
        };
        Ok(Rope { theta, rotary_dim, interleaved: false, scaling })
    }

    /// The share of a head that is rotated, from 0 on.
    fn partial_rotary_factor(&self, default: f64) -> Result<f64> {
        let key = "partial_rotary_factor";
        let share = self.number_or(key, default)?;
        if share >= 0.0 { Ok(share) } else { Err(self.mismatch(key, "a number from 0 to 1")) }
    }

    /// The number under this key, which must be there and above 0.
    fn required(&self, key: &str) -> Result<f64> {
        if self.get(key).is_some() { self.positive(key, 1.0) } else { Err(self.mismatch(key, "a number above 0")) }
    }

    fn factors(&self, key: &str, count: usize) -> Result<Vec<f64>> {
        let expected = || self.mismatch(key, &format!("a list of {count} numbers above 0"));
        let values = self.get(key).and_then(Value::as_array).ok_or_else(expected)?;
        let good = |value: &Value| value.as_f64().filter(|value| (1e-30..=1e30).contains(value));
        let factors: Option<Vec<f64>> = values.iter().map(good).collect();
        factors.filter(|factors| factors.len() == count).ok_or_else(expected)
    }

    /// The object under a key, whose errors name the key; `None` where it is absent or null.
    fn inner(&self, key: &str) -> Result<Option<Self>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Ok(Some(Self { origin: self.origin, map: map.clone(), prefix: format!("{}{key}.", self.prefix) }))
            }
            Some(other) => {
                Err(self.error(format!("{}{key} is {}, expected an object or null", self.prefix, brief(other))))
            }
        }
    }
}
