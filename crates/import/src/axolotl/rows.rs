//! Axolotl's `datasets`: each entry's path, type and fields.
use crate::data_set::{DataSet, files, is_file, one_or_list};
use crate::import::Import;
use crate::source_file::beside;
use tunesmith_config::Node;

const OWN_TEMPLATE: &str = "these rows get the model's chat template here, there a prompt text of their own";
/// The name of our format of raw text.
const TEXT: &str = "text";

/// Which kinds of rows the training data holds.
#[derive(Default)]
pub(super) struct Kinds {
    /// Raw text. Axolotl splits it at `sequence_len`, whatever `excess_length_strategy` says.
    pub text: bool,
    /// Chats, instructions and all other rows.
    pub others: bool,
}

impl Kinds {
    fn see(&mut self, sets: &[DataSet]) {
        self.text |= sets.iter().any(|set| set.format == TEXT);
        self.others |= sets.iter().any(|set| set.format != TEXT);
    }
}

/// Imports training and validation rows.
pub(super) fn sets(import: &mut Import) -> Kinds {
    let mut kinds = Kinds::default();
    if let Some((key, _)) = import.get(&["pretraining_dataset"]) {
        let plain = listed(import, &key, Some(TEXT));
        kinds.see(&plain);
        place(import, &key, "data.train_path", plain, "raw text, every token is learned");
        import.default("data.loss_on", Node::Str("all".into()), "pretraining_dataset");
    }
    if import.get(&["datasets"]).is_some() {
        let sets = listed(import, "datasets", None);
        kinds.see(&sets);
        place(import, "datasets", "data.train_path", sets, "");
    }
    if import.get(&["test_datasets"]).is_some() {
        let sets = listed(import, "test_datasets", None);
        if sets.iter().any(|set| set.on_hub) {
            import.unsupported("test_datasets", "validation rows of the hub: set data.val_path to their files");
        } else {
            place(import, "test_datasets", "data.val_path", sets, "");
        }
    }
    for key in ["dataset_shard_num", "dataset_shard_idx"] {
        if import.get(&[key]).is_some() {
            import.unsupported(key, "parts of a data set: see data.max_rows");
        }
    }
    kinds
}

/// The entries of a list of data sets, each in our format.
fn listed(import: &mut Import, key: &str, format: Option<&'static str>) -> Vec<DataSet> {
    let items = match import.get(&[key]) {
        Some((_, Node::List(items))) => items,
        Some((_, node)) => vec![node],
        None => Vec::new(),
    };
    let mut sets = Vec::new();
    for (number, item) in items.into_iter().enumerate() {
        let entries = match item {
            Node::Map(entries) => entries,
            path @ Node::Str(_) => vec![("path".to_owned(), path)],
            _ => {
                import.unsupported(&format!("{key}[{number}]"), "expected a mapping with a path");
                continue;
            }
        };
        if let Some(set) = one(import, &format!("{key}[{number}]"), &entries, format) {
            sets.push(set);
        }
    }
    sets
}

fn one(import: &mut Import, at: &str, entries: &[(String, Node)], format: Option<&'static str>) -> Option<DataSet> {
    let get = |key: &str| entries.iter().find(|(name, node)| name == key && *node != Node::Null).map(|(_, node)| node);
    let Some(Node::Str(path)) = get("path") else {
        import.unsupported(at, "no path");
        return None;
    };
    let kinds = ["json", "csv", "parquet", "arrow", "text"];
    let files = get("data_files");
    let local =
        files.is_some() && kinds.contains(&path.as_str()) || beside(&import.path, path).is_some() || is_file(path);
    let hub = !local && tunesmith_config::is_hub_name(path);
    let mut place = Vec::new();
    if hub {
        place.push(("name".to_owned(), Node::Str(path.clone())));
        for (theirs, ours) in [("name", "config"), ("split", "split"), ("revision", "revision")] {
            if let Some(node) = get(theirs) {
                place.push((ours.to_owned(), node.clone()));
            }
        }
        if files.is_some() {
            import.unsupported(
                &format!("{at}.data_files"),
                "name the file: data.train_path: hf://datasets/owner/name/file",
            );
        }
    } else {
        place.push(("path".to_owned(), files.cloned().unwrap_or_else(|| Node::Str(path.clone()))));
    }
    let format = format.unwrap_or_else(|| form(import, at, get("type"), get("field_messages")));
    for (key, node) in entries.iter().filter(|(_, node)| *node != Node::Null) {
        let from = format!("{at}.{key}");
        match key.as_str() {
            "path" | "data_files" | "type" | "field_messages" => {}
            "name" | "revision" if hub => {}
            "split" if hub && !matches!(node, Node::Str(split) if split.contains('[')) => {}
            "split" if hub => import.unsupported(&from, "a slice of a split: see data.max_rows"),
            "split" => import.not_needed(&from, "a file has all of its rows"),
            "ds_type" | "name" | "trust_remote_code" => import.not_needed(&from, "the file's name says it"),
            "shards" | "shards_idx" | "preprocess_shards" => {
                import.unsupported(&from, "parts of a data set: see data.max_rows");
            }
            "message_property_mappings" | "message_field_role" | "message_field_content" => fields(import, &from, node),
            "field" if matches!(node, Node::Str(name) if name == "text") => {
                import.not_needed(&from, "the field has this name already");
            }
            "train_on_eos" if matches!(node, Node::Str(word) if word == "turn") => {
                import.not_needed(&from, "the end of each learned turn is learned");
            }
            "roles_to_train" if matches!(node, Node::List(roles) if roles.iter().all(|role| matches!(role, Node::Str(word) if word == "assistant" || word == "gpt"))) =>
            {
                import.not_needed(&from, "data.loss_on: assistant does this");
            }
            "message_field_training" if matches!(node, Node::Str(word) if ["training", "train", "weight"].contains(&word.as_str())) =>
            {
                import.not_needed(&from, "read by its name");
            }
            "chat_template" => {
                import.changed(&from, "", "one template for all rows: data.chat_template or data.template_path");
            }
            "roles" if known_roles(node) => import.not_needed(&from, "human, gpt and the like are known"),
            "roles" => import.unsupported(&from, "rename the roles in the rows to user, assistant, system and tool"),
            "train_on_eos" | "train_on_eot" => {
                import.unsupported(&from, "the end of each learned turn is learned, no other");
            }
            "conversation" => import.unsupported(&from, "the template is the model's own, or data.chat_template"),
            word if word.starts_with("field") || word.starts_with("message_") => {
                import.unsupported(&from, "rename the fields in the rows");
            }
            _ => import.unsupported(&from, "unknown to this import"),
        }
    }
    Some(DataSet { place, on_hub: hub, format })
}

