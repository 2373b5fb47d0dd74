//! Generates answers token by token, with key/value caches. Texts of any length run in one batch, and a waiting text takes the
//! place of a finished one. An answer has the same bits whatever else is in the batch. So if the memory budget is too small, half of
//! the texts wait, and their prompts are computed again later.
use super::beam::{Rules, Search};
use super::prompt_lookup::PromptLookup;
use super::sample::{distribution, draw, has_largest, not_finite};
use super::settings::{Settings, Strategy};
use super::watcher::{Answer, End, Go, Watcher};
use std::collections::VecDeque;
use tunesmith_base::error::{Kind, Result};
use tunesmith_data::batch::ImageRows;
use tunesmith_model::{Drafted, Logits, Model, TextCache};

/// Maximum tokens, over all texts, of a pass that checks guesses, unless there are more texts. The matrix products compute
/// panels of this many tokens, which cost little more than one token.
const PANEL: usize = 16;

/// Maximum tokens of one text in a pass that checks guesses. With so few, recurrent layers still go token by token, so the
/// answer keeps its bits.
const SHORT: usize = PANEL - 1;

/// A text that is being answered, with its caches and the tokens to feed next.
struct Work<'a> {
    text: usize,
    prompt: &'a [u32],
    caches: Vec<TextCache>,
    /// The tokens to feed next, for each cache.
    next: Vec<Vec<u32>>,
    tokens: Vec<u32>,
    search: Option<Search>,
    /// The number of guesses at the end of the tokens to feed.
    drafted: usize,
    /// A copy of the cache from before the guesses, if the cache cannot be rewound.
    before: Option<TextCache>,
}

/// Answers each prompt. An empty prompt, or one that fills the context, gets an empty answer. `None` if the watcher ended the
/// generation.
///
/// # Errors
/// [`tunesmith_base::Kind::Data`]: a token outside the vocabulary; [`tunesmith_base::Kind::Memory`]: one text alone does not fit
/// into the memory budget; [`tunesmith_base::Kind::Numeric`]: logits are not finite; errors of the watcher.
pub fn generate(
    model: &Model,
    prompts: &[Vec<u32>],
    settings: &Settings,
    watcher: &mut dyn Watcher,
) -> Result<Option<Vec<Answer>>> {
    generate_from(model, prompts, &[], settings, None, watcher)
}

/// As [`generate`], for prompts with images: `images` has those of each prompt, with their positions in it. The
/// prompt's tokens at these positions do not matter.
///
/// # Errors
/// As [`generate`]; [`tunesmith_base::Kind::Data`]: the model reads no images, or one does not fit its rows.
pub fn generate_with_images(
    model: &Model,
    prompts: &[Vec<u32>],
    images: &[Vec<ImageRows>],
    settings: &Settings,
    watcher: &mut dyn Watcher,
) -> Result<Option<Vec<Answer>>> {
    generate_from(model, prompts, images, settings, None, watcher)
}

