// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads small files of the kernel's.

use std::path::Path;

use rustix::fs::{Mode, OFlags};

/// Returns the text of a kernel file, at most `most` bytes of it. In a container, something else may have been put
/// there: it is neither waited for nor read at length.
#[must_use]
pub fn read_text(path: &Path, most: usize) -> Option<String> {
    let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut text = vec![0; most];
    let mut len = 0;
    while len < most {
        match rustix::io::read(&fd, &mut text[len..]).ok()? {
            0 => break,
            read => len += read,
        }
    }
    text.truncate(len);
    String::from_utf8(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_read_to_its_end_or_its_bound_and_nothing_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "12345").unwrap();
        assert_eq!((read_text(&file, 9).as_deref(), read_text(&file, 3).as_deref()), (Some("12345"), Some("123")));
        std::fs::write(&file, [0xff]).unwrap();
        assert_eq!((read_text(&file, 9), read_text(folder.path(), 9)), (None, None));
        let fifo = folder.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert_eq!(read_text(&fifo, 9).as_deref(), Some(""));
    }
}
