// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connects to peers that run the original, by the original's layout.

use std::{io, os::fd::BorrowedFd};

use tombolo_backends::vchan::{Error, Live, Reader, Watch, Writer};

use crate::{
    border::{Fault, Outcome},
    place::Role,
    side::{Incoming, Outgoing},
    vchan::{Halves, Vchan},
};

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        let errno = match &error {
            Error::Corrupt { .. } => libc::EPROTO,
            Error::Closed => libc::EPIPE,
            Error::TooLarge { .. } => libc::EMSGSIZE,
            Error::Sizes { .. } => libc::EINVAL,
            Error::NotFound(_) => libc::ENOENT,
            Error::Busy(_) => libc::EBUSY,
            Error::Ground(error) => {
                let ours = error.get_ref().and_then(|inner| inner.downcast_ref::<tombolo::Error>());
                ours.map_or(error.raw_os_error(), |ours| Some(ours.errno())).unwrap_or(libc::EIO)
            }
            _ => libc::EIO,
        };
        let mut text = error.to_string();
        let mut next: &dyn std::error::Error = &error;
        while let Some(source) = next.source() {
            text = format!("{text}: {source}");
            next = source;
        }
        Self::with(errno, text)
    }
}

impl Incoming for Reader {
    fn read_at_once(&mut self, to: &mut [u8], whole: bool) -> usize {
        Reader::read_at_once(self, to, whole)
    }

    fn read(&mut self, to: &mut [u8]) -> Outcome<Option<usize>> {
        match Reader::read(self, to)? {
            0 => {}
            len => return Ok(Some(len)),
        }
        // The bytes that the peer wrote before it went are there.
        if self.live() == Live::Gone { Ok(Some(Reader::read(self, to)?)) } else { Ok(None) }
    }

    fn available(&mut self, need: usize) -> Outcome<usize> {
        Ok(Reader::available(self, need)?)
    }

    fn wait_for(&mut self, need: usize) -> Outcome<usize> {
        Ok(Reader::wait_for(self, need)?)
    }

    fn is_last(&mut self) -> Outcome<bool> {
        Ok(self.live() == Live::Gone)
    }

    fn end(&self) -> Fault {
        if Reader::watch(self).is_lost() {
            return Fault::new(libc::ECONNRESET, "the other end's domain is gone");
        }
        Error::Closed.into()
    }

    fn watch(&self) -> Option<Watch> {
        Some(Reader::watch(self))
    }

    fn capacity(&self) -> usize {
        Reader::capacity(self)
    }

    fn fd(&self) -> Outcome<BorrowedFd<'_>> {
        Ok(Reader::fd(self))
    }
}

impl Outgoing for Writer {
    fn write_at_once(&mut self, bytes: &[u8]) -> bool {
        Writer::write_at_once(self, bytes)
    }

    fn write(&mut self, bytes: &[u8]) -> Outcome<Option<usize>> {
        Ok(Some(Writer::write(self, bytes)?).filter(|len| *len > 0))
    }

    fn fits(&mut self, need: usize) -> Outcome<bool> {
        Ok(self.room(need)? >= need)
    }

    fn wait_for(&mut self, need: usize) -> Outcome<()> {
        Ok(Writer::wait_for(self, need)?)
    }

    fn room(&mut self, need: usize) -> Outcome<usize> {
        Ok(Writer::room(self, need)?)
    }

    fn capacity(&self) -> usize {
        Writer::capacity(self)
    }

    fn fd(&self) -> Outcome<BorrowedFd<'_>> {
        Ok(Writer::fd(self))
    }
}

fn boxed((reader, writer): (Reader, Writer)) -> Halves {
    (Box::new(reader), Box::new(writer))
}

/// Returns a server whose client runs the original.
pub(crate) fn serve(peer: u16, path: &str, read_min: usize, write_min: usize) -> Outcome<Vchan> {
    let (server, halves) = world::serve(peer, path, read_min, write_min)?;
    let vchan = Vchan::new(Role::Server, halves.0.capacity(), halves.1.capacity())?;
    vchan.0.peer.store_server(server);
    vchan.0.arrival.deliver(Ok(boxed(halves)), &vchan.0.poll_descriptor);
    vchan.0.meet()?;
    Ok(vchan)
}

/// Returns whether Xen has a domain `peer`.
pub(crate) fn is_there(peer: u16) -> io::Result<bool> {
    world::is_there(peer)
}

/// Returns whether the server to which a client came is still in XenStore.
pub(crate) fn is_served(peer: u16, path: &str) -> io::Result<bool> {
    world::is_served(peer, path)
}

/// Connects to a server that runs the original.
pub(crate) fn meet(peer: u16, path: &str) -> Outcome<Halves> {
    Ok(boxed(world::join(peer, path)?))
}

#[cfg(not(feature = "testing"))]
mod world {
    pub(super) use tombolo_backends::vchan::{is_served, is_there, join, serve};
}

/// Two domains of a fake Xen in this process, for tests: a server is in domain 5, a client in domain 7.
#[cfg(feature = "testing")]
pub(crate) mod world {
    use std::{io, sync::LazyLock};

    use tombolo_backends::vchan::{FakeXen, Halves, Result, Server, is_there_in, join_in, serve_in};

    use crate::place::key;

    pub(crate) static XEN: LazyLock<FakeXen> = LazyLock::new(FakeXen::new);

    pub(super) fn serve(_: u16, path: &str, read_min: usize, write_min: usize) -> Result<(Server, Halves)> {
        let path = format!("data/vchan/7/{}", key(path).expect("checked before"));
        serve_in(&XEN.domain(5), 7, &path, read_min, write_min)
    }

    pub(super) fn is_there(peer: u16) -> io::Result<bool> {
        is_there_in(&XEN.domain(5), peer)
    }

    /// Returns `true`: domain 5 is not destroyed in tests.
    pub(super) fn is_served(_: u16, _: &str) -> io::Result<bool> {
        Ok(true)
    }

    pub(super) fn join(_: u16, path: &str) -> Result<Halves> {
        let path = format!("/local/domain/5/data/vchan/{{self}}/{}", key(path).expect("checked before"));
        join_in(&XEN.domain(7), 5, &path)
    }
}
