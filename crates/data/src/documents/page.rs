//! Builds the Markdown text of a document from paragraphs, headings, list items, code and tables.

/// The most levels of indentation. Items of deeper lists get no more.
const LEVELS: usize = 8;

/// The text of a document so far.
#[derive(Debug, Default)]
pub(super) struct Page {
    text: String,
    /// Whether the last block is a list item.
    item: bool,
}

impl Page {
    fn begin(&mut self, item: bool) {
        if !self.text.is_empty() {
            self.text.push_str(if item && self.item { "\n" } else { "\n\n" });
        }
        self.item = item;
    }

    pub fn paragraph(&mut self, text: &str) {
        self.begin(false);
        self.text.push_str(text);
    }

    /// Adds a heading of level 1 to 6.
    pub fn heading(&mut self, level: usize, text: &str) {
        self.begin(false);
        self.text.extend(std::iter::repeat_n('#', level.clamp(1, 6)));
        self.text.push(' ');
        self.text.push_str(&text.replace('\n', " "));
    }

    /// Adds a list item. `level` counts from 0; `number` is `None` in an unordered list.
    pub fn item(&mut self, level: usize, number: Option<u32>, text: &str) {
        self.begin(true);
        let indent = 2 * level.min(LEVELS);
        self.text.extend(std::iter::repeat_n(' ', indent));
        match number {
            Some(number) => self.text.extend([&*number.to_string(), ". "]),
            None => self.text.push_str("- "),
        }
        self.text.push_str(&text.replace('\n', " "));
    }

    /// Adds a fenced code block.
    pub fn code(&mut self, text: &str) {
        let fence = if text.contains("```") { "~~~~" } else { "```" };
        self.begin(false);
        for part in [fence, "\n", text, "\n", fence] {
            self.text.push_str(part);
        }
    }

    /// Adds a table, whose first row is the header. A table with one cell becomes a paragraph, because some pages use
    /// such tables for layout.
    pub fn table(&mut self, rows: &[Vec<String>]) {
        let full = |row: &&Vec<String>| row.iter().any(|cell| !cell.is_empty());
        let rows: Vec<&Vec<String>> = rows.iter().filter(full).collect();
        if let [only] = rows.as_slice()
            && let [cell] = only.as_slice()
        {
            return self.paragraph(cell);
        }
        for (number, row) in rows.iter().enumerate() {
            if number == 0 {
                self.begin(false);
            } else {
                self.text.push('\n');
            }
            self.text.push('|');
            for cell in *row {
                self.text.push(' ');
                self.text.push_str(&cell.replace('\n', " ").replace('|', "\\|"));
                self.text.push_str(" |");
            }
            if number == 0 {
                self.text.push_str("\n|");
                row.iter().for_each(|_| self.text.push_str(" --- |"));
            }
        }
    }

    /// The Markdown text of the document.
    pub fn finish(self) -> String {
        self.text
    }
}

/// Running text: white space becomes single spaces, and explicit line breaks stay.
#[derive(Debug, Default)]
pub(super) struct TextLine(String);

impl TextLine {
    pub fn push(&mut self, text: &str) {
        for letter in text.chars() {
            if !letter.is_whitespace() {
                self.0.push(letter);
            } else if !self.0.is_empty() && !self.0.ends_with([' ', '\n']) {
                self.0.push(' ');
            }
        }
    }

    /// Adds text with its white space.
    pub fn push_raw(&mut self, text: &str) {
        self.0.push_str(text);
    }

    pub fn end_line(&mut self) {
        while self.0.ends_with(' ') {
            self.0.pop();
        }
        if !self.0.is_empty() {
            self.0.push('\n');
        }
    }

    /// Returns the text without white space at both ends, and starts a new one.
    pub fn take(&mut self) -> String {
        let text = std::mem::take(&mut self.0);
        let trimmed = text.trim();
        if trimmed.len() == text.len() { text } else { trimmed.to_owned() }
    }

    /// As [`Self::take`], but keeps the indentation of the first line.
    pub fn take_raw(&mut self) -> String {
        std::mem::take(&mut self.0).trim_start_matches('\n').trim_end().to_owned()
    }
}

/// A table so far. Tables in its cells become text.
#[derive(Debug, Default)]
pub(super) struct Table {
    rows: Vec<Vec<String>>,
    row: Option<Vec<String>>,
    cell: Option<String>,
}

impl Table {
    /// Adds a paragraph to the open cell. Returns false if no cell is open.
    pub fn add(&mut self, text: &str) -> bool {
        let Some(cell) = &mut self.cell else { return false };
        if !cell.is_empty() {
            cell.push(' ');
        }
        cell.push_str(text);
        true
    }

    /// Ends the open cell and starts another.
    pub fn begin_cell(&mut self) {
        self.end_cell();
        self.cell = Some(String::new());
    }

    pub fn end_cell(&mut self) {
        if let Some(cell) = self.cell.take() {
            self.row.get_or_insert_default().push(cell);
        }
    }

    pub fn end_row(&mut self) {
        self.end_cell();
        self.rows.extend(self.row.take());
    }

    pub fn finish(mut self) -> Vec<Vec<String>> {
        self.end_row();
        self.rows
    }
}
