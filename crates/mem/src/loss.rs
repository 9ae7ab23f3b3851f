// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory that can be taken away: an access to it after a device was unplugged raises `SIGBUS`.
//!
//! Mappings of such memory stand in a table. The first of them installs a handler, which puts zeroed memory of this
//! process in the place of the whole mapping, notes that it is lost, and lets the access go on. Whoever uses the
//! mapping finds zeros, which are as good as anything else that a peer may write, and learns from `is_lost` why. A
//! signal about any other address goes to the handler that was there before.
//!
//! # Safety
//! The handler does nothing but load and store atomics, call `mmap` and keep `errno`: all of it is allowed in a signal
//! handler. A range is in the table only while it is mapped, so what is replaced is a mapping of this crate.
#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_void},
    io,
    mem::MaybeUninit,
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering, fence},
    },
};

/// Most mappings of such memory in one process.
const MAPPINGS_MAX: usize = 4096;

#[derive(Debug)]
struct Slot {
    taken: AtomicBool,
    /// 0: nothing is mapped. Stored last, and taken away first.
    base: AtomicUsize,
    len: AtomicUsize,
    writable: AtomicBool,
    lost: AtomicBool,
}

static TABLE: [Slot; MAPPINGS_MAX] = [const {
    Slot {
        taken: AtomicBool::new(false),
        base: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        writable: AtomicBool::new(false),
        lost: AtomicBool::new(false),
    }
}; MAPPINGS_MAX];

/// What was done about `SIGBUS` before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// A mapping's place in the table, until it is dropped.
#[derive(Debug)]
pub(crate) struct Watched(&'static Slot);

impl Watched {
    /// Enters `len` bytes at `base`.
    ///
    /// # Safety
    /// The range is a mapping of the caller's, and stays one until this is dropped.
    pub(crate) unsafe fn new(base: usize, len: usize, writable: bool) -> io::Result<Self> {
        install()?;
        let free =
            |slot: &&Slot| slot.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        let slot = TABLE.iter().find(free).ok_or_else(|| {
            io::Error::other(format!("{MAPPINGS_MAX} mappings of devices' memory, the most that a process may have"))
        })?;
        slot.len.store(len, Ordering::Relaxed);
        slot.writable.store(writable, Ordering::Relaxed);
        slot.lost.store(false, Ordering::Relaxed);
        // ORDER Release: with the handler's Acquire; who sees the base sees the rest.
        slot.base.store(base, Ordering::Release);
        Ok(Self(slot))
    }

    pub(crate) fn is_lost(&self) -> bool {
        // ORDER Acquire: a fence, so that what this thread read before is not read after; with the handler's Release.
        fence(Ordering::Acquire);
        self.0.lost.load(Ordering::Relaxed)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.base.store(0, Ordering::Relaxed);
        // ORDER Release: with the Acquire of the next one who takes it.
        self.0.taken.store(false, Ordering::Release);
    }
}

fn install() -> io::Result<()> {
    static DONE: OnceLock<Result<(), i32>> = OnceLock::new();
    DONE.get_or_init(|| {
        let mut before = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: (new action) null changes nothing; (old action) is room for one.
        let asked = unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), before.as_mut_ptr()) };
        if asked != 0 {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL));
        }
        // SAFETY: (initialised) all zeros are a valid action, and the call filled it.
        let before = unsafe { before.assume_init() };
        // Before the handler can run: it reads this.
        let mut ours = *BEFORE.get_or_init(|| before);
        ours.sa_sigaction = handle as *const () as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: (new action) a handler of the kind that SA_SIGINFO asks for, an empty mask of the old action's form.
        match unsafe { libc::sigaction(libc::SIGBUS, &ours, ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)),
        }
    })
    .map_err(io::Error::from_raw_os_error)
}

extern "C" fn handle(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: (valid) the kernel passes the signal's information.
    let info_ref = unsafe { &*info };
    // SAFETY: (kind) SIGBUS has an address.
    let at = unsafe { info_ref.si_addr() } as usize;
    for slot in &TABLE {
        let base = slot.base.load(Ordering::Acquire);
        let len = slot.len.load(Ordering::Acquire);
        // Both of one mapping: the slot may be given to another in between.
        let whole = slot.base.load(Ordering::Relaxed) == base;
        if base != 0 && whole && at.wrapping_sub(base) < len && replace(slot, base, len) {
            return;
        }
    }
    pass_on(signal, info, context);
}

