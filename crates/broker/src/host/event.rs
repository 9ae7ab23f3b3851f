// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the broker hears of: events, and questions with their answers.

use std::{io, os::fd::OwnedFd};

use tokio::sync::oneshot;
use tombolo_control::{Message, Name};

use crate::host::{memory::Regions, qemu::News};

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
    Knocked(OwnedFd, u32),
    /// An administrator wants to be served as the programs of this account are.
    Entered(OwnedFd, Name),
    /// QEMU told something.
    Told(String, u64, News),
    /// A storm is over: the domain that was rung, and who rang.
    Calm(String, String),
    /// Somebody asks on the socket.
    Asked(Question),
    /// The configuration is to be read again.
    Reload,
    /// Memory for a link in a generation was made, or is not to be had.
    Made(u32, u32, io::Result<Regions>),
    /// A region of a link in a generation was sealed: the end whose it is.
    Sealed(u32, u32, usize, io::Result<()>),
    /// Something was heard while consequences were drawn: it has some, too.
    Unsettled,
}

/// A question from the socket.
#[derive(Debug)]
pub struct Question {
    /// What is asked.
    pub message: Message,
    /// The user who asks.
    pub user: u32,
    /// Where the answers go.
    pub answer: oneshot::Sender<Vec<Message>>,
}

/// An answer that says no.
pub(crate) fn refuse(code: u16, reason: impl Into<String>) -> Vec<Message> {
    vec![Message::Refuse { code, reason: reason.into().into() }]
}
