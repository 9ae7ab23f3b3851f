// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Encodes and decodes the messages between agent and stand-in: frames of a length, a number and a body.

use std::{
    io::{self, Read, Write},
    time::Duration,
};

use tombolo_domain::{Deadline, Error, Liveness, Result, Slot, Woken};

/// Operation that the agent is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Op {
    Listen,
    Connect,
    Accept,
    Forget,
    Allocate,
    Retire,
    Quarantined,
    OutlivesOwner,
    Send,
    Recv,
    Readable,
    Doorbell,
    Life,
    Peer,
    SameKernel,
    Notify,
    Wait,
    Drain,
    Store,
    Load,
    Cast,
    Signal,
    End,
}

impl Op {
    const ALL: [Self; 23] = [
        Self::Listen,
        Self::Connect,
        Self::Accept,
        Self::Forget,
        Self::Allocate,
        Self::Retire,
        Self::Quarantined,
        Self::OutlivesOwner,
        Self::Send,
        Self::Recv,
        Self::Readable,
        Self::Doorbell,
        Self::Life,
        Self::Peer,
        Self::SameKernel,
        Self::Notify,
        Self::Wait,
        Self::Drain,
        Self::Store,
        Self::Load,
        Self::Cast,
        Self::Signal,
        Self::End,
    ];
}

/// Body that is being encoded.
#[derive(Debug, Default)]
pub(super) struct Body(Vec<u8>);

impl Body {
    pub(super) fn of(op: Op) -> Self {
        Self::default().byte(op as u8)
    }

    pub(super) fn byte(mut self, byte: u8) -> Self {
        self.0.push(byte);
        self
    }

    pub(super) fn number(mut self, number: u64) -> Self {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    pub(super) fn bytes(self, bytes: &[u8]) -> Self {
        let mut body = self.number(bytes.len() as u64);
        body.0.extend_from_slice(bytes);
        body
    }

    pub(super) fn slot(self, slot: Slot) -> Self {
        self.byte(slot.index() as u8)
    }

    /// Appends the time left, in microseconds: the two sides' clocks are unrelated.
    pub(super) fn deadline(self, deadline: Deadline) -> Self {
        let left = deadline.remaining().map_or(u64::MAX, |left| left.as_nanos().div_ceil(1000) as u64);
        self.number(left)
    }

    pub(super) fn woken(self, woken: Woken) -> Self {
        self.byte(match woken {
            Woken::Notified => 0,
            Woken::TimedOut => 1,
            Woken::PeerGone => 2,
        })
    }

    pub(super) fn life(self, life: Liveness) -> Self {
        self.byte(match life {
            Liveness::Running => 0,
            Liveness::Paused => 1,
            Liveness::ProcessGone => 2,
            Liveness::DomainGone => 3,
            Liveness::Revoked => 4,
            Liveness::Unknown => 5,
            other => unreachable!("{other:?} has no number yet: give it one here and in `Parts::life`"),
        })
    }

    /// Returns an answer: the result, or the error.
    pub(super) fn answer(done: Result<Self>) -> Self {
        match done {
            Ok(Self(bytes)) => Self([&[0], bytes.as_slice()].concat()),
            Err(error) => {
                let (code, first, second) = match &error {
                    Error::BadService { service, why } => (1, service.clone(), (*why).into()),
                    Error::NotFound(what) => (2, what.clone(), String::new()),
                    Error::InUse(what) => (3, what.clone(), String::new()),
                    Error::Denied(what) => (4, what.clone(), String::new()),
                    Error::TimedOut => (5, String::new(), String::new()),
                    Error::PeerGone => (6, String::new(), String::new()),
                    Error::Malformed { clause, what } => (7, (*clause).into(), what.clone()),
                    Error::Limit { what, remedy } => (8, (*what).into(), (*remedy).into()),
                    Error::Revoked => (9, String::new(), String::new()),
                    Error::Quota(what) => (11, what.clone(), String::new()),
                    Error::Crowded(why) => (12, (*why).into(), String::new()),
                    // An error of the system, and any error without a number yet, arrives as text.
                    _ => (10, format!("{error}: {:?}", std::error::Error::source(&error)), String::new()),
                };
                Self::default().byte(code).bytes(first.as_bytes()).bytes(second.as_bytes())
            }
        }
    }

    /// Sends the body under `number`.
    pub(super) fn send(&self, number: u64, to: &mut impl Write) -> io::Result<()> {
        let len = (self.0.len() + 8) as u32;
        to.write_all(&[&len.to_le_bytes(), number.to_le_bytes().as_slice(), &self.0].concat())?;
        to.flush()
    }
}

/// Body that is being decoded.
#[derive(Debug)]
pub(super) struct Parts {
    bytes: Vec<u8>,
    at: usize,
}

impl Parts {
    /// Returns the next frame's number and body.
    pub(super) fn receive(from: &mut impl Read) -> io::Result<(u64, Self)> {
        let (mut len, mut number) = ([0; 4], [0; 8]);
        from.read_exact(&mut len)?;
        from.read_exact(&mut number)?;
        let mut bytes = vec![0; u32::from_le_bytes(len) as usize - 8];
        from.read_exact(&mut bytes)?;
        Ok((u64::from_le_bytes(number), Self { bytes, at: 0 }))
    }

