//! What is refused, and what the error says.
use super::*;

#[test]
fn a_typo_names_line_column_and_the_nearest_key() {
    let error = refusal("model: {name: x}\ntrain:\n  batch_size: 1\n  lerning_rate: 1e-4\n");
    assert_eq!(
        error,
        "config error: a.yaml:4:3: unknown key train.lerning_rate\n  hint: did you mean train.learning_rate?"
    );
}

#[test]
fn an_equals_sign_in_place_of_a_colon_is_named_with_its_key() {
    for (text, key) in [
        ("config =1", "config"),
        ("# TOML\nmodel = \"x\"\nseed = 2\n", "model"),
        ("train.max_steps=3", "train.max_steps"),
        ("train:\n  max_steps = 5\n", "max_steps"),
        ("train: max_steps = 5\n", "max_steps"),
        ("train:\n  max_steps = 5\n  seed = 3\n", "max_steps"),
        ("model: {name: x}\nseed = 2\n", "seed"),
        ("train:\n  max_steps: 5\n  seed = 3\n\n  lr = 1\ndata:\n  seed: 1\n", "seed"),
        ("[train]\nmax_steps = 3\n", "max_steps"),
    ] {
        let error = refusal(text);
        let hint = format!("\n  hint: in YAML a colon stands after a key: write `{key}: …`, not `{key} = …`");
        assert!(error.ends_with(&hint), "{text}: {error}");
    }
    for text in ["train: [1\n", "train: 5\n", "just text\n", "train:\n  - a == b\n x: 1\n"] {
        assert!(!refusal(text).contains("colon stands"), "{text}: {}", refusal(text));
    }
}

#[test]
fn nearest_names_are_found_in_other_places_too() {
    let near = |text: &str, name: &str| {
        let error = refusal(text);
        assert!(error.ends_with(&format!("hint: did you mean {name}?")), "{text}: {error}");
    };
    near("trian: {seed: 1}", "train");
    near("seed: 1", "train.seed");
    near("train: {max_seq_len: 1}", "model.max_seq_len");
    near("tuning: {lora: {aplha: 1}}", "tuning.lora.alpha");
    near("tuning: {r: 8}", "tuning.lora.r");
    near("inclde: x.yaml", "include");
    near("data: {train_paht: x}", "data.train_path");
    assert!(!refusal("a: 1").contains("did you mean ?"));
    assert!(refusal("quatsch: 1").ends_with("hint: `tunesmith config --docs` lists every key"));
}

