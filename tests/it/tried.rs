//! Checks the tables of what is tested with each family (docs/models.md) and with each model that reads images
//! (docs/guides/images.md). They follow from the golden files, from the lists of models in the tests, and from the registry.
use crate::parity::{families, golden, json};
use crate::{export, gpu_memory, picture_modes, pictures, plan, shard, vision};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use tunesmith::config::FAMILIES;
use tunesmith::config::vision::SEEING;

const BEGIN: &str = "<!-- what is tried: tests/it/tried.rs -->\n";

/// The golden models of each `model_type`.
fn models() -> BTreeMap<String, Vec<String>> {
    let mut models: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in families() {
        let config = json(&golden(&name).join("model/config.json"));
        let kind = config["model_type"].as_str().unwrap().to_owned();
        models.entry(kind).or_default().push(name);
    }
    models
}

/// The golden models whose `config.json` is tried key by key.
fn tried_keys() -> BTreeSet<String> {
    let text = std::fs::read_to_string(golden("../config_variants.jsonl")).unwrap();
    let name = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        line["family"].as_str().unwrap().trim_start_matches("a/").to_owned()
    };
    text.lines().map(name).collect()
}

fn table() -> String {
    let (models, keys) = (models(), tried_keys());
    let columns = [
        "`model_type`",
        "models",
        "keys of `config.json`",
        "adapters on experts",
        "merge",
        "FSDP",
        "memory, to the byte",
        "memory of a GPU",
        "GGUF",
    ];
    let mut text = format!("| {} |\n|{}\n", columns.join(" | "), "---|".repeat(columns.len()));
    for family in FAMILIES {
        let own = models.get(family.model_type);
        let own = own.unwrap_or_else(|| panic!("no golden model is a {}", family.model_type));
        let any = |tried: &dyn Fn(&str) -> bool| if own.iter().any(|name| tried(name)) { "yes" } else { "" };
        let experts =
            |name: &str| ["experts", "fused"].iter().any(|kind| golden(&format!("../adapters/{kind}_{name}")).is_dir());
        let cells = [
            format!("`{}`", family.model_type),
            own.len().to_string(),
            any(&|name| keys.contains(name)).into(),
            any(&experts).into(),
            any(&|name| export::MERGED.contains(&name)).into(),
            any(&|name| shard::SHARED.contains(&name)).into(),
            any(&|name| plan::PREDICTED.contains(&name)).into(),
            any(&|name| gpu_memory::PREDICTED.contains(&name)).into(),
            if family.gguf.is_some() { "yes".into() } else { String::new() },
        ];
        writeln!(text, "| {} |", cells.join(" | ")).unwrap();
    }
    text
}

/// What is tried with each model that reads images.
fn table_of_images() -> String {
    let keys = std::fs::read_to_string(golden("../vision_variants.jsonl")).unwrap();
    let keys: BTreeSet<String> = keys
        .lines()
        .filter_map(|line| Some(serde_json::from_str::<serde_json::Value>(line).unwrap()["model"].as_str()?.to_owned()))
        .collect();
    let modes = picture_modes::MODES.map(|(mode, _)| mode);
    let columns: Vec<&str> =
        ["`model_type`", "equal to PyTorch", "rows equal to the processor's", "keys of `config.json`"]
            .into_iter()
            .chain(modes)
            .chain([
                "packing",
                "answers",
                "adapters on the encoder, equal to PEFT's",
                "second encoder",
                "memory, to the byte",
            ])
            .collect();
    let mut text = format!("| {} |\n|{}\n", columns.join(" | "), "---|".repeat(columns.len()));
    for name in picture_modes::SEEING {
        let yes = |tried: bool| if tried { "yes".to_owned() } else { String::new() };
        let mut cells = vec![
            format!("`{name}`"),
            yes(vision::EQUAL.concat().contains(&vision::run_of(name))),
            yes(pictures::PROCESSED.contains(&name)),
            yes(keys.contains(name)),
        ];
        // Each is trained in each mode, packed, and asked.
        cells.extend(std::iter::repeat_n(yes(true), modes.len() + 2));
        cells.push(yes(vision::ADAPTED.iter().any(|run| vision::of_model(run) == name)));
        cells.push(yes(vision::WORLDS.iter().any(|run| vision::of_model(run) == name)));
        cells.push(yes(vision::memory::MODELS.contains(&vision::run_of(name))));
        writeln!(text, "| {} |", cells.join(" | ")).unwrap();
    }
    text
}

/// Checks that a document contains the expected table, and that every column from `first` on has a yes: a column without one
/// means that a list of models was lost.
fn check(document: &str, expected: &str, first: usize) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(document);
    let text = std::fs::read_to_string(path).unwrap();
    let there = text.split_once(BEGIN).and_then(|(_, rest)| rest.split_once("<!-- end -->"));
    let there = there.expect("the marks of the table").0;
    assert!(there == expected, "put this table into {document}:\n{expected}");
    let columns = expected.lines().next().unwrap_or_default().matches(" | ").count() + 1;
    for column in first..=columns {
        assert!(
            expected.lines().any(|line| line.split(" | ").nth(column - 1).is_some_and(|cell| cell.contains("yes"))),
            "column {column}"
        );
    }
}

#[test]
fn the_table_of_what_is_tried_is_that_of_the_tests() {
    check("docs/models.md", &table(), 3);
}

#[test]
fn the_table_of_what_is_tried_with_images_is_that_of_the_tests() {
    check("docs/guides/images.md", &table_of_images(), 2);
    for name in picture_modes::SEEING {
        assert!(SEEING.contains(name), "{name} is no model that sees images");
    }
    assert_eq!(SEEING.split(", ").count(), picture_modes::SEEING.len());
}
