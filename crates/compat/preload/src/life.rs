// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exported calls around `fork`, `exec` and the end of the process.
//!
//! `unsafe` is needed because these are libc's functions, with a program's pointers.
#![allow(unsafe_code)]

use std::{
    ffi::{c_char, c_int, c_void},
    os::fd::RawFd,
    ptr,
    sync::{
        Arc, PoisonError,
        atomic::{AtomicI32, Ordering},
    },
};

use libc::pid_t;
use tombolo_sockets::{
    Instances, Reason, aside,
    connection::{Connection, Stage},
};

use crate::{epoll, errno, handback, inside, kernel, real, state};

// ---- fork

/// Calls `fork`, which returns in two processes, or in the child alone (`daemon`).
fn forking(fork: impl FnOnce() -> pid_t) -> pid_t {
    if inside::has_interrupted() {
        // Locks that are held stay locked in the child. There everything goes to the kernel, because nobody marks the
        // child.
        return fork();
    }
    let _inside = inside::enter();
    let process = match state::made() {
        Ok(process) => process,
        Err(_held) => {
            if state::is_owner() {
                state::share_unconnected();
            }
            let answer = fork();
            if answer == 0 {
                state::inherit();
            }
            return answer;
        }
    };
    let before = errno::get();
    handback::leave_before_fork(process);
    // The locks are taken in the order in which calls take them: a thread that holds a set's lock moves bytes, but one
    // that moves bytes waits for no set.
    let left = state::GIVEN_UP.lock().unwrap_or_else(PoisonError::into_inner);
    let table = state::hold_for_fork();
    let (all, sets) = (table.all(), table.sets());
    let set_locks = epoll::hold(&sets);
    let instances = Instances::list();
    let Ok(held) = process.before_fork(&all, &instances) else {
        errno::set(libc::ENOMEM);
        return -1;
    };
    let parent = std::process::id();
    errno::set(before);
    let answer = fork();
    if answer > 0 {
        // Sockets that are not connected yet, or appeared meanwhile, are left to the child. The parent forgets them
        // before another thread takes them for its own.
        state::forget_fresh();
    }
    drop((left, table, set_locks));
    errno::kept(|| {
        if std::process::id() == parent {
            held.parent(u32::try_from(answer).ok());
        } else {
            state::inherit();
            held.child();
            epoll::inherit(&sets);
        }
    });
    answer
}

/// # Safety
/// As `fork(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fork() -> pid_t {
    // SAFETY: (contract) the caller's promise.
    forking(|| unsafe { real::fork() })
}

/// # Safety
/// As `daemon(3)`, whose parent ends within it.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn daemon(stay: c_int, keep: c_int) -> c_int {
    // SAFETY: (contract) the caller's promise.
    forking(|| unsafe { real::daemon(stay, keep) })
}

/// # Safety
/// As `forkpty(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn forkpty(
    terminal: *mut c_int,
    name: *mut c_char,
    mode: *const libc::termios,
    size: *const libc::winsize,
) -> pid_t {
    // SAFETY: (contract) the caller's promise.
    forking(|| unsafe { real::forkpty(terminal, name, mode, size) })
}

// ---- exec

/// Prepares for this program's image to be replaced. Connections that the next program inherits must be on TCP, and the
/// others are given up.
pub(crate) fn leaving() {
    if inside::has_interrupted() {
        return;
    }
    let Some(process) = state::busy() else { return };
    if !state::is_owner() {
        errno::kept(handing_on);
        return;
    }
    errno::kept(|| {
        handback::hand_on_all(process, &passed_on(), |connection| !connection.members.is_alone());
        let all = state::connections().into_iter().map(|(_, connection)| connection);
        let left: Vec<_> = all.filter(|connection| !connection.depart()).collect();
        state::GIVEN_UP.lock().unwrap_or_else(PoisonError::into_inner).extend(left);
        process.end();
        state::left();
    });
}

/// Returns the connections that another program gets with their descriptors.
fn passed_on() -> Vec<(RawFd, Arc<Connection>)> {
    let all = state::connections().into_iter();
    all.filter(|(fd, connection)| connection.stage() != Stage::Plain && is_passed_on(*fd)).collect()
}

fn is_passed_on(fd: RawFd) -> bool {
    rustix::io::fcntl_getfd(kernel::borrow(fd)).is_ok_and(|flags| !flags.contains(rustix::io::FdFlags::CLOEXEC))
}

