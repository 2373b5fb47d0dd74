//! ms-swift's data sets: `[hf::|ms::]NAME_OR_PATH[:SUBSET][#COUNT]`.
use crate::data_set::{DataSet, files, one_or_list};
use crate::import::Import;
use crate::names;
use crate::nodes::texts;
use crate::source_file::beside;
use tunesmith_config::{Node, is_hub_name};

/// A data set, and how many of its rows are asked for.
struct Asked {
    set: DataSet,
    rows: Option<i128>,
}

/// Imports training and validation rows. Returns whether a share of the training rows is held out.
pub(super) fn sets(import: &mut Import) -> bool {
    let training = listed(import, "dataset");
    let validation = listed(import, "val_dataset");
    let counts: Vec<Option<i128>> = training.iter().map(|asked| asked.rows).collect();
    if let Some(first) = counts.first().copied().flatten() {
        if counts.iter().all(|rows| *rows == Some(first)) {
            import.default("data.max_rows", Node::Int(first), "the first rows of each set, there drawn at random");
        } else {
            import.unsupported("dataset.#", "other numbers of rows for each set: data.max_rows limits every source");
        }
    } else if counts.iter().any(Option::is_some) {
        import.unsupported("dataset.#", "a number of rows for some sets: data.max_rows limits every source");
    }
    if !training.is_empty() {
        train(import, training.into_iter().map(|asked| asked.set).collect());
    }
    if validation.iter().any(|asked| asked.set.on_hub) {
        import.unsupported("val_dataset", "validation rows of the hub: set data.val_path to their files");
    } else if !validation.is_empty() {
        if validation.iter().any(|asked| asked.rows.is_some()) {
            import.unsupported("val_dataset.#", "data.max_rows limits every source");
        }
        let paths = files(validation.into_iter().map(|asked| asked.set).collect());
        import.put("val_dataset", "data.val_path", Node::List(paths), "");
    }
    for key in ["interleave_prob", "stopping_strategy"] {
        if import.get(&[key]).is_some() && import.written("data.mix_strategy").is_none() {
            import.not_needed(key, "there is one data set, or every row of each is used once");
        }
    }
    if import.written("data.val_path").is_some() {
        if import.get(&["split_dataset_ratio"]).is_some() {
            import.not_needed("split_dataset_ratio", "val_dataset has the validation rows");
        }
        return false;
    }
    if import.word("eval_strategy").as_deref() == Some("no") && import.get(&["split_dataset_ratio"]).is_some() {
        import.not_needed("split_dataset_ratio", "nothing is validated, so no row is held out");
        return false;
    }
    names::validation(import, "split_dataset_ratio")
}

fn listed(import: &mut Import, key: &str) -> Vec<Asked> {
    let Some((_, node)) = import.get(&[key]) else { return Vec::new() };
    let names = texts(&node);
    let mut sets = Vec::new();
    for name in &names {
        match one(import, key, name) {
            Some(asked) => sets.push(asked),
            None => import.unsupported(&format!("{key}.{name}"), "neither a file here nor a name on the hub"),
        }
    }
    if sets.len() < names.len() || sets.is_empty() {
        import.unsupported(key, "set data.train_path or data.datasets to the rows");
        return Vec::new();
    }
    sets
}

fn one(import: &mut Import, key: &str, text: &str) -> Option<Asked> {
    let exists = |import: &Import, name: &str| beside(&import.path, name).is_some();
    let local = |name: &str, rows| Asked {
        set: DataSet { place: vec![("path".to_owned(), Node::Str(name.to_owned()))], on_hub: false, format: "auto" },
        rows,
    };
    if exists(import, text) {
        return Some(local(text, None));
    }
    let (hub, rest) = match text.split_once("::") {
        Some((hub, rest)) => (Some(hub.to_lowercase()), rest),
        None => (None, text),
    };
    let (rest, rows) = match rest.rsplit_once('#') {
        Some((rest, rows)) => (rest.trim(), Some(rows.trim().parse::<i128>().ok().filter(|rows| *rows > 0)?)),
        None => (rest.trim(), None),
    };
    let is_file = |name: &str| {
        name.starts_with(['.', '/'])
            || [".jsonl", ".json", ".csv", ".parquet", ".arrow", ".tsv", ".gz", ".zst"]
                .iter()
                .any(|end| name.ends_with(end))
    };
    if exists(import, rest) || is_file(rest) {
        return Some(local(rest, rows));
    }
    let (name, subset) = rest.split_once(':').unwrap_or((rest, ""));
    if !is_hub_name(name) || subset.contains('/') {
        return None;
    }
    if hub.as_deref() != Some("hf") && !import.is_on("use_hf") {
        let why = "a name of ModelScope: see whether the hub has it, in which form its rows are";
        import.changed(&format!("{key}.{name}"), "", why);
    }
    let mut place = vec![("name".to_owned(), Node::Str(name.to_owned()))];
    if !["", "default", "all"].contains(&subset) {
        place.push(("config".to_owned(), Node::Str(subset.to_owned())));
    }
    Some(Asked { set: DataSet { place, on_hub: true, format: "auto" }, rows })
}

/// Writes the training rows: as paths, or as a mix in `data.datasets`.
fn train(import: &mut Import, sets: Vec<DataSet>) {
    let weights = match import.get(&["interleave_prob"]) {
        Some((_, Node::List(items))) if sets.len() > 1 && items.len() == sets.len() => Some(items),
        _ => None,
    };
    let limited = sets.len() > 1 && import.written("data.max_rows").is_some();
    if weights.is_none() && !limited && !sets.iter().any(|set| set.on_hub) {
        return import.put("dataset", "data.train_path", one_or_list(files(sets)), "");
    }
    let items = sets.into_iter().enumerate().map(|(index, set)| {
        let mut entries = set.entry(false);
        if let Some(weight) = weights.as_ref().and_then(|weights| weights.get(index)) {
            entries.push(("weight".to_owned(), weight.clone()));
        }
        Node::Map(entries)
    });
    import.put("dataset", "data.datasets", Node::List(items.collect()), "");
    if weights.is_some() {
        import.not_needed("interleave_prob", "in the weights of data.datasets");
        let all = import.word("stopping_strategy").as_deref() == Some("all_exhausted");
        let word = Node::Str(if all { "interleave_over" } else { "interleave_under" }.into());
        match import.get(&["stopping_strategy"]) {
            Some((key, _)) => import.put(&key, "data.mix_strategy", word, ""),
            None => import.default("data.mix_strategy", word, "its default"),
        }
    }
}
