//! How requests travel: redirects and the token, proxies and certificates of the environment, a connection that falls
//! silent.
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::Stdio;
use std::sync::mpsc;
use std::time::Duration;

use tunesmith::hub::{Destination, HubToken, Part};

use super::program::{Program, good};
use super::server::Reply;
use super::{World, publish};
use crate::run::fixture::said;

#[test]
fn a_renamed_repository_is_found_with_the_token() {
    let mut world = World::new();
    publish(&world, "main");
    world.settings.token = Some(HubToken::new("hf_secret", "a test"));
    world.server.fault(|request, _, reply| {
        let now = request.target.replace("/owner/old/", "/owner/name/");
        if now == request.target { reply } else { Reply::status(307, &[("Location", &now)], "") }
    });
    world.hub().model("owner/old", None, Part::Whole, Destination::Cache).unwrap();
    for part in ["/revision/", "/tree/", "/resolve/"] {
        assert!(world.server.count("GET", part) >= 2, "{part}");
    }
    for request in world.server.log() {
        let expected = (!request.target.starts_with("/cdn/")).then(|| "Bearer hf_secret".to_owned());
        assert_eq!(request.token, expected, "{request:?}");
    }
}

#[test]
fn the_token_goes_to_no_other_port() {
    let (mut world, other) = (World::new(), World::new());
    assert_eq!(publish(&world, "main"), publish(&other, "main"));
    world.settings.token = Some(HubToken::new("hf_secret", "a test"));
    let elsewhere = other.server.endpoint.clone();
    world.server.fault(move |request, _, reply| {
        let moves = request.is("GET", "/config.json") || request.is("GET", "/revision/");
        let there = format!("{elsewhere}{}", request.target);
        if moves { Reply::status(302, &[("Location", &there)], "") } else { reply }
    });
    world.model(None).unwrap();
    let log = other.server.log();
    assert_eq!(log.len(), 2, "{log:?}");
    assert!(log.iter().all(|request| request.token.is_none()), "{log:?}");
}

#[test]
fn redirects_in_a_circle_end() {
    let world = World::new();
    world.server.fault(|request, _, _| Reply::status(302, &[("Location", &request.target)], ""));
    let error = world.refusal();
    assert!(error.message().contains("more than 10 redirects"), "{error}");
    assert_eq!(world.server.log().len(), 11);
}

#[test]
fn an_address_may_hold_a_name_and_a_password() {
    let mut world = World::new();
    publish(&world, "main");
    world.settings.endpoint = world.server.endpoint.replace("://", "://me:word@");
    world.model(None).unwrap();
    for request in world.server.log() {
        let expected = (!request.target.starts_with("/cdn/")).then(|| "Basic bWU6d29yZA==".to_owned());
        assert_eq!(request.token, expected, "{request:?}");
    }
    world.server.fault(|_, _, _| Reply::status(403, &[], ""));
    let text = world.refusal().to_string();
    assert!(text.contains(&world.server.endpoint) && !text.contains("word@"), "{text}");
}

#[test]
fn a_hub_that_falls_silent_is_asked_again() {
    let mut world = World::new();
    world.server.commit("models/owner/name", "main", &[("config.json", b"{}"), ("model.safetensors", b"x")]);
    world.settings.pace.silence = Duration::from_secs(1);
    world.server.fault(|request, before, reply| {
        if request.is("GET", "/revision/") && before == 0 {
            std::thread::sleep(Duration::from_millis(1_500));
        }
        reply
    });
    world.model(None).unwrap();
    let notices = world.heard.notices.lock().unwrap().join("\n");
    assert!(notices.contains("the connection fell silent; trying again"), "{notices}");
}

/// The lines of a request's head.
fn head(stream: &TcpStream) -> String {
    let lines = BufReader::new(stream).lines().map_while(Result::ok);
    lines.take_while(|line| !line.is_empty()).map(|line| line + "\n").collect()
}

/// A proxy that leads each host to `server` (or refuses, without one): its address, and the heads of what it is asked.
fn proxy(server: Option<&str>) -> (String, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (heard, heads) = mpsc::channel();
    let server = server.map(str::to_owned);
    std::thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            let head = head(&client);
            let Some(server) = &server else {
                let _ = client.write_all(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n");
                let _ = heard.send(head);
                continue;
            };
            let _ = heard.send(head);
            let mut hub = TcpStream::connect(server).unwrap();
            let _ = client.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
            let (mut from_client, mut to_hub) = (client.try_clone().unwrap(), hub.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from_client, &mut to_hub));
            std::thread::spawn(move || std::io::copy(&mut hub, &mut client));
        }
    });
    (address, heads)
}

/// No proxy but what a test names.
const DIRECT: [(&str, &str); 4] = [("HTTP_PROXY", ""), ("HTTPS_PROXY", ""), ("ALL_PROXY", ""), ("NO_PROXY", "")];

#[test]
fn a_proxy_of_the_environment_leads_to_the_hub_and_hears_no_token() {
    let program = Program::new();
    let (address, heads) = proxy(program.server.endpoint.strip_prefix("http://"));
    let address = format!("http://me:w%40rd@{address}");
    let environment = [
        ("HF_ENDPOINT", "http://hub.invalid"),
        ("HF_TOKEN", "hf_secret"),
        ("HTTP_PROXY", address.as_str()),
        ("NO_PROXY", "localhost, 127.0.0.0/8"),
    ];
    let text = good(&program.run(&["download", "tiny/llama"], &[&DIRECT[..], &environment].concat()));
    assert!(!text.contains("hf_secret") && !text.contains("rd@"), "{text}");
    let heads: Vec<String> = heads.try_iter().collect();
    assert!(!heads.is_empty());
    for head in heads {
        assert!(head.starts_with("CONNECT hub.invalid:80 "), "{head}");
        assert!(head.contains("Basic bWU6d0ByZA==") && !head.contains("hf_secret"), "{head}");
    }
    let log = program.server.log();
    assert!(log.iter().any(|request| request.token.as_deref() == Some("Bearer hf_secret")), "{log:?}");
    assert_eq!(program.server.count("GET", "/cdn/"), 1, "not by the proxy, as NO_PROXY says");
}

#[test]
fn a_proxy_that_refuses_is_named() {
    let program = Program::new();
    let (address, heads) = proxy(None);
    let environment = [("HF_ENDPOINT", "https://hub.invalid"), ("HTTPS_PROXY", address.as_str())];
    let mut command = program.command(&["download", "tiny/llama"], &[&DIRECT[..], &environment].concat());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // It is asked twice: then the first refusal has been reported.
    for _ in 0..2 {
        let head = heads.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(head.starts_with("CONNECT hub.invalid:443 "), "{head}");
    }
    child.kill().unwrap();
    let text = said(&child.wait_with_output().unwrap());
    assert!(text.contains("the proxy refuses") && text.contains("403"), "{text}");
}

#[test]
fn variables_that_cannot_be_right_are_named() {
    let program = Program::new();
    let refused = |environment: &[(&str, &str)], wanted: &str| {
        let output = program.run(&["download", "tiny/llama"], &[&DIRECT[..], environment].concat());
        let text = said(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(wanted) && !text.contains("word"), "{text}");
    };
    refused(&[("HTTP_PROXY", "gopher://me:word@host")], "env HTTP_PROXY: not the address of a proxy");
    refused(
        &[("HF_ENDPOINT", "https://hub.invalid"), ("SSL_CERT_FILE", "/nowhere.pem"), ("SSL_CERT_DIR", "/nowhere")],
        "env SSL_CERT_FILE",
    );
    assert!(program.server.log().is_empty());
}
