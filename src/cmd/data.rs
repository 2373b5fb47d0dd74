//! `tunesmith data`: shows the training data as the model sees it: counts, lengths, and rows with their loss masks.
use super::args::JobArgs;
use super::atomic_lines::AtomicLines;
use super::download::Downloads;
use super::numbers::whole;
use super::terminal::{self, Style};
use crate::config::Range;
use crate::config::arch::Arch;
use crate::data::{
    self, AnswerReport, Counts, Dataset, Example, IGNORE, PictureReport, Pictures, Progress, Shown, Split,
};
use crate::error::Result;
use crate::files::output::Existing;
use crate::hub::{self, Part};
use crate::train::data_summary;
use crate::train::vision::{Seer, Sight};
use crate::words::count;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::fmt::Write as _;
use std::path::PathBuf;

/// Bars of the length histogram.
const BARS: usize = 16;
/// Columns of the longest bar.
const BAR_WIDTH: usize = 40;
/// Encloses supervised text on a terminal without colours.
const PLAIN_MARKS: (&str, &str) = ("⟦", "⟧");

/// Show the training data: counts, lengths, and rows as the model sees them
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    job: JobArgs,
    /// Show this many rows; text with loss is coloured, or stands between ⟦ and ⟧
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = whole::<usize>(Range::at_least(0.0)))]
    rows: usize,
    /// Write every training, validation and test row as `{text, input_ids, labels}`, or `{text, input_ids, label}` for
    /// classification and regression
    #[arg(long, value_name = "FILE.jsonl")]
    dump: Option<PathBuf>,
    /// Replace an existing --dump file
    #[arg(long, requires = "dump")]
    overwrite: bool,
    /// Print the counts as JSON
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
///
/// # Errors
/// Those of `JobArgs::load` and [`data::load`]; [`crate::Kind::Io`] when the dump cannot be written.
pub fn run(args: &Args) -> Result<()> {
    let resolved = args.job.load(&[])?;
    let inputs = data::named_inputs(&resolved.config);
    let dump = args
        .dump
        .as_deref()
        .map(|path| AtomicLines::create(path, Existing::unless("--overwrite", args.overwrite), &inputs));
    let dump = dump.transpose()?;
    let downloads = Downloads::default();
    let model_dir = hub::model_dir(&resolved.config.model, Part::Description, &downloads)?.dir;
    let mut arch = Arch::from_dir(&model_dir)?;
    let (mut config, note) = resolved.for_model(&arch)?;
    if let Some(note) = note {
        terminal::print_note(&note);
    }
    hub::fetch_paths(&mut config.data, &downloads)?;
    data::add_new_tokens(&mut arch, &model_dir, &config.tuning.new_tokens)?;
    let seer = Seer { dir: &model_dir, tokenizer: &model_dir, hidden_size: arch.hidden_size };
    let sight = Sight::of_rows(&config, seer, Part::Description, &downloads)?;
    let pictures = sight.as_ref().map(Sight::pictures);
    let data = data::load(&config, &model_dir, arch.text_ids(), &Bar::default(), pictures.as_ref())?;
    if let Some(file) = dump {
        write_dump(&data, file)?;
    }
    let looked = pictures.as_deref().map_or_else(|| Ok(Vec::new()), |pictures| look(&data, pictures))?;
    if args.json {
        let mut found = numbers(&data);
        found["pictures"] = looked.iter().map(|(name, report)| ((*name).to_owned(), json!(report))).collect();
        return terminal::print_exact(&format!("{found:#}\n"));
    }
    let colour = terminal::stdout_colour();
    terminal::print(&(overview(&data, colour) + &about_pictures(&looked, colour)))?;
    // Rows are not folded: an added line break would look like part of the text.
    let mut text = String::new();
    for index in 0..args.rows.min(data.train.len()) {
        let (sequences, _) = data.train.sequences(index)?;
        let count = sequences.len();
        for (number, mut example) in sequences.into_iter().enumerate() {
            let (tokens, supervised) = (example.input_ids.len(), example.label_tokens());
            let of = if count > 1 { format!(", rendering {} of {count}", number + 1) } else { String::new() };
            let what = match data.train.target(index)? {
                Some(target) => format!("label {}", labelled(&data, target)),
                None => format!("{supervised} with loss"),
            };
            let title = format!("row {} of train{of}: {}, {what}", index + 1, crate::words::count(tokens, "token"));
            example.labels.truncate(tokens);
            // The first token has no loss: nothing precedes it.
            example.labels.iter_mut().take(1).for_each(|first| *first = IGNORE);
            let pictures = data.train.pictures(index).get(number).map_or(&[][..], Vec::as_slice);
            let shown = with_pictures(&data, &example, pictures, colour)?;
            let _ = writeln!(text, "\n{}\n{shown}", Style::Bold.paint(&title, colour));
        }
    }
    terminal::print_exact(&text)
}

