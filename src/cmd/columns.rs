//! Tables of text for a terminal of 80 columns.
use std::fmt::Write as _;

/// Lays out lines of cells. The first column is left-aligned, the others right-aligned. Columns that do not fit into 80
/// characters form another block below, which repeats the first column.
pub(super) fn columns(lines: &[Vec<String>]) -> String {
    const WIDE: usize = 80;
    let width =
        |at: usize| lines.iter().filter_map(|line| line.get(at)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let count = lines.iter().map(Vec::len).max().unwrap_or(0);
    let mut blocks: Vec<Vec<usize>> = Vec::new();
    let mut taken = usize::MAX;
    for at in 1..count {
        let needed = 2 + width(at);
        if taken.saturating_add(needed) > WIDE {
            blocks.push(Vec::new());
            taken = width(0);
        }
        taken += needed;
        blocks.last_mut().expect("one was begun").push(at);
    }
    let mut out = String::new();
    for (number, block) in blocks.iter().enumerate() {
        if number > 0 {
            out.push('\n');
        }
        for line in lines {
            let first = line.first().map_or("", String::as_str);
            let mut text = format!("{first:<width$}", width = width(0));
            for &at in block {
                let cell = line.get(at).map_or("", String::as_str);
                let _ = write!(text, "  {cell:>width$}", width = width(at));
            }
            let _ = writeln!(out, "{}", text.trim_end());
        }
    }
    out
}
