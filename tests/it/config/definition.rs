//! The one definition of the keys: what is generated from it, and that every key has a reader.
use super::*;
use crate::tidy;

fn golden(name: &str, made: &str, flag: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(name);
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    let line = kept.lines().zip(made.lines()).position(|(kept, made)| kept != made);
    assert!(
        kept == made,
        "docs/{name} is not what src/config/schema.rs says (line {}); regenerate it:\n  \
         cargo run --quiet -- config --{flag} > docs/{name}",
        line.map_or_else(|| "count".to_owned(), |line| (line + 1).to_string())
    );
}

#[test]
fn the_documentation_is_generated_from_it() {
    golden("configuration.md", &config::docs::markdown(), "docs");
    golden("schema.json", &config::docs::schema(), "schema");
}

#[test]
fn the_schema_knows_every_spelling_and_only_those() {
    let schema: serde_json::Value = serde_json::from_str(&config::docs::schema()).unwrap();
    let mut spellings = 0;
    for def in config::schema::options() {
        for spelling in def.spellings() {
            let place = spelling.split('.').fold(&schema, |node, name| &node["properties"][name]);
            assert!(place["description"].is_string(), "{spelling} is missing");
            assert_eq!(place["default"], (def.get)(&Config::default()), "{spelling}");
            spellings += 1;
        }
    }
    assert_eq!(leaves(&schema), spellings + 1, "every spelling, and include");
}

/// How many keys a schema has, in all sections.
fn leaves(node: &serde_json::Value) -> usize {
    let Some(properties) = node["properties"].as_object() else { return 1 };
    assert_eq!(node["additionalProperties"], false);
    properties.values().map(leaves).sum()
}

#[test]
fn defaults_survive_their_own_definition() {
    // Each default, written as YAML, is accepted by its key and changes nothing: types, bounds and words agree.
    let defaults = Config::default();
    for def in config::schema::options() {
        let yaml = nested(&def.path(), &(def.get)(&defaults).to_string());
        assert_eq!(load(&yaml), defaults, "{yaml}");
    }
}

fn nested(path: &str, value: &str) -> String {
    path.rsplit('.').fold(value.to_owned(), |inner, name| format!("{{{name}: {inner}}}"))
}

/// Keys that the run reads through a method of their section.
const READ_THROUGH: &[(&str, &str)] = &[("model.name", "dir"), ("model.local_dir", "dir")];

/// Whether code reads `section.field`: as `.section.field` or, where the section has a variable of its name, as
/// `section.field`; or takes the field out of the section's struct by pattern.
fn reads(tokens: &[&str], section: &str, field: &str) -> bool {
    tokens.windows(3).enumerate().any(|(at, window)| {
        let written = tokens.get(at + 3) == Some(&"=") && tokens.get(at + 4) != Some(&"=");
        window == [section, ".", field] && !written
    })
}

#[test]
fn every_key_has_a_reader() {
    let sources: Vec<_> =
        tidy::sources().into_iter().filter(|source| !source.path.starts_with("src/config/")).collect();
    let code: Vec<Vec<&str>> = sources.iter().map(|source| tidy::tokens(&source.code)).collect();
    let unread: Vec<String> = config::schema::options()
        .filter(|def| def.fixed.is_none())
        .filter(|def| {
            let section = if def.section == "gen" { "generation" } else { def.section.rsplit('.').next().unwrap() };
            let method = READ_THROUGH.iter().find(|(key, _)| *key == def.path()).map(|(_, method)| *method);
            !code.iter().any(|tokens| reads(tokens, section, method.unwrap_or(def.name)))
        })
        .map(config::OptionDef::path)
        .collect();
    assert!(
        unread.is_empty(),
        "keys that nothing in src reads (as `section.key`, from a variable or field with the section's name):\n  {}",
        unread.join("\n  ")
    );
}

#[test]
fn the_reader_check_tells_reading_from_writing() {
    let tokens = |code| tidy::tokens(code);
    assert!(reads(&tokens("let x = config.train.seed + 1;"), "train", "seed"));
    assert!(reads(&tokens("if train.seed == 1 {}"), "train", "seed"));
    assert!(!reads(&tokens("train.seed = 1;"), "train", "seed"));
    assert!(!reads(&tokens("other.seed + train.data_seed"), "train", "seed"));
}
