// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer facade. Uses: channel, backends.
//!
//! Tombolo: communication through shared memory for programs in neighbouring virtual machines, containers and the host.
//!
//! Both sides map the memory into user space. Bytes cross without a system call, a packet, a checksum or a copy by a
//! third party. A program sends a notification only to a peer that has published that it is asleep.
//!
//! A [`Stream`] carries bytes both ways, and programs read and write it like a `TcpStream`. [`Messages`] carries whole
//! messages. The scheme of the address selects how the two endpoints meet: `local:NAME` or `local:/path/to/socket`
//! joins processes, containers and network namespaces of one kernel that share a folder. `xen:DOMID/NAME` joins this
//! Xen domain and the domain with that number. `vm:NAME/SERVICE` joins virtual machines under QEMU through the broker
//! (`tombolod`) of each, and Xen domains by the names that the broker of dom0 publishes. If this machine lacks
//! something that an address needs, the error names it.
//!
//! # Features
//! | feature | default | what it adds |
//! |---|---|---|
//! | `vm` | on | addresses `vm:`; without it [`Error::NotBuilt`] |
//! | `xen` | on | addresses `xen:`; with `vm` also `vm:` by names that dom0 publishes; without it [`Error::NotBuilt`] |
//! | `tokio` | off | the module `tokio`: streams, messages and listeners with `async` calls |
//!
//! Addresses `local:` are always supported. A backend whose feature is off is not compiled.
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
//! Limits: Tombolo does not encrypt (the two endpoints share memory that no third domain maps) and does not cross
//! hosts. It does not protect the content of a stream from the peer that writes it. A hostile or dead peer can end a
//! channel, and do nothing else.
#![forbid(unsafe_code)]

use tombolo_backends::backends;
#[cfg(feature = "tokio")]
pub use tombolo_channel::tokio;
pub use tombolo_channel::{
    Address, AddressError, BackendError, Channel, Corrupt, Counters, Deadline, Ending, Error, FlushPolicy, Listener,
    Liveness, MessageMode, MessageReceiver, MessageSender, Messages, Mode, Options, Peeked, Peer, PipeStatistics,
    ReadHalf, Refusal, Reserved, Result, RingBudget, RingChoice, RingGrowth, RingReason, Rx, SharedSlice, Statistics,
    Stream, StreamMode, Tx, Watch, WriteHalf,
};

/// Parses an address and checks that this program has its backend, as [`connect`] and [`listen`] do first.
///
/// # Errors
/// [`Error::Address`] where `text` is not an address; [`Error::UnknownScheme`]; [`Error::NotBuilt`].
///
/// # Example
/// ```
/// assert_eq!(tombolo::address("local:web")?.service(), "web");
/// assert!(tombolo::address("pigeon:web").is_err());
/// # Ok::<(), tombolo::Error>(())
/// ```
pub fn address(text: &str) -> Result<Address> {
    backends().address(text)
}

/// Connects to the listener at `address` for a stream of bytes, with the default [`Options`].
///
/// # Blocking
/// Blocks until the listener has answered, for at most 5 s. Fails at once where nobody listens; see
/// [`Options::wait_for_listener`].
///
/// # Errors
/// [`Error::Domain`] with [`BackendError::NotFound`] where nobody listens, or with another [`BackendError`] where the
/// backend fails; [`Error::Address`], [`Error::UnknownScheme`], [`Error::NotBuilt`]; [`Error::Refused`] and
/// [`Error::VersionMismatch`] where the listener does not agree; [`Error::TimedOut`].
///
/// # Example
/// ```
/// use std::io::Write;
///
/// # let folder = tempfile::tempdir()?;
/// # let address = format!("local:{}/log", folder.path().display());
/// # let mut listener = tombolo::listen(&address)?;
/// # let server = std::thread::spawn(move || listener.accept());
/// let mut stream = tombolo::connect(&address)?; // such as "local:log"
/// writeln!(stream, "started")?;
/// # drop(server.join());
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn connect(address: &str) -> Result<Stream> {
    connect_with(address, &Options::default())
}

/// Connects like [`connect`], for a [`Stream`] or [`Messages`], with options.
///
/// # Blocking
/// Waits first for a listener, for at most [`Options::wait_for_listener`]. Then blocks until the listener has answered,
/// for at most [`Options::handshake_timeout`].
///
/// # Errors
/// Those of [`connect`].
///
/// # Example
/// ```
/// use std::time::Duration;
/// use tombolo::{Messages, Options};
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let address = &format!("local:{}/jobs", folder.path().display());
/// let options = &Options::new().wait_for_listener(Duration::from_secs(10));
/// # std::thread::scope(|scope| -> tombolo::Result<()> {
/// # let server = scope.spawn(|| tombolo::listen_with::<Messages>(address, options)?.accept());
/// let mut jobs: Messages = tombolo::connect_with(address, options)?;
/// # drop(server.join());
/// # let _ = &mut jobs;
/// # Ok(()) })?;
/// # Ok::<(), tombolo::Error>(())
/// ```
pub fn connect_with<C: Channel>(address: &str, options: &Options) -> Result<C> {
    backends().connect(&address.parse()?, options)
}

/// Listens at `address` for streams of bytes, with the default [`Options`]. Never blocks.
///
/// # Errors
/// [`Error::Domain`] with [`BackendError::InUse`] where another program listens there, with [`BackendError::Denied`]
/// for a folder without permission, or with another [`BackendError`] where the backend fails; [`Error::Address`],
/// [`Error::UnknownScheme`], [`Error::NotBuilt`].
///
/// # Example
/// ```
/// # let folder = tempfile::tempdir()?;
/// # let address = &format!("local:{}/log", folder.path().display());
/// let mut listener = tombolo::listen(address)?; // such as "local:log"
/// assert!(listener.try_accept()?.is_none()); // nobody has connected
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn listen(address: &str) -> Result<Listener<Stream>> {
    listen_with(address, &Options::default())
}

/// Listens like [`listen`], for [`Stream`]s or [`Messages`], with options for each channel. Never blocks.
///
/// # Errors
/// Those of [`listen`].
///
/// # Example
/// ```
/// use tombolo::{Messages, Options};
///
/// # let folder = tempfile::tempdir()?;
/// # let address = &format!("local:{}/jobs", folder.path().display());
/// let listener = tombolo::listen_with::<Messages>(address, &Options::new().ring_size(4 << 20))?;
/// # drop(listener);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn listen_with<C: Channel>(address: &str, options: &Options) -> Result<Listener<C>> {
    backends().listen(&address.parse()?, options)
}

/// Runs the guide's examples as tests.
#[cfg(all(doctest, feature = "tokio"))]
#[doc = include_str!("../../../docs/guide/rust.md")]
struct Guide;
