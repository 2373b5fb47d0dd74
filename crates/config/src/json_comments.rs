//! Turns JSON with comments, as DeepSpeed reads it, into JSON that our YAML reader reads. Every line keeps its number.

/// Blanks `// …`, `# …` and `/* … */` outside of strings, and tabs, character by character.
///
/// # Errors
/// A `/*` without an end, which would hide all keys behind it: its line.
pub(super) fn without_comments(text: &str) -> Result<String, usize> {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    let mut previous = '\n';
    while let Some(letter) = chars.next() {
        match (letter, chars.peek().copied()) {
            ('"', _) => {
                out.push('"');
                while let Some(inner) = chars.next() {
                    out.push(inner);
                    match inner {
                        '\\' => out.extend(chars.next()),
                        '"' => break,
                        _ => {}
                    }
                }
            }
            ('/', Some('/')) => blank_line(&mut out, &mut chars, 1),
            ('#', _) if previous.is_whitespace() || ",{}[]".contains(previous) => blank_line(&mut out, &mut chars, 1),
            ('/', Some('*')) => {
                let line = out.matches('\n').count() + 1;
                chars.next();
                out.push_str("  ");
                let (mut star, mut ended) = (false, false);
                for inner in chars.by_ref() {
                    out.push(if inner == '\n' { '\n' } else { ' ' });
                    ended = star && inner == '/';
                    if ended {
                        break;
                    }
                    star = inner == '*';
                }
                if !ended {
                    return Err(line);
                }
            }
            ('\t', _) => out.push(' '),
            _ => out.push(letter),
        }
        previous = letter;
    }
    Ok(out)
}

/// Blanks the rest of a comment line, of which `begun` characters are read already.
fn blank_line(out: &mut String, chars: &mut std::iter::Peekable<std::str::Chars<'_>>, begun: usize) {
    out.push_str(&" ".repeat(begun));
    while chars.peek().is_some_and(|letter| *letter != '\n') {
        chars.next();
        out.push(' ');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_go_and_lines_stay() {
        let text =
            "{\n\t// one: 1\n  \"a\": 1, # two\n  /* three\n  */ \"b//c\": \"x#y /* z */ \\\" // w\", \"d\": \"e\"}";
        let plain = without_comments(text).unwrap();
        assert_eq!(plain.lines().count(), text.lines().count());
        let read = crate::parse_yaml(&plain).expect("it reads");
        let Node::Map(entries) = read else { panic!("{read:?}") };
        assert_eq!(
            entries,
            [
                ("a".to_owned(), Node::Int(1)),
                ("b//c".to_owned(), Node::Str("x#y /* z */ \" // w".to_owned())),
                ("d".to_owned(), Node::Str("e".to_owned())),
            ]
        );
    }

    #[test]
    fn a_comment_that_never_ends_hides_no_keys() {
        assert_eq!(without_comments("{}\n /* a\nb"), Err(2));
        assert_eq!(without_comments("/*/ {}"), Err(1));
        assert_eq!(without_comments("/**/{}").unwrap(), "    {}");
        assert_eq!(without_comments("\"a\\").unwrap(), "\"a\\");
        assert_eq!(without_comments("a#b").unwrap(), "a#b");
    }

    use crate::Node;
}
