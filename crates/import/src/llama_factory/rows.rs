//! LLaMA-Factory's data sets: names that `dataset_info.json` describes.
use super::table::listed;
use crate::data_set::{DataSet, files, one_or_list};
use crate::import::Import;
use crate::names::MEDIA;
use crate::source_file::beside;
use serde_json::Value as Json;
use std::path::PathBuf;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::Node;

/// The most bytes of a `dataset_info.json`.
const MAX_BYTES: u64 = 8 << 20;

/// Imports training and validation rows.
pub(super) fn sets(import: &mut Import, pretrains: bool) {
    let folder = import.word("dataset_dir").unwrap_or_else(|| "data".to_owned());
    let known = info(import, &folder);
    if import.get(&["dataset_dir"]).is_some() {
        import.not_needed("dataset_dir", "it is part of the paths of the data sets");
    }
    for (key, ours) in [("dataset", "data.train_path"), ("eval_dataset", "data.val_path")] {
        let Some((_, node)) = import.get(&[key]) else { continue };
        let Node::List(names) = listed(&node) else { continue };
        let mut sets = Vec::new();
        let mut missing = Vec::new();
        for name in names {
            let Node::Str(name) = name else { continue };
            match known
                .as_ref()
                .ok()
                .and_then(|(folder, json)| one(import, key, &name, folder, &json[&name], pretrains))
            {
                Some(set) => sets.push(set),
                None => missing.push(name),
            }
        }
        if sets.is_empty() || !missing.is_empty() {
            let what = match &known {
                Ok(_) => "not usable from its dataset_info.json",
                Err(error) => error.message(),
            };
            import.unsupported(key, &format!("{}: {what}; set {ours} to the files", missing.join(", ")));
        } else if key == "dataset" {
            train(import, sets);
        } else if sets.iter().any(|set| set.on_hub) {
            import.unsupported(key, "validation rows of the hub: set data.val_path to their files");
        } else {
            import.put(key, ours, Node::List(files(sets)), "");
        }
    }
    for key in ["mix_strategy", "interleave_probs"] {
        if import.get(&[key]).is_some() && import.written("data.datasets").is_none() {
            import.not_needed(key, "there is one data set, or every row of each is used once");
        }
    }
}

/// Reads `dataset_info.json`, and returns its folder too. `folder` is `dataset_dir`, relative to the current directory or else
/// to the configuration's folder. The error says why there is no such file.
fn info(import: &Import, folder: &str) -> Result<(PathBuf, Json)> {
    let none = || Error::config("there is no dataset_info.json");
    let folder = beside(&import.path, folder).filter(|folder| folder.join("dataset_info.json").is_file());
    let folder = folder.or_else(|| import.path.parent().map(PathBuf::from)).ok_or_else(none)?;
    let path = folder.join("dataset_info.json");
    if !path.is_file() {
        return Err(none());
    }
    let text = tunesmith_base::files::read_text(&path, MAX_BYTES)
        .map_err(|error| Error::config(path.display().to_string()).caused_by(error))?;
    let json = serde_json::from_str(&text)
        .map_err(|error| Error::config(format!("{}: malformed JSON", path.display())).caused_by(error))?;
    Ok((folder, json))
}

/// Templates of models whose processor sizes images by their number of pixels.
const SIZED_BY_PIXELS: [&str; 6] =
    ["qwen2_vl", "qwen3_vl", "qwen3_vl_nothink", "qwen3_5", "qwen3_5_nothink", "qwen3_6"];

fn one(
    import: &mut Import,
    key: &str,
    name: &str,
    folder: &std::path::Path,
    json: &Json,
    pretrains: bool,
) -> Option<DataSet> {
    let text = |field: &str| json[field].as_str().filter(|text| !text.is_empty());
    if json["ranking"].as_bool() == Some(true) {
        import.unsupported(&format!("{key}.{name}"), "pairs of a better and a worse answer");
        return None;
    }
    let (place, hub) = match (text("file_name"), text("hf_hub_url")) {
        (Some(file), _) => {
            (vec![("path".to_owned(), Node::Str(folder.join(file).to_string_lossy().into_owned()))], false)
        }
        (None, Some(repository)) => {
            let mut place = vec![("name".to_owned(), Node::Str(repository.to_owned()))];
            for (theirs, ours) in [("subset", "config"), ("split", "split")] {
                place.extend(text(theirs).map(|word| (ours.to_owned(), Node::Str(word.to_owned()))));
            }
            (place, true)
        }
        (None, None) => return None,
    };
    if let Some(file) = text("file_name").filter(|file| PathBuf::from(file).extension().is_some_and(|end| end == "txt"))
    {
        import.unsupported(
            &format!("{key}.{name}.file_name"),
            &format!("{file}: make rows of it, one {{\"text\": …}} a line"),
        );
        return None;
    }
    for media in ["videos", "audios"] {
        if !json["columns"][media].is_null() {
            import.unsupported(&format!("{key}.{name}.columns.{media}"), MEDIA);
            return None;
        }
    }
    let sized_by_pixels = import.word("template").is_some_and(|name| SIZED_BY_PIXELS.contains(&name.as_str()));
    if sized_by_pixels && !json["columns"]["images"].is_null() && import.written("vision.max_pixels").is_none() {
        let why = "its default for image_max_pixels; the model's own limit may take many more tokens";
        import.default("vision.max_pixels", Node::Int(768 * 768), why);
    }
    if json["columns"]["images"].as_str().is_some_and(|column| !["images", "image"].contains(&column)) {
        import.unsupported(&format!("{key}.{name}.columns.images"), "rename the field to images");
    }
    if !json["num_samples"].is_null() {
        import.unsupported(&format!("{key}.{name}.num_samples"), "data.max_rows limits every source");
    }
    Some(DataSet { place, on_hub: hub, format: form(import, key, name, json, pretrains) })
}

