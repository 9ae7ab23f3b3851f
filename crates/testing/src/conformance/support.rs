// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Helpers of the suite's tests.

use std::{
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use super::Fixture;
use tombolo_domain::{Deadline, Doorbell, Endpoint, Error, Listener, Received, Result, Slot, Woken, wait_readable};

/// Longest wait for an event that must happen, however busy the machine is, in milliseconds.
static PATIENCE: AtomicU64 = AtomicU64::new(20_000);
/// Wait for an event that must not happen: long enough to notice it, and short enough for a test.
pub(super) const QUIET: Duration = Duration::from_millis(50);
/// Longest delay that a busy machine may cause.
pub(super) const SLACK: Duration = Duration::from_secs(3);
/// Size larger than any segment of these tests.
pub(super) const ANY: u64 = 1 << 30;

/// Lets every test of this process wait at most `time` for an event that must happen; the default is 20 s. Meant for
/// canaries, in which it never happens.
pub fn set_patience(time: Duration) {
    PATIENCE.store(u64::try_from(time.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// Returns the deadline for an event that must happen.
#[must_use]
pub fn patience() -> Deadline {
    Deadline::after(Duration::from_millis(PATIENCE.load(Ordering::Relaxed)))
}

/// Repeats `attempt` until it returns something, and sleeps on `fd` of `subject` in between: the blocking form of the
/// calls that never block.
///
/// # Blocking
/// Until then, or until `deadline`.
///
/// # Errors
/// Any error of `attempt`; [`TimedOut`](Error::TimedOut).
pub fn wait_for<S: ?Sized, T>(
    subject: &mut S,
    deadline: Deadline,
    fd: impl Fn(&S) -> BorrowedFd<'_>,
    mut attempt: impl FnMut(&mut S) -> Result<Option<T>>,
) -> Result<T> {
    loop {
        if let Some(found) = attempt(subject)? {
            return Ok(found);
        }
        if !wait_readable(fd(subject), deadline)? {
            return Err(Error::TimedOut);
        }
    }
}

/// Returns the next message of `link`, with a segment of any size.
///
/// # Blocking
/// Until it came, or until `deadline`.
///
/// # Errors
/// Those of [`Endpoint::recv`]; [`TimedOut`](Error::TimedOut).
pub fn receive(link: &mut dyn Endpoint, deadline: Deadline) -> Result<Received> {
    wait_for(link, deadline, |link| link.fd(), |link| link.recv(ANY))
}

/// Returns the message that must come.
pub(super) fn message(link: &mut dyn Endpoint) -> Vec<u8> {
    receive(link, patience()).expect("D-8: a message was sent").message
}

/// Returns the error for the end of `link`, which must come with nothing before it.
pub(super) fn ending(link: &mut dyn Endpoint) -> Error {
    receive(link, patience()).expect_err("the peer is gone and has sent no more")
}

/// Returns the endpoint of the next peer that connects.
///
/// # Blocking
/// Until then.
///
/// # Panics
/// If none does in time.
pub fn accept(listener: &mut dyn Listener) -> Box<dyn Endpoint> {
    wait_for(listener, patience(), |listener| listener.fd(), |listener| listener.accept()).expect("a peer connected")
}

/// Returns whether `holds` becomes true in time, for conditions without a descriptor to sleep on.
pub(super) fn eventually(mut holds: impl FnMut() -> bool) -> bool {
    let deadline = patience();
    while !holds() {
        if deadline.expired() {
            return false;
        }
        thread::park_timeout(Duration::from_millis(1));
    }
    true
}

/// Runs `work` in a thread of its own and returns its result, so that work which blocks for ever fails and does not
/// hang.
pub(super) fn unblocked<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    let thread = thread::spawn(move || done.send(work()));
    // Longer than the waits inside, so that waits which end report themselves what was wrong.
    let patience = Duration::from_millis(PATIENCE.load(Ordering::Relaxed));
    match result.recv_timeout(2 * patience) {
        Ok(value) => value,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{what} blocks"),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(thread.join().expect_err("it sent nothing, so it panicked"))
        }
    }
}

/// Two endpoints that met and can notify each other.
pub(super) struct Belled {
    pub(super) links: [Box<dyn Endpoint>; 2],
    pub(super) doorbells: [Arc<dyn Doorbell>; 2],
}

impl Belled {
    pub(super) fn new(fixture: &impl Fixture) -> Self {
        Self::meet(fixture.pair())
    }

    /// Sends a message in each direction, after which there are doorbells.
    pub(super) fn meet(mut links: [Box<dyn Endpoint>; 2]) -> Self {
        links[1].send(b"hello", None).expect("a fresh path has room");
        assert_eq!(message(&mut *links[0]), b"hello");
        links[0].send(b"welcome", None).expect("a fresh path has room");
        assert_eq!(message(&mut *links[1]), b"welcome");
        let doorbells =
            links.each_ref().map(|link| link.doorbell().expect("there is a doorbell once a message came in"));
        Self { links, doorbells }
    }
}

/// Returns whether `doorbell` comes to rest: after a drain no notification comes, and its descriptor is not readable.
/// Spurious notifications are allowed, so it gets some tries.
pub(super) fn comes_to_rest(doorbell: &dyn Doorbell, slot: Slot) -> bool {
    (0..20).any(|_| {
        doorbell.drain(slot);
        let woken = doorbell.wait(slot, Deadline::after(QUIET)).expect("waiting works");
        woken == Woken::TimedOut && !readable(doorbell.fd(slot))
    })
}

/// Returns the same for the path of `link`: nothing is received, and its descriptor is not readable.
pub(super) fn path_comes_to_rest(link: &mut dyn Endpoint) -> bool {
    (0..20).any(|_| {
        let nothing = matches!(link.recv(ANY), Ok(None));
        nothing && !wait_readable(link.fd(), Deadline::after(QUIET)).expect("polling works")
    })
}

/// Waits until something other than a notification ends the wait.
pub(super) fn wait_beyond_notifications(doorbell: &dyn Doorbell, slot: Slot, deadline: Deadline) -> Woken {
    loop {
        match doorbell.wait(slot, deadline).expect("waiting works") {
            Woken::Notified => doorbell.drain(slot),
            other => return other,
        }
    }
}

/// Returns whether `fd` polls readable now.
pub(super) fn readable(fd: BorrowedFd<'_>) -> bool {
    wait_readable(fd, Deadline::at(Instant::now())).expect("polling works")
}

/// Prints that a test did not run, or fails where `TOMBOLO_REQUIRE` lists what it needs.
pub(super) fn skip(test: &str, need: &str) {
    let required = std::env::var("TOMBOLO_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|item| item == need), "{test} needs {need}, which this fixture lacks");
    let _ = std::io::Write::write_fmt(
        &mut std::io::stderr(),
        format_args!("SKIP {test} (needs {need}): this fixture has none\n"),
    );
}

/// Raises this process's limit of open files as far as allowed, for tests with many links.
pub(super) fn make_room_for_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // Where this is refused the test may still have enough room, and reports it if not.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}
