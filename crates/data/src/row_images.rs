//! Finds the images that a conversation shows: in the parts of its messages, in columns such as `images`, and at
//! `<image>` in its texts.
//!
//! It reads the parts of Transformers (`{type: image, image | path | url | base64}`) and `OpenAI`'s `image_url`, TRL's
//! columns, and the `<image>` of LLaVA and LLaMA-Factory. Chat templates see every image as a part `{type: image}`.
use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use super::json_type::{is_other_bytes, json_type};
use super::web_address::is_link;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;

/// Marks the place of an image in texts of LLaVA and LLaMA-Factory.
const PLACE: &str = "<image>";
/// The columns that name the images of a row with a conversation.
const COLUMNS: [&str; 4] = ["images", "image", "image_url", "image_urls"];
/// The name of an image whose bytes are not those of an image file. [`super::Pictures::keep`] refuses it.
pub(super) const NO_IMAGE: &str = "data:no image";
/// Separates the web address of an image from the name that its file may have in the folder of images.
pub(super) const OR_FILE: char = '\u{2}';
const OTHER_MEDIA: [&str; 4] = ["video", "videos", "audio", "audios"];

/// Takes the images out of a conversation and returns their names, in the order in which the messages show them. Texts
/// with `<image>` become lists of parts. If no message has a place for an image, all images of the columns stand before
/// the first text of the user.
///
/// # Errors
/// The row has a video or audio; a part names no image; the columns name more or fewer images than the messages have
/// places.
pub(super) fn take(messages: &mut [Value], row: &mut Map<String, Value>) -> Result<Vec<String>> {
    refuse_other_media(row)?;
    name_regions(messages, row)?;
    let mut columns = Vec::new();
    for field in COLUMNS {
        match row.get_mut(field).map(Value::take).unwrap_or_default() {
            Value::Null => {}
            Value::Array(list) => {
                for value in list {
                    columns.push(reference(value).map_err(|error| error.context(format!("field {field:?}")))?);
                }
            }
            Value::String(text) if text.is_empty() => {}
            value => columns.push(reference(value).map_err(|error| error.context(format!("field {field:?}")))?),
        }
    }
    let mut shown: Vec<Option<String>> = Vec::new();
    for (index, message) in messages.iter_mut().enumerate() {
        let Some(content) = message.get_mut("content") else { continue };
        let parts = match content {
            Value::Array(parts) => parts,
            Value::String(text) if !columns.is_empty() && text.contains(PLACE) => {
                *content = split(text);
                content.as_array_mut().expect("a list was just made")
            }
            _ => continue,
        };
        for part in parts {
            part_of(part, &mut shown).map_err(|error| error.context(format!("message {}", index + 1)))?;
        }
    }
    if shown.is_empty() && !columns.is_empty() {
        in_front(messages, columns.len())?;
        return Ok(columns);
    }
    let places = shown.iter().filter(|named| named.is_none()).count();
    if places != columns.len() {
        return Err(Error::data(match columns.len() {
            0 => "a part of type \"image\" names no image".to_owned(),
            found => format!(
                "the row has {}, its messages {} ({PLACE}, or parts of type \"image\")",
                count(found, "image"),
                count(places, "place")
            ),
        })
        .hint("each image of the columns images, image or image_url takes one place; without any, they stand before the first question"));
    }
    let mut columns = columns.into_iter();
    Ok(shown.into_iter().filter_map(|named| named.or_else(|| columns.next())).collect())
}

/// Marks a region of an image in texts of `OpenSpatial`. The mark of its depth may follow.
const REGION: &str = "<mask>";
const DEPTH: &str = " <depth>";

