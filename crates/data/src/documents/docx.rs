//! Extracts the text of a DOCX file. Three of its XML parts are read: the document, the styles (for headings) and the
//! numbering (for ordered lists). No entity is expanded. The XML is read as a stream of events, so deep nesting costs
//! nothing.
use std::collections::HashMap;
use std::path::Path;

use quick_xml::Reader;
use quick_xml::escape::resolve_xml_entity;
use quick_xml::events::{BytesStart, Event};

use super::MAX_BYTES;
use super::docx_archive::{DocxArchive, broken};
use super::page::{Page, Table, TextLine};
use tunesmith_base::error::{Error, Result};

const DOCUMENT: &str = "word/document.xml";
/// The largest styles or numbering part, in bytes. A document may lack these parts.
const MAX_HELPER: u64 = 16 << 20;
/// The deepest nesting of paragraphs (text boxes). Deeper ones are left out.
const BOXES: usize = 16;
/// The most levels of a list in Word.
const LEVELS: usize = 9;

/// The text of a file as Markdown.
///
/// # Errors
/// [`tunesmith_base::Kind::Data`]: the file is not a DOCX file, is broken or encrypted, or unpacks to too much.
pub(super) fn text(path: &Path) -> Result<String> {
    let mut archive = DocxArchive::open(path)?;
    let document = archive.part(DOCUMENT, MAX_BYTES)?;
    let document = document.ok_or_else(|| broken(path, &format!("a zip archive without {DOCUMENT}")))?;
    let styles = archive.part("word/styles.xml", MAX_HELPER)?;
    let numbering = archive.part("word/numbering.xml", MAX_HELPER)?;
    let place = |name: &'static str| move |error: Error| error.context(format!("{}: {name}", path.display()));
    let styles = styles.as_deref().map_or(Ok(HashMap::new()), self::styles).map_err(place("word/styles.xml"))?;
    let ordered = numbering.as_deref().map_or(Ok(HashMap::new()), ordered).map_err(place("word/numbering.xml"))?;
    body(&document, &styles, &ordered).map_err(place(DOCUMENT))
}

