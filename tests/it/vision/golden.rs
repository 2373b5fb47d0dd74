//! Reads the golden runs of models that read images.
use crate::parity::{Tensors, json as read_json, tensors};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tunesmith::config::vision::{Joined, VisionArch, World, WorldSettings};
use tunesmith::config::{ProjectionArchitecture, WorldProjection};
use tunesmith::data::batch::{Batch, IGNORE, ImageRows};
use tunesmith::model::Model;
use tunesmith::vision::{Pixels, Tile};

/// Pixels of a patch's side.
const PATCH: usize = 8;

pub fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/vision").join(path)
}

/// The tensors of a run that no picture comes through.
pub fn untrained(name: &str) -> Vec<String> {
    let run = read_json(&golden(&format!("{name}/run.json")));
    run["untrained"].as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned()).collect()
}

pub fn integers(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect()
}

/// A picture `[channels, height, width]` as an encoder reads it whose patches are `[row, column, channel]`.
fn channels_last(shape: &[usize], values: &[f32]) -> Arc<Pixels> {
    let [channels, height, width] = shape[..] else { panic!("three sizes") };
    let tile = Tile { rows: height / PATCH, columns: width / PATCH };
    let mut patches = Vec::with_capacity(values.len());
    for (row, column) in (0..tile.rows).flat_map(|row| (0..tile.columns).map(move |column| (row, column))) {
        for (down, across) in (0..PATCH).flat_map(|down| (0..PATCH).map(move |across| (down, across))) {
            let at = (row * PATCH + down) * width + column * PATCH + across;
            patches.extend((0..channels).map(|channel| values[channel * height * width + at]));
        }
    }
    Arc::new(Pixels { patches, tiles: vec![tile], joined: None, world: false })
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
    Arc::new(Pixels { patches, tiles: vec![tile], joined: None, world: false })
}

/// The first picture of an encoder's golden.
pub fn picture_of_encoder(name: &str) -> Arc<Pixels> {
    let (shape, values) = &tensors(&golden(name).join("features.safetensors"))["pixel_values"];
    let of_one: usize = shape[1..].iter().product();
    pixels(&shape[1..], &values[..of_one], 1)
}

/// Tiles `[tiles, channels, height, width]` of a picture of so many pixels down and across.
fn tiles(shape: &[usize], values: &[f32], joined: Option<Joined>) -> Arc<Pixels> {
    let of_one: usize = shape[1..].iter().product();
    let parts: Vec<Arc<Pixels>> = values.chunks_exact(of_one).map(|one| pixels(&shape[1..], one, 1)).collect();
    let patches = parts.iter().flat_map(|part| part.patches.clone()).collect();
    Arc::new(Pixels {
        patches,
        tiles: parts.iter().flat_map(|part| part.tiles.clone()).collect(),
        joined,
        world: false,
    })
}

/// LLaVA-OneVision's pictures, each alone and among others.
fn cut(forward: &Tensors, run: &Value, vision: &VisionArch) -> [Vec<Arc<Pixels>>; 2] {
    let any_res = vision.any_res.as_ref().unwrap();
    let sizes = run["sizes"].as_array().unwrap().iter().map(integers);
    let of = |(number, size): (usize, Vec<i64>)| {
        let (shape, values) = &forward[&format!("pixel_values.{number}")];
        let grid = any_res.grids.iter().map(|grid| grid.map(|side| side as usize / shape[2]));
        let grid = grid.filter(|grid| grid[0] * grid[1] + 1 == shape[0]);
        let size = [size[0] as u32, size[1] as u32];
        // Of the grids with so many tiles, that of the picture's shape.
        let grid = grid.max_by(|a, b| fit(size, *a).total_cmp(&fit(size, *b))).unwrap();
        let joined = Joined::of(size, grid, [shape[2] / PATCH; 2], any_res.most_tiles);
        let (whole_shape, whole) = &forward[&format!("among_others.{number}")];
        (tiles(shape, values, joined), tiles(whole_shape, whole, None))
    };
    let (alone, others) = sizes.enumerate().map(of).unzip();
    [alone, others]
}

/// How much larger a picture may become within a grid of tiles.
fn fit(size: [u32; 2], grid: [usize; 2]) -> f64 {
    (grid[0] as f64 / f64::from(size[0])).min(grid[1] as f64 / f64::from(size[1]))
}

/// Pictures `[pictures, 3, side, side]` for a second encoder: a token for each pixel.
fn worlds((shape, values): &(Vec<usize>, Vec<f32>)) -> Vec<Arc<Pixels>> {
    let [_, channels, side, _] = shape[..] else { panic!("four sizes") };
    let of = |picture: &[f32]| {
        let patches = (0..side * side).flat_map(|at| (0..channels).map(move |channel| channel * side * side + at));
        let tiles = vec![Tile { rows: side, columns: side }];
        Arc::new(Pixels { patches: patches.map(|at| picture[at]).collect(), tiles, joined: None, world: true })
    };
    values.chunks_exact(channels * side * side).map(of).collect()
}

/// The second encoder of a golden run.
pub fn world(name: &str, decoder_size: usize) -> World {
    let run = &read_json(&golden(&format!("{name}/run.json")))["world"];
    let tokens = integers(&run["tokens"]);
    let settings = WorldSettings {
        projection: if run["projection_mode"] == "channel" {
            WorldProjection::Channel
        } else {
            WorldProjection::Spatial
        },
        architecture: match run["projection_architecture"].as_str() {
            Some("mlp") => ProjectionArchitecture::Mlp,
            Some("linear") => ProjectionArchitecture::Linear,
            _ => ProjectionArchitecture::MlpNoFinalGelu,
        },
        image_size: run["side"].as_u64().unwrap() as usize,
    };
    let vae = golden(run["vae"].as_str().unwrap());
    World::open(&vae, settings, [tokens[0] as u32, tokens[1] as u32], decoder_size).unwrap()
}

