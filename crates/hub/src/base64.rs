//! Base64 (RFC 4648), for the header of a password and for small files of a commit.
/// Encodes with the standard alphabet and padding.
pub(super) fn encode(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let mut bits = [0u8; 3];
        bits[..three.len()].copy_from_slice(three);
        let bits = u32::from_be_bytes([0, bits[0], bits[1], bits[2]]);
        for letter in 0..4 {
            let index = (bits >> (18 - 6 * letter)) & 63;
            text.push(if letter > three.len() { '=' } else { char::from(LETTERS[index as usize]) });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_rfc() {
        for (plain, wanted) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(encode(plain.as_bytes()), wanted);
        }
        assert_eq!(encode(&[0xFB, 0xFF, 0xBF]), "+/+/");
    }
}
