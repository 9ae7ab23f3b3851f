// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Closes descriptors that a stranger sent (L-5). The last close of a file may block on its file system (FUSE, a dead
//! NFS server), on a lingering socket or on anything else that a hostile peer chose. So it is left to threads that
//! nobody waits for. Their number is bounded, for each peer and in all. From a peer that has used up its share, nothing
//! is taken that may have to be closed.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard},
    thread,
};

use nix::sys::signal::{SigSet, SigmaskHow};
use rustix::process::{Resource, getrlimit};
use tombolo_os::lock::lock;

/// Largest number of loads of one kind that are being closed at a time: of all peers, of the processes of one user, and
/// of one process. What one user cannot use up remains for others.
const MOST: usize = 48;
const MOST_OF_USER: usize = 32;
const MOST_OF_ONE: usize = 16;
/// Largest number of loads that wait for a thread: this share of the descriptors that this process may open, within
/// these bounds. Beyond that no peer is accepted.
const WAITING_SHARE: u64 = 4;
const WAITING: (u64, u64) = (16, 1024);

/// Sender and kind of a load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Source {
    pub pid: Option<u32>,
    pub uid: u32,
    pub kind: Kind,
}

impl Source {
    fn is_same_user(&self, other: &Self) -> bool {
        (self.uid, self.kind) == (other.uid, other.kind)
    }
}

/// Kind of a load: files that were received, or a socket whose queue may hold some. The kernel closes the latter
/// without asking a FUSE server, so the two are counted separately.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Files,
    Socket,
}

struct Load {
    source: Source,
    /// Files that are closed when this is dropped.
    files: Box<dyn Send>,
}

struct Discards {
    /// Process of the threads, because children do not inherit threads.
    pid: u32,
    running: Vec<Source>,
    waiting: VecDeque<Load>,
}

static DISCARDS: Mutex<Discards> = Mutex::new(Discards { pid: 0, running: Vec::new(), waiting: VecDeque::new() });

impl Discards {
    fn lock() -> MutexGuard<'static, Self> {
        let mut discards = lock(&DISCARDS);
        let pid = std::process::id();
        if discards.pid != pid {
            discards.pid = pid;
            discards.running.clear();
        }
        discards
    }

    /// Returns whether another thread may close a load of `source`.
    fn may_run(&self, source: Source) -> bool {
        let count = |counts: &dyn Fn(&Source) -> bool| self.running.iter().filter(|one| counts(one)).count();
        count(&|one| one.kind == source.kind) < MOST
            && count(&|one| one.is_same_user(&source)) < MOST_OF_USER
            && count(&|one| *one == source) < MOST_OF_ONE
    }

    /// Removes the first load that may be closed now from the queue.
    fn next(&mut self) -> Option<Load> {
        let at = self.waiting.iter().position(|load| self.may_run(load.source))?;
        let load = self.waiting.remove(at)?;
        self.running.push(load.source);
        Some(load)
    }

    fn end(&mut self, source: Source) {
        if let Some(at) = self.running.iter().position(|one| *one == source) {
            self.running.swap_remove(at);
        }
    }
}

/// Returns whether files may be taken from `source` before it is known whether they have to be closed here.
pub(crate) fn has_room(source: Source) -> bool {
    let discards = Discards::lock();
    let waits = discards.waiting.iter().any(|load| load.source == source);
    discards.may_run(source) && !waits
}

/// Returns whether so much waits to be closed that no peer may be accepted.
pub(crate) fn is_full() -> bool {
    let full = Discards::lock().waiting.len() >= most_waiting();
    if full {
        start();
    }
    full
}

fn most_waiting() -> usize {
    let most = getrlimit(Resource::Nofile).current.map_or(WAITING.1, |files| files / WAITING_SHARE);
    most.clamp(WAITING.0, WAITING.1) as usize
}

/// Locks the state while the process is copied by fork: the copy has no other thread that could release the lock.
pub(crate) fn hold() -> impl Sized + 'static {
    Discards::lock()
}

/// Closes `files`, which `source` sent, at a later time. Never blocks.
pub(crate) fn discard(source: Source, files: impl Send + 'static) {
    Discards::lock().waiting.push_back(Load { source, files: Box::new(files) });
    start();
}

/// Starts a thread for each load that may be closed now. If no thread can be started, the load waits for the next
/// thread that ends, or for the next call.
fn start() {
    while let Some(load) = { Discards::lock().next() } {
        let source = load.source;
        // If no thread can be started the closure is dropped; the load must not be dropped with it.
        let load = Arc::new(Mutex::new(Some(load)));
        let take = |load: &Mutex<Option<Load>>| lock(load).take();
        let theirs = Arc::clone(&load);
        let work = move || {
            let mut load = take(&theirs);
            while let Some(Load { source, files }) = load {
                drop(files);
                let mut discards = Discards::lock();
                discards.end(source);
                load = discards.next();
            }
        };
        if spawn(work).is_err() {
            let mut discards = Discards::lock();
            discards.end(source);
            discards.waiting.extend(take(&load));
            return;
        }
    }
}

