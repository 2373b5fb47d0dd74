//! Extracts the text of an HTML page. As in a browser, any input is a page: unclosed and unknown tags do no harm.
//! Scripts, styles, navigation and controls are left out.
use super::page::{Page, Table, TextLine};

/// Elements whose content is left out.
const LEFT_OUT: [&str; 13] = [
    "template", "noscript", "nav", "footer", "aside", "button", "select", "svg", "math", "object", "canvas", "audio",
    "video",
];
/// Elements whose content has no markup. Only their own end tag ends it.
const RAW: [&str; 5] = ["script", "style", "textarea", "title", "iframe"];
/// Elements that begin and end a paragraph.
const BLOCKS: [&str; 25] = [
    "address",
    "article",
    "blockquote",
    "body",
    "caption",
    "center",
    "dd",
    "details",
    "div",
    "dl",
    "dt",
    "fieldset",
    "figcaption",
    "figure",
    "form",
    "header",
    "hgroup",
    "hr",
    "html",
    "legend",
    "main",
    "p",
    "search",
    "section",
    "summary",
];
/// The deepest nesting of lists. Deeper lists count as this level.
const LISTS: usize = 64;

/// The text of a page as Markdown.
pub(super) fn text(html: &str) -> String {
    let mut reader = Reader::default();
    let mut rest = html;
    while let Some(at) = rest.find('<') {
        reader.text(&rest[..at]);
        rest = reader.markup(&rest[at..]);
    }
    reader.text(rest);
    reader.finish()
}

#[derive(Default)]
struct Reader {
    page: Page,
    line: TextLine,
    heading: Option<usize>,
    /// The open lists, each with the number of its next item if it is ordered.
    lists: Vec<Option<u32>>,
    /// The list item whose text has not begun: its level and number.
    item: Option<(usize, Option<u32>)>,
    table: Option<Table>,
    /// How many tables are open within the table.
    inner_tables: usize,
    /// The element that is being left out, and how many elements of its name are open.
    left_out: Option<(&'static str, usize)>,
    preformatted: usize,
}

impl Reader {
    fn text(&mut self, text: &str) {
        if self.left_out.is_some() {
            return;
        }
        let text = htmlize::unescape(text);
        if self.preformatted > 0 && self.table.is_none() {
            self.line.push_raw(&text);
        } else {
            self.line.push(&text);
        }
    }

