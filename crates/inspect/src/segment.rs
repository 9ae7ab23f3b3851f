// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads a segment of another process without involving that process.

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::{Duration, SystemTime},
};

use rustix::fs::{AtFlags, MemfdFlags, Mode, OFlags, StatxFlags};
use tombolo_layout::{Features, SegmentHeader, header, limits, private::COUNTERS, words};
use tombolo_mem::{PeerSegment, PeerWord};

use crate::error::{Os, Result};
use crate::process::Identity;

/// A segment whose control page is mapped here. Its contents are untrusted.
#[derive(Debug)]
pub struct Segment {
    pub header: SegmentHeader,
    /// Time at which the kernel made it.
    pub made: Option<SystemTime>,
    page: Page,
}

/// A control page.
#[derive(Debug)]
enum Page {
    Mapped(PeerSegment),
    /// A copy, as the page was when it was read.
    Copied(Box<[u8; limits::CONTROL_LEN as usize]>),
}

/// The stats page of an endpoint (C-12).
#[derive(Clone, Copy, Debug)]
pub struct StatsPage {
    pub writer: [u64; COUNTERS],
    pub reader: [u64; COUNTERS],
    pub peer_epoch: u64,
}

/// Opens memory of other processes, and no other files.
#[derive(Debug)]
pub struct Opener {
    /// The kernel's own mount on which all memfds are.
    mount: String,
}

impl Opener {
    pub fn new() -> Result<Self> {
        let own = rustix::fs::memfd_create("tombolo-ls", MemfdFlags::CLOEXEC).os("memfd_create")?;
        Ok(Self { mount: mount_of(&own).os("reading /proc/self/fdinfo")? })
    }

    /// Opens the file behind a descriptor of another process for reading, if it is a memfd. A file that only has such a
    /// name may be on a file system that never answers. So it is held by its path alone until `/proc`, which asks no
    /// file system, has reported its mount.
    pub fn open(&self, path: &str) -> io::Result<OwnedFd> {
        let held = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        if mount_of(&held)? != self.mount {
            return Err(io::Error::other("no memfd"));
        }
        let path = format!("/proc/self/fd/{}", held.as_raw_fd());
        Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?)
    }
}

/// Returns the mount on which a descriptor's file is.
fn mount_of(fd: &OwnedFd) -> io::Result<String> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
    let mount = info.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    mount.map(|mount| mount.trim().into()).ok_or_else(|| io::Error::other("no mnt_id"))
}

pub fn identity(fd: &OwnedFd) -> io::Result<Identity> {
    let stat = rustix::fs::fstat(fd)?;
    Ok((stat.st_dev, stat.st_ino))
}

impl Segment {
    /// Maps the control page. Returns `None` if the memory is no segment, or could go away while it is read.
    pub fn map(fd: &OwnedFd) -> Option<Self> {
        // The limit allows the largest ring, after a control part that may be larger than today's.
        let len = tombolo_mem::check_sealed(fd.as_fd(), 2 * limits::CAPACITY_MAX).ok()?;
        if (len as u64) < limits::CONTROL_LEN + limits::CAPACITY_MIN {
            return None;
        }
        let page = PeerSegment::map(fd.as_fd(), limits::CONTROL_LEN as usize).ok()?;
        let header = SegmentHeader::decode(&page.header::<{ header::LEN }>(), len as u64).ok()?;
        Some(Self { header, made: made(fd), page: Page::Mapped(page) })
    }

    /// Makes a segment of `len` bytes from a copy of its control page. Returns `None` if it is no segment.
    pub fn copied(page: Box<[u8; limits::CONTROL_LEN as usize]>, len: u64) -> Option<Self> {
        let header = SegmentHeader::decode(page.first_chunk()?, len).ok()?;
        Some(Self { header, made: None, page: Page::Copied(page) })
    }

    /// Makes a segment from a control page that the broker read, with the length that the page states.
    pub fn stated(page: Box<[u8; limits::CONTROL_LEN as usize]>) -> Option<Self> {
        let len = word_at(&page[..], header::SEGMENT_LEN);
        Self::copied(page, len)
    }

    /// Returns the current value of a word.
    pub fn word(&self, at: usize) -> u64 {
        // ORDER R-5: Acquire, so that of two words read in turn, the second is not older than the first.
        match &self.page {
            Page::Mapped(page) => page.word(at).load_acquire().hint(),
            Page::Copied(page) => word_at(&page[..], at),
        }
    }