#[test]
fn wrong_types_say_what_was_found_and_expected() {
    let says = |text: &str, message: &str| {
        let error = refusal(text);
        assert!(error.contains(message), "{text}\n{error}\nshould contain\n{message}");
    };
    says(
        "train:\n  batch_size: many\n",
        "a.yaml:2:3: train.batch_size: expected an integer or auto, 1 to 1000000, found the string \"many\"",
    );
    says("train: {batch_size: 0}", "expected an integer or auto, 1 to 1000000, found the integer 0");
    says("train: {batch_size: -3}", "expected an integer or auto, 1 to 1000000, found the integer -3");
    says("train: {batch_size: 1.5}", "found the number 1.5");
    says("train: {lr: \"2e-4\"}", "hint: write 2e-4 without quotes");
    says("train: {lr: .nan}", "train.lr: expected a number, at least 0, found the number NaN");
    says("train: {lr: .inf}", "found the number inf");
    says("train: {lr: }", "found nothing");
    says("train: {lr: [1]}", "found a list of 1 item");
    says("train: {seed: -1}", "found the integer -1");
    says("train: {num_threads: x}", "expected an integer or null, 1 to 1024, found the string \"x\"");
    says("train: {warmup_ratio: 1.5}", "expected a number, 0 to 1, found the number 1.5");
    says("tuning: {lora: {dropout: 1}}", "expected a number, at least 0 and below 1, found the integer 1");
    says(
        "model: {device: gpu}",
        "expected auto, cpu, cuda, or cuda:N with the number of a GPU, found the string \"gpu\"",
    );
    for beyond in ["cuda:256", "cuda:+1", "cuda:", "Cuda:0"] {
        says(&format!("model: {{device: \"{beyond}\"}}"), "expected auto, cpu, cuda, or cuda:N");
    }
    says("train: 5", "a.yaml:1:1: train: expected keys, indented below it, found the integer 5");
    says("data: {shuffle: yes}", "expected true or false, found the string \"yes\"");
    says(
        "data: {loss_on: asistant}",
        "expected one of assistant, completion, all, found the string \"asistant\"\n  hint: did you mean assistant?",
    );
    says("data: {train_path: [a, 5]}", "found the integer 5");
    says("model: {name: 5}", "hint: put it in quotes");
    says("tuning: {lora: {rank_pattern: {q: 0}}}", "rank_pattern: expected");
    says("tuning: {lora: {rank_pattern: {q: 1, q: 2}}}", "\"q\" is given twice");
    says("data: {datasets: [{path: a}, {path: b, path: c}]}", "data.datasets[1]: \"path\" is given twice");
    let inner = "data: {chat_template_kwargs: {tool: {name: a, name: b}}}";
    says(inner, "data.chat_template_kwargs.tool: \"name\" is given twice");
    says("train:\n  max_steps: 010", "write 10: a number does not begin with zeros");
    says("model: {local_dir: ~/base}", "a path that does not begin with ~");
    says("tuning: {lora: {target_modules: '(q'}}", "expected a valid regular expression");
    for none in ["[]", "null", ""] {
        let text = format!("tuning: {{lora: {{target_modules: {none}}}}}");
        says(&text, "tuning.lora.target_modules names no module, and nothing would be trained");
    }
    says("tuning: {mode: oft, oft: {num_cayley_neumann_terms: 1}}", "expected an integer, 2 to 64");
}

#[test]
fn a_value_is_checked_even_where_a_later_one_replaces_it() {
    let folder = Folder::new(&[("a.yaml", "train: {batch_size: many}")]);
    assert!(folder.refusal(&["train.batch_size=1"], &[]).contains("found the string \"many\""));
}

#[test]
fn a_key_given_twice_is_refused_with_both_places() {
    let error = refusal("train:\n  lr: 1\n  learning_rate: 2\n");
    assert!(
        error.contains("a.yaml:3:3: train.learning_rate and train.lr are the same setting; the first is at "),
        "{error}"
    );
    assert!(error.contains("a.yaml:2"), "{error}");
    assert!(refusal("train:\n  seed: 1\n  seed: 2\n").contains("a.yaml:3:3: train.seed is given twice"));
    assert!(refusal("train: {seed: 1}\ndata:\ntrain: {lr: 2}\n").contains("a.yaml:3:1: train is given twice"));
    assert!(refusal("include: a\ninclude: b\n").contains("a.yaml"), "the second include");
    let folder = Folder::new(&[("a.yaml", "")]);
    let error = folder.refusal(&[], &[("TRAIN_LR", "1"), ("TRAIN_LEARNING_RATE", "1")]);
    assert!(error.contains("env TRAIN_LEARNING_RATE and env TRAIN_LR are the same setting"), "{error}");
}

#[test]
fn keys_of_later_versions_are_refused_by_name() {
    for text in [
        "tuning: {lora: {init_lora_weights: olora}}",
        "model: {type: seq2seq}",
        "train: {optim: galore_adamw}",
        "train: {lr_scheduler_type: reduce_lr_on_plateau}",
        "distributed: {foo: 1}",
    ] {
        let error = refusal(text);
        assert!(error.contains("not yet part of"), "{text}: {error}");
    }
    let hint = |text: &str, hint: &str| assert!(refusal(text).contains(hint), "{}", refusal(text));
    hint("train: {metric_for_best_model: eval_rougeL}", "set train.predict_with_generate: true");
    hint("tuning: {lora: {init_lora_weights: olora}}", "pissa_niter_4 starts at");
    hint("tuning: {lora: {lora_bias: true}}", "set tuning.lora.bias: lora_only");
    hint("train: {greater_is_better: true}", "which direction is better is known");
    hint("gen: {do_sample: true, num_beams: 2}", "a beam search draws nothing");
    hint("gen: {min_new_tokens: 65}", "no answer is that long");
    hint("block_size: 1024", "set data.format: text and data.packing: true");
    hint("datasets: [{path: x}]", "tunesmith import FILE");
    hint("deepspeed: x.json", "set train.deepspeed: FILE");
    hint("accelerate: x.yaml", "set train.accelerate: FILE");
}