/// Handles a child of `vfork` that becomes another program. The child's descriptors are its own by now. They may be
/// connections of this process by the numbers they have here, or as standard streams.
fn handing_on() {
    let Some(process) = state::busy() else { return };
    let all = state::connections();
    let numbers = (0..=2).chain(all.iter().map(|(fd, _)| *fd));
    let mut passed_on: Vec<(RawFd, Arc<Connection>)> = Vec::new();
    for fd in numbers.filter(|fd| is_passed_on(*fd)) {
        let Some((own, peer)) = kernel::addresses(fd) else { continue };
        let tuple = tombolo_sockets::tuple::Tuple::new(own, peer);
        let same = |(known, one): &&(RawFd, Arc<Connection>)| match one.identity.addresses() {
            Some(one) => one == tuple,
            None => *known == fd,
        };
        let found = all.iter().find(same).filter(|(_, one)| one.stage() != Stage::Plain);
        if let Some((_, connection)) =
            found.filter(|(_, one)| passed_on.iter().all(|(_, other)| !Arc::ptr_eq(one, other)))
        {
            passed_on.push((fd, Arc::clone(connection)));
        }
    }
    handback::hand_on_all(process, &passed_on, |_| true);
}

/// Handles a child of `vfork` that closes `fd`. This may be the peer of a connection that the child keeps for another
/// program. That connection goes back to TCP while the child still has both.
pub(crate) fn closing_in_child(fd: RawFd) {
    if state::connections().iter().any(|(known, one)| *known == fd && one.stage() == Stage::Joined) {
        handing_on();
    }
}

/// Does the same where such a child closes this library's descriptors from `first` to `last`, as programs do that close
/// all descriptors they do not know. Without these descriptors no peer can be woken.
pub(crate) fn closing_ours_in_child(first: u32, last: u32) {
    let is_ours = |first| aside::next(first).is_some_and(|fd| fd.cast_unsigned() <= last);
    if RawFd::try_from(first).is_ok_and(is_ours) && !state::is_owner() && !inside::has_interrupted() {
        errno::kept(handing_on);
    }
}

/// Moves connections that a new program inherits back to TCP first, as libc is about to start that program without
/// calling the exported functions. If the caller holds the result until the new program runs, the program's limit of
/// descriptors is the one that this program set. A signal handler that runs meanwhile waits for nothing.
fn spawning() -> impl Sized {
    let inside = inside::enter();
    if let Some(process) = state::busy().filter(|_| state::is_owner()) {
        errno::kept(|| handback::hand_on_all(process, &passed_on(), |_| true));
    }
    (aside::hold(), inside) // Dropped in this order.
}

macro_rules! spawns {
    ($($name:ident)*) => {$(
        /// # Safety
        /// As `posix_spawn(3)`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            pid: *mut pid_t,
            program: *const c_char,
            actions: *const c_void,
            attributes: *const c_void,
            arguments: *const *mut c_char,
            environment: *const *mut c_char,
        ) -> c_int {
            let _limit = spawning();
            // SAFETY: (contract) the caller's promise.
            unsafe { real::$name(pid, program, actions, attributes, arguments, environment) }
        }
    )*};
}

spawns! { posix_spawn posix_spawnp }

/// # Safety
/// As `system(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn system(command: *const c_char) -> c_int {
    if !command.is_null() {
        drop(spawning()); // Not held, because the command may take long.
    }
    // SAFETY: (contract) the caller's promise.
    unsafe { real::system(command) }
}

/// # Safety
/// As `popen(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn popen(command: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    let _limit = spawning();
    // SAFETY: (contract) the caller's promise.
    unsafe { real::popen(command, mode) }
}

/// # Safety
/// As `execve(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execve(
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    leaving();
    // SAFETY: (contract) the caller's promise.
    unsafe { real::execve(path, arguments, environment) }
}

/// # Safety
/// As `execv(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execv(path: *const c_char, arguments: *const *const c_char) -> c_int {
    leaving();
    // SAFETY: (contract) the caller's promise.
    unsafe { real::execv(path, arguments) }
}

/// # Safety
/// As `execvp(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execvp(file: *const c_char, arguments: *const *const c_char) -> c_int {
    leaving();
    // SAFETY: (contract) the caller's promise.
    unsafe { real::execvp(file, arguments) }
}

