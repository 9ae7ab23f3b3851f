// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Uses the kernel's drivers for grants and event channels through their ioctls.
//!
//! This needs `unsafe` because rustix cannot know what an ioctl does, nor that pages of gntalloc are mapped only once.
//!
//! Each allocation, mapping and port has an open file of its own: offsets then begin at 0, and closing the file undoes
//! everything.
#![allow(unsafe_code)]

use std::{
    ffi::c_void,
    fmt,
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use nix::fcntl::{FcntlArg, fcntl};
use rustix::{
    fs::{CWD, FileType, Mode, OFlags, Stat},
    io::Errno,
    ioctl::{Direction, Ioctl, IoctlOutput, Opcode, opcode},
};
use tombolo_domain::{Error, Result, aside::ReservedFd};
use tombolo_layout::xen::PAGE;
use tombolo_mem::{CommonSegment, OwnSegment, PeerSegment};

use crate::{
    hypervisor::{DomId, Grants, Guard, Hypervisor, Port},
    os::reserve,
    page::mark_of,
    reaper_client,
};

pub(crate) const GNTALLOC: &str = "/dev/xen/gntalloc";
const GNTDEV: &str = "/dev/xen/gntdev";
const EVTCHN: &str = "/dev/xen/evtchn";
const XENBUS: &str = "/dev/xen/xenbus";

/// `GNTALLOC_ALLOC_GREF`: flag that lets the peer write.
const WRITABLE: u32 = 1;

/// File with the number of pages that all programs of this domain together may grant, and the driver's default.
const LIMIT: (&str, usize) = ("/sys/module/xen_gntalloc/parameters/limit", 1024);
/// Number of pages that this process grants.
static GRANTED: AtomicUsize = AtomicUsize::new(0);

fn limit() -> usize {
    std::fs::read_to_string(LIMIT.0).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(LIMIT.1)
}

/// `GNTALLOC_SET_UNMAP_NOTIFY`.
const CLEAR_BYTE: u32 = 1;
const SEND_EVENT: u32 = 2;

/// An ioctl whose argument is a structure of words, and whose results are these words and a number. Only [`call`] makes
/// it.
struct Words<'a> {
    opcode: Opcode,
    words: &'a mut [u64],
}

// SAFETY: (opcode, as_ptr) the callers of `call` pair each number with an argument at least as long as the kernel
// reads and writes; (mutating) said so; (output) the call's return value, which is no pointer.
unsafe impl Ioctl for Words<'_> {
    type Output = u32;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.opcode
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.words.as_mut_ptr().cast()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<u32> {
        Ok(out.cast_unsigned())
    }
}

/// Makes the ioctl `number` of `group`, whose argument is `len` bytes long as the kernel counts them. Private to this
/// module, because `words` must be as long as what the ioctl reads and writes; for a list of grants that is more than
/// `len`.
fn call(fd: impl AsFd, group: u8, number: u8, len: usize, words: &mut [u64]) -> rustix::io::Result<u32> {
    assert!(len <= size_of_val(words), "an ioctl's argument is longer than what is given");
    let call = Words { opcode: opcode::from_components(Direction::None, group, number, len), words };
    // SAFETY: (kind of file) each caller gives a file of the device whose ioctl it names, see the public types;
    // (argument) at least `len` bytes, and longer where the kernel writes more, see there.
    unsafe { rustix::ioctl::ioctl(fd, call) }
}

/// Packs two 32-bit fields into the word that they share.
const fn pair(first: u32, second: u32) -> u64 {
    if cfg!(target_endian = "little") {
        first as u64 | (second as u64) << 32
    } else {
        second as u64 | (first as u64) << 32
    }
}

/// Returns the first and the second of two 32-bit fields that share a word.
const fn split(word: u64) -> [u32; 2] {
    let halves = [word as u32, (word >> 32) as u32];
    if cfg!(target_endian = "little") { halves } else { [halves[1], halves[0]] }
}

fn open(path: &'static str, flags: OFlags) -> Result<ReservedFd> {
    let opened = rustix::fs::openat(CWD, path, flags | OFlags::CLOEXEC, Mode::empty()).map_err(|error| match error {
        Errno::NOENT | Errno::NXIO | Errno::NODEV => Error::Os {
            call: "open (this is no Xen domain, or its kernel lacks a driver: see `modprobe -a xen-gntalloc xen-gntdev \
                   xen-evtchn`)",
            path: Some(path.into()),
            source: error.into(),
        },
        Errno::ACCESS | Errno::PERM => Error::Denied(format!("{path}: check its owner and permissions")),
        error => Error::os("open", error),
    })?;
    reserve(opened)
}

