// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon in a virtual machine, from its start to its end.

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    },
    path::Path,
};

use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd},
};
use rustix::{
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
    process::{Resource, Rlimit},
};

use crate::{
    broker::{Broker, Settings},
    machine::Machine,
};

/// The socket for programs, in the broker's folder.
pub const SOCKET: &str = "broker.sock";
/// B-14. Bytes of a slice: a ring of the usual size, and room to exchange it for another.
pub const SLICE: u64 = 2 << 20;
/// Programs that connect while the broker is busy.
const BACKLOG: i32 = 128;

/// Serves programs at [`SOCKET`] in `folder` until a signal says to end. `slice` is what a program gets for a call.
///
/// # Errors
/// It cannot begin, or what it depends on is gone.
pub fn run(folder: &Path, slice: u64) -> io::Result<()> {
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    signals.thread_block()?;
    let stop = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC)?;
    raise_limit()?;
    // The module gives the host's page to one broker, so whoever has it may take the socket's place.
    let machine = Machine::begin()?;
    open_folder(folder)?;
    let path = folder.join(SOCKET);
    let broker = Broker::begin(Settings { boot: boot()?, slice }, machine, open_door(&path)?)?;
    crate::log(&format!("serves programs at {}", path.display()));
    let ended = broker.run(stop.as_fd());
    let _ = std::fs::remove_file(&path);
    ended
}

/// Makes the folder for sockets and state. Others may pass through it to the sockets that are theirs, and not look.
///
/// # Errors
/// There can be none, or others could put into it what they like.
pub fn open_folder(folder: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o711).create(folder)?;
    let (itself, behind) = (std::fs::symlink_metadata(folder)?, std::fs::metadata(folder)?);
    let own = rustix::process::geteuid().as_raw();
    let whose = [itself.uid(), behind.uid()].into_iter().find(|user| *user != own && *user != 0);
    let why = match whose {
        Some(user) => format!("it belongs to user {user}"),
        None if behind.mode() & 0o002 != 0 => "everybody may write into it".into(),
        None => {
            let mut permissions = behind.permissions();
            permissions.set_mode(permissions.mode() | 0o011);
            // Root's folder, used by another user's broker, is as root made it.
            return if behind.uid() == own { std::fs::set_permissions(folder, permissions) } else { Ok(()) };
        }
    };
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!(
            "{} is not to be trusted: {why}; remove it, or say with --state where else to keep things",
            folder.display()
        ),
    ))
}

/// The listening socket. All users of the machine may connect; what the kernel says of them is what counts (B-15).
fn open_door(path: &Path) -> io::Result<OwnedFd> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let door = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&door, &SocketAddrUnix::new(path)?)?;
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o666))?;
    rustix::net::listen(&door, BACKLOG)?;
    Ok(door)
}

/// As many files as this process may have: each call takes some.
///
/// # Errors
/// The kernel refuses what it allows.
pub fn raise_limit() -> io::Result<()> {
    let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
    Ok(rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

/// B-6. What the kernel calls this boot.
fn boot() -> io::Result<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).map(u128::to_be_bytes).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b16_folder_in_which_others_could_put_things_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("state");
        open_folder(&folder).unwrap();
        open_folder(&folder).unwrap();
        let link = parent.path().join("link");
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        open_folder(&link).unwrap();
        let refused = |path: &Path, why: &str| {
            let error = open_folder(path).unwrap_err();
            assert!(error.kind() == io::ErrorKind::PermissionDenied && error.to_string().contains(why), "{error}");
        };
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o1777)).unwrap();
        refused(&folder, "everybody may write into it");
        refused(&link, "everybody may write into it");
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o711)).unwrap();
        if !rustix::process::geteuid().is_root() {
            use std::io::Write;
            let test = "b16_folder_in_which_others_could_put_things_is_refused";
            let _ = writeln!(std::io::stderr(), "SKIP {test} (needs root): only root can give a folder away");
            return;
        }
        std::os::unix::fs::lchown(&link, Some(12345), None).unwrap();
        refused(&link, "belongs to user 12345");
        open_folder(&folder).unwrap();
        std::os::unix::fs::chown(&folder, Some(12345), None).unwrap();
        refused(&folder, "belongs to user 12345");
    }
}
