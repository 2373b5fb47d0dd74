//! The steps around the model of a byte-level tokenizer: how the pre-tokenizer cuts a text into words, and which ids
//! the post-processor adds.
use std::ops::Range;

use regex_automata::meta::{BuildError, Cache, Config, Regex};
use regex_automata::{Anchored, Input};
use serde_json::Value;

/// The regular expression by which GPT-2's pre-tokenizer finds words.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// The end of the pattern of most tokenizers. The look-ahead means: white space except its last character, which
/// belongs to the next word. The regex engine here has no look-ahead, so [`next_match`] does this.
const ENDING: &str = r"|\s+(?!\S)|\s+";
/// The most memory for a compiled pattern, and for its searches in each thread, in bytes.
const PATTERN_SIZE: usize = 16 << 20;
const SEARCH_SIZE: usize = 8 << 20;

/// A step of the pre-tokenizer: it cuts each part of a text into smaller parts.
#[derive(Debug)]
pub(super) enum Split {
    /// Around each number character.
    Digits,
    /// Around each run of number characters.
    Numbers,
    /// Around each match of a pattern. If there is a second pattern, it is [`ENDING`].
    Pattern(Regex),
}

/// The search state of a thread for the pattern of each step; `None` for a step without a pattern.
#[derive(Debug)]
pub(super) struct Searches(Vec<Option<Cache>>);

impl Searches {
    pub(super) fn of(splits: &[Split]) -> Self {
        let cache = |split: &Split| match split {
            Split::Pattern(regex) => Some(regex.create_cache()),
            _ => None,
        };
        Self(splits.iter().map(cache).collect())
    }
}

/// The steps of a pre-tokenizer that ends with `ByteLevel`. `None` if this module does not know one of them.
pub(super) fn splits(pre_tokenizer: &Value) -> Option<Vec<Split>> {
    let mut steps = Vec::new();
    flatten(pre_tokenizer, "pretokenizers", &mut steps);
    let (last, steps) = steps.split_last()?;
    if last["type"] != "ByteLevel" || last["add_prefix_space"] != false {
        return None;
    }
    let mut splits = steps.iter().map(|step| split(step)).collect::<Option<Vec<_>>>()?;
    if last.get("use_regex").is_none_or(|uses| uses != false) {
        splits.push(Split::Pattern(pattern(GPT2)?));
    }
    Some(splits)
}

/// Appends the steps in `part`, which is one step or a list of steps under `key`.
fn flatten<'a>(part: &'a Value, key: &str, steps: &mut Vec<&'a Value>) {
    match part.get(key).and_then(Value::as_array) {
        Some(parts) => parts.iter().for_each(|part| flatten(part, key, steps)),
        None if part.is_null() => {}
        None => steps.push(part),
    }
}

fn split(step: &Value) -> Option<Split> {
    match step["type"].as_str()? {
        "Digits" if step["individual_digits"] == true => Some(Split::Digits),
        "Digits" => Some(Split::Numbers),
        "Split" if step["behavior"] == "Isolated" && step["invert"] == false => {
            match step["pattern"].as_object()?.iter().next()? {
                (kind, Value::String(text)) if kind == "Regex" => Some(Split::Pattern(pattern(text)?)),
                (kind, Value::String(text)) if kind == "String" => {
                    Some(Split::Pattern(compile(&[&regex::escape(text)]).ok()?))
                }
                _ => None,
            }
        }
        _ => None,
    }
}

/// Compiles a pattern of the `tokenizers` crate. `None` if it could match differently here.
fn pattern(text: &str) -> Option<Regex> {
    if is_possessive(text) {
        return None;
    }
    // Any other look-around fails to compile.
    match text.strip_suffix(ENDING) {
        Some(others) => compile(&[others, r"\s+"]).ok(),
        None => compile(&[text]).ok(),
    }
}

/// Whether `text` has a possessive repetition, such as `a++`. The regex engine here would read it as a repetition of a
/// repetition.
fn is_possessive(text: &str) -> bool {
    let mut letters = text.chars().peekable();
    let (mut in_class, mut repeats) = (false, false);
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => {
                // The braces of `\p{L}` are not those of a repetition.
                if letters.next().is_some_and(|kind| matches!(kind, 'p' | 'P')) && letters.peek() == Some(&'{') {
                    letters.find(|letter| *letter == '}');
                }
                repeats = false;
            }
            '[' if !in_class => (in_class, repeats) = (true, false),
            ']' if in_class => in_class = false,
            _ if in_class => {}
            '+' if repeats => return true,
            '{' => repeats = letters.find(|letter| *letter == '}').is_some(),
            _ => repeats = matches!(letter, '?' | '*' | '+'),
        }
    }
    false
}

