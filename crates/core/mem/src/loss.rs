// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Handles memory that can be taken away: an access to it after a device was unplugged raises `SIGBUS`.
//!
//! A table holds the mappings of such memory. The first of them installs a signal handler. On an access that fails the
//! handler replaces the whole mapping by zeroed memory of this process, notes that the mapping is lost, and lets the
//! access go on. The user of the mapping reads zeros, which are as good as anything else that a peer may write, and
//! learns from `is_lost` why. A signal about any other address, or one that a process sent, goes to the previous
//! handler.
//!
//! Code that installs a handler later (a JVM, Go, a sanitizer) replaces this one. Each new mapping, and every
//! `SELDOM`th call of `is_lost`, checks for that and puts this handler first again, with the later one behind it. If
//! the later one passes a signal on to this handler, the signal goes to the handlers that were there before both.
//!
//! # Safety
//! The handler only loads and stores atomics, calls `mmap`, `gettid`, `sigaction`, `pthread_sigmask` and `raise`, and
//! preserves `errno`: all of this is allowed in a signal handler. A range is in the table only while it is mapped, so
//! only mappings of this crate are replaced. The code that contains the handler is never unloaded.
#![allow(unsafe_code)]

use std::{
    cell::Cell,
    ffi::{c_int, c_void},
    io,
    mem::MaybeUninit,
    ptr,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize, Ordering, fence},
    },
};

/// Largest number of mappings of such memory in one process.
const MAPPINGS_MAX: usize = 8192;

