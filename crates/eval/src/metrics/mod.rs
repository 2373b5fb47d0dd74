//! Metrics of answers. Each metric computes a few numbers for a row, and a score is a function of their sums over rows. So
//! no corpus is kept in memory, and confidence intervals come from sums too. The exception is [`cider`], which keeps words.
//!
//! A row may have several references ([`Metrics::add_with_references`]). ROUGE and METEOR use the best one, exact match and
//! containment any one, and SARI, `CIDEr` and the accuracy of VQA all of them. The other metrics read the first one alone.
pub mod bleu;
mod bootstrap;
pub mod choice;
pub mod chrf;
pub mod cider;
mod likelihood;
mod matching;
pub mod meteor;
pub mod porter;
pub mod rouge;
pub mod sari;
pub mod schema;
pub mod scored;
pub mod scorer;
mod text;
mod visual;
pub mod vqa;

pub use likelihood::Likelihood;
pub use visual::VisualMetric;

use bootstrap::{Sums, interval};
use cider::Cider;
use schema::Schema;
use scorer::Scorer;
use serde_json::Value;
use std::borrow::Cow;
use std::time::Duration;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::{EvalConfig, EvalMetric, Normalization};

/// What metrics read of a row.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    /// The last user turn, or the prompt (`tunesmith_data::row::source_of`); empty unless a metric reads it.
    pub source: &'a str,
    /// The answer that the model generated.
    pub answer: &'a str,
    /// The expected answer; the first, if there are several.
    pub reference: &'a str,
}

/// A score over all rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Score {
    /// The metric, such as `rougeL`.
    pub name: String,
    /// The score over all rows.
    pub value: f64,
    /// Confidence interval by bootstrap; `None` without replicates.
    pub interval: Option<(f64, f64)>,
}

/// The difference of a score between two models that answered the same rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// The metric, such as `rougeL`.
    pub name: String,
    /// The first model's score.
    pub first: f64,
    /// The second model's score.
    pub second: f64,
    /// Confidence interval of `second - first`.
    pub interval: Option<(f64, f64)>,
    /// Two-sided p-value: twice the share of replicates in which the difference has the other sign.
    pub p_value: Option<f64>,
}

impl Difference {
    /// Makes a difference from both scores and the replicates of `second - first`.
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
    Cider(Cider),
    VqaAccuracy,
    Choice,
    YesNo,
}

/// The means of sums whose last element is the number of rows.
fn means(sums: &[f64]) -> Vec<f64> {
    let (rows, sums) = sums.split_last().unwrap_or((&0.0, &[]));
    sums.iter().map(|sum| sum / rows).collect()
}

impl Measure {
    fn of(metric: VisualMetric) -> Self {
        match metric {
            VisualMetric::Cider => Self::Cider(Cider::default()),
            VisualMetric::VqaAccuracy => Self::VqaAccuracy,
            VisualMetric::Choice => Self::Choice,
            VisualMetric::YesNo => Self::YesNo,
        }
    }

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
            Self::Cider(_) => &["cider"],
            Self::VqaAccuracy => &["vqa_accuracy"],
            Self::Choice => &["choice"],
            Self::YesNo => &["yes_no_accuracy", "yes_no_precision", "yes_no_recall", "yes_no_f1"],
            Self::Scorer(scorer) => return scorer.names().iter().map(|name| format!("scorer.{name}")).collect(),
        };
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    /// The numbers that a row adds to the sums; `references` must not be empty. [`Cider`] has none, because it needs all rows.
    fn counts(&mut self, row: &Row<'_>, references: &[&str]) -> Result<Vec<f64>> {
        let Row { source, answer, reference } = *row;
        let yes = |is: bool| vec![f64::from(is), 1.0];
        Ok(match self {
            Self::Likelihood => Likelihood::default().counts().to_vec(),
            Self::Rouge { stemmed } => {
                let rouge = rouge::best(answer, references, *stemmed);
                vec![rouge.one.f, rouge.two.f, rouge.l.f, rouge.lsum.f, 1.0]
            }
            Self::Bleu => bleu::counts(answer, reference).to_vec(),
            Self::Chrf { .. } => chrf::counts(answer, reference).to_vec(),
            Self::Meteor => vec![meteor::best(answer, references), 1.0],
            Self::ExactMatch(by) => yes(references.iter().any(|text| matching::equal(answer, text, *by))),
            Self::Contains(by) => yes(references.iter().any(|text| matching::contains(answer, text, *by))),
            Self::Sari => vec![100.0 * sari::sari(source, answer, references), 1.0],
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
            Self::Cider(_) => Vec::new(),
            Self::VqaAccuracy => vec![vqa::accuracy(answer, references), 1.0],
            // A row whose reference has no letter does not count.
            Self::Choice => choice::same_letter(answer, reference).map_or_else(|| vec![0.0; 2], yes),
            Self::YesNo => choice::yes_no(answer, reference).to_vec(),
            Self::Scorer(scorer) => {
                let mut counts = scorer.score(row)?;
                counts.push(1.0);
                counts
            }
        })
    }

    /// The scores that follow from sums over rows, in the order of [`Measure::names`]. `single` tells that the sums are those of
    /// one row.
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
            Self::YesNo => {
                let scores = sums.try_into().map(|sums| choice::yes_no_scores(sums).to_vec()).unwrap_or_default();
                // Precision, recall, and F1 mean nothing for one row.
                scores.into_iter().take(if single { 1 } else { 4 }).collect()
            }
            _ => means(sums),
        }
    }
}

