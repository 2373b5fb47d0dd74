//! Finds the files with rows in a data set's repository: by the `configs:` of its card (`README.md`), or else by the
//! names of folders and files, as the `datasets` library does.
use std::collections::BTreeSet;
use std::path::PathBuf;

use super::checkout::Checkout;
use super::models;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::glob;
use tunesmith_base::registry::{COMPRESSED, EXTENSIONS};
use tunesmith_config::{Node, parse_yaml};

const CARD: &str = "README.md";
/// The largest card that is read, in bytes. Real cards are smaller.
const CARD_BYTES: u64 = 8 << 20;
/// Names of files that describe a data set and have no rows.
const NO_ROWS: [&str; 4] = ["dataset_infos.json", "dataset_info.json", "state.json", "config.json"];

/// The words for a split in names of files and folders.
const SPLITS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "val", "dev"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// Downloads the files of one configuration and split.
pub(super) fn fetch(checkout: &Checkout<'_>, config: Option<&str>, split: Option<&str>) -> Result<Vec<PathBuf>> {
    let mut card = None;
    if checkout.has(CARD) && checkout.size(CARD) <= CARD_BYTES {
        checkout.fetch(&[CARD])?;
        let path = checkout.path(CARD);
        let bytes =
            tunesmith_base::files::read(&path, CARD_BYTES).map_err(|source| Error::io("read", &path, &source))?;
        card = Some(String::from_utf8_lossy(&bytes).into_owned());
    }
    let paths: Vec<&str> = checkout.paths().collect();
    let name = &checkout.repo().id;
    let chosen = choose(&paths, card.as_deref(), config, split)
        .map_err(|error| error.context(format!("the data set {name}")))?;
    checkout.fetch(&chosen)?;
    Ok(chosen.into_iter().map(|path| checkout.path(path)).collect())
}

/// Downloads the file `path`, or the files that match it if it is a pattern.
pub(super) fn fetch_matching(checkout: &Checkout<'_>, path: &str) -> Result<Vec<PathBuf>> {
    let paths: Vec<&str> = checkout.paths().collect();
    let found = matching(&paths, path);
    if found.is_empty() {
        let what = if glob::is_pattern(path) { "no file that matches" } else { "no file" };
        return Err(checkout
            .repo()
            .error(format!("{} has {what} {path}", checkout.repo()))
            .hint(format!("it has {}", models::shown(checkout)))
            .with_kind(tunesmith_base::Kind::Data));
    }
    checkout.fetch(&found)?;
    checkout.snapshot();
    Ok(found.into_iter().map(|path| checkout.path(path)).collect())
}

/// The files among `paths` with the rows of `split` (by default `train`) of `config`, given the repository's card.
///
/// # Errors
/// [`tunesmith_base::Kind::Data`]: there is no such configuration or split; the message lists the existing ones;
/// [`tunesmith_base::Kind::Config`]: a split that is not a name.
pub fn choose<'a>(
    paths: &[&'a str],
    card: Option<&str>,
    config: Option<&str>,
    split: Option<&str>,
) -> Result<Vec<&'a str>> {
    let split = split.unwrap_or("train");
    if split.is_empty() || !split.chars().all(|c| c.is_alphanumeric() || "_.-".contains(c)) {
        return Err(Error::config(format!("{split:?} is no name of a split"))
            .hint("slices such as train[:10%] are not read; limit the rows with data.max_rows"));
    }
    let configs = card.map_or_else(|| Ok(Vec::new()), configs)?;
    if configs.is_empty() { by_convention(paths, config, split) } else { declared(paths, &configs, config, split) }
}

/// A configuration that a card declares.
#[derive(Debug, Default)]
struct Declared {
    name: String,
    is_default: bool,
    folder: Option<String>,
    /// The file patterns of each split. Empty if the files in `folder` are found by their names.
    files: Vec<(String, Vec<String>)>,
}

/// The configurations in the card's front matter.
fn configs(card: &str) -> Result<Vec<Declared>> {
    let Some(rest) = card.trim_start_matches('\u{feff}').strip_prefix("---") else { return Ok(Vec::new()) };
    let Some(end) = rest.find("\n---") else { return Ok(Vec::new()) };
    let Some(front) = parse_yaml(&rest[..end]) else {
        // A card without `configs:` may be malformed in any way.
        return if rest[..end].contains("\nconfigs:") {
            Err(Error::data("the front matter of its card (README.md) is not YAML that can be read")
                .hint("name the files themselves: data.train_path: hf://datasets/owner/name/file"))
        } else {
            Ok(Vec::new())
        };
    };
    let Some(Node::List(items)) = get(&front, "configs") else { return Ok(Vec::new()) };
    let text = |node: &Node, key: &str| match get(node, key) {
        Some(Node::Str(text)) => Some(text.clone()),
        _ => None,
    };
    let declare = |item: &Node| Declared {
        name: text(item, "config_name").unwrap_or_else(|| "default".to_owned()),
        is_default: matches!(get(item, "default"), Some(Node::Bool(true))),
        folder: text(item, "data_dir").map(|folder| folder.trim_matches('/').to_owned()),
        files: get(item, "data_files").map(data_files).unwrap_or_default(),
    };
    Ok(items.iter().map(declare).filter(|config| config.folder.is_some() || !config.files.is_empty()).collect())
}

