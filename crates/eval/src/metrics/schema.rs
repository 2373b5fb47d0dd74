//! Validates documents against a JSON Schema (draft 2020-12). Unknown keywords are refused when the schema is read, so that none
//! is silently ignored. `format` is not checked, which is the draft's default.
use regex::Regex;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::path::Path;
use tunesmith_base::error::{Error, Result};

/// A checked schema with its compiled patterns.
#[derive(Debug)]
pub struct Schema {
    root: Value,
    patterns: HashMap<String, Regex>,
}

/// Keywords that only annotate, and are not checked.
const REMARKS: [&str; 12] = [
    "$schema",
    "$id",
    "$comment",
    "$anchor",
    "title",
    "description",
    "default",
    "examples",
    "format",
    "deprecated",
    "readOnly",
    "writeOnly",
];
/// Keywords whose value is a schema.
const ONE: [&str; 8] = ["items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else"];
/// Keywords whose value is a list of schemas.
const LIST: [&str; 4] = ["allOf", "anyOf", "oneOf", "prefixItems"];
/// Keywords whose value is a mapping to schemas.
const NAMED: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
/// Keywords whose value is a number.
const NUMBERS: [&str; 13] = [
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
];
const TYPES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];
/// The deepest nesting of references; deeper ones are circular.
const DEPTH: usize = 400;

impl Schema {
    /// Reads and checks the schema in a file.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: it cannot be read, is not JSON, or says what is not understood here.
    pub fn load(path: &Path) -> Result<Self> {
        let text = tunesmith_base::files::read_text(path, tunesmith_base::files::SMALL)
            .map_err(|source| Error::io("read", path, &source).with_kind(tunesmith_base::Kind::Config))?;
        let root = serde_json::from_str(&text)
            .map_err(|error| Error::config(format!("{}: not valid JSON", path.display())).caused_by(error))?;
        Self::new(root).map_err(|error| error.context(path.display()))
    }

    /// Checks a schema and compiles its patterns.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: it says what is not understood here.
    pub fn new(root: Value) -> Result<Self> {
        let mut patterns = HashMap::new();
        inspect(&root, &root, "#", &mut patterns)?;
        Ok(Self { root, patterns })
    }

    /// Whether `document` fits.
    ///
    /// # Errors
    /// The first thing that does not, with its place.
    pub fn check(&self, document: &Value) -> std::result::Result<(), String> {
        self.fits(&self.root, document, "", 0)
    }
}

fn inspect(root: &Value, schema: &Value, place: &str, patterns: &mut HashMap<String, Regex>) -> Result<()> {
    let wrong = |key: &str, expected: &str| Error::config(format!("{place}/{key}: expected {expected}"));
    let map = match schema {
        Value::Bool(_) => return Ok(()),
        Value::Object(map) => map,
        _ => return Err(Error::config(format!("{place}: expected a schema: an object, true or false"))),
    };
    let mut pattern = |key: &str, text: &str| {
        let compiled = Regex::new(text).map_err(|_| wrong(key, "a regular expression without look-around"))?;
        patterns.insert(text.to_owned(), compiled);
        Ok::<(), Error>(())
    };
    for (key, value) in map {
        match key.as_str() {
            "pattern" => pattern(key, value.as_str().ok_or_else(|| wrong(key, "a string"))?)?,
            "patternProperties" => {
                value.as_object().into_iter().flatten().try_for_each(|(text, _)| pattern(key, text))?;
            }
            _ => {}
        }
    }
    for (key, value) in map {
        let inner = format!("{place}/{key}");
        match key.as_str() {
            name if ONE.contains(&name) => inspect(root, value, &inner, patterns)?,
            name if LIST.contains(&name) => {
                let items = value.as_array().ok_or_else(|| wrong(key, "a list of schemas"))?;
                items.iter().try_for_each(|item| inspect(root, item, &inner, patterns))?;
            }
            name if NAMED.contains(&name) => {
                let entries = value.as_object().ok_or_else(|| wrong(key, "a mapping to schemas"))?;
                entries
                    .iter()
                    .try_for_each(|(name, item)| inspect(root, item, &format!("{inner}/{name}"), patterns))?;
            }
            name if NUMBERS.contains(&name) => {
                let number = value.as_f64().ok_or_else(|| wrong(key, "a number"))?;
                if name == "multipleOf" && number <= 0.0 {
                    return Err(wrong(key, "a number above 0"));
                }
            }
            "type" => {
                let names = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
                if !names.iter().all(|name| name.as_str().is_some_and(|name| TYPES.contains(&name))) {
                    return Err(wrong(key, &format!("one of {}", TYPES.join(", "))));
                }
            }
            "required" => {
                value
                    .as_array()
                    .filter(|names| names.iter().all(Value::is_string))
                    .ok_or_else(|| wrong(key, "a list of names"))?;
            }
            "enum" => drop(value.as_array().ok_or_else(|| wrong(key, "a list"))?),
            "uniqueItems" => drop(value.as_bool().ok_or_else(|| wrong(key, "true or false"))?),
            "$ref" => {
                let to = value.as_str().and_then(|to| to.strip_prefix('#')).filter(|to| root.pointer(to).is_some());
                if to.is_none() {
                    return Err(wrong(key, "a place within this schema, such as #/$defs/name"));
                }
            }
            "const" | "pattern" => {}
            name if REMARKS.contains(&name) => {}
            _ => {
                return Err(Error::config(format!("{inner}: this keyword is not supported"))
                    .hint("remove it, or check answers with a program of your own (eval.scorer); docs/evaluation.md lists the keywords"));
            }
        }
    }
    Ok(())
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn is_of(value: &Value, name: &str) -> bool {
    let whole = || value.as_f64().is_some_and(|number| number.fract() == 0.0);
    type_of(value) == name || (name == "integer" && whole())
}

/// Equality of JSON: numbers by value, objects whatever their order.
pub(crate) fn same(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::Number(a), Value::Number(b)) => a == b || (a.is_f64() || b.is_f64()) && a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| same(a, b)))
        }
        _ => left == right,
    }
}

