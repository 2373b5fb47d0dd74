//! Rows `{image, caption, label}` with `relation` or `image_link`: a statement about an image, and whether it is true,
//! as in VSR (Liu et al., "Visual Spatial Reasoning", 2023). The statement becomes a question, and the label its
//! answer, `yes` or `no`.
use serde_json::{Map, Value, json};

use super::{Row, Shape, has, pair, text};
use crate::row_images;
use tunesmith_base::error::{Error, Result};

/// The question that follows the statement.
const ASKED: &str = "Is this statement true? Answer yes or no.";

pub(super) const SHAPE: Shape = Shape {
    fields: "image or image_link, caption, label (0 or 1), relation",
    plain: false,
    fits: row_images::is_statement,
    parse,
    source_text: |_| None,
};

fn parse(row: &mut Map<String, Value>) -> Result<Row> {
    let answer = match row.get("label").and_then(row_images::truth) {
        Some(true) => "yes",
        Some(false) => "no",
        None => return Err(Error::data("field \"label\", expected 0 or 1")),
    };
    let question = format!("{}\n{ASKED}", text(row, "caption")?);
    if has(row, "image_link") {
        // The file is called as `image` says, or as the end of its web address.
        let link = text(row, "image_link")?;
        let named = match row.get_mut("image").map(Value::take).unwrap_or_default() {
            Value::String(path) => json!({ "image_link": link, "path": path }),
            Value::Null => json!({ "image_link": link }),
            image => image, // the bytes of one
        };
        row.insert("image".to_owned(), named);
    }
    pair(&question, answer, row)
}

#[cfg(test)]
mod tests {
    use super::super::Form;
    use super::*;

    fn chat(row: Value) -> (Value, Vec<String>) {
        let Row::Chat(chat) = Row::parse(row, Form::ALL).unwrap() else { panic!("no chat") };
        (chat.messages.iter().map(|message| message["content"].clone()).collect(), chat.images)
    }

    #[test]
    fn a_statement_becomes_a_question_and_its_label_the_answer() {
        let asked = "The bench is left of the plant.\nIs this statement true? Answer yes or no.";
        let row = |label: Value| {
            json!({
                "image": "0085637.jpg",
                "image_link": "http://images.cocodataset.org/train2017/0085637.jpg",
                "caption": "The bench is left of the plant.",
                "label": label,
                "relation": "left of",
            })
        };
        let expected = |answer: &str| {
            let name = "http://images.cocodataset.org/train2017/0085637.jpg\u{2}0085637.jpg";
            (json!([[{"type": "image"}, {"type": "text", "text": asked}], answer]), vec![name.to_owned()])
        };
        assert_eq!(chat(row(json!(1))), expected("yes"));
        assert_eq!(chat(row(json!(false))), expected("no"));
        let mut linked = row(json!(0));
        linked.as_object_mut().unwrap().remove("image");
        assert_eq!(chat(linked), expected("no"));
        let mut named = row(json!(0));
        named["image_link"] = "train2017/0085637.jpg".into();
        assert_eq!(chat(named).1, ["0085637.jpg"], "no web address");
        // What is written reads back the same.
        let Row::Chat(read) = Row::parse(row(json!(1)), Form::ALL).unwrap() else { panic!("no chat") };
        assert_eq!(Row::parse(read.clone().into_json(), Form::ALL).unwrap(), Row::Chat(read));
        // A caption whose row has a class is a caption.
        let caption = Row::parse(json!({"image": "a.png", "caption": "a cat", "label": 1}), Form::ALL).unwrap();
        assert!(matches!(caption, Row::Caption { .. }), "{caption:?}");
        assert!(Row::parse(row(json!(2)), &[Form::Statement]).is_err());
    }
}