fn get<'a>(node: &'a Node, key: &str) -> Option<&'a Node> {
    let Node::Map(entries) = node else { return None };
    entries.iter().find(|(name, _)| name == key).map(|(_, value)| value)
}

/// `data_files` in each of its forms: a pattern, a list of them, a mapping from splits, a list of `{split, path}`.
fn data_files(node: &Node) -> Vec<(String, Vec<String>)> {
    let patterns = |node: &Node| match node {
        Node::Str(pattern) => vec![pattern.clone()],
        Node::List(items) => items
            .iter()
            .filter_map(|item| if let Node::Str(pattern) = item { Some(pattern.clone()) } else { None })
            .collect(),
        _ => Vec::new(),
    };
    match node {
        Node::Map(entries) => entries.iter().map(|(split, node)| (split.clone(), patterns(node))).collect(),
        Node::List(items) if items.iter().any(|item| matches!(item, Node::Map(_))) => items
            .iter()
            .filter_map(|item| match (get(item, "split"), get(item, "path")) {
                (Some(Node::Str(split)), Some(path)) => Some((split.clone(), patterns(path))),
                (None, Some(path)) => Some(("train".to_owned(), patterns(path))),
                _ => None,
            })
            .collect(),
        other => {
            vec![("train".to_owned(), patterns(other))].into_iter().filter(|(_, found)| !found.is_empty()).collect()
        }
    }
}

fn declared<'a>(paths: &[&'a str], configs: &[Declared], config: Option<&str>, split: &str) -> Result<Vec<&'a str>> {
    let names = || configs.iter().map(|config| config.name.as_str()).collect::<Vec<_>>().join(", ");
    let found = match config {
        Some(wanted) => configs
            .iter()
            .find(|config| config.name == wanted)
            .ok_or_else(|| Error::data(format!("no configuration {wanted}")).hint(format!("there are: {}", names())))?,
        None => configs
            .iter()
            .find(|config| config.is_default)
            .or_else(|| configs.iter().find(|config| config.name == "default"))
            .or_else(|| configs.first().filter(|_| configs.len() == 1))
            .ok_or_else(|| {
                Error::data("several configurations, and none is named")
                    .hint(format!("name one, as config: or --config; there are: {}", names()))
            })?,
    };
    if found.files.is_empty() {
        let folder = found.folder.as_deref().unwrap_or_default();
        let inside: Vec<&str> = paths.iter().copied().filter(|path| is_inside(path, folder)).collect();
        return by_convention(&inside, None, split);
    }
    let Some((_, patterns)) = found.files.iter().find(|(name, _)| name == split) else {
        let splits: Vec<&str> = found.files.iter().map(|(name, _)| name.as_str()).collect();
        return Err(Error::data(format!("no split {split} in the configuration {}", found.name))
            .hint(format!("there are: {}", splits.join(", "))));
    };
    let full = |pattern: &String| match &found.folder {
        Some(folder) if !folder.is_empty() => format!("{folder}/{pattern}"),
        _ => pattern.clone(),
    };
    let chosen: BTreeSet<&str> = patterns.iter().flat_map(|pattern| matching(paths, &full(pattern))).collect();
    let chosen: Vec<&str> = chosen.into_iter().filter(|path| form(path).is_some()).collect();
    if chosen.is_empty() {
        let message =
            format!("its card names {} for the split {split}, and no such file is there", patterns.join(", "));
        return Err(Error::data(message).hint(format!("read from {}", listed(paths))));
    }
    Ok(chosen)
}