#[derive(Debug)]
struct Slot {
    taken: AtomicBool,
    /// Address of the mapping, or 0 if there is none. Stored last, and cleared first.
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

/// Largest number of other handlers that are known at a time.
const OTHERS_MAX: usize = 8;
/// Earlier actions for `SIGBUS`, the oldest first. These are never freed.
static OTHERS: [AtomicPtr<libc::sigaction>; OTHERS_MAX] = [const { AtomicPtr::new(ptr::null_mut()) }; OTHERS_MAX];
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Lock of the thread that changes these.
static INSTALLING: Mutex<()> = Mutex::new(());

/// Number of calls of `is_lost` between two checks that the handler is still installed.
const SELDOM: u32 = 256;

/// Place of a mapping in the table until this is dropped.
#[derive(Debug)]
pub(crate) struct Watched(&'static Slot);

impl Watched {
    /// Enters `len` bytes at `base`.
    ///
    /// # Safety
    /// The range is a mapping of the caller, and stays one until this is dropped.
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
        // ORDER Release: pairs with the handler's Acquire; a handler that sees the base sees the rest.
        slot.base.store(base, Ordering::Release);
        Ok(Self(slot))
    }

    pub(crate) fn is_lost(&self) -> bool {
        thread_local! {
            static ASKED: Cell<u32> = const { Cell::new(0) };
        }
        let asked = ASKED.get();
        ASKED.set(asked.wrapping_add(1));
        if asked % SELDOM == 0 {
            let _ = install();
        }
        // ORDER Acquire: a fence, so that earlier reads of this thread are not done later; pairs with the handler's
        // Release.
        fence(Ordering::Acquire);
        self.0.lost.load(Ordering::Relaxed)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.base.store(0, Ordering::Relaxed);
        // ORDER Release: pairs with the Acquire of the next mapping that takes the slot.
        self.0.taken.store(false, Ordering::Release);
    }
}

/// Returns whether `action` is this module's handler.
fn is_ours(action: &libc::sigaction) -> bool {
    action.sa_sigaction == handle as *const () as usize
}

/// Sets the action for `SIGBUS` if `new` is given. Returns the previous action.
fn exchange(new: Option<&libc::sigaction>) -> io::Result<libc::sigaction> {
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    let new = new.map_or(ptr::null(), ptr::from_ref);
    // SAFETY: (new action) null changes nothing, or one that the caller made whole; (old action) is room for one.
    if unsafe { libc::sigaction(libc::SIGBUS, new, before.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: (initialised) all zeros are a valid action, and the call filled it.
    Ok(unsafe { before.assume_init() })
}

/// Puts this module's handler first, if it is not.
fn install() -> io::Result<()> {
    if is_ours(&exchange(None)?) {
        return Ok(());
    }
    let _installing = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    let before = exchange(None)?;
    if is_ours(&before) {
        return Ok(());
    }
    stay_loaded();
    // Done before the handler can run, because the handler reads this.
    remember(&before);
    let mut ours = before;
    ours.sa_sigaction = handle as *const () as usize;
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    let replaced = exchange(Some(&ours))?;
    if !is_ours(&replaced) && replaced.sa_sigaction != before.sa_sigaction {
        remember(&replaced); // Another thread installed a handler at the same time.
    }
    Ok(())
}

/// Stores the action that applies to signals that are none of this module's.
fn remember(action: &libc::sigaction) {
    let count = COUNT.load(Ordering::Relaxed);
    // SAFETY: (valid) the pointers here come from a box and are never freed.
    let last = count.checked_sub(1).and_then(|last| unsafe { OTHERS[last].load(Ordering::Relaxed).as_ref() });
    if last.is_some_and(|last| last.sa_sigaction == action.sa_sigaction) {
        return;
    }
    let at = count.min(OTHERS_MAX - 1);
    OTHERS[at].store(Box::into_raw(Box::new(*action)), Ordering::Release);
    // ORDER Release: pairs with the handler's Acquire; a handler that sees the count sees the actions.
    COUNT.store(at + 1, Ordering::Release);
}

/// Keeps the object that contains this code loaded: unloading a library (`dlclose`) would remove the handler with it.
fn stay_loaded() {
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: (valid) an address of this object, and room for the result.
    if unsafe { libc::dladdr(handle as *const c_void, found.as_mut_ptr()) } == 0 {
        return;
    }
    // SAFETY: (initialised) all zeros are valid, and the call filled it.
    let found = unsafe { found.assume_init() };
    if !found.dli_fname.is_null() {
        let flags = libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
        // SAFETY: (string) the loader's name of a loaded object; nothing is loaded anew.
        let _ = unsafe { libc::dlopen(found.dli_fname, flags) };
    }
}

extern "C" fn handle(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: (valid) the kernel passes the signal's information.
    let info_ref = unsafe { &*info };
    // SAFETY: (kind) a SIGBUS that the kernel sends has an address.
    let at = unsafe { info_ref.si_addr() } as usize;
    // A signal that a process sent carries whatever address that process chose.
    let table = if is_fault(info_ref) { &TABLE[..] } else { &[] };
    for slot in table {
        let base = slot.base.load(Ordering::Acquire);
        let len = slot.len.load(Ordering::Acquire);
        // Checks that both belong to one mapping: the slot may have been given to another in between.
        let whole = slot.base.load(Ordering::Relaxed) == base;
        if base != 0 && whole && at.wrapping_sub(base) < len && replace(slot, base, len) {
            return;
        }
    }
    pass_on(signal, info, context);
}

/// Returns whether the signal is about an access, and was not sent by a process.
fn is_fault(info: &libc::siginfo_t) -> bool {
    info.si_code > 0
}

fn replace(slot: &Slot, base: usize, len: usize) -> bool {
    let write = if slot.writable.load(Ordering::Relaxed) { libc::PROT_WRITE } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: (thread) errno is this thread's.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: (valid) as above.
    let kept = unsafe { *errno };
    // ORDER Release: before any thread finds zeros there. The system call that puts them there comes after it.
    slot.lost.store(true, Ordering::Release);
    // SAFETY: (range) it is in the table, so it is a mapping of this crate, which is unmapped only after it left the
    // table.
    let mapped = unsafe { libc::mmap(base as *mut c_void, len, libc::PROT_READ | write, flags, -1, 0) };
    // SAFETY: (valid) as above.
    unsafe { *errno = kept };
    mapped != libc::MAP_FAILED
}

/// Threads that are passing a signal on: the thread, the signal, the depth in its stack, and the number of handlers
/// passed.
#[derive(Debug)]
struct Passing {
    thread: AtomicI32,
    info: AtomicUsize,
    frame: AtomicUsize,
    level: AtomicUsize,
}

static PASSING: [Passing; 32] = [const {
    Passing {
        thread: AtomicI32::new(0),
        info: AtomicUsize::new(0),
        frame: AtomicUsize::new(0),
        level: AtomicUsize::new(0),
    }
}; 32];

/// Passes the signal to the latest of the other handlers. If that passes it on to this module, the one before it gets
/// the signal, and so on.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: (contract) the call has none.
    let thread = unsafe { libc::gettid() };
    let frame = &raw const thread as usize;
    let own = PASSING.iter().find(|slot| slot.thread.load(Ordering::Relaxed) == thread).or_else(|| {
        let free =
            |slot: &&Passing| slot.thread.compare_exchange(0, thread, Ordering::Acquire, Ordering::Relaxed).is_ok();
        PASSING.iter().find(free)
    });
    let mut level = 0;
    let mut before = (0, 0, 0);
    if let Some(own) = own {
        before =
            (own.info.load(Ordering::Relaxed), own.frame.load(Ordering::Relaxed), own.level.load(Ordering::Relaxed));
        // The same signal, deeper in the stack. A handler that never returned left an entry that is as deep as this
        // one.
        if before.0 == info as usize && frame < before.1 {
            level = before.2 + 1;
        } else {
            before = (0, 0, 0);
        }
        own.info.store(info as usize, Ordering::Relaxed);
        own.frame.store(frame, Ordering::Relaxed);
        own.level.store(level, Ordering::Relaxed);
    }
    let next = COUNT.load(Ordering::Acquire).checked_sub(level + 1).map(|at| OTHERS[at].load(Ordering::Acquire));
    // SAFETY: (valid) the pointers there come from a box and are never freed.
    match next.and_then(|next| unsafe { next.as_ref() }) {
        Some(next) => run(next, signal, info, context),
        None => end(signal),
    }
    if let Some(own) = own {
        own.info.store(before.0, Ordering::Relaxed);
        own.frame.store(before.1, Ordering::Relaxed);
        own.level.store(before.2, Ordering::Relaxed);
        if level == 0 {
            own.thread.store(0, Ordering::Release);
        }
    }
}

/// Carries out another action.
fn run(action: &libc::sigaction, signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: (valid) the kernel passes the signal's information.
    let is_fault = is_fault(unsafe { &*info });
    match action.sa_sigaction {
        libc::SIG_IGN if !is_fault => return,
        // A fault cannot be ignored.
        libc::SIG_DFL | libc::SIG_IGN => return end(signal),
        _ => {}
    }
    // SAFETY: (valid) the action's own mask, which the kernel would have blocked as well; it is restored with the
    // context.
    let _ = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const action.sa_mask, ptr::null_mut()) };
    if action.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: (kind) SA_SIGINFO says that the address is that of such a function.
        let next: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
            unsafe { std::mem::transmute(action.sa_sigaction) };
        next(signal, info, context);
    } else {
        // SAFETY: (kind) without SA_SIGINFO the address is that of such a function.
        let next: extern "C" fn(c_int) = unsafe { std::mem::transmute(action.sa_sigaction) };
        next(signal);
    }
    // Rust's own handler restores the default action and expects the access to be repeated. After a signal that a
    // process sent nothing is repeated. This module installs its handler again; the next such signal ends the program
    // as usual.
    if !is_fault
        && let Ok(now) = exchange(None)
        && matches!(now.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN)
    {
        static DEFAULT: libc::sigaction =
            // SAFETY: (initialised) all zeros is the default action.
            unsafe { std::mem::zeroed() };
        let mut ours = now;
        ours.sa_sigaction = handle as *const () as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        let at = COUNT.load(Ordering::Relaxed).min(OTHERS_MAX - 1);
        OTHERS[at].store((&raw const DEFAULT).cast_mut(), Ordering::Release);
        COUNT.store(at + 1, Ordering::Release);
        let _ = exchange(Some(&ours));
    }
}