fn replace(slot: &Slot, base: usize, len: usize) -> bool {
    let write = if slot.writable.load(Ordering::Relaxed) { libc::PROT_WRITE } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: (thread) errno is this thread's.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: (valid) as above.
    let kept = unsafe { *errno };
    // ORDER Release: before anybody finds zeros there. The call of the kernel that puts them there comes after it.
    slot.lost.store(true, Ordering::Release);
    // SAFETY: (range) it is in the table, so it is a mapping of this crate, which goes only after it left the table.
    let mapped = unsafe { libc::mmap(base as *mut c_void, len, libc::PROT_READ | write, flags, -1, 0) };
    // SAFETY: (valid) as above.
    unsafe { *errno = kept };
    mapped != libc::MAP_FAILED
}

/// Lets the handler of before have it; where there was none, the access is made again and has its usual end.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let Some(before) = BEFORE.get() else { return };
    let has_handler = before.sa_sigaction != libc::SIG_DFL && before.sa_sigaction != libc::SIG_IGN;
    if has_handler && before.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: (kind) SA_SIGINFO says that the address is that of such a function.
        let next: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
            unsafe { std::mem::transmute(before.sa_sigaction) };
        next(signal, info, context);
    } else if has_handler {
        // SAFETY: (kind) without SA_SIGINFO the address is that of such a function.
        let next: extern "C" fn(c_int) = unsafe { std::mem::transmute(before.sa_sigaction) };
        next(signal);
    } else {
        // SAFETY: (action) one that the kernel gave.
        let _ = unsafe { libc::sigaction(signal, before, ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::fs::MemfdFlags;

    use crate::{OwnData, OwnSegment, OwnWord, PeerData, PeerSegment, PeerWord};

    #[test]
    fn d3_memory_taken_away_reads_as_zeros_and_is_said_to_be_lost() {
        let memory = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 3 * 4096).unwrap();
        // SAFETY: (only) nobody else maps or writes this memory.
        let own = unsafe { OwnSegment::map_revocable(memory.as_fd(), 4096, 8192, ()) }.unwrap();
        let peer = PeerSegment::map_revocable(memory.as_fd(), 4096, 8192, ()).unwrap();
        let (control, mut data) = own.split(4096);
        control.word(8).store_release(7);
        data.copy_in(0, &[7; 16]);
        assert_eq!(peer.word(8).load_acquire().hint(), 7);
        assert!(!control.is_lost() && !peer.is_lost());

        rustix::fs::ftruncate(&memory, 0).unwrap();
        assert_eq!(peer.word(8).load_acquire().hint(), 0);
        let mut read = [1; 16];
        peer.data(4096).copy_out(0, &mut read);
        assert_eq!(read, [0; 16]);
        assert!(peer.is_lost() && !control.is_lost(), "each mapping is lost when it is found to be");
        data.copy_in(0, &[9; 16]);
        control.word(8).store_release(9);
        assert!(control.is_lost());
    }

    /// A bus error elsewhere is still one: the child that makes one dies of it.
    #[test]
    fn canary_bus_error_of_other_memory_still_kills() {
        const ROLE: &str = "TOMBOLO_TEST_BUS_ERROR";
        let memory = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 4096).unwrap();
        if std::env::var_os(ROLE).is_some() {
            let _watched = PeerSegment::map_revocable(memory.as_fd(), 0, 4096, ()).unwrap();
            let bare = PeerSegment::map(memory.as_fd(), 4096).unwrap();
            rustix::fs::ftruncate(&memory, 0).unwrap();
            bare.word(8).load_acquire().hint();
            return;
        }
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "loss::tests::canary_bus_error_of_other_memory_still_kills"])
            .env(ROLE, "1")
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .status()
            .unwrap();
        assert!(!status.success(), "it was survived");
    }
}
