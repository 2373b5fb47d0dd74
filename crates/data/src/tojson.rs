//! The filter `tojson` for chat templates, with the same output as Python's `json.dumps`.
use std::fmt::Write as _;

use minijinja::value::{DynObject, Kwargs, ValueKind};
use minijinja::{Error, Value};

use super::jinja_limits::{failed, guard, measure, stopped};
use super::python_text;

/// `tojson` as Transformers defines it: `json.dumps(value, ensure_ascii=False, indent=…, separators=…, sort_keys=…)`,
/// without escaping for HTML.
pub fn to_json(value: &Value, indent: Option<&Value>, kwargs: &Kwargs) -> Result<Value, Error> {
    let ensure_ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let indent = indent.cloned().or(kwargs.get("indent")?).filter(|indent| !indent.is_none());
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let indent = match &indent {
        None => None,
        Some(indent) => match (indent.as_str(), indent.as_usize()) {
            (Some(text), _) => Some(text.to_owned()),
            (None, Some(width)) if width <= 64 => Some(" ".repeat(width)),
            _ => return Err(stopped("tojson wants an indent of at most 64")),
        },
    };
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(failed("tojson wants two separators")),
        None => (if indent.is_some() { ",".into() } else { ", ".into() }, ": ".into()),
    };
    let added = indent.as_ref().map_or(0, String::len) * 64 + item.len() + key.len() + 6;
    guard(measure(value)?.checked_mul(added))?;
    let mut json = Json { text: String::new(), ensure_ascii, indent, item, key, sort_keys };
    json.write(value, 0)?;
    Ok(Value::from(json.text))
}

struct Json {
    text: String,
    ensure_ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
}

impl Json {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => {
                let _ = write!(self.text, "{value}");
            }
            ValueKind::Number => self.text.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<_> = value.try_iter()?.checked().collect::<Result<_, _>>()?;
                self.text.push('[');
                for (index, item) in items.iter().enumerate() {
                    self.begin_item(index, depth);
                    self.write(item, depth + 1)?;
                }
                self.end_items(items.len(), depth);
                self.text.push(']');
            }
            ValueKind::Map => {
                let pairs = value.as_object().and_then(DynObject::try_iter_pairs).into_iter().flatten();
                let mut pairs: Vec<_> = pairs.map(|(key, item)| (key.to_string(), item)).collect();
                if self.sort_keys {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.text.push('{');
                for (index, (key, item)) in pairs.iter().enumerate() {
                    self.begin_item(index, depth);
                    self.string(key);
                    self.text.push_str(&self.key);
                    self.write(item, depth + 1)?;
                }
                self.end_items(pairs.len(), depth);
                self.text.push('}');
            }
            kind => return Err(failed(format!("{kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn begin_item(&mut self, index: usize, depth: usize) {
        if index > 0 {
            self.text.push_str(&self.item);
        }
        self.break_line(depth + 1);
    }

    fn end_items(&mut self, count: usize, depth: usize) {
        if count > 0 {
            self.break_line(depth);
        }
    }

    fn break_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.text.push('\n');
            for _ in 0..depth {
                self.text.push_str(indent);
            }
        }
    }

    fn string(&mut self, text: &str) {
        self.text.push('"');
        for letter in text.chars() {
            match letter {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                letter if letter < ' ' || (self.ensure_ascii && !letter.is_ascii()) => {
                    for unit in letter.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.text, "\\u{unit:04x}");
                    }
                }
                letter => self.text.push(letter),
            }
        }
        self.text.push('"');
    }
}

/// A float as `json.dumps` writes it.
fn float(value: f64) -> String {
    match value {
        _ if value.is_nan() => "NaN".into(),
        _ if value.is_infinite() => if value > 0.0 { "Infinity" } else { "-Infinity" }.into(),
        _ => python_text::float(value),
    }
}
