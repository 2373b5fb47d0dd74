//! Input made to hang, to exhaust memory or to crash: each ends in an error that says what was found.
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::json;
use tunesmith::data::row::Conversation;
use tunesmith::data::{ChatTemplate, Tokenizer};
use tunesmith::{Error, Kind};

use super::{assert_refused, load_text, tokenizer};

fn render(source: &str) -> Result<String, Error> {
    let messages = vec![serde_json::json!({"role": "user", "content": "x"})];
    let conversation = Conversation { messages, ..Conversation::default() };
    let template = ChatTemplate::compile(source, "test", &tokenizer("bpe_gpt2"))?;
    template.render(&conversation, false).map(|rendered| rendered.text)
}

/// What `body` makes of `ns.v` (at first a string), 60 times over.
fn repeated(body: &str) -> String {
    format!("{{% set ns = namespace(v='xxxx') %}}{{% for i in range(60) %}}{body}{{% endfor %}}{{{{ ns.v }}}}")
}

/// It is a limit that stops the template, not some mistake in it.
fn assert_stopped(source: &str) {
    let error = render(source).unwrap_err();
    let start: String = source.chars().take(200).collect();
    assert_eq!(error.kind(), Kind::Model, "{start}: {error}");
    let limits = [
        "larger than",
        "too much text",
        "deep",
        "width",
        "namespace",
        "steps",
        "ran for",
        "recursi",
        "indent",
        "parts",
        "one step",
    ];
    assert!(limits.iter().any(|limit| error.message().contains(limit)), "{start}: {error}");
}

#[test]
fn templates_that_grow_without_end_are_stopped() {
    let growing = [
        repeated("{% set ns.v = ns.v ~ ns.v %}"),
        repeated("{% set ns.v = ns.v + ns.v %}"),
        repeated("{% set ns.v = ns.v * 9 %}"),
        repeated("{% set ns.v = ns.v|replace('x', 'xxx') %}"),
        repeated("{% set ns.v = ns.v.replace('', ns.v) %}"),
        repeated("{% set ns.v = [ns.v, ns.v]|join(ns.v) %}"),
        repeated("{% set ns.v = ns.v.join([ns.v, ns.v]) %}"),
        repeated("{% set ns.v = '%s%s'|format(ns.v, ns.v) %}"),
        repeated("{% set ns.v = '%s%s' % (ns.v, ns.v) %}"),
        repeated("{% set ns.v = '{}{}'.format(ns.v, ns.v) %}"),
        repeated("{% set ns.v = [ns.v, ns.v] %}"),
        repeated("{% set ns.v = (ns.v, ns.v) %}"),
        repeated("{% set ns.v = {'a': ns.v, 'b': ns.v} %}"),
        repeated("{% set ns.v = dict(a=ns.v, b=ns.v) %}"),
        repeated("{% set ns.v = [ns.v, ns.v]|tojson %}"),
        repeated("{% set ns.v = [ns.v, ns.v]|string %}"),
        repeated("{% set w %}{{ ns.v }}{{ ns.v }}{% endset %}{% set ns.v = w %}"),
        repeated("{% set ns.v = ns.v|indent(99999999, true) %}"),
        repeated("{% set ns.v = [ns.v]|list + [ns.v]|list %}{% set ns.v = ns.v|map('string')|join %}"),
        "{% macro m(v, n) %}{{ m(v ~ v, n - 1) if n else v }}{% endmacro %}{{ m('xxxx', 40) }}".into(),
        "{% for a in ['xxxx' * 4000000] %}{% for b in [a ~ a] %}{{ b ~ b }}{% endfor %}{% endfor %}".into(),
        "{{ 'x' * 100000000 ~ 'x' * 100000000 ~ 'x' * 100000000 }}".into(),
        "{{ ((1,) * 100000000)|length }}".into(),
        "{{ ([1] * 100000000)|list|length }}".into(),
        "{{ '%1000000000d' % 1 }}".into(),
        "{{ '{:1000000000}'.format(1) }}".into(),
        "{{ '%*d' % (1000000000, 1) }}".into(),
        "{{ [1]|tojson(indent=1000000000) }}".into(),
        format!(
            "{{% for i in range(99999) %}}{{% set w %}}{}{{% endset %}}{{{{ w }}}}{{% endfor %}}",
            "raw text ".repeat(2000)
        ),
    ];
    for source in growing {
        let begin = Instant::now();
        assert_stopped(&source);
        assert!(begin.elapsed() < Duration::from_secs(20), "{source}: {:?}", begin.elapsed());
    }
}