/// As [`generate_with_images`]. `memory` is a cache that holds the beginning of the first prompt. At the end it receives the
/// cache of that prompt and its answer.
pub(super) fn generate_from(
    model: &Model,
    prompts: &[Vec<u32>],
    images: &[Vec<ImageRows>],
    settings: &Settings,
    mut memory: Option<&mut TextCache>,
    watcher: &mut dyn Watcher,
) -> Result<Option<Vec<Answer>>> {
    let mut answers: Vec<Option<Answer>> = vec![None; prompts.len()];
    let mut waiting = 0;
    let mut open: Vec<Work<'_>> = Vec::new();
    // Texts that wait because memory ran short.
    let mut parked: VecDeque<Work<'_>> = VecDeque::new();
    let (mut most, mut failed_alone) = (settings.texts_at_once(model.device()), false);
    let width = if let Strategy::Beams(beams) = settings.strategy { beams.count } else { 1 };
    while waiting < prompts.len() || !open.is_empty() || !parked.is_empty() {
        // Starts waiting texts while there is room; their prompts share one forward pass.
        let mut tokens = 0;
        let mut fresh: Vec<Work<'_>> = Vec::new();
        while let Some(length) = parked.front().map(Work::unread).or_else(|| prompts.get(waiting).map(Vec::len)) {
            let room = open.is_empty() && fresh.is_empty() || (open.len() + fresh.len() + 1) * width <= most;
            if !room || (!fresh.is_empty() && tokens + length > settings.pass_tokens) {
                break;
            }
            if let Some(work) = parked.pop_front() {
                tokens += length;
                fresh.push(work);
                continue;
            }
            let prompt = &prompts[waiting];
            // An empty prompt has no logits to continue from.
            let end = if prompt.is_empty() { Some(End::Stop) } else { full(prompt, &[], settings) };
            if let Some(end) = end {
                let answer = Answer { tokens: Vec::new(), end };
                watcher.answer(waiting, &answer)?;
                answers[waiting] = Some(answer);
            } else {
                tokens += length;
                let read = memory.as_deref().filter(|_| waiting == 0).cloned();
                let read = match (read, images.get(waiting)) {
                    (Some(read), _) => read,
                    (None, Some(images)) if !images.is_empty() => model.cache_with_images(images)?,
                    (None, _) => model.cache(),
                };
                fresh.push(Work::new(waiting, prompt, read, settings));
            }
            waiting += 1;
        }
        let works = open.len() + fresh.len();
        for group in [&mut fresh, &mut open] {
            if group.is_empty() {
                continue;
            }
            if let Some(lookup) = settings.lookup {
                let most = (PANEL / works).saturating_sub(1);
                for work in group.iter_mut() {
                    work.draft(model, lookup, most, settings);
                }
            }
            let mut texts: Vec<Drafted<'_>> = group
                .iter_mut()
                .flat_map(|work| {
                    let drafted = work.drafted;
                    let texts = work.caches.iter_mut().zip(&work.next);
                    texts.map(move |(cache, tokens)| Drafted { cache, tokens, drafted })
                })
                .collect();
            let logits = match model.extend_drafted(&mut texts) {
                Err(error) if error.kind() == Kind::Memory => {
                    // Releasing idle activations may make room for one text.
                    model.release();
                    if works < 2 && std::mem::replace(&mut failed_alone, true) {
                        let tokens = group[0].prompt.len() + group[0].tokens.len();
                        return Err(error
                            .context(format!("while answering a text of {tokens} tokens"))
                            .hint("reduce gen.max_new_tokens or gen.num_beams, or raise train.memory_budget"));
                    }
                    most = (works / 2 * width).max(width);
                    group.iter_mut().for_each(Work::give_up);
                    parked.extend(group.drain(..));
                    continue;
                }
                logits => logits?,
            };
            failed_alone = false;
            let mut chooser = Chooser { settings, best: Vec::new(), logits: &logits };
            let mut row = 0;
            let mut still = Vec::with_capacity(group.len());
            for mut work in group.drain(..) {
                let first = row;
                row += work.caches.len() + work.drafted;
                match work.take(&mut chooser, first, watcher)? {
                    Taken::Goes => still.push(work),
                    Taken::Ends(end) => {
                        if let (0, Some(memory), Some(cache)) = (work.text, &mut memory, work.caches.pop()) {
                            **memory = cache;
                        }
                        let answer = Answer { tokens: work.tokens, end };
                        watcher.answer(work.text, &answer)?;
                        answers[work.text] = Some(answer);
                    }
                    Taken::EndsAll => return Ok(None),
                }
            }
            *group = still;
        }
        open.append(&mut fresh);
    }
    Ok(Some(answers.into_iter().flatten().collect()))
}

/// Why a text must end if it has no room for another token; `None` if it has room.
fn full(prompt: &[u32], tokens: &[u32], settings: &Settings) -> Option<End> {
    if tokens.len() >= settings.max_new_tokens {
        Some(End::Length)
    } else {
        (prompt.len() + tokens.len() >= settings.context).then_some(End::Context)
    }
}

