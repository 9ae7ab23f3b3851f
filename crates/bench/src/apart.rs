// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Measures between two machines: the right endpoint serves, the left endpoint is the driver's.
//!
//! The driver makes two TCP connections, one for its orders and one for the control pipe between the workers. They
//! become the standard input and output of a worker on the other machine, as the sockets of a pair do on this one.
//! Anyone who reaches the address may order measurements, so it belongs on a private network.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::error::{Error, Os, Result};
use crate::scratch::Scratch;
use crate::worker::ARGUMENT;

/// First byte of a connection, which tells its purpose.
const ORDERS: u8 = b'O';
const CORD: u8 = b'C';
/// Time that a connection may take to be established.
const LIMIT: Duration = Duration::from_secs(30);

/// The other machine, and the way of a channel to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Address where it serves.
    pub address: SocketAddr,
    /// Prefix of the service in Tombolo's addresses on this machine, such as `xen:2`.
    pub channels: Option<String>,
}

impl Peer {
    /// Finds the address of `host`, a name and a port.
    ///
    /// # Errors
    /// [`Error::Usage`] if it has none.
    pub fn new(host: &str, channels: Option<String>) -> Result<Self> {
        let mut found = host.to_socket_addrs().map_err(|e| Error::Usage(format!("{host:?} is no HOST:PORT: {e}")))?;
        let address = found.next().ok_or_else(|| Error::Usage(format!("{host:?} has no address")))?;
        Ok(Self { address, channels })
    }

    /// Returns both connections to a fresh worker on the other machine: for orders, and for the control pipe.
    pub(crate) fn reach(&self) -> Result<[OwnedFd; 2]> {
        let connect = |kind| -> Result<OwnedFd> {
            let mut stream = TcpStream::connect_timeout(&self.address, LIMIT).os("connecting to the other machine")?;
            stream.set_nodelay(true).os("setting TCP_NODELAY")?;
            stream.write_all(&[kind]).os("writing to the other machine")?;
            Ok(stream.into())
        };
        Ok([connect(ORDERS)?, connect(CORD)?])
    }
}

/// Serves as the right endpoint, one driver after another. `channels` is the prefix of the service in the addresses of
/// Tombolo's listeners; `heard` is called with the address of the listener.
///
/// # Blocking
/// For ever.
///
/// # Errors
/// The address is not available.
pub(crate) fn serve(host: &str, channels: Option<&str>, heard: impl FnOnce(SocketAddr)) -> Result<()> {
    let listener = TcpListener::bind(host).os("listening for a driver")?;
    heard(listener.local_addr().os("getsockname")?);
    loop {
        let worked = accept(&listener, ORDERS)
            .and_then(|orders| Ok((orders, accept(&listener, CORD)?)))
            .and_then(|(orders, cord)| work(orders, cord, channels));
        if let Err(e) = worked {
            eprintln!("bench: {}", crate::worker::chain(&e));
        }
    }
}

/// Accepts the next connection, which has to be of that kind.
fn accept(listener: &TcpListener, kind: u8) -> Result<OwnedFd> {
    let (mut stream, from) = listener.accept().os("accept")?;
    stream.set_nodelay(true).os("setting TCP_NODELAY")?;
    stream.set_read_timeout(Some(LIMIT)).os("setting a time limit")?;
    let mut said = [0];
    stream.read_exact(&mut said).os("waiting for a driver")?;
    stream.set_read_timeout(None).os("setting a time limit")?;
    if said == [kind] { Ok(stream.into()) } else { Err(Error::Worker(format!("{from} is no driver, or a third"))) }
}

/// Starts a worker on two connections, and waits until its driver is gone.
fn work(orders: OwnedFd, cord: OwnedFd, channels: Option<&str>) -> Result<()> {
    let scratch = Scratch::new()?;
    let program = std::env::current_exe().os("finding this program")?;
    let mut command = Command::new(program);
    command.args([ARGUMENT, "right"]).arg(scratch.path()).arg(channels.unwrap_or_default());
    command.stdin(orders).stdout(cord).stderr(Stdio::inherit()).status().os("starting a worker")?;
    Ok(())
}
