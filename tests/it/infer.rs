//! `tunesmith infer` and `chat`, and validations that answer: the binary on the tiny model of the run tests.
use crate::run::fixture::{Fixture, model_config, said, train, tunesmith, write_model_of};
use serde_json::Value;
use std::io::Write as _;
use std::path::Path;
use std::process::{Output, Stdio};

fn lines(path: &Path) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn run(args: &[&str], input: &str) -> Output {
    let mut child =
        tunesmith(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn answered(args: &[&str], input: &str) -> String {
    let output = run(args, input);
    assert!(output.status.success(), "{}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// What was printed, without the line break that ends it.
fn line(text: &str) -> &str {
    text.strip_suffix('\n').unwrap()
}

#[test]
fn a_run_is_scored_while_it_goes_and_asked_afterwards() {
    let fixture = Fixture::new();
    let config = fixture.config(
        "run",
        &[
            "train.eval_strategy: steps",
            "train.eval_steps: 3",
            "train.save_strategy: steps",
            "train.save_steps: 3",
            "train.eval_on_start: true",
            "train.predict_with_generate: true",
            "train.generation_max_new_tokens: 5",
            "train.metric_for_best_model: eval_exact_match",
            "train.load_best_model_at_end: true",
            "gen.max_new_tokens: 6",
        ],
    );
    let output = train(&config, &[]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("best eval exact_match"), "{}", said(&output));
    let metrics = lines(&fixture.path("out/metrics.jsonl"));
    let scored: Vec<u64> = metrics
        .iter()
        .filter(|line| line["eval_scores"]["exact_match"].is_number())
        .map(|line| line["step"].as_u64().unwrap())
        .collect();
    assert_eq!(scored, [0, 3, 6]);
    let wrong = train(&config, &["train.metric_for_best_model=rouge9", "--overwrite"]);
    assert_eq!(wrong.status.code(), Some(2), "{}", said(&wrong));
    assert!(said(&wrong).contains("evaluations have loss, "), "{}", said(&wrong));
    assert_eq!(lines(&fixture.path("out/metrics.jsonl")).len(), metrics.len(), "refused before anything was removed");

    // One prompt in three ways, with and without the adapter.
    let config = config.to_str().unwrap();
    let tuned = answered(&["infer", config, "--prompt", "abc"], "");
    assert_eq!(tuned, answered(&["infer", config], "abc\n"));
    let json: Value = serde_json::from_str(&answered(&["infer", config, "--prompt", "abc", "--json"], "")).unwrap();
    assert_eq!(json["answer"].as_str().unwrap(), line(&tuned));
    assert_eq!(json["prompt_tokens"], 6, "user, abc, end, assistant");
    let model = fixture.path("model");
    let model = model.to_str().unwrap();
    let base = answered(&["infer", config, "--base", "--prompt", "abc"], "");
    assert_eq!(base, answered(&["infer", "--model", model, "--prompt", "abc", "--max-new-tokens", "6"], ""));
    let adapter = fixture.path("out/adapter");
    let named =
        ["infer", "--model", model, "--adapter", adapter.to_str().unwrap(), "--prompt", "abc", "gen.max_new_tokens=6"];
    assert_eq!(tuned, answered(&named, ""));
    let checkpoint = fixture.path("out/checkpoint-000006");
    if checkpoint.is_dir() {
        answered(&["infer", config, "--checkpoint", checkpoint.to_str().unwrap(), "--prompt", "abc"], "");
    }

    // A file in several forms, cut off and gone on with.
    let (rows, out) = (fixture.path("rows.jsonl"), fixture.path("answers.jsonl"));
    let mut text = String::from(
        "{\"messages\": [{\"role\": \"user\", \"content\": \"abc\"}, {\"role\": \"assistant\", \"content\": \"cba\"}]}\n",
    );
    text += "{\"question\": \"abc\", \"id\": 7}\n\"abc\"\n{\"prompt\": [{\"role\": \"user\", \"content\": \"abc\"}]}\n";
    for number in 0..30 {
        text += "{\"instruction\": \"word N\"}\n".replace('N', &number.to_string()).as_str();
    }
    std::fs::write(&rows, text).unwrap();
    let batch =
        ["infer", config, "--in", rows.to_str().unwrap(), "--out", out.to_str().unwrap(), "--temperature", "0.9"];
    answered(&batch, "");
    let whole = std::fs::read_to_string(&out).unwrap();
    assert_eq!(whole.lines().count(), 34);
    assert_eq!(lines(&out)[1]["id"], 7);
    let cut: usize = whole.lines().take(20).map(|line| line.len() + 1).sum::<usize>() + 9;
    std::fs::write(&out, &whole[..cut]).unwrap();
    answered(&batch, "");
    assert_eq!(std::fs::read_to_string(&out).unwrap(), whole, "the same answers, drawn again");
    answered(&batch, "");
    let greedily = run(&batch[..6], "");
    assert_eq!(greedily.status.code(), Some(2), "{}", said(&greedily));
    assert!(
        said(&greedily).contains("answers.jsonl:1: this command answers that row differently"),
        "{}",
        said(&greedily)
    );
    assert_eq!(std::fs::read_to_string(&out).unwrap(), whole, "answers of other settings stay as they are");
    let other = fixture.path("base.jsonl");
    answered(&["infer", config, "--base", "--in", rows.to_str().unwrap(), "--out", other.to_str().unwrap()], "");
    let greedy: Vec<&str> = batch[..6].to_vec();
    let refused = run(&["infer", config, "--in", config, "--out", out.to_str().unwrap()], "");
    assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
    std::fs::remove_file(&out).unwrap();
    answered(&greedy, "");
    assert_ne!(lines(&out), lines(&other), "the adapter speaks");
    for row in &lines(&out)[..4] {
        assert_eq!(row["answer"].as_str().unwrap(), line(&tuned), "one prompt in four forms");
    }

    // Flags of sampling draw, with or without a temperature.
    let drawn = answered(&["infer", config, "--prompt", "abc", "--top-k", "200", "--seed", "5"], "");
    let set = ["infer", config, "--prompt", "abc", "gen.do_sample=true", "gen.top_k=200", "gen.seed=5"];
    assert_eq!(drawn, answered(&set, ""));
    assert_ne!(drawn, tuned);

    // A row's own answer stays beside ours, and the file still goes on.
    let own = "{\"question\": \"abc\", \"answer\": \"cba\"}\n";
    std::fs::write(&rows, own).unwrap();
    std::fs::remove_file(&out).unwrap();
    answered(&greedy, "");
    let first = lines(&out);
    assert_eq!((&first[0]["own_answer"], first[0]["answer"].as_str().unwrap()), (&Value::from("cba"), line(&tuned)));
    std::fs::write(&rows, own.repeat(2)).unwrap();
    answered(&greedy, "");
    assert_eq!(lines(&out), [first[0].clone(), first[0].clone()]);

    // A conversation.
    let saved = fixture.path("talk.jsonl");
    let talk = format!(
        "/help\n/save {0}\nabc\n/save {1}\n/base\nabc\n/tuned\n/save {0}\n/what\n/system be kind\nxy\n/quit\nnever\n",
        saved.display(),
        // Its last line is no conversation: refused, and the conversation goes on.
        rows.display()
    );
    let output = run(&["chat", config], &talk);
    assert!(output.status.success(), "{}", said(&output));
    let said = said(&output);
    for part in
        ["the conversation is empty", "rows.jsonl is there already", "asking the base model", "/what is not a command"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(output.stdout.starts_with(line(&tuned).as_bytes()), "{said}");
    let messages = lines(&saved)[0]["messages"].as_array().unwrap().clone();
    assert_eq!(messages.len(), 4);
    assert_eq!(messages[1]["content"].as_str().unwrap(), line(&tuned));
}

#[test]
fn what_cannot_be_asked_is_refused() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &[]);
    let config = config.to_str().unwrap();
    let refusal = |args: &[&str], code: i32, hint: &str| {
        let output = run(args, "");
        assert_eq!(output.status.code(), Some(code), "{}", said(&output));
        assert!(said(&output).contains(hint), "{}", said(&output));
    };
    refusal(&["infer", "--prompt", "x"], 2, "--model DIR");
    refusal(&["infer", config, "--prompt", "x"], 5, "--base");
    refusal(&["infer", config, "--base", "--prompt", &"x".repeat(200)], 3, "no room for an answer");
    refusal(&["infer", config, "--base", "--prompt", "x", "--top-p", "2"], 2, "gen.top_p");
    let rows = fixture.path("rows.jsonl");
    std::fs::write(&rows, "{\"question\": \"a\"}\n{\"colour\": 1}\n").unwrap();
    let out = fixture.path("out.jsonl");
    let batch = ["infer", config, "--base", "--in", rows.to_str().unwrap(), "--out", out.to_str().unwrap()];
    refusal(&batch, 3, "row 2");
    assert!(!out.exists());
    let table = fixture.path("rows.csv");
    std::fs::write(&table, "question,answer\na,b\n").unwrap();
    let of_table = ["infer", config, "--base", "--in", table.to_str().unwrap(), "--out", out.to_str().unwrap()];
    refusal(&of_table, 3, "the lines of a .csv file are not prompts");
    let packed = fixture.path("out.jsonl.gz");
    let to_packed = ["infer", config, "--base", "--in", rows.to_str().unwrap(), "--out", packed.to_str().unwrap()];
    refusal(&to_packed, 2, "plain text, not .gz");
    assert!(!out.exists() && !packed.exists());
    std::fs::write(&rows, "{\"question\": \"a\"}\n{\"question\": b}\n").unwrap();
    refusal(&batch, 3, "rows.jsonl:2:14: malformed JSON: expected value");
    std::fs::write(&rows, "{\"question\": \"a\"}\n{\"colour\": 1}\n").unwrap();
    refusal(
        &["infer", config, "--base", "--prompt", "x", "--temperature", "0", "--top-p", "0.5"],
        2,
        "--top-p contradicts",
    );
    refusal(
        &["infer", config, "--base", "--prompt", "x", "--top-p", "0.5", "--num-beams", "2"],
        2,
        "a beam search draws nothing",
    );
    refusal(&["infer", config, "--base", "--prompt", "x", "--out", out.to_str().unwrap()], 2, "--out");
    // The questions are never written over, whatever they are called.
    let text = std::fs::read(&rows).unwrap();
    let link = fixture.path("link.jsonl");
    std::os::unix::fs::symlink(&rows, &link).unwrap();
    for out in [&rows, &link] {
        for more in [None, Some("--overwrite")] {
            let args = ["infer", config, "--base", "--in", rows.to_str().unwrap(), "--out", out.to_str().unwrap()];
            refusal(&args.into_iter().chain(more).collect::<Vec<_>>(), 2, "it is the --in file");
        }
    }
    assert_eq!(std::fs::read(&rows).unwrap(), text);
}

/// They stopped at `max_position_embeddings`, where training goes on.
#[test]
fn texts_are_as_long_as_scaled_positions_let_them_be() {
    let fixture = Fixture::new();
    let model = fixture.path("model");
    let mut config = model_config();
    let ask = |length: usize| {
        let prompt = "x".repeat(length);
        let given = ["--raw", "--prompt", &prompt, "--max-new-tokens", "4", "--json"];
        run(&[&["infer", "--model", model.to_str().unwrap()], &given[..]].concat(), "")
    };
    config["max_position_embeddings"] = 32.into();
    write_model_of(&model, &config);
    assert!(said(&ask(40)).contains("the model's context 32: there is no room"), "{}", said(&ask(40)));
    // Rows of training are as long by default.
    let rows = fixture.path("long.jsonl");
    std::fs::write(&rows, serde_json::json!({"text": "x".repeat(100)}).to_string()).unwrap();
    let data = ["data", "--model", model.to_str().unwrap(), "--data", rows.to_str().unwrap(), "data.use_cache=false"];
    assert!(said(&run(&data, "")).contains("1 row cut to 32 tokens"), "{}", said(&run(&data, "")));
    config["rope_scaling"] = serde_json::json!({"rope_type": "dynamic", "factor": 4.0});
    write_model_of(&model, &config);
    let output = ask(40);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap()["prompt_tokens"], 40);
    assert!(said(&ask(128)).contains("the model's context 128: there is no room"), "{}", said(&ask(128)));
    let whole = run(&data, "");
    assert!(whole.status.success() && !said(&whole).contains(" cut to "), "{}", said(&whole));
}

/// An adapter on a base that it was not trained on is refused, as by `merge` and `eval`, unless that is asked for.
#[test]
fn the_base_is_held_against_the_adapter_s_stamp() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 2", "gen.max_new_tokens: 3"]);
    assert!(train(&config, &[]).status.success());
    let config = config.to_str().unwrap();
    let (model, adapter) = (fixture.path("model"), fixture.path("out/adapter").display().to_string());
    answered(&["infer", config, "--prompt", "abc"], "");
    let weights = model.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&1.5f32.to_le_bytes());
    std::fs::write(&weights, bytes).unwrap();
    let named = ["infer", "--model", model.to_str().unwrap(), "--adapter", &*adapter, "--prompt", "abc"];
    for args in [&["infer", config, "--prompt", "abc"][..], &named, &["chat", config], &["eval", config, "--alone"]] {
        let refused = run(args, "abc\n");
        let text = said(&refused);
        assert_eq!(refused.status.code(), Some(5), "{args:?}: {text}");
        assert!(text.contains("base_model: ") && text.contains("--allow base_model"), "{text}");
        let allowed = [args, &["--allow", "base_model"]].concat();
        let output = run(&allowed, "abc\n");
        assert!(output.status.success() && said(&output).contains("base_model: "), "{args:?}: {}", said(&output));
        let odd = run(&[args, &["--allow", "dtype"]].concat(), "");
        assert_eq!(odd.status.code(), Some(2), "only the base is compared: {}", said(&odd));
    }
    answered(&["infer", config, "--base", "--prompt", "abc"], "");
    // Without a stamp a note says that nothing was compared.
    std::fs::remove_file(fixture.path("out/backend.json")).unwrap();
    assert!(said(&run(&named, "")).contains("no backend.json"));
}