fn by_convention<'a>(paths: &[&'a str], config: Option<&str>, split: &str) -> Result<Vec<&'a str>> {
    let rows: Vec<&str> = paths.iter().copied().filter(|path| form(path).is_some()).collect();
    if rows.is_empty() {
        let is_script = paths.iter().any(|path| path.strip_suffix(".py").is_some_and(|stem| !stem.contains('/')));
        let hint = if is_script {
            "its rows come from a script, which is never run; the hub may have them as Parquet: revision refs/convert/parquet"
                .to_owned()
        } else {
            listed(paths)
        };
        let known: Vec<String> = EXTENSIONS.iter().map(|extensions| format!(".{}", extensions[0])).collect();
        return Err(Error::data(format!("no file that rows are read from ({})", known.join(", "))).hint(hint));
    }
    let of_config = match config {
        None => rows,
        Some(config) => {
            let inside = |path: &&str| is_inside(path, config) || is_inside(path, &format!("data/{config}"));
            let inside: Vec<&str> = rows.iter().copied().filter(inside).collect();
            if inside.is_empty() && config != "default" {
                return Err(Error::data(format!("no configuration {config}")).hint(listed(&rows)));
            }
            if inside.is_empty() { rows } else { inside }
        }
    };
    let words = SPLITS.iter().find(|(name, _)| *name == split).map_or(&[] as &[&str], |(_, words)| words);
    let candidates = [std::slice::from_ref(&split), words];
    for words in candidates {
        let named = |path: &&str| words.iter().any(|word| is_called(path, word));
        let found: Vec<&str> = of_config.iter().copied().filter(named).collect();
        if !found.is_empty() {
            return Ok(one_form(found));
        }
    }
    let of_another = |path: &&str| {
        shard_split(path).is_some() || SPLITS.iter().flat_map(|(_, words)| *words).any(|word| is_called(path, word))
    };
    if split == "train" && !of_config.iter().any(of_another) {
        return Ok(one_form(of_config));
    }
    Err(Error::data(format!("no split {split}")).hint(listed(&of_config)))
}

/// The files that a pattern or path selects.
fn matching<'a>(paths: &[&'a str], pattern: &str) -> Vec<&'a str> {
    let plain = pattern.strip_prefix("./").unwrap_or(pattern);
    if let Some(found) = paths.iter().find(|path| **path == plain) {
        return vec![found];
    }
    let pattern = glob::compile(plain).ok();
    // The path of a folder selects all files in it.
    let is_match =
        |path: &&str| pattern.as_ref().is_some_and(|pattern| pattern.is_match(path)) || is_inside(path, plain);
    paths.iter().copied().filter(is_match).collect()
}

fn is_inside(path: &str, folder: &str) -> bool {
    folder.is_empty() || path.strip_prefix(folder.trim_end_matches('/')).is_some_and(|rest| rest.starts_with('/'))
}

/// A file's format as its index in the registry, where a lower one is preferred; `None` if the file has no rows.
fn form(path: &str) -> Option<usize> {
    let name = path.rsplit('/').next().unwrap_or(path);
    let hidden = path.split('/').any(|part| part.starts_with(['.', '_']));
    let lower = name.to_lowercase();
    let (stem, last) = lower.rsplit_once('.')?;
    let extension = if COMPRESSED.contains(&last) { stem.rsplit_once('.')?.1 } else { last };
    let form = EXTENSIONS.iter().position(|extensions| extensions.contains(&extension))?;
    (!hidden && !NO_ROWS.contains(&name)).then_some(form)
}

/// The split of a file in a set of shards: `train_sft` of `train_sft-00000-of-00003.parquet`.
fn shard_split(path: &str) -> Option<&str> {
    let name = path.rsplit('/').next().unwrap_or(path);
    let (front, count) = name.split_once("-of-")?;
    let (split, number) = front.rsplit_once('-')?;
    let is_number = |text: &str| text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let count: String = count.chars().take_while(char::is_ascii_digit).collect();
    (is_number(number) && is_number(&count)).then_some(split)
}

/// Whether `word` names a folder above the file or its set of shards, or is a separate word in the file's name.
fn is_called(path: &str, word: &str) -> bool {
    let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
    if folders.split('/').any(|folder| folder == word) {
        return true;
    }
    if let Some(split) = shard_split(path) {
        return split == word;
    }
    name.match_indices(word).any(|(at, _)| {
        !name[..at].ends_with(char::is_alphabetic) && !name[at + word.len()..].starts_with(char::is_alphabetic)
    })
}

/// Keeps only the preferred format, because repositories often hold the same rows in several.
fn one_form(mut paths: Vec<&str>) -> Vec<&str> {
    let best = paths.iter().filter_map(|path| form(path)).min();
    paths.retain(|path| form(path) == best);
    paths.sort_unstable();
    paths
}