/// Shows the progress of tokenizing on standard error, if that is a terminal.
#[derive(Default)]
pub(super) struct Bar {
    bar: RefCell<Option<ProgressBar>>,
    /// Whether warnings go to standard error. Commands whose own output has them leave this off.
    warns: bool,
}

impl Bar {
    /// A bar that writes warnings to standard error.
    pub fn with_warnings() -> Self {
        Self { warns: true, ..Self::default() }
    }
}

impl Progress for Bar {
    fn begin(&self, what: &str, total: u64) {
        let style = ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes} {eta}");
        let bar = ProgressBar::new(total).with_message(what.to_owned());
        self.bar.replace(Some(style.map(|style| bar.clone().with_style(style)).unwrap_or(bar)));
    }

    fn advance(&self, by: u64) {
        self.bar.borrow().iter().for_each(|bar| bar.inc(by));
    }

    fn end(&self) {
        self.bar.take().iter().for_each(ProgressBar::finish_and_clear);
    }

    fn warn(&self, text: &str) {
        if self.warns {
            terminal::print_warning(text);
        }
    }
}

/// The splits that have rows.
fn splits(data: &Dataset) -> impl Iterator<Item = (&'static str, &Split, Option<&Counts>)> {
    let report = &data.report;
    let train = Some(("train", &data.train, Some(&report.train)));
    let validation = data.validation.as_ref().map(|split| ("validation", split, report.validation.as_ref()));
    let test = data.test.as_ref().map(|split| ("test", split, report.test.as_ref()));
    train.into_iter().chain(validation).chain(test)
}

pub(super) fn numbers(data: &Dataset) -> Value {
    let split = |(name, split, counts): (&str, &Split, Option<&Counts>)| {
        let lengths = split.lengths();
        let value = json!({
            "rows": split.len(),
            "tokens": split.tokens(),
            "label_tokens": split.label_tokens(),
            "min_length": lengths.iter().min(),
            "mean_length": split.tokens() as f64 / split.len().max(1) as f64,
            "max_length": lengths.iter().max(),
            "files": counts,
        });
        (name.to_owned(), value)
    };
    json!({
        "splits": splits(data).map(split).collect::<serde_json::Map<_, _>>(),
        "template": data.template.as_ref().map(data::ChatTemplate::origin),
        "from_cache": data.report.from_cache,
        "fingerprint": data.fingerprint,
        "cut": { "texts": data.report.cut.0, "rows": data.report.cut.1 },
        "mix": data.report.mix,
        "labels": data.classes,
        "warnings": data.report.warnings,
    })
}

