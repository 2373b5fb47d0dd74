//! Images that rows name by web address, from a server on the loopback: they work in every form of a row, are fetched once for
//! all runs and ranks, and are never fetched from a host that is not public.
use crate::pictures::{encoder, golden, paired, seeing, write_rows};
use crate::run::fixture::{Fixture, said, tunesmith};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

/// What a path of the server answers: a status, a location, and a body.
type Answers = BTreeMap<String, (u16, Option<String>, Vec<u8>)>;

/// A server whose thread ends with the process.
struct Server {
    host: String,
    answers: Arc<Mutex<Answers>>,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Server {
    /// With the golden pictures.
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let mut answers = Answers::new();
        for entry in fs::read_dir(golden("pixels")).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            answers.insert(format!("/{name}"), (200, None, fs::read(path).unwrap()));
        }
        let server = Self { host, answers: Arc::new(Mutex::new(answers)), asked: Arc::default() };
        let (answers, asked) = (Arc::clone(&server.answers), Arc::clone(&server.asked));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (answers, asked) = (Arc::clone(&answers), Arc::clone(&asked));
                std::thread::spawn(move || {
                    let mut stream = stream;
                    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
                    while let Some(line) = lines.next() {
                        let target = line.split(' ').nth(1).unwrap_or_default().to_owned();
                        lines.by_ref().take_while(|line| !line.is_empty()).for_each(drop);
                        let path = target.split('?').next().unwrap_or_default();
                        let known = answers.lock().unwrap_or_else(PoisonError::into_inner).get(path).cloned();
                        let (status, location, body) = known.unwrap_or((404, None, b"gone".to_vec()));
                        asked.lock().unwrap_or_else(PoisonError::into_inner).push(target);
                        let location = location.map_or_else(String::new, |to| format!("Location: {to}\r\n"));
                        let head =
                            format!("HTTP/1.1 {status} Status\r\n{location}Content-Length: {}\r\n\r\n", body.len());
                        if stream.write_all(&[head.as_bytes(), &body].concat()).is_err() {
                            return;
                        }
                    }
                });
            }
        });
        server
    }

    fn at(&self, name: &str) -> String {
        format!("http://{}/{name}", self.host)
    }

    fn put(&self, path: &str, status: u16, location: Option<&str>, body: &[u8]) {
        let answer = (status, location.map(str::to_owned), body.to_vec());
        self.answers.lock().unwrap_or_else(PoisonError::into_inner).insert(path.to_owned(), answer);
    }

    /// The requests since the last call.
    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut *self.asked.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// `tunesmith ARGS`, which may reach the server.
    fn run(&self, args: &[&str]) -> Output {
        tunesmith(args).env("TUNESMITH_TEST_IMAGE_HOST", &self.host).env_remove("HF_HUB_OFFLINE").output().unwrap()
    }
}

const ON: &str = "data.allow_image_urls: true";

fn chat(content: &Value) -> Value {
    json!([{"role": "user", "content": content}, {"role": "assistant", "content": "a cat"}])
}