/// Names the regions of an image in rows of `OpenSpatial`, `{filename, conversations, bbox}`. In the texts, each
/// `<mask>`, with or without `<depth>`, becomes `Region [N]`, counted from 0, as the answers call it. `filename`
/// becomes `image`.
///
/// # Errors
/// The texts have more regions than `bbox` has boxes.
fn name_regions(messages: &mut [Value], row: &mut Map<String, Value>) -> Result<()> {
    let named = COLUMNS.iter().any(|field| row.get(*field).is_some_and(is_there));
    let has_region = |message: &Value| message["content"].as_str().is_some_and(|text| text.contains(REGION));
    if named || !row.get("filename").is_some_and(is_there) || !messages.iter().any(has_region) {
        return Ok(());
    }
    let mut count = 0;
    for content in messages.iter_mut().filter_map(|message| message.get_mut("content")) {
        let Value::String(text) = content else { continue };
        let mut pieces = text.split(REGION);
        let mut named = pieces.next().unwrap_or_default().to_owned();
        for piece in pieces {
            let _ = write!(named, "Region [{count}]"); // a String never fails
            named += piece.strip_prefix(DEPTH).unwrap_or(piece);
            count += 1;
        }
        *text = named;
    }
    if let Some(Value::Array(boxes)) = row.get("bbox")
        && count > boxes.len()
    {
        return Err(Error::data(format!(
            "the messages have {} ({REGION}), and \"bbox\" has {}",
            tunesmith_base::words::count(count, "region"),
            boxes.len()
        )));
    }
    let name = row.remove("filename").unwrap_or_default();
    row.insert("image".to_owned(), name);
    Ok(())
}

/// Whether a row has a statement about an image and says whether it is true, as VSR's
/// `{image, image_link, caption, label, relation}`.
pub(super) fn is_statement(row: &Map<String, Value>) -> bool {
    let has = |field: &str| row.get(field).is_some_and(is_there);
    let of_vsr = has("image_link") || has("image") && has("relation");
    of_vsr && has("caption") && row.get("label").is_some_and(|label| truth(label).is_some())
}

/// The truth value of a label 0, 1, `false` or `true`; `None` for any other label.
pub(super) fn truth(label: &Value) -> Option<bool> {
    label.as_bool().or_else(|| match label.as_u64() {
        Some(0) => Some(false),
        Some(1) => Some(true),
        _ => None,
    })
}

/// Whether a row shows an image, in whatever form.
pub fn shows(row: &Value) -> bool {
    let region = |turn: &Value| {
        [&turn["value"], &turn["content"]].iter().any(|text| text.as_str().is_some_and(|text| text.contains(REGION)))
    };
    row.as_object().is_some_and(|row| {
        let turns = ["conversations", "messages"].iter().filter_map(|field| row.get(*field)?.as_array()).flatten();
        shown_in(row).is_some()
            || row.get("filename").is_some_and(is_there) && turns.into_iter().any(region)
            || is_statement(row)
    })
}

/// The first field of the row that shows an image; `None` if none does.
pub(super) fn shown_in(row: &Map<String, Value>) -> Option<&'static str> {
    let is_picture = |part: &Value| part["type"].as_str().is_some_and(|kind| kind.contains("image"));
    let in_message = |message: &Value| message["content"].as_array().is_some_and(|parts| parts.iter().any(is_picture));
    let in_turns = |value: &Value| value.as_array().is_some_and(|turns| turns.iter().any(in_message));
    let names = COLUMNS.into_iter().find(|field| row.get(*field).is_some_and(is_there));
    names.or_else(|| {
        ["messages", "prompt", "conversations", "completion"]
            .into_iter()
            .find(|field| row.get(*field).is_some_and(in_turns))
    })
}

/// Whether a field has a value: neither null, nor an empty list or text.
pub(super) fn is_there(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Array(list) => !list.is_empty(),
        Value::String(text) => !text.is_empty(),
        _ => true,
    }
}

/// Refuses a row with fields for videos or audio.
pub(super) fn refuse_other_media(row: &Map<String, Value>) -> Result<()> {
    match OTHER_MEDIA.iter().find(|field| row.get(**field).is_some_and(is_there)) {
        Some(field) => Err(Error::data(format!("the row has {field:?}, expected text and images only"))
            .hint("tunesmith reads no video and no audio: leave such rows out")),
        None => Ok(()),
    }
}