/// Checks that pages can be granted and mapped here.
pub(crate) fn drivers_are_there() -> Result<()> {
    [GNTALLOC, GNTDEV, XENBUS].into_iter().try_for_each(|path| open(path, OFlags::RDWR).map(drop))
}

/// Xen, through the kernel's drivers.
#[derive(Debug)]
pub(crate) struct Xen;

impl Hypervisor for Xen {
    fn store(&self) -> Result<ReservedFd> {
        open(XENBUS, OFlags::RDWR | OFlags::NONBLOCK)
    }

    fn grant(&self, peer: DomId, pages: usize) -> Result<Arc<dyn Grants>> {
        Ok(Arc::new(Allocation::new(peer, pages, 0)?))
    }

    fn map(&self, peer: DomId, references: &[u32], port: Option<u32>, guard: Guard) -> Result<PeerSegment> {
        // The file is opened for reading, so that no later call makes the mapping writable.
        let file = Arc::new(mappable(peer, references, OFlags::RDONLY)?);
        if port.is_some() {
            // The notification is an event and no byte. Asked to clear a byte of memory mapped read-only, the kernel
            // refuses; asked before the mapping, it crashes when the memory is unmapped.
            notify_when_gone(&file, None, port)?;
        }
        // The order matters: closing the file unmaps the grants, and only then is the waiting code told.
        let guard = (Arc::clone(&file), guard);
        let segment = PeerSegment::map_guarded(file.as_fd(), references.len() * PAGE, guard);
        drop(file);
        let segment = segment.map_err(refused)?;
        segment.forget_in_children().map_err(|error| Error::os("madvise", error))?;
        Ok(segment)
    }

    fn share(&self, peer: DomId, pages: usize, when_gone: Option<(usize, u32)>) -> Result<(Vec<u32>, CommonSegment)> {
        let allocation = Arc::new(Allocation::new(peer, pages, WRITABLE)?);
        let segment = CommonSegment::map(allocation.file.as_fd(), pages * PAGE, true, Arc::clone(&allocation));
        let segment = segment.map_err(|error| Error::os("mmap of gntalloc", error))?;
        segment.forget_in_children().map_err(|error| Error::os("madvise", error))?;
        if let Some((offset, port)) = when_gone {
            notify_when_gone(&allocation.file, Some(offset), Some(port))?;
        }
        Ok((allocation.references.clone(), segment))
    }

    fn join(
        &self,
        peer: DomId,
        references: &[u32],
        writable: bool,
        when_gone: Option<(usize, u32)>,
    ) -> Result<CommonSegment> {
        let flags = if writable { OFlags::RDWR } else { OFlags::RDONLY };
        let file = Arc::new(mappable(peer, references, flags)?);
        if let Some((offset, port)) = when_gone {
            // The structure and the number are the same as gntalloc's.
            notify_when_gone(&file, Some(offset), Some(port))?;
        }
        let segment = CommonSegment::map(file.as_fd(), references.len() * PAGE, writable, Arc::clone(&file));
        let segment = segment.map_err(refused)?;
        segment.forget_in_children().map_err(|error| Error::os("madvise", error))?;
        Ok(segment)
    }

    fn room(&self) -> usize {
        limit().saturating_sub(GRANTED.load(Ordering::Relaxed))
    }

    fn offer_port(&self, peer: DomId) -> Result<Arc<dyn Port>> {
        Channel::bind(2, &mut [pair(peer.into(), 0)], 4)
    }

    fn bind_port(&self, peer: DomId, port: u32) -> Result<Arc<dyn Port>> {
        Channel::bind(1, &mut [pair(peer.into(), port)], 8)
    }