impl Schema {
    fn fits(&self, schema: &Value, value: &Value, place: &str, depth: usize) -> std::result::Result<(), String> {
        let here = if place.is_empty() { "the document" } else { place };
        let map = match schema {
            Value::Bool(false) => return Err(format!("{here}: nothing is allowed there")),
            Value::Object(map) => map,
            _ => return Ok(()),
        };
        if depth > DEPTH {
            return Err(format!("{here}: the schema's references go in circles"));
        }
        let fits = |schema: &Value, value: &Value, place: &str| self.fits(schema, value, place, depth + 1);
        let no = |what: String| Err(format!("{here}: {what}"));
        if let Some(to) = map.get("$ref").and_then(Value::as_str) {
            let target = self.root.pointer(to.trim_start_matches('#')).unwrap_or(&Value::Bool(false));
            fits(target, value, place)?;
        }
        if let Some(types) = map.get("type") {
            let names = types.as_array().map_or(std::slice::from_ref(types), Vec::as_slice);
            if !names.iter().filter_map(Value::as_str).any(|name| is_of(value, name)) {
                return no(format!("{} where {types} is expected", type_of(value)));
            }
        }
        if map.get("const").is_some_and(|wanted| !same(wanted, value)) {
            return no("not the value of const".into());
        }
        if map.get("enum").and_then(Value::as_array).is_some_and(|list| !list.iter().any(|item| same(item, value))) {
            return no("none of the values of enum".into());
        }
        self.number(map, value).or_else(no)?;
        self.string(map, value).or_else(no)?;
        self.array(map, value, place, depth)?;
        self.object(map, value, place, depth)?;
        let list = |key: &str| map.get(key).and_then(Value::as_array).into_iter().flatten();
        for schema in list("allOf") {
            fits(schema, value, place)?;
        }
        if map.contains_key("anyOf") && !list("anyOf").any(|schema| fits(schema, value, place).is_ok()) {
            return no("fits none of anyOf".into());
        }
        if map.contains_key("oneOf") {
            let count = list("oneOf").filter(|schema| fits(schema, value, place).is_ok()).count();
            if count != 1 {
                return no(format!("fits {count} of oneOf, not one"));
            }
        }
        if map.get("not").is_some_and(|schema| fits(schema, value, place).is_ok()) {
            return no("fits what it must not".into());
        }
        if let Some(condition) = map.get("if") {
            let branch = if fits(condition, value, place).is_ok() { "then" } else { "else" };
            map.get(branch).map_or(Ok(()), |schema| fits(schema, value, place))?;
        }
        Ok(())
    }

