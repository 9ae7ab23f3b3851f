// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holds a tool's conversation with a broker: one question at a time, over a UNIX socket.

use std::{
    io::{self, IoSlice},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    sockopt::{Timeout, set_socket_timeout},
};
use tombolo_control::{Envelope, Life, MESSAGE_MAX, Message, Name, Path as Between, Seen, VERSION};
use tombolo_os::passing;

use crate::error::{Error, Os, Result};

/// Socket at which the broker of a host answers administrators.
pub const ADMIN_SOCKET: &str = "/run/tombolo/tombolod.socket";
/// Socket for programs unless `TOMBOLO_BROKER` names another.
const PROGRAMS_SOCKET: &str = "/run/tombolo/broker.sock";
/// Largest number of messages in an answer: more than the links of a thousand domains with all their ends. If a broker
/// sends more, the conversation ends before that fills this program's memory.
const ANSWERS_MAX: usize = 1 << 17;

/// Returns the socket at which the broker of this kernel answers programs: what `TOMBOLO_BROKER` names, or the usual
/// one.
#[must_use]
pub fn programs_socket() -> PathBuf {
    let named = std::env::var_os("TOMBOLO_BROKER").filter(|path| !path.is_empty());
    named.map_or_else(|| PROGRAMS_SOCKET.into(), PathBuf::from)
}

/// A conversation with a broker.
#[derive(Debug)]
pub struct Broker {
    socket: OwnedFd,
    /// Name of the broker's domain, once it has answered Hello.
    domain: Name,
    /// Time that the broker may take to answer.
    patience: Duration,
}

impl Broker {
    /// Reaches the broker at `path` and sends Hello, without waiting for the answer. The broker may take `patience` for
    /// each answer.
    ///
    /// # Errors
    /// No broker is there, or this user may not ask it.
    pub fn reach(path: &Path, patience: Duration) -> Result<Self> {
        let open = || -> io::Result<OwnedFd> {
            let flags = SocketFlags::CLOEXEC;
            let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
            set_socket_timeout(&socket, Timeout::Recv, Some(patience))?;
            set_socket_timeout(&socket, Timeout::Send, Some(patience))?;
            rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
            Ok(socket)
        };
        let socket = open().map_err(|source| Error::NoBroker { socket: path.into(), source })?;
        let broker = Self { socket, domain: own_name(), patience };
        broker.send_hello()?;
        Ok(broker)
    }

    /// Reaches the broker at `path` and waits for its Hello.
    ///
    /// # Blocking
    /// For `patience` at most.
    ///
    /// # Errors
    /// No broker is there, or it refuses to greet this user.
    pub fn connect(path: &Path, patience: Duration) -> Result<Self> {
        let broker = Self::reach(path, patience)?;
        match broker.receive_message()? {
            hello @ Message::Hello { .. } => Ok(Self { domain: name_in(hello)?, ..broker }),
            other => Err(unexpected(other)),
        }
    }

    /// Lets the broker take `patience` for each answer from now on.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn with_patience(self, patience: Duration) -> Result<Self> {
        set_socket_timeout(&self.socket, Timeout::Recv, Some(patience)).os("setting a deadline for the broker")?;
        Ok(Self { patience, ..self })
    }

    /// Returns the name that the broker gives its domain; before it has greeted, this tool's own name.
    #[must_use]
    pub fn domain(&self) -> &Name {
        &self.domain
    }

    /// Sends Hello.
    ///
    /// # Errors
    /// The broker is gone.
    pub fn send_hello(&self) -> Result<()> {
        let (version_min, version_max, epoch, boot) = (VERSION, VERSION, 0, [0; 16]);
        self.send_message(Message::Hello { version_min, version_max, epoch, boot, name: own_name() })
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The broker is gone.
    pub fn send_message(&self, message: Message) -> Result<()> {
        let bytes = Envelope { serial: 1, message }.encode();
        passing::send(&self.socket, &[IoSlice::new(&bytes)], &[], SendFlags::empty()).os("sendmsg")?;
        Ok(())
    }

    /// Receives the next message.
    ///
    /// # Blocking
    /// Until a message arrives, for the time that the broker may take.
    ///
    /// # Errors
    /// The broker takes longer, is gone, or sends a message that cannot be decoded.
    pub fn receive_message(&self) -> Result<Message> {
        let mut buffer = [0; MESSAGE_MAX];
        match passing::receive(&self.socket, &mut buffer, 0, RecvFlags::empty()) {
            Ok(received) if received.len > 0 => {
                let said = Envelope::decode(Between::Socket, &buffer[..received.len]);
                said.map(|said| said.message).map_err(Error::Malformed)
            }
            Ok(_) => Err(Error::Closed),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(Error::Silent(self.patience)),
            Err(error) => Ok(Err(error).os("recvmsg")?),
        }
    }

    /// Asks a question and returns all messages of the answer.
    ///
    /// # Blocking
    /// Until the answer is complete, for each message as long as the broker may take.
    ///
    /// # Errors
    /// The broker refuses, sends too much, takes longer, is gone, or sends a message that cannot be decoded.
    pub fn ask(&self, message: Message) -> Result<Vec<Message>> {
        let mut answers = Vec::new();
        self.ask_for(message, ANSWERS_MAX, |answer| answers.push(answer))?;
        Ok(answers)
    }

    /// Asks for all rows of a kind, with as many questions as that takes, and hands each row to `take` (B-20).
    ///
    /// # Blocking
    /// Until all rows have come, for each message as long as the broker may take.
    ///
    /// # Errors
    /// The broker refuses, sends too much, takes longer, is gone, or sends a message that cannot be decoded. Earlier
    /// rows have been handed to `take`.
    pub fn gather_rows(&self, at: Seen, mut take: impl FnMut(Message)) -> Result<()> {
        let (mut after, mut room) = (0, ANSWERS_MAX);
        loop {
            let mut last = after;
            let said = self.ask_for(Message::Look { at, after }, room, |row| {
                // Ignores rows that came before, and messages that are no rows.
                let Some(at) = row_number(&row).filter(|at| *at > after) else { return };
                last = last.max(at);
                take(row);
            })?;
            if last == after {
                return Ok(());
            }
            (after, room) = (last, room - said);
        }
    }

    /// Asks a question and hands each message of the answer to `take`. Returns the number of messages, of which at most
    /// `room` are accepted.
    fn ask_for(&self, message: Message, room: usize, mut take: impl FnMut(Message)) -> Result<usize> {
        self.send_message(message)?;
        let mut said = 0;
        loop {
            match self.receive_message()? {
                Message::Done {} => return Ok(said),
                refuse @ Message::Refuse { .. } => return Err(unexpected(refuse)),
                _ if said == room => return Err(Error::TooMuch { most: ANSWERS_MAX }),
                message => take(message),
            }
            said += 1;
        }
    }
}

