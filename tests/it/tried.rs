//! The table in docs/models.md of what is tried with each family. It follows from the golden files, from the lists of models that tests go
//! through, and from the registry.
use crate::parity::{families, golden, json};
use crate::{export, gpu_memory, plan, shard};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use tunesmith::config::FAMILIES;

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

#[test]
fn the_table_of_what_is_tried_is_that_of_the_tests() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/models.md");
    let text = std::fs::read_to_string(path).unwrap();
    let there = text.split_once(BEGIN).and_then(|(_, rest)| rest.split_once("<!-- end -->"));
    let (there, expected) = (there.expect("the marks of the table").0, table());
    assert!(there == expected, "put this table into docs/models.md:\n{expected}");
    // Every column says yes somewhere, or its list was lost.
    for column in 3..=9 {
        assert!(
            expected.lines().any(|line| line.split(" | ").nth(column - 1).is_some_and(|cell| cell.contains("yes"))),
            "column {column}"
        );
    }
}