#[test]
fn thinking_is_a_variable_of_the_template() {
    let fixture = Fixture::new();
    let template = fixture.path("thinks.jinja");
    let source = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}ab{% elif enable_thinking is defined %}abc{% endif %}\
        {{ reasoning_effort or '' }}";
    std::fs::write(&template, source).unwrap();
    let (model, path) = (fixture.path("model"), format!("data.template_path={}", template.display()));
    let tokens = |more: &[&str]| {
        let fixed =
            ["infer", "--model", model.to_str().unwrap(), "--prompt", "a", "--json", "--max-new-tokens", "2", &path];
        let json: Value = serde_json::from_str(&answered(&[&fixed, more].concat(), "")).unwrap();
        json["prompt_tokens"].as_u64().unwrap()
    };
    let plain = tokens(&[]);
    assert_eq!(tokens(&["--thinking"]), plain + 2);
    assert_eq!(tokens(&["--no-thinking"]), plain + 3);
    assert_eq!(tokens(&["--no-thinking", "--reasoning-effort", "cba"]), plain + 6);
    assert_eq!(tokens(&["data.chat_template_kwargs={enable_thinking: false}"]), plain + 3);
    // `chat` has the same flags.
    std::fs::write(&template, "{% if enable_thinking %}{{ raise_exception('it thinks') }}{% endif %}").unwrap();
    for (flags, thinks) in [(&[][..], false), (&["--no-thinking"], false), (&["--thinking"], true)] {
        let fixed = ["chat", "--model", model.to_str().unwrap(), "--max-new-tokens", "2", &path];
        let talked = run(&[&fixed[..], flags].concat(), "a\n");
        assert_eq!(said(&talked).contains("it thinks"), thinks, "{}", said(&talked));
    }
    for (flag, name) in [("--no-thinking", "enable_thinking"), ("--reasoning-effort=low", "reasoning_effort")] {
        let output = run(&["infer", "--model", model.to_str().unwrap(), "--prompt", "a", flag], "");
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains(name) && said(&output).contains("does not read"), "{}", said(&output));
    }
}

