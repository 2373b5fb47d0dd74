//! The sources of a value (file, environment, word, flag), and which one takes precedence.
use super::*;

#[test]
fn every_source_overrides_the_one_before() {
    let folder = Folder::new(&[
        ("base.yaml", "train:\n  batch_size: 2\n  grad_accum: 2\n  seed: 2\n  save_steps: 2\n"),
        ("a.yaml", "include: base.yaml\ntrain:\n  grad_accum: 3\n  seed: 3\n  save_steps: 3\n"),
    ]);
    let resolved = folder
        .load(&["TRAIN_SAVE_STEPS=5"], &[("TRAIN_SEED", "4"), ("TRAIN_SAVE_STEPS", "4"), ("HOME", "/root")])
        .unwrap();
    let train = &resolved.config.train;
    assert_eq!((train.eval_batch_size, train.batch_size.or(0), train.grad_accum.or(0)), (8, 2, 3));
    assert_eq!((train.seed, train.save_steps), (4, tunesmith::config::Interval::Steps(5)));
    let source = |key: &str| resolved.source(key).to_string().replace(&format!("{}/", folder.0.path().display()), "");
    assert_eq!(source("train.eval_batch_size"), "default");
    assert_eq!(source("train.batch_size"), "base.yaml:2");
    assert_eq!(source("train.grad_accum"), "a.yaml:3");
    assert_eq!(source("train.seed"), "env TRAIN_SEED");
    assert_eq!(source("train.save_steps"), "argument");
}

#[test]
fn a_flag_overrides_a_word() {
    let folder = Folder::new(&[("a.yaml", RUNNABLE)]);
    let flag = Flag { name: "--resume", key: "train.resume_from_checkpoint", value: "latest".to_owned() };
    let words = ["train.resume_from_checkpoint=runs/a/checkpoint-000005".to_owned()];
    let resolved = config::load(&folder.path("a.yaml"), &words, &[], &[flag]).unwrap();
    assert_eq!(resolved.config.train.resume_from_checkpoint, Some(Resume::Latest));
    assert_eq!(*resolved.source("train.resume_from_checkpoint"), Source::Flag("--resume".to_owned()));
    let resolved = config::load(&folder.path("a.yaml"), &words, &[], &[]).unwrap();
    let dir = PathBuf::from("runs/a/checkpoint-000005");
    assert_eq!(resolved.config.train.resume_from_checkpoint, Some(Resume::Dir(dir)));
}

#[test]
fn every_spelling_of_every_key_reaches_it_by_word_and_by_environment() {
    let folder = Folder::new(&[("a.yaml", "")]);
    for def in config::schema::options() {
        let value = match (def.get)(&Config::default()) {
            serde_json::Value::String(text) => text,
            other => other.to_string(),
        };
        for spelling in def.spellings() {
            let env = config::variable(&spelling);
            for word in [format!("{spelling}={value}"), format!("{env}={value}")] {
                let resolved = folder.load(&[&word], &[]).unwrap_or_else(|error| panic!("{word}: {error}"));
                assert_eq!(resolved.source(&def.path()).to_string(), "argument", "{word}");
            }
            let resolved = folder.load(&[], &[(&env, &value)]).unwrap_or_else(|error| panic!("{env}: {error}"));
            assert_eq!(resolved.source(&def.path()).to_string(), format!("env {env}"));
            assert_eq!(resolved.config, Config::default(), "{env}={value}");
        }
    }
}

#[test]
fn no_two_keys_share_a_spelling() {
    let mut names: Vec<String> =
        config::schema::options().flat_map(|def| def.spellings().map(|spelling| config::env_name(&spelling))).collect();
    let all = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), all);
}

#[test]
fn aliases_are_the_same_setting() {
    let config = load(
        "train: {lr: 1.0e-3, epochs: 2, per_device_train_batch_size: 4, gradient_accumulation_steps: 3, \
         per_device_eval_batch_size: 5, evaluation_strategy: epoch}\n\
         tuning: {lora: {alpha: 4, dropout: 0.5}}\ndata: {split: 0.1}",
    );
    let train = &config.train;
    assert_eq!((train.learning_rate, train.num_train_epochs), (1e-3, 2.0));
    assert_eq!((train.batch_size.or(0), train.grad_accum.or(0), train.eval_batch_size), (4, 3, 5));
    assert_eq!(train.eval_strategy, EvalStrategy::Epoch);
    assert_eq!((config.tuning.lora.lora_alpha, config.tuning.lora.lora_dropout), (4.0, 0.5));
}

#[test]
fn an_empty_variable_counts_as_unset_and_foreign_ones_pass() {
    let folder = Folder::new(&[("a.yaml", "train: {seed: 7}")]);
    let env =
        [("TRAIN_SEED", ""), ("TRAIN_STATION", "north"), ("DATA_HOME", "/x"), ("PATH", "/bin"), ("NUM_GPUS", "1")];
    let resolved = folder.load(&[], &env).unwrap();
    assert_eq!(resolved.config.train.seed, 7);
    // What looks like ours is not passed over in silence.
    assert_eq!(resolved.notes.len(), 2, "{:?}", resolved.notes);
    assert!(resolved.notes.iter().any(|note| note.contains("TRAIN_STATION")));
}

