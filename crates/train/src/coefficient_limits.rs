//! Refuses coefficients beyond Gemma 3n's limit for its parallel streams (`altup_coef_clip`), before and during training.
//! Transformers clamps these coefficients in training but not in evaluation, so a model with one beyond the limit would
//! compute with different numbers in the two.
use tunesmith_base::error::{Error, Result};
use tunesmith_comm::Collectives;
use tunesmith_config::arch::Arch;
use tunesmith_model::{Model, Source};

/// The matrices that have the limit, in each block.
const COEFFICIENTS: [&str; 2] = [".altup.prediction_coefs.weight", ".altup.correction_coefs.weight"];
/// What helps against both errors of this module.
const HINT: &str = "a larger altup_coef_clip in the model's config.json trains without this limit";

/// The name of a matrix with a number beyond the limit, and that number.
struct Beyond<'a> {
    name: &'a str,
    value: f32,
    limit: f64,
}

impl std::fmt::Display for Beyond<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, value, limit } = self;
        write!(f, "{name}: {value} is beyond altup_coef_clip, {limit}, where Transformers cuts it in training")
    }
}

fn limit(arch: &Arch) -> Option<f64> {
    arch.altup.map(|spec| spec.coef_clip)
}

fn has_limit(name: &str) -> bool {
    COEFFICIENTS.iter().any(|end| name.ends_with(end))
}

fn beyond<'a>(name: &'a str, values: &[f32], limit: f64) -> Option<Beyond<'a>> {
    let value = *values.iter().find(|value| f64::from(value.abs()) > limit)?;
    Some(Beyond { name, value, limit })
}

/// Refuses a base with a coefficient beyond the limit, which Transformers would clamp in training.
pub(crate) fn refuse(source: &Source<'_>) -> Result<()> {
    let Some(limit) = limit(source.arch) else { return Ok(()) };
    for spec in source.arch.tensors().iter().filter(|spec| has_limit(&spec.name)) {
        let values = source.values(&spec.name, spec.shape.iter().product())?;
        if let Some(beyond) = beyond(&spec.name, &values, limit) {
            return Err(Error::model(format!("not yet: {beyond}")).hint(HINT));
        }
    }
    Ok(())
}

/// Ends a run whose update brought a trained coefficient beyond the limit. Ranks may hold a share each; all of them end.
pub(crate) fn check(model: &Model, comm: &dyn Collectives) -> Result<()> {
    let Some(limit) = limit(&model.arch) else { return Ok(()) };
    let mut trained = model.params.specs.iter().filter(|spec| has_limit(&spec.name)).peekable();
    if trained.peek().is_none() {
        return Ok(());
    }
    let own = trained.find_map(|spec| beyond(&spec.name, &model.params.get(&spec.range()), limit));
    let mut found = [u64::from(own.is_some())];
    comm.all_reduce(&mut found)?;
    if found == [0] {
        return Ok(());
    }
    let what =
        own.map_or_else(|| "on another rank, a number is beyond altup_coef_clip".to_owned(), |own| own.to_string());
    Err(Error::numeric(format!("not yet: {what}")).hint(format!("{HINT}, or lower train.learning_rate")))
}
