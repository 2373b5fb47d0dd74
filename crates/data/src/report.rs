//! The data report: how many rows were used, cut or left out, and where the first of them are.
use std::collections::BTreeMap;

use super::fetch_pass::WebCounts;
use serde::{Deserialize, Serialize};
use tunesmith_base::words::count;

/// How many rows of a kind the report names.
pub const NAMED_ROWS: usize = 5;

/// How many different unread fields and messages the report keeps.
const NAMED_FIELDS: usize = 32;

/// Rows that were treated alike: how many, and where the first of them are.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NamedRows {
    /// How many rows there are, named or not.
    pub rows: u64,
    /// `file:line` of the first [`NAMED_ROWS`] rows.
    pub places: Vec<String>,
}

impl NamedRows {
    /// Counts a row at `place`.
    pub fn add(&mut self, place: impl std::fmt::Display) {
        self.rows += 1;
        if self.places.len() < NAMED_ROWS {
            self.places.push(place.to_string());
        }
    }

    fn merge(&mut self, other: &Self) {
        self.rows += other.rows;
        self.places.extend(other.places.iter().take(NAMED_ROWS - self.places.len().min(NAMED_ROWS)).cloned());
    }

    fn warning(&self, set: &str, what: &str) -> Option<String> {
        let what = match what.strip_prefix("have ") {
            Some(rest) if self.rows == 1 => format!("has {rest}"),
            _ => what.to_owned(),
        };
        (self.rows > 0)
            .then(|| format!("{set}: {} {what} (first: {})", count(self.rows, "row"), self.places.join(", ")))
    }
}

/// Conversations that become several examples, because the chat template renders earlier turns differently when more
/// follow.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RenderingCounts {
    /// Conversations that the template renders more than once.
    pub rows: u64,
    /// All renderings of these rows.
    pub renderings: u64,
    /// The tokens of all renderings.
    pub tokens: u64,
    /// The tokens of the longest rendering of each row, added up: about what one rendering per row would take.
    pub tokens_once: u64,
    /// The tokens of the longest rendering of any row, or of the longest example of a picture with several captions.
    pub longest: u64,
    /// Rows whose first turns are not trained on, because `data.max_turn_growth` limits the tokens.
    pub limited: NamedRows,
}

impl RenderingCounts {
    /// Counts a row whose renderings have these lengths in tokens.
    pub(super) fn add(&mut self, lengths: impl Iterator<Item = usize> + Clone) {
        let (all, longest) = (lengths.clone().sum::<usize>() as u64, lengths.clone().max().unwrap_or(0) as u64);
        self.rows += 1;
        self.renderings += lengths.count() as u64;
        self.tokens += all;
        self.tokens_once += longest;
        self.longest = self.longest.max(longest);
    }

    /// Counts a row of several examples: renderings, unless they are the captions of a picture.
    pub(super) fn add_row(&mut self, lengths: impl Iterator<Item = usize> + Clone, captions: bool) {
        if captions {
            self.longest = self.longest.max(lengths.max().unwrap_or(0) as u64);
        } else {
            self.add(lengths);
        }
    }

    fn merge(&mut self, other: &Self) {
        self.rows += other.rows;
        self.renderings += other.renderings;
        self.tokens += other.tokens;
        self.tokens_once += other.tokens_once;
        self.longest = self.longest.max(other.longest);
        self.limited.merge(&other.limited);
    }

    /// A sentence for the user; `None` if no row has several renderings.
    pub fn summary(&self) -> Option<String> {
        let growth = self.tokens as f64 / self.tokens_once.max(1) as f64;
        (self.rows > 0).then(|| {
            format!(
                "{} in {}: {} instead of {} ({growth:.2} times)",
                count(self.rows, "row"),
                count(self.renderings, "rendering"),
                count(self.tokens, "token"),
                self.tokens_once
            )
        })
    }
}

