//! Configuration files and words that are made to do harm, or look so.
use super::*;
use serde_json::{Value, json};
use std::fmt::Write;
use tunesmith::config::foreign::{self, Format};
use tunesmith::config::vision::Processing;

fn refused_quickly(contents: impl AsRef<[u8]>, message: &str) {
    let folder = Folder::new(&[]);
    folder.write("a.yaml", contents);
    let start = Instant::now();
    let error = folder.refusal(&[], &[]);
    assert!(start.elapsed() < Duration::from_secs(5), "{message}: took {:?}", start.elapsed());
    assert!(error.contains(message), "{error}\nshould contain\n{message}");
}

#[test]
fn aliases_cannot_multiply_without_end() {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..12 {
        let items = vec![format!("*a{}", level - 1); 10].join(", ");
        writeln!(text, "a{level}: &a{level} [{items}]").unwrap();
    }
    refused_quickly(text, "more than 100000 values");
}

#[test]
fn deep_nesting_is_refused() {
    refused_quickly(format!("train: {}", "[".repeat(10_000)), "brackets");
    refused_quickly(format!("train: {}{}", "{a: ".repeat(1_000), "}".repeat(1_000)), "recursion limit");
    refused_quickly("- ".repeat(500_000), "recursion limit");
    let indented: Vec<String> = (0..1_000).map(|depth| format!("{}a:\n", " ".repeat(depth))).collect();
    refused_quickly(indented.concat(), "recursion limit");
}

#[test]
fn a_byte_order_mark_is_no_part_of_the_text() {
    for text in ["train: {seed: 7}\n", "{\"train\": {\"seed\": 7}}", "// JSON\n{\"train\": {\"seed\": 7}}"] {
        assert_eq!(load(&format!("\u{feff}{text}")).train.seed, 7, "{text}");
    }
    refused_quickly("\u{feff}train:\n  sede: 1\n", "a.yaml:2:3: unknown key train.sede");
}

#[test]
fn huge_files_are_not_read() {
    let folder = Folder::new(&[]);
    std::fs::File::create(folder.path("a.yaml")).unwrap().set_len(100 << 20).unwrap();
    assert!(folder.refusal(&[], &[]).contains("a.yaml: larger than 1048576 bytes"));
    refused_quickly(format!("train: {{seed: 1}}\n{}", "# x\n".repeat(400_000)), "larger than");
}

#[test]
fn many_keys_and_long_ones_take_no_time() {
    let many = (0..40_000).map(|index| format!("    p{index}: 1\n")).collect::<Vec<_>>().concat();
    refused_quickly(format!("tuning:\n  lora:\n   rank_pattern:\n{many}    p0: 1\n"), "\"p0\" is given twice");
    refused_quickly(format!("{}: 1", "k".repeat(900)), "unknown key kkk");
    refused_quickly(format!("train: {{output_dir: [\"{}\"]}}", "ü".repeat(100_000)), "expected a path");
}

#[test]
fn what_is_no_yaml_names_the_place() {
    refused_quickly(b"train:\n  seed: \xff\xfe\n", "a.yaml:2: not valid UTF-8 (byte 15)");
    refused_quickly("train:\n\tseed: 1\n", "a.yaml:2:1: found character that cannot start any token");
    refused_quickly("train:\n\tseed: 1\n", "hint: this line has a tab; YAML is indented by spaces");
    refused_quickly("train:\n  seed: 1\n lr: 2\n", "a.yaml:3:");
    refused_quickly("train: {seed: 1", "a.yaml:");
    refused_quickly("train: *nowhere", "a.yaml:1:8: unknown anchor");
    refused_quickly("a: 1\n---\nb: 2\n", "more than one document");
    refused_quickly("train: !python/object:os.system {}", "expected a value without a tag");
    refused_quickly("1: 2\n", "expected a key, found the integer 1");
    refused_quickly("- train\n", "expected sections such as `train:`, found a list of 1 item");
    refused_quickly("just words", "found the string \"just words\"");
    refused_quickly("train: {<<: {seed: 1}}", "unknown key train.<<");
    refused_quickly("train: {seed: 1}\0", "a.yaml:1");
}