/// Starts a thread with all signals blocked. The program may not expect threads, and may wait for its signals where it
/// blocked them.
fn spawn(work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
    let spawned = thread::Builder::new().name("tombolo-discard".into()).spawn(work).map(drop);
    // Restoring a valid mask cannot fail.
    let _ = before.thread_set_mask();
    spawned
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use nix::sys::signal::Signal;

    use super::*;

    /// Files that close only when the test allows it.
    struct Stuck(Receiver<()>);

    impl Drop for Stuck {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    fn of(pid: u32) -> Source {
        Source { pid: Some(pid), uid: 7, kind: Kind::Files }
    }

    fn threads() -> usize {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| name == "tombolo-discard\n").count()
    }

    /// The tests share global state, so they run one at a time.
    fn alone() -> MutexGuard<'static, ()> {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        lock(&ONE_AT_A_TIME)
    }

    /// Starts discards of `source` that last until the test drops the returned value.
    fn discard_stuck(source: Source) -> Sender<()> {
        let (end, wait) = channel();
        discard(source, Stuck(wait));
        end
    }

    fn wait_until_closed() {
        while threads() > 0 || !Discards::lock().waiting.is_empty() {
            thread::yield_now();
        }
    }

    #[test]
    fn l5_files_that_nobody_can_close_use_up_the_share_of_their_sender_and_few_threads() {
        let _alone = alone();
        let mut ends = Vec::new();
        for sent in 0..MOST_OF_ONE {
            assert!(has_room(of(1)), "{sent}");
            ends.push(discard_stuck(of(1)));
        }
        assert!(!has_room(of(1)) && has_room(of(2)), "one peer's share is not another's");
        ends.push(discard_stuck(of(1)));
        assert!(!is_full());
        ends.extend((2..2 + 2 * most_waiting() as u32).map(|pid| discard_stuck(of(pid))));
        assert!(!has_room(of(100_000)) && is_full(), "all have a bound together");
        assert!(has_room(Source { kind: Kind::Socket, ..of(1) }), "sockets have their own");
        assert!(threads() <= MOST, "{} threads", threads());
        drop(ends);
        wait_until_closed();
        assert!(has_room(of(1)) && !is_full());
    }

    #[test]
    fn l5_processes_of_one_user_cannot_use_up_what_is_there_for_another() {
        let _alone = alone();
        let ends: Vec<_> = (0..1000).map(|pid| discard_stuck(of(pid))).collect();
        assert!(!has_room(of(5000)), "a further process of that user");
        let other = Source { uid: 8, ..of(5000) };
        let mut others = Vec::new();
        for sent in 0..MOST_OF_ONE {
            assert!(has_room(other), "{sent}");
            others.push(discard_stuck(other));
        }
        assert_eq!(threads_of(7), MOST_OF_USER);
        drop((ends, others));
        wait_until_closed();
    }

    fn threads_of(uid: u32) -> usize {
        Discards::lock().running.iter().filter(|one| one.uid == uid).count()
    }

    #[test]
    fn l5_thread_that_closes_takes_no_signal_of_the_programs() {
        let _alone = alone();
        let end = discard_stuck(of(1));
        while threads() != 1 {
            thread::yield_now(); // The thread has not set its name yet.
        }
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        // Threads of other tests come and go.
        let status = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("status")).ok();
        let all: Vec<String> = tasks.filter_map(status).filter(|status| status.contains("tombolo-discard")).collect();
        let blocked = |status: &String| {
            let line = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
            u64::from_str_radix(line.trim(), 16).unwrap()
        };
        assert_eq!(all.len(), 1);
        for signal in [Signal::SIGTERM, Signal::SIGCHLD, Signal::SIGUSR1, Signal::SIGALRM, Signal::SIGPROF] {
            assert_ne!(blocked(&all[0]) & 1 << (signal as i32 - 1), 0, "{signal}");
            assert!(!SigSet::thread_get_mask().unwrap().contains(signal), "the caller's mask is what it was");
        }
        drop(end);
        wait_until_closed();
    }

    #[test]
    fn l5_nobody_is_inside_while_the_process_copies_itself() {
        let _alone = alone();
        let held = hold();
        assert!(DISCARDS.try_lock().is_err());
        drop(held);
        assert!(DISCARDS.try_lock().is_ok());
    }
}