/// Whether a text continues after a pass, ends, or ends the whole generation.
enum Taken {
    Goes,
    Ends(End),
    EndsAll,
}

/// Chooses tokens greedily or by sampling from the logits of one pass.
struct Chooser<'a> {
    settings: &'a Settings,
    logits: &'a Logits,
    /// Each row's most probable token; computed on first use.
    best: Vec<Option<u32>>,
}

impl Chooser<'_> {
    /// The next token of the answer `tokens` to text number `text`, from the logits in row `row`.
    ///
    /// # Errors
    /// [`Kind::Numeric`]: the logits are not finite.
    fn choose(&mut self, row: usize, text: usize, prompt: &[u32], tokens: &[u32]) -> Result<u32> {
        let settings = self.settings;
        let processors = settings.processors();
        if settings.strategy == Strategy::Greedy && !processors.change(tokens.len()) {
            if self.best.is_empty() {
                self.best = self.logits.best();
            }
            return self.best[row].ok_or_else(|| not_finite(&self.logits.row(row), tokens.len()));
        }
        let mut scores = self.logits.row(row);
        processors.apply(&mut scores, prompt, tokens);
        let chosen = match &settings.strategy {
            Strategy::Sample(how) => distribution(&scores, how)
                .map(|kept| draw(&kept, how, settings.first_text + text as u64, tokens.len() as u64)),
            Strategy::Greedy | Strategy::Beams(_) => has_largest(&scores).then(|| most_probable(&scores)),
        };
        chosen.ok_or_else(|| not_finite(&self.logits.row(row), tokens.len()))
    }
}

/// The index of the largest value; the first one if several are equal.
pub(super) fn most_probable(row: &[f32]) -> u32 {
    let mut best = 0;
    for (index, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = index;
        }
    }
    best as u32
}

impl<'a> Work<'a> {
    fn new(text: usize, prompt: &'a [u32], mut read: TextCache, settings: &Settings) -> Self {
        read.expect_prompt(prompt.len());
        let search = match settings.strategy {
            Strategy::Beams(beams) => Some(Search::new(beams)),
            Strategy::Greedy | Strategy::Sample(_) => None,
        };
        let (next, caches) = (vec![prompt[read.tokens().len()..].to_vec()], vec![read]);
        Self { text, prompt, caches, next, tokens: Vec::new(), search, drafted: 0, before: None }
    }

    /// How many tokens are to be fed next.
    fn unread(&self) -> usize {
        self.next.iter().map(Vec::len).sum()
    }

    /// Drops the caches to free memory. All tokens of the text must then be fed again.
    fn give_up(&mut self) {
        self.next = self.caches.iter_mut().map(TextCache::give_up).collect();
        // Guesses were fed last.
        self.next.iter_mut().for_each(|tokens| tokens.truncate(tokens.len() - self.drafted));
        (self.drafted, self.before) = (0, None);
    }

    /// Appends up to `most` guessed tokens to those to feed next. Leaves room for one more token in the answer, because the
    /// pass itself yields one.
    fn draft(&mut self, model: &Model, lookup: PromptLookup, most: usize, settings: &Settings) {
        // Before the first token it is not known what to look for.
        let ([cache], [next], false) = (&self.caches[..], &mut self.next[..], self.tokens.is_empty()) else { return };
        let text = [self.prompt, &self.tokens].concat();
        let room = (settings.max_new_tokens - self.tokens.len()).min(settings.context - text.len());
        let most = most.min(room.saturating_sub(1)).min(SHORT.saturating_sub(next.len()));
        let guess = lookup.guess(&text, most);
        if !guess.is_empty() && model.may_draft(text.len() - 1, guess.len()) {
            self.before = Some(cache.clone());
            next.extend_from_slice(guess);
            self.drafted = guess.len();
        }
    }

