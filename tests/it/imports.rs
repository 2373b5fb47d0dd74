//! Checks that the imports within a crate have no cycles, neither between files nor between folders. Between crates, the
//! compiler refuses cycles.
use std::collections::{BTreeMap, BTreeSet};

use super::tidy::{Source, sources, tokens};

/// The path of a module from its crate's root: `["cmd", "train"]`; empty for `lib.rs` and `main.rs`.
type Module = Vec<String>;
/// Which modules each module names.
type Graph = BTreeMap<Module, BTreeSet<Module>>;

/// The crate's source folder and the module of a file.
fn place(path: &str) -> (&str, Module) {
    let start = path.find("src/").expect("sources lie in src/") + "src/".len();
    let mut module: Module = path[start..].trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if module.last().is_some_and(|last| ["mod", "lib", "main"].contains(&last.as_str())) {
        module.pop();
    }
    (&path[..start], module)
}

/// Reads a tree of paths such as `a::{b, c::{self, d}}` from `at` on. Every leaf is pushed behind `prefix`.
fn paths(words: &[&str], at: &mut usize, prefix: &[String], found: &mut Vec<Vec<String>>) {
    let mut path = prefix.to_vec();
    while let Some(&word) = words.get(*at) {
        match word {
            "{" => {
                *at += 1;
                while words.get(*at).is_some_and(|&word| word != "}") {
                    paths(words, at, &path, found);
                    if words.get(*at) == Some(&",") {
                        *at += 1;
                    }
                }
                *at += 1;
                return;
            }
            ":" => *at += 1,
            _ if word.chars().all(|c| c.is_alphanumeric() || c == '_') => {
                path.push(word.to_owned());
                *at += 1;
                if words.get(*at..*at + 2) != Some(&[":", ":"][..]) {
                    if words.get(*at) == Some(&"as") {
                        *at += 2;
                    }
                    break;
                }
            }
            _ => {
                *at += 1;
                break;
            }
        }
    }
    found.push(path);
}

/// The modules of its crate that a file names by `crate::`, `super::` or `self::`; unit tests do not count.
fn named(code: &str, module: &Module, modules: &BTreeSet<Module>) -> BTreeSet<Module> {
    let code = code.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let words = tokens(code);
    let mut found = Vec::new();
    let mut at = 0;
    while at < words.len() {
        let starts = ["crate", "super", "self"].contains(&words[at]) && words.get(at + 1) == Some(&":");
        let inside = at > 1 && words[at - 1] == ":" && words[at - 2] == ":";
        if starts && !inside {
            paths(&words, &mut at, &[], &mut found);
        } else {
            at += 1;
        }
    }
    let absolute = |path: Vec<String>| -> Module {
        let ups = path.iter().take_while(|word| *word == "super").count();
        let (base, rest) = match path[0].as_str() {
            "crate" => (&[][..], &path[1..]),
            "self" => (&module[..], &path[1..]),
            _ => (&module[..module.len() - ups.min(module.len())], &path[ups..]),
        };
        let whole: Module = base.iter().chain(rest.iter().filter(|word| *word != "self")).cloned().collect();
        // The longest beginning that is a module: what follows is an item in it.
        (0..=whole.len()).rev().map(|end| whole[..end].to_vec()).find(|path| modules.contains(path)).unwrap_or_default()
    };
    // A folder that names what lies in it is no circle.
    found.into_iter().map(absolute).filter(|other| !other.starts_with(module)).collect()
}

/// The import graph of each crate, by its source folder.
fn graphs() -> BTreeMap<String, Graph> {
    let sources: Vec<Source> = sources().into_iter().filter(|source| !source.path.ends_with("/tests.rs")).collect();
    let mut modules: BTreeMap<&str, BTreeSet<Module>> = BTreeMap::new();
    for source in &sources {
        let (folder, module) = place(&source.path);
        modules.entry(folder).or_default().insert(module);
    }
    let mut graphs: BTreeMap<String, Graph> = BTreeMap::new();
    for source in &sources {
        let (folder, module) = place(&source.path);
        let others = named(&source.code, &module, &modules[folder]);
        graphs.entry(folder.to_owned()).or_default().insert(module, others);
    }
    graphs
}

/// The graph of the folders at `depth`: modules are cut to so many words.
fn folders(graph: &Graph, depth: usize) -> Graph {
    let cut = |module: &Module| module[..depth.min(module.len())].to_vec();
    let mut folders = Graph::new();
    for (module, others) in graph.iter().filter(|(module, _)| module.len() >= depth) {
        let others = others.iter().map(cut).filter(|other| *other != cut(module) && !other.is_empty());
        folders.entry(cut(module)).or_default().extend(others);
    }
    folders
}

/// Modules that reach themselves, each with the modules of its circle.
fn circles(graph: &Graph) -> BTreeSet<BTreeSet<Module>> {
    let reach = |start: &Module| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![start]);
        while let Some(module) = open.pop() {
            for other in graph.get(module).into_iter().flatten() {
                if seen.insert(other) {
                    open.push(other);
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&Module, BTreeSet<&Module>> = graph.keys().map(|module| (module, reach(module))).collect();
    let circle = |module: &Module| -> BTreeSet<Module> {
        let others = reached[module].iter().copied();
        others.filter(|other| reached.get(other).is_some_and(|back| back.contains(module))).cloned().collect()
    };
    graph.keys().map(circle).filter(|circle| circle.len() > 1).collect()
}

#[test]
fn no_files_or_folders_import_each_other_in_a_circle() {
    let mut findings = BTreeSet::new();
    for (folder, graph) in graphs() {
        let deepest = graph.keys().map(Vec::len).max().unwrap_or(0);
        let levels = (1..deepest).map(|depth| folders(&graph, depth));
        for circle in levels.chain([graph.clone()]).flat_map(|graph| circles(&graph)) {
            let names: Vec<String> = circle.iter().map(|module| module.join("::")).collect();
            findings.insert(format!("{folder}: {}", names.join(", ")));
        }
    }
    assert!(findings.is_empty(), "circles of imports:\n  {}", findings.into_iter().collect::<Vec<_>>().join("\n  "));
}

#[test]
fn a_circle_is_found_through_every_form_of_path() {
    let module = |words: &[&str]| -> Module { words.iter().map(|&word| word.to_owned()).collect() };
    let modules: BTreeSet<Module> = [&["a"][..], &["b"], &["b", "c"], &["d"], &[]].map(module).into();
    for (code, expected) in [
        ("use crate::d::Item;", &["d"][..]),
        ("use super::{d::{self, Item}, x};", &["d"]),
        ("fn f() { crate::b::c::g() }", &["b", "c"]),
        ("use super::b::{c, Item};", &["b", "c"]),
    ] {
        let found = named(code, &module(&["a"]), &modules);
        assert!(found.contains(&module(expected)), "{code}: {found:?}");
    }
    assert!(named("use self::c::X; mod c;", &module(&["b"]), &modules).is_empty());
    let tests = "fn f() {}\n#[cfg(test)]\nmod tests {\n use crate::d::X;\n}";
    assert!(named(tests, &module(&["a"]), &modules).is_empty());

    let graph: Graph = [(&["a"][..], &["b"][..]), (&["b"], &["d"]), (&["d"], &["a"]), (&["b", "c"], &["d"])]
        .map(|(from, to)| (module(from), BTreeSet::from([module(to)])))
        .into();
    assert_eq!(circles(&graph), [[&["a"][..], &["b"], &["d"]].map(module).into()].into());
}
