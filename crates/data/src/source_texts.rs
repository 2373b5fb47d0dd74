//! The source text of each example, with which SARI and a user's scorer compare the answer.
use super::inputs::Input;
use super::progress::Silent;
use super::row::Form;
use super::row_pass::{Walker, threads};
use super::source::RawRow;
use super::split::RowId;
use tunesmith_base::error::Result;
use tunesmith_config::Config;

/// The source text ([`super::row::source_of`]) of each of `rows`, which must be in the order of the files `inputs`. If
/// a long text was cut, only its first piece has one; the text is empty for the others.
///
/// # Errors
/// The files cannot be read again.
pub fn source_texts(rows: &[RowId], inputs: &[Input], config: &Config) -> Result<Vec<String>> {
    let mut wanted = rows.iter().copied().peekable();
    let threads = threads(config)?;
    let walker = Walker { threads: &threads, progress: &Silent, max_rows: config.data.max_rows };
    let mut found = Vec::new();
    for (input, set) in inputs.iter().zip(0..) {
        let mut row = 0;
        walker.walk("reading questions", input, &|row: RawRow, forms: &[Form]| row.source(forms), &mut |source| {
            let mut source = Some(source);
            while wanted.next_if(|id| (id.set, id.row) == (set, row)).is_some() {
                found.push(source.take().unwrap_or_default());
            }
            row += 1;
            Ok(())
        })?;
    }
    Ok(found)
}