#[test]
fn words_and_variables_are_refused_with_the_nearest_name() {
    let error = refused_word("train.batchsize=1");
    assert!(error.contains("argument \"train.batchsize=1\": unknown key train.batchsize"), "{error}");
    assert!(error.ends_with("hint: did you mean train.batch_size?"), "{error}");
    assert!(refused_word("TRAIN_BATCHSIZE=1").ends_with("did you mean train.batch_size?"));
    assert!(refused_word("TUNING_LORA_RR=1").contains("unknown key tuning.lora.rr"));
    assert!(refused_word("TRAIN_BATCH_SIZE").contains("expected KEY=VALUE"));
    assert!(refused_word("train.lr=").contains("train.lr: expected a number, at least 0, found nothing"));
    assert!(refused_word("=1").contains("unknown key"));
    assert!(refused_word("größe=ü").contains("unknown key größe"));
    let folder = Folder::new(&[("a.yaml", "")]);
    let error = folder.refusal(&[], &[("TRAIN_BACH_SIZE", "1")]);
    assert!(error.contains("env TRAIN_BACH_SIZE: unknown setting\n  hint: did you mean TRAIN_BATCH_SIZE?"), "{error}");
    let error = folder.refusal(&[], &[("TRAIN_SEED", "x")]);
    assert!(error.contains("env TRAIN_SEED: train.seed: expected an integer, found the string \"x\""), "{error}");
}

#[test]
fn what_other_toolkits_write_is_refused_with_what_to_write_here() {
    for (word, instead) in [
        ("train.warmup_steps=0.1", "set train.warmup_ratio: 0.1"),
        ("train.save_steps=1.5", "an integer, at least 1, or a share of all steps, between 0 and 1"),
        ("train.logging_steps=0", "an integer, at least 1, or a share of all steps, between 0 and 1"),
        ("train.optim=adamw_hf", "set train.optim: adamw_torch"),
        ("train.lr_scheduler_type=wsd", "set train.lr_scheduler_type: warmup_stable_decay"),
        ("model.device=gpu", "set model.device: cuda"),
        ("model.device=mps", "set model.device: cpu"),
        ("tuning.mode=dpo", "preference training"),
        ("lora_r=8", "set tuning.lora.r"),
        ("train.model_name_or_path=x", "set model.name"),
        ("tuning.lora.peft_type=LORA", "set tuning.mode"),
        ("gen.max_length=64", "set gen.max_new_tokens"),
    ] {
        let error = refused_word(word);
        assert!(error.contains(instead), "{word}: {error}");
    }
}