#[test]
fn an_empty_stop_text_is_refused() {
    let text = Fixture::new();
    let model = text.path("model").display().to_string();
    let refused = tunesmith(&["infer", "--model", &model, "--raw", "--prompt", "a", "--stop", ""]).output().unwrap();
    assert!(refused.status.code() == Some(2) && said(&refused).contains("--stop"), "{}", said(&refused));
}

/// Overwrites the number at `index` of a float32 tensor.
fn overwrite(file: &Path, tensor: &str, index: usize, value: f32) {
    let mut bytes = std::fs::read(file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let parsed: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    assert_eq!(parsed[tensor]["dtype"], "F32", "{tensor}");
    let at = 8 + header + parsed[tensor]["data_offsets"][0].as_u64().unwrap() as usize + 4 * index;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    std::fs::write(file, bytes).unwrap();
}

#[test]
fn scores_that_are_not_finite_are_an_error_and_no_answer() {
    let fixture = Fixture::new();
    let model = fixture.path("model");
    let refused = |more: &[&str], reason: &str| {
        let args = [&["infer", "--model", model.to_str().unwrap(), "--prompt", "abc"], more].concat();
        let output = run(&args, "");
        assert_eq!(output.status.code(), Some(8), "{}", said(&output));
        assert!(said(&output).contains(reason), "{}", said(&output));
    };
    refused(&["--temperature", "1e-300"], "after the settings of gen");
    refused(&["gen.repetition_penalty=1e-300"], "after the settings of gen");
    // Finite weights of which one logit becomes infinite, and another its negative; the embedding is the head.
    let weights = model.join("model.safetensors");
    overwrite(&weights, "model.norm.weight", 0, 3e38);
    for (row, value) in [3e38, -3e38].into_iter().enumerate() {
        overwrite(&weights, "model.embed_tokens.weight", row * 32, value);
    }
    for settings in [&[][..], &["--temperature", "0.9"], &["gen.num_beams=2"]] {
        refused(settings, "logits for token 1 of an answer are not finite");
    }
}

#[test]
fn a_model_that_is_not_as_it_was_written_is_refused() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["tuning.mode: full", "train.max_steps: 1"]);
    assert!(train(&config, &[]).status.success());
    let (model, config) = (fixture.path("out/model"), config.to_str().unwrap());
    let (name, again) = (format!("model.name={}", model.display()), fixture.path("again"));
    let out = format!("train.output_dir={}", again.display());
    let calls: [&[&str]; 3] = [
        &["infer", "--model", model.to_str().unwrap(), "--prompt", "abc"],
        &["infer", config, "--prompt", "abc"],
        &["train", config, &name, &out],
    ];
    let refuses = |file: &str| {
        for call in &calls {
            let refused = run(call, "");
            assert_eq!(refused.status.code(), Some(4), "{call:?}: {}", said(&refused));
            for text in [file, "not as tunesmith wrote it", "remove", "manifest.json"] {
                assert!(said(&refused).contains(text), "{call:?}: {}", said(&refused));
            }
        }
        assert!(!again.join("metrics.jsonl").exists());
    };
    for file in ["model.safetensors", "config.json", "tokenizer.json"] {
        let path = model.join(file);
        let written = std::fs::read(&path).unwrap();
        let mut altered = written.clone();
        // One bit in a weight; in JSON, white space.
        match file {
            "model.safetensors" => altered[written.len() - 3] ^= 1,
            _ => altered.push(b'\n'),
        }
        std::fs::write(&path, &altered).unwrap();
        refuses(file);
        std::fs::write(&path, &written[..written.len() - 1]).unwrap();
        refuses(file);
        std::fs::write(&path, &written).unwrap();
    }
    // What people edit is theirs.
    std::fs::write(model.join("README.md"), "# Mine\n").unwrap();
    let before = answered(calls[0], "");
    // Whoever means it says so.
    let tokenizer = model.join("tokenizer.json");
    let text = std::fs::read_to_string(&tokenizer).unwrap();
    std::fs::write(&tokenizer, text + "\n").unwrap();
    refuses("tokenizer.json");
    std::fs::remove_file(model.join("manifest.json")).unwrap();
    assert_eq!(answered(calls[0], ""), before);
    answered(calls[2], "");
}