/// Counts per split, the histogram of lengths, warnings.
pub(super) fn overview(data: &Dataset, colour: bool) -> String {
    let percent = |part: u64, whole: u64| 100.0 * part as f64 / whole.max(1) as f64;
    let header = ["", "rows", "tokens", "with loss", "mean", "longest", "truncated", "left out"].map(String::from);
    let mut table = vec![header];
    for (name, split, counts) in splits(data) {
        let (tokens, rows) = (split.tokens() as u64, split.len() as u64);
        let of_files = |count: fn(&Counts) -> u64| {
            counts.map_or("-".into(), |all| format!("{} ({:.1} %)", count(all), percent(count(all), all.rows)))
        };
        table.push([
            name.into(),
            rows.to_string(),
            tokens.to_string(),
            format!("{:.1} %", percent(split.label_tokens() as u64, tokens)),
            format!("{:.1}", tokens as f64 / rows.max(1) as f64),
            split.lengths().into_iter().max().unwrap_or(0).to_string(),
            of_files(|counts| counts.truncated),
            of_files(Counts::left_out),
        ]);
    }
    let mut text = String::new();
    for (index, row) in table.iter().enumerate() {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = table.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
            let _ = if column == 0 { write!(line, "{cell:width$}") } else { write!(line, "  {cell:>width$}") };
        }
        let _ = writeln!(text, "{}", if index == 0 { Style::Dim.paint(&line, colour) } else { line });
    }
    if data.report.templated {
        let template = data.template.as_ref().map_or("none", data::ChatTemplate::origin);
        let _ = writeln!(text, "chat template: {template}");
    }
    for (label, value) in data_summary::labels(data) {
        let _ = writeln!(text, "{label}: {value}");
    }
    for (name, _, counts) in splits(data) {
        if let Some(turns) = counts.and_then(|counts| counts.turns.summary()) {
            let _ = writeln!(text, "earlier turns are rewritten by the template, {name}: {turns}");
        }
    }
    for (name, split, _) in splits(data) {
        let (pictures, tokens) = split.picture_tokens();
        if pictures > 0 {
            let _ = writeln!(text, "tokens of images, {name}: {tokens}, for {}", count(pictures, "image"));
        }
    }
    for (name, _, counts) in splits(data) {
        if let Some(web) = counts.and_then(|counts| counts.web.summary()) {
            let _ = writeln!(text, "images of web addresses, {name}: {web}");
        }
    }
    let (cut, pieces) = data.report.cut;
    if cut > 0 {
        let _ = writeln!(text, "long texts: {cut} cut into {}", count(pieces, "row"));
    }
    for share in &data.report.mix {
        let weight = share.weight.map_or(String::new(), |weight| format!(", weight {weight}"));
        let _ = writeln!(
            text,
            "source {}: {}, drawn from {}{weight}",
            share.source,
            count(share.used, "row"),
            share.available
        );
    }
    if data.report.from_cache {
        text.push_str("tokens from the cache\n");
    }
    text.push_str(&histogram(&data.train.lengths()));
    for warning in &data.report.warnings {
        text += &terminal::warning(warning, colour);
    }
    text
}

/// The properties of each split's images.
fn look(data: &Dataset, pictures: &dyn Pictures) -> Result<Vec<(&'static str, PictureReport)>> {
    let of = |(name, split, _)| Ok(PictureReport::of(split, pictures, &data.tokenizer)?.map(|report| (name, report)));
    splits(data).filter_map(|split| of(split).transpose()).collect()
}

