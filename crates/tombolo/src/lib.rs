// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer facade. Uses: channel, sockets, vchan-wire, domain, domain-ivshmem, domain-local, domain-xen, mem.
//!
//! Tombolo: programs in neighbouring virtual machines, containers and the host talk through memory that both sides map
//! into user space. Bytes cross without a system call, a packet, a checksum or a copy by a third party; a notification
//! is sent only to a peer that has said it is asleep.
//!
//! A [`Stream`] carries bytes both ways and reads and writes like a `TcpStream`; [`Messages`] carries whole messages.
//! The address says how the two ends meet: `local:NAME` or `local:/path/to/socket` joins processes, containers and
//! network namespaces of one kernel that share a folder; `xen:DOMID/NAME` joins this Xen domain and the one with that
//! number; `vm:NAME/SERVICE` joins virtual machines under QEMU, through the broker (`tombolod`) of each, and Xen domains by
//! the names that the broker of dom0 tells. What this machine lacks for an address, the error says.
//!
//! # Example
//! ```
//! use std::{io::{Read, Write}, thread};
//!
//! # let folder = tempfile::tempdir()?;
//! # let address = &format!("local:{}/greetings", folder.path().display());
//! let mut listener = tombolo::listen(address)?;
//! thread::scope(|scope| -> std::io::Result<()> {
//!     scope.spawn(|| -> std::io::Result<()> {
//!         let mut stream = tombolo::connect(address)?;
//!         stream.write_all(b"hello, neighbour")
//!     });
//!     let mut greeting = String::new();
//!     listener.accept()?.read_to_string(&mut greeting)?;
//!     assert_eq!(greeting, "hello, neighbour");
//!     Ok(())
//! })?;
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! Messages, with a deadline and a larger ring:
//! ```
//! use std::time::Duration;
//! use tombolo::{Deadline, Messages, Options};
//!
//! # let folder = tempfile::tempdir()?;
//! # let address = &format!("local:{}/jobs", folder.path().display());
//! let options = Options::new().ring_size(4 << 20);
//! let mut listener = tombolo::listen_with::<Messages>(address, &options)?;
//! # std::thread::scope(|scope| -> tombolo::Result<()> {
//! #     let options = &options;
//! #     scope.spawn(move || tombolo::connect_with::<Messages>(address, options).unwrap().send(b"job 1").unwrap());
//! let (mut replies, mut jobs) = listener.accept()?.into_split();
//! let mut job = [0; 64];
//! let len = jobs.recv_until(&mut job, Deadline::after(Duration::from_secs(5)))?.expect("one job");
//! assert_eq!(&job[..len], b"job 1");
//! # let _ = &mut replies;
//! #     Ok(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! What it does not do: it does not encrypt (the two ends share memory that no third domain maps), does not cross
//! hosts, and does not protect a stream's content from the peer that writes it; a peer that lies or dies can end a
//! channel, and nothing else.
#![forbid(unsafe_code)]

pub mod vchan;
mod vm;

use std::sync::LazyLock;

pub use tombolo_channel::*;
use tombolo_domain_ivshmem::VmDomain;
use tombolo_domain_local::LocalDomain;
pub use tombolo_domain_local::services_folder;
use tombolo_domain_xen::XenDomain;

use crate::vm::Vm;

/// The backends of this program, by the scheme of their addresses: `local`, `vm` and `xen`. One that this machine does not
/// have says what is missing when it is called.
static BACKENDS: LazyLock<Backends> = LazyLock::new(|| {
    let xen = XenDomain::new();
    let vm = Vm::new(VmDomain::new(), xen.names());
    Backends::new().with(LocalDomain::new()).with(vm).with(xen)
});

/// TCP connections whose bytes go through shared memory: for fronts that stand in a program's way to the kernel.
pub mod sockets {
    pub use tombolo_sockets::*;

    /// Meets other processes of this kernel in `folder`.
    #[must_use]
    pub fn rendezvous_in(folder: &std::path::Path) -> Box<dyn Rendezvous> {
        Box::new(super::LocalDomain::in_folder(folder).with_unique_names())
    }
}

/// This domain of Xen's, for tools that look what works.
pub mod xen {
    use super::XenDomain;
    use tombolo_channel::Result;
    pub use tombolo_domain_xen::{OrphanedGrants, ReaperListing};

    /// The listeners that this domain's nodes in XenStore lead to: for which domain, under which name, and the reference of the
    /// door.
    ///
    /// # Errors
    /// Where this is no domain of Xen's; what XenStore says.
    pub fn listeners() -> Result<Vec<(u16, String, u32)>> {
        Ok(XenDomain::new().listeners()?)
    }

    /// Asks XenStore for this domain's number, grants a page, makes an event channel; page and channel are given back.
    ///
    /// # Errors
    /// What of it does not work, and what mends it.
    pub fn try_out() -> Result<u16> {
        // To dom0, which is always there; it is not told.
        let pieces = XenDomain::new().pieces(0)?;
        pieces.share(1, None)?;
        pieces.offer_port()?;
        Ok(pieces.own())
    }
}

/// The address that `text` says, if there is a backend for it: what [`connect`] and [`listen`] do first.
///
/// # Errors
/// [`Error::Address`] where it is none; [`Error::UnknownScheme`].
///
/// # Example
/// ```
/// assert_eq!(tombolo::address("local:web")?.service(), "web");
/// assert!(tombolo::address("pigeon:web").is_err());
/// # Ok::<(), tombolo::Error>(())
/// ```
pub fn address(text: &str) -> Result<Address> {
    BACKENDS.address(text)
}

/// Reaches the listener at `address` for a stream of bytes, with the default [`Options`].
///
/// # Blocking
/// Until the listener has answered, 5 s at most. If nobody listens, fails at once; see
/// [`Options::wait_for_listener`].
///
/// # Errors
/// See [`Error`]; it converts into [`std::io::Error`].
pub fn connect(address: &str) -> Result<Stream> {
    connect_with(address, &Options::default())
}

/// As [`connect`], for a [`Stream`] or [`Messages`], with options.
///
/// # Errors
/// As [`connect`].
pub fn connect_with<C: Channel>(address: &str, options: &Options) -> Result<C> {
    BACKENDS.connect(&address.parse()?, options)
}

/// Begins to listen at `address` for streams of bytes, with the default [`Options`].
///
/// # Errors
/// See [`Error`]: a bad address, one in use, a folder without permission.
pub fn listen(address: &str) -> Result<Listener<Stream>> {
    listen_with(address, &Options::default())
}

/// As [`listen`], for [`Stream`]s or [`Messages`], with options.
///
/// # Errors
/// As [`listen`].
pub fn listen_with<C: Channel>(address: &str, options: &Options) -> Result<Listener<C>> {
    BACKENDS.listen(&address.parse()?, options)
}

/// The guide's examples run as tests.
#[cfg(all(doctest, feature = "tokio"))]
#[doc = include_str!("../../../docs/guide/rust.md")]
struct Guide;
