//! Damaged features of images: a run that reads them computes them again, with the same bits.
use crate::pictures::{encoder, kept, paired, write_rows};
use crate::run::fixture::{Fixture, said, tunesmith};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Mutex;
use std::time::Duration;
use tunesmith::config;
use tunesmith::data::Progress;
use tunesmith::telemetry::progress::{Event, Observer};
use tunesmith::train::run::{Options, run};
use tunesmith::train::signals::Stop;
use tunesmith::{Kind, Result};

/// An observer that calls `harm` after a step is reported, and records the run's notices.
struct Vandal<'a> {
    after: u64,
    harm: &'a (dyn Fn() + Sync),
    said: Mutex<Vec<String>>,
}

impl Progress for Vandal<'_> {
    fn begin(&self, _: &str, _: u64) {}
    fn advance(&self, _: u64) {}
    fn end(&self) {}
    fn warn(&self, _: &str) {}
}

impl Observer for Vandal<'_> {
    fn event(&self, event: &Event<'_>) {
        match event {
            Event::Step { line, .. } if line.step == self.after => (self.harm)(),
            Event::Notice(text) => self.said.lock().unwrap().push((*text).to_owned()),
            _ => {}
        }
    }
}

/// Runs a configuration of the fixture, to which harm is done after its second step. Returns its notices.
fn notices(fixture: &Fixture, out: &str, lines: &[&str], harm: &(dyn Fn() + Sync)) -> Result<Vec<String>> {
    let out_dir = format!("train.output_dir: {}", fixture.path(out).display());
    let own = ["train.num_train_epochs: 2", "train.eval_strategy: epoch", &out_dir];
    let config = fixture.config(out, &[&own, lines].concat());
    let resolved = config::load(&config, &[], &[], &[]).unwrap();
    let observer = Vandal { after: 2, harm, said: Mutex::default() };
    run(&resolved, &Options::default(), &Stop::default(), &observer)?;
    Ok(observer.said.into_inner().unwrap())
}

/// The [`notices`] about damage.
fn harmed(fixture: &Fixture, out: &str, lines: &[&str], harm: &(dyn Fn() + Sync)) -> Result<Vec<String>> {
    Ok(notices(fixture, out, lines, harm)?.into_iter().filter(|text| text.contains("damaged")).collect())
}

