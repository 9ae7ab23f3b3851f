// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the daemon in a virtual machine.

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::PermissionsExt,
    },
    path::Path,
};

use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd},
};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tombolo_sockets::hook;

use crate::{
    endpoint::{
        broker::{Broker, Settings},
        module::Machine,
    },
    startup::{open_folder, raise_limit},
};

/// Name of the socket for programs, in the broker's folder.
pub const SOCKET: &str = "broker.sock";
/// Size of a connection's window in bytes: a ring of the usual size, and room to exchange it for another (B-14).
pub const WINDOW: u64 = 2 << 20;
/// Largest number of programs that wait to be accepted while the broker is busy.
const BACKLOG: i32 = 128;

/// Serves programs at [`SOCKET`] in `folder` until a signal arrives. `window` is the size of a connection's window in
/// bytes. With `hook` the kernel tells programs the sequence numbers of their connections, with which they prove
/// themselves to programs of other machines (S-6).
///
/// # Errors
/// The broker cannot start, or something on which it depends is gone.
pub fn run(folder: &Path, window: u64, hook: bool) -> io::Result<()> {
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    signals.thread_block()?;
    let stop = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC)?;
    raise_limit()?;
    // The module gives the host's page to one broker only, so that broker may replace the socket.
    let machine = Machine::begin()?;
    open_folder(folder)?;
    let path = folder.join(SOCKET);
    let broker =
        Broker::begin(Settings { boot: boot()?, window }, machine, listen_for_programs(&path)?)?.with_addresses();
    if hook {
        attach_hook();
    }
    tracing::info!("serves programs at {}", path.display());
    let ended = broker.run(stop.as_fd());
    let _ = std::fs::remove_file(&path);
    ended
}

/// Attaches the hook. Without it programs go on over TCP, as before. The hook outlives this broker, as do the programs
/// it serves.
pub(crate) fn attach_hook() {
    let attached =
        hook::find_root().ok_or_else(|| io::Error::other("no cgroup version 2")).and_then(|it| hook::attach(&it));
    match attached {
        Ok(true) => tracing::info!("attached what tells programs their connections' sequence numbers"),
        Ok(false) => {}
        Err(error) => {
            tracing::warn!("programs' TCP connections with other machines stay on TCP: no sequence numbers: {error}");
        }
    }
}

/// Makes the listening socket. All users of the machine may connect; the kernel reports who they are (B-15).
fn listen_for_programs(path: &Path) -> io::Result<OwnedFd> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&listener, &SocketAddrUnix::new(path)?)?;
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o666))?;
    rustix::net::listen(&listener, BACKLOG)?;
    Ok(listener)
}

/// Reads the identifier that the kernel gave this boot (B-6).
fn boot() -> io::Result<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).map(u128::to_be_bytes).map_err(io::Error::other)
}
