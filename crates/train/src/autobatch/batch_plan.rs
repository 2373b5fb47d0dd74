//! The sizes of an optimizer step: as configured, with `auto` ([`BatchRequest`]), and as the run uses them ([`BatchPlan`]).
use tunesmith_base::error::{self, Error};
use tunesmith_base::words;
use tunesmith_config::arch::Arch;
use tunesmith_config::{Auto, Checkpointing, ConfigValue as _, TrainConfig};

/// The configured sizes; those that are `auto` are measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchRequest {
    /// Rows of a micro-batch: `train.batch_size`.
    pub batch_size: Auto<usize>,
    /// Micro-batches of an optimizer step on each rank: `train.grad_accum`.
    pub grad_accum: Auto<usize>,
    /// Which activations blocks save for the backward pass: `train.gradient_checkpointing`.
    pub checkpointing: Checkpointing,
    /// Maximum tokens of a forward pass: `train.max_tokens_per_pass`.
    pub max_tokens_per_pass: Option<usize>,
    /// Rows of an optimizer step over all ranks: `train.effective_batch`. `None`: `target_tokens` decides.
    pub effective_batch: Option<usize>,
    /// Approximate tokens of an optimizer step on each rank: `train.target_tokens_per_device_step`.
    pub target_tokens: usize,
    /// Whether the loss depends on how rows are put into micro-batches. It does if rows are grouped by length, or if the
    /// router's loss is computed for each micro-batch.
    pub micro_batches_matter: bool,
    /// Number of ranks that share a step.
    pub world: usize,
}

/// The split of an optimizer step into micro-batches and passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct BatchPlan {
    /// Rows of a micro-batch.
    pub batch_size: usize,
    /// Micro-batches of an optimizer step on each rank.
    pub grad_accum: usize,
    /// Which activations blocks save for the backward pass; never [`Checkpointing::Auto`].
    #[serde(serialize_with = "as_setting")]
    pub checkpointing: Checkpointing,
    /// Maximum tokens of a forward pass. With `None`, a micro-batch is one pass.
    pub max_tokens_per_pass: Option<usize>,
}

fn as_setting<S: serde::Serializer>(checkpointing: &Checkpointing, to: S) -> Result<S::Ok, S::Error> {
    serde::Serialize::serialize(&checkpointing.to_json(), to)
}

impl BatchRequest {
    /// The request of a configuration, for `world` ranks.
    pub fn new(train: &TrainConfig, arch: &Arch, world: usize) -> Self {
        let balanced = arch.experts.as_ref().is_some_and(|experts| experts.balance.is_some());
        Self {
            batch_size: train.batch_size,
            grad_accum: train.grad_accum,
            checkpointing: train.gradient_checkpointing,
            max_tokens_per_pass: train.max_tokens_per_pass,
            effective_batch: train.effective_batch,
            target_tokens: train.target_tokens_per_device_step,
            micro_batches_matter: train.group_by_length || balanced,
            world,
        }
    }

    /// The plan, if no size is `auto`.
    pub fn given(&self) -> Option<BatchPlan> {
        let sizes = BatchPlan {
            batch_size: self.batch_size.given()?,
            grad_accum: self.grad_accum.given()?,
            checkpointing: self.checkpointing,
            max_tokens_per_pass: self.max_tokens_per_pass,
        };
        (self.checkpointing != Checkpointing::Auto).then_some(sizes)
    }

    /// Rows of a step on one rank, for a data set of `count` rows with `mean_tokens` on average. All ranks together have
    /// exactly `effective_batch` rows, if it is set. The result depends on nothing that is measured.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: `effective_batch` is not a multiple of the ranks times the configured batch size and
    /// accumulation.
    pub fn rows_of_step(&self, mean_tokens: f64, count: usize) -> error::Result<usize> {
        let Some(rows) = self.effective_batch else {
            let most = (count / self.world.max(1)).max(1);
            let rows = ((self.target_tokens as f64 / mean_tokens.max(1.0)).round() as usize).clamp(1, most);
            let open = self.batch_size == Auto::Auto && self.grad_accum == Auto::Auto;
            return Ok(if open { divisible(rows, most) } else { rows });
        };
        let given = self.batch_size.or(1) * self.grad_accum.or(1);
        if !rows.is_multiple_of(self.world * given) {
            let world = self.world;
            return Err(Error::config(format!(
                "train.effective_batch = {rows} is not a multiple of {} (train.batch_size x train.grad_accum, \
                 where they are set) x {}",
                words::count(given, "row"),
                words::count(world, "rank")
            ))
            .hint(format!("set train.effective_batch: {}", rows.div_ceil(self.world * given) * self.world * given)));
        }
        Ok(rows / self.world)
    }