    /// Xen's error distinguishes a domain whose port 0, which is unused, cannot be bound from a domain that does not
    /// exist. XenStore reports neither to a domain without privileges.
    fn is_there(&self, peer: DomId) -> Result<bool> {
        let file = open(EVTCHN, OFlags::RDWR | OFlags::NONBLOCK)?;
        match call(&file, b'E', 1, 8, &mut [pair(peer.into(), 0)]) {
            Err(Errno::SRCH) => Ok(false),
            Ok(_) | Err(Errno::INVAL) => Ok(true),
            Err(error) => Err(Error::os("ioctl EVTCHN_BIND_INTERDOMAIN", error)),
        }
    }

    fn grant_reaper(&self) -> Option<PathBuf> {
        Some(reaper_client::socket())
    }

    fn is_grant(&self, file: BorrowedFd<'_>) -> bool {
        let device = |stat: rustix::io::Result<Stat>| {
            let stat = stat.ok().filter(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice);
            stat.map(|stat| stat.st_rdev)
        };
        let wanted = device(rustix::fs::stat(GNTALLOC));
        wanted.is_some() && device(rustix::fs::fstat(file)) == wanted
    }

    /// Locks one byte of the device's file. The lock leaves nothing behind, and ends with its holder.
    fn claim(&self, name: &str) -> Result<Option<ReservedFd>> {
        let file = open(GNTALLOC, OFlags::RDWR)?;
        lock_byte(file, name)
    }
}

/// Opens gntdev so that `references` can be mapped at offset 0.
fn mappable(peer: DomId, references: &[u32], flags: OFlags) -> Result<ReservedFd> {
    let file = open(GNTDEV, flags)?;
    let count = u32::try_from(references.len()).map_err(|_| Error::os("gntdev", Errno::INVAL))?;
    let mut words = vec![pair(count, 0), 0];
    words.extend(references.iter().map(|reference| pair(peer.into(), *reference)));
    // struct ioctl_gntdev_map_grant_ref, with one reference counted in its length.
    call(&file, b'G', 0, 24, &mut words).map_err(|error| match error {
        Errno::INVAL | Errno::NOMEM => Error::Limit {
            what: "the pages that one mapping may have (`limit` of the module xen_gntdev)",
            remedy: "use smaller rings, or raise /sys/module/xen_gntdev/parameters/limit",
        },
        error => Error::os("ioctl GNTDEV_MAP_GRANT_REF", error),
    })?;
    debug_assert_eq!(words[1], 0, "the first mapping of a file begins at 0");
    Ok(file)
}

/// Returns the error for a mapping that gntdev refused.
fn refused(error: std::io::Error) -> Error {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        // Xen refused a reference; the kernel does not report Xen's reason.
        Some(Errno::INVAL | Errno::FAULT | Errno::AGAIN) => Error::Revoked,
        _ => Error::os("mmap of gntdev", error),
    }
}

/// Makes the kernel clear a byte and notify a port, or one of these, when the file's mapping is gone.
fn notify_when_gone(file: &ReservedFd, byte: Option<usize>, port: Option<u32>) -> Result<()> {
    let action = if byte.is_some() { CLEAR_BYTE } else { 0 } | if port.is_some() { SEND_EVENT } else { 0 };
    // struct ioctl_gntalloc_unmap_notify, and ioctl_gntdev_unmap_notify.
    let mut words = [byte.unwrap_or(0) as u64, pair(action, port.unwrap_or(0))];
    let done = call(file, b'G', 7, 16, &mut words);
    done.map(drop).map_err(|error| Error::os("ioctl SET_UNMAP_NOTIFY", error))
}

/// Locks the byte of `file` that stands for `name`, until the file is closed.
pub(crate) fn lock_byte(file: ReservedFd, name: &str) -> Result<Option<ReservedFd>> {
    let lock = nix::libc::flock {
        l_type: nix::libc::F_WRLCK as _,
        l_whence: nix::libc::SEEK_SET as _,
        l_start: (mark_of(name) >> 2).cast_signed(),
        l_len: 1,
        l_pid: 0,
    };
    match fcntl(&file, FcntlArg::F_OFD_SETLK(&lock)) {
        Ok(_) => Ok(Some(file)),
        Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EACCES) => Ok(None),
        Err(error) => Err(Error::os("fcntl F_OFD_SETLK", std::io::Error::from(error))),
    }
}

/// An open file of gntalloc with one allocation, at offset 0.
struct Allocation {
    file: ReservedFd,
    references: Vec<u32>,
    /// Whether each page was mapped.
    mapped: Mutex<Vec<bool>>,
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Allocation of {} pages", self.references.len())
    }
}