/// Whether a mapping of roles contains only the names of ShareGPT or `OpenAI`, which our formats know already.
fn known_roles(node: &Node) -> bool {
    let Node::Map(roles) = node else { return false };
    roles.iter().all(|(role, names)| {
        let known: &[&str] = match role.as_str() {
            "user" => &["human", "user"],
            "assistant" => &["gpt", "chatgpt", "assistant", "model", "bing", "bard"],
            "system" => &["system"],
            "tool" => &["tool", "function_response", "observation"],
            _ => return false,
        };
        let is_known = |name: &Node| matches!(name, Node::Str(word) if known.contains(&word.as_str()));
        match names {
            Node::List(names) => names.iter().all(is_known),
            name => is_known(name),
        }
    })
}

/// Imports the field names of a message: the usual ones need no setting, others are not supported.
fn fields(import: &mut Import, from: &str, node: &Node) {
    let known =
        |name: &Node| matches!(name, Node::Str(word) if ["role", "content", "from", "value"].contains(&word.as_str()));
    let usual = match node {
        Node::Map(pairs) => pairs.iter().all(|(_, name)| known(name)),
        other => known(other),
    };
    if usual {
        import.not_needed(from, "known by these names");
    } else {
        import.unsupported(from, "a message has role and content, or from and value");
    }
}

/// Our format for Axolotl's `type`.
fn form(import: &mut Import, at: &str, kind: Option<&Node>, messages: Option<&Node>) -> &'static str {
    let from = format!("{at}.type");
    let word = match kind {
        Some(Node::Str(word)) => word.as_str(),
        Some(Node::Map(_)) => {
            import.unsupported(&from, "a prompt of one's own: write the rows as {prompt, completion}");
            return "auto";
        }
        _ => {
            import.not_needed(&from, "recognised by the fields of the rows");
            return "auto";
        }
    };
    let messages = match messages {
        Some(Node::Str(field)) => field.as_str(),
        _ => "messages",
    };
    match word.split(['.', ':']).next().unwrap_or_default() {
        "alpaca" => {
            import.changed(&from, "", OWN_TEMPLATE);
            "alpaca"
        }
        "sharegpt" => "sharegpt",
        "chat_template" if messages == "messages" => "messages",
        "chat_template" if messages == "conversations" => "sharegpt",
        "chat_template" => {
            import.unsupported(
                &format!("{at}.field_messages"),
                "the messages of a row are called messages or conversations here",
            );
            "auto"
        }
        "completion" | "pretrain" => TEXT,
        "input_output" => {
            import.unsupported(&from, "segments with labels: write the rows as {input_ids, labels}");
            "auto"
        }
        "context_qa" | "gpteacher" | "oasst" | "reflection" | "explainchoice" | "concisechoice" | "summarizetldr"
        | "alpaca_chat" | "alpaca_w_system" | "alpaca_instruct" => {
            import.changed(&from, "", OWN_TEMPLATE);
            "auto"
        }
        _ => {
            import.unsupported(&from, "unknown; the format is recognised by the fields of the rows");
            "auto"
        }
    }
}

/// Writes the data sets: files of one format as a list of paths, everything else as `data.datasets`.
fn place(import: &mut Import, key: &str, ours: &str, sets: Vec<DataSet>, why: &str) {
    let Some(first) = sets.first().map(|set| set.format) else {
        return import.unsupported(key, "no data set in it");
    };
    let alike = sets.iter().all(|set| set.format == first);
    let train = ours == "data.train_path";
    if !sets.iter().any(|set| set.on_hub) && (alike || !train) {
        import.put(key, ours, one_or_list(files(sets)), why);
    } else {
        let items = sets.into_iter().map(|set| Node::Map(set.entry(!alike)));
        import.put(key, "data.datasets", Node::List(items.collect()), why);
    }
    if train && alike && first != "auto" {
        import.default("data.format", Node::Str(first.to_owned()), "the type of its data sets");
    }
}