/// Ends the program as a signal does that has no handler.
fn end(signal: c_int) {
    // SAFETY: (initialised) all zeros is the default action.
    let default: libc::sigaction = unsafe { std::mem::zeroed() };
    let _ = exchange(Some(&default));
    // SAFETY: (contract) the call needs only a signal number. The signal arrives when the handler returns.
    let _ = unsafe { libc::raise(signal) };
}

#[cfg(test)]
mod tests {
    use std::{
        os::fd::AsFd,
        sync::atomic::{AtomicUsize, Ordering},
    };

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

    /// Runs a test of this file again in a process of its own, as `role`.
    fn again(test: &str, role: &str) -> std::process::ExitStatus {
        std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("loss::tests::{test}")])
            .env(ROLE, role)
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .status()
            .unwrap()
    }

    const ROLE: &str = "TOMBOLO_TEST_BUS_ERROR";

    /// Returns the memory of a device, its mapping, and other memory that is already gone.
    fn device() -> (std::os::fd::OwnedFd, PeerSegment, PeerSegment) {
        let make = || {
            let memory = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&memory, 4096).unwrap();
            memory
        };
        let (memory, other) = (make(), make());
        let watched = PeerSegment::map_revocable(memory.as_fd(), 0, 4096, ()).unwrap();
        let bare = PeerSegment::map(other.as_fd(), 4096).unwrap();
        rustix::fs::ftruncate(&other, 0).unwrap();
        (memory, watched, bare)
    }

    fn unplug(memory: &std::os::fd::OwnedFd, watched: &PeerSegment) {
        rustix::fs::ftruncate(memory, 0).unwrap();
        assert_eq!(watched.word(8).load_acquire().hint(), 0);
        assert!(watched.is_lost());
    }

    fn raise() {
        // SAFETY: (contract) a number of a signal is all that it asks for.
        assert_eq!(unsafe { libc::raise(libc::SIGBUS) }, 0);
    }

    /// Sends a `SIGBUS` that claims to concern this address, as a process may to itself and to others of its user.
    fn queue_about(address: usize) {
        // SAFETY: (initialised) all zeros are a valid one.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        (info.si_signo, info.si_code) = (libc::SIGBUS, libc::SI_QUEUE);
        // The address in a signal's information follows its number, error and code, at a multiple of 8.
        let about = (&raw mut info).cast::<usize>().wrapping_add(2);
        // SAFETY: (range) it is within `info`, which is larger.
        unsafe { about.write(address) };
        let own = rustix::process::getpid().as_raw_pid();
        // SAFETY: (valid) it is read during the call.
        let sent = unsafe { libc::syscall(libc::SYS_rt_sigqueueinfo, own, libc::SIGBUS, &raw const info) };
        assert_eq!(sent, 0);
    }

    #[test]
    fn d3_signal_that_somebody_sent_does_not_disarm() {
        let test = "d3_signal_that_somebody_sent_does_not_disarm";
        match std::env::var(ROLE).as_deref() {
            Ok("once") => {
                let (memory, watched, _) = device();
                raise(); // Rust's handler lets the first signal pass.
                return unplug(&memory, &watched);
            }
            Ok("twice") => {
                let _device = device();
                raise();
                return raise();
            }
            Ok("forged") => {
                let (memory, watched, _) = device();
                queue_about(watched.address().0.addr());
                assert!(!watched.is_lost(), "nobody's access failed");
                return unplug(&memory, &watched);
            }
            _ => {}
        }
        assert!(again(test, "once").success());
        assert!(again(test, "forged").success());
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(again(test, "twice").signal(), Some(libc::SIGBUS), "the usual end");
    }

    /// The handler that a later handler found in its place.
    static FOUND: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn later(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        match FOUND.load(Ordering::Relaxed) {
            // SAFETY: (contract) ends the process at once.
            0 => unsafe { libc::_exit(33) },
            found => {
                // SAFETY: (kind) what was found is ours, which is such a function.
                let found: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                    unsafe { std::mem::transmute(found) };
                found(signal, info, context);
            }
        }
    }

    /// Installs `later` as a program would; it passes the signal on, or ends the process.
    fn install_later(passes_on: bool) {
        // SAFETY: (initialised) all zeros is an action.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = later as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        let found = super::exchange(Some(&action)).unwrap();
        FOUND.store(if passes_on { found.sa_sigaction } else { 0 }, Ordering::Relaxed);
    }

    #[test]
    fn d3_handler_that_was_installed_later_is_found_and_gets_what_is_its_own() {
        let test = "d3_handler_that_was_installed_later_is_found_and_gets_what_is_its_own";
        if let Ok(role) = std::env::var(ROLE) {
            let (memory, watched, bare) = device();
            install_later(role.contains("passes"));
            if role.contains("mapping") {
                drop(device());
            } else {
                (0..super::SELDOM).for_each(|_| assert!(!watched.is_lost()));
            }
            unplug(&memory, &watched);
            if role.contains("other") {
                bare.word(8).load_acquire().hint();
            }
            return;
        }
        assert!(again(test, "asked").success());
        assert!(again(test, "mapping").success());
        assert_eq!(again(test, "mapping other").code(), Some(33), "the later one has it");
        use std::os::unix::process::ExitStatusExt;
        let status = again(test, "mapping other passes");
        assert_eq!(status.signal(), Some(libc::SIGBUS), "the usual end, without a circle: {status}");
    }

    /// A bus error elsewhere is still one: a child that causes one dies of it.
    #[test]
    fn canary_bus_error_of_other_memory_still_kills() {
        let memory = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 4096).unwrap();
        if std::env::var_os(ROLE).is_some() {
            let _watched = PeerSegment::map_revocable(memory.as_fd(), 0, 4096, ()).unwrap();
            let bare = PeerSegment::map(memory.as_fd(), 4096).unwrap();
            rustix::fs::ftruncate(&memory, 0).unwrap();
            bare.word(8).load_acquire().hint();
            return;
        }
        let status = again("canary_bus_error_of_other_memory_still_kills", "canary");
        assert!(!status.success(), "it was survived");
    }
}
