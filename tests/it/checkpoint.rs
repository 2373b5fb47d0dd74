//! Checkpoints read back bit for bit, damage of any byte is found, and death or a full disk at any operation does no harm.
mod faults;

use std::fs;
use std::path::{Path, PathBuf};

use faults::{Fault, FaultyDisk};
use serde_json::json;
use tempfile::TempDir;
use tunesmith::checkpoint::stamp::{Hashes, KernelInfo};
use tunesmith::checkpoint::{
    self, AdapterConfig, Background, Retention, Snapshot, Stamp, TrainState, Weights, newest_complete, store, verify,
};
use tunesmith::config::adapters::lora::LoraConfig;
use tunesmith::config::arch::Arch;
use tunesmith::config::{Auto, Config, TargetModules};
use tunesmith::files::disk::{Disk, RealDisk};
use tunesmith::model::params::ParamSpec;
use tunesmith::model::targets::place;
use tunesmith::model::weights::WeightFiles;
use tunesmith::optim::{AdamW, Betas, Optimizer, State};
use tunesmith::parallel::optimizer::slots;
use tunesmith::{Error, Kind};

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/a").join(path)
}

/// A small run: the adapters of two modules, with values that depend on `salt`, among them awkward ones.
struct Run {
    config: Config,
    stamp: Stamp,
    state: TrainState,
    adapter: AdapterConfig,
    specs: Vec<ParamSpec>,
    values: Vec<f32>,
    optimizer: Optimizer,
}

/// AdamW with these moments.
fn adamw(specs: &[ParamSpec], values: &[f32], moments: [&[f32]; 2]) -> Optimizer {
    let betas = Betas { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 };
    let mut optimizer = Optimizer::new(Box::new(AdamW(betas)), slots(specs), values);
    for (spec, pair) in specs.iter().zip(optimizer.tensors_mut().chunks_mut(2)) {
        for ((_, _, state), moment) in pair.iter_mut().zip(moments) {
            state.floats().write(&moment[spec.range()]);
        }
    }
    optimizer
}

fn run(step: u64, salt: f32) -> Run {
    let lora = LoraConfig { r: 2, target_modules: TargetModules::List(vec!["k_proj".into()]), ..LoraConfig::default() };
    let arch = Arch::from_dir(&golden("llama/model")).unwrap();
    let placements = place(&arch, &lora).unwrap();
    let mut specs: Vec<ParamSpec> = Vec::new();
    for (name, shape) in placements.iter().flat_map(tunesmith::model::targets::Placement::tensors) {
        let offset = specs.last().map_or(0, |spec| spec.range().end);
        specs.push(ParamSpec { name, shape, offset, decay: true, lr_scale: 1.0, vision: false });
    }
    let len = specs.last().unwrap().range().end;
    let fill = |factor: f32| -> Vec<f32> {
        let mut values: Vec<f32> = (0..len).map(|i| (i as f32 + salt) * factor).collect();
        values[..3].copy_from_slice(&[-0.0, f32::MIN_POSITIVE / 4.0, f32::MAX]);
        values
    };
    let mut config = Config::default();
    config.tuning.lora = lora;
    let adapter = AdapterConfig::of(&config.tuning, &placements, Some("base"));
    let hashes = Hashes { base_model: "b", tokenizer: "t", chat_template: "c", data: "d" };
    let stamp = Stamp::new(&config, &placements, &[], hashes, engine());
    let state = TrainState {
        step,
        optimizer_step: step,
        // Of the others, all steps were of rows with images.
        optimizer_image_step: (step == 200).then_some(150),
        epoch: 1.0 / 3.0,
        best_metric: Some(0.1 + 0.2),
        sampler: json!({"step": 7}),
        ..TrainState::default()
    };
    let optimizer = adamw(&specs, &fill(0.37), [&fill(1e-3), &fill(1e-7)]);
    Run { config, stamp, state, adapter, specs, values: fill(0.37), optimizer }
}

