// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Defines what the broker receives: events, and questions with their answers.

use std::{io, os::fd::OwnedFd, time::Duration};

use tokio::sync::oneshot;
use tombolo_control::{Message, Name};

use crate::host::{
    mapped::Mapped,
    memory::Regions,
    qemu::{Alone, News},
};

/// Most messages that are received from one guest at a time.
pub(crate) const TURN: usize = 32;

/// Something that happened.
#[derive(Debug)]
pub enum Event {
    /// A QEMU connected for a domain.
    Joined(String, OwnedFd),
    /// A QEMU closed its connection, or sent something on it.
    Left(String, u64),
    /// A QEMU's connection has room again.
    Room(String, u64),
    /// A guest, or the broker of an account, notified the host; the eventfd was drained.
    Notified(String, u64),
    /// A guest, or the broker of an account, notifies the host more often than makes sense.
    Loud(String, u64),
    /// An account is notified without end on this link.
    Stormed(String, u32),
    /// A program of this kernel that runs as this user wants to be served.
    ProgramConnected(OwnedFd, u32),
    /// An administrator wants to be served as the programs of this account are.
    Entered(OwnedFd, Name),
    /// QEMU sent a report.
    Qemu(String, u64, News),
    /// Observation of a machine whose QEMU is not connected (B-27).
    Alone(String, Alone),
    /// A storm is over: the domain that was notified, and the one that notified it.
    Calm(String, String),
    /// A client asks a question on the socket.
    Asked(Question),
    /// The configuration is to be read again.
    Reload,
    /// Memory for a generation of a link was created, or is not available.
    Made(u32, u32, io::Result<Regions>),
    /// A region that the broker writes was mapped: link, generation, and the side that owns it.
    Mapped((u32, u32, usize), io::Result<Mapped>),
    /// A region was sealed, or could not be: link, generation, and the side that owns it.
    Sealed(u32, u32, usize, io::Result<()>),
    /// A task that watches over a QEMU has failed, by a fault of the broker's own.
    Faulty(String, u64),
    /// A task that all domains need has failed in the same way.
    Broken(&'static str),
    /// The broker is to reconcile again.
    Unsettled,
}

impl Event {
    /// Returns whether the broker has to reconcile at once. To reconcile is to look at everything, so a client that
    /// only connects or asks does not make the broker do it. Reports of guests and QEMUs make it reconcile in turn
    /// ([`super::share`]).
    pub(crate) fn has_consequences(&self) -> bool {
        match self {
            Self::ProgramConnected(..) | Self::Entered(..) => false,
            Self::Joined(..)
            | Self::Left(..)
            | Self::Room(..)
            | Self::Notified(..)
            | Self::Loud(..)
            | Self::Qemu(..) => false,
            Self::Unsettled => false,
            Self::Asked(question) => question.changes_something(),
            _ => true,
        }
    }
}

/// A question from the socket.
#[derive(Debug)]
pub struct Question {
    /// Message that asks.
    pub message: Message,
    /// User who asks.
    pub user: u32,
    /// Channel for the answers, and for the time that it took to find them.
    pub answer: Asker,
}

impl Question {
    /// Returns whether the question may change which links there are.
    pub(crate) fn changes_something(&self) -> bool {
        use Message::{AddLink, CancelPrepare, Prepare, RemoveLink};
        matches!(self.message, AddLink { .. } | RemoveLink { .. } | Prepare { .. } | CancelPrepare { .. })
    }
}

/// Channel for the answers, and for the time that it took to find them.
pub(crate) type Asker = oneshot::Sender<(Vec<Message>, Duration)>;

/// Sends the same answer to several askers.
pub(crate) fn answer(askers: impl IntoIterator<Item = Asker>, said: &[Message]) {
    // An asker who has stopped waiting gets no answer. Waiting took none of the broker's time.
    askers.into_iter().for_each(|asker| _ = asker.send((said.to_vec(), Duration::ZERO)));
}

/// Returns an answer that refuses.
pub(crate) fn refuse(code: u16, reason: impl Into<String>) -> Vec<Message> {
    vec![Message::Refuse { code, reason: reason.into().into() }]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b15_b17_who_connects_asks_or_notifies_has_no_consequences_at_once_and_who_changes_something_has() {
        let asked = |message| Event::Asked(Question { message, user: 7, answer: oneshot::channel().0 });
        let (a, b): (Name, Name) = ("a".parse().unwrap(), "b".parse().unwrap());
        let socket = || tombolo_os::event::eventfd(0).unwrap();
        for event in [
            Event::ProgramConnected(socket(), 7),
            Event::Entered(socket(), a.clone()),
            asked(Message::List { what: tombolo_control::What::Links }),
            asked(Message::Who { number: 1 }),
            Event::Notified("a".into(), 1),
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