#[test]
fn one_call_of_a_filter_or_a_test_does_not_take_long() {
    for source in [
        "{{ range(99999)|select('in', range(99999)|list)|list|length }}",
        "{{ range(99999)|map('string')|reject('in', 'ab' * 2000000)|list|length }}",
        "{{ (['ab'] * 1000000)|sum(start='')|length }}",
        "{{ ([['ab']] * 500000)|sum(start=[])|length }}",
        "{{ (['x'] * 1000000)|sort|length }}",
        "{{ ([[1, 2]] * 1000000)|unique|list|length }}",
        "{{ ([{'a': 1}] * 500000)|groupby('a')|list|length }}",
        "{{ (['x'] * 1000)|map('replace', 'x', 'y' * 4000000)|list|length }}",
        "{{ ([['x', 'x']] * 1000)|map('join', 'y' * 4000000)|list|length }}",
        "{{ ([['x']] * 100000)|pprint|length }}",
    ] {
        let began = Instant::now();
        assert_stopped(source);
        assert!(began.elapsed() < Duration::from_secs(30), "{source}: {:?}", began.elapsed());
    }
    for (source, expected) in [
        ("{{ [3, 1, 2]|sort|join(',') }}", "1,2,3"),
        ("{{ ['b', 'a', 'b']|unique|join(',') }}", "b,a"),
        ("{{ [1, 2.5]|sum }} {{ ['a', 'b']|sum(start='') }} {{ [[1], [2]]|sum(start=[])|length }}", "3.5 ab 2"),
        ("{{ range(20000)|sum }}", "199990000"),
        ("{{ [{'n': 1}, {'n': 2}]|sum(attribute='n') }}", "3"),
        ("{% for key, value in {'b': 1, 'a': 2}|dictsort %}{{ key }}{{ value }}{% endfor %}", "a2b1"),
        ("{{ [1, 2, 3]|select('in', [1, 3])|join(',') }}", "1,3"),
        ("{{ 'y' if [1]|pprint|length > 0 and [{'a': 1}]|groupby('a')|length == 1 }}", "y"),
    ] {
        assert_eq!(render(source).unwrap(), expected, "{source}");
    }
}

#[test]
fn templates_that_run_without_end_are_stopped() {
    let endless = [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for a in [1] recursive %}{{ loop([a]) }}{% endfor %}",
        "{% set ns = namespace(v='x' * 4000000) %}{% for a in range(99999) %}{% for b in range(99999) %}{% if ns.v ~ 'a' == ns.v ~ 'b' %}{% endif %}{% endfor %}{% endfor %}",
    ];
    for source in endless {
        let begin = Instant::now();
        assert_stopped(source);
        assert!(begin.elapsed() < Duration::from_secs(60), "{source}: {:?}", begin.elapsed());
    }
}

#[test]
fn what_counts_is_the_text_as_it_is_written() {
    assert_eq!(
        render("{% autoescape true %}<b>{{ '<' }}{{ [1, '<'] }}{% endautoescape %}").unwrap().matches("&lt;").count(),
        2
    );
    assert!(render("{% autoescape true %}<b>{{ '<' }}{% endautoescape %}").unwrap().starts_with("<b>"));
    assert_stopped("{% autoescape true %}{{ '<' * 1000000 }}{% endautoescape %}");
    assert_stopped("{% autoescape true %}{% for i in range(99) %}{{ '<' * 500000 }}{% endfor %}{% endautoescape %}");
}

