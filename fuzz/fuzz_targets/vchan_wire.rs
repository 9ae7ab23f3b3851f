// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A peer that runs the original may put anything into the page that both write, at any time (W-4, W-5). This end
//! touches nothing but the rings and its own words, never believes more than a ring, and stays with the first violation
//! that it saw.
#![no_main]

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering::SeqCst},
    },
};

use libfuzzer_sys::fuzz_target;
use tombolo_vchan_wire::{
    Error, Live, PAGE, Reader, Server, Writer, at, client,
    ground::{Event, Ground, Shared},
};

/// Memory whose first bytes, if it is the page, hold no ring.
#[derive(Debug)]
struct Cells {
    bytes: Vec<AtomicU8>,
    page: bool,
    writable: bool,
}

impl Cells {
    fn new(pages: usize, page: bool, writable: bool) -> Arc<Self> {
        let bytes = (0..pages * PAGE).map(|_| AtomicU8::new(0)).collect();
        Arc::new(Self { bytes, page, writable })
    }

    fn check(&self, at: usize, len: usize) {
        assert!(at + len <= self.bytes.len(), "{len} bytes at {at:#x}");
        assert!(!self.page || len == 0 || at >= 1024, "{len} bytes at {at:#x} of the page");
    }
}

impl Shared for Cells {
    fn len(&self) -> usize {
        self.bytes.len()
    }
    fn load8(&self, at: usize) -> u8 {
        self.bytes[at].load(SeqCst)
    }
    fn store8(&self, at: usize, value: u8) {
        self.bytes[at].store(value, SeqCst);
    }
    fn set_bits(&self, at: usize, bits: u8) -> u8 {
        self.bytes[at].fetch_or(bits, SeqCst)
    }
    fn clear_bits(&self, at: usize, bits: u8) -> u8 {
        self.bytes[at].fetch_and(!bits, SeqCst)
    }
    fn load32(&self, at: usize) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|index| self.load8(at + index)))
    }
    fn store32(&self, at: usize, value: u32) {
        value.to_le_bytes().iter().zip(at..).for_each(|(byte, at)| self.store8(at, *byte));
    }
    fn copy_in(&self, at: usize, from: &[u8]) {
        assert!(self.writable, "written, where this end may only read");
        self.check(at, from.len());
        from.iter().zip(at..).for_each(|(byte, at)| self.store8(at, *byte));
    }
    fn copy_out(&self, at: usize, to: &mut [u8]) {
        self.check(at, to.len());
        to.iter_mut().zip(at..).for_each(|(byte, at)| *byte = self.load8(at));
    }
}

/// An event channel to nobody.
#[derive(Debug)]
struct Silence(File);

impl Event for Silence {
    fn port(&self) -> u32 {
        1
    }
    fn notify(&self) {}
    fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
    fn clear(&self) {}
}

/// A world whose page the fuzzer writes: that of a server of ours, or of the peer's.
#[derive(Debug)]
struct World {
    page: Arc<Cells>,
}

impl World {
    fn silence() -> io::Result<Arc<dyn Event>> {
        Ok(Arc::new(Silence(File::open("/dev/null")?)))
    }
}

impl Ground for World {
    fn share(&self, pages: usize, when_gone: Option<(usize, u32)>) -> io::Result<(Vec<u32>, Arc<dyn Shared>)> {
        let memory = if when_gone.is_some() { Arc::clone(&self.page) } else { Cells::new(pages, false, true) };
        Ok(((1..=pages as u32).collect(), memory))
    }
    fn map(&self, references: &[u32], write: bool, when_gone: Option<(usize, u32)>) -> io::Result<Arc<dyn Shared>> {
        assert!(references.len() <= 256, "a ring of more than 1 MiB");
        if when_gone.is_some() {
            return Ok(Arc::clone(&self.page) as Arc<dyn Shared>);
        }
        Ok(Cells::new(references.len(), false, write))
    }
    fn offer(&self) -> io::Result<Arc<dyn Event>> {
        Self::silence()
    }
    fn bind(&self, _: u32) -> io::Result<Arc<dyn Event>> {
        Self::silence()
    }
    fn publish(&self, _: &str, _: &[(&str, String)]) -> io::Result<()> {
        Ok(())
    }
    fn withdraw(&self, _: &str) {}
    fn look_up(&self, _: &str, _: &str) -> io::Result<Option<String>> {
        Ok(Some("1".into()))
    }
}

fn exchange(page: &Cells, reader: &mut Reader, writer: &mut Writer, steps: &[[u8; 6]]) {
    let (mut lied_to_reader, mut lied_to_writer) = (false, false);
    let mut buffer = [0; 3000];
    for [step, a, b, c, d, e] in steps {
        let word = u32::from_le_bytes([*a, *b, *c, *d]);
        let len = (word as usize % buffer.len()).max(1);
        let told = match step % 8 {
            // The peer writes a word of the page, or a byte.
            0 | 1 => {
                page.store32(4 * (usize::from(*e) % 8), word);
                continue;
            }
            2 => {
                page.store8(usize::from(*e) % 32, *a);
                continue;
            }
            3 => reader.read(&mut buffer[..len]).map(|read| (read, len)),
            4 => reader.available(len).map(|there| (there, reader.capacity())),
            5 => writer.write(&buffer[..len]).map(|written| (written, len)),
            6 => writer.room(len).map(|room| (room, writer.capacity())),
            _ => {
                let live = [reader.live(), writer.live()];
                assert!(live.iter().all(|it| matches!(it, Live::Gone | Live::Here | Live::NotYet)));
                continue;
            }
        };
        let lied = if step % 8 < 5 { &mut lied_to_reader } else { &mut lied_to_writer };
        match told {
            Ok((count, most)) => assert!(count <= most && !*lied, "{count} of {most}, lied to: {lied}"),
            Err(Error::Corrupt { clause: "W-5", .. }) => *lied = true,
            Err(other) => panic!("{other}"),
        }
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((head, rest)) = input.split_at_checked(PAGE.min(1 + at::SERVER_NOTIFY)) else { return };
    let (steps, _) = rest.as_chunks::<6>();
    let page = Cells::new(1, true, true);
    let world = Arc::new(World { page: Arc::clone(&page) });
    if head[0] & 1 == 0 {
        let wanted = 1usize << (head[1] % 21);
        let Ok((_server, (mut reader, mut writer))) = Server::new(world, "fuzz", wanted, wanted) else { return };
        exchange(&page, &mut reader, &mut writer, steps);
    } else {
        // A server of the peer's, which says what it likes of its rings.
        head.iter().enumerate().for_each(|(at, byte)| page.store8(at, *byte));
        match client(&*world, "fuzz") {
            Ok((mut reader, mut writer)) => exchange(&page, &mut reader, &mut writer, steps),
            Err(Error::Corrupt { clause: "W-4", .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
});