/// Returns the number of a row in its listing.
fn row_number(row: &Message) -> Option<u64> {
    match row {
        Message::CallRow { at, .. } | Message::ListenerRow { at, .. } | Message::Net { at, .. } => Some(*at),
        _ => None,
    }
}

/// Returns the broker's name of its domain from its Hello, if the broker speaks a version that this tool speaks (B-6).
pub(crate) fn name_in(hello: Message) -> Result<Name> {
    match hello {
        Message::Hello { version_min, version_max, name, .. } if (version_min..=version_max).contains(&VERSION) => {
            Ok(name)
        }
        Message::Hello { version_min: oldest, version_max: newest, .. } => Err(Error::Version { oldest, newest }),
        other => Err(Error::NoHello(Box::new(other))),
    }
}

/// Returns the name that a tool gives itself.
fn own_name() -> Name {
    "tombolo".parse().expect("a name")
}

/// Makes the error for a message that does not answer the question.
fn unexpected(message: Message) -> Error {
    match message {
        Message::Refuse { code, reason } => Error::Refused { code, why: reason.to_string() },
        other => Error::Unexpected(Box::new(other)),
    }
}

/// Returns the word for a domain's liveness: `running`, `paused`, `gone` or `unknown`.
#[must_use]
pub fn liveness_word(life: Life) -> &'static str {
    match life {
        Life::Unknown => "unknown",
        Life::Running => "running",
        Life::Paused => "paused",
        Life::DomainGone => "gone",
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    /// Returns the result of `ask` for a broker that answers with `says` of the numbers from 0 on, without end.
    fn asked_of_liar<T: Send + 'static>(
        says: impl Fn(u64) -> Message + Send + 'static,
        ask: impl FnOnce(&Broker) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let flags = SocketFlags::CLOEXEC;
        let (tool, liar) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        thread::spawn(move || {
            (0..).map(says).all(|message| {
                // The questions are read, so that there is room for others.
                while rustix::net::recv(&liar, &mut [0; MESSAGE_MAX], RecvFlags::DONTWAIT).is_ok_and(|(_, n)| n > 0) {}
                let bytes = Envelope { serial: 1, message }.encode();
                rustix::net::send(&liar, &bytes, SendFlags::NOSIGNAL).is_ok()
            })
        });
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            let patience = Duration::from_secs(20);
            let _ = tell.send(ask(&Broker { socket: tool, domain: own_name(), patience }));
        });
        told.recv_timeout(Duration::from_secs(60)).expect("the tool comes back")
    }

    #[test]
    fn b15_broker_that_never_comes_to_an_end_is_heard_up_to_a_bound() {
        let line = |_| Message::Line { line: "and so on".into() };
        let told = asked_of_liar(line, |broker| broker.ask(Message::List { what: tombolo_control::What::Links }));
        assert!(matches!(told, Err(Error::TooMuch { most: ANSWERS_MAX })), "{:?}", told.map(|rows| rows.len()));
    }

    /// Each of its answers is short, and more rows follow each.
    #[test]
    fn b20_broker_that_always_has_more_rows_is_asked_up_to_a_bound() {
        let row = |at| Message::ListenerRow { at, service: "log".parse().unwrap(), process: 1, user: 0 };
        let says = move |number| if number % 16 == 15 { Message::Done {} } else { row(1 + number) };
        let told = asked_of_liar(says, |broker| {
            let mut rows = 0;
            let said = broker.gather_rows(Seen::Listeners, |_| rows += 1);
            Ok((said.unwrap_err().to_string(), rows))
        });
        let (why, rows) = told.unwrap();
        assert_eq!(rows, ANSWERS_MAX, "{why}");
        assert_eq!(why, "the broker answers with more than 131072 messages: it is broken, restart it");
    }

    #[test]
    fn b15_broker_that_refuses_or_is_not_there_is_an_error_that_says_so() {
        let refused = |code| unexpected(Message::Refuse { code, reason: "not for you".into() }).to_string();
        assert_eq!(refused(tombolo_control::code::DENIED), "not for you");
        assert!(unexpected(Message::Done {}).to_string().starts_with("the broker answers with Done"));
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("none");
        let nobody = Broker::connect(&socket, Duration::from_secs(1)).unwrap_err().to_string();
        assert_eq!(nobody, format!("cannot open {} (is tombolod running, and may you use it?)", socket.display()));
    }
}