#[test]
fn items_of_a_text_take_time() {
    // Each item is found from the start of the text.
    let item = "{% set _ = text[-1] %}";
    let loops = format!("{{% for a in range(9999) %}}{{% for b in range(99) %}}{item}{{% endfor %}}{{% endfor %}}");
    assert_stopped(&format!("{{% set text = 'x' * 3000000 %}}{loops}"));
}

#[test]
fn a_templates_own_faults_are_no_faults_of_the_row() {
    for source in [
        "\n{{ 1|nope }}",
        "\n{{ 1 is nope }}",
        "\n{{ nope() }}",
        "\n{% include 'nope' %}",
        "\n{{ range(10 ** 18) }}",
        "\n{{ [] + 1 }}",
        "\n{{ messages[0].content + 1 }}",
        "\n{{ 'a'.split('') }}",
    ] {
        let error = render(source).unwrap_err();
        assert_eq!(error.kind(), Kind::Model, "{source}: {error}");
        assert!(error.message().starts_with("chat template (test line 2): "), "{source}: {error}");
        assert!(error.hint_text().is_some_and(|hint| hint.contains("data.template_path")), "{source}: {error}");
    }
    let panics = render("{% for a in [1] %}{{ loop.cycle() }}{% endfor %}").unwrap_err();
    assert_eq!(panics.kind(), Kind::Model, "{panics}");
    assert!(panics.message().starts_with("chat template (test"), "{panics}");
    // What the template raises, and what fails with this row only.
    let raised = render("{{ raise_exception('no') }}").unwrap_err();
    assert_eq!((raised.kind(), raised.message()), (Kind::Data, "chat template (test line 1): no"));
    assert!(raised.hint_text().is_some_and(|hint| hint.contains("row")), "{raised}");
    let row = render("{% if messages[0].content == 'x' %}{{ 'a' + 1 }}{% endif %}").unwrap_err();
    assert_eq!(row.kind(), Kind::Data, "{row}");
}

#[test]
fn white_space_is_pythons() {
    let source = "{% set t = '\u{1c} a\u{1f}b \u{1f}' %}[{{ t.strip() }}|{{ t|trim }}|{{ t.split()|join(',') }}]";
    assert_eq!(render(source).unwrap(), "[a\u{1f}b|a\u{1f}b|a,b]");
    assert_eq!(render("{{ 'a\u{2028}b'.splitlines()|length }}{{ '\u{1f}'.isspace() }}").unwrap(), "2True");
    assert_eq!(
        render("{{ ' a b c '.split(none, 1)|join(',') }}{{ 'a.b.c'.split('.', 1)|last }}").unwrap(),
        "a,b c b.c"
    );
}

#[test]
fn a_word_without_end_is_not_tokenized() {
    let tokenizer = tokenizer("bpe_gpt2");
    let text = format!("a {}", "x".repeat(300 << 10));
    for run in [text.clone(), "=".repeat(300 << 10), " ".repeat(300 << 10)] {
        let error = tokenizer.encode(&run, false).unwrap_err();
        assert_eq!(error.kind(), Kind::Data, "{error}");
        assert!(error.message().contains("has a word of 300 KiB from its byte "), "{error}");
        assert_eq!(tokenizer.ids(&run).unwrap_err().message(), error.message());
    }
    assert!(tokenizer.encode(&text, false).unwrap_err().message().contains("byte 3 on"));
    // Where the text is cut, only its beginning is looked at.
    let first = tokenizer.encode_first(&text, false, Some(10)).unwrap();
    assert!(first.ids.len() > 10 && first.offsets.last().unwrap().1 < 100 << 10, "{}", first.ids.len());
    assert_eq!(first.ids[..9], tokenizer.encode(&text[..1000], false).unwrap().ids[..9]);
    let refused = load_text("rows.jsonl", json!({"prompt": "q", "completion": "y".repeat(3 << 20)}).to_string());
    assert_eq!(refused.unwrap().report.train.truncated, 1);
}

