//! The data set as a whole: its cache, the split, the order of rows, and packing.
use std::collections::BTreeSet;
use std::path::Path;

use proptest::prelude::*;
use tunesmith::data::pack::pack;
use tunesmith::data::{Batch, Example, IGNORE, Sampler, SamplerOptions, Split};

use super::{assert_refused, config, examples, golden, load_with};

const OPTIONS: SamplerOptions =
    SamplerOptions { batch_size: 3, grad_accum: 2, seed: 7, shuffle: true, group_by_length: false, packing: None };

fn lengths(count: usize) -> Vec<usize> {
    (0..count).map(|index| 1 + index * 37 % 90).collect()
}

fn flat(step: Vec<Vec<Vec<usize>>>) -> Vec<usize> {
    step.into_iter().flatten().flatten().collect()
}

fn epoch(sampler: &mut Sampler) -> Vec<usize> {
    (0..sampler.steps_per_epoch()).flat_map(|_| flat(sampler.next_step())).collect()
}

#[test]
fn a_sampler_resumes_at_every_position() {
    let variants = [
        OPTIONS,
        SamplerOptions { shuffle: false, ..OPTIONS },
        SamplerOptions { group_by_length: true, ..OPTIONS },
        SamplerOptions { packing: Some(100), ..OPTIONS },
    ];
    for options in variants {
        let lengths = lengths(40);
        let mut sampler = Sampler::new(&lengths, options);
        let steps = 3 * sampler.steps_per_epoch() + 1;
        let mut states = vec![sampler.state()];
        let all: Vec<_> = (0..steps)
            .map(|_| {
                let step = sampler.next_step();
                states.push(sampler.state());
                step
            })
            .collect();
        for (done, state) in states.iter().enumerate() {
            let kept = serde_json::to_string(state).unwrap();
            let mut resumed = Sampler::new(&lengths, options);
            assert!(resumed.restore(serde_json::from_str(&kept).unwrap()));
            let rest: Vec<_> = (done..steps).map(|_| resumed.next_step()).collect();
            assert_eq!(rest, all[done..], "{options:?} after {done} steps");
        }
        let mut other = Sampler::new(&lengths, SamplerOptions { seed: 8, ..options });
        assert!(!other.restore(states[1]), "another seed is another order");
    }
}

#[test]
fn every_epoch_has_every_row_once_in_an_order_of_its_own() {
    let mut sampler = Sampler::new(&lengths(40), OPTIONS);
    assert_eq!(sampler.steps_per_epoch(), 7);
    let (first, second) = (epoch(&mut sampler), epoch(&mut sampler));
    assert!((sampler.epoch() - 2.0).abs() < 1e-9);
    assert_ne!(first, second);
    for mut order in [first, second] {
        order.sort_unstable();
        assert_eq!(order, (0..40).collect::<Vec<_>>());
    }
    let mut in_order = Sampler::new(&lengths(40), SamplerOptions { shuffle: false, ..OPTIONS });
    let first_step = in_order.next_step();
    assert_eq!(first_step, [[[0], [1], [2]], [[3], [4], [5]]]);
    for _ in 1..6 {
        in_order.next_step();
    }
    assert_eq!(
        in_order.next_step(),
        [vec![vec![36], vec![37], vec![38]], vec![vec![39]]],
        "the short last step is kept"
    );
}

#[test]
fn rows_of_like_length_come_together_longest_first() {
    let lengths = lengths(400);
    let mut sampler = Sampler::new(&lengths, SamplerOptions { group_by_length: true, ..OPTIONS });
    let grouped = epoch(&mut sampler);
    let mut shuffled = Sampler::new(&lengths, OPTIONS);
    let spread = |order: &[usize]| -> usize {
        let of_batch = |batch: &[usize]| {
            let lengths = batch.iter().map(|&row| lengths[row]);
            lengths.clone().max().unwrap() - lengths.min().unwrap()
        };
        order.chunks(3).map(of_batch).sum()
    };
    assert!(spread(&grouped) * 5 < spread(&epoch(&mut shuffled)));
    assert_eq!(lengths[grouped[0]], *lengths.iter().max().unwrap());
    assert_eq!(grouped.iter().collect::<BTreeSet<_>>().len(), 400);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn packs_hold_every_example_once_and_fit(lengths in prop::collection::vec(1_usize..120, 0..300)) {
        let order: Vec<usize> = (0..lengths.len()).collect();
        let rows = pack(&lengths, &order, 100);
        let mut packed: Vec<usize> = rows.iter().flatten().copied().collect();
        packed.sort_unstable();
        prop_assert_eq!(packed, order);
        for row in &rows {
            let total: usize = row.iter().map(|&example| lengths[example]).sum();
            prop_assert!(total <= 100 || row.len() == 1);
        }
        // Two rows that would fit into one are never both left half empty.
        let tokens: usize = lengths.iter().sum();
        let long = lengths.iter().filter(|&&length| length > 50).count();
        prop_assert!(rows.len() <= 1 + long + tokens.div_ceil(50) + rows.len() / 64);
    }
}

