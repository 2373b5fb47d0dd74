//! The keys of recurrent mixers in `config.json`, and the bounds of their sizes.
use serde_json::Value;

use super::arch::{DeltaNetSpec, HiddenAct, MambaSpec};
use super::hf_json::{MAX_SIZE, SPECIAL, Source};
use tunesmith_base::error::Result;

/// The most tokens that a convolution looks at.
pub(super) const MAX_KERNEL: usize = 16;
/// Bound of the rows of a state: a GPU keeps 64 columns of it in its shared memory.
pub(super) const MAX_ROWS: usize = 256;

impl Source<'_> {
    /// The spec, if its sizes go together. The class's convolution has the activation of the MLP, here always SiLU.
    pub(super) fn checked_delta_net(&self, activation: HiddenAct, spec: DeltaNetSpec) -> Result<DeltaNetSpec> {
        if activation != HiddenAct::Silu {
            return Err(self.not_yet("hidden_act other than \"silu\" in blocks with linear attention"));
        }
        let DeltaNetSpec { key_heads, value_heads, .. } = spec;
        if !value_heads.is_multiple_of(key_heads) {
            return Err(self.error(format!(
                "linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}"
            )));
        }
        let width = [(key_heads, spec.key_dim), (value_heads, spec.value_dim)].map(|(heads, width)| heads * width);
        if width.iter().any(|&width| width > MAX_SIZE) {
            return Err(self.error(format!("linear attention of width {width:?}, expected at most {MAX_SIZE}")));
        }
        Ok(spec)
    }

    /// The spec, if its sizes go together. `keys` are those of its heads and groups.
    pub(super) fn checked_mamba(&self, keys: [&str; 2], spec: MambaSpec) -> Result<MambaSpec> {
        let (MambaSpec { heads, groups, .. }, [of_heads, of_groups]) = (&spec, keys);
        if !heads.is_multiple_of(*groups) {
            return Err(self.error(format!("{of_heads} {heads} is not a multiple of {of_groups} {groups}")));
        }
        let width = spec.heads.checked_mul(spec.dim).filter(|&width| width <= MAX_SIZE);
        if width.is_none() || groups * spec.state > MAX_SIZE {
            return Err(self.error(format!("Mamba 2 of {heads} heads of {}, expected at most {MAX_SIZE}", spec.dim)));
        }
        let [low, high] = spec.limits;
        if low < 0.0 || low > high {
            return Err(self.error(format!("time steps from {low} to {high}, expected a range from 0 on")));
        }
        Ok(spec)
    }

    /// A list of two numbers, the second of which may be infinite.
    pub(super) fn range(&self, key: &str, default: [f64; 2]) -> Result<[f64; 2]> {
        let Some(value) = self.map.get(key) else { return Ok(default) };
        let number = |value: &Value| match value.as_f64() {
            None if value.get(SPECIAL).and_then(Value::as_str) == Some("Infinity") => Some(f64::INFINITY),
            number => number,
        };
        let found = value.as_array().and_then(|values| values.iter().map(number).collect::<Option<Vec<f64>>>());
        found.and_then(|values| values.try_into().ok()).ok_or_else(|| self.mismatch(key, "two numbers"))
    }
}
