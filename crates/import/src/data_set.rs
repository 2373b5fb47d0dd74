//! One data set of the source, and how it is written: as paths, or as an entry of `data.datasets`.
use std::path::Path;
use tunesmith_base::registry::{COMPRESSED, EXTENSIONS};
use tunesmith_config::Node;

/// A data set that the source names.
pub(super) struct DataSet {
    /// The keys of its entry in `data.datasets`: `path` of a file, or `name` and others of a data set on the hub.
    pub place: Vec<(String, Node)>,
    pub on_hub: bool,
    /// The name of our format of its rows.
    pub format: &'static str,
}

impl DataSet {
    /// The entry of `data.datasets`, with the format if `with_format`.
    pub fn entry(self, with_format: bool) -> Vec<(String, Node)> {
        let mut entry = self.place;
        if with_format {
            entry.push(("format".to_owned(), Node::Str(self.format.to_owned())));
        }
        entry
    }
}

/// The files of data sets that are not on the hub.
pub(super) fn files(sets: Vec<DataSet>) -> Vec<Node> {
    let nodes = sets.into_iter().flat_map(|set| set.place).map(|(_, node)| node);
    nodes.flat_map(|node| if let Node::List(files) = node { files } else { vec![node] }).collect()
}

/// One path by itself, several as a list.
pub(super) fn one_or_list(mut files: Vec<Node>) -> Node {
    if files.len() == 1 { files.remove(0) } else { Node::List(files) }
}

/// Whether a name looks like that of a file. The file need not exist on this machine.
pub(super) fn is_file(path: &str) -> bool {
    let mut ends = EXTENSIONS.iter().copied().flatten().chain(COMPRESSED).chain(&["txt"]);
    path.starts_with(['.', '/']) || Path::new(path).extension().is_some_and(|end| ends.any(|known| end == *known))
}