/// A row that shows the image at an address.
type Form = (&'static str, fn(&str) -> Value);

const FORMS: [Form; 14] = [
    (
        "a part by url",
        |link| json!({"messages": chat(&json!([{"type": "image", "url": link}, {"type": "text", "text": "?"}]))}),
    ),
    ("a part by image", |link| json!({"messages": chat(&json!([{"type": "image", "image": link}]))})),
    ("OpenAI's part", |link| json!({"messages": chat(&json!([{"type": "image_url", "image_url": {"url": link}}]))})),
    ("a list", |link| json!({"images": [link], "messages": chat(&json!("<image>what?"))})),
    ("a list of objects", |link| json!({"images": [{"url": link}], "messages": chat(&json!("what?"))})),
    ("a question", |link| json!({"image": link, "question": "what?", "answer": "a cat"})),
    ("a question by image_url", |link| json!({"image_url": link, "question": "what?", "answer": "a cat"})),
    ("LLaVA", |link| {
        let turns = json!([{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a cat"}]);
        json!({"image": link, "conversations": turns})
    }),
    ("a caption", |link| json!({"image": link, "caption": "a cat"})),
    ("a caption by image_url", |link| json!({"image_url": link, "caption": "a cat"})),
    ("CC12M", |link| json!({"url": link, "caption": "a cat"})),
    ("DataComp", |link| json!({"url": link, "text": "a cat", "uid": "0"})),
    ("COYO", |link| json!({"url": link, "text": "a cat", "width": 45, "height": 33})),
    (
        "VSR",
        |link| json!({"image": "none.jpg", "image_link": link, "caption": "a cat is here", "label": 1, "relation": "at"}),
    ),
];

fn counts(done: &Output) -> Value {
    assert!(done.status.success(), "{}", said(done));
    let found: Value = serde_json::from_slice(&done.stdout).unwrap();
    let web = &found["splits"]["train"]["files"]["web"];
    json!([found["splits"]["train"]["rows"], web["fetched"], web["cached"], web["failed"]])
}

#[test]
fn an_address_is_fetched_once_in_every_form_of_a_row_and_only_where_that_is_allowed() {
    let server = Server::start();
    let fixture = seeing("llava");
    let rows = fixture.path("train.jsonl");
    for (number, (form, row)) in FORMS.into_iter().enumerate() {
        let secret = |name: &str| format!("{}?form={number}&signature=SECRET", server.at(name));
        write_rows(&rows, [row(&secret("rgb.png")), row(&secret("wide.png")), row(&secret("rgb.png"))]);
        let config = fixture.config("run", &["data.val_path: UNSET", "model.max_seq_len: 256"]).display().to_string();
        fs::create_dir_all(fixture.path("images")).unwrap();
        let image_dir = format!("data.image_dir={}", fixture.path("images").display());
        let data = |more: &[&str]| server.run(&[&["data", &config, "--json", &image_dir], more].concat());
        let refused = data(&[]);
        assert_eq!(refused.status.code(), Some(3), "{form}: {}", said(&refused));
        let parts: &[&str] = match form {
            "VSR" => &["train.jsonl:1", "none.jpg"], // the name of a file goes first
            _ => &["train.jsonl:1", "web address", "data.allow_image_urls: true", "/rgb.png?…"],
        };
        for part in parts {
            assert!(said(&refused).contains(part), "{form}: {} lacks {part}", said(&refused));
        }
        let skipped = data(&["data.bad_images=skip"]);
        assert_eq!(skipped.status.code(), Some(3), "{form}: a setting is missing, not an image: {}", said(&skipped));
        assert!(server.asked().is_empty(), "{form}");
        let on = "data.allow_image_urls=true";
        let first = data(&[on]);
        assert_eq!(counts(&first), json!([3, 2, 1, 0]), "{form}");
        assert_eq!(server.asked().len(), 2, "{form}");
        assert_eq!(counts(&data(&[on])), json!([3, 0, 3, 0]), "{form}: from the cache of tokens");
        assert_eq!(counts(&data(&[on, "data.use_cache=false"])), json!([3, 0, 3, 0]), "{form}");
        assert!(server.asked().is_empty(), "{form}: they are in the cache");
        assert!(!said(&refused).contains("SECRET") && !said(&first).contains("SECRET"), "{form}");
    }
}

#[test]
fn what_cannot_be_fetched_is_refused_with_its_row_or_left_out() {
    let server = Server::start();
    server.put("/page.png", 200, None, b"<html>no image</html>");
    server.put("/moved.png", 302, Some("/rgb.png"), b"");
    server.put("/inside.png", 302, Some("http://localhost:1/rgb.png"), b"");
    server.put("/metadata.png", 302, Some("http://169.254.169.254/latest/meta-data/"), b"");
    server.put("/round.png", 302, Some("/round.png"), b"");
    let bytes = fs::read(golden("pixels/rgb.png")).unwrap();
    server.put("/cut.png", 200, None, &bytes[..bytes.len() / 2]);
    server.put("/large.png", 200, None, &vec![0; (64 << 20) + 1]);
    let fixture = seeing("llava");
    let config = fixture.config("run", &["data.val_path: UNSET", ON]).display().to_string();
    let row = |link: &str| json!({"image": link, "caption": "a cat"});
    for (link, part, code) in [
        (server.at("none.png"), "status 404", 3),
        (server.at("page.png"), "no image", 3),
        (server.at("cut.png"), "is cut off", 3),
        (server.at("cmyk.jpg"), "CMYK", 3),
        (server.at("large.png"), "more than 64 MiB", 3),
        (server.at("inside.png"), "public internet", 3),
        (server.at("metadata.png"), "public internet", 3),
        (server.at("round.png"), "redirects", 3),
        (server.at("rgb.png").replace("http://", "http://me:word@"), "user name or a password", 3),
        ("http://127.0.0.1:1/a.png".to_owned(), "public internet", 3),
        ("http://[::ffff:127.0.0.1]:1/a.png".to_owned(), "public internet", 3),
        ("http://10.0.0.1/a.png".to_owned(), "public internet", 3),
        ("https://images.invalid/a.png".to_owned(), "lookup", 6),
    ] {
        write_rows(&fixture.path("train.jsonl"), [row(&server.at("moved.png")), row(&link)]);
        for verb in ["data", "train"] {
            let refused = server.run(&[verb, &config]);
            assert_eq!(refused.status.code(), Some(code), "{link}: {}", said(&refused));
            assert!(
                said(&refused).contains("train.jsonl:2: image http") && said(&refused).contains(part),
                "{link}: {}",
                said(&refused)
            );
            assert!(!said(&refused).contains("word@"), "{}", said(&refused));
        }
        let skip = ["data", &config, "--json", "data.bad_images=skip"];
        let left = server.run(&skip);
        let found = counts(&left);
        assert!(found[0] == 1 && found[3] == 1, "{link}: {}", said(&left));
        for part in
            ["train: 1 image cannot be fetched (first: ", "train.jsonl:2: image http", "left out, with an image"]
        {
            assert!(String::from_utf8_lossy(&left.stdout).contains(part), "{link}: {} lacks {part}", said(&left));
        }
        // The ranks of a run leave the same rows out: nothing is asked for again at once.
        server.asked();
        assert_eq!(
            counts(&server.run(&[&skip[..], &["data.use_cache=false"]].concat())),
            json!([1, 0, 1, 1]),
            "{link}"
        );
        assert!(server.asked().is_empty(), "{link}");
    }
}

#[test]
fn without_a_network_only_the_cache_counts() {
    let server = Server::start();
    let fixture = paired();
    let config = fixture.config("run", &["data.val_path: UNSET", ON, &encoder(&fixture)]).display().to_string();
    let rows = fixture.path("train.jsonl");
    let row = |name: &str| json!({"url": server.at(name), "text": "a cat"});
    write_rows(&rows, [row("rgb.png")]);
    assert_eq!(counts(&server.run(&["data", &config, "--json"])), json!([1, 1, 0, 0]));
    let offline = |variable: &str, more: &[&str]| {
        let mut command = tunesmith(&[&["data", &config, "--json"], more].concat());
        command.env("TUNESMITH_TEST_IMAGE_HOST", &server.host).env(variable, "1").output().unwrap()
    };
    server.asked();
    assert_eq!(counts(&offline("HF_HUB_OFFLINE", &[])), json!([1, 0, 1, 0]));
    write_rows(&rows, [row("rgb.png"), row("wide.png")]);
    for (variable, words) in [("HF_HUB_OFFLINE", &[][..]), ("TRANSFORMERS_OFFLINE", &["data.bad_images=skip"])] {
        let refused = offline(variable, words);
        assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
        for part in ["train.jsonl:2", "not in the cache", variable] {
            assert!(said(&refused).contains(part), "{} lacks {part}", said(&refused));
        }
    }
    assert!(server.asked().is_empty());
    // Without room for more, the setting is named; nothing is left out for it.
    let full = server.run(&["data", &config, "data.image_cache_size=1KiB", "data.bad_images=skip"]);
    assert_eq!(full.status.code(), Some(2), "{}", said(&full));
    assert!(said(&full).contains("train.jsonl:2") && said(&full).contains("data.image_cache_size"), "{}", said(&full));
    // An image that was removed from the cache, or damaged, is fetched again.
    assert_eq!(counts(&server.run(&["data", &config, "--json"])), json!([2, 1, 1, 0]));
    let images = || {
        fs::read_dir(fixture.path("cache/pictures"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.is_file())
    };
    assert_eq!(images().count(), 2);
    images().for_each(|path| fs::remove_file(path).unwrap());
    assert_eq!(counts(&server.run(&["data", &config, "--json"])), json!([2, 2, 0, 0]));
    images().take(1).for_each(|path| fs::write(path, "damaged").unwrap());
    let words = ["data", &config, "--json", "data.use_cache=false", "data.bad_images=skip"];
    assert_eq!(counts(&server.run(&words)), json!([2, 1, 1, 0]));
}

fn adapter(server: &Server, fixture: &Fixture, out: &str, lines: &[&str]) -> Vec<u8> {
    let config =
        fixture.config(out, &[&["train.max_steps: 3", &encoder(fixture)], lines].concat()).display().to_string();
    let done = server.run(&["train", &config, &format!("train.output_dir={}", fixture.path(out).display())]);
    assert!(done.status.success(), "{}", said(&done));
    fs::read(fixture.path(out).join("adapter/adapter_model.safetensors")).unwrap()
}

#[test]
fn addresses_train_as_files_and_ranks_share_what_was_fetched() {
    let server = Server::start();
    let fixture = paired();
    let ranks = ["train.strategy: dp", "train.dp_ranks: 2", "train.grad_accum: 2", "train.batch_size: 1"];
    let expected = adapter(&server, &fixture, "files", &ranks);
    let named = |path: &Path| {
        let text = fs::read_to_string(path).unwrap();
        let (a, b) = (server.at("rgb.png"), server.at("wide.png"));
        fs::write(path, text.replace("\"a.png\"", &format!("{a:?}")).replace("\"b.png\"", &format!("{b:?}"))).unwrap();
    };
    named(&fixture.path("train.jsonl"));
    named(&fixture.path("val.jsonl"));
    let cache = format!("data.cache_dir: {}", fixture.path("other cache").display());
    let found = adapter(&server, &fixture, "addresses", &[&ranks[..], &[ON, &cache]].concat());
    assert!(found == expected);
    let mut asked = server.asked();
    asked.sort();
    assert_eq!(asked, ["/rgb.png", "/wide.png"]);
    // Processes that start at once share it too.
    let cache = format!("data.cache_dir: {}", fixture.path("third cache").display());
    let config = fixture.config("both", &[ON, &cache, &encoder(&fixture)]).display().to_string();
    let start = || {
        let mut command = tunesmith(&["data", &config, "--json"]);
        command.env("TUNESMITH_TEST_IMAGE_HOST", &server.host).stdout(Stdio::piped()).spawn().unwrap()
    };
    let both = [start(), start(), start()].map(|child| child.wait_with_output().unwrap());
    assert!(both.iter().all(|done| done.status.success()));
    assert_eq!(server.asked().len(), 2);
}

#[test]
fn an_address_is_shown_to_a_model_only_where_that_is_allowed() {
    let server = Server::start();
    let fixture = paired();
    adapter(&server, &fixture, "one", &[]);
    let config = fixture.path("one.yaml").display().to_string();
    let out = format!("train.output_dir={}", fixture.path("one").display());
    let file = golden("pixels/rgb.png").canonicalize().unwrap().display().to_string();
    let link = format!("{}?signature=SECRET", server.at("rgb.png"));
    let infer = |image: &str, more: &[&str]| server.run(&[&["infer", &config, &out, "--image", image], more].concat());
    let on = "data.allow_image_urls=true";
    let wanted = infer(&file, &[]);
    assert!(wanted.status.success() && !wanted.stdout.is_empty(), "{}", said(&wanted));
    let inside = server.at("inside.png");
    server.put("/inside.png", 302, Some("http://localhost:1/rgb.png"), b"");
    server.put("/page.png", 200, None, b"<html>no image</html>");
    server.put("/large.png", 200, None, &vec![0; (64 << 20) + 1]);
    let page = server.at("page.png");
    for (image, words, part, code) in [
        (link.as_str(), &[][..], "data.allow_image_urls: true", 3),
        (&inside, &[on], "public internet", 3),
        ("http://10.0.0.1/a.png", &[on], "public internet", 3),
        (&page, &[on], "no image", 3),
        ("ftp://example.org/a.png?key=SECRET", &[on], "http or https", 3),
        (&link.replace("http://", "http://me:SECRET@"), &[on], "user name or a password", 3),
        (&server.at("large.png?k=SECRET"), &[on], "more than 64 MiB", 3),
    ] {
        let refused = infer(image, words);
        assert_eq!(refused.status.code(), Some(code), "{image}: {}", said(&refused));
        assert!(said(&refused).contains(part) && !said(&refused).contains("SECRET"), "{image}: {}", said(&refused));
    }
    assert_eq!(server.asked(), ["/inside.png", "/page.png", "/large.png?k=SECRET"]);
    for asked in [&["/rgb.png?signature=SECRET"][..], &[]] {
        let answered = infer(&link, &[on]);
        assert!(answered.status.success(), "{}", said(&answered));
        assert_eq!(answered.stdout, wanted.stdout);
        assert_eq!(server.asked(), asked, "it is fetched once");
    }
    let wide = server.at("wide.png");
    let mut offline = tunesmith(&["infer", &config, &out, "--image", &wide, on]);
    let offline = offline.env("TUNESMITH_TEST_IMAGE_HOST", &server.host).env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert!(offline.status.code() == Some(2) && said(&offline).contains("not in the cache"), "{}", said(&offline));
    // In a conversation, which goes on after a refusal.
    let talk = |first: &str, words: &[&str], is_offline: bool| {
        let mut chat = tunesmith(&[&["chat", &config, &out], words].concat());
        chat.env("TUNESMITH_TEST_IMAGE_HOST", &server.host).env("HF_HUB_OFFLINE", if is_offline { "1" } else { "0" });
        let mut chat = chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        chat.stdin.take().unwrap().write_all(format!("/image {first}\n/image {link}\n/quit\n").as_bytes()).unwrap();
        let done = chat.wait_with_output().unwrap();
        assert!(done.status.success() && !said(&done).contains("SECRET"), "{}", said(&done));
        done
    };
    let answer = String::from_utf8(wanted.stdout).unwrap();
    let refused = said(&talk(&wide, &[], false));
    assert!(refused.contains("data.allow_image_urls: true") && !refused.contains(answer.trim()), "{refused}");
    let not_cached = talk(&wide, &[on], true);
    assert!(said(&not_cached).contains("not in the cache"), "{}", said(&not_cached));
    assert!(server.asked().is_empty());
    for done in [not_cached, talk(&wide, &[on], false)] {
        let text = String::from_utf8_lossy(&done.stdout);
        assert!(text.trim_end().ends_with(answer.trim_end()), "{answer:?}: {}", said(&done));
    }
    assert_eq!(server.asked(), ["/wide.png"]);
}

#[test]
fn a_set_of_texts_with_addresses_of_pages_stays_one() {
    let fixture = Fixture::new();
    let page = |number: usize| json!({"url": format!("https://example.org/{number}"), "text": "a text"});
    let late = json!({"url": "https://example.org/File:a.jpg", "text": "of a page"});
    write_rows(&fixture.path("train.jsonl"), (0..70).map(page).chain([late.clone()]));
    let config = fixture.config("run", &["data.val_path: UNSET"]).display().to_string();
    let data = |words: &[&str]| tunesmith(&[&["data", &config, "--json"], words].concat()).output().unwrap();
    assert_eq!(counts(&data(&[]))[0], 71);
    // Rows whose addresses are those of images are none of text, unless that is asked for.
    write_rows(&fixture.path("train.jsonl"), [late.clone(), late, page(1)]);
    for (words, code) in [(&[][..], 4), (&["vision.load=false"], 3)] {
        let refused = data(words);
        assert_eq!(refused.status.code(), Some(code), "{}", said(&refused));
        assert!(
            said(&refused).contains("train.jsonl:1") && said(&refused).contains("data.format: text"),
            "{}",
            said(&refused)
        );
    }
    assert_eq!(counts(&data(&["data.format=text"]))[0], 3);
    // A model that sees images names what it does not see.
    let seeing = seeing("llava");
    write_rows(&seeing.path("train.jsonl"), [page(1), json!({"messages": chat(&json!("hello"))})]);
    let config = seeing.config("run", &["data.val_path: UNSET", "vision.load: true"]).display().to_string();
    let done = tunesmith(&["data", &config]).output().unwrap();
    assert!(done.status.success() && said(&done).contains("has the field \"url\""), "{}", said(&done));
}
