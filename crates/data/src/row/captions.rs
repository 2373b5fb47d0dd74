//! Rows `{image, caption}`: an image and its caption. The image may also be in `image_url` or `url`. The caption may
//! also be in `alt_text` or `text`, and may be a list of captions.
//!
//! Data sets of texts have rows `{url, text}` too, with the address of a page. Such a row is a caption only if the
//! address ends as that of an image, or the row has the size of an image. The first rows of a file decide: all its rows
//! of this kind are what most of the first ones are ([`is_linked`], [`super::forms_of`]).
use serde_json::{Map, Value};

use super::{Row, Shape, has, text};
use crate::json_type::json_type;
use crate::row_images::{self, is_there};
use crate::web_address::is_link;
use tunesmith_base::error::{Error, Result};

/// The fields that may have the caption, in this order.
const CAPTION: [&str; 3] = ["caption", "alt_text", "text"];
/// The fields that may name the image, in this order. `url` counts only if it is a web address.
const IMAGE: [&str; 3] = ["image", "image_url", "url"];
/// The endings of image files.
const ENDS: [&str; 9] = [".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".jfif"];
/// Pairs of fields with the size of an image in pixels.
const SIZES: [[&str; 2]; 2] = [["width", "height"], ["original_width", "original_height"]];

pub(super) const SHAPE: Shape = Shape {
    fields: "image, image_url or url, and caption, alt_text or text",
    plain: true,
    fits: |row| image(row).is_some() && CAPTION.iter().any(|field| has(row, field)),
    parse,
    source_text: |_| None,
};

/// The field of the row that names the image; `None` if there is none.
fn image(row: &Map<String, Value>) -> Option<&'static str> {
    let names = |field: &&str| match *field {
        "image" => has(row, field),
        "url" => row.get(*field).and_then(Value::as_str).is_some_and(is_link),
        _ => row.get(*field).is_some_and(is_there),
    };
    IMAGE.into_iter().find(names)
}

/// Whether a row is of the kind `{url, text}`, which is either the text of a page or an image with its caption.
pub(super) fn is_linked(row: &Map<String, Value>) -> bool {
    image(row) == Some("url") && has(row, "text") && !has(row, "caption") && !has(row, "alt_text")
}

/// Whether the `url` of a row is that of an image: its path has the ending of an image file, or the row has the width
/// and height of an image.
pub(super) fn is_of_image(row: &Map<String, Value>) -> bool {
    let link = row.get("url").and_then(Value::as_str).unwrap_or_default();
    let path = link.split(['?', '#']).next().unwrap_or_default().to_lowercase();
    let has_number = |field: &str| row.get(field).is_some_and(Value::is_number);
    ENDS.iter().any(|end| path.ends_with(end)) || SIZES.iter().any(|pair| pair.iter().all(|field| has_number(field)))
}

fn parse(row: &mut Map<String, Value>) -> Result<Row> {
    row_images::refuse_other_media(row)?;
    let of = image(row).unwrap_or(IMAGE[0]);
    let image = row_images::reference(row.get_mut(of).map(Value::take).unwrap_or_default())
        .map_err(|error| error.context(format!("field {of:?}")))?;
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
        assert_eq!(parse(json!({"image_url": "a.png", "caption": "c"})).unwrap(), row(&["c"]));
        assert_eq!(parse(json!({"image": "a.png", "url": "https://a.org/page", "text": "t"})).unwrap(), row(&["t"]));
        for (bad, part) in [
            (json!({"image": "a.png"}), "found the fields [image], expected"),
            (json!({"image": "a.png", "caption": ""}), "\"caption\" is empty"),
            (json!({"image": "a.png", "caption": ["x", 1]}), "expected strings"),
            (json!({"image": {"bytes": 3}, "caption": "x"}), "is an object"),
            (json!({"image": "a.png", "caption": "x", "video": "a.mp4"}), "\"video\""),
            (json!({"url": "a.png", "caption": "x"}), "found the fields [url, caption], expected"),
        ] {
            let error = parse(bad).unwrap_err();
            assert!(error.message().contains(part), "{error} lacks {part}");
        }
    }

    #[test]
    fn a_text_beside_an_address_is_a_caption_where_the_address_is_an_image_s() {
        let form = |row: Value| Form::detect(row.as_object().unwrap());
        let of = |url: &str| form(json!({"url": url, "text": "a cat"}));
        for image in
            ["https://a.org/b.JPG", "http://a.org/b.png?w=3", "https://a.org/x/b.jpeg#x", "HTTPS://a.org/b.webp"]
        {
            assert_eq!(of(image), Some(Form::Captions), "{image}");
        }
        for page in ["https://a.org/", "https://a.org/?p=b.jpg", "b.jpg", "ftp://a.org/b.jpg", ""] {
            assert_eq!(of(page), Some(Form::Text), "{page}");
        }
        let sized =
            json!({"url": "https://a.org/x", "text": "t", "original_width": 3, "original_height": 4, "uid": "0"});
        assert_eq!(form(sized), Some(Form::Captions));
        assert_eq!(
            form(json!({"url": "https://a.org/x", "text": "t", "width": "3", "height": null})),
            Some(Form::Text)
        );
        assert_eq!(form(json!({"url": "https://a.org/x", "caption": "t"})), Some(Form::Captions));
        assert_eq!(form(json!({"image_url": "https://a.org/x", "text": "t"})), Some(Form::Captions));
        assert_eq!(form(json!({"image_url": "", "text": "t"})), Some(Form::Text));
        let named = Row::parse(json!({"url": "https://a.org/x", "text": "t"}), &[Form::Captions]).unwrap();
        assert_eq!(named, Row::Caption { image: "https://a.org/x".into(), captions: vec!["t".into()] });
    }

    #[test]
    fn what_most_of_the_first_rows_are_all_are() {
        let rows = |images: usize, pages: usize| {
            let row = |image| {
                let url = if image { "https://a.org/b.png" } else { "https://a.org/b" };
                json!({"url": url, "text": "t"})
            };
            let all: Vec<Value> = (0..images + pages).map(|at| row(at < images)).collect();
            super::super::forms_of(all.iter().map(|row| row.as_object().unwrap()))
        };
        assert_eq!(rows(3, 1), [Form::Captions]);
        assert_eq!(rows(2, 2), [Form::Captions]);
        assert_eq!(rows(1, 2), [Form::Text]);
        let page = || json!({"url": "https://a.org/b", "text": "t"});
        let image = || json!({"url": "https://a.org/b.png", "text": "t"});
        let caption = Row::Caption { image: "https://a.org/b".into(), captions: vec!["t".into()] };
        let with_chats = [Form::Messages, Form::Captions];
        assert_eq!(Row::parse(page(), &with_chats).unwrap(), caption);
        assert_eq!(Row::parse(image(), &[Form::Messages, Form::Text]).unwrap(), Row::Text("t".into()));
        assert!(Row::parse(json!({"text": "t"}), &with_chats).is_err());
    }
}
