//! A minimal client of torchrun's key-value store (`c10d::TCPStore`): it sets and reads one value. The protocol is that of
//! PyTorch's `TCPStore.cpp`: a query is one byte; numbers are u64; a string follows its length; a connection opens with a magic
//! number, in one write.
//!
//! torchrun's store outlives restarts and is open to everybody. So it holds only the endpoint of rank 0's own rendezvous, and
//! the token.
use std::io::{ErrorKind, Read, Result as IoResult, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::wire::{DeadlineStream, read_exactly};
use tunesmith_base::error::{Error, Result};

const VALIDATE: u8 = 0;
const SET: u8 = 1;
const GET: u8 = 3;
const CHECK: u8 = 5;
const MAGIC: u32 = 0x3C85_F7CE;
/// The answer to [`CHECK`] if every key is set.
const READY: u8 = 0;
/// The longest value that is accepted, in bytes.
const LONGEST: usize = 4096;
/// How long the agent may take to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// A connection to the agent's store.
#[derive(Debug)]
pub struct Agent {
    stream: TcpStream,
    address: String,
}

impl Agent {
    /// Connects to `address` (`host:port`), trying again until `limit`.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: nobody answers.
    pub fn connect(address: &str, limit: Duration) -> Result<Self> {
        let began = Instant::now();
        loop {
            let connected = address.to_socket_addrs().and_then(|mut found| {
                let first = found.next().ok_or(std::io::ErrorKind::AddrNotAvailable)?;
                TcpStream::connect_timeout(&first, Duration::from_secs(5))
            });
            match connected {
                Ok(stream) => {
                    let mut agent = Self { stream, address: address.to_owned() };
                    agent.talk(|stream| {
                        let magic = MAGIC.to_le_bytes();
                        stream.write_all(&[VALIDATE, magic[0], magic[1], magic[2], magic[3]])
                    })?;
                    return Ok(agent);
                }
                Err(error) if began.elapsed() > limit => {
                    return Err(Error::peer(format!("torchrun's store at {address} does not answer"))
                        .caused_by(error)
                        .hint("MASTER_ADDR and MASTER_PORT say where it is"));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    fn talk<T>(&mut self, talk: impl FnOnce(&mut DeadlineStream<'_>) -> IoResult<T>) -> Result<T> {
        let talked = self.stream.set_nodelay(true).and_then(|()| talk(&mut DeadlineStream::new(&self.stream, ANSWER)));
        talked.map_err(|error| {
            Error::peer(format!("torchrun's store at {} does not answer as one", self.address))
                .caused_by(error)
                .hint("MASTER_ADDR and MASTER_PORT say where it is")
        })
    }

    /// Sets a value.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: the connection has ended.
    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        let query = [&[SET][..], &string(key), &string(value)].concat();
        self.talk(|stream| stream.write_all(&query))
    }

    /// The value, if it is set.
    ///
    /// # Errors
    /// As [`Agent::set`]; a value that cannot be ours.
    pub fn get(&mut self, key: &str) -> Result<Option<String>> {
        self.talk(|stream| value(stream, key))
    }
}

/// Asks for the value of `key`.
fn value(stream: &mut (impl Read + Write), key: &str) -> IoResult<Option<String>> {
    let mut there = [0];
    stream.write_all(&[&[CHECK][..], &1u64.to_le_bytes(), &string(key)].concat())?;
    stream.read_exact(&mut there)?;
    if there[0] != READY {
        return Ok(None);
    }
    let mut length = [0; 8];
    stream.write_all(&[&[GET][..], &string(key)].concat())?;
    stream.read_exact(&mut length)?;
    let value = read_exactly(stream, u64::from_le_bytes(length), LONGEST)?;
    String::from_utf8(value).map(Some).map_err(|_| ErrorKind::InvalidData.into())
}

/// Reads `bytes` as if torchrun's store had sent them: for fuzzing.
pub fn read_anything(bytes: &[u8]) {
    let mut sent = super::wire::Sent(bytes);
    // The result does not matter.
    let _ = value(&mut sent, "key");
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}
