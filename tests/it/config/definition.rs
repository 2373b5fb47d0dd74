//! The single definition of all keys: what is generated from it, and that code reads every key.
use super::*;
use crate::tidy;

fn golden(name: &str, made: &str, flag: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(name);
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    let line = kept.lines().zip(made.lines()).position(|(kept, made)| kept != made);
    assert!(
        kept == made,
        "docs/{name} is not what the program says of itself (line {}); regenerate it:\n  \
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
fn the_command_reference_is_generated_from_what_parses_the_commands() {
    golden("commands.md", &tunesmith::cmd::reference(), "commands");
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
    let of_others = node["description"].as_str().is_some_and(|text| text.starts_with("A key of other toolkits"));
    let Some(properties) = node["properties"].as_object() else { return usize::from(!of_others) };
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

#[test]
fn a_device_is_the_cpu_or_a_gpu_by_its_number() {
    use config::DeviceChoice::{Auto, Cpu, Cuda};
    for (word, choice, written) in [
        ("auto", Auto, "auto"),
        ("cpu", Cpu, "cpu"),
        ("cuda", Cuda(None), "cuda"),
        ("cuda:17", Cuda(Some(17)), "cuda:17"),
    ] {
        let found = load(&format!("model: {{device: {word}}}")).model.device;
        assert_eq!((found, found.to_string().as_str()), (choice, written));
    }
}

fn nested(path: &str, value: &str) -> String {
    path.rsplit('.').fold(value.to_owned(), |inner, name| format!("{{{name}: {inner}}}"))
}

/// Keys that the run reads through a method of their section.
const READ_THROUGH: &[(&str, &str)] = &[("model.name", "dir"), ("model.local_dir", "dir")];

/// Whether code reads `field` of a section: `section.field` behind whatever holds the configuration, or of a variable
/// that the code declares as a reference to the section's struct. Unit tests in the code don't count.
fn reads(tokens: &[&str], section: &str, field: &str) -> bool {
    let tests = tokens.windows(7).position(|window| window == ["#", "[", "cfg", "(", "test", ")", "]"]);
    let tokens = &tokens[..tests.unwrap_or(tokens.len())];
    let structure = format!("{}{}Config", section[..1].to_uppercase(), &section[1..]);
    let declared = tokens.windows(4).filter(|window| window[1..] == [":", "&", structure.as_str()]);
    // The settings of a kind of adapter read themselves.
    let own = tokens.windows(4).any(|window| window == ["impl", "Method", "for", structure.as_str()]);
    let holders: Vec<&str> = declared.map(|window| window[0]).chain([section]).chain(own.then_some("self")).collect();
    tokens.windows(3).enumerate().any(|(at, window)| {
        let written = tokens.get(at + 3) == Some(&"=") && tokens.get(at + 4) != Some(&"=");
        holders.contains(&window[0]) && window[1..] == [".", field] && !written
    })
}

#[test]
fn every_key_has_a_reader() {
    let sources: Vec<_> =
        tidy::sources().into_iter().filter(|source| !source.path.starts_with("crates/config/src/")).collect();
    let code: Vec<Vec<&str>> = sources.iter().map(|source| tidy::tokens(&source.code)).collect();
    // The words of each file tell at once that most files do not read a key.
    let words: Vec<std::collections::HashSet<&str>> =
        code.iter().map(|tokens| tokens.iter().copied().collect()).collect();
    let unread: Vec<String> = config::schema::options()
        // Configurations of others become settings while ours is read.
        .filter(|def| !config::foreign::KEYS.contains(&def.path().as_str()))
        .filter(|def| {
            let section = match def.section {
                "" => "config",
                "gen" => "generation",
                other => other.rsplit('.').next().unwrap(),
            };
            let method = READ_THROUGH.iter().find(|(key, _)| *key == def.path()).map(|(_, method)| *method);
            let name = method.unwrap_or(def.name);
            !code.iter().zip(&words).any(|(tokens, words)| words.contains(name) && reads(tokens, section, name))
        })
        .map(config::OptionDef::path)
        .collect();
    assert!(
        unread.is_empty(),
        "keys that nothing in src reads (as `section.key`, or from a variable declared as `&SectionConfig`):\n  {}",
        unread.join("\n  ")
    );
}

#[test]
fn the_reader_check_tells_reading_from_the_rest() {
    let reads = |code: &str| reads(&tidy::tokens(code), "train", "seed");
    assert!(reads("let x = config.train.seed + 1;"));
    assert!(reads("if train.seed == 1 {}"));
    assert!(reads("fn f(options: &TrainConfig) -> u64 { options.seed }"));
    assert!(reads("impl Method for TrainConfig { fn f(&self) -> u64 { self.seed } }"));
    assert!(!reads("impl Method for DataConfig { fn f(&self) -> u64 { self.seed } }"));
    assert!(!reads("train.seed = 1;"));
    assert!(!reads("fn f(options: &DataConfig) -> u64 { options.seed }"));
    assert!(!reads("other.seed + train.data_seed"));
    assert!(!reads("#[cfg(test)] mod tests { fn f() { train.seed } }"));
}