/// # Safety
/// As `execvpe(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execvpe(
    file: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    leaving();
    // SAFETY: (contract) the caller's promise.
    unsafe { real::execvpe(file, arguments, environment) }
}

/// # Safety
/// As `fexecve(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fexecve(
    fd: c_int,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    leaving();
    // SAFETY: (contract) the caller's promise.
    unsafe { real::fexecve(fd, arguments, environment) }
}

/// # Safety
/// As `execveat(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execveat(
    folder: c_int,
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
    flags: c_int,
) -> c_int {
    leaving();
    // SAFETY: (contract) the caller's promise.
    unsafe { real::execveat(folder, path, arguments, environment, flags) }
}

/// Moves the connection to TCP, because a spawned program gets it by another number.
///
/// # Safety
/// As `posix_spawn_file_actions_adddup2(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn posix_spawn_file_actions_adddup2(actions: *mut c_void, fd: c_int, to: c_int) -> c_int {
    if let (Some(process), Some(connection)) = (state::busy(), state::connection(fd)) {
        errno::kept(|| handback::hand_over(process, fd, &connection, Reason::Shared));
    }
    // SAFETY: (contract) the caller's promise.
    unsafe { real::posix_spawn_file_actions_adddup2(actions, fd, to) }
}

// ---- the end

/// Tracks a descriptor that is about to be closed, if the ends of connections are recorded. There a socket that moved
/// no byte counts as a connection too.
pub(crate) fn seen_at_last(fd: RawFd) {
    if state::busy().is_some_and(|process| process.journal.is_kept()) {
        state::find(fd);
    }
}

/// # Safety
/// As `_exit(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _exit(status: c_int) -> ! {
    end_in_time(status);
    // SAFETY: (contract) the caller's promise.
    unsafe { real::_exit(status) }
}

/// # Safety
/// As `_Exit(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _Exit(status: c_int) -> ! {
    end_in_time(status);
    // SAFETY: (contract) the caller's promise.
    unsafe { real::_Exit(status) }
}

/// Exit status for a process that cannot end in order.
static STATUS: AtomicI32 = AtomicI32::new(0);
/// Time for which an end in order is attempted, in microseconds.
const PATIENCE: i64 = 500_000;

extern "C" fn end_now(_: c_int) {
    // SAFETY: (contract) ends the process.
    unsafe { real::_exit(STATUS.load(Ordering::Relaxed)) }
}

/// Ends the process in order, if this succeeds in time. A signal handler may have interrupted the holder of a lock, of
/// libc's memory or of this library.
fn end_in_time(status: c_int) {
    if inside::has_interrupted() || !state::has_begun() {
        return;
    }
    STATUS.store(status, Ordering::Relaxed);
    // SAFETY: (valid) all zeros is an action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = end_now as *const () as usize;
    let timer = libc::itimerval {
        it_interval: libc::timeval { tv_sec: 0, tv_usec: PATIENCE },
        it_value: libc::timeval { tv_sec: 0, tv_usec: PATIENCE },
    };
    // The heap may be inconsistent as well, so faults also end the process at once.
    for signal in [libc::SIGALRM, libc::SIGSEGV, libc::SIGABRT] {
        // SAFETY: (valid) all zeros is an empty set.
        let mut one: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: (valid) a set, and the number of a signal.
        unsafe { libc::sigaddset(&raw mut one, signal) };
        // SAFETY: (action) a handler of the kind that has one argument.
        unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) };
        // SAFETY: (valid) a set, for the length of the call.
        unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const one, ptr::null_mut()) };
    }
    // SAFETY: (valid) a time, for the length of the call.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, ptr::null_mut()) };
    end();
}

/// Ends the process in order.
extern "C" fn end() {
    if let Some(process) = state::busy().filter(|_| state::is_owner()) {
        let mut all = state::connections();
        all.sort_by_key(|(_, connection)| Arc::as_ptr(connection));
        all.dedup_by_key(|(_, connection)| Arc::as_ptr(connection));
        for (fd, connection) in all {
            handback::drain_before_close(fd, &connection);
            // The kernel is about to close the socket, and sees nothing unread.
            if connection.depart() && connection.unread() > 0 && state::is_still(fd) {
                handback::reset_at_close(process, fd, &connection);
            }
            process.ended(&connection);
        }
        process.end();
    }
}

// SAFETY: (type) the loader calls what stands in this section without arguments when the process exits.
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;