/// The available names, for messages.
fn listed(paths: &[&str]) -> String {
    const SHOWN: usize = 12;
    let shown = paths.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ");
    match paths.len() {
        0 => "it has no files".to_owned(),
        count if count > SHOWN => format!("it has {shown}, … ({count} files)"),
        _ => format!("it has {shown}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen<'a>(paths: &[&'a str], card: Option<&str>, config: Option<&str>, split: Option<&str>) -> Vec<&'a str> {
        choose(paths, card, config, split).unwrap()
    }

    #[test]
    fn a_split_is_found_by_the_names_of_files_and_folders() {
        let sharded = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-0.parquet"];
        assert_eq!(chosen(&sharded, None, None, None), sharded[..2]);
        assert_eq!(chosen(&sharded, None, None, Some("test")), sharded[2..]);
        assert_eq!(chosen(&["README.md", "train.jsonl", "dev.jsonl"], None, None, Some("validation")), ["dev.jsonl"]);
        assert_eq!(chosen(&["data/train.jsonl.gz"], None, None, None), ["data/train.jsonl.gz"]);
        assert_eq!(chosen(&["train/0.parquet", "test/0.parquet"], None, None, None), ["train/0.parquet"]);
        let chat = ["data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet"];
        assert_eq!(chosen(&chat, None, None, Some("train_sft")), chat[..1]);
        assert!(choose(&chat, None, None, Some("train")).is_err(), "train_sft is another split");
        assert_eq!(chosen(&["rows.csv", "dataset_infos.json", ".x/a.csv"], None, None, None), ["rows.csv"]);
    }

    #[test]
    fn one_form_of_the_same_rows_is_read() {
        assert_eq!(chosen(&["train.csv", "train.jsonl", "train.parquet"], None, None, None), ["train.parquet"]);
    }

    #[test]
    fn a_configuration_is_a_folder_where_the_card_says_nothing() {
        let paths = ["default/train/0000.parquet", "main/train/0000.parquet", "main/test/0000.parquet"];
        assert_eq!(chosen(&paths, None, Some("main"), None), paths[1..2]);
        let error = choose(&paths, None, Some("other"), None).unwrap_err();
        assert!(error.hint_text().unwrap().contains("main/train/0000.parquet"), "{error}");
    }

    #[test]
    fn the_card_goes_before_the_names() {
        let paths = ["a/x.jsonl", "a/y.jsonl", "b/one.jsonl", "b/two.jsonl", "train.jsonl"];
        let card = "---\nconfigs:\n- config_name: a\n  data_files:\n  - split: train\n    path: a/x*\n  - split: test\n    \
                    path:\n    - a/y.jsonl\n- config_name: b\n  data_dir: b\n  default: true\n  data_files: '*.jsonl'\n---\n# A";
        assert_eq!(chosen(&paths, Some(card), Some("a"), None), ["a/x.jsonl"]);
        assert_eq!(chosen(&paths, Some(card), Some("a"), Some("test")), ["a/y.jsonl"]);
        assert_eq!(chosen(&paths, Some(card), None, None), ["b/one.jsonl", "b/two.jsonl"]);
        let error = choose(&paths, Some(card), Some("c"), None).unwrap_err();
        assert!(error.hint_text().unwrap().contains("a, b"), "{error}");
        let error = choose(&paths, Some(card), Some("a"), Some("val")).unwrap_err();
        assert!(error.hint_text().unwrap().contains("train, test"), "{error}");
        let mapping = "---\nconfigs:\n- config_name: default\n  data_files: {train: a/*.jsonl}\n---\n";
        assert_eq!(chosen(&paths, Some(mapping), None, None), ["a/x.jsonl", "a/y.jsonl"]);
        let several = card.replace("  default: true\n", "");
        assert!(
            choose(&paths, Some(&several), None, None).unwrap_err().hint_text().unwrap().contains("there are: a, b")
        );
        assert_eq!(chosen(&["train.jsonl"], Some("---\nlicense: mit\n---\n"), None, None), ["train.jsonl"]);
    }

    #[test]
    fn what_cannot_be_found_is_said() {
        let error = choose(&["README.md", "squad.py"], None, None, None).unwrap_err();
        assert!(error.hint_text().unwrap().contains("never run"), "{error}");
        assert_eq!(choose(&["a.csv"], None, None, Some("train[:5]")).unwrap_err().kind(), tunesmith_base::Kind::Config);
        assert!(choose(&["train.csv"], None, None, Some("test")).unwrap_err().message().contains("no split test"));
        assert!(choose(&["test.csv"], None, None, None).is_err(), "a test set is no training set");
        let card = "---\nconfigs:\n- config_name: default\n  data_files: gone/*.jsonl\n---\n";
        assert!(choose(&["a.csv"], Some(card), None, None).unwrap_err().message().contains("gone/*.jsonl"));
    }
}
