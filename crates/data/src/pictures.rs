//! Pictures of rows: their files, and where they stand in a row's tokens. Only names are in memory; what an encoder reads
//! of a picture is made when a batch needs it.
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tunesmith_base::error::Result;
use tunesmith_vision::Pixels;

/// Reads the pictures that rows name. Many threads use one.
pub trait Pictures: Debug + Send + Sync {
    /// How many rows of the decoder's input a picture takes.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`], with the file: it cannot be read, or is no picture.
    fn rows(&self, file: &str) -> Result<usize>;

    /// What the encoder reads of it.
    ///
    /// # Errors
    /// As [`Self::rows`].
    fn pixels(&self, file: &str) -> Result<Arc<Pixels>>;

    /// What [`Self::rows`] depends on besides the files: part of the name of tokenized rows in the cache.
    fn key(&self) -> String;
}

/// A picture of a row, which all examples of the row show.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shown {
    /// The file, as the row names it.
    pub file: String,
    /// Where its rows are among the tokens of an example: rising runs.
    pub runs: Vec<Range<usize>>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::IGNORE;
    use crate::{Dataset, Silent, load_with_pictures};
    use std::fs;
    use std::path::Path;
    use std::slice::from_ref;
    use tunesmith_base::error::{Error, Kind};
    use tunesmith_config::{Config, Truncation};

    /// A picture takes as many rows as its name has letters; its pixels are the name's bytes.
    #[derive(Debug)]
    struct Named(&'static str);

    impl Pictures for Named {
        fn rows(&self, file: &str) -> Result<usize> {
            if file == "broken" { Err(Error::data("broken: no picture")) } else { Ok(file.len()) }
        }

        fn pixels(&self, file: &str) -> Result<Arc<Pixels>> {
            Ok(Arc::new(Pixels { patches: file.bytes().map(f32::from).collect(), tiles: Vec::new() }))
        }

        fn key(&self) -> String {
            self.0.to_owned()
        }
    }

    const ROWS: &str = r#"{"image": "cat", "caption": "a cat"}
{"image": "horse", "caption": ["a horse", "the brown horse"]}
"#;

    fn load(dir: &Path, rows: &str, key: &'static str, change: impl Fn(&mut Config)) -> Result<Dataset> {
        let file = dir.join("rows.jsonl");
        fs::write(&file, rows).unwrap();
        let mut config = Config::default();
        config.data.train_path = vec![file];
        config.data.cache_dir = Some(dir.to_owned());
        change(&mut config);
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/quickstart/model");
        load_with_pictures(&config, &model, 1 << 20, &Silent, Some(Arc::new(Named(key))))
    }

    #[test]
    fn each_caption_stands_behind_the_rows_of_its_picture_and_batches_carry_them() {
        let dir = tempfile::tempdir().unwrap();
        let data = load(dir.path(), ROWS, "", |_| ()).unwrap();
        let eos = data.tokenizer.eos_id().unwrap();
        let ids = |text: &str| [data.tokenizer.encode(text, false).unwrap().ids, vec![eos]].concat();
        let captions = [ids("a cat"), ids("a horse"), ids("the brown horse")];
        let batch = data.train.batch([0, 1]).unwrap();
        let mut first = 0;
        for ((rows, name), (number, caption)) in
            [(3, "cat"), (5, "horse"), (5, "horse")].into_iter().zip(captions.iter().enumerate())
        {
            let image = &batch.images[number];
            assert_eq!(image.runs, from_ref(&(first..first + rows)));
            assert_eq!(image.pixels.patches, name.bytes().map(f32::from).collect::<Vec<_>>());
            assert_eq!(batch.tokens[first + rows..first + rows + caption.len()], caption[..], "no BOS, and EOS");
            // The last of the picture's rows predicts the first token.
            let unlabelled = vec![IGNORE; rows - 1].into_iter();
            let expected = unlabelled.chain(caption.iter().map(|&id| id as i32)).chain([IGNORE]);
            let end = first + rows + caption.len();
            assert_eq!(batch.targets[first..end], expected.collect::<Vec<_>>()[..]);
            assert_eq!(batch.cu_seqlens[number..number + 2], [first, end]);
            first = end;
        }
        assert_eq!(batch.tokens.len(), first, "rows of pictures count as tokens");
        assert_eq!(data.train.lengths(), [3 + captions[0].len(), 10 + captions[1].len() + captions[2].len()]);
        assert_eq!(data.train.longest_sequence(), 5 + captions[2].len());
        let (prompt, answer) = data.question(&data.train, 0).unwrap().unwrap();
        assert_eq!((prompt.len(), &answer), (3, &captions[0]), "a picture is a question");
    }

    #[test]
    fn the_cache_keeps_pictures_and_a_run_knows_them_apart() {
        let dir = tempfile::tempdir().unwrap();
        let [new, kept, other] = ["a", "a", "b"].map(|key| load(dir.path(), ROWS, key, |_| ()).unwrap());
        assert_eq!([&new, &kept, &other].map(|data| data.report.from_cache), [false, true, false]);
        assert_eq!(kept.train.batch([0, 1]).unwrap(), new.train.batch([0, 1]).unwrap());
        assert_eq!(kept.fingerprint, new.fingerprint);
        let renamed = load(dir.path(), &ROWS.replace("\"cat\"", "\"dog\""), "a", |_| ()).unwrap();
        assert_ne!(renamed.fingerprint, new.fingerprint, "another picture with as many rows");
    }

    #[test]
    fn a_picture_is_never_cut_and_a_broken_one_is_refused_with_its_row() {
        let dir = tempfile::tempdir().unwrap();
        let long = format!("{ROWS}{}", r#"{"image": "hippopotamuses", "caption": "it is too long to be seen here"}"#);
        for (truncation, left_out) in [(Truncation::Right, 0), (Truncation::Left, 1), (Truncation::Drop, 1)] {
            let cut = |config: &mut Config| (config.model.max_seq_len, config.data.truncation) = (16, truncation);
            let data = load(dir.path(), &long, "", cut).unwrap();
            assert_eq!((data.report.train.too_long, data.train.len() as u64), (left_out, 3 - left_out), "{truncation}");
            let batch = data.train.batch(0..data.train.len()).unwrap();
            assert!(batch.images.iter().all(|image| image.rows() == image.pixels.patches.len()));
            assert!(batch.cu_seqlens.windows(2).all(|ends| ends[1] - ends[0] <= 16));
        }
        let error = load(dir.path(), r#"{"image": "broken", "caption": "x"}"#, "", |_| ()).unwrap_err();
        assert_eq!(error.kind(), Kind::Data);
        assert!(error.message().contains("rows.jsonl:1") && error.message().contains("broken"), "{error}");
    }
}