/// Passes the events of an XML text to `take`. An empty element becomes a start and an end.
fn events(xml: &str, take: &mut dyn FnMut(Event<'_>) -> Result<()>) -> Result<()> {
    let mut reader = Reader::from_str(xml);
    reader.config_mut().expand_empty_elements = true;
    let mut depth = 0u64;
    loop {
        match reader.read_event() {
            Ok(Event::Eof) if depth == 0 => return Ok(()),
            Ok(Event::Eof) => return Err(Error::data("malformed XML: it ends within an element")),
            Ok(Event::DocType(_)) => {
                return Err(Error::data("a document type, which may define entities: Word writes none"));
            }
            Ok(event) => {
                match event {
                    Event::Start(_) => depth += 1,
                    Event::End(_) => depth -= 1,
                    _ => {}
                }
                take(event)?;
            }
            Err(error) => {
                return Err(Error::data(format!("malformed XML at byte {}", reader.error_position())).caused_by(error));
            }
        }
    }
}

/// An element's attribute of this name, with any namespace prefix.
fn attribute(element: &BytesStart<'_>, name: &str) -> Option<String> {
    let found = element.attributes().with_checks(false).flatten().find(|one| one.key.local_name().into_inner() == name);
    found.map(|found| found.value.into_owned())
}

/// Whether a style makes a paragraph a heading or a list item.
#[derive(Debug, Clone, Default)]
struct Style {
    /// The level of the heading, from 1.
    heading: Option<usize>,
    /// The id of the list's numbering, and the level of the item.
    list: Option<(String, usize)>,
}

impl Style {
    /// Applies a property of a paragraph or a style.
    fn set(&mut self, property: &str, value: &str) {
        match property {
            "outlineLvl" => self.heading = value.parse().ok().filter(|level| *level < 6).map(|level: usize| level + 1),
            "numId" => {
                let level = self.list.take().map_or(0, |(_, level)| level);
                self.list = Some((value.to_owned(), level));
            }
            "ilvl" => {
                let number = self.list.take().map_or_else(String::new, |(number, _)| number);
                self.list = Some((number, value.parse().unwrap_or(0).min(LEVELS - 1)));
            }
            _ => {}
        }
    }
}

/// The styles by id. A heading is known by its outline level or by its name, which is English in every language of
/// Word.
fn styles(xml: &str) -> Result<HashMap<String, Style>> {
    let (mut found, mut id): (HashMap<String, Style>, _) = (HashMap::new(), None);
    events(xml, &mut |event| {
        let Event::Start(element) = event else { return Ok(()) };
        let (name, value) = (element.local_name().into_inner(), attribute(&element, "val").unwrap_or_default());
        if name == "style" {
            id = attribute(&element, "styleId");
        }
        let Some(id) = &id else { return Ok(()) };
        let style = found.entry(id.clone()).or_default();
        match name {
            "name" => {
                let named = match value.to_lowercase().as_str() {
                    "title" => Some(1),
                    name => name.strip_prefix("heading ").and_then(|level| level.parse().ok()),
                };
                style.heading = style.heading.or(named);
            }
            property => style.set(property, &value),
        }
        Ok(())
    })?;
    Ok(found)
}

/// Whether a list level is ordered, by the id of the numbering and the level.
fn ordered(xml: &str) -> Result<HashMap<(String, usize), bool>> {
    let (mut kinds, mut of_number) = (HashMap::new(), Vec::new());
    let (mut kind, mut level, mut number) = (String::new(), 0usize, String::new());
    events(xml, &mut |event| {
        let Event::Start(element) = event else { return Ok(()) };
        let value = |name: &str| attribute(&element, name).unwrap_or_default();
        match element.local_name().into_inner() {
            "abstractNum" => kind = value("abstractNumId"),
            "lvl" => level = value("ilvl").parse().unwrap_or_default(),
            "numFmt" => {
                kinds.insert((kind.clone(), level), !matches!(value("val").as_str(), "bullet" | "none"));
            }
            "num" => {
                number = value("numId");
                // A numbering's overrides of single levels (`lvlOverride`) are ignored.
                kind.clear();
            }
            "abstractNumId" => of_number.push((number.clone(), value("val"))),
            _ => {}
        }
        Ok(())
    })?;
    let mut found = HashMap::new();
    for (number, kind) in of_number {
        for level in 0..LEVELS {
            if let Some(&counted) = kinds.get(&(kind.clone(), level)) {
                found.insert((number.clone(), level), counted);
            }
        }
    }
    Ok(found)
}

#[derive(Default)]
struct Paragraph {
    line: TextLine,
    style: Style,
}

struct Body<'a> {
    page: Page,
    styles: &'a HashMap<String, Style>,
    ordered: &'a HashMap<(String, usize), bool>,
    /// The open paragraphs, the outermost first.
    open: Vec<Paragraph>,
    /// How many open paragraphs are nested too deeply.
    deeper: usize,
    /// The number of items of each list so far, by level.
    counted: HashMap<String, [u32; LEVELS]>,
    table: Option<Table>,
    inner_tables: usize,
    /// How many elements are open within one that is left out.
    left_out: usize,
    in_text: bool,
}

fn body(xml: &str, styles: &HashMap<String, Style>, ordered: &HashMap<(String, usize), bool>) -> Result<String> {
    let mut body = Body {
        page: Page::default(),
        styles,
        ordered,
        open: Vec::new(),
        deeper: 0,
        counted: HashMap::new(),
        table: None,
        inner_tables: 0,
        left_out: 0,
        in_text: false,
    };
    let mut seen = false;
    events(xml, &mut |event| {
        match event {
            Event::Start(element) => {
                seen |= element.local_name().into_inner() == "document";
                body.start(&element);
            }
            Event::End(element) => body.end(element.local_name().into_inner()),
            Event::Text(text) => body.text(&text),
            Event::CData(text) => body.text(&text),
            Event::GeneralRef(name) => {
                let letter = match name.resolve_char_ref() {
                    Ok(Some(letter)) => Some(letter.to_string()),
                    _ => resolve_xml_entity(&name).map(str::to_owned),
                };
                body.text(&letter.ok_or_else(|| Error::data(format!("malformed XML: unknown entity &{};", &*name)))?);
            }
            _ => {}
        }
        Ok(())
    })?;
    if !seen {
        return Err(Error::data("no element `document`"));
    }
    Ok(body.page.finish())
}

