//! Checks that the sources follow the project's own rules: the length and purpose of files, which code may print or use
//! `unsafe`, and that nothing unfinished or unreachable is referred to.
use std::fs;
use std::path::{Path, PathBuf};

/// A source file: its path from the repository root, as written, and as code only (no comments, no string contents).
pub(super) struct Source {
    pub path: String,
    text: String,
    pub code: String,
}

/// The longest that a source file may be, in lines.
const MAX_LINES: usize = 600;

/// Where `unsafe` may stand, and why; folders end with a slash.
const UNSAFE_ALLOWED: &[(&str, &str)] = &[
    ("crates/device/src/away.rs", "copies of a GPU's memory beside what computes"),
    ("crates/device/src/buffer.rs", "the memory of activations"),
    ("crates/device/src/cuda/", "the functions of CUDA's libraries, loaded at run time"),
    ("crates/device/src/gpu.rs", "copies and launches at addresses of a GPU"),
    ("crates/device/src/pinned.rs", "copies between a GPU and memory of the host beside what computes"),
    ("crates/device/src/slice.rs", "numbers as bytes, to a GPU and back"),
    ("crates/ops/src/", "vector instructions and tiles that threads write side by side"),
    ("crates/base/src/files/disk.rs", "statvfs of the C library"),
    ("crates/comm/src/bytes.rs", "numbers as the bytes that travel between ranks"),
    ("crates/comm/src/gloo.rs", "Gloo's functions, loaded at run time"),
    ("crates/comm/src/shared_buffer.rs", "memory that threads show each other"),
    ("crates/comm/src/threads.rs", "its use, by the rules of a meeting"),
    ("crates/comm/src/nccl/", "NCCL's functions and the driver's, loaded at run time"),
    ("crates/comm/src/process.rs", "prctl, getppid and kill of the C library"),
    ("crates/comm/src/wire.rs", "setsockopt of the C library"),
    ("src/cmd/streams.rs", "a look at standard output before Rust's runtime"),
    ("crates/base/src/memory/counting.rs", "the global allocator"),
    ("crates/base/src/memory/overflow.rs", "the handler of a stack's overflow"),
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Every file below `folder` (a path from the repository root) with one of the extensions, sorted.
fn files(folder: &str, extensions: &[&str]) -> Vec<String> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        let Ok(entries) = fs::read_dir(folder) else { return };
        for path in entries.map(|entry| entry.expect("a readable folder").path()) {
            let hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
            if path.is_dir() && !hidden && !path.ends_with("target") && !path.ends_with("runs") {
                walk(&path, found);
            } else if path.is_file() {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    walk(&root().join(folder), &mut found);
    let mut names: Vec<String> = found
        .iter()
        .filter(|path| path.extension().is_some_and(|end| extensions.iter().any(|wanted| end == *wanted)))
        .map(|path| path.strip_prefix(root()).expect("below the root").to_string_lossy().replace('\\', "/"))
        .collect();
    names.sort();
    names
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

pub(super) fn sources() -> Vec<Source> {
    [files("src", &["rs"]), files("crates", &["rs"])]
        .concat()
        .into_iter()
        .map(|path| {
            let text = read(&path);
            let code = code_only(&text);
            Source { path, text, code }
        })
        .collect()
}

/// The text with comments removed and string and character literals emptied; line breaks stay.
fn code_only(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let at = |index: usize| chars.get(index).copied().unwrap_or('\0');
    let mut code = String::with_capacity(text.len());
    let mut index = 0;
    while index < chars.len() {
        let word_before = index > 0 && (at(index - 1).is_alphanumeric() || at(index - 1) == '_');
        let hashes = chars[index + 1..].iter().take_while(|&&c| c == '#').count();
        if at(index) == '/' && at(index + 1) == '/' {
            while index < chars.len() && at(index) != '\n' {
                index += 1;
            }
        } else if at(index) == '/' && at(index + 1) == '*' {
            let mut depth = 0;
            loop {
                match (at(index), at(index + 1)) {
                    ('/', '*') => (depth, index) = (depth + 1, index + 2),
                    ('*', '/') => (depth, index) = (depth - 1, index + 2),
                    _ => index += 1,
                }
                if depth == 0 || index >= chars.len() {
                    break;
                }
            }
        } else if at(index) == 'r' && !word_before && at(index + 1 + hashes) == '"' {
            index += hashes + 2;
            while index < chars.len() && !(at(index) == '"' && (1..=hashes).all(|more| at(index + more) == '#')) {
                index += 1;
            }
            index += hashes + 1;
            code.push_str("\"\"");
        } else if at(index) == '"' {
            index += 1;
            while index < chars.len() && at(index) != '"' {
                index += if at(index) == '\\' { 2 } else { 1 };
            }
            index += 1;
            code.push_str("\"\"");
        } else if at(index) == '\'' && (at(index + 1) == '\\' || at(index + 2) == '\'') {
            index += if at(index + 1) == '\\' { 3 } else { 2 };
            while index < chars.len() && at(index) != '\'' {
                index += 1;
            }
            index += 1;
            code.push_str("' '");
        } else {
            code.push(at(index));
            index += 1;
        }
    }
    code
}

/// The identifiers of the code in order, with what stands between them.
pub(super) fn tokens(code: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = code;
    while let Some(first) = rest.chars().next() {
        let length = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
        let length = if length > 0 { length } else { first.len_utf8() };
        if !first.is_whitespace() {
            tokens.push(&rest[..length]);
        }
        rest = &rest[length..];
    }
    tokens
}

/// Fails with every finding on a line of its own.
fn expect_none(rule: &str, findings: &[String]) {
    assert!(findings.is_empty(), "{rule}:\n  {}", findings.join("\n  "));
}

#[test]
fn files_are_short_and_open_with_their_purpose() {
    let mut findings = Vec::new();
    for source in sources() {
        let lines = source.text.lines().count();
        if lines > MAX_LINES {
            findings.push(format!("{}: {lines} lines, at most {MAX_LINES}", source.path));
        }
    }
    for path in [files("src", &["rs"]), files("crates", &["rs"]), files("tests", &["rs"])].concat() {
        if !read(&path).starts_with("//! ") {
            findings.push(format!("{path}: must open with a `//!` line that says what it is for"));
        }
    }
    expect_none("files", &findings);
}

#[test]
fn only_cmd_and_main_print() {
    let mut findings = Vec::new();
    for source in sources() {
        let debugs = source.code.contains("dbg!(");
        let prints = ["print!(", "println!("].iter().any(|name| source.code.contains(name));
        if debugs || (prints && !source.path.starts_with("src/cmd/") && source.path != "src/main.rs") {
            findings.push(source.path);
        }
    }
    expect_none("print!, println!, eprintln! belong in src/cmd and src/main.rs, dbg! nowhere", &findings);
}

#[test]
fn unsafe_stands_only_where_it_is_named() {
    let findings: Vec<String> = sources()
        .iter()
        .filter(|source| tokens(&source.code).contains(&"unsafe"))
        .filter(|source| !UNSAFE_ALLOWED.iter().any(|(allowed, _)| source.path.starts_with(allowed)))
        .map(|source| source.path.clone())
        .collect();
    expect_none("`unsafe` outside of UNSAFE_ALLOWED", &findings);
}

/// Clippy holds that each `unsafe` block has a comment, but asks for this section of public functions only.
#[test]
fn unsafe_functions_say_what_they_ask_of_their_caller() {
    let mut findings = Vec::new();
    for source in sources() {
        let lines: Vec<&str> = source.text.lines().collect();
        let asks = |line: &str| {
            let line =
                line.trim_start_matches("pub(crate) ").trim_start_matches("pub(super) ").trim_start_matches("pub ");
            line.starts_with("unsafe fn ") || line.starts_with("unsafe extern ")
        };
        for (number, line) in lines.iter().enumerate().filter(|(_, line)| asks(line)) {
            let above =
                lines[..number].iter().rev().take_while(|line| line.starts_with("///") || line.starts_with("#["));
            if !above.into_iter().any(|line| *line == "/// # Safety") {
                findings.push(format!("{}:{}: {line}", source.path, number + 1));
            }
        }
    }
    expect_none("an `unsafe fn` without a `# Safety` section", &findings);
}

/// Where operations choose between devices outside of a `mod.rs`, and why.
const CHOOSES_DEVICE: &[(&str, &str)] = &[
    ("crates/ops/src/activation/away.rs", "only what is in a GPU's memory leaves it for the host's"),
    ("crates/ops/src/activation/pool.rs", "only a GPU's activations may have 16 bits"),
    ("crates/ops/src/attention/cache.rs", "keys and values that are kept have a layout for each device"),
    ("crates/ops/src/cuda.rs", "the number of an operand's GPU"),
    ("crates/ops/src/loss/totals.rs", "a GPU's sums stay there until a step reads them"),
    ("crates/ops/src/quant/encode.rs", "the interface of quantizing, beside that of dequantizing in `mod.rs`"),
    ("crates/ops/src/quant/form.rs", "codes on the host are a vector, and elsewhere an array"),
    ("crates/ops/src/quant/four.rs", "only a GPU's kernels read the meaning of codes from memory"),
    ("crates/ops/src/recurrence/state.rs", "states have a layout for each device"),
    ("crates/ops/src/testing.rs", "tests run on every device"),
];

#[test]
fn an_operation_chooses_its_device_in_its_interface() {
    let chooses = |source: &Source| {
        source.code.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default().contains("Device::Cuda")
    };
    let sources: Vec<Source> = sources();
    let ops = |source: &&Source| source.path.starts_with("crates/ops/src/") && !source.path.ends_with("tests.rs");
    let choosing: Vec<&str> =
        sources.iter().filter(ops).filter(|source| chooses(source)).map(|source| source.path.as_str()).collect();
    let named = |path: &str| CHOOSES_DEVICE.iter().any(|(allowed, _)| *allowed == path);
    let elsewhere = choosing.iter().filter(|path| !path.ends_with("/mod.rs") && !named(path));
    let findings: Vec<String> = elsewhere.map(|path| (*path).to_owned()).collect();
    expect_none("`Device::Cuda` in an operation's `mod.rs` only, or in CHOOSES_DEVICE with a reason", &findings);
    let stale = CHOOSES_DEVICE.iter().filter(|(path, _)| !choosing.contains(path));
    expect_none("in CHOOSES_DEVICE without need", &stale.map(|(path, _)| (*path).to_owned()).collect::<Vec<_>>());
}

/// The time of day jumps: daylight saving, NTP, a hand on the clock.
#[test]
fn waits_between_ranks_measure_time_that_does_not_jump() {
    let waits = |path: &str| {
        path.starts_with("crates/comm/src/") || matches!(path, "src/cmd/launch.rs" | "src/cmd/rank_processes.rs")
    };
    let findings: Vec<String> = sources()
        .iter()
        .filter(|source| waits(&source.path) && tokens(&source.code).contains(&"SystemTime"))
        .map(|source| source.path.clone())
        .collect();
    expect_none("`SystemTime` where ranks wait for each other; use `Instant`", &findings);
}

/// Where files may be opened otherwise than by `crates/base/src/files`, and why.
const OPENS_ALLOWED: &[(&str, &str)] = &[
    ("crates/base/src/files/", "the functions themselves"),
    ("crates/comm/src/token.rs", "the system's source of randomness"),
    ("src/cmd/chat_input.rs", "the history of chats, for its owner alone"),
    ("crates/device/src/cuda/testing.rs", "the sources of the stand-in, and its lock"),
];

#[test]
fn files_are_opened_and_written_in_one_place() {
    let calls = [
        "File::open",
        "File::create",
        "File::options",
        "OpenOptions::new",
        "fs::read(",
        "fs::read_to_string",
        "fs::write(",
        "fs::rename(",
    ];
    let mut findings = Vec::new();
    let allowed = |path: &str| OPENS_ALLOWED.iter().any(|(allowed, _)| path.starts_with(allowed));
    for source in sources().iter().filter(|source| !source.path.ends_with("/tests.rs") && !allowed(&source.path)) {
        let code = source.code.split("#[cfg(test)]").next().unwrap_or_default();
        // `AtomicFile::create` is one of the ways that are meant.
        let plain = |at: usize| !code[..at].ends_with(char::is_alphanumeric);
        let opens = |call: &str| code.match_indices(call).any(|(at, _)| plain(at));
        for call in calls.iter().filter(|call| opens(call)) {
            findings.push(format!("{}: {call}", source.path));
        }
    }
    expect_none("use tunesmith_base::files: special files, links and inputs are looked at there", &findings);
    // What a command writes has the name that a user gave it.
    let at_once = |source: &&Source| source.path.starts_with("src/") && source.code.contains("files::atomic");
    let findings: Vec<_> = sources().iter().filter(at_once).map(|source| source.path.clone()).collect();
    expect_none("use tunesmith_base::files::output: it replaces no input and no file unasked", &findings);
}

/// Errors about checkpoints, files and other ranks that need no hint where they are made: the program's own failures,
/// about which a user can do nothing, and those that get their hint a few lines later.
const HINTLESS: &[(&str, usize)] = &[
    ("crates/checkpoint/src/layout.rs", 1),
    ("crates/checkpoint/src/stamp_check.rs", 1),
    ("crates/checkpoint/src/stamp.rs", 2),
    ("crates/model/src/shards.rs", 1),
    ("crates/train/src/save.rs", 2),
    ("crates/parallel/src/reducer.rs", 1),
];

#[test]
fn errors_about_checkpoints_files_and_ranks_say_what_to_do() {
    let makers = ["Error::checkpoint(", "Error::peer(", "Kind::Io,", "Kind::Checkpoint,", "Kind::Peer,"];
    let mut findings = Vec::new();
    for source in sources().iter().filter(|source| !source.path.ends_with("/tests.rs")) {
        let code = source.code.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        let mut places = Vec::new();
        for (at, maker) in makers.iter().flat_map(|maker| code.match_indices(maker)) {
            // The call's own end: the bracket that is opened by the name, or that the class stands in.
            let mut depth = usize::from(!maker.ends_with('('));
            let open = if maker.ends_with('(') { at + maker.len() - 1 } else { at };
            if depth == 1
                && !code[..at]
                    .trim_end_matches("crate::")
                    .trim_end_matches("tunesmith_base::")
                    .trim_end()
                    .ends_with("Error::new(")
            {
                continue;
            }
            let end = code[open..].char_indices().find_map(|(offset, letter)| {
                depth = if letter == '(' { depth + 1 } else { depth };
                depth = if letter == ')' { depth.saturating_sub(1) } else { depth };
                (letter == ')' && depth == 0).then_some(open + offset + 1)
            });
            let rest = &code[end.unwrap_or(code.len())..];
            let statement = rest.split([';', '=']).next().unwrap_or_default();
            if !statement.contains(".hint(") {
                places.push(format!("{}:{}", source.path, code[..at].lines().count()));
            }
        }
        let allowed = HINTLESS.iter().find(|(path, _)| *path == source.path).map_or(0, |(_, count)| *count);
        if places.len() > allowed {
            findings.extend(places);
        }
    }
    expect_none("an error without a hint", &findings);
}

/// Files whose messages have a number and a plural with it, as the number is always more than one there.
const ALWAYS_SEVERAL: &[(&str, usize)] = &[
    ("src/cmd/export.rs", 1),
    ("src/cmd/launch.rs", 1),
    ("src/cmd/plan.rs", 1),
    ("src/cmd/train_console.rs", 1),
    ("crates/comm/src/rendezvous.rs", 1),
    ("crates/comm/src/membership.rs", 1),
    ("crates/config/src/resolve.rs", 1),
    ("crates/data/src/growth.rs", 1),
    ("crates/data/src/mix.rs", 1),
    ("crates/data/src/source/columns.rs", 1),
    ("crates/hub/src/checkout.rs", 1),
    ("crates/hub/src/datasets.rs", 1),
    ("crates/hub/src/models.rs", 1),
    ("crates/hub/src/remote.rs", 1),
    ("crates/plan/src/platform.rs", 1),
    ("crates/train/src/divergence.rs", 1),
    ("crates/train/src/announce.rs", 2),
];

#[test]
fn a_number_in_a_message_agrees_with_its_noun() {
    let nouns = ["rows", "ranks", "files", "steps"].map(|noun| format!("}} {noun}"));
    let mut findings = Vec::new();
    for source in sources().iter().filter(|source| !source.path.ends_with("/tests.rs")) {
        let text = source.text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//"));
        let goes_on = |rest: &str| rest.starts_with(|letter: char| letter.is_alphanumeric() || letter == '_');
        let in_plural = |line: &str| {
            nouns.iter().any(|noun| line.match_indices(noun).any(|(at, _)| !goes_on(&line[at + noun.len()..])))
        };
        let places: Vec<String> = lines
            .filter(|(_, line)| in_plural(line))
            .map(|(number, line)| format!("{}:{}: {}", source.path, number + 1, line.trim()))
            .collect();
        let allowed = ALWAYS_SEVERAL.iter().find(|(path, _)| *path == source.path).map_or(0, |(_, count)| *count);
        if places.len() > allowed {
            findings.extend(places);
        }
    }
    expect_none("use tunesmith_base::words::count for a number that may be one", &findings);
}

#[test]
fn nothing_is_left_unfinished() {
    // Put together here so that this file doesn't find itself.
    let marks = ["todo", "unimplemented"].map(|name| format!("{name}!("));
    let words = [["FIX", "ME"].concat(), ["TO", "DO"].concat(), ["XX", "X"].concat()];
    let mut findings = Vec::new();
    for path in [files("src", &["rs"]), files("crates", &["rs"]), files("tests", &["rs"])].concat() {
        let text = read(&path);
        for (number, line) in text.lines().enumerate() {
            let marked = marks.iter().any(|mark| line.contains(mark.as_str()));
            let worded = tokens(line).iter().any(|token| words.iter().any(|word| word == token));
            if marked || worded {
                findings.push(format!("{path}:{}: {}", number + 1, line.trim()));
            }
        }
    }
    expect_none("unfinished", &findings);
}

#[test]
fn nothing_refers_outside_of_the_repository() {
    let outside = ["..", "/shared"].concat();
    let mut findings = Vec::new();
    for path in files(".", &["rs", "md", "yaml", "yml", "py", "toml", "sh", "json"]) {
        let path = path.trim_start_matches("./").to_owned();
        if !path.starts_with("tests/golden/") && read(&path).contains(&outside) {
            findings.push(path);
        }
    }
    expect_none("refers outside of the repository", &findings);
}

#[test]
fn relative_links_in_the_documents_lead_somewhere() {
    let mut findings = Vec::new();
    for path in files(".", &["md"]) {
        let folder = Path::new(&path).parent().expect("a file has a folder").to_owned();
        let text = read(&path);
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = target.split('#').next().unwrap_or_default();
            if !file.is_empty() && !file.contains("://") && !root().join(&folder).join(file).exists() {
                findings.push(format!("{path}: {target}"));
            }
        }
    }
    expect_none("broken links", &findings);
}
