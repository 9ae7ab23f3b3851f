// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the broker hears of: events, and questions with their answers.

use std::{io, os::fd::OwnedFd, time::Duration};

use tokio::sync::oneshot;
use tombolo_control::{Message, Name};

use crate::host::{
    mapped::Mapped,
    memory::Regions,
    qemu::{Alone, News},
};

/// Most messages that one guest is heard at a time.
pub(crate) const TURN: usize = 32;

/// Something that happened.
#[derive(Debug)]
pub enum Event {
    /// A QEMU connected for a domain.
    Joined(String, OwnedFd),
    /// A QEMU closed its connection, or said something on it.
    Left(String, u64),
    /// There is room on a QEMU's connection again.
    Room(String, u64),
    /// A guest, or the broker of an account, rang, and the eventfd was drained.
    Rang(String, u64),
    /// It did so more often than makes sense.
    Loud(String, u64),
    /// An account is rung without end on this link.
    Stormed(String, u32),
    /// A program of this kernel wants to be served: whose user it is.
    ProgramConnected(OwnedFd, u32),
    /// An administrator wants to be served as the programs of this account are.
    Entered(OwnedFd, Name),
    /// QEMU told something.
    Qemu(String, u64, News),
    /// What was seen of a machine whose QEMU is not connected (B-27).
    Alone(String, Alone),
    /// A storm is over: the domain that was rung, and who rang.
    Calm(String, String),
    /// Somebody asks on the socket.
    Asked(Question),
    /// The configuration is to be read again.
    Reload,
    /// Memory for a link in a generation was made, or is not to be had.
    Made(u32, u32, io::Result<Regions>),
    /// What the broker writes of a link's region in a generation was mapped: the end whose it is.
    Mapped((u32, u32, usize), io::Result<Mapped>),
    /// A region of a link in a generation was sealed: the end whose it is.
    Sealed(u32, u32, usize, io::Result<()>),
    /// Who watched over a QEMU does so no more, by a fault of the broker's own.
    Faulty(String, u64),
    /// The same of what all need.
    Broken(&'static str),
    /// Consequences are to be drawn again.
    Unsettled,
}

impl Event {
    /// Whether there are consequences to be drawn from it at once. To draw them is to look at all that there is, which nobody who
    /// only knocks or asks makes the broker do. What guests and QEMUs say has some in its turn ([`super::share`]).
    pub(crate) fn has_consequences(&self) -> bool {
        match self {
            Self::ProgramConnected(..) | Self::Entered(..) => false,
            Self::Joined(..) | Self::Left(..) | Self::Room(..) | Self::Rang(..) | Self::Loud(..) | Self::Qemu(..) => {
                false
            }
            Self::Unsettled => false,
            Self::Asked(question) => question.changes_something(),
            _ => true,
        }
    }
}

/// A question from the socket.
#[derive(Debug)]
pub struct Question {
    /// What is asked.
    pub message: Message,
    /// The user who asks.
    pub user: u32,
    /// Where the answers go, and how long it took to find them.
    pub answer: Asker,
}

impl Question {
    /// Whether there may be other links after it.
    pub(crate) fn changes_something(&self) -> bool {
        use Message::{AddLink, CancelPrepare, Prepare, RemoveLink};
        matches!(self.message, AddLink { .. } | RemoveLink { .. } | Prepare { .. } | CancelPrepare { .. })
    }
}

/// Where the answer goes, with the time that it took to find it.
pub(crate) type Asker = oneshot::Sender<(Vec<Message>, Duration)>;

/// Answers all who asked for the same.
pub(crate) fn answer(askers: impl IntoIterator<Item = Asker>, said: &[Message]) {
    // Who does not wait for the answer does not get it. To wait took nobody's time.
    askers.into_iter().for_each(|asker| _ = asker.send((said.to_vec(), Duration::ZERO)));
}

/// An answer that says no.
pub(crate) fn refuse(code: u16, reason: impl Into<String>) -> Vec<Message> {
    vec![Message::Refuse { code, reason: reason.into().into() }]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b15_b17_who_knocks_asks_or_rings_has_no_consequences_at_once_and_who_changes_something_has() {
        let asked = |message| Event::Asked(Question { message, user: 7, answer: oneshot::channel().0 });
        let (a, b): (Name, Name) = ("a".parse().unwrap(), "b".parse().unwrap());
        let socket = || super::super::eventfd::event().unwrap();
        for event in [
            Event::ProgramConnected(socket(), 7),
            Event::Entered(socket(), a.clone()),
            asked(Message::List { what: tombolo_control::What::Links }),
            asked(Message::Who { number: 1 }),
            Event::Rang("a".into(), 1),
            Event::Loud("a".into(), 1),
            Event::Qemu("a".into(), 1, News::Running(true)),
            Event::Room("a".into(), 1),
            Event::Joined("a".into(), socket()),
            Event::Left("a".into(), 1),
            Event::Unsettled,
        ] {
            assert!(!event.has_consequences(), "{event:?}");
        }
        for event in [
            asked(Message::AddLink { a: a.clone(), b: b.clone(), size: 0 }),
            asked(Message::RemoveLink { a, b }),
            Event::Reload,
            Event::Calm("a".into(), "b".into()),
        ] {
            assert!(event.has_consequences(), "{event:?}");
        }
    }
}