impl Body<'_> {
    fn text(&mut self, text: &str) {
        if self.in_text && self.left_out == 0 && self.deeper == 0 {
            self.open.last_mut().into_iter().for_each(|open| open.line.push(text));
        }
    }

    fn start(&mut self, element: &BytesStart<'_>) {
        if self.left_out > 0 {
            self.left_out += 1;
            return;
        }
        let value = |name: &str| attribute(element, name).unwrap_or_default();
        let (name, depth) = (element.local_name(), self.open.len());
        match (name.into_inner(), self.open.last_mut()) {
            // Duplicate text: a fallback for other programs, and the source of moved text.
            ("Fallback" | "moveFrom", _) => self.left_out = 1,
            ("p", _) if depth == BOXES => self.deeper += 1,
            ("p", _) => self.open.push(Paragraph::default()),
            ("t", _) => self.in_text = true,
            ("pStyle", Some(open)) => open.style = self.styles.get(&value("val")).cloned().unwrap_or_default(),
            (property @ ("outlineLvl" | "numId" | "ilvl"), Some(open)) => open.style.set(property, &value("val")),
            ("tab" | "ptab", Some(open)) => open.line.push(" "),
            ("br" | "cr", Some(open)) => open.line.end_line(),
            ("noBreakHyphen", Some(open)) => open.line.push("-"),
            ("tbl", _) if self.table.is_some() => self.inner_tables += 1,
            ("tbl", _) => self.table = Some(Table::default()),
            ("tc", _) if self.inner_tables == 0 => self.table.iter_mut().for_each(Table::begin_cell),
            _ => {}
        }
    }

    fn end(&mut self, name: &str) {
        if self.left_out > 0 {
            self.left_out -= 1;
            return;
        }
        match name {
            "p" if self.deeper > 0 => self.deeper -= 1,
            "p" => self.end_paragraph(),
            "t" => self.in_text = false,
            "tbl" if self.inner_tables > 0 => self.inner_tables -= 1,
            "tbl" => {
                if let Some(table) = self.table.take() {
                    self.page.table(&table.finish());
                }
            }
            "tr" if self.inner_tables == 0 => self.table.iter_mut().for_each(Table::end_row),
            "tc" if self.inner_tables == 0 => self.table.iter_mut().for_each(Table::end_cell),
            _ => {}
        }
    }

    fn end_paragraph(&mut self) {
        let Some(Paragraph { mut line, style: Style { heading, list } }) = self.open.pop() else { return };
        let text = line.take();
        if text.is_empty() || self.table.as_mut().is_some_and(|table| table.add(&text)) {
            return;
        }
        // Numbering 0 removes a paragraph from the list of its style.
        match (heading, list.filter(|(number, _)| !matches!(number.as_str(), "" | "0"))) {
            (Some(level), _) => self.page.heading(level, &text),
            (None, Some(list)) => {
                let counts = self.ordered.get(&list).copied().unwrap_or(false);
                let number = counts.then(|| self.next_number(&list.0, list.1));
                self.page.item(list.1, number, &text);
            }
            (None, None) => self.page.paragraph(&text),
        }
    }

    /// The number of a list's next item. Deeper levels start again at 1.
    fn next_number(&mut self, list: &str, level: usize) -> u32 {
        let counted = self.counted.entry(list.to_owned()).or_default();
        counted[level + 1..].fill(0);
        counted[level] = counted[level].saturating_add(1);
        counted[level]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(inner: &str) -> Result<String> {
        let style = |heading, list| Style { heading, list };
        let styles = HashMap::from([
            ("berschrift2".to_owned(), style(Some(2), None)),
            ("Liste".to_owned(), style(None, Some(("1".to_owned(), 0)))),
        ]);
        let ordered = HashMap::from([(("2".to_owned(), 0), true)]);
        body(&format!("<w:document xmlns:w=\"x\"><w:body>{inner}</w:body></w:document>"), &styles, &ordered)
    }

    fn paragraph(properties: &str, text: &str) -> String {
        format!("<w:p><w:pPr>{properties}</w:pPr><w:r><w:t xml:space=\"preserve\">{text}</w:t></w:r></w:p>")
    }

    #[test]
    fn paragraphs_headings_lists_and_tables_become_text() {
        let item = |number: &str, level: &str, text: &str| {
            let list = format!("<w:numPr><w:ilvl w:val=\"{level}\"/><w:numId w:val=\"{number}\"/></w:numPr>");
            paragraph(&list, text)
        };
        let cell = |text: &str| format!("<w:tc><w:tcPr/>{}</w:tc>", paragraph("", text));
        let inner = [
            paragraph("<w:pStyle w:val=\"berschrift2\"/>", "A &amp; B"),
            "<w:p><w:r><w:t>so</w:t><w:tab/><w:t>it </w:t><w:delText>was</w:delText></w:r><w:r><w:t> is</w:t><w:br/><w:t>&#x2603;</w:t></w:r></w:p>".into(),
            item("2", "0", "one"),
            item("1", "1", "in"),
            item("2", "0", "two"),
            paragraph("<w:pStyle w:val=\"Liste\"/>", "bullet"),
            item("0", "0", "none"),
            format!("<w:tbl><w:tr>{}{}</w:tr><w:tr>{}<w:tc><w:tbl><w:tr>{}</w:tr></w:tbl></w:tc></w:tr></w:tbl>", cell("k"), cell("v"), cell("1"), cell("inner")),
            "<mc:AlternateContent><mc:Choice><w:p><w:r><w:t>box</w:t></w:r></w:p></mc:Choice><mc:Fallback><w:p><w:r><w:t>box</w:t></w:r></w:p></mc:Fallback></mc:AlternateContent>".into(),
            paragraph("", ""),
        ]
        .concat();
        assert_eq!(
            of(&inner).unwrap(),
            "## A & B\n\nso it is\n☃\n\n1. one\n  - in\n2. two\n- bullet\n\nnone\n\n| k | v |\n| --- | --- |\n| 1 | inner |\n\nbox"
        );
    }

    #[test]
    fn hostile_xml_is_refused_or_costs_nothing() {
        let error = |xml: &str| body(xml, &HashMap::new(), &HashMap::new()).unwrap_err().to_string();
        let bomb = "<!DOCTYPE x [<!ENTITY a \"ha\"><!ENTITY b \"&a;&a;\">]><w:document>&b;</w:document>";
        assert!(error(bomb).contains("document type"), "{}", error(bomb));
        assert!(error("<w:document>&b;</w:document>").contains("unknown entity &b;"));
        assert!(error("<w:document><w:p>").contains("ends within"));
        assert!(error("<w:document></w:p>").contains("malformed XML"));
        assert!(error("<html></html>").contains("no element `document`"));
        let deep = 100_000;
        let inner = "<w:p><w:r>".repeat(deep) + "<w:t>x</w:t>" + &"</w:r></w:p>".repeat(deep);
        assert_eq!(of(&inner).unwrap(), "", "too deep to be read");
        assert_eq!(
            of("<w:p><w:r><w:pict><w:p><w:r><w:t>box</w:t></w:r></w:p></w:pict><w:t>x</w:t></w:r></w:p>").unwrap(),
            "box\n\nx"
        );
    }

    #[test]
    fn styles_and_lists_are_known_by_number_name_and_level() {
        let found = styles("<s><w:style w:styleId=\"a\"><w:name w:val=\"Heading 3\"/></w:style><w:style w:styleId=\"b\"><w:name w:val=\"x\"/>\
            <w:pPr><w:outlineLvl w:val=\"0\"/><w:numPr><w:numId w:val=\"7\"/></w:numPr></w:pPr></w:style></s>").unwrap();
        assert_eq!((found["a"].heading, found["b"].heading), (Some(3), Some(1)));
        assert_eq!(found["b"].list, Some(("7".to_owned(), 0)));
        let found = ordered("<n><w:abstractNum w:abstractNumId=\"0\"><w:lvl w:ilvl=\"0\"><w:numFmt w:val=\"decimal\"/></w:lvl><w:lvl w:ilvl=\"1\">\
            <w:numFmt w:val=\"bullet\"/></w:lvl></w:abstractNum><w:num w:numId=\"5\"><w:abstractNumId w:val=\"0\"/></w:num></n>").unwrap();
        assert_eq!(found, HashMap::from([(("5".to_owned(), 0), true), (("5".to_owned(), 1), false)]));
    }
}
