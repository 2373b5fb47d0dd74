//! Encodings of text other than UTF-8, as byte order marks show them.

/// The encoding that the byte order mark at the start of `head` shows, if it is not UTF-8, and how to convert such a file.
pub fn other_encoding(head: &[u8]) -> Option<(&'static str, &'static str)> {
    // UTF-32's mark begins as UTF-16's does.
    let marks: [(&[u8], _, _); 4] = [
        (b"\xff\xfe\0\0", "UTF-32", "convert it: iconv -f utf-32 -t utf-8"),
        (b"\0\0\xfe\xff", "UTF-32", "convert it: iconv -f utf-32 -t utf-8"),
        (b"\xff\xfe", "UTF-16", "convert it: iconv -f utf-16 -t utf-8"),
        (b"\xfe\xff", "UTF-16", "convert it: iconv -f utf-16 -t utf-8"),
    ];
    marks.into_iter().find_map(|(mark, name, how)| head.starts_with(mark).then_some((name, how)))
}