    fn take_bytes(&mut self, len: usize) -> &[u8] {
        let taken = &self.bytes[self.at..self.at + len];
        self.at += len;
        taken
    }

    pub(super) fn byte(&mut self) -> u8 {
        self.take_bytes(1)[0]
    }

    pub(super) fn number(&mut self) -> u64 {
        u64::from_le_bytes(self.take_bytes(8).try_into().expect("eight bytes"))
    }

    pub(super) fn bytes(&mut self) -> Vec<u8> {
        let len = self.number() as usize;
        self.take_bytes(len).to_vec()
    }

    pub(super) fn text(&mut self) -> String {
        String::from_utf8(self.bytes()).expect("text is UTF-8")
    }

    pub(super) fn op(&mut self) -> Op {
        Op::ALL[usize::from(self.byte())]
    }

    pub(super) fn slot(&mut self) -> Slot {
        Slot::ALL[usize::from(self.byte())]
    }

    pub(super) fn deadline(&mut self) -> Deadline {
        match self.number() {
            u64::MAX => Deadline::NEVER,
            left => Deadline::after(Duration::from_micros(left)),
        }
    }

    pub(super) fn woken(&mut self) -> Woken {
        [Woken::Notified, Woken::TimedOut, Woken::PeerGone][usize::from(self.byte())]
    }

    pub(super) fn life(&mut self) -> Liveness {
        let all = [
            Liveness::Running,
            Liveness::Paused,
            Liveness::ProcessGone,
            Liveness::DomainGone,
            Liveness::Revoked,
            Liveness::Unknown,
        ];
        all[usize::from(self.byte())]
    }

    /// Returns the result or error of an answer, see [`Body::answer`].
    pub(super) fn answer(mut self) -> Result<Self> {
        let code = self.byte();
        if code == 0 {
            return Ok(self);
        }
        let (first, second) = (self.text(), self.text());
        // A test has few errors, so their fixed texts may be leaked.
        let fixed = |text: String| -> &'static str { text.leak() };
        Err(match code {
            1 => Error::BadService { service: first, why: fixed(second) },
            2 => Error::NotFound(first),
            3 => Error::InUse(first),
            4 => Error::Denied(first),
            5 => Error::TimedOut,
            6 => Error::PeerGone,
            7 => Error::Malformed { clause: fixed(first), what: second },
            8 => Error::Limit { what: fixed(first), remedy: fixed(second) },
            9 => Error::Revoked,
            11 => Error::Quota(first),
            12 => Error::Crowded(fixed(first)),
            _ => Error::Os { call: "a call on the other side", path: None, source: io::Error::other(first) },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_op_is_where_its_number_says() {
        for (index, op) in Op::ALL.into_iter().enumerate() {
            assert_eq!(op as usize, index);
        }
    }

    #[test]
    fn error_arrives_as_it_was() {
        let errors = [
            Error::BadService { service: "x".into(), why: "y" },
            Error::NotFound("x".into()),
            Error::InUse("x".into()),
            Error::Denied("x".into()),
            Error::TimedOut,
            Error::PeerGone,
            Error::Malformed { clause: "X-1", what: "y".into() },
            Error::Limit { what: "x", remedy: "y" },
            Error::Revoked,
            Error::Quota("x".into()),
        ];
        for error in errors {
            let said = format!("{error:?}");
            let mut frame = Vec::new();
            Body::answer(Err(error)).send(7, &mut frame).expect("a vector takes everything");
            let (number, parts) = Parts::receive(&mut frame.as_slice()).expect("whole");
            assert_eq!((number, format!("{:?}", parts.answer().expect_err("an error"))), (7, said));
        }
    }
}
