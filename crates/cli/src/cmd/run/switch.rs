// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo run --off` and `--on`: running processes that join no connections for a while (S-7).

use std::{
    collections::HashSet,
    ffi::OsString,
    fs, io,
    io::Write,
    os::unix::{ffi::OsStringExt, fs::DirBuilderExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use tombolo_sockets::switched::{self, Name};

use crate::failure::{Failure, Os, Result};

/// A process under `tombolo run`, as it is seen from outside.
struct Target {
    name: Name,
    parent: u32,
    /// Its folder where ends meet, by a path that leads there from here.
    folder: PathBuf,
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
    let root = proc(pid, "root").join(folder.strip_prefix("/").unwrap_or(&folder));
    let text = fs::read_to_string(proc(pid, "status")).os("read")?;
    let inner = text.lines().find_map(|line| line.strip_prefix("NSpid:")?.split_whitespace().last()?.parse().ok());
    Ok(Target { name: Name { pid: inner.unwrap_or(pid), ..seen }, parent, folder: root })
}

/// The process and those that it started join no more connections.
pub fn off(pid: u32) -> Result<()> {
    let target = find(pid)?;
    let (place, file) = (switched::place(&target.folder), target.name.file(&target.folder));
    let cannot = |source| Failure::Open { file: file.display().to_string(), source };
    match fs::DirBuilder::new().mode(0o755).create(&place) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(cannot(error)),
        _ => {}
    }
    // Whoever made it first has it; the process believes its own user, the folder's and root.
    let made = fs::OpenOptions::new().write(true).create_new(true).open(&file);
    match made {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(cannot(error)),
        _ => {}
    }
    let trusted = [0, owner(&target.folder)?, owner(&proc(pid, ""))?];
    for path in [&place, &file] {
        let owner = owner(path)?;
        if !trusted.contains(&owner) {
            let path = path.display();
            return Err(Failure::Outcome(format!("{path}: it is user {owner}'s, whom process {pid} does not believe")));
        }
    }
    print_line(&format!(
        "{pid}: joins no more connections; those that are joined stay so, until `tombolo run --on {pid}`"
    ))
}

/// The process joins connections again, unless one that it comes from is off.
pub fn on(pid: u32) -> Result<()> {
    let target = find(pid)?;
    let file = target.name.file(&target.folder);
    let was_off = match fs::remove_file(&file) {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(source) => return Err(Failure::Open { file: file.display().to_string(), source }),
    };
    // As long as somebody is off it stays.
    let _ = fs::remove_dir(switched::place(&target.folder));
    let mut seen = HashSet::from([pid]);
    let mut next = target.parent;
    while next != 0 && seen.insert(next) {
        let Ok(parent) = find(next) else {
            next = Name::of(next).map_or(0, |(_, parent)| parent);
            continue;
        };
        if parent.name.file(&target.folder).exists() {
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
    writeln!(io::stdout(), "{line}").os("write")
}
