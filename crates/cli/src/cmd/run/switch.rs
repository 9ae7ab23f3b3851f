// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo run --off` and `--on`: keep running processes from joining connections for a while (S-7).

use std::{
    collections::HashSet,
    ffi::OsString,
    fs, io,
    io::Write,
    os::{
        fd::OwnedFd,
        unix::{ffi::OsStringExt, fs::MetadataExt},
    },
    path::{Path, PathBuf},
};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};

use tombolo_sockets::switched::{self, Name};

use crate::failure::{Failure, Os, Result};

/// A process under `tombolo run`, as seen from outside.
struct Target {
    name: Name,
    parent: u32,
    /// Owner of the process.
    user: u32,
    /// Its folder where endpoints meet: the path that it uses, and the folder itself.
    path: PathBuf,
    folder: OwnedFd,
}

fn proc(pid: u32, file: &str) -> PathBuf {
    Path::new("/proc").join(pid.to_string()).join(file)
}

fn find(pid: u32) -> Result<Target> {
    let (seen, parent) = Name::of(pid).ok_or_else(|| Failure::Usage(format!("{pid}: no such process")))?;
    let file = proc(pid, "environ");
    let environment = fs::read(&file).map_err(|source| Failure::Open { file: file.display().to_string(), source })?;
    let folder = environment.split(|byte| *byte == 0).find_map(|entry| entry.strip_prefix(b"TOMBOLO_SOCKETS="));
    let folder = folder.filter(|folder| !folder.is_empty()).ok_or_else(|| {
        Failure::Usage(format!("{pid}: it was not started by `tombolo run`, nor with TOMBOLO_SOCKETS set"))
    })?;
    let folder = PathBuf::from(OsString::from_vec(folder.to_vec()));
    // The process may live in a container, with a number of its own and folders of its own.
    let within = open_within(&proc(pid, "root"), &folder)?;
    let text = fs::read_to_string(proc(pid, "status")).os("read")?;
    let inner = text.lines().find_map(|line| line.strip_prefix("NSpid:")?.split_whitespace().last()?.parse().ok());
    let (name, user) = (Name { pid: inner.unwrap_or(pid), ..seen }, owner(&proc(pid, ""))?);
    Ok(Target { name, parent, user, path: folder, folder: within })
}

/// Opens a folder as a process with this root does. Symbolic links on the way cannot lead out of that root.
fn open_within(root: &Path, folder: &Path) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let opened = rustix::fs::openat(CWD, root, flags, Mode::empty())
        .and_then(|root| rustix::fs::openat2(root, folder, flags, Mode::empty(), resolve));
    opened.map_err(|error| Failure::Open { file: folder.display().to_string(), source: error.into() })
}

/// Keeps the process and those that it started from joining more connections.
pub fn off(pid: u32) -> Result<()> {
    let target = find(pid)?;
    let own = rustix::process::geteuid().as_raw();
    // The process heeds only its own user, the folder's owner and root.
    let folders = rustix::fs::fstat(&target.folder).map_err(io::Error::from).os("stat")?.st_uid;
    if ![0, folders, target.user].contains(&own) {
        return Err(Failure::Outcome(format!("{pid}: it does not believe user {own} that it is off")));
    }
    let cannot = |source| Failure::Open { file: target.path.join("off").display().to_string(), source };
    switched::put_file(&target.folder, &target.name).map_err(cannot)?;
    print_line(&format!(
        "{pid}: joins no more connections; those that are joined stay so, until `tombolo run --on {pid}`"
    ))
}

/// Lets the process join connections again, unless one of its ancestors is off.
pub fn on(pid: u32) -> Result<()> {
    let target = find(pid)?;
    let cannot = |source| Failure::Open { file: target.path.join("off").display().to_string(), source };
    let was_off = switched::remove_file(&target.folder, &target.name, target.user).map_err(cannot)?;
    let mut seen = HashSet::from([pid]);
    let mut next = target.parent;
    while next != 0 && seen.insert(next) {
        let Ok(parent) = find(next) else {
            next = Name::of(next).map_or(0, |(_, parent)| parent);
            continue;
        };
        if switched::is_said(&target.folder, &parent.name, target.user) {
            return Err(Failure::Outcome(format!("{pid}: it stays off, as {next}, which it comes from, is off")));
        }
        next = parent.parent;
    }
    print_line(&format!("{pid}: {}", if was_off { "joins connections again" } else { "was not off" }))
}

fn owner(path: &Path) -> Result<u32> {
    let found = fs::metadata(path);
    found.map(|found| found.uid()).map_err(|source| Failure::Open { file: path.display().to_string(), source })
}

fn print_line(line: &str) -> Result<()> {
    Ok(writeln!(io::stdout(), "{line}").os("write")?)
}