#[test]
fn no_value_of_another_toolkit_s_key_does_worse_than_being_refused() {
    const VALUES: [&str; 24] = [
        "1e30",
        "-1",
        "NaN",
        "1e400",
        "-1e400",
        "0",
        "1.5",
        "99999999999999999999999999999999999999999",
        "18446744073709551615",
        "9223372036854775808",
        "999999999999999",
        "null",
        "true",
        "[]",
        "{}",
        "[[]]",
        "{\"a\": {}}",
        "\"\"",
        "\"x\"",
        "\"1e30\"",
        "\"-1\"",
        "\"\\u0000\"",
        "[1e308, 1e308]",
        "[\"a\", 1, null]",
    ];
    let mut refused = 0;
    for format in [Format::DeepSpeed, Format::Accelerate, Format::Fsdp] {
        for key in format.keys() {
            for value in VALUES {
                let nested = key
                    .replace('*', "x")
                    .rsplit('.')
                    .fold(value.to_owned(), |below, part| format!("{{{part:?}: {below}}}"));
                if let Err(error) = foreign::check(format, Path::new("a.json"), &nested) {
                    assert_eq!(error.kind(), Kind::Config, "{nested}: {error}");
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 2000, "{refused}");
    let unended = foreign::check(Format::DeepSpeed, Path::new("a.json"), "\n/* {\"train_batch_size\": 1}").unwrap_err();
    assert!(unended.to_string().contains("a.json:2: a comment begins with /* and has no end"), "{unended}");
}

#[test]
fn values_that_no_image_survives_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let open = |key: &str, value: Value| {
        let mut settings = json!({"image_processor_type": "SiglipImageProcessor", "size": 32});
        settings[key] = value;
        std::fs::write(folder.path().join("preprocessor_config.json"), settings.to_string()).unwrap();
        Processing::open(folder.path())
    };
    for (key, values) in [
        ("image_std", json!([[0, 1, 1], [-0.5, 0.5, 0.5], [1e-40, 1, 1], [1e9, 1, 1], [0.5], [], "NaN", [null, 1, 1]])),
        ("image_mean", json!([[1e300, 0, 0], [0.5], [0, 0, 0, 0], {"0": 1}])),
        ("rescale_factor", json!([0, -1, 1e-30, 1e30, "1"])),
        ("size", json!([0, -1, 1e9, 16385, "32", {"height": 32}, {"height": 0, "width": 32}, {"longest_edge": 32}])),
    ] {
        for value in values.as_array().unwrap() {
            let error = open(key, value.clone()).unwrap_err();
            let named = error.message().contains("preprocessor_config.json") && error.message().contains(key);
            assert!(error.kind() == Kind::Model && named, "{key}: {value}: {error}");
        }
    }
    for (key, value) in
        [("image_std", json!([1e-6, 1, 1e5])), ("rescale_factor", json!(1e-9)), ("image_mean", json!(0.5))]
    {
        assert!(open(key, value.clone()).is_ok(), "{key}: {value}");
    }
}

#[test]
fn a_missing_file_a_folder_and_a_device_are_refused() {
    let folder = Folder::new(&[("a.yml", "")]);
    let error = folder.refusal(&[], &[]);
    assert!(error.starts_with("config error: cannot read a.yaml: No such file"), "{error}");
    assert!(error.ends_with("hint: did you mean a.yml?"), "{error}");
    std::fs::create_dir(folder.path("a.yaml")).unwrap();
    assert!(folder.refusal(&[], &[]).contains("cannot read a.yaml: Is a directory"));
    let error = config::load_partial(Path::new("/dev/zero"), &[], &[], &[]).unwrap_err();
    assert!(error.message().contains("a device, not a regular file"), "{error}");
}

/// Pieces that a configuration is made of, so that random texts get past the first character.
fn yaml_like() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "train",
        "lora",
        "tuning",
        "lr",
        "include",
        "seed",
        ":",
        ": ",
        "\n",
        "\n  ",
        "\n    ",
        "{",
        "}",
        "[",
        "]",
        ", ",
        "-",
        "- ",
        "&a ",
        "*a",
        "!!int ",
        "!x ",
        "|\n",
        ">\n",
        "'",
        "\"",
        "#",
        "~",
        "1e-4",
        "9999999999999999999999",
        ".inf",
        "%",
        "@",
        "?",
        "? ",
        "\t",
        "\u{feff}",
        "ü",
        "---\n",
        "...\n",
        "<<",
        "\\",
        "\u{85}",
    ]);
    prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let folder = Folder::new(&[]);
        folder.write("a.yaml", bytes);
        let _ = folder.load(&[], &[]);
    }

    #[test]
    fn no_text_that_looks_like_yaml_makes_it_panic(text in yaml_like()) {
        let folder = Folder::new(&[("a.yaml", &text)]);
        if let Err(error) = folder.load(&[], &[]) {
            prop_assert_eq!(error.kind(), Kind::Config);
        }
    }

    #[test]
    fn no_word_makes_it_panic(key in "[a-zA-Z_.äß=]{0,20}", value in yaml_like()) {
        let folder = Folder::new(&[("a.yaml", "")]);
        let _ = folder.load(&[&format!("{key}={value}")], &[]);
        let _ = folder.load(&[&format!("train.lr={value}")], &[(&format!("TRAIN_{key}"), &value)]);
        let _ = folder.load(&[&format!("tuning.lora.target_modules={value}")], &[("DATA_TRAIN_PATH", &value)]);
    }
}