/// The properties of each split's images as lines of text, with possible problems.
fn about_pictures(looked: &[(&str, PictureReport)], colour: bool) -> String {
    let mut text = String::new();
    let mut warnings = Vec::new();
    let range =
        |[least, most]: [usize; 2]| if least == most { least.to_string() } else { format!("{least} to {most}") };
    for (name, report) in looked {
        let PictureReport { files, copies, sizes: [small, large], tokens, answers, .. } = report;
        let size = |[width, height]: [u32; 2]| format!("{width} x {height}");
        let sizes = if small == large { size(*small) } else { format!("{} to {}", size(*small), size(*large)) };
        let copied = if *copies > 0 { format!(", {copies} of them copies") } else { String::new() };
        let _ = writeln!(
            text,
            "images, {name}: {}{copied}, {sizes} pixels, {} tokens each",
            count(*files, "file"),
            range(*tokens)
        );
        let AnswerReport { count: all, different, words: (least, mean, most), vocabulary: (words, once), .. } = answers;
        let rare = match &answers.rare_words[..] {
            [] => String::new(),
            words if words.len() < *once => format!(" ({}, …)", printable(&words.join(", "))),
            words => format!(" ({})", printable(&words.join(", "))),
        };
        let _ = writeln!(
            text,
            "answers about them, {name}: {all}, {different} different; {} words each ({mean:.1} on average), {words} different, {once} of these once{rare}",
            range([*least, *most])
        );
        text += &near_duplicates(name, answers);
        if let Some(share) = answers.constant() {
            let answer = printable(&answers.commonest.0);
            warnings.push(format!("{name}: {:.0} % of the answers about images are {answer:?}", 100.0 * share));
        }
    }
    if let Some(((_, train), others)) = looked.split_first().filter(|((name, _), _)| *name == "train") {
        for (name, report) in others {
            let shared = report.shared_with(train);
            if shared > 0 {
                warnings.push(format!("{name} shows {} of the training rows", count(shared, "image")));
            }
        }
    }
    for warning in warnings {
        text += &terminal::warning(&warning, colour);
    }
    text
}

/// A line about answers that share most of their words, if there are some.
fn near_duplicates(name: &str, answers: &AnswerReport) -> String {
    let near = &answers.near_duplicates;
    let of = if near.compared < answers.different {
        format!("the first {}", near.compared)
    } else {
        near.compared.to_string()
    };
    match near.pairs.first() {
        Some([one, other]) => format!(
            "near-duplicates among them, {name}: {} of {of} different ones share at least 80 % of their words with an earlier one, in {} \
             (first: {:?} and {:?})\n",
            near.answers,
            count(near.groups, "group"),
            printable(one),
            printable(other)
        ),
        None => String::new(),
    }
}

/// Lengths in bars of equal width, a line each.
fn histogram(lengths: &[usize]) -> String {
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let width = (longest + 1).div_ceil(BARS);
    let mut counts = vec![0_usize; longest / width + 1];
    for length in lengths {
        counts[length / width] += 1;
    }
    let most = counts.iter().copied().max().unwrap_or(1).max(1);
    let digits = longest.to_string().len();
    let mut text = String::from("lengths of training rows, in tokens\n");
    let shortest = lengths.iter().copied().min().unwrap_or(0);
    for (bar, &count) in counts.iter().enumerate().skip(shortest / width) {
        let (from, to) = (bar * width, (bar + 1) * width - 1);
        // A bar that is not empty shows at least one block.
        let blocks = (count * BAR_WIDTH).div_ceil(most);
        let _ = writeln!(text, "  {from:>digits$}-{to:<digits$}  {:BAR_WIDTH$}  {count}", "█".repeat(blocks));
    }
    text
}

/// The label or the target number of a row.
fn labelled(data: &Dataset, target: i32) -> String {
    match usize::try_from(target).ok().and_then(|class| data.classes.get(class)) {
        Some(class) => class.label.clone(),
        None => f32::from_bits(target.cast_unsigned()).to_string(),
    }
}