    /// Keeps the first `right` guesses and discards the others. Returns the tokens that the cache no longer holds and that must
    /// be fed again before the next one.
    fn settle(&mut self, right: usize) -> Vec<u32> {
        let wrong = std::mem::take(&mut self.drafted) - right;
        let before = self.before.take();
        let ([cache], Some(before)) = (&mut self.caches[..], before) else { return Vec::new() };
        let kept = cache.tokens().len() - wrong;
        let read = cache.tokens()[before.tokens().len()..kept].to_vec();
        if wrong == 0 || cache.truncate(kept) {
            return Vec::new();
        }
        *cache = before;
        read
    }

    /// Chooses the next tokens from the logits of this text, which begin at row `first`: one, and one more for each correct
    /// guess.
    fn take(&mut self, chooser: &mut Chooser<'_>, first: usize, watcher: &mut dyn Watcher) -> Result<Taken> {
        if self.search.is_some() {
            return self.take_beams(chooser, first, watcher);
        }
        let guesses = self.next.first_mut().map(|next| next.split_off(next.len() - self.drafted)).unwrap_or_default();
        for right in 0..=guesses.len() {
            let taken = self.take_one(chooser, first + right, watcher)?;
            if matches!(taken, Taken::Goes) && guesses.get(right) == self.tokens.last() {
                continue;
            }
            let unread = self.settle(right);
            self.next = vec![[&unread, &self.tokens[self.tokens.len().saturating_sub(1)..]].concat()];
            return Ok(taken);
        }
        Ok(Taken::Goes)
    }

    /// Chooses the next token by the logits of that row.
    fn take_one(&mut self, chooser: &mut Chooser<'_>, row: usize, watcher: &mut dyn Watcher) -> Result<Taken> {
        let settings = chooser.settings;
        let token = chooser.choose(row, self.text, self.prompt, &self.tokens)?;
        if settings.stop_ids.contains(&token) {
            return Ok(Taken::Ends(End::Stop));
        }
        self.tokens.push(token);
        match watcher.token(self.text, &self.tokens)? {
            Go::EndAll => return Ok(Taken::EndsAll),
            Go::EndText => return Ok(Taken::Ends(End::Stop)),
            Go::On if watcher.ends(self.text, &self.tokens) => return Ok(Taken::Ends(End::Stop)),
            Go::On => {}
        }
        Ok(full(self.prompt, &self.tokens, settings).map_or(Taken::Goes, Taken::Ends))
    }

    fn take_beams(&mut self, chooser: &Chooser<'_>, first: usize, watcher: &mut dyn Watcher) -> Result<Taken> {
        let settings = chooser.settings;
        let Some(search) = &mut self.search else { return Ok(Taken::Goes) };
        let room = settings.context - self.prompt.len();
        let next = {
            let mut stops = |tokens: &[u32]| {
                tokens.last().is_some_and(|token| settings.stop_ids.contains(token)) || watcher.ends(self.text, tokens)
            };
            let mut rules = Rules {
                stops: &mut stops,
                max_new: settings.max_new_tokens.min(room),
                processors: settings.processors(),
            };
            search.take(self.prompt, &mut rules, chooser.logits, first, &mut self.caches)?
        };
        let go = match &next {
            Some(_) => watcher.token(self.text, search.leading())?,
            None => Go::EndText,
        };
        match (go, next) {
            (Go::EndAll, _) => return Ok(Taken::EndsAll),
            (Go::On, Some(next)) => {
                self.next = next.into_iter().map(|token| vec![token]).collect();
                return Ok(Taken::Goes);
            }
            _ => {}
        }
        self.tokens = search.best().to_vec();
        let stopped = self.tokens.last().is_some_and(|token| settings.stop_ids.contains(token));
        if stopped {
            self.tokens.pop();
        }
        let full = full(self.prompt, &self.tokens, settings).filter(|_| !stopped);
        Ok(Taken::Ends(full.unwrap_or(End::Stop)))
    }
}
