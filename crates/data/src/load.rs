//! Loads the data of a configuration: reads and tokenizes the rows or takes them from the cache, removes duplicates,
//! splits and mixes them, and counts rows for the report.
use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::dataset::{Dataset, ValidationCache, data_seed};
use super::encode::{EncodeOptions, Encoder, Outcome};
use super::fetch_pass::{self, WebCounts};
use super::file_states::FileStates;
use super::inputs::{Input, Inputs};
use super::parsed_row::Parsed;
use super::pictures::Pictures;
use super::progress::Progress;
use super::report::{Counts, Report, Share};
use super::row::{Form, Row};
use super::row_pass::{Walker, threads};
use super::source::{self, RawRow};
use super::split::Split;
use super::template::ChatTemplate;
use super::template_coverage::unknown_end;
use super::tokenizer::Tokenizer;
use super::tokens::{self, TokenSet, TokenWriter};
use super::{contamination, dedupe, labels, mix, picture_rows};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;
use tunesmith_config::arch::{Arch, TextIds};
use tunesmith_config::{BadImages, Config, Contamination, Dedupe, Task, Truncation};

/// Reads and tokenizes all data of a configuration for the model in `model_dir`. `text_ids` says which token ids a text
/// may have; a row with any other id is an error. `pictures` reads the pictures of rows; `None` for a model without
/// vision. The warnings of the report also go to `progress`.
///
/// # Errors
/// [`tunesmith_base::Kind::Data`], with file and line: a row cannot be used; the errors of the tokenizer and the
/// template.
pub fn load(
    config: &Config,
    model_dir: &Path,
    text_ids: TextIds,
    progress: &dyn Progress,
    pictures: Option<&Arc<dyn Pictures>>,
) -> Result<Dataset> {
    let data = &config.data;
    let inputs = Inputs::of(config)?;
    let tokenizer = Tokenizer::load_with(model_dir, &config.tuning.new_tokens)?;
    let template = ChatTemplate::of(model_dir, &tokenizer, data)?;
    let options = EncodeOptions {
        max_seq_len: config.model.max_seq_len,
        truncation: data.truncation,
        loss_on: data.loss_on,
        text_ids,
        min_length: data.min_length,
        max_length: data.max_length,
        max_turn_growth: data.max_turn_growth,
        split_special_tokens: data.split_special_tokens,
        skips_bad_images: data.bad_images == BadImages::Skip,
        task: config.task(),
        padding: if config.task() == Task::CausalLm { None } else { Arch::from_dir(model_dir)?.padding() },
    };
    let names = match config.task() {
        Task::Classification if data.labels.0.is_empty() => labels::find(config, progress)?,
        Task::Classification => data.labels.0.clone(),
        Task::CausalLm | Task::Regression => Vec::new(),
    };
    let numbers = names.iter().cloned().zip(0..).collect();
    let threads = threads(config)?;
    let loader = Loader {
        encoder: Encoder { tokenizer, template, options, labels: numbers, pictures: pictures.cloned() },
        config,
        walker: Walker { threads: &threads, progress, max_rows: data.max_rows },
        cache_dir: data.cache_dir.clone().or_else(tunesmith_base::files::user_cache),
        missed: Cell::new(false),
        warnings: RefCell::default(),
    };
    let mut report = Report::default();
    let (mut pool, source_counts) = loader.load_train(&inputs.train)?;
    for counts in &source_counts {
        report.train.merge(counts);
    }
    let optional = |set: &str, input: Option<&Input>| -> Result<(Option<Split>, Option<Counts>)> {
        let Some(input) = input else { return Ok((None, None)) };
        let (tokens, counts) = loader.load_input(set, input)?;
        loader.refuse_unusable(set, std::slice::from_ref(input), &counts)?;
        Ok((Some(Split::of(vec![Arc::new(tokens)])), Some(counts)))
    };
    let (mut validation, validation_counts) = optional("validation", inputs.validation.as_ref())?;
    let (mut test, test_counts) = optional("test", inputs.test.as_ref())?;
    loader.refuse_unusable("train", &inputs.train, &report.train)?;

    match data.dedupe {
        Dedupe::None => {}
        Dedupe::Exact => dedupe::exact(&loader.walker, &inputs.train, &mut pool, &mut report.train)?,
        Dedupe::Minhash => {
            dedupe::exact(&loader.walker, &inputs.train, &mut pool, &mut report.train)?;
            let threshold = data.dedupe_threshold;
            dedupe::near(&loader.walker, &inputs.train, threshold, &mut pool, &mut report.train)?;
        }
    }
    // Reading the configuration refuses both `data.split` and `data.val_path`.
    if data.split > 0.0 && validation.is_none() {
        if pool.len() < 2 {
            return Err(Error::data(format!("data.split needs at least 2 usable rows, found {}", pool.len())));
        }
        validation = Some(match config.task() {
            Task::Classification => pool.take_share_of_each(data.split, data_seed(config), names.len())?,
            Task::CausalLm | Task::Regression => pool.take_share(data.split, data_seed(config)),
        });
        if pool.is_empty() {
            return Err(Error::data(format!("data.split={} leaves no row to train on", data.split)));
        }
    }
    let dropped = data.contamination == Contamination::Drop;
    if data.contamination != Contamination::Off {
        let held_out = validation.as_ref().filter(|_| inputs.validation.is_none());
        contamination::check(&loader.walker, &inputs, held_out, &mut pool, dropped, &mut report.train)?;
        if pool.is_empty() {
            return Err(Error::data("every training row is also in the validation or test rows")
                .hint("check data.val_path and test_path, or set data.contamination: warn"));
        }
    }
    if data.truncation == Truncation::Split {
        let most = config.model.max_seq_len;
        report.cut = pool.cut(most);
        for held_out in [&mut validation, &mut test].into_iter().flatten() {
            held_out.cut(most);
        }
    }
    let mut train = loader.mix(pool, &inputs.train, &mut report)?;
    let classes = match config.task() {
        Task::Classification => labels::classes(&names, &config.train.class_weights, &train, validation.as_ref())?,
        Task::CausalLm | Task::Regression => Vec::new(),
    };
    for split in [Some(&mut train), validation.as_mut(), test.as_mut()].into_iter().flatten() {
        split.class_weights = labels::weights(&classes);
        split.pictures = pictures.cloned();
    }
    if let Some(pictures) = pictures {
        let held_out = [(&validation, &inputs.validation), (&test, &inputs.test)];
        let held_out = held_out.into_iter().filter_map(|(split, input)| Some((split.as_ref()?, input.as_ref()?)));
        let held_out = held_out.flat_map(|(split, input)| split.sets.iter().zip(std::iter::once(input)));
        let shown = train.sets.iter().zip(&inputs.train).chain(held_out);
        pictures.shown_in(picture_rows::places(shown.map(|(set, input)| (Arc::clone(set), input.clone())).collect()));
    }

    let mut hasher = blake3::Hasher::new();
    train.hash_into(&mut hasher);
    if let Some(validation) = &validation {
        validation.hash_into(&mut hasher);
    }
    let fingerprint = hasher.finalize().to_hex().to_string();
    let tokenizer_fingerprint = loader.encoder_hash().to_hex().to_string();
    report.from_cache = !loader.missed.get();
    report.templated = forms(&inputs.train).iter().any(|form| !form.is_plain());
    report.warnings = loader.warnings.take();
    let Encoder { tokenizer, template, .. } = &loader.encoder;
    let learned = template.as_ref().filter(|_| report.templated && config.task() == Task::CausalLm);
    report.warnings.extend(learned.and_then(|it| unknown_end(it, tokenizer, &config.generation.stop_strings)));
    report.warnings.extend(labels::warnings(&classes));
    let sets =
        [("train", Some(&report.train)), ("validation", validation_counts.as_ref()), ("test", test_counts.as_ref())];
    for (set, counts) in sets {
        report
            .warnings
            .extend(counts.iter().flat_map(|counts| counts.warnings(set, config.model.max_seq_len, dropped)));
    }
    (report.validation, report.test) = (validation_counts, test_counts);
    let Encoder { tokenizer, template, .. } = loader.encoder;
    if let Some(template) =
        template.as_ref().filter(|template| report.templated && template.is_dated() && data.template_date.is_none())
    {
        report.warnings.push(format!(
            "the chat template ({}) writes today's date: set data.template_date for a run that can be repeated on another day",
            template.origin()
        ));
    }
    report.warnings.iter().for_each(|warning| progress.warn(warning));
    Ok(Dataset {
        train,
        validation,
        test,
        tokenizer,
        template,
        report,
        fingerprint,
        tokenizer_fingerprint,
        inputs,
        classes,
        validation_cache: ValidationCache::default(),
    })
}

