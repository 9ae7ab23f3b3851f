// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the layout of Xen's libxenvchan on Xen's own memory and event channels.

use std::{
    io,
    os::fd::BorrowedFd,
    sync::{Arc, LazyLock},
    time::Duration,
};

use tombolo_domain_ivshmem::VmDomain;
#[cfg(feature = "testing")]
pub use tombolo_domain_xen::FakeXen;
use tombolo_domain_xen::{XenDomain, XenPieces, XenPort};
use tombolo_mem::CommonSegment;
use tombolo_vchan_wire::ground::{Event, Ground, Shared};
pub use tombolo_vchan_wire::{Error, Halves, Live, Reader, Result, Server, Watch, Writer};

static XEN: LazyLock<XenDomain> = LazyLock::new(XenDomain::new);

/// Makes a server at `path` in XenStore for a client in the domain `peer` that runs libxenvchan. Its rings have at
/// least `read_min` and `write_min` bytes.
///
/// # Errors
/// See [`Error`]: sizes beyond 1 MiB, and the system's errors.
pub fn serve(peer: u16, path: &str, read_min: usize, write_min: usize) -> Result<(Server, Halves)> {
    serve_in(&XEN, peer, path, read_min, write_min)
}

/// Connects to a server in the domain `peer` that runs libxenvchan. In `path`, `{self}` stands for this domain's
/// number.
///
/// # Errors
/// See [`Error`]: no server, and the system's errors.
pub fn join(peer: u16, path: &str) -> Result<Halves> {
    join_in(&XEN, peer, path)
}

/// Returns, off Xen, the number and the name of the domain to which the broker's configuration gives `number`, or of
/// this domain. Returns `None` if the configuration does not name it, or this domain has no link with it.
///
/// # Errors
/// If no broker runs here, or it does not answer.
pub fn named(number: Option<u16>) -> io::Result<Option<(u16, String)>> {
    let found = VmDomain::new().who(number).map_err(io)?;
    Ok(found.map(|(number, name)| (number, name.to_string())))
}

/// Returns whether there is a domain `peer`, of which nothing is mapped. Nothing else reports a domain that ended
/// before it came to its server, or without closing.
///
/// # Errors
/// The system's error.
pub fn is_there(peer: u16) -> io::Result<bool> {
    is_there_in(&XEN, peer)
}

/// Does the same as [`is_there`], in a domain of a Xen that a test provides.
///
/// # Errors
/// Those of [`is_there`].
pub fn is_there_in(domain: &XenDomain, peer: u16) -> io::Result<bool> {
    domain.pieces(peer).and_then(|pieces| pieces.peer_is_there()).map_err(io)
}

/// Returns whether the server that [`join`] found is still in XenStore. Its node goes with its domain.
///
/// # Errors
/// The system's error.
pub fn is_served(peer: u16, path: &str) -> io::Result<bool> {
    let ground = Xen(XEN.pieces(peer).map_err(io)?);
    tombolo_vchan_wire::is_served(&ground, &path.replace("{self}", &ground.0.own().to_string()))
}

/// Does the same as [`serve`], in a domain of a Xen that a test provides.
///
/// # Errors
/// Those of [`serve`].
pub fn serve_in(
    domain: &XenDomain,
    peer: u16,
    path: &str,
    read_min: usize,
    write_min: usize,
) -> Result<(Server, Halves)> {
    let ground = Xen(domain.pieces(peer).map_err(io)?);
    Server::new(Arc::new(ground), path, read_min, write_min)
}

/// Does the same as [`join`], in a domain of a Xen that a test provides.
///
/// # Errors
/// Those of [`join`].
pub fn join_in(domain: &XenDomain, peer: u16, path: &str) -> Result<Halves> {
    let ground = Xen(domain.pieces(peer).map_err(io)?);
    let path = path.replace("{self}", &ground.0.own().to_string());
    tombolo_vchan_wire::client(&ground, &path)
}

fn io(error: tombolo_domain::Error) -> io::Error {
    let error = tombolo_channel::Error::from(error);
    io::Error::new(error.kind(), error)
}

/// The path from one domain to another.
#[derive(Debug)]
struct Xen(XenPieces);

impl Ground for Xen {
    fn share(&self, pages: usize, when_gone: Option<(usize, u32)>) -> io::Result<(Vec<u32>, Arc<dyn Shared>)> {
        let (references, memory) = self.0.share(pages, when_gone).map_err(io)?;
        Ok((references, Arc::new(Memory(memory))))
    }

    fn map(&self, references: &[u32], write: bool, when_gone: Option<(usize, u32)>) -> io::Result<Arc<dyn Shared>> {
        Ok(Arc::new(Memory(self.0.join(references, write, when_gone).map_err(io)?)))
    }

    fn offer(&self) -> io::Result<Arc<dyn Event>> {
        Ok(Arc::new(Port(self.0.offer_port().map_err(io)?)))
    }

    fn bind(&self, port: u32) -> io::Result<Arc<dyn Event>> {
        Ok(Arc::new(Port(self.0.bind_port(port).map_err(io)?)))
    }

    fn publish(&self, path: &str, nodes: &[(&str, String)]) -> io::Result<()> {
        self.0.publish(path, nodes).map_err(io)
    }

    fn withdraw(&self, path: &str) {
        // A node that cannot be removed leads to a page that says that nobody is there.
        let _ = self.0.withdraw(path);
    }

    fn look_up(&self, path: &str, node: &str) -> io::Result<Option<String>> {
        self.0.look_up(path, node).map_err(io)
    }
}

#[derive(Debug)]
struct Memory(CommonSegment);

impl Shared for Memory {
    fn len(&self) -> usize {
        self.0.len()
    }
    #[inline]
    fn load8(&self, at: usize) -> u8 {
        self.0.load8(at)
    }
    #[inline]
    fn store8(&self, at: usize, value: u8) {
        self.0.store8(at, value);
    }
    #[inline]
    fn set_bits(&self, at: usize, bits: u8) -> u8 {
        self.0.set_bits(at, bits)
    }
    #[inline]
    fn clear_bits(&self, at: usize, bits: u8) -> u8 {
        self.0.clear_bits(at, bits)
    }
    #[inline]
    fn load32(&self, at: usize) -> u32 {
        self.0.load32(at)
    }
    #[inline]
    fn store32(&self, at: usize, value: u32) {
        self.0.store32(at, value);
    }
    #[inline]
    fn copy_in(&self, at: usize, from: &[u8]) {
        self.0.copy_in(at, from);
    }
    #[inline]
    fn copy_out(&self, at: usize, to: &mut [u8]) {
        self.0.copy_out(at, to);
    }
}

#[derive(Debug)]
struct Port(XenPort);

impl Event for Port {
    fn port(&self) -> u32 {
        self.0.number()
    }
    fn notify(&self) {
        self.0.notify();
    }
    fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }
    fn clear(&self) {
        self.0.clear();
    }
    fn wait(&self, limit: Duration) -> io::Result<()> {
        self.0.wait(limit)
    }
}