/// Counts of the rows of a set of files.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counts {
    /// All rows read, including those left out.
    pub rows: u64,
    /// Rows with tokens and labels, before duplicates and contaminated rows are left out.
    pub kept: u64,
    /// Kept rows that were cut to the longest allowed length.
    pub truncated: u64,
    /// Kept rows with `loss_weight: 0`.
    #[serde(default)]
    pub weightless: u64,
    /// Rows left out because they were too long (`truncation: drop`).
    pub too_long: u64,
    /// Rows left out because they have fewer tokens than `data.min_length`.
    pub below_min_length: u64,
    /// Rows left out because they have more tokens than `data.max_length`.
    pub above_max_length: u64,
    /// Rows left out because none of their tokens carries a loss.
    pub unlabeled: u64,
    /// Rows among `unlabeled` whose labels truncation cut off.
    pub unlabeled_by_truncation: u64,
    /// `file:line` of the first rows in `unlabeled`.
    pub unlabeled_places: Vec<String>,
    /// Rows left out as exact duplicates of an earlier row.
    pub duplicates: NamedRows,
    /// Rows left out, nearly duplicating an earlier one.
    pub near_duplicates: NamedRows,
    /// Training rows that are also in the validation or test rows; left out with `contamination: drop`.
    pub contaminated: NamedRows,
    /// What rows contain but the model never sees: fields that no form reads, and messages that the template leaves
    /// out.
    #[serde(default)]
    pub unread: BTreeMap<String, NamedRows>,
    /// Conversations that become several examples.
    #[serde(default)]
    pub turns: RenderingCounts,
    /// Special tokens that messages contain and that became plain text (`data.split_special_tokens`).
    #[serde(default)]
    pub split_tokens: BTreeMap<String, NamedRows>,
    /// Rows whose text contains special tokens that stay tokens.
    #[serde(default)]
    pub kept_tokens: NamedRows,
    /// Rows with several people's answers that all differ, and without another answer: the first is trained on.
    #[serde(default)]
    pub undecided: NamedRows,
    /// Rows left out because a picture of theirs cannot be read (`data.bad_images: skip`).
    #[serde(default)]
    pub bad_images: NamedRows,
    /// Images that rows name by web address (`data.allow_image_urls`).
    #[serde(default)]
    pub web: WebCounts,
    /// A hash of sizes and times of the image files when they were tokenized. `None` without images.
    #[serde(default)]
    pub image_files: Option<String>,
}

/// Notes about one row for the data report.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Notes {
    /// What the chat template leaves out of the row, and fields that no form reads, as phrases.
    pub unwritten: Vec<String>,
    /// Special tokens that its messages contain and that became plain text.
    pub split_tokens: Vec<String>,
    /// Whether its text contains special tokens that stay tokens.
    pub keeps_tokens: bool,
    /// Whether it trains on the first of several people's answers, because they all differ.
    pub undecided: bool,
}

impl Notes {
    /// Adds the special tokens of another rendering of the same row.
    pub(super) fn add(&mut self, other: Self) {
        self.split_tokens.extend(
            other.split_tokens.into_iter().filter(|token| !self.split_tokens.contains(token)).collect::<Vec<_>>(),
        );
        self.keeps_tokens |= other.keeps_tokens;
    }
}

impl Counts {
    /// Counts a row in `unlabeled`. `truncated` is whether it was cut.
    pub(super) fn add_unlabeled(&mut self, place: impl std::fmt::Display, truncated: bool) {
        self.unlabeled += 1;
        self.unlabeled_by_truncation += u64::from(truncated);
        if self.unlabeled_places.len() < NAMED_ROWS {
            self.unlabeled_places.push(place.to_string());
        }
    }

    /// Counts the notes about one row.
    pub(super) fn add_notes(&mut self, notes: Notes, place: impl std::fmt::Display) {
        for (found, names) in [(&mut self.unread, notes.unwritten), (&mut self.split_tokens, notes.split_tokens)] {
            for name in names {
                if found.len() < NAMED_FIELDS || found.contains_key(&name) {
                    found.entry(name).or_default().add(&place);
                }
            }
        }
        if notes.undecided {
            self.undecided.add(&place);
        }
        if notes.keeps_tokens {
            self.kept_tokens.add(place);
        }
    }

    /// Adds the counts of another set of files.
    pub(super) fn merge(&mut self, other: &Self) {
        self.rows += other.rows;
        self.kept += other.kept;
        self.truncated += other.truncated;
        self.weightless += other.weightless;
        self.too_long += other.too_long;
        self.below_min_length += other.below_min_length;
        self.above_max_length += other.above_max_length;
        self.unlabeled += other.unlabeled;
        self.unlabeled_by_truncation += other.unlabeled_by_truncation;
        let free = NAMED_ROWS - self.unlabeled_places.len().min(NAMED_ROWS);
        self.unlabeled_places.extend(other.unlabeled_places.iter().take(free).cloned());
        self.duplicates.merge(&other.duplicates);
        self.near_duplicates.merge(&other.near_duplicates);
        self.contaminated.merge(&other.contaminated);
        self.turns.merge(&other.turns);
        for (name, found) in &other.unread {
            self.unread.entry(name.clone()).or_default().merge(found);
        }
        for (name, found) in &other.split_tokens {
            self.split_tokens.entry(name.clone()).or_default().merge(found);
        }
        self.kept_tokens.merge(&other.kept_tokens);
        self.undecided.merge(&other.undecided);
        self.bad_images.merge(&other.bad_images);
        self.web.merge(&other.web);
    }

