//! The store over real sockets: values, tokens, noise, replayed greetings and hosts that speak something else.
use super::*;
use crate::World;
use crate::host::Host;
use crate::membership::Facts;
use std::net::TcpListener;

fn local(token: &RunToken) -> Host {
    Host::serve(SocketAddr::from(([127, 0, 0, 1], 0)), token.clone()).unwrap()
}

fn claim(rank: usize) -> Claim {
    Claim::of(World { rank, size: 2, local_rank: rank, local_size: 2 }, Facts::new())
}

#[test]
fn values_reach_the_others_and_the_dead_are_known() {
    let token = RunToken::fresh().unwrap();
    let host = local(&token);
    let first = Store::connect(host.address(), &token, &claim(0)).unwrap();
    let second = Store::connect(host.address(), &token, &claim(1)).unwrap();
    assert_eq!(first.get("name").unwrap(), StoreReply { value: None, gone: vec![] });
    second.set("name", b"value").unwrap();
    second.set("empty", b"").unwrap();
    assert_eq!(first.wait("name", None).unwrap(), b"value");
    assert_eq!(first.wait("empty", None).unwrap(), b"");
    assert_eq!(first.members().unwrap(), (vec![0, 1], vec![]));
    let late = first.wait("never", Some(Duration::from_millis(20))).unwrap_err();
    assert!(late.message().starts_with("rank 0: waiting for `never`: nothing within"), "{late}");
    drop(second);
    assert_eq!(first.wait("never", None).unwrap_err().message(), "rank 0: waiting for `never`: rank 1 has ended");
    // Started again, it belongs to another run.
    let early = Store::connect(host.address(), &token, &claim(1)).unwrap_err();
    assert!(matches!(early, ConnectError::RunEnded(_)), "{early:?}");
}

#[test]
fn who_does_not_know_the_token_gets_nothing() {
    let token = RunToken::fresh().unwrap();
    let host = local(&token);
    let other = RunToken::given("not the token of this run").unwrap();
    let error = Error::from(Store::connect(host.address(), &other, &claim(0)).unwrap_err());
    assert!(error.message().contains("does not have this run's token"), "{error}");
    assert_eq!(error.kind(), tunesmith_base::Kind::Config);
    assert_eq!(RunToken::given("short").unwrap_err().kind(), tunesmith_base::Kind::Config);
    // Nor does a host that only repeats what it is told pass for the right one.
    let mirror = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = mirror.local_addr().unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = mirror.accept().unwrap();
        stream.write_all(&[&MAGIC[..], &[7; 32]].concat()).unwrap();
        let mut heard = [0; 512];
        let count = stream.read(&mut heard).unwrap();
        stream.write_all(&heard[..count]).unwrap();
    });
    assert!(matches!(Store::connect(address, &token, &claim(0)), Err(ConnectError::Foreign(_))));
}

/// What a visitor that knows the token says, recorded.
struct Recorded<'a> {
    stream: &'a TcpStream,
    said: Vec<u8>,
}

impl Read for Recorded<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> IoResult<usize> {
        self.stream.read(buffer)
    }
}

impl Write for Recorded<'_> {
    fn write(&mut self, buffer: &[u8]) -> IoResult<usize> {
        self.said.extend(buffer);
        self.stream.write(buffer)
    }
    fn flush(&mut self) -> IoResult<()> {
        Ok(())
    }
}

#[test]
fn a_greeting_that_is_said_again_opens_nothing() {
    let token = RunToken::fresh().unwrap();
    let host = local(&token);
    let stream = TcpStream::connect(host.address()).unwrap();
    let mut recorded = Recorded { stream: &stream, said: Vec::new() };
    assert!(matches!(handshake(&mut recorded, &token, &claim(0)), Ok(Handshake::Answer(IN, _))));
    // The same rank of another run of the same token would be welcome; a recording is not.
    for _ in 0..20 {
        let mut again = TcpStream::connect(host.address()).unwrap();
        again.write_all(&recorded.said).unwrap();
        let mut heard = Vec::new();
        let ended = again.read_to_end(&mut heard);
        assert!(heard.len() <= 40, "the challenge and nothing else: {ended:?}, {} bytes", heard.len());
    }
    let second = Store::connect(host.address(), &token, &claim(1)).unwrap();
    assert_eq!(second.members().unwrap().0, [0, 1], "the run is as it was");
}

#[test]
fn noise_neither_ends_the_host_nor_makes_it_take_memory() {
    let token = RunToken::fresh().unwrap();
    let host = local(&token);
    let mut noise = TcpStream::connect(host.address()).unwrap();
    noise.write_all(&[0xff; 4096]).unwrap();
    // Connections that say nothing, more than are greeted at a time.
    let mute: Vec<_> = (0..200).map(|_| TcpStream::connect(host.address()).unwrap()).collect();
    let store = Store::connect(host.address(), &token, &claim(0)).unwrap();
    drop(mute);
    let mut stream = store.stream.lock().unwrap();
    let mut frame = vec![SET];
    frame.extend(1u32.to_le_bytes());
    frame.push(b'x');
    frame.extend(0x7fff_ffffu32.to_le_bytes());
    stream.write_all(&frame).unwrap();
    drop(stream);
    assert!(store.get("x").is_err(), "a length beyond the limit ends the connection");
    // The host answers all the same.
    assert!(matches!(Store::connect(host.address(), &token, &claim(0)), Err(ConnectError::RunEnded(_))));
}

#[test]
fn who_listens_and_does_not_speak_the_protocol_is_told_from_who_is_away() {
    let token = RunToken::fresh().unwrap();
    let speaks = |act: fn(&mut TcpStream)| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || act(&mut listener.accept().unwrap().0));
        match Store::connect(address, &token, &claim(1)) {
            Err(ConnectError::Foreign(error)) => error.message().to_owned(),
            other => panic!("{other:?}"),
        }
    };
    assert!(speaks(|_| ()).contains("closes the connection at once"));
    assert!(speaks(|stream| stream.write_all(&[b'S'; 60]).unwrap()).contains("speaks another protocol"));
    let mute = speaks(|_| std::thread::sleep(Duration::from_secs(6)));
    assert!(mute.contains("rank 1 (process") && mute.contains("sends nothing"), "{mute}");
    // Nobody: the port is closed again.
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    assert!(matches!(Store::connect(closed, &token, &claim(1)), Err(ConnectError::Unreachable(_))));
}
