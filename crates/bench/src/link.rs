// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The control pipe between the two workers of a pair: carries short texts, descriptors and barriers.
//!
//! It is used to set a measurement up, never while one runs.

use std::io::{IoSlice, Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{RecvFlags, SendFlags};
use tombolo_os::passing;

use crate::error::{Error, Os, Result};

/// One worker's side of the control pipe.
pub struct ControlPipe(UnixStream);

impl ControlPipe {
    /// Takes a connected UNIX stream socket over; no operation on it waits for longer than `limit`.
    ///
    /// # Errors
    /// [`Error::Os`] if the socket refuses time limits.
    pub fn new(socket: UnixStream, limit: Duration) -> Result<Self> {
        socket.set_read_timeout(Some(limit)).os("setting the link's read time limit")?;
        socket.set_write_timeout(Some(limit)).os("setting the link's write time limit")?;
        Ok(Self(socket))
    }

    /// Sends a text of up to 64 KiB to the other worker.
    ///
    /// # Errors
    /// [`Error::Os`] if the other worker is gone or does not listen.
    pub fn send_line(&self, text: &str) -> Result<()> {
        let length = u16::try_from(text.len())
            .map_err(|_| Error::Worker(format!("{} bytes are too long for the link", text.len())))?;
        Ok((&self.0).write_all(&[&length.to_le_bytes(), text.as_bytes()].concat()).os("writing to the other worker")?)
    }

    /// Receives the next text from the other worker.
    ///
    /// # Errors
    /// [`Error::Os`] if the other worker is gone or silent.
    pub fn receive_line(&self) -> Result<String> {
        let mut length = [0; 2];
        (&self.0).read_exact(&mut length).os("waiting for the other worker")?;
        let mut text = vec![0; u16::from_le_bytes(length).into()];
        (&self.0).read_exact(&mut text).os("waiting for the other worker")?;
        String::from_utf8(text).map_err(|_| Error::Worker("the other worker talks nonsense".into()))
    }

    /// Blocks until the other worker has called it too.
    ///
    /// # Errors
    /// The same as [`ControlPipe::receive_line`].
    pub fn meet(&self) -> Result<()> {
        self.send_line("meet")?;
        match self.receive_line()?.as_str() {
            "meet" => Ok(()),
            other => Err(Error::Worker(format!("the other worker said {other:?} at a meeting"))),
        }
    }

    /// Passes a descriptor to the other worker.
    ///
    /// # Errors
    /// [`Error::Os`] if the other worker is gone.
    pub fn pass(&self, fd: BorrowedFd<'_>) -> Result<()> {
        Ok(passing::send(&self.0, &[IoSlice::new(b"F")], &[fd], SendFlags::empty())
            .map(drop)
            .os("passing a descriptor")?)
    }

    /// Receives the descriptor that the other worker passes.
    ///
    /// # Errors
    /// [`Error::Os`] if the other worker is gone, [`Error::Worker`] if it passed none.
    pub fn receive_descriptor(&self) -> Result<OwnedFd> {
        let received = passing::receive(&self.0, &mut [0], 1, RecvFlags::empty()).os("taking a descriptor")?;
        let first = received.descriptors.into_iter().next();
        first.ok_or_else(|| Error::Worker("the other worker passed no descriptor".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn links() -> (ControlPipe, ControlPipe) {
        let (a, b) = UnixStream::pair().unwrap();
        (
            ControlPipe::new(a, Duration::from_millis(50)).unwrap(),
            ControlPipe::new(b, Duration::from_millis(50)).unwrap(),
        )
    }

    #[test]
    fn link_texts_and_descriptors_arrive_in_order() {
        let (a, b) = links();
        let (rx, tx) = rustix::pipe::pipe().unwrap();
        a.send_line("address").unwrap();
        a.pass(tx.as_fd()).unwrap();
        a.send_line("").unwrap();
        assert_eq!(b.receive_line().unwrap(), "address");
        rustix::io::write(b.receive_descriptor().unwrap(), b"through").unwrap();
        assert_eq!(b.receive_line().unwrap(), "");
        let mut buf = [0; 16];
        assert_eq!(rustix::io::read(&rx, &mut buf).unwrap(), 7);
    }

    #[test]
    fn link_silent_peer_ends_at_the_limit() {
        let (a, _b) = links();
        assert!(matches!(a.receive_line(), Err(Error::Os(_))));
    }
}