impl Run {
    fn snapshot(&self) -> Snapshot<'_> {
        Snapshot {
            stamp: &self.stamp,
            state: &self.state,
            weights: Weights::Adapter(&self.adapter),
            specs: &self.specs,
            values: (&self.values).into(),
            trained: None,
            optimizer: self.optimizer.tensors(),
            shared: None,
        }
    }

    /// Whether the checkpoint holds exactly this run.
    fn is_in(&self, dir: &Path) -> bool {
        let loaded = checkpoint::load(dir).unwrap();
        let nothing = || vec![f32::NAN; self.values.len()];
        let (mut values, mut optimizer) = (nothing(), adamw(&self.specs, &self.values, [&nothing(), &nothing()]));
        loaded.restore(&self.specs, &mut values, &mut optimizer, None).unwrap();
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        let moments = |optimizer: &Optimizer| -> Vec<Vec<u32>> {
            let all = optimizer.tensors().into_iter();
            all.map(|(_, _, state)| if let State::F32(values) = state { bits(&values.read()) } else { Vec::new() })
                .collect()
        };
        let counts = [self.state.optimizer_step, self.state.optimizer_image_step.unwrap_or(self.state.optimizer_step)];
        assert_eq!([optimizer.step, optimizer.image_step], counts);
        let same = bits(&values) == bits(&self.values) && moments(&optimizer) == moments(&self.optimizer);
        same && loaded.state == self.state && loaded.stamp == self.stamp
    }
}

fn entries(root: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(root).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The kernels of the machine that these checkpoints stand for.
fn engine() -> KernelInfo {
    KernelInfo { backend: "fused", simd: "avx2".into(), quantization: "none".into(), dtype: "float32".into() }
}

fn save(root: &Path, snapshot: &Snapshot<'_>) -> PathBuf {
    checkpoint::write(&RealDisk, root, snapshot, &Retention::default()).unwrap().dir
}

fn newest(root: &Path) -> Option<PathBuf> {
    newest_complete(root).unwrap().0.map(|complete| complete.dir)
}

/// A root with checkpoints of these steps.
fn root_with(steps: &[u64]) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for &step in steps {
        save(root.path(), &run(step, step as f32).snapshot());
    }
    root
}

fn assert_says(error: &Error, kind: Kind, fragments: &[&str]) {
    assert_eq!(error.kind(), kind, "{error}");
    for fragment in fragments {
        assert!(error.to_string().contains(fragment), "{fragment:?} is not in: {error}");
    }
}

#[test]
fn a_checkpoint_comes_back_to_the_bit() {
    let root = root_with(&[100, 200]);
    let (newest, damaged) = newest_complete(root.path()).unwrap();
    let newest = newest.unwrap().dir;
    assert_eq!(newest, root.path().join("checkpoint-000200"));
    assert!(damaged.is_empty());
    assert!(run(200, 200.0).is_in(&newest));
    assert!(run(100, 100.0).is_in(&root.path().join("checkpoint-000100")));
    assert_eq!(entries(root.path()), ["checkpoint-000100", "checkpoint-000200", "latest"]);
    assert_eq!(fs::read_to_string(root.path().join("latest")).unwrap(), "checkpoint-000200\n");
    assert_eq!(
        entries(&root.path().join("checkpoint-000200")),
        [
            "adapter_config.json",
            "adapter_model.safetensors",
            "backend.json",
            "manifest.json",
            "optimizer.safetensors",
            "state.json"
        ]
    );
}