    /// Returns the current stats page, if there is one (C-12).
    pub fn stats(&self) -> Option<StatsPage> {
        let counters = |at| std::array::from_fn(|index| self.word(at + 8 * index));
        self.header.features.has(Features::STATISTICS).then(|| StatsPage {
            writer: counters(words::WRITER_COUNTERS),
            reader: counters(words::READER_COUNTERS),
            peer_epoch: self.word(words::PEER_EPOCH),
        })
    }

    /// Returns how the ring that this endpoint writes follows its load: the size to which it grows, and the reason for
    /// its size (C-12).
    pub fn growth(&self) -> Option<(u64, &'static str)> {
        let told = self.header.features.has(Features::STATISTICS);
        told.then(|| self.word(words::RING_GROWTH)).and_then(words::decode_growth)
    }
}

/// Returns the word at `at` of a page that was read.
pub fn word_at(page: &[u8], at: usize) -> u64 {
    page.get(at..at + 8).and_then(|bytes| bytes.first_chunk()).map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Returns when the memory was made, as the kernel reports it since Linux 5.18. Before that, it is the file's last
/// change, which follows immediately.
fn made(fd: &OwnedFd) -> Option<SystemTime> {
    let wanted = StatxFlags::BTIME | StatxFlags::CTIME;
    let stat = rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, wanted).ok()?;
    let has_birth = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME);
    let at = if has_birth { stat.stx_btime } else { stat.stx_ctime };
    SystemTime::UNIX_EPOCH.checked_add(Duration::new(u64::try_from(at.tv_sec).ok()?, at.tv_nsec))
}

#[cfg(test)]
mod tests {
    use rustix::fs::FileType;

    use super::*;
    use tombolo_mem::{OwnWord, create_sealed};

    fn memory(features: Features) -> OwnedFd {
        let (segment, fd) = create_sealed("tombolo-test", 8192).unwrap();
        let (control, _data) = segment.split(4096);
        control.write_header(&SegmentHeader::new(4096, 0, 7, features, 5).encode());
        control.word(words::TAIL).store_relaxed(9);
        control.word(words::READER_COUNTERS + 56).store_relaxed(3);
        control.word(words::RING_GROWTH).store_relaxed(words::encode_growth(1 << 20, 3));
        fd
    }

    #[test]
    fn c12_segment_is_read_as_it_stands_there() {
        let seen = Segment::map(&memory(Features::STATISTICS)).unwrap();
        assert_eq!((seen.header.start, seen.header.epoch, seen.word(words::TAIL)), (7, 5, 9));
        assert_eq!((seen.stats().unwrap().reader[7], seen.growth()), (3, Some((1 << 20, "bulk"))));
        let age = seen.made.unwrap().elapsed().unwrap();
        assert!(age < Duration::from_secs(60), "{age:?}");
    }

    #[test]
    fn c12_stats_page_that_was_not_offered_is_not_shown() {
        let seen = Segment::map(&memory(Features::NONE)).unwrap();
        assert!(seen.stats().is_none() && seen.growth().is_none());
    }

    #[test]
    fn memory_that_can_shrink_or_is_no_segment_is_not_touched() {
        let unsealed = rustix::fs::memfd_create("tombolo", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&unsealed, 8192).unwrap();
        assert!(Segment::map(&unsealed).is_none());
        let (_segment, zeros) = create_sealed("tombolo", 8192).unwrap();
        assert!(Segment::map(&zeros).is_none());
        let (_segment, small) = create_sealed("tombolo", 4096).unwrap();
        assert!(Segment::map(&small).is_none());
    }

    #[test]
    fn canary_file_that_is_no_memfd_is_not_opened() {
        let opener = Opener::new().unwrap();
        let (_segment, memory) = create_sealed("tombolo", 8192).unwrap();
        assert!(opener.open(&format!("/proc/self/fd/{}", memory.as_raw_fd())).is_ok());
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("memfd:tombolo (deleted)");
        // A pipe without a writer: an open of it would wait for one.
        rustix::fs::mknodat(rustix::fs::CWD, &file, FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert!(opener.open(file.to_str().unwrap()).is_err());
        fs::remove_file(&file).unwrap();
        fs::write(&file, "x").unwrap();
        assert!(opener.open(file.to_str().unwrap()).is_err());
    }
}
