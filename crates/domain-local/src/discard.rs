// SPDX-License-Identifier: Apache-2.0 OR MIT
//! L-5. Closing what a stranger sent. The last close of a file may wait for its own file system (FUSE, a dead NFS server),
//! for a lingering socket, or for nobody knows what, whichever a hostile peer chose. So it is left to threads that nobody
//! waits for; their number is bounded, for each peer and in all, and where a peer has used up its share nothing that may have
//! to be closed is taken from it.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

/// Loads of one kind that are being closed at a time, of all peers and of one.
const MOST: usize = 48;
const MOST_OF_ONE: usize = 24;
/// Loads that wait for a thread. Beyond these nobody is let in.
const WAITING_MOST: usize = 64;

/// Who sent it, and what it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Source {
    pub pid: Option<u32>,
    pub uid: u32,
    pub kind: Kind,
}

/// Files that were received, or a socket in whose queue some may be. The kernel closes the latter without asking a FUSE
/// server, so they are counted apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Files,
    Socket,
}

struct Load {
    source: Source,
    /// Is closed when it is dropped.
    files: Box<dyn Send>,
}

struct Discards {
    /// Threads are not inherited by children.
    pid: u32,
    running: Vec<Source>,
    waiting: VecDeque<Load>,
}

static DISCARDS: Mutex<Discards> = Mutex::new(Discards { pid: 0, running: Vec::new(), waiting: VecDeque::new() });

impl Discards {
    fn lock() -> MutexGuard<'static, Self> {
        let mut discards = DISCARDS.lock().unwrap_or_else(PoisonError::into_inner);
        let pid = std::process::id();
        if discards.pid != pid {
            discards.pid = pid;
            discards.running.clear();
        }
        discards
    }

    /// Whether another thread may close something of `source`.
    fn may_run(&self, source: Source) -> bool {
        let of_kind = self.running.iter().filter(|one| one.kind == source.kind).count();
        let of_one = self.running.iter().filter(|one| **one == source).count();
        of_kind < MOST && of_one < MOST_OF_ONE
    }

    /// Takes the first load that may be closed now off the queue.
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

/// Whether files may be taken from `source`, of which it is not known yet whether they have to be closed here.
pub(crate) fn has_room(source: Source) -> bool {
    let discards = Discards::lock();
    let waits = discards.waiting.iter().any(|load| load.source == source);
    discards.may_run(source) && !waits
}

/// Whether so much waits to be closed that nobody is to be let in.
pub(crate) fn is_full() -> bool {
    let full = Discards::lock().waiting.len() >= WAITING_MOST;
    if full {
        start();
    }
    full
}

/// Closes `files`, which `source` sent, some time. Never blocks.
pub(crate) fn discard(source: Source, files: impl Send + 'static) {
    Discards::lock().waiting.push_back(Load { source, files: Box::new(files) });
    start();
}

/// Starts a thread for each load that may be closed now. Where no thread can be had the load goes on waiting: for the next
/// one that ends, or for the next call.
fn start() {
    while let Some(load) = { Discards::lock().next() } {
        let source = load.source;
        // A closure that finds no thread is dropped; what it was to close must not be.
        let load = Arc::new(Mutex::new(Some(load)));
        let take = |load: &Mutex<Option<Load>>| load.lock().unwrap_or_else(PoisonError::into_inner).take();
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
        if thread::Builder::new().name("tombolo-discard".into()).spawn(work).is_err() {
            let mut discards = Discards::lock();
            discards.end(source);
            discards.waiting.extend(take(&load));
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// Files that are not closed before the test says so.
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

    #[test]
    fn l5_files_that_nobody_can_close_use_up_the_share_of_their_sender_and_few_threads() {
        let mut ends = Vec::new();
        let mut stuck = |pid| {
            let (end, wait) = channel();
            ends.push(end);
            discard(of(pid), Stuck(wait));
        };
        for sent in 0..MOST_OF_ONE {
            assert!(has_room(of(1)), "{sent}");
            stuck(1);
        }
        assert!(!has_room(of(1)) && has_room(of(2)), "one peer's share is not another's");
        stuck(1);
        assert!(!is_full());
        (2..200).for_each(&mut stuck);
        assert!(!has_room(of(1000)) && is_full(), "all have a bound together");
        assert!(has_room(Source { kind: Kind::Socket, ..of(1) }), "sockets have their own");
        assert!(threads() <= MOST, "{} threads", threads());
        drop(ends);
        while !has_room(of(1)) || threads() > 0 {
            thread::yield_now();
        }
        assert!(!is_full() && Discards::lock().waiting.is_empty());
    }
}