#[test]
fn a_full_checkpoint_is_a_model_folder() {
    let dir = golden("qwen3/model");
    let arch = Arch::from_dir(&dir).unwrap();
    let base = WeightFiles::open(&dir, &arch.tensors()).unwrap();
    let (mut specs, mut values) = (Vec::new(), Vec::new());
    for spec in arch.tensors() {
        let (name, shape) = (spec.name.clone(), spec.shape.clone());
        specs.push(ParamSpec { name, shape, offset: values.len(), decay: true, lr_scale: 1.0, vision: false });
        values.extend(base.read(&spec.name).unwrap().1);
    }
    let zeros = vec![0.0; values.len()];
    let optimizer = adamw(&specs, &values, [&zeros, &zeros]);
    let run = run(5, 0.0);
    let root = tempfile::tempdir().unwrap();
    let snapshot = Snapshot {
        weights: Weights::Model(tunesmith::checkpoint::folder::SourceModel {
            dir: &dir,
            grown: None,
            template: None,
            own_head: None,
            wrapping: None,
            stacking: tunesmith::model::weights::Stacking::NONE,
        }),
        specs: &specs,
        values: (&values).into(),
        optimizer: optimizer.tensors(),
        ..run.snapshot()
    };
    let saved = save(root.path(), &snapshot);
    assert_eq!(Arch::from_dir(&saved).unwrap(), arch);
    let config: serde_json::Value = serde_json::from_slice(&fs::read(saved.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["dtype"], "float32", "the weights are f32 now");
    let again = WeightFiles::open(&saved, &arch.tensors()).unwrap();
    assert!(arch.tensors().iter().all(|spec| again.read(&spec.name).unwrap() == base.read(&spec.name).unwrap()));
    let mut restored = vec![f32::NAN; values.len()];
    checkpoint::load(&saved).unwrap().restore_values(&specs, &mut restored).unwrap();
    assert_eq!(restored, values);
    assert!(saved.join("generation_config.json").exists());
    assert_every_file_is_listed(&saved);
}

/// Checks that the manifest lists every file of a checkpoint with its hash. The manifest itself must be as it was written.
fn assert_every_file_is_listed(dir: &Path) {
    let manifest = verify(dir).unwrap().manifest;
    let unlisted: Vec<String> = entries(dir).into_iter().filter(|name| !manifest.lists(name)).collect();
    assert_eq!(unlisted, ["manifest.json"]);
}

#[test]
fn every_damaged_byte_is_found() {
    let root = root_with(&[1]);
    let dir = root.path().join("checkpoint-000001");
    assert_every_file_is_listed(&dir);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |limit: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as usize % limit
    };
    // Every byte of a header: JSON files are nothing else. Of the tensors' numbers a thousand in all.
    let (mut headers, mut numbers) = (0, 0);
    for name in entries(&dir) {
        let path = dir.join(&name);
        let whole = fs::read(&path).unwrap();
        let header = match name.strip_suffix(".safetensors") {
            Some(_) => 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize,
            None => whole.len(),
        };
        let places: Vec<usize> = if header < whole.len() {
            (0..500).map(|_| header + random(whole.len() - header)).chain(0..header).collect()
        } else {
            (0..header).collect()
        };
        for at in places {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 + random(255) as u8;
            fs::write(&path, &bytes).unwrap();
            let error = checkpoint::load(&dir).map(drop).expect_err(&format!("{name} byte {at}"));
            assert_eq!(error.kind(), Kind::Checkpoint, "{error}");
            *if at < header { &mut headers } else { &mut numbers } += 1;
        }
        for cut in [&whole[..whole.len() - 2], &[], &[&whole[..], b" "].concat()] {
            fs::write(&path, cut).unwrap();
            assert!(verify(&dir).is_err());
        }
        fs::remove_file(&path).unwrap();
        assert_says(&verify(&dir).map(drop).unwrap_err(), Kind::Checkpoint, &[&name, "hint"]);
        fs::write(&path, &whole).unwrap();
        verify(&dir).unwrap();
    }
    assert!(headers > 4000 && numbers == 1000, "{headers} {numbers}");
}

