// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Seals memory that strangers have open, and frees its pages (B-10, B-11).
//!
//! Both wait for the lock of its file, which a stranger can hold (see [`mapped`](crate::host::mapped)), and who waits for it
//! cannot be killed: a thread would keep the broker from ever ending. So a process of its own does each, `tombolod memory`, and
//! nobody waits for it. A domain has one at a time, and a thread that waits for it, which ends whenever
//! the broker does; what else is to be done to that domain's memory waits behind it.

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

/// Most that wait for one domain.
const MOST: usize = 32;

/// What is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    /// Nobody new writes it.
    Seal,
    /// Nobody but its owner opens it for writing.
    Guard,
    /// Its pages go.
    Free,
}

impl What {
    const NAMES: [(Self, &str); 3] = [(Self::Seal, "seal"), (Self::Guard, "guard"), (Self::Free, "free")];

    fn name(self) -> &'static str {
        Self::NAMES.into_iter().find(|(what, _)| *what == self).map_or("", |(_, name)| name)
    }

    /// Does it, for as long as the memory's other holders like.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn perform(self, memory: impl AsFd) -> io::Result<()> {
        let done = match self {
            Self::Seal => memory::seal_against_writing(memory),
            Self::Guard => memory::seal_as_it_is(memory),
            Self::Free => return memory::free(memory),
        };
        match done {
            // An earlier broker did it and did not live to write that down.
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

/// Something to do to the memory of a domain.
#[derive(Debug)]
pub(crate) struct Chore {
    pub what: What,
    pub memory: Arc<OwnedFd>,
    /// Whoever wants to hear of it: the link, its generation and the side.
    pub region: Option<(u32, u32, usize)>,
}

/// What is being done, by domain.
#[derive(Debug)]
pub(crate) struct Chores {
    events: mpsc::Sender<Event>,
    queues: BTreeMap<String, SyncSender<Chore>>,
}

impl Chores {
    pub fn new(events: mpsc::Sender<Event>) -> Self {
        Self { events, queues: BTreeMap::new() }
    }

    /// Has something done to memory of `domain`; false if too much waits there.
    pub fn ask(&mut self, domain: &str, chore: Chore) -> bool {
        let mut chore = chore;
        if let Some(queue) = self.queues.get(domain) {
            match queue.try_send(chore) {
                Ok(()) => return true,
                Err(TrySendError::Full(_)) => return false,
                // Whoever did it is gone: somebody else begins.
                Err(TrySendError::Disconnected(it)) => chore = it,
            }
        }
        let ((queue, chores), events) = (sync_channel(MOST), self.events.clone());
        // It waits for a process, and ends with this one.
        let begun = std::thread::Builder::new().name("tombolo-memory".into()).spawn(move || work(&chores, &events));
        let is_asked = begun.is_ok() && queue.try_send(chore).is_ok();
        if is_asked {
            self.queues.insert(domain.into(), queue);
        }
        is_asked
    }

    /// Forgets domains that are not there any more; what they still want done is done.
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

/// Has a process do it.
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

/// Tests of this crate have no program to start; those beside it have.
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
        // Whoever had this queue is gone.
        chores.queues.insert("a".into(), sync_channel(MOST).0);
        let memory = Arc::new(memory::create("test", 4096).unwrap());
        assert!(chores.ask("a", Chore { what: What::Seal, memory, region: Some((1, 2, 0)) }));
        assert!(matches!(heard.blocking_recv(), Some(Event::Sealed(1, 2, 0, Ok(())))));
    }
}