/// The files of the only folder of features below `cache`.
fn files(cache: &Path) -> Vec<PathBuf> {
    let folder = fs::read_dir(cache.join("features")).unwrap().next().unwrap().unwrap().path();
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Flips a bit of the first number in a file, which stays the same file.
fn flip(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[header + 1] ^= 1;
    fs::write(file, bytes).unwrap();
}

fn cut(file: &Path) {
    fs::File::options().write(true).open(file).unwrap().set_len(20).unwrap();
}

fn adapter(fixture: &Fixture, out: &str) -> Vec<u8> {
    fs::read(fixture.path(out).join("adapter/adapter_model.safetensors")).unwrap()
}

#[test]
fn features_that_get_damaged_while_a_run_reads_them_are_computed_again() {
    for ranks in [&[][..], &["train.strategy: dp", "train.dp_ranks: 2", "train.grad_accum: 1"]] {
        let fixture = paired();
        let encoder = encoder(&fixture);
        let lines = |more: &'static str| [&[encoder.as_str(), more], ranks].concat();
        let never = harmed(&fixture, "never", &lines("vision.cache_features: true"), &|| ()).unwrap();
        assert_eq!(never, [""; 0]);
        let cache = fixture.path("cache");
        let each = |harm: fn(&Path)| move |cache: &Path| files(cache).iter().for_each(|file| harm(file));
        for (name, harm) in [("flipped", each(flip)), ("cut", each(cut))] {
            let said = harmed(&fixture, name, &lines("vision.cache_features: true"), &|| harm(&cache)).unwrap();
            let [note] = &said[..] else { panic!("{name}: {said:?}") };
            assert!(note.contains("damaged features of ") && note.contains("are computed again"), "{note}");
            assert!(adapter(&fixture, name) == adapter(&fixture, "never"), "{name}, {ranks:?}");
            // The next run finds them as they were.
            let after = harmed(&fixture, "after", &lines("vision.cache_features: true"), &|| ()).unwrap();
            assert!(after.iter().all(|note| note.contains("cannot be read")), "{after:?}");
            assert!(adapter(&fixture, "after") == adapter(&fixture, "never"), "{name}, {ranks:?}");
            fs::remove_dir_all(fixture.path("after")).unwrap();
        }
        // Open files stay readable.
        let removed = || fs::remove_dir_all(cache.join("features")).unwrap();
        assert_eq!(harmed(&fixture, "gone", &lines("vision.cache_features: true"), &removed).unwrap(), [""; 0]);
        assert!(adapter(&fixture, "gone") == adapter(&fixture, "never"));
    }
}

#[test]
fn damaged_features_are_not_computed_from_other_files_than_before() {
    let fixture = paired();
    let encoder = encoder(&fixture);
    let cache = fixture.path("cache");
    let all = || files(&cache).iter().for_each(|file| flip(file));
    let other_picture = || {
        fs::copy(fixture.path("b.png"), fixture.path("a.png")).unwrap();
        all();
    };
    let weights = fixture.path("encoder/model.safetensors");
    let other_encoder = || {
        let mut bytes = fs::read(&weights).unwrap();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        bytes[header..].iter_mut().step_by(4).for_each(|byte| *byte ^= 1);
        fs::write(&weights, bytes).unwrap();
        all();
    };
    let kept_picture = fs::read(fixture.path("a.png")).unwrap();
    let refused = harmed(&fixture, "picture", &[&encoder], &other_picture).unwrap_err();
    let told = "train.jsonl:1 and 9 more rows: image a.png: the file has changed";
    assert!(refused.kind() == Kind::Data && refused.message().contains(told), "{refused}");
    fs::write(fixture.path("a.png"), kept_picture).unwrap();
    fs::remove_dir_all(&cache).unwrap();
    let refused = harmed(&fixture, "changed", &[&encoder], &other_encoder).unwrap_err();
    let told = "the files of the image encoder have changed";
    assert!(refused.kind() == Kind::Model && refused.message().contains(told), "{refused}");
}

#[test]
fn damage_from_before_a_run_is_mended_where_rows_need_it() {
    let fixture = paired();
    let encoder = encoder(&fixture);
    let first = kept(&fixture, "first", "cache", &[&encoder]);
    let made = files(&fixture.path("cache"));
    for file in &made {
        flip(file);
    }
    let mended = kept(&fixture, "mended", "cache", &[&encoder]);
    assert!(mended.2.contains("damaged features are computed again"), "{}", mended.2);
    assert!(!mended.2.contains("is not loaded"), "nothing is encoded before step 1: {}", mended.2);
    assert!(mended.0 == first.0 && mended.1 == first.1);
    assert!(files(&fixture.path("cache")).len() > made.len());
    let again = kept(&fixture, "again", "cache", &[&encoder]);
    assert!(!again.2.contains("damaged") && again.0 == first.0, "{}", again.2);
}

#[test]
fn a_cache_that_cannot_be_written_costs_its_speed_and_not_the_run() {
    let fixture = paired();
    let encoder = encoder(&fixture);
    harmed(&fixture, "cached", &[&encoder], &|| ()).unwrap();
    let folder = fixture.path("cache").join("features");
    fs::remove_dir_all(&folder).unwrap();
    fs::write(&folder, "a file where the folder belongs").unwrap();
    let said = notices(&fixture, "each step", &[&encoder], &|| ()).unwrap();
    let told = |text: &&String| text.starts_with("the features of images are not cached (cannot create ");
    assert_eq!(said.iter().filter(told).count(), 1, "{said:?}");
    assert!(adapter(&fixture, "each step") == adapter(&fixture, "cached"));
    // Who asks for the cache is told that there is none.
    let refused = notices(&fixture, "asked", &[&encoder, "vision.cache_features: true"], &|| ()).unwrap_err();
    assert_eq!(refused.kind(), Kind::Io, "{refused}");
}

#[test]
fn copies_of_an_image_share_features_and_a_killed_encode_leaves_nothing_wrong() {
    let fixture = paired();
    // Behind the end of a PNG file, bytes mean nothing; but it is another image's file.
    let image = fs::read(fixture.path("a.png")).unwrap();
    let (all, different) = (900, 300);
    for number in 0..all {
        let bytes = [&image[..], &(number % different).to_string().into_bytes()].concat();
        fs::write(fixture.path(&format!("{number}.png")), bytes).unwrap();
    }
    let row = |number: usize| json!({"image": format!("{number}.png"), "caption": if number.is_multiple_of(2) { "a cat" } else { "the sea" }});
    write_rows(&fixture.path("train.jsonl"), (0..all).map(row));
    write_rows(&fixture.path("val.jsonl"), (0..4).map(row));
    let cache = |name: &str| format!("data.cache_dir: {}", fixture.path(name).display());
    let config = fixture.config("run", &[&encoder(&fixture), &cache("cache")]);
    let encode = || tunesmith(&["encode", config.to_str().unwrap()]);
    for milliseconds in [60, 120, 180, 240, 300] {
        let mut running = encode().stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(milliseconds));
        let _ = running.kill(); // it may have ended
        running.wait().unwrap();
    }
    let done = encode().output().unwrap();
    assert!(done.status.success(), "{}", said(&done));
    assert!(said(&done).contains(&format!("features of {different} images")), "{}", said(&done));
    let folder = fs::read_dir(fixture.path("cache/features")).unwrap().next().unwrap().unwrap().path();
    let names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.iter().all(|name| Path::new(name).extension().is_some_and(|end| end == "safetensors")), "{names:?}");
    let short = [&*encoder(&fixture), "train.max_steps: 3", "train.eval_strategy: no", "train.num_train_epochs: UNSET"];
    let killed = kept(&fixture, "killed", "cache", &short);
    let each = kept(&fixture, "each", "none", &[&short[..], &["vision.cache_features: false"]].concat());
    assert!(killed.0 == each.0 && killed.1 == each.1, "{}", killed.2);
    assert!(!killed.2.contains("computed now") || killed.2.contains(" 0 of them computed now"), "{}", killed.2);
}