    /// Rows left out for their own length or labels, not as duplicates or contaminated.
    pub fn left_out(&self) -> u64 {
        self.too_long + self.below_min_length + self.above_max_length + self.unlabeled + self.bad_images.rows
    }

    /// Warnings for the user, one sentence each. `dropped` says whether contaminated rows are left out.
    pub fn warnings(&self, set: &str, max_seq_len: usize, dropped: bool) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.truncated > 0 {
            warnings.push(format!("{set}: {} cut to {max_seq_len} tokens", count(self.truncated, "row")));
        }
        if self.too_long > 0 {
            warnings.push(format!("{set}: {} longer than {max_seq_len} tokens left out", count(self.too_long, "row")));
        }
        for (rows, key) in
            [(self.below_min_length, "below data.min_length"), (self.above_max_length, "above data.max_length")]
        {
            if rows > 0 {
                warnings.push(format!("{set}: {} {key} left out", count(rows, "row")));
            }
        }
        if self.unlabeled > 0 {
            let (cut, hint) = match self.unlabeled_by_truncation {
                0 => (String::new(), ""),
                cut => (
                    format!(", {cut} of them because truncation cut the labels off"),
                    ": raise model.max_seq_len, or set data.truncation: left",
                ),
            };
            warnings.push(format!(
                "{set}: {} of {} left out without labels{cut} (first: {}){hint}",
                self.unlabeled,
                count(self.rows, "row"),
                self.unlabeled_places.join(", ")
            ));
        }
        if let Some(first) = self.web.failures.first() {
            warnings.push(format!("{set}: {} cannot be fetched (first: {first})", count(self.web.failed, "image")));
        }
        warnings.extend(self.bad_images.warning(set, "left out, with an image that cannot be read"));
        warnings.extend(self.duplicates.warning(set, "left out, duplicating an earlier one"));
        warnings.extend(self.near_duplicates.warning(set, "left out, nearly duplicating an earlier one"));
        let contaminated =
            if dropped { "left out, also in the evaluation rows" } else { "also in the evaluation rows" };
        warnings.extend(self.contaminated.warning(set, contaminated));
        warnings.extend(
            self.turns.limited.warning(set, "whose first turns are not trained on: raise data.max_turn_growth"),
        );
        for (name, found) in &self.unread {
            warnings.extend(found.warning(set, &format!("have {name}, which the model does not see")));
        }
        for (name, found) in &self.split_tokens {
            warnings.extend(found.warning(
                set,
                &format!("have {name:?} in a message, where it is plain text (data.split_special_tokens)"),
            ));
        }
        warnings.extend(self.kept_tokens.warning(set, "have special tokens in the text, which stay special tokens"));
        warnings
            .extend(self.undecided.warning(set, "have several different answers, of which the first is trained on"));
        warnings
    }
}

/// The part of one source in the mix.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Share {
    /// The name of the source in the configuration.
    pub source: String,
    /// Its weight; `None` where no source has one and every row is taken once.
    pub weight: Option<f64>,
    /// Rows of the source that can be trained on.
    pub available: u64,
    /// Rows that it gives to an epoch, repetitions included.
    pub used: u64,
}

/// How the rows of a run were read, left out and mixed.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Report {
    /// The rows of the training files, before the split and the mix.
    pub train: Counts,
    /// The rows of `data.val_path`; `None` if it is not set.
    pub validation: Option<Counts>,
    /// The rows of `data.test_path`; `None` if it is not set.
    pub test: Option<Counts>,
    /// The sources of `data.datasets`; empty with fewer than two.
    pub mix: Vec<Share>,
    /// How many training rows were cut into pieces (`truncation: split`), and how many pieces there are.
    pub cut: (usize, usize),
    /// Whether all tokens came from the cache.
    pub from_cache: bool,
    /// Whether the training rows go through the chat template.
    pub templated: bool,
    /// Warnings for the user, one sentence each.
    pub warnings: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_row_has_and_several_have() {
        let mut rows = NamedRows::default();
        rows.add("a.jsonl:1");
        assert_eq!(rows.warning("train", "have a name").unwrap(), "train: 1 row has a name (first: a.jsonl:1)");
        rows.add("a.jsonl:2");
        assert!(rows.warning("train", "have a name").unwrap().starts_with("train: 2 rows have a name"));
    }
}