/// Our format for a data set, and the names of its columns.
fn form(import: &mut Import, key: &str, name: &str, json: &Json, pretrains: bool) -> &'static str {
    let conversations = json["formatting"].as_str() == Some("sharegpt");
    let column = |field: &str, usual: &str| json["columns"][field].as_str().unwrap_or(usual).to_owned();
    let tag = |field: &str, usual: &str| json["tags"][field].as_str().unwrap_or(usual).to_owned();
    if pretrains {
        return if column("prompt", "text") == "text" { "text" } else { unknown_fields(import, key, name, "columns") };
    }
    if !conversations {
        let usual = [("prompt", "instruction"), ("query", "input"), ("response", "output")];
        if usual.iter().any(|(field, known)| column(field, known) != *known && !json["columns"].is_null()) {
            // With the format `auto`, rows with these names of questions and answers are recognized.
            let answers = ["assistant", "answer", "response", "target", "output"];
            let questions = ["user", "question", "prompt", "input", "instruction", "query"];
            let known = answers.contains(&&*column("response", "output"))
                && questions.contains(&&*column("prompt", "instruction"))
                && json["columns"]["query"].is_null();
            return if known { "auto" } else { unknown_fields(import, key, name, "columns") };
        }
        for field in ["history", "system"] {
            if column(field, field) != field {
                import.unsupported(&format!("{key}.{name}.columns.{field}"), &format!("rename the field to {field}"));
            }
        }
        // Rows with and without earlier turns may be mixed, so `auto` decides for each row.
        return if column("history", "") == "history" { "auto" } else { "alpaca" };
    }
    match (&*column("messages", "conversations"), &*tag("role_tag", "from"), &*tag("content_tag", "value")) {
        ("conversations", "from", "value") => "sharegpt",
        ("messages", "role", "content") => "messages",
        _ => unknown_fields(import, key, name, "columns and tags"),
    }
}

fn unknown_fields(import: &mut Import, key: &str, name: &str, what: &str) -> &'static str {
    import.unsupported(&format!("{key}.{name}.{what}"), "rename the fields in the rows");
    "auto"
}

/// Writes the training data: as paths, or as a mix in `data.datasets`.
fn train(import: &mut Import, sets: Vec<DataSet>) {
    let mixes = import.word("mix_strategy").filter(|word| word != "concat" && sets.len() > 1);
    let format = sets.first().map_or("auto", |set| set.format);
    let alike = sets.iter().all(|set| set.format == format);
    // LLaMA-Factory applies `max_samples` to each set. `data.max_rows` applies to each source, so each set becomes one.
    let limited = sets.len() > 1 && import.get(&["max_samples"]).is_some();
    if !alike || limited || mixes.is_some() || sets.iter().any(|set| set.on_hub) {
        let weights = match import.get(&["interleave_probs"]).map(|(_, node)| listed(&node)) {
            Some(Node::List(items)) => items,
            _ => Vec::new(),
        };
        let items = sets.into_iter().enumerate().map(|(index, set)| {
            let mut entries = set.entry(!alike);
            if mixes.is_some() {
                let weight = weights.get(index).map_or(1.0, number);
                entries.push(("weight".to_owned(), Node::Float(weight)));
            }
            Node::Map(entries)
        });
        import.put("dataset", "data.datasets", Node::List(items.collect()), "as dataset_info.json explains them");
        if let Some(strategy) = mixes {
            import.put("mix_strategy", "data.mix_strategy", Node::Str(strategy), "");
            if import.get(&["interleave_probs"]).is_some() {
                import.not_needed("interleave_probs", "in the weights of data.datasets");
            }
        }
    } else {
        import.put("dataset", "data.train_path", one_or_list(files(sets)), "as dataset_info.json explains it");
    }
    if alike && format != "auto" {
        import.default("data.format", Node::Str(format.to_owned()), "the form in dataset_info.json");
    }
}

fn number(node: &Node) -> f64 {
    match node {
        Node::Int(number) => *number as f64,
        Node::Float(number) => *number,
        Node::Str(text) => text.parse().unwrap_or(1.0),
        _ => 1.0,
    }
}