#[test]
fn a_tokenizer_without_pre_tokenizer_takes_no_text_of_any_length_for_one_word() {
    let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let as_llama2 = json!({
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x"}, replace(" ", "x")]},
        "pre_tokenizer": null,
    });
    let spaced = json!({"pre_tokenizer": {"type": "WhitespaceSplit"}});
    let (dotted, words) = ("a.".repeat(5 << 20), "a. ".repeat(3 << 20));
    for (parts, text, refused) in
        [(&as_llama2, &dotted, true), (&as_llama2, &words, true), (&spaced, &dotted, true), (&spaced, &words, false)]
    {
        let tokenizer = tokenizer_with(parts).unwrap();
        if !refused {
            tokenizer.encode(&text[..1 << 20], false).unwrap();
            continue;
        }
        let began = Instant::now();
        let error = tokenizer.encode(text, false).unwrap_err();
        assert_eq!(error.kind(), Kind::Data, "{error}");
        assert!(error.message().contains("at most 8192 KiB"), "{error}");
        assert!(error.hint_text().is_some_and(|hint| hint.contains("data.truncation: right")), "{error}");
        assert_eq!(tokenizer.ids(text).unwrap_err().message(), error.message());
        // Where the text is cut, its beginning is looked at alone.
        assert!(tokenizer.encode_first(text, false, Some(10)).unwrap().ids.len() > 10);
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    }
}

#[test]
fn values_cannot_nest_without_end_or_form_a_ring() {
    let nested = [
        "{% set ns = namespace(v=1) %}{% for i in range(90000) %}{% set ns.v = [ns.v] %}{% endfor %}{{ ns.v }}",
        "{% set ns = namespace(v=[1]) %}{% for i in range(90000) %}{% set ns.v = ns.v|zip|list %}{% endfor %}{{ ns.v }}",
        "{% set ns = namespace(v=1) %}{% for i in range(90000) %}{% set ns.v = dict(v=ns.v) %}{% endfor %}{{ ns.v }}",
        "{% set ns = namespace() %}{% set ns.v = ns %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.v = [ns] %}{{ ns }}",
        "{% set ns = namespace() %}{% for i in range(90000) %}{% set new = namespace() %}{% set new.v = ns.v %}{% set ns.v = new %}{% endfor %}",
    ];
    for source in nested {
        assert_stopped(source);
    }
}