    /// Processes the markup at the start of `rest`, which begins with `<`, and returns the text after it.
    fn markup<'a>(&mut self, rest: &'a str) -> &'a str {
        let bytes = rest.as_bytes();
        if rest.starts_with("<!--") {
            // `<!-->` is a whole comment, and `--!>` ends one too.
            let ends = |at: &usize| rest[..*at].ends_with("--") || rest[4..*at].ends_with("--!");
            let end = rest.match_indices('>').map(|(at, _)| at).find(ends);
            return end.map_or("", |end| &rest[end + 1..]);
        }
        let closes = bytes.get(1) == Some(&b'/');
        let start = 1 + usize::from(closes);
        // To a browser, `</>` and the like are comments too.
        let is_comment = closes && bytes.get(2).is_some_and(|byte| !byte.is_ascii_alphabetic());
        if is_comment || matches!(bytes.get(1), Some(b'!' | b'?')) {
            return rest.find('>').map_or("", |end| &rest[end + 1..]);
        }
        if !bytes.get(start).is_some_and(u8::is_ascii_alphabetic) {
            self.text("<");
            return &rest[1..];
        }
        let end = rest[start..].find(|letter: char| letter.is_whitespace() || matches!(letter, '/' | '>'));
        let end = end.map_or(rest.len(), |end| start + end);
        let name = rest[start..end].to_ascii_lowercase();
        let after = &rest[end + attributes(&rest[end..])..];
        if closes {
            self.close(&name);
            return after;
        }
        if let Some(raw) = RAW.iter().find(|raw| **raw == name) {
            // Their content is not text of the page. What follows begins with their end tag.
            let end = find_end(after, raw);
            return after.get(end..).map_or("", |tag| tag.find('>').map_or("", |end| &tag[end + 1..]));
        }
        self.open(&name);
        after
    }

    fn open(&mut self, name: &str) {
        if let Some((open, count)) = &mut self.left_out {
            *count += usize::from(*open == name);
            return;
        }
        if let Some(name) = LEFT_OUT.iter().find(|known| **known == name) {
            self.flush();
            self.left_out = Some((name, 1));
            return;
        }
        match name {
            "br" if self.preformatted > 0 => self.line.push_raw("\n"),
            "br" => self.line.end_line(),
            "h1" | "h2" | "h3" | "h4" | "h5" | "h6" => {
                self.flush();
                self.heading = name[1..].parse().ok();
            }
            "ul" | "menu" | "ol" => {
                self.flush();
                if self.lists.len() < LISTS {
                    self.lists.push((name == "ol").then_some(1));
                }
            }
            "li" => {
                self.flush();
                let level = self.lists.len().saturating_sub(1);
                let number = self.lists.last_mut().and_then(|next| {
                    let number = *next;
                    *next = next.map(|next| next.saturating_add(1));
                    number
                });
                self.item = Some((level, number));
            }
            "pre" => {
                self.flush();
                self.preformatted += 1;
            }
            "table" => {
                self.flush();
                if self.table.is_none() { self.table = Some(Table::default()) } else { self.inner_tables += 1 }
            }
            "tr" | "thead" | "tbody" | "tfoot" => self.cells(Table::end_row),
            "td" | "th" => self.cells(Table::begin_cell),
            _ if BLOCKS.contains(&name) => self.flush(),
            _ => {}
        }
    }

    fn close(&mut self, name: &str) {
        if let Some((open, count)) = &mut self.left_out {
            *count -= usize::from(*open == name);
            // An element that was never closed ends with the page.
            if *count == 0 || matches!(name, "body" | "html") {
                self.left_out = None;
            }
            return;
        }
        match name {
            "h1" | "h2" | "h3" | "h4" | "h5" | "h6" => {
                self.flush();
                self.heading = None;
            }
            "ul" | "menu" | "ol" => {
                self.flush();
                self.lists.pop();
                self.item = None;
            }
            "li" => {
                self.flush();
                self.item = None;
            }
            "pre" => {
                self.flush();
                self.preformatted = self.preformatted.saturating_sub(1);
            }
            "table" => {
                self.flush();
                if self.inner_tables > 0 {
                    self.inner_tables -= 1;
                } else if let Some(table) = self.table.take() {
                    self.page.table(&table.finish());
                }
            }
            "tr" | "thead" | "tbody" | "tfoot" => self.cells(Table::end_row),
            "td" | "th" => self.cells(Table::end_cell),
            _ if BLOCKS.contains(&name) => self.flush(),
            _ => {}
        }
    }

    /// Applies a table tag to the outermost table. In an inner table, the tag only ends the paragraph.
    fn cells(&mut self, act: fn(&mut Table)) {
        self.flush();
        if let Some(table) = self.table.as_mut().filter(|_| self.inner_tables == 0) {
            act(table);
        }
    }

    /// Ends the paragraph: it becomes a block of the page, or a part of a table's cell.
    fn flush(&mut self) {
        let raw = self.preformatted > 0 && self.table.is_none();
        let text = if raw { self.line.take_raw() } else { self.line.take() };
        if text.is_empty() || self.table.as_mut().is_some_and(|table| table.add(&text)) {
            return;
        }
        match (self.heading, self.item.take()) {
            (Some(level), _) => self.page.heading(level, &text),
            (None, Some((level, number))) => self.page.item(level, number, &text),
            (None, None) if raw => self.page.code(&text),
            (None, None) => self.page.paragraph(&text),
        }
    }

    fn finish(mut self) -> String {
        self.flush();
        if let Some(table) = self.table.take() {
            self.page.table(&table.finish());
        }
        self.page.finish()
    }
}

/// The length of a tag after its name, with `>`, in bytes. A `>` in a quoted value does not count.
fn attributes(text: &str) -> usize {
    let mut quote = None;
    for (at, byte) in text.bytes().enumerate() {
        match (quote, byte) {
            (None, b'>') => return at + 1,
            // A quotation mark without `=` before it belongs to an attribute name.
            (None, b'"' | b'\'') if text[..at].trim_end().ends_with('=') => quote = Some(byte),
            (Some(open), byte) if open == byte => quote = None,
            _ => {}
        }
    }
    text.len()
}

