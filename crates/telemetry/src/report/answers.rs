//! The report of `tunesmith eval`: scores with their intervals, and generations side by side, with words that the
//! reference lacks marked.
use std::fmt::Write as _;

use super::html::{clipped, escape, pairs};
use super::{SAMPLE_CHARACTERS, pictures, question, text};
use tunesmith_base::words;
use tunesmith_config::greater_is_better;
use tunesmith_eval::metrics::{Difference, Score};

/// Rows that are visible at first; the others unfold.
const OPEN: usize = 20;
/// The most rows on the page; the file of samples has all.
pub const ROWS: usize = 200;
/// The most rows in the section of the worst ones.
pub const WORST: usize = 10;
/// The most words of a text that are compared.
const WORDS: usize = 1_000;

/// An evaluated model with its scores.
#[derive(Debug, Clone)]
pub struct Asked {
    /// Its name on the page.
    pub name: String,
    /// The folder or name that the model was loaded from.
    pub origin: String,
    /// Scores of the model's generations.
    pub scores: Vec<Score>,
}

/// A row with each model's generation.
#[derive(Debug, Clone)]
pub struct Answered {
    /// The prompt as the model saw it.
    pub prompt: String,
    /// The user's last question in it.
    pub question: String,
    /// Thumbnails of its images, as `data:` URIs.
    pub pictures: Vec<String>,
    /// The answer that the row expects.
    pub reference: String,
    /// Each model's generation, in the order of the models.
    pub answers: Vec<String>,
}

/// The rows on the page.
#[derive(Debug, Clone, Default)]
pub struct Rows {
    /// The first evaluated rows, at most [`ROWS`].
    pub first: Vec<Answered>,
    /// Those for which the last model has the worst score of all rows, the worst one first; at most [`WORST`].
    pub worst: Vec<Answered>,
    /// The score by which they are the worst, such as `exact_match`.
    pub measure: String,
}

/// The content of the page.
#[derive(Debug, Clone)]
pub struct Page<'a> {
    /// The title of the page.
    pub title: &'a str,
    /// One model, or two to compare.
    pub asked: &'a [Asked],
    /// Second model minus first, if there are two.
    pub differences: &'a [Difference],
    /// Confusion matrices, as HTML.
    pub pictures: &'a [String],
    /// The number of held-out rows.
    pub count: usize,
    /// The evaluated rows that are shown.
    pub rows: &'a Rows,
    /// Further facts: label and text.
    pub facts: &'a [(String, String)],
}

/// Renders the page as HTML.
pub fn render(page: &Page<'_>) -> String {
    let Page { title, asked, differences, pictures, count, rows, facts } = page;
    let Rows { first: rows, worst, measure } = rows;
    let rows = &rows[..rows.len().min(ROWS)];
    let title = escape(title);
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>{title} · evaluation</title>\n\
         <style>{style}{more}</style></head>\n<body><main>\n<header><h1>{title}</h1><span class=\"pill\">evaluation</span></header>\n\
         <p class=\"lead\">{count} held-out rows</p>\n",
        style = include_str!("style.css"),
        more = "mark { background: #d9622b33; color: inherit; border-radius: 3px; } .better { color: var(--good); font-weight: 600; } \
                .worse { color: var(--bad); font-weight: 600; } .number { font-variant-numeric: tabular-nums; white-space: nowrap; }",
    );
    scores(&mut out, asked, differences);
    out.extend(pictures.iter().map(String::as_str));
    if let (Some(model), false) = (asked.last(), worst.is_empty()) {
        let (order, name) = (if greater_is_better(measure) { "lowest" } else { "highest" }, escape(&model.name));
        let _ = writeln!(out, "<h2>Rows with the {order} {} of {name}</h2>", escape(measure));
        worst.iter().take(WORST).for_each(|row| sample(&mut out, asked, row));
    }
    if !rows.is_empty() {
        out.push_str("<h2>Answers</h2>\n");
    }
    for (index, row) in rows.iter().enumerate() {
        if index == OPEN {
            let _ = writeln!(out, "<details><summary>{}</summary>", words::count(rows.len() - OPEN, "more row"));
        }
        sample(&mut out, asked, row);
    }
    if rows.len() > OPEN {
        out.push_str("</details>\n");
    }
    let _ = writeln!(
        out,
        "<h2>How</h2>\n<div class=\"panel\">{}</div>\n<footer>Written by tunesmith {}. The same is in metrics.json and samples.jsonl.</footer>\n</main></body></html>",
        pairs(facts),
        env!("CARGO_PKG_VERSION")
    );
    out
}