#[test]
fn templates_that_nest_deeply_are_refused() {
    let nested =
        |open: &str, inner: &str, close: &str| format!("{}{inner}{}", open.repeat(10_000), close.repeat(10_000));
    let sources = [
        format!("{{{{ {} }}}}", nested("(", "1", ")")),
        format!("{{{{ {} }}}}", nested("[", "1", "]")),
        format!("{{{{ {} }}}}", nested("{'a': ", "1", "}")),
        format!("{{{{ {} }}}}", nested("f(", "1", ")")),
        format!("{{{{ {}1 }}}}", "not ".repeat(10_000)),
        format!("{{{{ {}1 }}}}", "- ".repeat(10_000)),
        format!("{{{{ 1{} }}}}", " + 1".repeat(10_000)),
        format!("{{{{ 'a'{} }}}}", " ~ 'a'".repeat(10_000)),
        format!("{{{{ 1{} }}}}", " ** 1".repeat(10_000)),
        format!("{{{{ 1{} }}}}", " and 1".repeat(10_000)),
        format!("{{{{ 1{} }}}}", " if 1 else 1".repeat(10_000)),
        format!("{{{{ 'a'{} }}}}", "|upper".repeat(10_000)),
        format!("{{{{ 'a'{} }}}}", ".a".repeat(10_000)),
        format!("{{{{ 'a'{} }}}}", "[0]".repeat(10_000)),
        format!("{{{{ 'a'{} }}}}", "()".repeat(10_000)),
        format!("{{{{ 1{} }}}}", " is defined".repeat(10_000)),
        format!("{{% set x = 1{} %}}", " + 1".repeat(10_000)),
        nested("{% if 1 %}", "", "{% endif %}"),
        nested("{% for a in [1] %}", "", "{% endfor %}"),
        nested("{% filter upper %}", "", "{% endfilter %}"),
        nested("{% set x %}", "", "{% endset %}"),
        nested("{% macro m() %}", "", "{% endmacro %}"),
        nested("{% generation %}", "", "{% endgeneration %}"),
        format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(10_000)),
        format!("{{% if 0 %}}{}{}", "{% else %}{% if 0 %}".repeat(10_000), "{% endif %}".repeat(10_001)),
    ];
    let blocks = (0..10_000).map(|number| format!("{{% block b{number} %}}")).collect::<Vec<_>>().concat();
    for source in sources.into_iter().chain([blocks + &"{% endblock %}".repeat(10_000)]) {
        let error = render(&source).unwrap_err();
        assert_eq!(error.kind(), Kind::Model, "{}: {error}", &source[..40]);
    }
    // Long ones that do not nest are ordinary.
    let rows = (0..3000).map(|number| format!("'k{number}': [{number} + 1]")).collect::<Vec<_>>().join(", ");
    assert_eq!(render(&format!("{{{{ {{{rows}}}|length }}}}")).unwrap(), "3000");
    assert_eq!(render(&format!("{{{{ ''{} }}}}", " ~ 'a'".repeat(500))).unwrap(), "a".repeat(500));
}

#[test]
fn values_that_grow_slowly_are_stopped() {
    for source in [
        "{% set ns = namespace(v=[]) %}{% for i in range(99999) %}{% set ns.v = ns.v + [i] %}{% endfor %}",
        "{% set ns = namespace(v='x' * 4000000) %}{% for i in range(99999) %}{% if 'y' in ns.v %}{% endif %}{% endfor %}",
        "{% set v = [[['x' * 1000] * 1000] * 9] %}{% for i in range(99999) %}{% set w = [v] %}{% endfor %}",
        "{% set v = 'ab ' * 1000000 %}{% for i in range(99999) %}{% set w = v.split(' ')|length %}{% endfor %}",
    ] {
        assert_stopped(source);
    }
}

#[test]
fn limits_do_not_meet_ordinary_templates() {
    let cases = [
        ("{{ 'ab' * 3 ~ 2 * 3 ~ 7 % 4 }}", "ababab63"),
        ("{{ ([1, 2] + [3])[1:]|join('-') }}", "2-3"),
        ("{{ '%s is %d' % ('a', 2024) }} {{ '{} {:>4}'.format('2024', 7) }}", "a is 2024 2024    7"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "13"),
        ("{% for x in [1, 2, 3] if x != 2 %}{{ x }}{{ ',' if not loop.last }}{% endfor %}", "1,3"),
        ("{% macro m(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}{{ m(3, b=4) }}", "1234"),
        (
            "{{ {'b': [1, 2.0, None, True, 'é\"<'], 'a': {}}|tojson }}",
            r#"{"b": [1, 2.0, null, true, "é\"<"], "a": {}}"#,
        ),
        ("{{ {'a': [1], 'b': []}|tojson(indent=2) }}", "{\n  \"a\": [\n    1\n  ],\n  \"b\": []\n}"),
        ("{{ [1, 2]|tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ 'a</t>b'.split('</t>')[-1] }}{{ 'ab'.removeprefix('a') }}{{ 'a,b,c'.rsplit(',', 1)[0] }}", "bba,b"),
        ("{{ none is iterable }} {{ 'a' is sequence }} {{ undefined_name is defined }}", "False True False"),
        ("{{ 'a\nb'|indent(2) }}", "a\n  b"),
        ("{{ messages[::-1][0].content }}{{ messages|length }}", "x1"),
        ("{% filter upper %}a{% generation %}b{% endgeneration %}{% endfilter %}", "AB"),
        ("{{ strftime_now('%Y')|length }}", "4"),
        ("{{ dict(**{'a': 1}).a }}{{ dict(a=2).items()|list }}", "1[('a', 2)]"),
    ];
    for (source, expected) in cases {
        assert_eq!(render(source).unwrap_or_else(|error| panic!("{source}: {error}")), expected, "{source}");
    }
    // A megabyte of text in a row is ordinary.
    let text = "word ".repeat(200_000);
    let data = load_text("rows.jsonl", serde_json::json!({"user": text, "assistant": text}).to_string());
    assert_refused(data, &["max_seq_len"]);
}

