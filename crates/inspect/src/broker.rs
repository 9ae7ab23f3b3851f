// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A tool's conversation with a broker: one question at a time, over a UNIX socket.

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
use tombolo_control::{Envelope, Life, MESSAGE_MAX, Message, Name, Path as Between, VERSION};
use tombolo_os::passing;

use crate::error::{Error, Os, Result};

/// Where the broker of a host answers administrators.
pub const ADMIN_SOCKET: &str = "/run/tombolo/tombolod.socket";
/// The socket of programs unless `TOMBOLO_BROKER` says otherwise.
const PROGRAMS_SOCKET: &str = "/run/tombolo/broker.sock";

/// Returns the socket at which the broker of this kernel answers programs: what `TOMBOLO_BROKER` names, or the usual one.
#[must_use]
pub fn programs_socket() -> PathBuf {
    let named = std::env::var_os("TOMBOLO_BROKER").filter(|path| !path.is_empty());
    named.map_or_else(|| PROGRAMS_SOCKET.into(), PathBuf::from)
}

/// A conversation with a broker.
#[derive(Debug)]
pub struct Broker {
    socket: OwnedFd,
    /// What it calls its domain, once it has answered Hello.
    domain: Name,
    /// How long it may take to answer.
    patience: Duration,
}

impl Broker {
    /// Reaches the broker at `path` and sends Hello, which it has not answered yet. It may take `patience` for each answer.
    ///
    /// # Errors
    /// Nobody is there, or this user may not ask.
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
    /// Nobody is there, or it does not greet this user.
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

    /// Returns what the broker calls its domain; before it has greeted, what this end calls itself.
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
    /// Until there is one, for the time that the broker may take.
    ///
    /// # Errors
    /// It takes longer, is gone, or is not understood.
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

    /// Asks a question and returns all that the broker answers.
    ///
    /// # Blocking
    /// Until it is done, for each answer as long as it may take.
    ///
    /// # Errors
    /// It refuses, takes longer, is gone, or is not understood.
    pub fn ask(&self, message: Message) -> Result<Vec<Message>> {
        self.send_message(message)?;
        let mut answers = Vec::new();
        loop {
            match self.receive_message()? {
                Message::Done {} => return Ok(answers),
                refuse @ Message::Refuse { .. } => return Err(unexpected(refuse)),
                message => answers.push(message),
            }
        }
    }
}

/// What the broker that says so calls its domain, if it speaks a version that this tool speaks (B-6).
pub(crate) fn name_in(hello: Message) -> Result<Name> {
    match hello {
        Message::Hello { version_min, version_max, name, .. } if (version_min..=version_max).contains(&VERSION) => {
            Ok(name)
        }
        Message::Hello { version_min: oldest, version_max: newest, .. } => Err(Error::Version { oldest, newest }),
        other => Err(Error::NoHello(Box::new(other))),
    }
}

/// What a tool calls itself.
fn own_name() -> Name {
    "tombolo".parse().expect("a name")
}

/// What the broker says instead of what was asked.
fn unexpected(message: Message) -> Error {
    match message {
        Message::Refuse { code, reason } => Error::Refused { code, why: reason.to_string() },
        other => Error::Unexpected(Box::new(other)),
    }
}

/// Returns the word for how a domain fares: `running`, `paused`, `gone` or `unknown`.
#[must_use]
pub fn life_name(life: Life) -> &'static str {
    match life {
        Life::Unknown => "unknown",
        Life::Running => "running",
        Life::Paused => "paused",
        Life::DomainGone => "gone",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