/// Refuses a message with a field for images, videos or audio: no template writes it. Images stand among the parts of its content.
pub(super) fn refuse_media_of_message(message: &Map<String, Value>) -> Result<()> {
    let has = |fields: &[&'static str]| fields.iter().copied().find(|field| message.get(*field).is_some_and(is_there));
    if let Some(field) = has(&COLUMNS) {
        return Err(Error::data(format!("the message shows images in {field:?}, expected them in its content")).hint(
            "write {\"type\": \"image\", \"image\": \"FILE\"} in \"content\", or \"images\" beside \"messages\"",
        ));
    }
    match has(&OTHER_MEDIA) {
        Some(field) => Err(Error::data(format!("the message has {field:?}, expected text and images only"))
            .hint("tunesmith reads no video and no audio: leave such rows out")),
        None => Ok(()),
    }
}

/// Refuses a row `{text, label}` whose other fields show images, videos or audio.
pub(super) fn refuse_beside_label(left: &Map<String, Value>) -> Result<()> {
    match shown_in(left) {
        Some(field) => {
            Err(Error::data(format!("the row shows images in {field:?}, but rows {{text, label}} are text only"))
                .hint("leave the field out"))
        }
        None => refuse_other_media(left),
    }
}

/// The text as a list of parts, with a part `{type: image}` in place of each `<image>`.
fn split(text: &str) -> Value {
    let mut parts = Vec::new();
    for (number, piece) in text.split(PLACE).enumerate() {
        if number > 0 {
            parts.push(json!({ "type": "image" }));
        }
        if !piece.is_empty() {
            parts.push(json!({ "type": "text", "text": piece }));
        }
    }
    parts.into()
}

/// Checks a part of a message. If the part is an image, pushes its name to `shown` (`None` if the part names none, so
/// that a column does) and replaces the part by `{type: image}`.
fn part_of(part: &mut Value, shown: &mut Vec<Option<String>>) -> Result<()> {
    let kind = part["type"].as_str().unwrap_or_default().to_owned();
    if kind == "text" && !part["text"].is_string() {
        return Err(Error::data("\"content\" has a part of type \"text\" without \"text\""));
    }
    if ["video", "audio"].iter().any(|media| kind.contains(media)) {
        return Err(Error::data(format!("\"content\" has a part of type {kind:?}, expected text and images only"))
            .hint("tunesmith reads no video and no audio: leave such rows out"));
    }
    if kind.contains("image") {
        let fields = part.as_object_mut().map(std::mem::take).unwrap_or_default();
        let names = fields.iter().any(|(name, value)| name != "type" && !value.is_null());
        shown.push(if names { Some(reference(Value::Object(fields))?) } else { None });
        *part = json!({ "type": "image" });
    }
    Ok(())
}

/// Puts places for all images before the first text of the user, as TRL does.
fn in_front(messages: &mut [Value], pictures: usize) -> Result<()> {
    let first = messages.iter_mut().find(|message| message["role"] == "user");
    let first = first.ok_or_else(|| Error::data("the row has images, but no message of the user to show them in"))?;
    let mut parts = vec![json!({ "type": "image" }); pictures];
    match first["content"].take() {
        Value::Array(own) => parts.extend(own),
        Value::String(text) if text.is_empty() => {}
        text => parts.push(json!({ "type": "text", "text": text })),
    }
    first["content"] = parts.into();
    Ok(())
}

/// Whether a text is probably an image in base64 and not the name of a file, which has a dot.
fn is_base64(text: &str) -> bool {
    text.len() > 200 && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+/=\r\n".contains(&byte))
}

fn is_data(value: &Value) -> bool {
    value.as_str().is_some_and(|text| text.starts_with("data:"))
}

/// The name of an image that has an `image_link`: the web address and, after [`OR_FILE`], the name of its file, which
/// is `path` or the end of the address. Only the name of the file if the link is not a web address; `None` without a
/// link.
fn linked(fields: &Map<String, Value>) -> Option<String> {
    let link = fields.get("image_link")?.as_str().filter(|link| !link.is_empty() && !link.contains(OR_FILE))?;
    let path = fields.get("path").and_then(Value::as_str).filter(|path| !path.is_empty());
    let name = path.unwrap_or_else(|| link.rsplit('/').next().unwrap_or_default());
    Some(if is_link(link) { format!("{link}{OR_FILE}{name}") } else { name.to_owned() })
}

/// The name of an image in the form that [`reference`] reads back to the same name.
pub(super) fn written(name: String) -> Value {
    match name.split_once(OR_FILE) {
        Some((link, path)) => json!({ "image_link": link, "path": path }),
        None => name.into(),
    }
}

/// The name of an image that a row gives as a text or an object: a file, a web address, a `data:` URI, or an address
/// and a file ([`OR_FILE`]).
///
/// # Errors
/// The value does not name exactly one image.
pub(super) fn reference(value: Value) -> Result<String> {
    const NAMES: [&str; 6] = ["path", "image", "url", "image_url", "base64", "data"];
    let wrong = |value: &Value| {
        Error::data(format!("an image is {}, expected the name of a file", json_type(value)))
            .hint("image: cats/1.jpg, {path: cats/1.jpg}, or {base64: …}")
    };
    match value {
        Value::String(name) if name.is_empty() => Err(wrong(&Value::Null)),
        Value::String(text) if is_base64(&text) => Err(Error::data(format!(
            "the image is a text of {} in base64, expected the name of a file",
            count(text.len(), "character")
        ))
        .hint("write {base64: …}, or data:image/png;base64,…")),
        Value::String(name) => Ok(name.strip_prefix("file://").map_or_else(|| name.clone(), str::to_owned)),
        value if is_other_bytes(&value) => Ok(NO_IMAGE.to_owned()),
        Value::Object(mut fields) => {
            // A column of images as `datasets` stores it. The path beside the bytes only says what the file was called.
            if let Some(Value::String(bytes)) = fields.get_mut("bytes").filter(|bytes| is_data(bytes)) {
                return Ok(std::mem::take(bytes));
            }
            // The bytes are not an image. A file with the name in `path` would be another one, so it is not read.
            let is_other = |bytes: &Value| bytes.as_str().is_some_and(|text| !text.is_empty()) || is_other_bytes(bytes);
            if fields.get("bytes").is_some_and(is_other) {
                return Ok(NO_IMAGE.to_owned());
            }
            if let Some(name) = linked(&fields) {
                return Ok(name);
            }
            let named = |field: &&str| fields.get(*field).is_some_and(|value| !value.is_null());
            let named: Vec<&str> = NAMES.iter().copied().filter(named).collect();
            let [field] = named[..] else {
                return Err(match named[..] {
                    [] => wrong(&Value::Object(fields)),
                    _ => Error::data(format!("an image has the fields {}", named.join(" and ")))
                        .hint("leave one of them: an image has one source"),
                });
            };
            match fields[field].take() {
                Value::String(text) if field == "base64" || (field == "data" && !text.starts_with("data:")) => {
                    Ok(format!("data:;base64,{text}"))
                }
                value => reference(value),
            }
        }
        other => Err(wrong(&other)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::row::Form;
    use super::super::row::Row;
    use super::*;

    fn read(row: Value) -> Result<(Value, Vec<String>)> {
        let Row::Chat(chat) = Row::parse(row, Form::ALL)? else { panic!("not a chat") };
        Ok((chat.messages[0]["content"].clone(), chat.images))
    }

    #[test]
    fn every_way_to_name_a_picture_is_read() {
        let image = json!({"type": "image"});
        let text = |text: &str| json!({"type": "text", "text": text});
        let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
        for (part, name) in [
            (json!({"type": "image", "image": "a.png"}), "a.png"),
            (json!({"type": "image", "path": "a.png", "bytes": null}), "a.png"),
            (json!({"type": "image", "url": "file:///a.png"}), "/a.png"),
            (json!({"type": "image", "base64": "AAAA"}), "data:;base64,AAAA"),
            (json!({"type": "image", "image": {"bytes": "no image", "path": "a.png"}}), NO_IMAGE),
            (json!({"type": "image", "image": {"bytes": "", "path": "a.png"}}), "a.png"),
            (json!({"type": "image", "url": "https://a.org/b.png"}), "https://a.org/b.png"),
            (json!({"type": "image_url", "image_url": {"url": "http://a.org/b"}}), "http://a.org/b"),
            (json!({"type": "image", "image": {"bytes": "data:;base64,AA", "path": "a.png"}}), "data:;base64,AA"),
            (
                json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}),
                "data:image/png;base64,AA",
            ),
        ] {
            let (content, images) = read(user(json!([text("see "), part]))).unwrap();
            assert_eq!((content, images), (json!([text("see "), image]), vec![name.to_owned()]));
        }
        let mut row = user(json!("what is it?"));
        row["images"] = json!(["a.png", {"path": "b.png"}]);
        let names = || vec!["a.png".to_owned(), "b.png".to_owned()];
        assert_eq!(read(row).unwrap(), (json!([image, image, text("what is it?")]), names()));
        let mut row = user(json!("<image>\nand <image>?"));
        row["images"] = json!(["a.png", "b.png"]);
        assert_eq!(read(row).unwrap(), (json!([image, text("\nand "), image, text("?")]), names()));
        let llava = json!({"image": "a.png", "conversations": [{"from": "human", "value": "<image>\nwhat?"}]});
        assert_eq!(read(llava).unwrap(), (json!([image, text("\nwhat?")]), vec!["a.png".to_owned()]));
        let asked = json!({"image": "a.png", "question": "what?", "answer": "a cat"});
        assert_eq!(read(asked).unwrap(), (json!([image, text("what?")]), vec!["a.png".to_owned()]));
        let linked = json!({"image_url": "https://a.org/b", "question": "what?", "answer": "a cat"});
        assert!(shows(&linked));
        assert_eq!(read(linked).unwrap(), (json!([image, text("what?")]), vec!["https://a.org/b".to_owned()]));
        // Without a picture, the text stays as it is.
        assert_eq!(read(user(json!("write <image>"))).unwrap(), (json!("write <image>"), Vec::new()));
    }

    #[test]
    fn regions_of_a_picture_are_counted_as_answers_call_them() {
        let row = |boxes: Value| {
            json!({
                "filename": "0a1.jpg",
                "bbox": boxes,
                "conversations": [
                    {"from": "human", "value": "Is <mask> <depth> left of <mask>?"},
                    {"from": "gpt", "value": "Region [0] is."},
                    {"from": "human", "value": "And <mask> <depth>?"},
                ],
            })
        };
        assert!(shows(&row(json!([]))));
        let Row::Chat(chat) = Row::parse(row(json!([[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]])), Form::ALL).unwrap()
        else {
            panic!("no chat")
        };
        let text = |text: &str| json!({"type": "text", "text": text});
        let contents: Vec<Value> = chat.messages.iter().map(|message| message["content"].clone()).collect();
        assert_eq!(contents[0], json!([{"type": "image"}, text("Is Region [0] left of Region [1]?")]));
        assert_eq!(contents[2], "And Region [2]?");
        assert_eq!(chat.images, ["0a1.jpg"]);
        let error = Row::parse(row(json!([[0, 0, 1, 1]])), Form::ALL).unwrap_err();
        assert!(error.message().contains("3 regions"), "{error}");
        // A name of a file beside texts without regions is no picture's.
        let plain = json!({"filename": "a.txt", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]});
        assert!(!shows(&plain));
    }

    #[test]
    fn what_is_written_reads_back_the_same() {
        let row = json!({"image": "a.png", "question": "what?", "answer": "a cat"});
        let Row::Chat(chat) = Row::parse(row, Form::ALL).unwrap() else { panic!("not a chat") };
        let again = Row::parse(chat.clone().into_json(), Form::ALL).unwrap();
        assert_eq!(again, Row::Chat(chat));
    }

    #[test]
    fn what_names_no_picture_is_refused() {
        for (image, part) in [
            (json!(3), "is a number"),
            (json!({"bytes": 3}), "is an object"),
            (json!(["a.png", ""]), "expected the name of a file"),
            (json!("iVBORw0KGgo/".repeat(25)), "a text of 300 characters in base64"),
            (json!({"path": "a.png", "base64": "AAAA"}), "the fields path and base64"),
        ] {
            let error = read(json!({"image": image, "question": "q", "answer": "a"})).unwrap_err();
            assert!(error.message().contains(part) && error.message().contains("\"image\""), "{error} lacks {part}");
        }
    }
}
