// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Separates Rust code from comments and strings.

/// Returns the source with comments, strings and characters blanked out. Everything else keeps its line and column.
///
/// A check that looks for a word in code must not be misled by the same word in a string (such as in a test of the
/// check itself) or in a comment.
pub fn code_only(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let skip = match bytes[at] {
            b'/' if bytes[at..].starts_with(b"//") => line_end(&bytes[at..]),
            b'/' if bytes[at..].starts_with(b"/*") => block_comment(&bytes[at..]),
            b'"' => string(&bytes[at..]),
            b'r' if !after_word(&out) => raw_string(&bytes[at..]),
            b'b' | b'c' if !after_word(&out) && bytes.get(at + 1) == Some(&b'r') => {
                let len = raw_string(&bytes[at + 1..]);
                if len > 0 { len + 1 } else { 0 }
            }
            b'\'' => character(&bytes[at..]),
            _ => 0,
        };
        if skip == 0 {
            out.push(bytes[at]);
            at += 1;
        } else {
            out.extend(bytes[at..at + skip].iter().map(|&b| if b == b'\n' { b } else { b' ' }));
            at += skip;
        }
    }
    String::from_utf8(out).expect("only whole characters were replaced")
}

/// Returns the words (identifiers and keywords) of blanked code, each with the number of its line.
pub fn words(code: &str) -> impl Iterator<Item = (usize, &str)> {
    code.lines().enumerate().flat_map(|(row, line)| {
        line.split(|c: char| !c.is_alphanumeric() && c != '_')
            .filter(|word| !word.is_empty())
            .map(move |word| (row + 1, word))
    })
}

fn after_word(out: &[u8]) -> bool {
    out.last().is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_')
}

fn line_end(rest: &[u8]) -> usize {
    rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len())
}

fn block_comment(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at < rest.len() {
        if rest[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

fn string(rest: &[u8]) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// Returns the length of `r"…"` or `r#"…"#`, or 0 if it is none (a word that begins with r, or a raw identifier).
fn raw_string(rest: &[u8]) -> usize {
    let hashes = rest[1..].iter().take_while(|&&b| b == b'#').count();
    if rest.get(1 + hashes) != Some(&b'"') {
        return 0;
    }
    let mut end = vec![b'"'];
    end.resize(hashes + 1, b'#');
    let body = hashes + 2;
    let found = rest[body..].windows(end.len()).position(|window| window == end);
    found.map_or(rest.len(), |at| body + at + end.len())
}

/// Returns the length of a character literal, or 0 if it is a lifetime.
fn character(rest: &[u8]) -> usize {
    if rest.get(1) == Some(&b'\\') {
        let close = rest.iter().skip(3).position(|&b| b == b'\'');
        return close.map_or(rest.len(), |at| at + 4);
    }
    let text = &rest[1..rest.len().min(6)];
    let first = match text.first() {
        Some(b) if *b >= 0xf0 => 4,
        Some(b) if *b >= 0xe0 => 3,
        Some(b) if *b >= 0xc0 => 2,
        _ => 1,
    };
    if text.get(first) == Some(&b'\'') { first + 2 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words_of(source: &str) -> Vec<String> {
        words(&code_only(source)).map(|(_, word)| word.to_owned()).collect()
    }

    #[test]
    fn comments_are_blanked() {
        assert_eq!(words_of("a // unsafe\nb /* unsafe /* unsafe */ unsafe */ c"), ["a", "b", "c"]);
    }

    #[test]
    fn strings_of_every_form_are_blanked() {
        let source = r###"a("unsafe \" unsafe", r"unsafe\", r#"un"safe"#, b"unsafe", br#"unsafe"#, c"x") z"###;
        assert_eq!(words_of(source), ["a", "b", "c", "z"]);
    }

    #[test]
    fn characters_are_blanked_and_lifetimes_are_kept() {
        assert_eq!(words_of(r"f<'a>('b', '\'', '\u{1f600}', '\n', 'é') 'c: x"), ["f", "a", "c", "x"]);
    }

    #[test]
    fn words_that_begin_with_r_or_b_are_kept() {
        assert_eq!(words_of("r#fn ring br bring r7_x"), ["r", "fn", "ring", "br", "bring", "r7_x"]);
    }

    #[test]
    fn lines_keep_their_numbers() {
        let code = code_only("/*\n*/ \"\n\" x");
        assert_eq!(words(&code).collect::<Vec<_>>(), [(3, "x")]);
    }

    #[test]
    fn unfinished_source_ends_quietly() {
        for source in ["\"abc", "/* abc", "r#\"abc", "'", "'\\", "\"\\"] {
            code_only(source);
        }
    }
}