/// As [`marked`], with each image's name in its place.
fn with_pictures(data: &Dataset, example: &Example, pictures: &[Shown], colour: bool) -> Result<String> {
    let (mut text, mut begin) = (String::new(), 0);
    let part = |text: &mut String, range: std::ops::Range<usize>| -> Result<()> {
        if !range.is_empty() {
            let (input_ids, labels) = (example.input_ids[range.clone()].to_vec(), example.labels[range].to_vec());
            text.push_str(&marked(data, &Example { input_ids, labels }, colour)?);
        }
        Ok(())
    };
    for picture @ Shown { runs, .. } in pictures {
        let tokens: usize = runs.iter().map(std::ops::Range::len).sum();
        for (number, run) in runs.iter().enumerate() {
            part(&mut text, begin..run.start)?;
            if number == 0 {
                let name = format!("[{}: {}]", printable(&picture.label()), count(tokens, "token"));
                text.push_str(&Style::Dim.paint(&name, colour));
            }
            begin = run.end;
        }
    }
    part(&mut text, begin..example.input_ids.len())?;
    Ok(text)
}

/// The text of a training row with its special tokens. Tokens with loss are coloured or enclosed.
fn marked(data: &Dataset, example: &Example, colour: bool) -> Result<String> {
    let Example { input_ids: ids, labels } = example;
    let whole = data.tokenizer.decode(ids, false)?;
    let mut text = String::new();
    let (mut begin, mut shown) = (0, 0);
    for run in labels.chunk_by(|a, b| (*a == IGNORE) == (*b == IGNORE)) {
        let end = begin + run.len();
        // A decoder may treat the first token of a text differently, so pieces are cut from the decoded whole.
        let through = if end == ids.len() { whole.len() } else { data.tokenizer.decode(&ids[..end], false)?.len() };
        let through = (shown..=through.min(whole.len())).rev().find(|&at| whole.is_char_boundary(at)).unwrap_or(shown);
        let piece = &*printable(&whole[shown..through]);
        match (run[0] == IGNORE, colour) {
            (true, _) => text.push_str(piece),
            (false, true) => text.push_str(&Style::Green.paint(piece, true)),
            (false, false) => text.extend([PLAIN_MARKS.0, piece, PLAIN_MARKS.1]),
        }
        (begin, shown) = (end, through);
    }
    Ok(text)
}

/// A text without the control characters that a terminal would obey.
fn printable(text: &str) -> String {
    text.chars().filter(|&letter| !letter.is_control() || matches!(letter, '\n' | '\t')).collect()
}

/// A row as the model sees it: `{text, input_ids, labels}` for each of its sequences, or for another task
/// `{text, input_ids, label}`. `loss_weight` is there if it is not 1.
///
/// # Errors
/// Those of reading the row.
pub(super) fn rendered(data: &Dataset, split: &Split, index: usize) -> Result<Vec<Value>> {
    let target = split.target(index)?;
    let (sequences, weight) = split.sequences(index)?;
    let sequence = |Example { input_ids, labels }: Example| {
        let text = data.tokenizer.decode(&input_ids, false)?;
        let mut row = match target {
            Some(target) => json!({ "text": text, "input_ids": input_ids, "label": labelled(data, target) }),
            None => json!({ "text": text, "input_ids": input_ids, "labels": labels }),
        };
        if weight != 1.0 {
            row["loss_weight"] = weight.into();
        }
        Ok(row)
    };
    sequences.into_iter().map(sequence).collect()
}

/// Writes every training, validation and test row as a JSON line.
fn write_dump(data: &Dataset, mut file: AtomicLines) -> Result<()> {
    for (_, split, _) in splits(data) {
        for index in 0..split.len() {
            for row in rendered(data, split, index)? {
                file.push(&row.to_string())?;
            }
        }
    }
    file.publish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_histogram_begins_at_the_shortest_row() {
        let text = histogram(&[100, 110, 160]);
        let bars: Vec<&str> = text.lines().skip(1).collect();
        assert!(bars[0].trim_start().starts_with("99-109"), "{text}");
        assert!(bars.iter().all(|bar| !bar.trim_start().starts_with("0-")));
    }

    #[test]
    fn rows_cannot_command_the_terminal() {
        assert_eq!(printable("a\u{1b}]0;x\u{7}\tb\r\n\u{9b}c"), "a]0;x\tb\nc");
    }
}
