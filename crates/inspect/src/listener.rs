// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds the listeners of one kernel: the sockets in the folders of services.

use std::{
    collections::HashMap,
    fs,
    os::{fd::AsRawFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};
use serde::Serialize;

use crate::{
    error::{Error, Result},
    process::{Scan, known_users, name_of, printable},
};

/// A socket of a service.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Listener {
    /// Address to which programs connect.
    pub address: String,
    /// Whether a process listens.
    pub state: ListenerState,
    /// User who made the file.
    pub uid: u32,
    /// Name of that user.
    pub user: String,
    /// Process that listens, if it can be seen.
    pub pid: Option<u32>,
    /// Name of that process.
    pub command: Option<String>,
}

/// Whether a process listens at a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ListenerState {
    /// A process listens.
    Listening,
    /// The listener died and left the file; the next listener replaces it.
    Stale,
    /// This user has no right to find out.
    Unknown,
}

/// Returns the folders that are searched if none is named: this user's, and for root those of all users.
#[must_use]
pub fn known_folders() -> Vec<PathBuf> {
    let own = tombolo_backends::services_folder();
    let mut folders = Vec::new();
    if rustix::process::geteuid().is_root() {
        folders.push("/run/tombolo".into());
        folders.extend(children("/run/user").map(|runtime| runtime.join("tombolo")));
        let named = |path: &PathBuf| path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"tombolo-"));
        folders.extend(children("/tmp").filter(named));
    }
    // Other users may have put a symbolic link in the place of a folder.
    folders.retain(|folder: &PathBuf| fs::symlink_metadata(folder).is_ok_and(|meta| meta.is_dir()));
    folders.extend(own.is_dir().then_some(own));
    folders.sort();
    folders.dedup();
    folders
}

fn children(folder: &str) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// Returns all sockets in `folders`.
pub fn find(folders: &[PathBuf], scan: &Scan) -> Result<Vec<Listener>> {
    let (users, bound) = (known_users(), bound(scan));
    let mut found = Vec::new();
    for folder in folders {
        let unreadable = |source| Error::Folder { folder: printable(&folder.display().to_string()), source };
        let held = rustix::fs::open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|error| unreadable(error.into()))?;
        for entry in fs::read_dir(folder).map_err(unreadable)?.flatten() {
            let name = entry.file_name();
            let Ok(stat) = rustix::fs::statat(&held, &name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
                continue;
            }
            let path = folder.join(&name);
            let through = format!("/proc/self/fd/{}", held.as_raw_fd());
            let state = pulse(&Path::new(&through).join(&name));
            let owner = bound.get(path.as_os_str().as_bytes()).and_then(|inode| scan.sockets.get(inode));
            found.push(Listener {
                address: format!("local:{}", printable(&path.display().to_string())),
                state,
                uid: stat.st_uid,
                user: name_of(stat.st_uid, &users),
                pid: owner.map(|(pid, _)| *pid),
                command: owner.map(|(_, command)| command.clone()),
            });
        }
    }
    found.sort_by(|a, b| a.address.cmp(&b.address));
    Ok(found)
}

/// Tests for a listener by connecting with another type of socket, which a live listener does not notice (L-3).
fn pulse(path: &Path) -> ListenerState {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let asked = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)
        .and_then(|socket| rustix::net::connect(&socket, &SocketAddrUnix::new(path.as_os_str().as_bytes())?));
    match asked {
        Err(Errno::PROTOTYPE) => ListenerState::Listening,
        Err(Errno::CONNREFUSED) => ListenerState::Stale,
        _ => ListenerState::Unknown,
    }
}

/// Returns the inodes of listening sockets by path, from all network namespaces in which a process was seen.
fn bound(scan: &Scan) -> HashMap<Vec<u8>, u64> {
    let tables = scan.networks.values().map(|pid| fs::read(format!("/proc/{pid}/net/unix")));
    tables.flatten().flat_map(|table| listening(&table)).collect()
}

fn listening(table: &[u8]) -> Vec<(Vec<u8>, u64)> {
    const ACCEPTS: &[u8] = b"00010000";
    let line = |line: &[u8]| {
        let mut fields = line.split(|byte| *byte == b' ').filter(|field| !field.is_empty());
        let flags = fields.nth(3)?;
        let inode = std::str::from_utf8(fields.nth(2)?).ok()?.parse().ok()?;
        // The path may contain blanks: it is the rest of the line.
        let at = line.iter().position(|byte| *byte == b'/')?;
        (flags == ACCEPTS).then(|| (line[at..].to_vec(), inode))
    };
    table.split(|byte| *byte == b'\n').filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn table_of_sockets_tells_those_that_listen() {
        let table = b"Num       RefCount Protocol Flags    Type St Inode Path\n\
            0000000000000000: 00000002 00000000 00010000 0005 01  4711 /run/tombolo/a b.sock\n\
            0000000000000000: 00000003 00000000 00000000 0005 03  4712 /run/tombolo/a b.sock\n\
            0000000000000000: 00000003 00000000 00000000 0001 03  4713\nnonsense\n";
        assert_eq!(listening(table), [(b"/run/tombolo/a b.sock".to_vec(), 4711)]);
    }

    #[test]
    fn l3_socket_whose_listener_died_is_stale() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(pulse(&path), ListenerState::Listening);
        drop(listener);
        assert_eq!(pulse(&path), ListenerState::Stale);
        assert_eq!(pulse(&folder.path().join("nothing")), ListenerState::Unknown);
    }
}
