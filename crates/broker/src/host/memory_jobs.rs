// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Seals memory that untrusted processes have open, and frees its pages (B-10, B-11).
//!
//! Both wait for the lock of the memory's file, which an untrusted process can hold (see
//! [`mapped`](crate::host::mapped)). A thread that waits for it cannot be killed, and would keep the broker from ever
//! ending. So a separate process, `tombolod memory`, does each job, and the broker does not wait for it. A domain has
//! one such process at a time, and a thread that waits for the process and ends whenever the broker does. Further jobs
//! for that domain's memory wait behind it.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, OwnedFd},
    str::FromStr,
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
};

use tokio::sync::mpsc;

use super::{event::Event, memory};
use crate::panics;

/// Largest number of jobs that wait for one domain.
const MOST: usize = 32;

/// Kind of a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    /// Keeps new mappings from writing the memory.
    Seal,
    /// Keeps everybody but its owner from opening the memory for writing.
    Guard,
    /// Frees the memory's pages.
    Free,
}

impl What {
    const NAMES: [(Self, &str); 3] = [(Self::Seal, "seal"), (Self::Guard, "guard"), (Self::Free, "free")];

    fn name(self) -> &'static str {
        Self::NAMES.into_iter().find(|(what, _)| *what == self).map_or("", |(_, name)| name)
    }

    /// Does the job, which takes as long as other processes that have the memory like.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn perform(self, memory: impl AsFd) -> io::Result<()> {
        let done = match self {
            Self::Seal => memory::seal_against_writing(memory),
            Self::Guard => memory::seal_as_it_is(memory),
            Self::Free => return memory::free(memory),
        };
        match done {
            // An earlier broker did it, and ended before it could save that.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
            done => done,
        }
    }
}

impl FromStr for What {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::NAMES.into_iter().find(|(_, name)| *name == text).map(|(what, _)| what).ok_or("`seal`, `guard` or `free`")
    }
}

/// A job for the memory of a domain.
#[derive(Debug)]
pub(crate) struct Chore {
    pub what: What,
    pub memory: Arc<OwnedFd>,
    /// Region whose outcome is reported: the link, its generation and the side.
    pub region: Option<(u32, u32, usize)>,
}

/// Jobs in progress, by domain.
#[derive(Debug)]
pub(crate) struct Chores {
    events: mpsc::Sender<Event>,
    queues: BTreeMap<String, SyncSender<Chore>>,
}

impl Chores {
    pub fn new(events: mpsc::Sender<Event>) -> Self {
        Self { events, queues: BTreeMap::new() }
    }

    /// Requests a job for memory of `domain`. Returns false if too many wait there.
    pub fn ask(&mut self, domain: &str, chore: Chore) -> bool {
        let mut chore = chore;
        if let Some(queue) = self.queues.get(domain) {
            match queue.try_send(chore) {
                Ok(()) => return true,
                Err(TrySendError::Full(_)) => return false,
                // The thread of this queue is gone, so another one begins.
                Err(TrySendError::Disconnected(it)) => chore = it,
            }
        }
        let ((queue, chores), events) = (sync_channel(MOST), self.events.clone());
        // The thread waits for a process, and ends with this process.
        let begun = std::thread::Builder::new().name("tombolo-memory".into()).spawn(move || work(&chores, &events));
        let is_asked = begun.is_ok() && queue.try_send(chore).is_ok();
        if is_asked {
            self.queues.insert(domain.into(), queue);
        }
        is_asked
    }

    /// Forgets domains that are gone. Jobs already requested for them are done.
    pub fn retain(&mut self, is_there: impl Fn(&str) -> bool) {
        self.queues.retain(|domain, _| is_there(domain));
    }
}

fn work(chores: &Receiver<Chore>, events: &mpsc::Sender<Event>) {
    while let Ok(Chore { what, memory, region }) = chores.recv() {
        let done = panics::catch_panic(|| run(what, &memory));
        drop(memory);
        if let Some((link, generation, side)) = region {
            let _ = events.blocking_send(Event::Sealed(link, generation, side, done));
        }
    }
}

/// Has a separate process do the job.
#[cfg(not(test))]
fn run(what: What, memory: &OwnedFd) -> io::Result<()> {
    use std::{
        os::unix::process::CommandExt,
        process::{Command, Stdio},
    };

    let mut command = Command::new("/proc/self/exe");
    command.arg0("tombolod").args(["memory", what.name()]).env_remove(crate::sd_notify::VARIABLE);
    match command.stdin(memory.try_clone()?).stdout(Stdio::null()).status()? {
        status if status.success() => Ok(()),
        status => Err(io::Error::other(format!("tombolod memory {}: {status}", what.name()))),
    }
}

/// Unit tests of this crate have no program to start; its integration tests have one.
#[cfg(test)]
fn run(what: What, memory: &OwnedFd) -> io::Result<()> {
    what.perform(memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b10_what_is_done_has_a_name_each() {
        for (what, name) in What::NAMES {
            assert_eq!((name.parse(), what.name()), (Ok(what), name));
        }
        assert!("other".parse::<What>().is_err());
    }

    #[test]
    fn b10_where_nobody_does_what_is_asked_somebody_else_begins() {
        let (events, mut heard) = mpsc::channel(4);
        let mut chores = Chores::new(events);
        // The worker of this queue is gone.
        chores.queues.insert("a".into(), sync_channel(MOST).0);
        let memory = Arc::new(memory::create("test", 4096).unwrap());
        assert!(chores.ask("a", Chore { what: What::Seal, memory, region: Some((1, 2, 0)) }));
        assert!(matches!(heard.blocking_recv(), Some(Event::Sealed(1, 2, 0, Ok(())))));
    }
}
