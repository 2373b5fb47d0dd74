//! Configuration files that include others.
use super::*;

#[test]
fn later_files_win_key_by_key_and_paths_are_relative_to_the_file() {
    let folder = Folder::new(&[
        ("a.yaml", "train: {seed: 1}\ninclude: [sub/one.yaml, sub/two.yaml]\n"),
        ("sub/one.yaml", "include: ../deep.yaml\ntrain: {batch_size: 10, grad_accum: 10}\n"),
        ("sub/two.yaml", "train: {grad_accum: 20, seed: 20}\ntuning: {lora: {rank_pattern: {up: 2, down: 5}}}\n"),
        ("deep.yaml", "train: {batch_size: 30, logging_steps: 30}\ntuning: {lora: {rank_pattern: {gate: 1, up: 1}}}\n"),
    ]);
    let config = folder.load(&[], &[]).unwrap().config;
    let train = &config.train;
    let (batch_size, grad_accum) = (train.batch_size.or(0), train.grad_accum.or(0));
    assert_eq!(
        (train.seed, grad_accum, batch_size, train.logging_steps),
        (1, 20, 10, tunesmith::config::Interval::Steps(30))
    );
    let ranks: Vec<(&str, usize)> =
        config.tuning.lora.rank_pattern.0.iter().map(|(name, rank)| (name.as_str(), *rank)).collect();
    assert_eq!(ranks, [("gate", 1), ("up", 2), ("down", 5)]);
}

#[test]
fn a_file_may_be_included_twice_but_not_by_itself() {
    let folder = Folder::new(&[
        ("a.yaml", "include: [b.yaml, c.yaml]"),
        ("b.yaml", "include: common.yaml"),
        ("c.yaml", "include: common.yaml"),
        ("common.yaml", "train: {seed: 9}"),
    ]);
    assert_eq!(folder.load(&[], &[]).unwrap().config.train.seed, 9);
    folder.write("common.yaml", "train: {seed: 9}\ninclude: ./a.yaml\n");
    let error = folder.refusal(&[], &[]);
    assert!(error.contains("common.yaml:2:1: include: ./a.yaml includes itself"), "{error}");
}

#[test]
fn a_missing_include_names_its_line_and_the_nearest_file() {
    let folder = Folder::new(&[("a.yaml", "train:\n  seed: 1\ninclude: bse.yaml\n"), ("base.yaml", "")]);
    let error = folder.refusal(&[], &[]);
    assert!(error.contains("a.yaml:3:1: include: cannot read bse.yaml: No such file"), "{error}");
    assert!(error.ends_with("hint: did you mean base.yaml?"), "{error}");
}

#[test]
fn an_error_in_an_included_file_names_that_file() {
    let folder = Folder::new(&[("a.yaml", "include: b.yaml"), ("b.yaml", "train:\n  sed: 1\n")]);
    let error = folder.refusal(&[], &[]);
    assert!(error.starts_with("config error: b.yaml:2:3: unknown key train.sed\n"), "{error}");
}

#[test]
fn an_include_of_the_wrong_type_is_refused() {
    let error = refusal("include: {a: 1}");
    assert!(error.contains("a.yaml:1:1: include: expected a path or a list of them, found a mapping"), "{error}");
    assert!(refusal("include: [[a]]").contains("include: expected"));
}

#[test]
fn an_endless_chain_ends() {
    let folder = Folder::new(&[("a.yaml", "include: 0.yaml")]);
    for index in 0..20 {
        folder.write(&format!("{index}.yaml"), format!("include: {}.yaml", index + 1));
    }
    assert!(folder.refusal(&[], &[]).contains("more than 16 levels"));
    let many: Vec<String> = (0..70).map(|_| "20.yaml".to_owned()).collect();
    folder.write("20.yaml", "");
    folder.write("a.yaml", format!("include: [{}]", many.join(", ")));
    assert!(folder.refusal(&[], &[]).contains("64 files"));
}