#[test]
fn hostile_tokenizers_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let hostile = [
        String::new(),
        "{}".into(),
        "\u{0}\u{1}".into(),
        "[".repeat(100_000),
        r#"{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":["a b"]}}"#.into(),
        r#"{"version":"1.0","model":{"type":"BPE","vocab":{"a":0,"ab":1},"merges":["a a"]}}"#.into(),
        r#"{"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[["",""]]}}"#.into(),
        r#"{"version":"1.0","model":{"type":"Unigram","unk_id":9,"vocab":[["a",0.0]]}}"#.into(),
        r#"{"version":"1.0","pre_tokenizer":{"type":"Split","pattern":{"Regex":"(?P<"},"behavior":"Isolated","invert":false},"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}"#.into(),
    ];
    for json in hostile {
        std::fs::write(folder.path().join("tokenizer.json"), &json).unwrap();
        // Some are only hostile to texts; none may crash.
        match Tokenizer::load(folder.path()) {
            Ok(tokenizer) => drop(tokenizer.encode("a b ab", true)),
            Err(error) => assert_eq!(error.kind(), Kind::Model, "{error}"),
        }
    }
    let missing = Tokenizer::load(&PathBuf::from("/nowhere")).unwrap_err();
    assert_eq!(missing.kind(), Kind::Model);
    assert!(missing.hint_text().unwrap().contains("tokenizer.json"));
}