#[test]
fn a_pack_is_sequences_side_by_side() {
    let rows = [10, 20, 30].map(|first| {
        let input_ids: Vec<u32> = (first..first + 3).collect();
        let labels = input_ids.iter().map(|&id| if id % 10 == 0 { IGNORE } else { id as i32 }).collect();
        Example { input_ids, labels }
    });
    let split = Split::from_examples(&rows).unwrap();
    let batches = split.batches(&vec![vec![vec![2, 0]], vec![vec![1]]]).unwrap();
    assert_eq!(batches[0].cu_seqlens, [0, 3, 6]);
    assert_eq!(batches[0].tokens, [30, 31, 32, 10, 11, 12]);
    assert_eq!(batches[0].targets, [31, 32, IGNORE, 11, 12, IGNORE], "no target crosses a boundary");
    assert_eq!((batches[0].first_row, batches[1].first_row), (0, 6));
    assert_eq!(batches[0], Batch::from_examples([&rows[2], &rows[0]]));
}

#[test]
fn the_cache_is_used_and_never_trusted() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(&golden("synthetic_200.jsonl"));
    config.data.use_cache = true;
    config.data.cache_dir = Some(folder.path().join("deep/cache"));
    config.data.split = 0.1;
    let first = load_with(&config).unwrap();
    assert!(!first.report.from_cache);
    let second = load_with(&config).unwrap();
    assert!(second.report.from_cache);
    let content = |data: &tunesmith::data::Dataset| {
        (examples(&data.train), data.validation.as_ref().map(examples), data.fingerprint.clone())
    };
    // Kept here, for the file that they lie in is about to be damaged.
    let first = content(&first);
    assert_eq!(first, content(&second));

    let file = std::fs::read_dir(folder.path().join("deep/cache")).unwrap().next().unwrap().unwrap().path();
    let whole = std::fs::read(&file).unwrap();
    let mut damaged: Vec<Vec<u8>> = vec![Vec::new(), whole[..whole.len() / 2].to_vec(), [&whole[..], b"x"].concat()];
    for at in [0, 20, 50, 60, 70, 100, whole.len() / 2, whole.len() - 1] {
        let mut copy = whole.clone();
        copy[at] ^= 0x40;
        damaged.push(copy);
    }
    for bytes in damaged {
        std::fs::write(&file, bytes).unwrap();
        let rebuilt = load_with(&config).unwrap();
        assert!(!rebuilt.report.from_cache && first == content(&rebuilt));
        assert_eq!(std::fs::read(&file).unwrap(), whole, "the damaged file is replaced");
    }

    // What changes the tokens changes the key.
    let changes: [fn(&mut tunesmith::config::Config); 4] = [
        |config| config.model.max_seq_len = 20,
        |config| config.data.loss_on = tunesmith::config::LossOn::All,
        |config| config.data.chat_template = Some(tunesmith::config::BuiltinTemplate::Chatml),
        |config| config.data.max_rows = Some(50),
    ];
    for change in changes {
        let mut changed = config.clone();
        change(&mut changed);
        let other = load_with(&changed).unwrap();
        assert!(!other.report.from_cache && first != content(&other));
    }
    // A cache that cannot be written is a warning, not an error.
    config.data.cache_dir = Some(Path::new("/proc/nowhere").to_owned());
    let uncached = load_with(&config).unwrap();
    assert!(uncached.report.warnings.iter().any(|warning| warning.contains("/proc/nowhere")));
}

#[test]
fn the_split_is_drawn_by_its_seed_and_keeps_the_order() {
    let mut config = config(&golden("synthetic_200.jsonl"));
    let whole = load_with(&config).unwrap();
    config.data.split = 0.1;
    let split = |seed| {
        let mut config = config.clone();
        config.train.data_seed = Some(seed);
        load_with(&config).unwrap()
    };
    let (one, again, other) = (split(1), split(1), split(2));
    let validation = one.validation.as_ref().unwrap();
    assert_eq!((one.train.len(), validation.len()), (180, 20));
    let all = |data: &tunesmith::data::Dataset| (examples(&data.train), data.validation.as_ref().map(examples));
    assert_eq!(all(&one), all(&again));
    assert_ne!(all(&one).1, all(&other).1);
    assert_ne!(one.fingerprint, other.fingerprint);
    // Together the two parts are the whole, each in its order.
    let (mut train, mut held_out) = (0, 0);
    for index in 0..whole.train.len() {
        let example = whole.train.example(index).unwrap();
        if train < one.train.len() && one.train.example(train).unwrap() == example {
            train += 1;
        } else {
            assert_eq!(validation.example(held_out).unwrap(), example);
            held_out += 1;
        }
    }
    assert_eq!((train, held_out), (180, 20));
}

#[test]
fn validation_and_test_files_are_sets_of_their_own() {
    let mut config = config(&golden("synthetic_200.jsonl"));
    config.data.val_path = vec![golden("synthetic_200.jsonl")];
    config.data.test_path = vec![golden("synthetic_200.jsonl")];
    config.data.max_rows = Some(30);
    let data = load_with(&config).unwrap();
    assert_eq!(data.validation.as_ref().map(examples), Some(examples(&data.train)));
    assert_eq!(data.test.as_ref().map(Split::len), Some(30));
    config.data.val_path = vec!["/nowhere/val.jsonl".into()];
    assert_refused(load_with(&config), &["/nowhere/val.jsonl"]);
}

#[test]
fn one_thread_and_many_give_the_same_tokens() {
    let mut config = config(&golden("synthetic_200.jsonl"));
    config.data.num_proc = Some(1);
    let one = load_with(&config).unwrap();
    config.data.num_proc = Some(4);
    let many = load_with(&config).unwrap();
    assert_eq!((examples(&one.train), one.fingerprint), (examples(&many.train), many.fingerprint));
}