    #[allow(clippy::unused_self, reason = "like its siblings")]
    fn number(&self, map: &Map<String, Value>, value: &Value) -> std::result::Result<(), String> {
        let Some(number) = value.as_f64() else { return Ok(()) };
        let bound = |key: &str| map.get(key).and_then(Value::as_f64);
        let out = bound("minimum").is_some_and(|bound| number < bound)
            || bound("exclusiveMinimum").is_some_and(|bound| number <= bound)
            || bound("maximum").is_some_and(|bound| number > bound)
            || bound("exclusiveMaximum").is_some_and(|bound| number >= bound);
        if out {
            return Err(format!("{number} is out of bounds"));
        }
        match bound("multipleOf") {
            Some(of) if (number / of).fract() != 0.0 => Err(format!("{number} is no multiple of {of}")),
            _ => Ok(()),
        }
    }

    fn string(&self, map: &Map<String, Value>, value: &Value) -> std::result::Result<(), String> {
        let Some(text) = value.as_str() else { return Ok(()) };
        within(map, "minLength", "maxLength", text.chars().count()).map_err(|count| format!("{count} characters"))?;
        match map.get("pattern").and_then(Value::as_str) {
            Some(pattern) if !self.matches(pattern, text) => Err(format!("does not match {pattern}")),
            _ => Ok(()),
        }
    }

    fn matches(&self, pattern: &str, text: &str) -> bool {
        self.patterns.get(pattern).is_some_and(|pattern| pattern.is_match(text))
    }

    fn array(
        &self,
        map: &Map<String, Value>,
        value: &Value,
        place: &str,
        depth: usize,
    ) -> std::result::Result<(), String> {
        let Some(items) = value.as_array() else { return Ok(()) };
        let no = |what: String| Err(format!("{place}: {what}"));
        within(map, "minItems", "maxItems", items.len()).or_else(|count| no(format!("{count} items")))?;
        let first = map.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        for (index, item) in items.iter().enumerate() {
            if let Some(schema) = first.get(index).or_else(|| map.get("items")) {
                self.fits(schema, item, &format!("{place}/{index}"), depth + 1)?;
            }
        }
        if let Some(schema) = map.get("contains") {
            let count = items.iter().filter(|item| self.fits(schema, item, place, depth + 1).is_ok()).count() as f64;
            let bound = |key: &str| map.get(key).and_then(Value::as_f64);
            if count < bound("minContains").unwrap_or(1.0) || bound("maxContains").is_some_and(|most| count > most) {
                return no(format!("{count} items fit contains"));
            }
        }
        let unique = map.get("uniqueItems").and_then(Value::as_bool).unwrap_or(false);
        let repeated = |(index, item): (usize, &Value)| items[..index].iter().any(|other| same(item, other));
        if unique && items.iter().enumerate().any(repeated) {
            return no("items repeat".into());
        }
        Ok(())
    }

    fn object(
        &self,
        map: &Map<String, Value>,
        value: &Value,
        place: &str,
        depth: usize,
    ) -> std::result::Result<(), String> {
        let Some(entries) = value.as_object() else { return Ok(()) };
        let no = |what: String| Err(format!("{place}: {what}"));
        within(map, "minProperties", "maxProperties", entries.len()).or_else(|count| no(format!("{count} keys")))?;
        for name in map.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str) {
            if !entries.contains_key(name) {
                return no(format!("{name:?} is missing"));
            }
        }
        let of = |key: &str| map.get(key).and_then(Value::as_object);
        for (name, item) in entries {
            let inner = format!("{place}/{name}");
            let own = of("properties").and_then(|schemas| schemas.get(name));
            let by_pattern = of("patternProperties").into_iter().flatten().filter(|(text, _)| self.matches(text, name));
            let mut schemas: Vec<&Value> = own.into_iter().chain(by_pattern.map(|(_, schema)| schema)).collect();
            if schemas.is_empty() {
                schemas.extend(map.get("additionalProperties"));
            }
            for schema in schemas {
                self.fits(schema, item, &inner, depth + 1)?;
            }
            if let Some(schema) = map.get("propertyNames") {
                self.fits(schema, &Value::String(name.clone()), &inner, depth + 1)?;
            }
            if let Some(schema) = of("dependentSchemas").and_then(|schemas| schemas.get(name)) {
                self.fits(schema, value, place, depth + 1)?;
            }
        }
        Ok(())
    }
}

/// Checks that a count lies within two bounds; the error is the count.
fn within(map: &Map<String, Value>, least: &str, most: &str, count: usize) -> std::result::Result<(), usize> {
    let bound = |key: &str| map.get(key).and_then(Value::as_f64);
    let fits =
        bound(least).is_none_or(|bound| count as f64 >= bound) && bound(most).is_none_or(|bound| count as f64 <= bound);
    if fits { Ok(()) } else { Err(count) }
}