impl Allocation {
    fn new(peer: DomId, pages: usize, flags: u32) -> Result<Self> {
        // The kernel counts in 16 bits.
        let count = u16::try_from(pages).map_err(|_| Error::Limit {
            what: "the pages that one segment may have (65535)",
            remedy: "use smaller rings",
        })?;
        let file = open(GNTALLOC, OFlags::RDWR)?;
        // struct ioctl_gntalloc_alloc_gref: domid and flags (0: the peer may only read), count, index, references.
        let mut words = vec![0; 2 + pages.div_ceil(2).max(1)];
        words[0] = pair(u32::from(peer) | flags << 16, count.into());
        call(&file, b'G', 5, 24, &mut words).map_err(|error| match error {
            Errno::NOSPC if GRANTED.load(Ordering::Relaxed) + pages > limit() => Error::Limit {
                what: "`limit` of the module xen_gntalloc",
                remedy: "use smaller rings or close channels, or raise /sys/module/xen_gntalloc/parameters/limit",
            },
            Errno::NOSPC => Error::Limit {
                what: "grants (`limit` of the module xen_gntalloc, which other programs share, or max_grant_frames of this \
                       domain)",
                remedy: "use smaller rings or close channels; raise /sys/module/xen_gntalloc/parameters/limit, then \
                         max_grant_frames= in the domain's xl.cfg",
            },
            error => Error::os("ioctl GNTALLOC_ALLOC_GREF", error),
        })?;
        GRANTED.fetch_add(pages, Ordering::Relaxed);
        let references = words[2..].iter().flat_map(|word| split(*word)).take(pages).collect();
        Ok(Self { file, references, mapped: Mutex::new(vec![false; pages]) })
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        GRANTED.fetch_sub(self.references.len(), Ordering::Relaxed);
    }
}

impl Grants for Allocation {
    fn references(&self) -> &[u32] {
        &self.references
    }

    fn map(self: Arc<Self>, first: usize, count: usize) -> Result<OwnSegment> {
        let mut mapped = self.mapped.lock().expect("nobody panics while they hold this");
        let free = mapped.get(first..first + count).is_some_and(|pages| pages.iter().all(|page| !page));
        assert!(free, "pages of an allocation are mapped twice or do not exist");
        // SAFETY: (only writer) granted for reading only; the file is private to this type, which maps no page twice,
        // as just checked; (stays) the guard holds the file, and its pages last as long as the file.
        let segment = unsafe { OwnSegment::map_only(self.file.as_fd(), (first * PAGE) as u64, count * PAGE) };
        let segment = segment.map_err(|error| Error::os("mmap of gntalloc", error))?;
        segment.forget_in_children().map_err(|error| Error::os("madvise", error))?;
        mapped[first..first + count].fill(true);
        drop(mapped);
        Ok(segment.guarded(self))
    }

    fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn when_gone(&self, offset: usize, port: Option<u32>) -> Result<()> {
        notify_when_gone(&self.file, Some(offset), port)
    }
}

/// An open file of evtchn with one port.
#[derive(Debug)]
struct Channel {
    file: ReservedFd,
    port: u32,
}

impl Channel {
    fn bind(number: u8, words: &mut [u64], len: usize) -> Result<Arc<dyn Port>> {
        let file = open(EVTCHN, OFlags::RDWR | OFlags::NONBLOCK)?;
        let port = call(&file, b'E', number, len, words).map_err(|error| match error {
            Errno::NOSPC => Error::Limit {
                what: "event channels of this domain",
                remedy: "close channels, or raise event_channels= in the domain's xl.cfg",
            },
            Errno::INVAL => Error::PeerGone,
            error => Error::os("ioctl EVTCHN_BIND", error),
        })?;
        Ok(Arc::new(Self { file, port }))
    }
}

impl Port for Channel {
    fn number(&self) -> u32 {
        self.port
    }

    fn notify(&self) {
        // An error means that the peer is gone.
        let _ = call(&self.file, b'E', 4, 4, &mut [pair(self.port, 0)]);
    }

    fn clear(&self) {
        let mut port = [0; 4];
        // If there is nothing to read, another thread clears the event.
        if rustix::io::read(&self.file, &mut port) == Ok(4) {
            let _ = rustix::io::write(&self.file, &port);
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
