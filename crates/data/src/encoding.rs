//! Recognizes text that is not in UTF-8 by its byte order mark.

/// The encoding that the byte order mark at the start of `head` shows, and how to convert such a file to UTF-8. `None`
/// without a mark, or if the mark is that of UTF-8.
pub fn other_encoding(head: &[u8]) -> Option<(&'static str, &'static str)> {
    // The mark of UTF-32 begins with that of UTF-16, so it comes first.
    let marks: [(&[u8], _, _); 4] = [
        (b"\xff\xfe\0\0", "UTF-32", "convert it: iconv -f utf-32 -t utf-8"),
        (b"\0\0\xfe\xff", "UTF-32", "convert it: iconv -f utf-32 -t utf-8"),
        (b"\xff\xfe", "UTF-16", "convert it: iconv -f utf-16 -t utf-8"),
        (b"\xfe\xff", "UTF-16", "convert it: iconv -f utf-16 -t utf-8"),
    ];
    marks.into_iter().find_map(|(mark, name, how)| head.starts_with(mark).then_some((name, how)))
}