/// A score with as many digits as its size needs; a dash for NaN, a score of no rows.
pub fn figure(value: f64) -> String {
    match value.abs() {
        _ if !value.is_finite() => "–".to_owned(),
        100.0.. => format!("{value:.1}"),
        10.0.. => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

fn range(interval: Option<(f64, f64)>) -> String {
    interval.map_or_else(String::new, |(low, high)| format!(" <small>{} … {}</small>", figure(low), figure(high)))
}

fn scores(out: &mut String, asked: &[Asked], differences: &[Difference]) {
    let Some(first) = asked.first() else { return };
    out.push_str("<h2>Scores</h2>\n<div class=\"panel\"><table><tr><th>measure</th>");
    for model in asked {
        let _ = write!(out, "<th>{}</th>", escape(&model.name));
    }
    if !differences.is_empty() {
        out.push_str("<th>difference</th><th>p</th>");
    }
    out.push_str("</tr>");
    for (index, score) in first.scores.iter().enumerate() {
        let _ = write!(out, "<tr><td>{}</td>", escape(&score.name));
        for score in asked.iter().filter_map(|model| model.scores.get(index)) {
            let _ = write!(out, "<td class=\"number\">{}{}</td>", figure(score.value), range(score.interval));
        }
        if let Some(difference) = differences.iter().find(|difference| difference.name == score.name) {
            let by = difference.second - difference.first;
            let better = if greater_is_better(&score.name) { by > 0.0 } else { by < 0.0 };
            // A difference has a colour only if its confidence interval does not contain 0.
            let sure = difference.interval.is_some_and(|(low, high)| low > 0.0 || high < 0.0);
            let class = match (sure, better) {
                (false, _) => "number",
                (true, true) => "number better",
                (true, false) => "number worse",
            };
            let p = difference
                .p_value
                .map_or_else(String::new, |p| if p < 0.001 { "&lt; 0.001".to_owned() } else { format!("{p:.3}") });
            let sign = if by > 0.0 { "+" } else { "" };
            let _ = write!(
                out,
                "<td class=\"{class}\">{sign}{}{}</td><td class=\"number\">{p}</td>",
                figure(by),
                range(difference.interval)
            );
        }
        out.push_str("</tr>");
    }
    out.push_str("</table></div>\n");
}

fn sample(out: &mut String, asked: &[Asked], row: &Answered) {
    let _ = write!(
        out,
        "<div class=\"sample\"><div class=\"prompt\"><small>question</small>{}{}</div><div class=\"answers\"><div><small>reference</small>{}</div>",
        pictures(&row.pictures),
        question(&row.question, &row.prompt),
        text(&row.reference)
    );
    for (model, answer) in asked.iter().zip(&row.answers) {
        let mark = if answer.trim() == row.reference.trim() {
            "<span class=\"yes\">✓ equal</span>"
        } else {
            "<span class=\"no\">✗ differs</span>"
        };
        let shown = if answer.trim().is_empty() {
            text(answer)
        } else {
            format!("<pre>{}</pre>", marked(&clipped(answer.trim(), SAMPLE_CHARACTERS), row.reference.trim()))
        };
        let _ = write!(out, "<div><small>{} {mark}</small>{shown}</div>", escape(&model.name));
    }
    out.push_str("</div></div>\n");
}

/// Splits into words and single punctuation marks, each with the white space after it, so that JSON without spaces has
/// words too.
fn pieces(text: &str) -> Vec<&str> {
    let (mut pieces, mut start) = (Vec::new(), 0);
    for ((_, before), (at, now)) in text.char_indices().zip(text.char_indices().skip(1)) {
        let goes_on = before.is_alphanumeric() && now.is_alphanumeric();
        if !goes_on && !now.is_whitespace() {
            pieces.push(&text[start..at]);
            start = at;
        }
    }
    pieces.push(&text[start..]);
    pieces
}

/// The text, with words outside a longest common subsequence with `reference` in a `<mark>`.
fn marked(text: &str, reference: &str) -> String {
    let pieces_of_text = pieces(text);
    let words: Vec<&str> = pieces_of_text.iter().map(|piece| piece.trim_end()).collect();
    let wanted: Vec<&str> = pieces(reference).into_iter().map(str::trim_end).take(WORDS).collect();
    let rows = words.len().min(WORDS);
    let columns = wanted.len();
    // Filled from the end, so that the walk below can go forward.
    let mut table = vec![0u16; (rows + 1) * (columns + 1)];
    for row in (0..rows).rev() {
        for column in (0..columns).rev() {
            table[row * (columns + 1) + column] = if words[row] == wanted[column] {
                table[(row + 1) * (columns + 1) + column + 1] + 1
            } else {
                table[(row + 1) * (columns + 1) + column].max(table[row * (columns + 1) + column + 1])
            };
        }
    }
    let (mut out, mut column) = (String::new(), 0);
    for (row, (piece, word)) in pieces_of_text.iter().zip(&words).enumerate() {
        let at = |row: usize, column: usize| table[row * (columns + 1) + column];
        while row < rows && column < columns && *word != wanted[column] && at(row, column + 1) >= at(row + 1, column) {
            column += 1;
        }
        if row < rows && column < columns && *word == wanted[column] {
            column += 1;
            out += &escape(piece);
        } else if word.is_empty() || row >= rows {
            out += &escape(piece);
        } else {
            // Marks without a blank between them are one.
            let open = if out.ends_with("</mark>") { "" } else { "<mark>" };
            out.truncate(out.trim_end_matches("</mark>").len());
            let _ = write!(out, "{open}{}</mark>{}", escape(word), escape(&piece[word.len()..]));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_the_reference_lacks_are_marked() {
        assert_eq!(marked("the big cat sat", "the cat sat down"), "the <mark>big</mark> cat sat");
        assert_eq!(marked("<b> x", "x"), "<mark>&lt;b&gt;</mark> x");
        assert_eq!(marked("same\nwords", "same words"), "same\nwords");
        assert_eq!(marked("all other", ""), "<mark>all</mark> <mark>other</mark>");
        assert_eq!(marked("a b c", "c a b c"), "a b c");
        assert_eq!(
            marked("{\"name\":\"Ada\",\"time\":\"18:15\"}", "{\"name\":\"Ada\",\"time\":\"21:15\"}"),
            "{&quot;name&quot;:&quot;Ada&quot;,&quot;time&quot;:&quot;<mark>18</mark>:15&quot;}"
        );
        assert_eq!((marked("", "a"), marked("(no)", "(yes)")), (String::new(), "(<mark>no</mark>)".to_owned()));
    }

    #[test]
    fn the_page_is_self_contained_and_escaped() {
        let score = |value| Score { name: "bleu".into(), value, interval: Some((value - 1.0, value + 1.0)) };
        let asked =
            ["base", "tuned"].map(|name| Asked { name: name.into(), origin: "x".into(), scores: vec![score(3.0)] });
        let difference = Difference {
            name: "bleu".into(),
            first: 3.0,
            second: 13.0,
            interval: Some((8.0, 12.0)),
            p_value: Some(0.0),
        };
        let row = Answered {
            pictures: Vec::new(),
            prompt: "<script>".into(),
            question: "<script>".into(),
            reference: "a b".into(),
            answers: vec!["a c".into(), "a b".into()],
        };
        let page = render(&Page {
            title: "run",
            asked: &asked,
            differences: &[difference],
            pictures: &[],
            count: 25,
            rows: &Rows { worst: vec![row.clone(); 2], first: vec![row; 25], measure: "bleu".into() },
            facts: &[],
        });
        if let Ok(path) = std::env::var("TUNESMITH_WRITE_EVALUATION") {
            std::fs::write(path, &page).unwrap();
        }
        assert!(page.contains("5 more rows") && page.contains("✓ equal") && page.contains("<mark>c</mark>"));
        assert!(page.contains("<h2>Rows with the lowest bleu of tuned</h2>"));
        assert!(page.contains("number better") && page.contains("+10.00"));
        assert!(!page.contains("<script") && !page.contains("http"));
    }
}
