//! Turns rows with images into examples: captions, which have neither a chat template nor BOS, and chats.
use super::{Encoder, Example, IGNORE, TokenizedRow, expect_template};
use crate::messages::Conversation;
use crate::pictures::{ChatPictures, Pictures, before_caption};
use crate::template::ChatTemplate;
use serde_json::json;
use tunesmith_base::error::{Error, Result};

impl Encoder {
    fn pictures(&self) -> Result<&dyn Pictures> {
        self.pictures.as_deref().ok_or_else(|| {
            Error::data("the row has an image, but the model sees none")
                .hint("name a model that sees images, pair this one with an encoder (vision.encoder), or set data.format: text to train on the text alone")
        })
    }

    /// Makes an example of each caption of an image. The rows of the image stand in front of the caption
    /// ([`before_caption`]), and the last of them predicts its first token. There is no BOS. For a model that reads
    /// images in chats, the image is the question and the caption the answer.
    pub(super) fn captions(&self, image: String, captions: Vec<String>) -> Result<TokenizedRow> {
        let pictures = self.pictures()?;
        if pictures.chat().is_some() {
            return self.answers(&image, captions);
        }
        let (before, shown) =
            before_caption(pictures, &self.tokenizer, image, self.tokenizer.eos_id().unwrap_or_default())?;
        let mut row = TokenizedRow::default();
        for caption in &captions {
            let encoded = self.tokenizer.encode_first(caption, false, self.options.most_tokens())?;
            row.notes.keeps_tokens |= encoded.ids.iter().any(|id| self.tokenizer.is_control(*id));
            let labels = encoded.ids.iter().map(|&id| id as i32).collect();
            let caption = self.with_eos(Example { input_ids: encoded.ids, labels })?;
            let example = Example {
                input_ids: [&before[..], &caption.input_ids].concat(),
                labels: [vec![IGNORE; before.len()], caption.labels].concat(),
            };
            row.longest = row.longest.max(example.input_ids.len());
            row.examples.push(example);
            row.pictures.push(shown.clone());
        }
        Ok(row)
    }

    /// Makes a chat of each caption: the image is the question, the caption the answer.
    fn answers(&self, image: &str, captions: Vec<String>) -> Result<TokenizedRow> {
        let template = expect_template(self.template.as_ref())?;
        let mut row = TokenizedRow::default();
        for caption in captions {
            let asked = json!({ "role": "user", "content": [{ "type": "image" }] });
            let conversation = Conversation {
                messages: vec![asked, json!({ "role": "assistant", "content": caption })],
                images: vec![image.to_owned()],
                ..Conversation::default()
            };
            let TokenizedRow { examples, longest, truncated, limited, cuts_picture, notes, pictures, references: _ } =
                self.conversation(template, conversation)?;
            row.examples.extend(examples);
            row.pictures.extend(pictures);
            row.longest = row.longest.max(longest);
            row.truncated |= truncated;
            row.limited |= limited;
            row.cuts_picture |= cuts_picture;
            row.notes.add(notes);
        }
        Ok(row)
    }

    /// The conversation in a form that the template can read, and its pictures; `None` for a conversation without
    /// pictures.
    pub(super) fn chat_pictures(
        &self,
        template: &ChatTemplate,
        conversation: Conversation,
    ) -> Result<(Conversation, Option<ChatPictures>)> {
        if conversation.images.is_empty() {
            return Ok((conversation, None));
        }
        let pictures = self.pictures()?;
        let shown = ChatPictures::of(pictures, &self.tokenizer, &conversation.images)?;
        Ok((shown.readable(template, conversation), Some(shown)))
    }
}