#[test]
fn a_damaged_newest_is_reported_and_the_one_before_is_used() {
    let root = root_with(&[100, 200, 300]);
    fs::remove_file(root.path().join("checkpoint-000300/manifest.json")).unwrap();
    let path = root.path().join("checkpoint-000200/optimizer.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    let (found, damaged) = newest_complete(root.path()).unwrap();
    assert_eq!(found.unwrap().dir, root.path().join("checkpoint-000100"));
    assert_eq!(damaged.len(), 2);
    assert_says(&damaged[0].1, Kind::Checkpoint, &["checkpoint-000300", "manifest.json"]);
    assert_says(&damaged[1].1, Kind::Checkpoint, &["optimizer.safetensors", "BLAKE3", "expected"]);
    let latest = checkpoint::load(&root.path().join("latest")).unwrap_err();
    assert_says(&latest, Kind::Checkpoint, &["checkpoint-000300", "manifest.json"]);
    assert_eq!(newest(&root.path().join("nowhere")), None);
}

#[test]
fn a_newest_one_that_has_gone_is_reported_too() {
    let root = root_with(&[100, 200]);
    fs::remove_dir_all(root.path().join("checkpoint-000200")).unwrap();
    let (found, damaged) = newest_complete(root.path()).unwrap();
    assert_eq!(found.unwrap().dir, root.path().join("checkpoint-000100"));
    assert_says(&damaged[0].1, Kind::Checkpoint, &["checkpoint-000200", "is named by", "latest", "gone"]);
    fs::remove_dir_all(root.path().join("checkpoint-000100")).unwrap();
    let (found, damaged) = newest_complete(root.path()).unwrap();
    assert!(found.is_none() && damaged.len() == 1);
    store::write_pointer(&RealDisk, root.path(), "latest", None).unwrap();
    assert!(newest_complete(root.path()).unwrap().1.is_empty());
}

#[test]
fn a_run_goes_on_from_what_a_pointer_names() {
    let root = root_with(&[100, 200]);
    let dir = root.path().join("checkpoint-000100");
    store::write_pointer(&RealDisk, root.path(), "best", Some(&dir)).unwrap();
    assert_eq!(checkpoint::load(&root.path().join("best")).unwrap().dir, dir);
    assert_eq!(checkpoint::load(&root.path().join("latest")).unwrap().state.step, 200);
    fs::write(root.path().join("notes"), "checkpoint-x\n").unwrap();
    let error = checkpoint::load(&root.path().join("notes")).unwrap_err();
    assert_says(&error, Kind::Checkpoint, &["notes", "names no checkpoint", "hint"]);
}

#[test]
fn a_copy_is_written_while_the_run_goes_on() {
    let root = root_with(&[100]);
    let mut saver = Background::new(&RealDisk);
    let first = run(200, 200.0);
    saver.reserve((&first.values).into(), None, &first.optimizer.tensors());
    for step in [200, 300, 400] {
        let mut now = run(step, step as f32);
        let before = saver.begin(root.path(), &now.snapshot(), Retention { last: Some(2), best: None }).unwrap();
        assert_eq!(before.map(|before| before.step), Some(step - 100).filter(|&step| step > 100));
        // The run goes on.
        now.values.fill(f32::NAN);
        now.optimizer.tensors_mut()[0].2.floats().on_host().fill(f32::NAN);
    }
    let written = saver.join().unwrap().unwrap();
    assert_eq!((written.step, written.dir.as_path()), (400, &*store::checkpoint_dir(root.path(), 400)));
    assert!(written.took > written.hashing);
    for step in [300, 400] {
        assert!(run(step, step as f32).is_in(&store::checkpoint_dir(root.path(), step)));
    }
    assert!(saver.join().unwrap().is_none() && saver.poll().unwrap().is_none());
    assert_eq!(entries(root.path()), ["checkpoint-000300", "checkpoint-000400", "latest"]);
}

#[test]
fn a_copy_that_cannot_be_written_is_an_error_and_the_old_ones_stand() {
    let root = root_with(&[100]);
    let disk: &'static FaultyDisk = Box::leak(Box::new(FaultyDisk::new(Fault::Full, 12)));
    let mut saver = Background::new(Box::leak(Box::new(disk)));
    let new = run(200, 2.0);
    let keep = || Retention { last: Some(1), best: None };
    assert!(saver.begin(root.path(), &new.snapshot(), keep()).unwrap().is_none());
    let error = saver.begin(root.path(), &new.snapshot(), keep()).unwrap_err();
    assert_says(&error, Kind::Io, &["cannot write", "hint: free some space"]);
    assert!(run(100, 100.0).is_in(&newest(root.path()).unwrap()));
    assert_eq!(entries(root.path()), ["checkpoint-000100", "latest"]);
}

#[test]
fn what_took_the_place_of_a_good_one_and_is_damaged_gives_it_back() {
    let root = root_with(&[100, 200]);
    let path = |name: &str| root.path().join(name);
    fs::rename(path("checkpoint-000100"), path("checkpoint-000200.old-9")).unwrap();
    fs::write(path("checkpoint-000200/optimizer.safetensors"), "x").unwrap();
    let (found, damaged) = newest_complete(root.path()).unwrap();
    assert_eq!((found.unwrap().dir, damaged.len()), (path("checkpoint-000200.old-9"), 1));
    checkpoint::clean_stale(root.path()).unwrap();
    assert_eq!(entries(root.path()), ["checkpoint-000200", "latest"]);
    verify(&path("checkpoint-000200")).unwrap();
}

#[test]
fn hostile_manifests_and_pointers_lead_nowhere() {
    let root = root_with(&[1]);
    let dir = root.path().join("checkpoint-000001");
    let sum = json!({"bytes": 1, "blake3": "00"});
    for name in ["../latest", "/etc/passwd", "a/b", "", "..", ".x"] {
        let manifest = json!({"version": 1, "files": {name: sum}});
        fs::write(dir.join("manifest.json"), manifest.to_string()).unwrap();
        assert_says(&verify(&dir).map(drop).unwrap_err(), Kind::Checkpoint, &["plain file names"]);
    }
    for text in ["", "{}", "[]", "{\"version\":2,\"files\":{}}", "{\"version\":1,\"files\":{},\"x\":1}"] {
        fs::write(dir.join("manifest.json"), text).unwrap();
        assert!(verify(&dir).is_err(), "{text}");
    }
    let root = root_with(&[1]);
    for text in ["../x\n", "/etc\n", "", "checkpoint-\n", "\u{0}"] {
        fs::write(root.path().join("latest"), text).unwrap();
        assert_eq!(store::named(root.path(), "latest"), None, "{text:?}");
    }
    fs::write(root.path().join("latest"), "checkpoint-000001").unwrap();
    assert!(store::named(root.path(), "latest").is_some());
    // A folder that is whole, but is no checkpoint of a run.
    let other = root.path().join("checkpoint-000002");
    checkpoint::publish::publish_folder(&RealDisk, &other, |staging| staging.write_json("state.json", &json!({})))
        .unwrap();
    assert_says(&checkpoint::load(&other).unwrap_err(), Kind::Checkpoint, &["no model.safetensors"]);
}

#[test]
fn tensors_of_another_run_are_refused_with_both_sides() {
    let root = root_with(&[1]);
    let loaded = checkpoint::load(&root.path().join("checkpoint-000001")).unwrap();
    let mut run = run(1, 1.0);
    let len = run.values.len();
    let mut values = vec![0.0; len];
    run.specs[1].shape = vec![4, 16];
    let error = loaded.restore(&run.specs, &mut values, &mut run.optimizer, None).unwrap_err();
    assert_says(&error, Kind::Checkpoint, &["lora_B", "is [32, 2], expected [4, 16]"]);
    let dropped = run.specs.remove(1);
    let error = loaded.restore(&run.specs, &mut values, &mut run.optimizer, None).unwrap_err();
    assert_says(&error, Kind::Checkpoint, &[&dropped.name, "has no place", "4 tensors there, 3 expected"]);
}

#[test]
fn pruning_keeps_the_last_the_best_and_the_last_good_one() {
    let root = root_with(&[100, 200, 300, 400, 500]);
    let path = |step: u64| store::checkpoint_dir(root.path(), step);
    store::write_pointer(&RealDisk, root.path(), "best", Some(&path(200))).unwrap();
    let best = store::named(root.path(), "best");
    let prune = |keep, best| store::prune(&RealDisk, root.path(), keep, best, None).unwrap();
    let removed = prune(2, best.as_deref());
    assert_eq!(removed, [path(300), path(100)]);
    assert_eq!(entries(root.path()), ["best", "checkpoint-000200", "checkpoint-000400", "checkpoint-000500", "latest"]);
    // The newest two are damaged: nothing may go.
    for step in [400, 500] {
        let file = path(step).join("adapter_model.safetensors");
        let mut bytes = fs::read(&file).unwrap();
        bytes[700] ^= 1;
        fs::write(file, bytes).unwrap();
    }
    assert!(prune(1, None).is_empty());
    assert!(prune(2, None).is_empty());
    // Half-written ones do not count as kept, and 0 keeps one.
    fs::remove_file(path(500).join("state.json")).unwrap();
    fs::remove_file(path(400).join("state.json")).unwrap();
    assert!(prune(0, None).is_empty());
    assert_eq!(newest(root.path()), Some(path(200)));
    let error = store::write_pointer(&RealDisk, root.path(), "best", Some(&path(500))).unwrap_err();
    assert_eq!(error.kind(), Kind::Checkpoint, "a pointer names complete ones only");
}

#[test]
fn leftovers_of_dead_runs_are_cleaned_and_nothing_else() {
    let root = root_with(&[100]);
    let make = |name: &str| fs::create_dir(root.path().join(name)).unwrap();
    for name in ["checkpoint-000200.tmp-1", "checkpoint-000050.del-7", "checkpoint-000100.old-7", "adapter.tmp-3"] {
        make(name);
    }
    for name in ["notes", "notes.tmp-1", "checkpoint-x.tmp-1", "checkpoint-000200.tmp-", "checkpoint-7.tmp-x"] {
        make(name);
    }
    fs::write(root.path().join("latest.tmp-5"), "x").unwrap();
    // A run died between moving the old one aside and putting the new one in place.
    fs::rename(root.path().join("checkpoint-000100"), root.path().join("checkpoint-000300.old-9")).unwrap();
    fs::create_dir(root.path().join("checkpoint-000100")).unwrap();
    let removed = checkpoint::clean_stale(root.path()).unwrap();
    assert_eq!(removed.len(), 5, "{removed:?}");
    assert_eq!(
        entries(root.path()),
        [
            "checkpoint-000100",
            "checkpoint-000200.tmp-",
            "checkpoint-000300",
            "checkpoint-7.tmp-x",
            "checkpoint-x.tmp-1",
            "latest",
            "notes",
            "notes.tmp-1"
        ]
    );
    verify(&root.path().join("checkpoint-000300")).unwrap();
}

#[test]
fn too_little_room_is_said_before_anything_is_written() {
    let root = tempfile::tempdir().unwrap();
    store::preflight(&root.path().join("not/yet/there"), 1, 1).unwrap();
    let error = store::preflight(root.path(), u64::MAX, 1).unwrap_err();
    assert_says(&error, Kind::Io, &["MiB free", "hint"]);
}

/// Does `change` in a folder with checkpoints of `steps` once for each of its operations, with the fault at that operation.
/// Calls `check` on the folder each time. Returns how many operations there were.
fn at_every_operation(
    fault: Fault,
    steps: &[u64],
    change: impl Fn(&dyn Disk, &Path) -> tunesmith::Result<()>,
    check: impl Fn(&Path, &tunesmith::Result<()>),
    errors: &mut usize,
) -> usize {
    for operation in 0.. {
        let root = root_with(steps);
        let disk: &'static FaultyDisk = Box::leak(Box::new(FaultyDisk::new(fault, operation)));
        let done = change(&disk, root.path());
        if done.is_ok() && !disk.was_hit() {
            return operation;
        }
        *errors += usize::from(done.is_err());
        check(root.path(), &done);
        // Whatever happened, the next start works.
        checkpoint::clean_stale(root.path()).unwrap();
        assert!(!entries(root.path()).iter().any(|name| name.contains(".tmp") || name.contains(".old")));
        assert!(newest(root.path()).is_some());
        save(root.path(), &run(900, 9.0).snapshot());
        assert!(run(900, 9.0).is_in(&newest(root.path()).unwrap()));
    }
    unreachable!()
}

#[test]
fn everything_is_durable_before_it_is_relied_on() {
    let root = root_with(&[200]);
    let name = root.path().file_name().unwrap().to_str().unwrap();
    let disk: &'static FaultyDisk = Box::leak(Box::new(FaultyDisk::new(Fault::Death, usize::MAX)));
    checkpoint::save_on(&disk, root.path(), &run(200, 2.0).snapshot()).unwrap();
    let log = &disk.inner.lock().unwrap().log;
    let old = format!("checkpoint-000200.old-{}", std::process::id());
    let expected = [
        ("sync", "adapter_config.json"),
        ("sync", "adapter_model.safetensors"),
        ("sync", "optimizer.safetensors"),
        ("sync", "state.json"),
        ("sync", "backend.json"),
        ("sync", "manifest.json"),
        ("sync_dir", "checkpoint-000200"),
        ("rename", &old),
        ("rename", "checkpoint-000200"),
        ("sync_dir", name),
        ("remove", &old),
        ("sync", "latest"),
        ("rename", "latest"),
        ("sync_dir", name),
    ];
    assert_eq!(log.iter().map(|(operation, name)| (*operation, name.as_str())).collect::<Vec<_>>(), expected);
}

#[test]
fn death_at_any_operation_of_a_save_leaves_a_whole_checkpoint() {
    let old = run(100, 100.0);
    let new = run(200, 2.0);
    let operations = at_every_operation(
        Fault::Death,
        &[100],
        |disk, root| checkpoint::save_on(disk, root, &new.snapshot()).map(drop),
        |root, _| {
            let newest = newest(root).expect("a complete checkpoint");
            assert!(old.is_in(&root.join("checkpoint-000100")), "the old one is untouched");
            let expected = if newest.ends_with("checkpoint-000200") { &new } else { &old };
            assert!(expected.is_in(&newest));
            verify(&store::named(root, "latest").unwrap()).expect("`latest` names a complete one at all times");
        },
        &mut 0,
    );
    assert!(operations > 30, "{operations}");
}

#[test]
fn death_while_a_checkpoint_is_replaced_leaves_one_of_the_two() {
    let (old, new) = (run(200, 200.0), run(200, 2.0));
    at_every_operation(
        Fault::Death,
        &[200],
        |disk, root| checkpoint::save_on(disk, root, &new.snapshot()).map(drop),
        |root, _| {
            let newest = newest(root).expect("a complete checkpoint");
            let loaded = if new.values[5] == checkpoint_value(&newest, &new) { &new } else { &old };
            assert!(loaded.is_in(&newest));
        },
        &mut 0,
    );
}

fn checkpoint_value(dir: &Path, run: &Run) -> f32 {
    let mut values = vec![0.0; run.values.len()];
    checkpoint::load(dir).unwrap().restore_values(&run.specs, &mut values).unwrap();
    values[5]
}

#[test]
fn a_full_disk_at_any_operation_is_an_io_error_that_leaves_nothing_behind() {
    let (old, new) = (run(100, 100.0), run(200, 2.0));
    at_every_operation(
        Fault::Full,
        &[100],
        |disk, root| checkpoint::save_on(disk, root, &new.snapshot()).map(drop),
        |root, done| {
            if let Err(error) = done {
                assert_says(error, Kind::Io, &["cannot", "hint: free some space"]);
                assert!(entries(root).iter().all(|name| !name.contains(".tmp")), "{:?}", entries(root));
            }
            assert!(old.is_in(&root.join("checkpoint-000100")));
            verify(&newest(root).unwrap()).unwrap();
        },
        &mut 0,
    );
}

#[test]
fn a_device_that_fails_at_any_operation_is_an_io_error_and_the_old_one_stands() {
    let (old, new) = (run(100, 100.0), run(200, 2.0));
    let mut errors = 0;
    let operations = at_every_operation(
        Fault::Broken,
        &[50, 100],
        |disk, root| {
            let best = Some(root.join("checkpoint-000100"));
            checkpoint::write(disk, root, &new.snapshot(), &Retention { last: Some(1), best }).map(drop)
        },
        |root, done| {
            if let Err(error) = done {
                assert_says(error, Kind::Io, &["os error 5", "hint: the device fails"]);
            }
            assert!(old.is_in(&root.join("checkpoint-000100")));
            let newest = newest(root).unwrap();
            assert!((if newest.ends_with("checkpoint-000200") { &new } else { &old }).is_in(&newest));
        },
        &mut errors,
    );
    assert_eq!(errors + 1, operations, "none is passed over");
}

#[test]
fn death_while_pruning_keeps_the_newest() {
    at_every_operation(
        Fault::Death,
        &[100, 200, 300],
        |disk, root| store::prune(disk, root, 1, Some(&root.join("checkpoint-000100")), None).map(drop),
        |root, _| {
            let (newest, damaged) = newest_complete(root).unwrap();
            assert_eq!(newest.unwrap().dir, root.join("checkpoint-000300"));
            assert!(damaged.is_empty());
            assert!(run(100, 100.0).is_in(&root.join("checkpoint-000100")));
        },
        &mut 0,
    );
}

#[test]
fn a_stamp_refuses_what_changes_the_curve_and_shows_both_sides() {
    let dir = Path::new("out/checkpoint-000100");
    let base = run(1, 0.0);
    let stamp_with = |change: &dyn Fn(&mut Config)| {
        let mut config = base.config.clone();
        change(&mut config);
        let arch = Arch::from_dir(&golden("llama/model")).unwrap();
        let placements = place(&arch, &config.tuning.lora).unwrap();
        let hashes = Hashes { base_model: "b", tokenizer: "t", chat_template: "c", data: "d" };
        Stamp::new(&config, &placements, &[], hashes, engine())
    };
    assert!(base.stamp.compare(&stamp_with(&|_| {}), &[], dir).unwrap().is_empty());
    let lr = stamp_with(&|config| config.train.learning_rate = 0.1 + 0.2);
    let text = serde_json::to_string(&lr).unwrap();
    assert!(serde_json::from_str::<Stamp>(&text).unwrap().compare(&lr, &[], dir).unwrap().is_empty());
    let error = base.stamp.compare(&lr, &[], dir).unwrap_err();
    assert_says(
        &error,
        Kind::Checkpoint,
        &[
            "out/checkpoint-000100",
            "train.learning_rate: 0.0002 in the checkpoint",
            "now",
            "--allow train.learning_rate",
        ],
    );
    let notes = base.stamp.compare(&lr, &["train.learning_rate".into()], dir).unwrap();
    assert!(notes[0].contains("train.learning_rate differs: 0.0002"), "{notes:?}");
    let free = stamp_with(&|config| {
        config.train.max_steps = 99;
        config.train.output_dir = "elsewhere".into();
        config.train.data_seed = Some(config.train.seed);
    });
    assert!(base.stamp.compare(&free, &[], dir).unwrap().is_empty(), "these may change");
    let mut world = base.stamp.clone();
    world.world_size = 4;
    let error = base.stamp.compare(&world, &[], dir).unwrap_err();
    assert_says(&error, Kind::Checkpoint, &["world_size: 1 in the checkpoint, 4 now", "--allow world_size"]);
    let accumulated = |micro_batches| stamp_with(&|config| config.train.grad_accum = Auto::Given(micro_batches));
    let notes = Stamp { world_size: 4, ..accumulated(2) }.compare(&accumulated(8), &[], dir).unwrap();
    assert_eq!(notes.len(), 2, "the same rows in a step: {notes:?}");

    let rank = stamp_with(&|config| config.tuning.lora.r = 4);
    let error = base.stamp.compare(&rank, &[], dir).unwrap_err();
    assert_says(&error, Kind::Checkpoint, &["adapter: 2 modules, rank 2", "rank 4", "start a new run"]);
    let error = base.stamp.compare(&rank, &["adapter".into()], dir).unwrap_err();
    assert_says(&error, Kind::Config, &["--allow adapter"]);
    let error = base.stamp.compare(&rank, &["train.learning_rat".into()], dir).unwrap_err();
    assert_says(&error, Kind::Config, &["did you mean train.learning_rate?"]);
    for field in [
        "backend",
        "simd",
        "quantization",
        "dtype",
        "base_model",
        "tokenizer",
        "chat_template",
        "data",
        "engine_version",
    ] {
        let mut fields = serde_json::to_value(&base.stamp).unwrap();
        fields[field] = "other".into();
        let other: Stamp = serde_json::from_value(fields).unwrap();
        let error = base.stamp.compare(&other, &[], dir).unwrap_err();
        assert_says(&error, Kind::Checkpoint, &[&format!("{field}: "), "in the checkpoint, other now"]);
        assert_eq!(base.stamp.compare(&other, &[field.into()], dir).unwrap().len(), 1);
    }
}