    /// The micro-batch sizes to choose from for steps of `rows` rows, ascending. None exceeds `count`, the rows of the data.
    /// If both batch size and accumulation are `auto`, each candidate divides `rows`.
    pub(super) fn candidates(&self, rows: usize, count: usize) -> Vec<usize> {
        match (self.batch_size, self.grad_accum) {
            (Auto::Given(batch), _) => vec![batch],
            (Auto::Auto, Auto::Given(accum)) => vec![rounded(rows, accum)],
            (Auto::Auto, Auto::Auto) if self.micro_batches_matter => vec![rows],
            (Auto::Auto, Auto::Auto) => {
                let low = (1..).take_while(|&one| one * one <= rows).filter(|&one| rows.is_multiple_of(one));
                let mut all: Vec<usize> = low.flat_map(|one| [one, rows / one]).collect();
                all.retain(|&one| one <= count.max(1));
                all.sort_unstable();
                all.dedup();
                all
            }
        }
    }
}

/// `rows / parts`, rounded, at least 1.
pub(super) const fn rounded(rows: usize, parts: usize) -> usize {
    let whole = (rows + parts / 2) / parts;
    if whole == 0 { 1 } else { whole }
}

/// About `rows`, at most `most`, rounded to four significant bits, so that a step can be split evenly in several ways.
const fn divisible(rows: usize, most: usize) -> usize {
    let unit = 1 << rows.ilog2().saturating_sub(3);
    let near = (rows + unit / 2) / unit * unit;
    if near > most { most / unit * unit } else { near }
}

impl std::fmt::Display for BatchPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { batch_size, grad_accum, checkpointing, max_tokens_per_pass } = self;
        let passes = max_tokens_per_pass.map_or("null".to_owned(), |most| most.to_string());
        write!(
            f,
            "batch_size: {batch_size}, grad_accum: {grad_accum}, gradient_checkpointing: {checkpointing}, \
             max_tokens_per_pass: {passes}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> BatchRequest {
        BatchRequest {
            batch_size: Auto::Auto,
            grad_accum: Auto::Auto,
            checkpointing: Checkpointing::Auto,
            max_tokens_per_pass: Some(768),
            effective_batch: None,
            target_tokens: 16384,
            micro_batches_matter: false,
            world: 1,
        }
    }

    #[test]
    fn a_step_holds_the_tokens_or_exactly_the_rows_that_were_asked_for() {
        assert_eq!(request().rows_of_step(200.0, 10_000).unwrap(), 80, "82 would be 1 x 82, 2 x 41");
        assert_eq!(request().rows_of_step(200.0, 50).unwrap(), 48, "no more than there are");
        assert_eq!(
            BatchRequest { world: 4, ..request() }.rows_of_step(200.0, 50).unwrap(),
            12,
            "nor than there are for each"
        );
        assert_eq!(request().rows_of_step(1e9, 50).unwrap(), 1);
        assert_eq!(request().candidates(80, 10_000), [1, 2, 4, 5, 8, 10, 16, 20, 40, 80]);
        let given = BatchRequest { grad_accum: Auto::Given(3), ..request() };
        assert_eq!((given.rows_of_step(200.0, 10_000).unwrap(), given.candidates(82, 10_000)), (82, vec![27]));
        let rows = BatchRequest { effective_batch: Some(24), world: 2, ..request() };
        assert_eq!(rows.rows_of_step(1e9, 5).unwrap(), 12);
        assert_eq!(rows.candidates(12, 5), [1, 2, 3, 4], "of 5 rows no more than 5 are put together");
        let batch = BatchRequest { batch_size: Auto::Given(3), ..rows };
        assert_eq!((batch.rows_of_step(1.0, 5).unwrap(), batch.candidates(12, 5)), (12, vec![3]));
        let accum = BatchRequest { grad_accum: Auto::Given(4), ..rows };
        assert_eq!((accum.rows_of_step(1.0, 5).unwrap(), accum.candidates(12, 5)), (12, vec![3]));
        let error = BatchRequest { batch_size: Auto::Given(5), ..rows }.rows_of_step(1.0, 5).unwrap_err();
        assert!(
            error.message().contains("24 is not a multiple of 5 rows") && error.message().contains("2 ranks"),
            "{error}"
        );
        assert_eq!(error.hint_text(), Some("set train.effective_batch: 30"));
    }

    #[test]
    fn whatever_was_measured_a_step_has_the_same_rows() {
        for target_tokens in (1..20_000).step_by(37) {
            for (request, one) in [
                (BatchRequest { target_tokens, ..request() }, false),
                (BatchRequest { target_tokens, micro_batches_matter: true, ..request() }, true),
                (BatchRequest { target_tokens, grad_accum: Auto::Given(7), ..request() }, true),
                (BatchRequest { target_tokens, batch_size: Auto::Given(7), ..request() }, true),
            ] {
                let rows = request.rows_of_step(61.0, 300).unwrap();
                let candidates = request.candidates(rows, 300);
                assert!(!one || candidates.len() == 1, "{request:?}: {candidates:?}");
                let (batch, accum) = (request.batch_size, request.grad_accum);
                for size in candidates.iter().filter(|_| (batch, accum) == (Auto::Auto, Auto::Auto)) {
                    assert_eq!(size * rounded(rows, *size), rows, "{request:?}");
                }
                let wished = (target_tokens as f64 / 61.0).round().clamp(1.0, 300.0);
                assert!((rows as f64 / wished - 1.0).abs() < 0.07, "{rows} for {wished}");
            }
        }
    }
}
