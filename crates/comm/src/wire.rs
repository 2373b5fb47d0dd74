//! Reads from other processes safely: lengths are bounded and memory grows only as bytes arrive; a deadline holds however slowly
//! bytes trickle in; connections notice when the other machine is gone.
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// A connection whose reads and writes all end by the same moment. The clock is monotonic.
#[derive(Debug)]
pub struct DeadlineStream<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl<'a> DeadlineStream<'a> {
    /// Ends every read and write `limit` from now.
    pub fn new(stream: &'a TcpStream, limit: Duration) -> Self {
        Self { stream, deadline: Instant::now() + limit }
    }

    fn left(&self) -> Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

impl Read for DeadlineStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        (&mut &*self.stream).read(buffer)
    }
}

impl Write for DeadlineStream<'_> {
    fn write(&mut self, buffer: &[u8]) -> Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        (&mut &*self.stream).write(buffer)
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

/// What another process may have sent, for fuzzing; what is written is dropped.
#[derive(Debug)]
pub struct Sent<'a>(pub &'a [u8]);

impl Read for Sent<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Sent<'_> {
    fn write(&mut self, buffer: &[u8]) -> Result<usize> {
        Ok(buffer.len())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Whether `error` says that time is up.
pub fn is_late(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// Appends the length of `bytes` (u32, little-endian) and `bytes`.
pub fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u32).to_le_bytes());
    out.extend(bytes);
}

/// Reads a u32, little-endian.
///
/// # Errors
/// Errors of the stream.
pub fn read_u32(stream: &mut impl Read) -> Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

/// Reads `length` bytes.
///
/// # Errors
/// `InvalidData`: `length` is more than `longest`; those of the stream.
pub fn read_exactly(stream: &mut impl Read, length: u64, longest: usize) -> Result<Vec<u8>> {
    if length > longest as u64 {
        return Err(Error::new(ErrorKind::InvalidData, format!("{length} bytes are announced, at most {longest} fit")));
    }
    let mut bytes = Vec::new();
    stream.take(length).read_to_end(&mut bytes)?;
    if (bytes.len() as u64) < length { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(bytes) }
}

/// Reads what [`put_bytes`] has put.
///
/// # Errors
/// As [`read_exactly`].
pub fn read_bytes(stream: &mut impl Read, longest: usize) -> Result<Vec<u8>> {
    let length = read_u32(stream)?;
    read_exactly(stream, length.into(), longest)
}

/// Closes a silent connection when the other machine no longer answers the system's keep-alive probes (after about
/// eleven seconds). A machine without power or network sends no end of the connection.
pub fn notice_loss(stream: &TcpStream) {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd as _;
        for (level, option, value) in [
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 5),
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 2),
            (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3),
        ] {
            let value: libc::c_int = value;
            let size = size_of::<libc::c_int>() as libc::socklen_t;
            // SAFETY: the socket is open as long as `stream` is borrowed; the int lives through the call, which reads
            // as many bytes as `size` says. Where the system refuses, a lost machine is noticed at the next operation's
            // timeout.
            unsafe { libc::setsockopt(stream.as_raw_fd(), level, option, (&raw const value).cast(), size) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = stream;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn an_announced_length_takes_no_memory() {
        let mut frame = u32::MAX.to_le_bytes().to_vec();
        frame.extend([7; 9]);
        assert_eq!(read_bytes(&mut &frame[..], 1 << 20).unwrap_err().kind(), ErrorKind::InvalidData);
        // Within the limit, but it never comes.
        assert_eq!(read_bytes(&mut &frame[..], usize::MAX).unwrap_err().kind(), ErrorKind::UnexpectedEof);
        let mut frame = Vec::new();
        put_bytes(&mut frame, b"text");
        assert_eq!(read_bytes(&mut &frame[..], 4).unwrap(), b"text");
    }

    #[test]
    fn bytes_that_trickle_in_do_not_move_the_deadline() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut slow = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        std::thread::spawn(move || {
            while slow.write_all(&[0]).is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let began = Instant::now();
        let error = DeadlineStream::new(&stream, Duration::from_millis(150)).read_exact(&mut [0; 4096]).unwrap_err();
        assert!(is_late(&error), "{error}");
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    }
}