/// The row forms of each file, judged by its first rows.
fn forms(inputs: &[Input]) -> Vec<Form> {
    let of = |input: &Input| -> Vec<Form> {
        input.paths.iter().flat_map(|path| source::forms(path, input.format)).collect()
    };
    inputs.iter().flat_map(of).collect()
}

struct Loader<'a> {
    encoder: Encoder,
    config: &'a Config,
    walker: Walker<'a>,
    /// The folder of the token cache. Without a cache, temporary token files are there.
    cache_dir: Option<PathBuf>,
    /// Whether any input was not in the cache.
    missed: Cell<bool>,
    warnings: RefCell<Vec<String>>,
}

impl Loader<'_> {
    /// All training rows, with one token set per source.
    fn load_train(&self, inputs: &[Input]) -> Result<(Split, Vec<Counts>)> {
        let (mut sets, mut counts) = (Vec::new(), Vec::new());
        for input in inputs {
            let (set, of_set) = self.load_input("train", input)?;
            sets.push(Arc::new(set));
            counts.push(of_set);
        }
        Ok((Split::of(sets), counts))
    }

    fn load_input(&self, set: &str, input: &Input) -> Result<(TokenSet, Counts)> {
        let key = self.key(input).map_err(|error| error.context(&input.setting))?;
        let kept =
            self.config.data.use_cache.then(|| self.cache_dir.as_ref().map(|dir| tokens::path(dir, &key))).flatten();
        let found = kept.as_ref().and_then(|path| TokenSet::open(path, &key));
        if let Some(found) = found.filter(|(set, counts)| self.has_pictures_of(set, counts)) {
            let (set, counts) = found;
            return Ok((set, Counts { web: counts.web.of_cache(), ..counts }));
        }
        self.missed.set(true);
        let skips = self.encoder.options.skips_bad_images;
        let web = match &self.encoder.pictures {
            Some(pictures) if self.config.data.allow_image_urls => {
                fetch_pass::fetch(&self.walker, set, input, &**pictures, skips)?
            }
            _ => WebCounts::default(),
        };
        // Images that another attempt may fetch: without a cache entry, the next run tries again.
        let kept = kept.filter(|_| web.passing == 0);
        self.encode(set, input, self.writer(kept.as_deref(), &key)?, web)
    }

    /// Whether the files of a cached set's pictures are there, as they were when it was made.
    fn has_pictures_of(&self, set: &TokenSet, counts: &Counts) -> bool {
        let Some(pictures) = &self.encoder.pictures else { return true };
        let mut states = FileStates::default();
        set.all_pictures().iter().for_each(|(_, examples)| states.add(&**pictures, examples));
        counts.image_files == states.finish(false) && !self.lacks_pictures(set)
    }

    /// Whether the file of a picture that was taken from a row has been removed.
    fn lacks_pictures(&self, set: &TokenSet) -> bool {
        let Some(pictures) = &self.encoder.pictures else { return false };
        let mut shown = set.all_pictures().iter().flat_map(|(_, examples)| examples.iter().flatten());
        shown.any(|shown| pictures.is_lost(shown.name()))
    }

    /// Opens the file for tokenized rows: in the cache, else a temporary file in the cache folder or the system's
    /// temporary folder.
    fn writer(&self, kept: Option<&Path>, key: &blake3::Hash) -> Result<TokenWriter> {
        if let Some(path) = kept {
            match TokenWriter::cached(path, key) {
                Ok(writer) => return Ok(writer),
                Err(error) => self
                    .warnings
                    .borrow_mut()
                    .push(format!("cannot keep tokenized data in {}: {error}", path.display())),
            }
        }
        if let Some(writer) = self.cache_dir.iter().find_map(|dir| TokenWriter::temporary(dir).ok()) {
            return Ok(writer);
        }
        let dir = std::env::temp_dir();
        TokenWriter::temporary(&dir)
            .map_err(|error| Error::io("write tokenized data to", &dir, &error).hint("set data.cache_dir"))
    }

    /// Returns an error that says why, if no row of a set can be used.
    fn refuse_unusable(&self, set: &str, inputs: &[Input], counts: &Counts) -> Result<()> {
        if counts.kept > counts.weightless {
            return Ok(());
        }
        let names: Vec<String> =
            inputs.iter().flat_map(|input| &input.paths).map(|path| path.display().to_string()).collect();
        let names = names.join(", ");
        if counts.rows == 0 {
            return Err(Error::data(format!("{names}: found no rows in the {set} data")));
        }
        if counts.kept > 0 {
            return Err(Error::data(format!(
                "{names}: each of the {} has \"loss_weight\": 0",
                count(counts.kept, &format!("{set} row"))
            ))
            .hint("nothing would be learned: take the field out of some rows"));
        }
        let limit = self.config.model.max_seq_len;
        let all = format!("{names}: no row can be used, of {}", count(counts.rows, &format!("{set} row")));
        let filtered = counts.below_min_length + counts.above_max_length;
        if filtered > 0 {
            return Err(Error::data(format!(
                "{all}: {} below data.min_length, {} above data.max_length, {} too long or without labels",
                counts.below_min_length,
                counts.above_max_length,
                counts.too_long + counts.unlabeled,
            ))
            .hint("lengths are counted in tokens"));
        }
        if counts.too_long + counts.unlabeled_by_truncation > 0 {
            let policy: Truncation = self.config.data.truncation;
            return Err(Error::data(format!(
                "{all}: {} longer than model.max_seq_len={limit} and lost to data.truncation={policy}, {} without labels",
                counts.too_long + counts.unlabeled_by_truncation,
                counts.unlabeled - counts.unlabeled_by_truncation,
            ))
            .hint("raise model.max_seq_len"));
        }
        if counts.bad_images.rows > 0 {
            let why = counts.web.failures.first().map_or_else(String::new, |first| format!(" ({first})"));
            return Err(Error::data(format!(
                "{all}: {} with an image that cannot be read{why}, {} without labels",
                counts.bad_images.rows, counts.unlabeled,
            ))
            .hint("data.bad_images: refuse names the first such image"));
        }
        let forms = forms(inputs);
        let hint = match &self.encoder.template {
            Some(template) if !forms.iter().all(|form| form.is_plain()) => {
                format!(
                    "are there turns of the role \"assistant\", and does the chat template ({}) write them? \
                     data.loss_on: all trains on every message",
                    template.origin()
                )
            }
            _ if forms.contains(&Form::Tokenized) => "is every label -100? The first of a row never counts".into(),
            _ => "are the texts empty?".into(),
        };
        Err(Error::data(format!("{all}: no token carries a loss")).hint(hint))
    }

    /// Reads and tokenizes the rows of an input, with their labels.
    fn encode(&self, set: &str, input: &Input, mut writer: TokenWriter, web: WebCounts) -> Result<(TokenSet, Counts)> {
        let mut counts = Counts { web, ..Counts::default() };
        let mut states = FileStates::default();
        let encoder = &self.encoder;
        let encode = |row: RawRow, forms: &[Form]| {
            let place = row.place.clone();
            let Parsed { row, weight, mut unread, link } = row.parse_noting(forms)?;
            // If the model reads images, a web address beside the text may have been meant as an image.
            unread.extend(link.filter(|_| encoder.pictures.is_some()));
            let captions = matches!(row, Row::Caption { .. });
            let (outcome, mut notes) = encoder.encode(row).map_err(|error| error.context(&place))?;
            notes.unwritten.extend(unread);
            Ok((place, outcome, weight, notes, captions))
        };
        self.walker.walk(&format!("tokenizing {set}"), input, &encode, &mut |(
            place,
            outcome,
            weight,
            notes,
            captions,
        )| {
            counts.rows += 1;
            counts.add_notes(notes, &place);
            let mut kept = None;
            match outcome {
                Outcome::Kept { examples, pictures, references, truncated, limited } => {
                    if examples.len() > 1 {
                        let lengths = examples.iter().map(|example| example.input_ids.len());
                        counts.turns.add_row(lengths, captions);
                    }
                    if let Some(files) = &encoder.pictures {
                        states.add(&**files, &pictures);
                    }
                    writer.show(pictures);
                    writer.compare_with(&references);
                    counts.kept += 1;
                    counts.truncated += u64::from(truncated);
                    counts.weightless += u64::from(weight == 0.0);
                    if limited {
                        counts.turns.limited.add(place);
                    }
                    kept = Some((examples, weight));
                }
                Outcome::TooLong => counts.too_long += 1,
                Outcome::BadImage => counts.bad_images.add(place),
                Outcome::BelowMinimum => counts.below_min_length += 1,
                Outcome::AboveMaximum => counts.above_max_length += 1,
                Outcome::Unlabeled { truncated } => counts.add_unlabeled(place, truncated),
            }
            writer.push(kept.as_ref().map(|(examples, weight)| (examples.as_slice(), *weight)))
        })?;
        counts.image_files = states.finish(counts.bad_images.rows > 0);
        Ok((writer.finish(&counts)?, counts))
    }

    /// Mixes the rows of the sources by weight. Without any weight, all rows stay.
    fn mix(&self, pool: Split, inputs: &[Input], report: &mut Report) -> Result<Split> {
        if inputs.len() < 2 {
            return Ok(pool);
        }
        let weighted = inputs.iter().any(|input| input.weight.is_some());
        // The rows of each source are contiguous, in the order of the sources.
        let starts: Vec<usize> =
            (0..=inputs.len()).map(|set| pool.rows.partition_point(|id| (id.set as usize) < set)).collect();
        let sizes: Vec<usize> = starts.windows(2).map(|ends| ends[1] - ends[0]).collect();
        let weights: Vec<f64> = inputs.iter().map(|input| input.weight.unwrap_or(1.0)).collect();
        let strategy = self.config.data.mix_strategy;
        let counts = if weighted { mix::counts(&sizes, &weights, strategy)? } else { sizes.clone() };
        let share = |(number, input): (usize, &Input)| Share {
            source: input.name.clone(),
            weight: weighted.then_some(weights[number]),
            available: sizes[number] as u64,
            used: counts[number] as u64,
        };
        report.mix = inputs.iter().enumerate().map(share).collect();
        if !weighted {
            return Ok(pool);
        }
        let order = mix::order(&sizes, &counts, data_seed(self.config));
        let rows = order.into_iter().map(|(source, row)| pool.rows[starts[source] + row]).collect();
        Ok(Split { rows, ..pool })
    }

    /// Hashes the tokenizer and the template, on which tokens depend besides the options.
    fn encoder_hash(&self) -> blake3::Hash {
        let Encoder { tokenizer, template, .. } = &self.encoder;
        let mut hasher = blake3::Hasher::new();
        hasher.update(tokenizer.hash().as_bytes());
        hasher.update(&serde_json::to_vec(&(tokenizer.special_tokens(), tokenizer.eos_id())).unwrap_or_default());
        if let Some(template) = template {
            hasher.update(template.source().as_bytes());
            hasher.update(template.date().as_bytes());
            hasher.update(self.config.data.chat_template_kwargs.to_string().as_bytes());
        }
        hasher.finalize()
    }

    /// The key of an input in the token cache: a hash of all that its tokens depend on.
    fn key(&self, input: &Input) -> Result<blake3::Hash> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(concat!(env!("CARGO_PKG_VERSION"), " rows 6").as_bytes());
        hasher.update(self.encoder_hash().as_bytes());
        let options = format!("{:?} {:?} {:?}", self.encoder.options, input.format, self.config.data.max_rows);
        hasher.update(options.as_bytes());
        hasher.update(format!("{:?}", self.encoder.labels).as_bytes());
        if let Some(pictures) = &self.encoder.pictures {
            hasher.update(pictures.key().as_bytes());
        }
        source::hash_files(&input.paths, &mut hasher)?;
        Ok(hasher.finalize())
    }
}
