//! Whether the head of a multimodal checkpoint is tied to its embedding. Transformers ties them where `tie_word_embeddings` says so,
//! unless the files hold both tensors and they differ. Mistral Small 3.1 is such a case: the key is absent, its class assumes a
//! tie, and the head differs.
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::Deserialize;

use super::wrapped::plain_name;

/// The most bytes of a safetensors header or index that are read.
const HEADER_BYTES: u64 = 100_000_000;
/// Bytes of the two tensors that are compared at a time.
const CHUNK_BYTES: u64 = 1 << 20;

/// A tensor's entry in the header of a safetensors file; offsets count from the end of the header.
#[derive(PartialEq, Deserialize)]
struct Stored {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Whether the head is tied; `flag` is what `config.json` says. A file that cannot be read counts as untied here: opening the
/// weights reports the error.
pub(super) fn ties(dir: &Path, flag: bool) -> bool {
    let Some([head, embedding]) = both(dir) else { return flag };
    flag && is_copy(dir, &head, &embedding)
}

/// File and tensor name of the head and of the embedding, if the checkpoint holds both.
fn both(dir: &Path) -> Option<[(String, String); 2]> {
    let single = "model.safetensors";
    let map: BTreeMap<String, String> = if dir.join(single).is_file() {
        header(&dir.join(single))?.1.into_keys().map(|name| (name, single.to_owned())).collect()
    } else {
        let text = read(&dir.join("model.safetensors.index.json"))?;
        serde_json::from_slice::<Index>(&text).ok()?.weight_map
    };
    let find = |wanted: &str| {
        let found = map.iter().find(|(name, _)| plain_name(name) == wanted);
        found.map(|(name, file)| (file.clone(), name.clone()))
    };
    Some([find("lm_head.weight")?, find("model.embed_tokens.weight")?])
}

fn is_copy(dir: &Path, head: &(String, String), embedding: &(String, String)) -> bool {
    let open = |(file, name): &(String, String)| {
        let path = dir.join(file);
        let (start, mut tensors) = header(&path)?;
        let Stored { dtype, shape, data_offsets: (begin, end) } = tensors.remove(name)?;
        start.checked_add(end)?;
        Some((open(&path)?, dtype, shape, start.checked_add(begin)?, end.checked_sub(begin)?))
    };
    let (Some(head), Some(embedding)) = (open(head), open(embedding)) else { return false };
    if (&head.1, &head.2, head.4) != (&embedding.1, &embedding.2, embedding.4) {
        return false;
    }
    let chunk = |file: &File, start: u64, at: u64, bytes: &mut [u8]| file.read_exact_at(bytes, start + at).is_ok();
    let mut buffers = [vec![0; CHUNK_BYTES as usize], vec![0; CHUNK_BYTES as usize]];
    let mut at = 0;
    while at < head.4 {
        let [left, right] = &mut buffers;
        let count = CHUNK_BYTES.min(head.4 - at) as usize;
        let (left, right) = (&mut left[..count], &mut right[..count]);
        if !chunk(&head.0, head.3, at, left) || !chunk(&embedding.0, embedding.3, at, right) || left != right {
            return false;
        }
        at += count as u64;
    }
    true
}

/// The offset of the first tensor's bytes in a safetensors file, and its tensors.
fn header(path: &Path) -> Option<(u64, BTreeMap<String, Stored>)> {
    let mut file = open(path)?;
    let mut length = [0; 8];
    file.read_exact(&mut length).ok()?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_BYTES {
        return None;
    }
    let mut text = Vec::new();
    file.take(length).read_to_end(&mut text).ok()?;
    let all: BTreeMap<String, serde_json::Value> = serde_json::from_slice(&text).ok()?;
    let tensors = all.into_iter().filter_map(|(name, value)| Some((name, serde_json::from_value(value).ok()?)));
    Some((8 + length, tensors.collect()))
}

fn read(path: &Path) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    open(path)?.take(HEADER_BYTES).read_to_end(&mut text).ok()?;
    Some(text)
}

/// Opens regular files only: a pipe would never end.
fn open(path: &Path) -> Option<File> {
    tunesmith_base::files::open_member(path).ok()
}