#[test]
fn a_list_may_be_given_with_commas_alone() {
    let folder = Folder::new(&[("a.yaml", "")]);
    let words = ["DATA_TRAIN_PATH=a.jsonl, b.jsonl", "tuning.lora.layers_to_transform=1,2"];
    let env = [("TUNING_LORA_MODULES_TO_SAVE", "embed,lm_head"), ("TRAIN_OUTPUT_DIR", "runs/a,b")];
    let config = folder.load(&words, &env).unwrap().config;
    assert_eq!(config.data.train_path, [Path::new("a.jsonl"), Path::new("b.jsonl")]);
    assert_eq!(config.tuning.lora.layers_to_transform, Some(vec![1, 2]));
    assert_eq!(config.tuning.lora.modules_to_save, ["embed", "lm_head"]);
    assert_eq!(config.train.output_dir, Path::new("runs/a,b"));
}

#[test]
fn refusals_of_words_say_what_would_do() {
    let folder = Folder::new(&[("a.yaml", "")]);
    let error = folder.load(&["MODEL=x"], &[]).unwrap_err();
    assert!(error.hint_text().is_some_and(|hint| hint.contains("MODEL_NAME")), "{error:?}");
    let error = folder.load(&["train.seed=-1"], &[]).unwrap_err();
    assert!(error.message().contains("an integer of at least 0"), "{error}");
    let error = folder.load(&["train.logging_steps=-1"], &[]).unwrap_err();
    assert!(error.message().contains("at least 1"), "{error}");
}

#[test]
fn a_missing_include_is_found_by_its_stem() {
    let folder = Folder::new(&[("a.yaml", "include: base"), ("base.yaml", "")]);
    let error = folder.load(&[], &[]).unwrap_err();
    assert!(error.hint_text().is_some_and(|hint| hint.contains("base.yaml")), "{error:?}");
}

#[test]
fn the_last_of_two_words_counts() {
    let folder = Folder::new(&[("a.yaml", "")]);
    assert_eq!(folder.load(&["train.lr=1", "TRAIN_LEARNING_RATE=2"], &[]).unwrap().config.train.learning_rate, 2.0);
}

#[test]
fn words_hold_lists_mappings_strings_and_unicode() {
    let folder = Folder::new(&[("a.yaml", "")]);
    let words = [
        "data.train_path=[a.jsonl, b c.jsonl]",
        "data.val_path=daten/größe ä: 1.jsonl",
        "logging.run_name=42",
        "tuning.lora.target_modules=.*\\.(q|v)_proj",
        "tuning.lora.rank_pattern={down_proj: 2, up_proj: 3}",
        "tuning.lora.init_lora_weights=false",
        "train.num_threads=null",
        "tuning.lora.layers_to_transform=3",
    ];
    let config = folder.load(&words, &[]).unwrap().config;
    assert_eq!(config.data.train_path, [Path::new("a.jsonl"), Path::new("b c.jsonl")]);
    assert_eq!(config.data.val_path, [Path::new("daten/größe ä: 1.jsonl")]);
    assert_eq!(config.logging.run_name.as_deref(), Some("42"));
    let lora = &config.tuning.lora;
    assert_eq!(lora.target_modules, TargetModules::Regex(".*\\.(q|v)_proj".to_owned()));
    assert_eq!(lora.rank_pattern.0, [("down_proj".to_owned(), 2), ("up_proj".to_owned(), 3)]);
    assert_eq!(lora.init_lora_weights, InitLora::Random);
    assert_eq!(lora.layers_to_transform.as_deref(), Some(&[3][..]));
    assert_eq!(config.train.num_threads, None);
}

#[test]
fn a_word_is_the_text_that_the_shell_hands_over() {
    let folder = Folder::new(&[("a.yaml", "")]);
    for text in ["runs/a #3", "runs/a\n  b", "&x y", "a\t#b", "runs/it's"] {
        let found = |words: &[&str], env: &[(&str, &str)]| folder.load(words, env).unwrap().config.train.output_dir;
        assert_eq!(found(&[&format!("train.output_dir={text}")], &[]), Path::new(text));
        assert_eq!(found(&[], &[("TRAIN_OUTPUT_DIR", text)]), Path::new(text));
    }
    // Quotes and block scalars are YAML's.
    let name = |text: &str| folder.load(&[&format!("logging.run_name={text}")], &[]).unwrap().config.logging.run_name;
    assert_eq!(name("'a #3'").as_deref(), Some("a #3"));
    assert_eq!(name("\"a\\tb\" # b").as_deref(), Some("a\tb"));
    assert_eq!(name("|\n  a\n  b\n").as_deref(), Some("a\nb\n"));
    // So are numbers, also those that no key holds.
    assert_eq!(folder.load(&["train.max_steps=3 # three"], &[]).unwrap().config.train.max_steps, 3);
    let error = folder.load(&["train.max_steps=99999999999999999999999999"], &[]).unwrap_err().to_string();
    assert!(error.contains("found the integer 99999999999999999999999999"), "{error}");
}

#[test]
fn the_yaml_of_other_toolkits_reads_the_same() {
    // Numbers and words that YAML libraries differ on.
    let config = load("train: {learning_rate: 2e-4, eval_strategy: no, save_total_limit: ~, max_grad_norm: 1}");
    assert_eq!((config.train.learning_rate, config.train.max_grad_norm), (2e-4, 1.0));
    assert_eq!((config.train.eval_strategy, config.train.save_total_limit), (EvalStrategy::No, None));
    assert_eq!(load("train: {seed: 18446744073709551615}").train.seed, u64::MAX);
    assert_eq!(load("# nothing\n"), Config::default());
    assert_eq!(load("train:\ntuning:\n  lora:\n"), Config::default());
    assert_eq!(load("{\"train\": {\"seed\": 1}}").train.seed, 1);
}
