//! The part of the hub's protocol that uploads need: repositories are made, large files are put where a signed address
//! says, in one piece or in parts, and a commit names what must have arrived.
use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::server::{Reply, Repo, Request, State, is_large, sha1, sha256};

/// What has been put where signed addresses say.
#[derive(Default)]
pub struct Storage {
    /// Send large files in parts of so many bytes.
    pub part_bytes: Option<usize>,
    objects: BTreeMap<String, Vec<u8>>,
    parts: BTreeMap<(String, usize), Vec<u8>>,
    verified: Vec<String>,
}

/// The token that may write.
pub const WRITER: &str = "Bearer hf_writer";

fn ok(body: &Value) -> Reply {
    Reply::status(200, &[], &body.to_string())
}

fn bad(why: &str) -> Reply {
    Reply::status(400, &[], &json!({ "error": why }).to_string())
}

/// The answer to a request that is one of an upload.
pub fn answer(state: &mut State, request: &Request, endpoint: &str, port: u16) -> Option<Reply> {
    let path = request.target.split('?').next().unwrap();
    if let Some(place) = path.strip_prefix("/store/") {
        // Whoever has the signed address may write; the token is not for this host.
        return Some(if request.token.is_some() { bad("a token was sent") } else { store(state, request, place) });
    }
    if request.method != "POST" {
        return None;
    }
    match request.token.as_deref() {
        Some(WRITER) => {}
        Some("Bearer hf_reader") => {
            let words = r#"{"error":"Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request"}"#;
            return Some(Reply::status(403, &[], words));
        }
        _ => return Some(Reply::status(401, &[], r#"{"error":"Invalid credentials in Authorization header"}"#)),
    }
    let body: Value = serde_json::from_slice(&request.body).unwrap_or_default();
    if path == "/api/repos/create" {
        let name = format!("models/{}/{}", body["organization"].as_str().unwrap(), body["name"].as_str().unwrap());
        if state.repos.contains_key(&name) {
            return Some(Reply::status(409, &[], r#"{"error":"You already created this model repo"}"#));
        }
        let private = body["private"].as_bool().unwrap();
        state.repos.insert(name.clone(), Repo { private, ..Repo::default() });
        return Some(ok(&json!({ "url": format!("{endpoint}/{name}") })));
    }
    if let Some(name) = path.strip_suffix(".git/info/lfs/objects/batch") {
        return Some(batch(state, &body, endpoint, port, &name[1..]));
    }
    if path.ends_with(".git/info/lfs/verify") {
        let oid = body["oid"].as_str().unwrap().to_owned();
        let there = state.storage.objects.get(&oid).is_some_and(|bytes| body["size"] == bytes.len());
        state.storage.verified.push(oid);
        return Some(if there { ok(&json!({})) } else { bad("not there") });
    }
    let (name, what) =
        path.strip_prefix("/api/models/")?.rsplit_once("/main").map(|(left, _)| left)?.rsplit_once('/')?;
    let name = format!("models/{name}");
    if !state.repos.contains_key(&name) {
        return Some(Reply::status(404, &[("X-Error-Code", "RepoNotFound")], r#"{"error":"Repository not found"}"#));
    }
    match what {
        "preupload" => {
            let mode = |file: &Value| {
                let large = is_large(file["path"].as_str().unwrap());
                json!({ "path": file["path"], "uploadMode": if large { "lfs" } else { "regular" } })
            };
            let files: Vec<Value> = body["files"].as_array().unwrap().iter().map(mode).collect();
            Some(ok(&json!({ "files": files })))
        }
        "commit" => Some(commit(state, request, &name)),
        _ => None,
    }
}

fn batch(state: &State, body: &Value, endpoint: &str, port: u16, name: &str) -> Reply {
    assert_eq!((&body["operation"], &body["hash_algo"]), (&json!("upload"), &json!("sha256")));
    let object = |object: &Value| {
        let (oid, size) = (object["oid"].as_str().unwrap(), object["size"].as_u64().unwrap() as usize);
        if state.storage.objects.contains_key(oid) {
            return json!({ "oid": oid, "size": size });
        }
        let place = |end: &str| format!("http://localhost:{port}/store/{oid}{end}?signature=SIGNED");
        let upload = match state.storage.part_bytes {
            None => json!({ "href": place(""), "header": { "X-Signed": "yes" } }),
            Some(bytes) => {
                let mut header = json!({ "chunk_size": bytes.to_string() });
                for part in 0..size.div_ceil(bytes) {
                    header[format!("{:05}", part + 1)] = json!(place(&format!("/{}", part + 1)));
                }
                json!({ "href": place("/complete"), "header": header })
            }
        };
        let verify = json!({ "href": format!("{endpoint}/{name}.git/info/lfs/verify") });
        json!({ "oid": oid, "size": size, "actions": { "upload": upload, "verify": verify } })
    };
    let objects: Vec<Value> = body["objects"].as_array().unwrap().iter().map(object).collect();
    let transfer = if state.storage.part_bytes.is_some() { "multipart" } else { "basic" };
    ok(&json!({ "transfer": transfer, "objects": objects }))
}

fn store(state: &mut State, request: &Request, place: &str) -> Reply {
    let storage = &mut state.storage;
    let (oid, part) = place.split_once('/').unwrap_or((place, ""));
    match (request.method.as_str(), part) {
        ("PUT", "") => {
            if sha256(&request.body) != oid {
                return bad("another content than was announced");
            }
            storage.objects.insert(oid.to_owned(), request.body.clone());
            ok(&json!({}))
        }
        ("PUT", part) => {
            let etag = format!("\"{}\"", sha256(&request.body));
            storage.parts.insert((oid.to_owned(), part.parse().unwrap()), request.body.clone());
            Reply::status(200, &[("ETag", &etag)], "")
        }
        ("POST", "complete") => {
            let body: Value = serde_json::from_slice(&request.body).unwrap();
            let mut whole = Vec::new();
            for (at, part) in body["parts"].as_array().unwrap().iter().enumerate() {
                let bytes = &storage.parts[&(oid.to_owned(), at + 1)];
                if part["partNumber"] != at + 1 || part["etag"] != format!("\"{}\"", sha256(bytes)) {
                    return bad("another part than was put");
                }
                whole.extend_from_slice(bytes);
            }
            if sha256(&whole) != oid {
                return bad("the parts are not the file");
            }
            storage.objects.insert(oid.to_owned(), whole);
            ok(&json!({}))
        }
        _ => bad("no such place"),
    }
}

fn commit(state: &mut State, request: &Request, name: &str) -> Reply {
    let repo = state.repos.get_mut(name).unwrap();
    let mut files = repo.refs.get("main").map(|commit| repo.commits[commit].clone()).unwrap_or_default();
    for line in request.body.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let line: Value = serde_json::from_slice(line).unwrap();
        let value = &line["value"];
        match line["key"].as_str().unwrap() {
            "header" => assert!(!value["summary"].as_str().unwrap().is_empty()),
            "file" => {
                let bytes = from_base64(value["content"].as_str().unwrap());
                files.insert(value["path"].as_str().unwrap().to_owned(), bytes);
            }
            "lfsFile" => {
                let oid = value["oid"].as_str().unwrap();
                match state.storage.objects.get(oid) {
                    Some(bytes) if state.storage.verified.iter().any(|verified| verified == oid) => {
                        files.insert(value["path"].as_str().unwrap().to_owned(), bytes.clone());
                    }
                    _ => return bad("a large file that has not arrived"),
                }
            }
            other => return bad(other),
        }
    }
    let commit = sha1(format!("{name} {files:?}").as_bytes());
    repo.refs.insert("main".to_owned(), commit.clone());
    repo.commits.insert(commit.clone(), files);
    ok(&json!({ "success": true, "commitOid": commit, "commitUrl": "https://signed" }))
}

fn from_base64(text: &str) -> Vec<u8> {
    let letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut bytes = Vec::new();
    let (mut bits, mut count) = (0u32, 0);
    for letter in text.chars().filter(|&letter| letter != '=') {
        bits = (bits << 6) | letters.find(letter).unwrap() as u32;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    bytes
}
