//! `{image, caption}`: an image and its caption. The caption is also called `alt_text` or `text`, and may be a
//! list of captions.
use serde_json::{Map, Value};

use super::{Row, Shape, has, text};
use crate::json_type::json_type;
use crate::row_images;
use tunesmith_base::error::{Error, Result};

/// Names of the field with the caption.
const CAPTION: [&str; 3] = ["caption", "alt_text", "text"];

pub(super) const SHAPE: Shape = Shape {
    fields: "image, and caption, alt_text or text",
    plain: true,
    fits: |row| has(row, "image") && CAPTION.iter().any(|field| has(row, field)),
    parse,
    source_text: |_| None,
};

fn parse(row: &mut Map<String, Value>) -> Result<Row> {
    row_images::refuse_other_media(row)?;
    let image = row_images::reference(row.get_mut("image").map(Value::take).unwrap_or_default())
        .map_err(|error| error.context("field \"image\""))?;
    let field = CAPTION.iter().find(|field| has(row, field)).unwrap_or(&CAPTION[0]);
    let captions = match row.get(*field) {
        Some(Value::Array(_)) => {
            row[*field].take().as_array().into_iter().flatten().map(|one| caption(field, one)).collect()
        }
        _ => text(row, field).map(|caption| vec![caption]),
    }?;
    if captions.is_empty() || captions.iter().any(|caption| caption.trim().is_empty()) {
        return Err(Error::data(format!("field {field:?} is empty")).hint("leave the row out"));
    }
    Ok(Row::Caption { image, captions })
}

fn caption(field: &str, value: &Value) -> Result<String> {
    let wrong = || Error::data(format!("field {field:?} has {} in its list, expected strings", json_type(value)));
    value.as_str().map(str::to_owned).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::super::Form;
    use super::*;
    use serde_json::json;

    #[test]
    fn a_picture_has_a_caption_or_several() {
        let parse = |row: Value| Row::parse(row, &[Form::Captions]);
        let row = |captions: &[&str]| Row::Caption {
            image: "a.png".into(),
            captions: captions.iter().map(|one| (*one).to_owned()).collect(),
        };
        assert_eq!(parse(json!({"image": "a.png", "caption": "a cat"})).unwrap(), row(&["a cat"]));
        assert_eq!(
            parse(json!({"image": {"path": "a.png", "bytes": 3}, "alt_text": ["x", "y"]})).unwrap(),
            row(&["x", "y"])
        );
        assert_eq!(parse(json!({"image": "a.png", "text": "t", "caption": null})).unwrap(), row(&["t"]));
        for (bad, part) in [
            (json!({"image": "a.png"}), "found the fields [image], expected"),
            (json!({"image": "a.png", "caption": ""}), "\"caption\" is empty"),
            (json!({"image": "a.png", "caption": ["x", 1]}), "expected strings"),
            (json!({"image": {"bytes": 3}, "caption": "x"}), "is an object"),
            (json!({"image": "a.png", "caption": "x", "video": "a.mp4"}), "\"video\""),
        ] {
            let error = parse(bad).unwrap_err();
            assert!(error.message().contains(part), "{error} lacks {part}");
        }
    }
}