#[test]
fn contradictions_name_both_keys_and_their_sources() {
    let folder = Folder::new(&[("a.yaml", "train:\n  warmup_ratio: 0.1\n")]);
    let error = folder.refusal(&["train.warmup_steps=5"], &[]);
    assert!(
        error.contains("train.warmup_ratio: 0.1 (a.yaml:2) contradicts train.warmup_steps: 5 (argument)"),
        "{error}"
    );
    for (text, first, second) in [
        ("train: {load_best_model_at_end: true}", "load_best_model_at_end", "eval_strategy"),
        ("train: {dp_ranks: 2, strategy: single}", "dp_ranks", "strategy"),
        ("train: {strategy: zero3, fsdp_sharding_strategy: no_shard}", "fsdp_sharding_strategy", "strategy"),
        ("train: {early_stopping_patience: 2}", "early_stopping_patience", "eval_strategy"),
        ("train: {eval_strategy: epoch}\ndata: {train_path: x}", "eval_strategy", "val_path"),
        ("train: {eval_strategy: steps}\ndata: {split: 0.1}", "eval_strategy", "eval_steps"),
        ("data: {split: 0.1, val_path: x}", "val_path", "split"),
        ("data: {template_path: x, chat_template: phi}", "template_path", "chat_template"),
        ("train: {group_by_length: true}\ndata: {shuffle: false}", "group_by_length", "shuffle"),
        ("train: {group_by_length: true}\ndata: {packing: true}", "group_by_length", "packing"),
        ("train: {lr_scheduler_type: constant, warmup_steps: 3}", "warmup_steps", "lr_scheduler_type"),
        ("tuning: {mode: full, adapter: x}", "tuning.mode", "tuning.adapter"),
        ("tuning: {mode: full, lora: {r: 8}}", "tuning.lora.r", "tuning.mode"),
        ("tuning: {mode: full, lora: {loraplus_lr_ratio: 16}}", "tuning.lora.loraplus_lr_ratio", "tuning.mode"),
        ("tuning: {freeze: {trainable_layers: 2}}", "tuning.freeze.trainable_layers", "tuning.mode"),
        (
            "train: {load_best_model_at_end: true, eval_strategy: epoch, save_strategy: steps}\ndata: {split: 0.1}",
            "save_strategy",
            "eval_strategy",
        ),
        (
            "train: {load_best_model_at_end: true, eval_strategy: steps, eval_steps: 3, save_steps: 4}\ndata: {split: 0.1}",
            "save_steps",
            "eval_steps",
        ),
    ] {
        let error = refusal(text);
        let (head, tail) = error.split_once(" contradicts ").unwrap_or_else(|| panic!("{text}: {error}"));
        assert!(head.contains(first) && tail.contains(second) && tail.contains("hint: "), "{text}: {error}");
    }
    let accepted = load(
        "train: {load_best_model_at_end: true, eval_strategy: steps, eval_steps: 2, save_steps: 4, \
         early_stopping_patience: 3, warmup_steps: 2}\ndata: {val_path: x}",
    );
    assert!(accepted.train.load_best_model_at_end);
}

/// A base for several modes may be included, and the shell may choose another mode; what is given beside the mode or
/// nearer than it must be read by it.
#[test]
fn settings_of_another_mode_are_refused_where_they_are_meant_for_this_run() {
    let folder = Folder::new(&[
        ("base.yaml", "tuning: {mode: lora, lora: {r: 8}}"),
        ("a.yaml", "include: base.yaml\ntuning: {mode: full}"),
    ]);
    assert_eq!(folder.load(&[], &[]).unwrap().config.tuning.mode, config::Mode::Full);
    let error = folder.refusal(&[], &[("TUNING_LORA_R", "4")]);
    assert!(
        error.contains("tuning.lora.r: 4 (env TUNING_LORA_R) contradicts tuning.mode: \"full\" (a.yaml:2)"),
        "{error}"
    );
    let folder = Folder::new(&[("a.yaml", "tuning: {mode: lora, lora: {r: 8}}")]);
    assert_eq!(folder.load(&[], &[("TUNING_MODE", "full")]).unwrap().config.tuning.mode, config::Mode::Full);
    let error = folder.refusal(&["TUNING_MODE=full", "TUNING_LORA_R=4"], &[]);
    assert!(error.contains("tuning.lora.r: 4 (argument) contradicts tuning.mode: \"full\" (argument)"), "{error}");
}