/// Appends a row of `run.json` to a batch.
fn push(
    batch: &mut Batch,
    run: &Value,
    row: &Value,
    [pictures, others, worlds]: [&[Arc<Pixels>]; 3],
    rows_of: &[usize],
) {
    let mut ids: Vec<u32> = integers(&row["input_ids"]).into_iter().map(|id| id as u32).collect();
    let mut labels: Vec<i32> = integers(&row["labels"]).into_iter().map(|label| label as i32).collect();
    let images: Vec<usize> = integers(&row["images"]).into_iter().map(|at| at as usize).collect();
    let several = images.len() > 1 && !others.is_empty();
    let among = run["rows_among_others"].as_u64().filter(|_| several).map(|rows| rows as usize);
    let pictures = if several { others } else { pictures };
    let start = batch.tokens.len();
    let mut places = Vec::new();
    if run["prefix"] == true {
        let rows_of = rows_of[images[0]];
        places.push(0..rows_of);
        // The token that begins a text, where it is read beside its picture.
        let start = run["start"].as_u64().map_or(0, |id| id as u32);
        ids.splice(0..0, vec![start; rows_of]);
        labels.splice(0..0, vec![IGNORE; rows_of]);
    } else {
        let image = run["image_token"].as_u64().unwrap() as u32;
        let mut at = 0;
        while at < ids.len() {
            if ids[at] == image {
                let rows_of = among.unwrap_or_else(|| rows_of[images[places.len()]]);
                places.push(at..at + rows_of);
                at += rows_of;
            } else {
                at += 1;
            }
        }
    }
    assert_eq!(places.len(), images.len());
    if let Some(rows) = run["world"]["rows"].as_u64().map(|rows| rows as usize) {
        // Behind BOS, or in front of a picture and its caption: for each picture a token, the rows, another token.
        let prefix = run["prefix"] == true;
        for (number, &picture) in images.iter().enumerate() {
            let first = usize::from(!prefix) + 1 + number * (rows + 2);
            let runs = std::iter::once(first..first + rows).collect();
            batch.images.push(ImageRows { runs, pixels: Arc::clone(&worlds[picture]) }.moved(start));
        }
        if prefix {
            let [begin, end] = [0, 1].map(|at| integers(&run["world"]["tokens"])[at] as u32);
            ids.splice(0..0, [vec![begin; rows + 1], vec![end]].concat());
            labels.splice(0..0, vec![IGNORE; rows + 2]);
            places = places.into_iter().map(|place| place.start + rows + 2..place.end + rows + 2).collect();
        }
    }
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
    /// The same where a row shows several, if they are then shown otherwise.
    among_others: Vec<Arc<Pixels>>,
    /// The same for a second encoder.
    pub worlds: Vec<Arc<Pixels>>,
    /// Rows of the decoder that each picture takes.
    pub rows_of: Vec<usize>,
    pub forward: Tensors,
}

impl Run {
    pub fn read(name: &str, model: &Model) -> Self {
        let forward = tensors(&golden(name).join("forward.safetensors"));
        let vision = model.arch.vision.as_ref().unwrap();
        let frames = vision.encoder.frames.unwrap_or(1);
        let json = read_json(&golden(&format!("{name}/run.json")));
        let mut among_others = Vec::new();
        let pictures = if vision.any_res.is_some() {
            let [alone, others] = cut(&forward, &json, vision);
            among_others = others;
            alone
        } else if let Some((shape, values)) = forward.get("pixel_values") {
            let of_one: usize = shape[1..].iter().product();
            values.chunks_exact(of_one).map(|one| pixels(&shape[1..], one, frames)).collect()
        } else {
            let names = (0..).map(|number| format!("pixel_values.{number}"));
            let stored = names.map_while(|name| forward.get(&name));
            let last = vision.encoder.channels_last;
            let of = |(shape, values): &(Vec<usize>, Vec<f32>)| {
                if last { channels_last(shape, values) } else { pixels(shape, values, frames) }
            };
            stored.map(of).collect::<Vec<_>>()
        };
        let tiles = |picture: &Arc<Pixels>| {
            vision.rows(picture.tiles.iter().map(|tile| (tile.rows, tile.columns)), picture.joined.as_ref())
        };
        let rows_of = pictures.iter().map(tiles).collect();
        let worlds = forward.get("world_values").map(worlds).unwrap_or_default();
        Self { json, pictures, among_others, worlds, rows_of, forward }
    }

    /// Whether pictures take as many rows as Transformers' processor counts.
    pub fn check_rows(&self, name: &str) {
        if let Some(counted) = self.json["rows"].as_array() {
            let counted: Vec<usize> = counted.iter().map(|rows| rows.as_u64().unwrap() as usize).collect();
            assert_eq!(self.rows_of, counted, "{name}");
        }
    }

    pub fn batch(&self, rows: &[Value]) -> Batch {
        let mut batch = Batch::default();
        for row in rows {
            push(&mut batch, &self.json, row, [&self.pictures, &self.among_others, &self.worlds], &self.rows_of);
        }
        batch
    }

    pub fn rows(&self) -> &[Value] {
        self.json["data"].as_array().unwrap()
    }
}
