// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The sender whose death is looked at: `/agent flow ADDRESS NOTE` sends numbered lines for ever, and notes after each call
//! that returned how many bytes it has published. What is noted must arrive, whatever becomes of the sender.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt;
use std::time::Duration;
use tombolo::{Options, Stream};
use tombolo_e2e::error::{Context, Result};

/// Bytes of a write, and a line more.
const CHUNK: usize = 4 << 10;
const WAIT: Duration = Duration::from_secs(60);

/// The guest half.
pub fn send(address: &str, note: &str) -> Result<()> {
    let options = Options::new().wait_for_listener(WAIT);
    let mut stream: Stream = tombolo::connect_with(address, &options).context(address)?;
    let note = File::create(note).context(note)?;
    let (mut text, mut published) = (String::new(), 0);
    for number in 1u64.. {
        writeln!(text, "{number}")?;
        if text.len() >= CHUNK {
            stream.write_all(text.as_bytes()).context(format!("sending stopped after {published} bytes"))?;
            published += text.len();
            note.write_at(format!("{published:020}\n").as_bytes(), 0)?;
            text.clear();
        }
    }
    Ok(())
}
