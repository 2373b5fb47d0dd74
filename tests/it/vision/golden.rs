//! The golden runs of models that see pictures, read.
use crate::parity::{Tensors, json as read_json, tensors};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tunesmith::data::batch::{Batch, IGNORE, ImageRows};
use tunesmith::model::Model;
use tunesmith::vision::{Pixels, Tile};

/// Pixels of a patch's side.
const PATCH: usize = 8;

pub fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/vision").join(path)
}

pub fn integers(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect()
}

/// A picture `[channels, height, width]` as an encoder with square patches of so many equal frames reads it.
fn pixels(shape: &[usize], values: &[f32], frames: usize) -> Arc<Pixels> {
    let [channels, height, width] = shape[..] else { panic!("three sizes") };
    let tile = Tile { rows: height / PATCH, columns: width / PATCH };
    let mut patches = Vec::with_capacity(frames * values.len());
    for (row, column) in (0..tile.rows).flat_map(|row| (0..tile.columns).map(move |column| (row, column))) {
        for channel in (0..channels).flat_map(|channel| std::iter::repeat_n(channel, frames)) {
            for line in 0..PATCH {
                let at = (channel * height + row * PATCH + line) * width + column * PATCH;
                patches.extend_from_slice(&values[at..at + PATCH]);
            }
        }
    }
    Arc::new(Pixels { patches, tiles: vec![tile] })
}

/// Appends a row of `run.json` to a batch.
fn push(batch: &mut Batch, run: &Value, row: &Value, pictures: &[Arc<Pixels>], rows_of: &[usize]) {
    let mut ids: Vec<u32> = integers(&row["input_ids"]).into_iter().map(|id| id as u32).collect();
    let mut labels: Vec<i32> = integers(&row["labels"]).into_iter().map(|label| label as i32).collect();
    let images: Vec<usize> = integers(&row["images"]).into_iter().map(|at| at as usize).collect();
    let start = batch.tokens.len();
    let mut places = Vec::new();
    if run["prefix"] == true {
        let rows_of = rows_of[images[0]];
        places.push(0..rows_of);
        ids.splice(0..0, vec![0; rows_of]);
        labels.splice(0..0, vec![IGNORE; rows_of]);
    } else {
        let image = run["image_token"].as_u64().unwrap() as u32;
        let mut at = 0;
        while at < ids.len() {
            if ids[at] == image {
                let rows_of = rows_of[images[places.len()]];
                places.push(at..at + rows_of);
                at += rows_of;
            } else {
                at += 1;
            }
        }
    }
    assert_eq!(places.len(), images.len());
    for (place, picture) in places.into_iter().zip(images) {
        let rows = ImageRows { runs: vec![place], pixels: Arc::clone(&pictures[picture]) };
        batch.images.push(rows.moved(start));
    }
    if batch.cu_seqlens.is_empty() {
        batch.cu_seqlens.push(0);
    }
    batch.push(&ids, &labels);
}

/// A golden run: its rows, and the pictures among them.
pub struct Run {
    pub json: Value,
    pictures: Vec<Arc<Pixels>>,
    /// Rows of the decoder that each picture takes.
    pub rows_of: Vec<usize>,
    pub forward: Tensors,
}

impl Run {
    pub fn read(name: &str, model: &Model) -> Self {
        let forward = tensors(&golden(name).join("forward.safetensors"));
        let vision = model.arch.vision.as_ref().unwrap();
        let frames = vision.encoder.frames.unwrap_or(1);
        let pictures = if let Some((shape, values)) = forward.get("pixel_values") {
            let of_one: usize = shape[1..].iter().product();
            values.chunks_exact(of_one).map(|one| pixels(&shape[1..], one, frames)).collect()
        } else {
            let names = (0..).map(|number| format!("pixel_values.{number}"));
            let stored = names.map_while(|name| forward.get(&name));
            stored.map(|(shape, values)| pixels(shape, values, frames)).collect::<Vec<_>>()
        };
        let tiles = |picture: &Arc<Pixels>| vision.rows(picture.tiles.iter().map(|tile| (tile.rows, tile.columns)));
        let rows_of = pictures.iter().map(tiles).collect();
        Self { json: read_json(&golden(&format!("{name}/run.json"))), pictures, rows_of, forward }
    }

    pub fn batch(&self, rows: &[Value]) -> Batch {
        let mut batch = Batch::default();
        for row in rows {
            push(&mut batch, &self.json, row, &self.pictures, &self.rows_of);
        }
        batch
    }

    pub fn rows(&self) -> &[Value] {
        self.json["data"].as_array().unwrap()
    }
}
