//! Metrics of answers. Each metric computes a few numbers for a row, and a score is a function of their sums over rows. So
//! no corpus is kept in memory, and confidence intervals come from sums too ([`bootstrap`]).
pub mod bleu;
pub mod bootstrap;
pub mod chrf;
pub mod likelihood;
pub mod matching;
pub mod meteor;
pub mod porter;
pub mod rouge;
pub mod sari;
pub mod schema;
pub mod scored;
pub mod scorer;
pub mod text;

pub use likelihood::Likelihood;

use bootstrap::{Sums, interval};
use schema::Schema;
use scorer::Scorer;
use serde_json::Value;
use std::time::Duration;
use tunesmith_base::error::Result;
use tunesmith_config::{EvalConfig, EvalMetric, Normalization};

/// One answered row.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    /// What the answer was asked by: the last turn of the user, or the prompt ([`tunesmith_data::row::source_of`]); empty unless a
    /// measure reads it.
    pub source: &'a str,
    /// What the model said.
    pub answer: &'a str,
    /// What it should have said.
    pub reference: &'a str,
}

/// A score over all rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Score {
    /// What was measured.
    pub name: String,
    /// The score of all rows.
    pub value: f64,
    /// The range that it would lie in with other rows of the same kind.
    pub interval: Option<(f64, f64)>,
}

/// How much a score differs between two models that were asked the same rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// What was measured.
    pub name: String,
    /// The score of the first.
    pub first: f64,
    /// That of the second.
    pub second: f64,
    /// The range of second less first.
    pub interval: Option<(f64, f64)>,
    /// The share of replicates in which the sign is another, doubled: small where the difference is no accident of the rows.
    pub p_value: Option<f64>,
}

impl Difference {
    /// From the scores of both, and the second less the first of each replicate.
    fn of(name: String, first: f64, second: f64, mut replicates: Vec<f64>, confidence: f64) -> Self {
        replicates.retain(|by| by.is_finite());
        let share =
            |is: fn(&f64) -> bool| replicates.iter().filter(|by| is(by)).count() as f64 / replicates.len() as f64;
        let p_value = 2.0 * share(|by| *by <= 0.0).min(share(|by| *by >= 0.0));
        Self {
            name,
            first,
            second,
            p_value: (!replicates.is_empty()).then_some(p_value.min(1.0)),
            interval: interval(replicates, confidence),
        }
    }
}

/// Whether a lower score is a better one.
pub fn lower_is_better(name: &str) -> bool {
    matches!(name, "loss" | "perplexity" | "byte_perplexity" | "mse" | "mae")
}

/// Which numbers are counted.
#[derive(Debug)]
enum Measure {
    Likelihood,
    Rouge { stemmed: bool },
    Bleu,
    Chrf { with_words: bool },
    Meteor,
    ExactMatch(Normalization),
    Contains(Normalization),
    Sari,
    Json(Option<Schema>),
    Scorer(Scorer),
}

/// The mean of each of some numbers: the last is 1 in each row.
fn means(sums: &[f64]) -> Vec<f64> {
    let (rows, sums) = sums.split_last().unwrap_or((&0.0, &[]));
    sums.iter().map(|sum| sum / rows).collect()
}

impl Measure {
    fn names(&self) -> Vec<String> {
        let names: &[&str] = match self {
            Self::Likelihood => &["loss", "perplexity", "byte_perplexity", "token_accuracy"],
            Self::Rouge { .. } => &["rouge1", "rouge2", "rougeL", "rougeLsum"],
            Self::Bleu => &["bleu"],
            Self::Chrf { with_words: false } => &["chrf"],
            Self::Chrf { with_words: true } => &["chrf++"],
            Self::Meteor => &["meteor"],
            Self::ExactMatch(_) => &["exact_match"],
            Self::Contains(_) => &["contains"],
            Self::Sari => &["sari"],
            Self::Json(None) => &["json_valid", "json_equal"],
            Self::Json(Some(_)) => &["json_valid", "json_equal", "json_schema"],
            Self::Scorer(scorer) => return scorer.names().iter().map(|name| format!("scorer.{name}")).collect(),
        };
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn counts(&mut self, row: &Row<'_>) -> Result<Vec<f64>> {
        let Row { source, answer, reference } = *row;
        let yes = |is: bool| vec![f64::from(is), 1.0];
        Ok(match self {
            Self::Likelihood => Likelihood::default().counts().to_vec(),
            Self::Rouge { stemmed } => {
                let rouge = rouge::rouge(answer, reference, *stemmed);
                vec![rouge.one.f, rouge.two.f, rouge.l.f, rouge.lsum.f, 1.0]
            }
            Self::Bleu => bleu::counts(answer, reference).to_vec(),
            Self::Chrf { .. } => chrf::counts(answer, reference).to_vec(),
            Self::Meteor => vec![meteor::meteor(answer, reference), 1.0],
            Self::ExactMatch(by) => yes(matching::equal(answer, reference, *by)),
            Self::Contains(by) => yes(matching::contains(answer, reference, *by)),
            Self::Sari => vec![100.0 * sari::sari(source, answer, &[reference]), 1.0],
            Self::Json(schema) => {
                let parsed: Option<Value> = serde_json::from_str(answer.trim()).ok();
                let wanted: Option<Value> = serde_json::from_str(reference.trim()).ok();
                let equal = parsed.as_ref().zip(wanted.as_ref()).is_some_and(|(a, b)| schema::same(a, b));
                let mut counts = vec![f64::from(parsed.is_some()), f64::from(equal)];
                if let Some(schema) = schema {
                    counts.push(f64::from(parsed.is_some_and(|parsed| schema.check(&parsed).is_ok())));
                }
                counts.push(1.0);
                counts
            }
            Self::Scorer(scorer) => {
                let mut counts = scorer.score(row)?;
                counts.push(1.0);
                counts
            }
        })
    }

    /// The scores of sums, in the order of the names; `single` of one row.
    fn scores(&self, sums: &[f64], single: bool) -> Vec<f64> {
        match self {
            Self::Likelihood => {
                let sums: &[f64; Likelihood::WIDTH] = sums.try_into().unwrap_or(&[0.0; Likelihood::WIDTH]);
                Likelihood::of(sums).scores().map(|(_, score)| score).to_vec()
            }
            Self::Bleu => sums.try_into().map(|sums| bleu::bleu(sums, single)).into_iter().collect(),
            Self::Chrf { with_words } => {
                sums.try_into().map(|sums| chrf::chrf(sums, *with_words)).into_iter().collect()
            }
            _ => means(sums),
        }
    }
}

/// Measures with their sums so far.
#[derive(Debug)]
pub struct Metrics {
    measures: Vec<(Measure, Option<Sums>)>,
    rows: u64,
    replicates: usize,
    confidence: f64,
    seed: u64,
}

impl Metrics {
    /// The measures that the configuration asks for; `seed` is that of the bootstrap.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: the JSON Schema cannot be read, or the scorer not started.
    pub fn new(config: &EvalConfig, seed: u64) -> Result<Self> {
        let by = config.normalization;
        let mut measures = Vec::new();
        for metric in &config.metrics {
            measures.push(match metric {
                EvalMetric::Rouge => Measure::Rouge { stemmed: config.rouge_stemmer },
                EvalMetric::Bleu => Measure::Bleu,
                EvalMetric::Chrf => Measure::Chrf { with_words: false },
                EvalMetric::ChrfPlusPlus => Measure::Chrf { with_words: true },
                EvalMetric::Meteor => Measure::Meteor,
                EvalMetric::ExactMatch => Measure::ExactMatch(by),
                EvalMetric::Contains => Measure::Contains(by),
                EvalMetric::Sari => Measure::Sari,
                EvalMetric::Json => Measure::Json(config.json_schema.as_deref().map(Schema::load).transpose()?),
            });
        }
        if !config.scorer.is_empty() {
            let timeout = Duration::from_secs_f64(config.scorer_timeout);
            measures.push(Measure::Scorer(Scorer::start(&config.scorer, timeout)?));
        }
        let measures = measures.into_iter().map(|measure| (measure, None)).collect();
        Ok(Self { measures, rows: 0, replicates: config.bootstrap_samples, confidence: config.confidence, seed })
    }