fn compile(patterns: &[&str]) -> Result<Regex, Box<BuildError>> {
    let config = Config::new().nfa_size_limit(Some(PATTERN_SIZE)).hybrid_cache_capacity(SEARCH_SIZE);
    Regex::builder().configure(config).build_many(patterns).map_err(Box::new)
}

/// Passes each word of `text[range]` to `then`, in order. Stops with `None` if `then` returns `None`, or if a pattern
/// matches nothing.
pub(super) fn each_word(
    splits: &[Split],
    searches: &mut Searches,
    text: &str,
    range: Range<usize>,
    then: &mut dyn FnMut(Range<usize>) -> Option<()>,
) -> Option<()> {
    each(splits, &mut searches.0, text, range, then)
}

fn each(
    splits: &[Split],
    searches: &mut [Option<Cache>],
    text: &str,
    range: Range<usize>,
    then: &mut dyn FnMut(Range<usize>) -> Option<()>,
) -> Option<()> {
    let (Some((split, splits)), Some((search, searches))) = (splits.split_first(), searches.split_first_mut()) else {
        return if range.is_empty() { Some(()) } else { then(range) };
    };
    let begin = range.start;
    let part = &text[range];
    let mut inner = |start: usize, end: usize| each(splits, searches, text, begin + start..begin + end, then);
    let mut done = 0;
    match (split, search) {
        (Split::Pattern(regex), Some(search)) => {
            while done < part.len() {
                let (start, end) = next_match(regex, search, part, done)?;
                if done < start {
                    inner(done, start)?;
                }
                inner(start, end)?;
                done = end;
            }
        }
        (Split::Digits, _) => {
            for (start, digit) in part.char_indices().filter(|(_, letter)| letter.is_numeric()) {
                if done < start {
                    inner(done, start)?;
                }
                done = start + digit.len_utf8();
                inner(start, done)?;
            }
        }
        _ => {
            let mut numeric = part.chars().next().is_some_and(char::is_numeric);
            for (start, letter) in part.char_indices() {
                if letter.is_numeric() != numeric {
                    inner(done, start)?;
                    (done, numeric) = (start, !numeric);
                }
            }
        }
    }
    if done < part.len() { inner(done, part.len()) } else { Some(()) }
}

/// The next match of `regex` in `part` from byte `from` on; an empty range at the end of `part` if there is none.
/// `None` if the match is empty.
fn next_match(regex: &Regex, search: &mut Cache, part: &str, from: usize) -> Option<(usize, usize)> {
    let none = Some((part.len(), part.len()));
    // Nearly every match begins where the previous one ends, so an anchored search, which is faster, comes first.
    let input = Input::new(part).range(from..);
    let (start, end, ending) = match regex.search_half_with(search, &input.clone().anchored(Anchored::Yes)) {
        Some(found) => (from, found.offset(), found.pattern().as_usize() == 1),
        None => match regex.search_with(search, &input) {
            Some(found) => (found.start(), found.end(), found.pattern().as_usize() == 1),
            None => return none,
        },
    };
    if start == end {
        return None;
    }
    if ending && end < part.len() {
        // White space before a word: the last character belongs to the word, unless it is the only one.
        let last = part[start..end].chars().next_back().map_or(0, char::len_utf8);
        if start < end - last {
            return Some((start, end - last));
        }
    }
    Some((start, end))
}

/// The ids that a post-processor adds before and after a text. `None` if the post-processor does anything else too.
pub(super) fn around(post_processor: &Value) -> Option<[Vec<u32>; 2]> {
    let mut steps = Vec::new();
    flatten(post_processor, "processors", &mut steps);
    let mut around = None;
    for step in steps {
        match step["type"].as_str()? {
            "ByteLevel" if step["trim_offsets"] == false => {}
            "TemplateProcessing" if around.is_none() => around = Some(template(step)?),
            _ => return None,
        }
    }
    Some(around.unwrap_or_default())
}

/// The ids before and after the text in a `TemplateProcessing` step, from its template for a single text.
fn template(step: &Value) -> Option<[Vec<u32>; 2]> {
    let mut around: [Vec<u32>; 2] = Default::default();
    let mut place = 0;
    for piece in step["single"].as_array()? {
        if let Some(special) = piece.get("SpecialToken") {
            let ids = step["special_tokens"][special["id"].as_str()?]["ids"].as_array()?;
            for id in ids {
                around[place].push(u32::try_from(id.as_u64()?).ok()?);
            }
        } else if piece["Sequence"]["id"] == "A" && place == 0 {
            place = 1;
        } else {
            return None;
        }
    }
    (place == 1).then_some(around)
}