/// Metrics and their sums over the rows so far.
#[derive(Debug)]
pub struct Metrics {
    measures: Vec<(Measure, Option<Sums>)>,
    rows: u64,
    replicates: usize,
    confidence: f64,
    seed: u64,
}

impl Metrics {
    /// Starts the metrics of section `eval`; `seed` seeds the bootstrap.
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
                EvalMetric::Cider => Measure::of(VisualMetric::Cider),
                EvalMetric::VqaAccuracy => Measure::of(VisualMetric::VqaAccuracy),
                EvalMetric::Choice => Measure::of(VisualMetric::Choice),
                EvalMetric::YesNo => Measure::of(VisualMetric::YesNo),
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

    /// Adds a metric for answers about images.
    #[must_use]
    pub fn with_visual(mut self, metric: VisualMetric) -> Self {
        self.measures.push((Measure::of(metric), None));
        self
    }

    /// Leaves out confidence intervals, which saves time and memory.
    #[must_use]
    pub const fn without_intervals(mut self) -> Self {
        self.replicates = 0;
        self
    }

    /// Adds loss, perplexity and token accuracy of the references. Each row must then come with its [`Likelihood`].
    #[must_use]
    pub fn with_likelihood(mut self) -> Self {
        self.measures.insert(0, (Measure::Likelihood, None));
        self
    }

    /// Adds a row and returns its own scores by name. `likelihood` is that of its reference.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`] of a scorer that fails.
    pub fn add(&mut self, row: &Row<'_>, likelihood: Option<&Likelihood>) -> Result<Vec<(String, f64)>> {
        self.count(Some((row, &[row.reference])), likelihood)
    }

    /// Adds a row with several references, beside the expected answer in [`Row::reference`]. `CIDEr` has no score of a row alone.
    ///
    /// # Errors
    /// As [`Metrics::add`]; [`tunesmith_base::Kind::Data`]: there are no references.
    pub fn add_with_references(
        &mut self,
        row: &Row<'_>,
        references: &[&str],
        likelihood: Option<&Likelihood>,
    ) -> Result<Vec<(String, f64)>> {
        if references.is_empty() {
            return Err(Error::data(format!("row {} has no reference", self.rows + 1)));
        }
        self.count(Some((row, references)), likelihood)
    }

    /// Adds a row without a question, which only the likelihood counts.
    ///
    /// # Errors
    /// As [`Metrics::add`].
    pub(crate) fn add_unanswered(&mut self, likelihood: &Likelihood) -> Result<Vec<(String, f64)>> {
        self.count(None, Some(likelihood))
    }

    fn count(
        &mut self,
        row: Option<(&Row<'_>, &[&str])>,
        likelihood: Option<&Likelihood>,
    ) -> Result<Vec<(String, f64)>> {
        let mut of_row = Vec::new();
        for (measure, sums) in &mut self.measures {
            let counts = match (&mut *measure, row, likelihood) {
                (Measure::Likelihood, _, Some(likelihood)) => likelihood.counts().to_vec(),
                (Measure::Cider(cider), Some((row, references)), _) => {
                    cider.add(self.rows, row.answer, references);
                    continue;
                }
                (measure, Some((row, references)), _) => measure.counts(row, references)?,
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

    /// The sums of a measure: those that were kept, or those of `CIDEr`, whose scores exist only once all rows are there.
    fn sums<'a>(&self, measure: &Measure, kept: Option<&'a Sums>) -> Option<Cow<'a, Sums>> {
        match measure {
            Measure::Cider(cider) => cider.sums(self.replicates, self.seed).map(Cow::Owned),
            _ => kept.map(Cow::Borrowed),
        }
    }

    /// The scores over all rows, in the order of `eval.metrics`; empty before the first row.
    pub fn scores(&self) -> Vec<Score> {
        let mut scores = Vec::new();
        for (measure, sums) in &self.measures {
            let Some(sums) = self.sums(measure, sums.as_ref()) else { continue };
            let values = measure.scores(&sums.all, false);
            for (index, (name, value)) in measure.names().into_iter().zip(values).enumerate() {
                let replicates = sums.scores(|sums| measure.scores(sums, false)[index]);
                scores.push(Score { name, value, interval: interval(replicates, self.confidence) });
            }
        }
        scores
    }

    /// Compares with the scores of another model on the same rows in the same order.
    pub fn differences(&self, other: &Self) -> Vec<Difference> {
        let mut differences = Vec::new();
        for ((measure, first), (of_other, second)) in self.measures.iter().zip(&other.measures) {
            let (first, second) = (self.sums(measure, first.as_ref()), other.sums(of_other, second.as_ref()));
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

#[cfg(test)]
mod tests;