    /// Without intervals: as little work and memory as can be.
    #[must_use]
    pub const fn without_intervals(mut self) -> Self {
        self.replicates = 0;
        self
    }

    /// With the likelihood of the references beside, which the rows are then added with.
    #[must_use]
    pub fn with_likelihood(mut self) -> Self {
        self.measures.insert(0, (Measure::Likelihood, None));
        self
    }

    /// Adds a row; returns its own scores by name. `likelihood` is that of its reference.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`] of a scorer that fails.
    pub fn add(&mut self, row: &Row<'_>, likelihood: Option<&Likelihood>) -> Result<Vec<(String, f64)>> {
        self.count(Some(row), likelihood)
    }

    /// Adds a row that was not answered, as there is no question in it: no other measure counts it.
    ///
    /// # Errors
    /// None that [`Metrics::add`] has.
    pub fn add_unanswered(&mut self, likelihood: &Likelihood) -> Result<Vec<(String, f64)>> {
        self.count(None, Some(likelihood))
    }

    fn count(&mut self, row: Option<&Row<'_>>, likelihood: Option<&Likelihood>) -> Result<Vec<(String, f64)>> {
        let mut of_row = Vec::new();
        for (measure, sums) in &mut self.measures {
            let counts = match (&mut *measure, row, likelihood) {
                (Measure::Likelihood, _, Some(likelihood)) => likelihood.counts().to_vec(),
                (measure, Some(row), _) => measure.counts(row)?,
                (_, None, _) => continue,
            };
            of_row.extend(measure.names().into_iter().zip(measure.scores(&counts, true)));
            sums.get_or_insert_with(|| Sums::new(counts.len(), self.replicates, self.seed)).add(self.rows, &counts);
        }
        self.rows += 1;
        Ok(of_row)
    }

    /// How many rows were added.
    pub const fn rows(&self) -> u64 {
        self.rows
    }

    /// The scores over all rows, in the order of the configuration; none before the first row.
    pub fn scores(&self) -> Vec<Score> {
        let mut scores = Vec::new();
        for (measure, sums) in &self.measures {
            let Some(sums) = sums else { continue };
            let values = measure.scores(&sums.all, false);
            for (index, (name, value)) in measure.names().into_iter().zip(values).enumerate() {
                let replicates = sums.scores(|sums| measure.scores(sums, false)[index]);
                scores.push(Score { name, value, interval: interval(replicates, self.confidence) });
            }
        }
        scores
    }

    /// How the scores of another model differ that was asked the same rows in the same order.
    pub fn differences(&self, other: &Self) -> Vec<Difference> {
        let mut differences = Vec::new();
        for ((measure, first), (_, second)) in self.measures.iter().zip(&other.measures) {
            let (Some(first), Some(second)) = (first, second) else { continue };
            for (index, name) in measure.names().into_iter().enumerate() {
                let score = |sums: &[f64]| measure.scores(sums, false)[index];
                let pairs = first.scores(score).into_iter().zip(second.scores(score));
                let replicates = pairs.map(|(first, second)| second - first).collect();
                let (first, second) = (score(&first.all), score(&second.all));
                differences.push(Difference::of(name, first, second, replicates, self.confidence));
            }
        }
        differences
    }
}