/// Where the end tag of `name` begins; the end of the text if there is none.
fn find_end(text: &str, name: &str) -> usize {
    let mut from = 0;
    while let Some(at) = text[from..].find("</") {
        let here = from + at;
        let tag = &text.as_bytes()[here + 2..];
        if tag.len() >= name.len() && tag[..name.len()].eq_ignore_ascii_case(name.as_bytes()) {
            return here;
        }
        from = here + 2;
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_becomes_blocks_lists_and_tables() {
        let page = "<!DOCTYPE html><html><head><title>No</title><style>p{}</style></head><body><nav><a href='#'>Home</a></nav>\n\
            <header><h1>The  <i>first</i>\n line</h1></header><p>One &amp; two&nbsp;three &lt;b&gt; &#8212; &#x263A; &unknown; AT&T<br>next</p>\
            <ul><li>a<ul><li>b</li></ul></li><li><p>c</p></li></ul><ol><li>x<li>y</ol>\
            <table><tr><th>k<th>v</tr><tr><td>1</td><td>p | q<br>r</td></tr></table>\
            <pre>  let x = 1;\n\n  y &lt; 2</pre><script>if (a < b) document.write('</p>')</script><p>end<!-- no --> of it</p>\
            <footer>legal</footer></body></html>";
        assert_eq!(
            text(page),
            "# The first line\n\nOne & two three <b> — ☺ &unknown; AT&T\nnext\n\n- a\n  - b\n- c\n1. x\n2. y\n\n\
             | k | v |\n| --- | --- |\n| 1 | p \\| q r |\n\n```\n  let x = 1;\n\n  y < 2\n```\n\nend of it"
        );
    }

    #[test]
    fn characters_are_those_that_browsers_show() {
        for (page, shown) in [
            ("&eacute;&yuml;&omega;&Delta;&amp;&euro;&hearts;&check;", "éÿωΔ&€♥✓"),
            ("&NotEqualTilde;", "\u{2242}\u{338}"),
            ("a &ampb &copy2024 &frac12; &frac12 &notit; &AMP", "a &b ©2024 ½ ½ ¬it; &"),
            ("it&#146;s &#8212 &#x263a; &#X41;b", "it’s — ☺ Ab"),
            ("&#0; &#xd800; &#99999999999;", "\u{fffd} \u{fffd} \u{fffd}"),
            ("AT&T & &; &#; &#x; &bogus; &a", "AT&T & &; &#; &#x; &bogus; &a"),
        ] {
            assert_eq!(text(page), shown, "{page}");
        }
    }

    #[test]
    fn broken_pages_are_pages() {
        assert_eq!(text("a < b and c <"), "a < b and c <");
        assert_eq!(text("<p>x<p>y</div></table></ul><td>z"), "x\n\ny\n\nz");
        assert_eq!(text("<p title='>'>x</p><p title=\"a"), "x");
        assert_eq!(text("<p>x</p><nav>never closed <p>y</body> after"), "x\n\nafter");
        assert_eq!(text("x<!-- never closed"), "x");
        assert_eq!(text("a<!-->b<!--->c<!--x--!>d<!--[if IE]>no<![endif]-->e<![CDATA[no]]>f</>g</ p>h"), "abcdefgh");
        assert_eq!(text("x<script>never closed"), "x");
        assert_eq!(
            text("<table><tr><td>a<table><tr><td>b</td><td>c</td></tr></table></td><td>d</td></tr></table>"),
            "| a b c | d |\n| --- | --- |"
        );
        assert_eq!(text("<table><tr><td>laid out</td></tr></table>"), "laid out");
        assert_eq!(text("<li>alone</li>"), "- alone");
        // Nesting deeper than any call stack allows.
        let deep = "<div>".repeat(200_000) + "x" + &"<ul><li>".repeat(200_000) + "y";
        assert!(text(&deep).starts_with("x\n\n"));
    }
}