/// The golden tokenizer with other parts.
fn tokenizer_with(parts: &serde_json::Value) -> Result<Tokenizer, Error> {
    let folder = tempfile::tempdir().unwrap();
    let text = std::fs::read(super::golden("tokenizer_bpe_gpt2/tokenizer.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_slice(&text).unwrap();
    for (name, part) in parts.as_object().unwrap() {
        json[name] = part.clone();
    }
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    Tokenizer::load(folder.path())
}

#[test]
fn tokenizers_that_multiply_text_are_refused() {
    let replace =
        |regex: &str, content: &str| json!({"type": "Replace", "pattern": {"Regex": regex}, "content": content});
    let double = json!({"type": "Sequence", "normalizers": vec![replace("x", "xx"); 40]});
    let long = replace("x", &"y".repeat(1 << 20));
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": false});
    for parts in [
        json!({"normalizer": double}),
        json!({"normalizer": long}),
        json!({"pre_tokenizer": {"type": "Sequence", "pretokenizers": vec![bytes; 40]}}),
        json!({"decoder": long}),
    ] {
        let error = tokenizer_with(&parts).unwrap_err();
        assert_eq!(error.kind(), Kind::Model);
        assert!(error.message().contains("tokenizer.json") && error.message().contains("longer"), "{error}");
    }
    // What a short text may do a long one may not.
    let some = tokenizer_with(&json!({"normalizer": replace("x", &"y".repeat(1000))})).unwrap();
    assert!(some.encode("x", false).unwrap().ids.len() > 100);
    let error = some.encode(&"x".repeat(1 << 20), false).unwrap_err();
    assert_eq!(error.kind(), Kind::Model, "{error}");
}

#[test]
fn regular_expressions_without_end_are_refused() {
    // Each place of the text takes the engine nearly its limit of steps.
    let regex = "(?:a?){24}(?:a{0,9}){4}(?=b)|a";
    let split = json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    let tokenizer = tokenizer_with(&json!({"pre_tokenizer": split})).unwrap();
    if let Err(error) = tokenizer.encode(&"a".repeat(100_000), false) {
        assert_eq!(error.kind(), Kind::Model);
        assert!(error.message().contains("first"), "{error}");
    }
}

#[test]
fn a_key_that_stands_twice_is_refused_with_its_place() {
    let jsonl = "{\"text\": \"a\"}\n{\"text\": \"a\", \"text\": \"b\"}\n";
    assert_refused(load_text("rows.jsonl", jsonl), &["rows.jsonl:2", "\"text\" is given twice"]);
    let inner = "{\"messages\": [{\"role\": \"user\", \"content\": \"a\", \"content\": \"b\"}]}";
    assert_refused(load_text("rows.jsonl", inner), &["rows.jsonl:1", "\"content\" is given twice"]);
    assert_refused(
        load_text("rows.json", "[{\"text\": \"a\"},\n{\"text\": \"a\", \"text\": \"b\"}]"),
        &["rows.json:2", "\"text\" is given twice"],
    );
}

#[test]
fn a_row_of_many_columns_or_great_depth_is_no_matter() {
    let fields = (0..10_000).map(|number| format!("\"c{number}\": 1")).collect::<Vec<_>>().join(", ");
    let rows = format!("{{\"text\": \"a\", {fields}}}\n").repeat(20);
    assert_eq!(load_text("rows.jsonl", rows).unwrap().train.len(), 20);
    let header = (0..10_000).map(|number| format!("c{number}")).collect::<Vec<_>>().join(",");
    let rows = format!("text,{header}\n{}", format!("a{}\n", ",1".repeat(10_000)).repeat(20));
    assert_eq!(load_text("rows.csv", rows).unwrap().train.len(), 20);
    let folder = tempfile::tempdir().unwrap();
    let (template, rows) = (folder.path().join("own.jinja"), folder.path().join("rows.jsonl"));
    std::fs::write(&template, "{% for m in messages %}{{ m.content }}</s>{% endfor %}").unwrap();
    let messages = vec![json!({"role": "assistant", "content": "a"}); 100_000];
    std::fs::write(&rows, json!({ "messages": messages }).to_string()).unwrap();
    let mut config = super::config(&rows);
    config.data.template_path = Some(template);
    assert_refused(super::load_with(&config), &["rows.jsonl:1", "100000 messages"]);
    let deep = format!("{{\"text\": \"a\", \"x\": {}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert_refused(load_text("rows.jsonl", deep), &["rows.jsonl:1", "recursion"]);
}

#[test]
fn a_line_that_is_cut_is_not_tokenized_whole() {
    // The tokens are those of the whole text.
    let text = "a quick brown fox's 12345 \u{e9}\u{4f60}\n\n  jumps ".repeat(52_000);
    let tokenizer = tokenizer("bpe_llama3");
    let whole = tokenizer.encode(&text, true).unwrap();
    for most in [1, 2048] {
        let first = tokenizer.encode_first(&text, true, Some(most)).unwrap();
        assert!(first.ids.len() > most && first.ids.len() < whole.ids.len() / 2, "{}", first.ids.len());
        assert_eq!(first.ids, whole.ids[..first.ids.len()]);
        assert_eq!(first.offsets, whole.offsets[..first.ids.len()]);
        let (ids, added) = tokenizer.ids_first(&text, Some(most)).unwrap();
        assert_eq!((&ids, ids.len()), (&first.ids, added.len()));
    }
    // Rows of all kinds are cut as ever.
    let long = "word ".repeat(450_000);
    let rows =
        [json!({"text": long}), json!({"prompt": "q", "completion": long}), json!({"user": "q", "assistant": long})];
    let rows: Vec<String> = rows.iter().map(ToString::to_string).collect();
    let data = load_text("rows.jsonl", rows.join("\n")).unwrap();
    let limit = tunesmith::config::Config::default().model.max_seq_len;
    assert_eq!(data.train.lengths(), [limit; 3]);
    assert_eq!((data.report.train.truncated, data.report.train.kept), (3, 3));
}

#[test]
fn broken_files_name_their_line() {
    assert_refused(
        load_text("rows.jsonl", b"{\"text\": \"a\"}\n{\"text\": \"\xff\"}\n"),
        &["rows.jsonl:2", "invalid UTF-8"],
    );
    assert_refused(load_text("rows.jsonl", "{\"text\": \"a\"}\n\n{\"text\": \n"), &["rows.jsonl:3", "malformed JSON"]);
    assert_refused(load_text("rows.jsonl", "[1]\n"), &["rows.jsonl:1", "found a list, expected an object"]);
    assert_refused(load_text("rows.jsonl", "{\"text\": \"a\"}\n{\"txt\": \"a\"}"), &["rows.jsonl:2", "[txt]", "text"]);
    assert_refused(load_text("rows.jsonl", ""), &["no rows"]);
    assert_refused(load_text("rows.json", "[{\"text\": \"a\"}, 7]"), &["rows.json: row 2", "a number"]);
    assert_refused(load_text("rows.json", "[{\"text\": \"a\"},\n{\"text\"]"), &["rows.json:2", "malformed JSON"]);
    assert_refused(load_text("rows.csv", "text\na\nb,c\n"), &["rows.csv:3", "malformed CSV"]);
    assert_refused(load_text("rows.csv", b"text\n\xff\n"), &["rows.csv:2", "UTF-8"]);
    assert_refused(load_text("rows.jsonl", b"\xff\xfe{\x00}\x00"), &["UTF-16"]);
    assert_refused(load_text("rows.xlsx", "PK"), &["no known extension"]);
    let zero = "{\"text\": \"a b\", \"loss_weight\": 0}\n".repeat(3);
    assert_refused(load_text("rows.jsonl", zero), &["each of the 3 train rows has \"loss_weight\": 0"]);
    assert_refused(load_text("rows.jsonl", b"\x1f\x8b\x08\x00"), &["rows.jsonl holds gzip", "end in .gz"]);
    assert_refused(load_text("rows.csv", "PAR1"), &["rows.csv holds Parquet"]);
    assert_refused(load_text("rows.csv", "text,label,text\na,b,c\n"), &["rows.csv:1", "\"text\" is there twice"]);
    assert_refused(super::load_with(&super::config(&PathBuf::from("/dev/null"))), &["/dev/null is no regular file"]);
    assert_refused(load_text("rows.parquet", "PAR1"), &["rows.parquet: malformed Parquet file"]);
    assert_refused(super::load_with(&super::config(&PathBuf::from("/nowhere/rows.jsonl"))), &["/nowhere/rows.jsonl"]);
    assert_refused(load_text("rows.jsonl", "[".repeat(200_000)), &["rows.jsonl:1"]);
}

#[test]
fn a_line_of_ten_megabytes_is_read() {
    let text = "a quick brown fox ".repeat(60_000);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    let row = serde_json::json!({ "text": text, "notes": "n".repeat(9_000_000) });
    std::fs::write(&path, row.to_string()).unwrap();
    let mut config = super::config(&path);
    config.model.max_seq_len = 100_000_000;
    let data = super::load_with(&config).unwrap();
    assert_eq!(super::texts(&data, 0).0, format!("<s>{text}</s>"), "nothing is cut in silence");
}