#[test]
fn an_adapter_that_is_not_as_it_was_written_is_refused() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &[]);
    let output = train(&config, &[]);
    assert!(output.status.success(), "{}", said(&output));
    let (config, adapter) = (config.to_str().unwrap(), fixture.path("out/adapter"));
    let ask = ["infer", config, "--prompt", "abc"];
    let before = answered(&ask, "");
    let settings = adapter.join("adapter_config.json");
    let written = std::fs::read_to_string(&settings).unwrap();
    let altered = written.replacen("\"lora_alpha\": ", "\"lora_alpha\": 1", 1);
    assert_ne!(written, altered);
    std::fs::write(&settings, &altered).unwrap();
    for args in [&ask[..], &["merge", config, "--output", fixture.path("merged").to_str().unwrap()]] {
        let refused = run(args, "");
        assert_eq!(refused.status.code(), Some(5), "{}", said(&refused));
        assert!(said(&refused).contains("adapter_config.json") && said(&refused).contains("manifest.json"));
    }
    // Whoever means it says so; and other programs' manifests are not ours.
    std::fs::remove_file(adapter.join("manifest.json")).unwrap();
    answered(&ask, "");
    std::fs::write(&settings, &written).unwrap();
    std::fs::write(adapter.join("manifest.json"), "{\"name\": \"of a web page\"}").unwrap();
    assert_eq!(answered(&ask, ""), before);
}