/// What a switch that is off leaves unread is refused, unless the switch is nearer to the user than the key.
#[test]
fn settings_that_nothing_reads_are_refused() {
    let cases = [
        ("train: {predict_with_generate: true}", "train.eval_strategy"),
        ("train: {eval_on_start: true}", "train.eval_strategy"),
        ("train: {eval_steps: 10}", "train.eval_strategy"),
        ("train: {eval_strategy: epoch, generation_rows: 3}\ndata: {val_path: x}", "train.predict_with_generate"),
        (
            "train: {eval_strategy: epoch, eval_accumulation_steps: 3}\ndata: {val_path: x}",
            "train.predict_with_generate",
        ),
        ("train: {early_stopping_threshold: 0.1}", "train.early_stopping_patience"),
        ("gen: {temperature: 0.7}", "gen.do_sample"),
        ("gen: {seed: 3}", "gen.do_sample"),
        ("gen: {length_penalty: 2}", "gen.num_beams"),
        ("eval: {json_schema: schema.json}", "eval.metrics"),
        ("eval: {metrics: [bleu], rouge_stemmer: true}", "eval.metrics"),
        ("eval: {scorer_timeout: 5}", "eval.scorer"),
        ("train: {save_strategy: epoch, save_steps: 10}", "train.save_strategy"),
        ("train: {save_strategy: no, save_steps: 10}", "train.save_strategy"),
        ("train: {optim: sgd, adam_beta1: 0.5}", "train.optim"),
        ("train: {optim: adafactor, adam_beta2: 0.5}", "train.optim"),
        ("train: {optim: lion, adam_epsilon: 1e-6}", "train.optim"),
        ("data: {dedupe_threshold: 0.5}", "data.dedupe"),
        ("data: {dedupe: exact, dedupe_threshold: 0.5}", "data.dedupe"),
        ("data: {mix_strategy: interleave_over}", "data.datasets"),
        ("data: {shuffle: false}\ntrain: {data_seed: 7}", "data.shuffle"),
    ];
    for (text, switch) in cases {
        let error = Folder::new(&[("a.yaml", text)]).refusal(&[], &[]);
        assert!(error.contains(&format!(" contradicts {switch}: ")), "{text}: {error}");
    }
    for text in [
        "train: {save_strategy: epoch, save_steps: 500}",
        "train: {optim: lion, adam_beta2: 0.5}",
        "train: {optim: muon, adam_epsilon: 1e-6}",
        "data: {shuffle: false, split: 0.1}\ntrain: {data_seed: 7}",
    ] {
        Folder::new(&[("a.yaml", text)]).load(&[], &[]).unwrap();
    }
    let folder = Folder::new(&[("a.yaml", "gen: {do_sample: true, temperature: 0.7}")]);
    let greedy = folder.load(&["gen.do_sample=false"], &[]).unwrap();
    assert!(!greedy.config.generation.do_sample);
    let unread: Vec<_> = greedy.settings.iter().filter(|setting| !setting.is_read(&greedy.config)).collect();
    assert!(unread.iter().any(|setting| setting.key == "gen.temperature"));
}

#[test]
fn a_run_needs_a_model_and_rows() {
    let folder = Folder::new(&[("a.yaml", "train: {seed: 1}")]);
    let run = |words: &[&str]| {
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        config::load(&folder.path("a.yaml"), &words, &[], &[])
    };
    assert!(run(&[]).unwrap_err().message().contains("model.name is not set"));
    assert!(run(&["model.name=x"]).unwrap_err().message().contains("data.train_path is not set"));
    assert!(run(&["model.local_dir=x", "data.train_path=y"]).is_ok());
    assert!(run(&["model.name=Qwen/Qwen3-0.6B", "model.revision=main", "data.train_path=y"]).is_ok());
    for word in ["model.token=hf_secret", "HF_TOKEN=hf_secret"] {
        let text = run(&[word]).unwrap_err().to_string();
        assert!(text.contains("=***") && !text.contains("hf_secret"), "{text}");
    }
    // What only counts or names tokens of text is shown.
    for word in ["gen.min_tokens=5", "gen.eos_token=two"] {
        let text = run(&[word]).unwrap_err().to_string();
        assert!(text.contains(word), "{text}");
    }
}

#[test]
fn the_model_folder_is_local_dir_or_name() {
    let folder = Folder::new(&[("m/config.json", "{}")]);
    let dir = folder.path("m");
    let config = load(&format!("model: {{name: {}}}", dir.display()));
    assert_eq!(config.model.dir().unwrap(), dir);
    let config = load(&format!("model: {{name: a/b, local_dir: {}}}", dir.display()));
    assert_eq!(config.model.dir().unwrap(), dir);
    let error = load("model: {local_dir: no/such/folder}").model.dir().unwrap_err();
    assert_eq!(error.kind(), Kind::Model);
    assert!(error.message().contains("model.local_dir: no/such/folder does not exist"), "{error}");
}
