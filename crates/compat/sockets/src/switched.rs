// SPDX-License-Identifier: Apache-2.0 OR MIT
//! S-7. Running processes that join no connections for now, as somebody said who may write to the folder where ends meet.
//!
//! It is said by a file, as no thread of this library could take a message and a signal would be the program's. Each process
//! looks for the file of its own and for those of its ancestors, so whoever is made by a process that is off is off too.

use std::{
    ffi::{CStr, CString},
    fs, io,
    io::Read,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::Path,
    sync::Mutex,
};

use rustix::{
    fs::{AtFlags, CWD, Dir, Gid, Mode, OFlags, Uid},
    io::Errno,
    process::geteuid,
};
use tombolo_domain::aside;
use tombolo_os::lock::lock;

/// Ancestors that count.
const ANCESTORS: usize = 16;

/// A process, told apart from each that had its number before, or has it in another container.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Name {
    /// Its number where it lives.
    pub pid: u32,
    /// When it was started, in the kernel's ticks.
    pub started: u64,
    /// The namespace of process numbers in which it lives.
    pub namespace: u64,
}

impl Name {
    /// What the process with this number is called, and its parent, as this process sees the two; none where there is none.
    #[must_use]
    pub fn of(pid: u32) -> Option<(Self, u32)> {
        let namespace = fs::metadata(format!("/proc/{pid}/ns/pid")).ok().map(|found| found.ino());
        let (parent, started) = stat(&format!("/proc/{pid}/stat"))?;
        Some((Self { pid, started, namespace: namespace? }, parent))
    }

    /// The file that says that it is off.
    #[must_use]
    pub fn file(&self) -> String {
        format!("{}-{}-{}", self.pid, self.started, self.namespace)
    }

    /// Which process a file says to be off.
    #[must_use]
    pub fn from_file(file: &str) -> Option<Self> {
        let mut parts = file.split('-');
        let mut number = || parts.next()?.parse::<u64>().ok();
        let name = Self { pid: number()?.try_into().ok()?, started: number()?, namespace: number()? };
        parts.next().is_none().then_some(name)
    }
}

/// Where the files are, in a folder where ends meet: in a folder for each user who made some.
const PLACE: &str = "off";
/// Such folders at most that are looked at, and files in one.
const USERS: usize = 64;
const FILES: usize = 1 << 16;

/// Opens a folder, and no link to one.
fn open(within: impl AsFd, name: impl rustix::path::Arg) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(within, name, flags, Mode::empty())
}

/// Up to `most` names in a folder.
fn names(folder: impl AsFd, most: usize) -> Vec<CString> {
    let entries = Dir::read_from(folder).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_owned());
    names.filter(|name| !matches!(name.to_bytes(), b"." | b"..")).take(most).collect()
}

/// The users' folders: their names, and themselves.
fn places(place: &OwnedFd) -> impl Iterator<Item = (CString, OwnedFd)> {
    names(place, USERS).into_iter().filter_map(move |name| open(place, &*name).ok().map(|folder| (name, folder)))
}

/// Makes a folder where there is none. Says whether it did.
fn make(within: impl AsFd, name: &str) -> rustix::io::Result<bool> {
    match rustix::fs::mkdirat(within, name, Mode::from_raw_mode(0o755)) {
        Err(Errno::EXIST) => Ok(false),
        made => made.map(|()| true),
    }
}

/// Says that process `name` is off, in the folder where it meets others. Each user does so in a folder of his own, so nobody keeps
/// another from it by being the first.
///
/// # Errors
/// What the file system says; [`io::ErrorKind::PermissionDenied`] where somebody else has put something in this user's place.
pub fn put_file(folder: impl AsFd, name: &Name) -> io::Result<()> {
    let (own, found) = (geteuid(), rustix::fs::fstat(&folder)?);
    let is_new = make(&folder, PLACE)?;
    let place = open(&folder, PLACE)?;
    if is_new {
        // The mode was cut by this process's mask. Root leaves it to whom the folder is.
        let is_shared = found.st_mode & 0o022 != 0;
        rustix::fs::fchmod(&place, Mode::from_raw_mode(if is_shared { 0o1777 } else { 0o755 }))?;
        if own.is_root() {
            rustix::fs::fchown(&place, Some(Uid::from_raw(found.st_uid)), Some(Gid::from_raw(found.st_gid)))?;
        }
    }
    let users = own.as_raw().to_string();
    let is_new = make(&place, &users)?;
    let users = open(&place, &users)?;
    if rustix::fs::fstat(&users)?.st_uid != own.as_raw() {
        let why = format!("{PLACE}/{} is another user's", own.as_raw());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    if is_new {
        rustix::fs::fchmod(&users, Mode::from_raw_mode(0o755))?;
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(&users, name.file(), flags, Mode::from_raw_mode(0o644)) {
        Err(error) if error != Errno::EXIST => Err(error.into()),
        _ => Ok(()),
    }
}

/// Takes back what says that process `name` is off. Says whether there was anything.
///
/// # Errors
/// What the file system says, as where another user said so.
pub fn remove_file(folder: impl AsFd, name: &Name) -> io::Result<bool> {
    let Some(place) = place_in(&folder)? else { return Ok(false) };
    let mut was_off = false;
    for (user, users) in places(&place) {
        match rustix::fs::unlinkat(&users, name.file(), AtFlags::empty()) {
            Ok(()) => was_off = true,
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        // As long as somebody is off they stay.
        let _ = rustix::fs::unlinkat(&place, &*user, AtFlags::REMOVEDIR);
    }
    let _ = rustix::fs::unlinkat(&folder, PLACE, AtFlags::REMOVEDIR);
    Ok(was_off)
}

/// Whether somebody said that process `name` is off.
#[must_use]
pub fn is_said(folder: impl AsFd, name: &Name) -> bool {
    let place = place_in(&folder).ok().flatten();
    place.is_some_and(|place| {
        places(&place).any(|(_, users)| rustix::fs::statat(&users, name.file(), AtFlags::SYMLINK_NOFOLLOW).is_ok())
    })
}

fn place_in(folder: impl AsFd) -> io::Result<Option<OwnedFd>> {
    match open(folder, PLACE) {
        Err(Errno::NOENT) => Ok(None),
        place => Ok(Some(place?)),
    }
}

/// The parent of a process and when it was started.
fn stat(file: &str) -> Option<(u32, u64)> {
    let mut text = String::new();
    fs::File::open(file).ok()?.take(4096).read_to_string(&mut text).ok()?;
    // Its name, which may hold anything, stands in brackets.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    Some((fields.nth(1)?.parse().ok()?, fields.nth(17)?.parse().ok()?))
}

/// What this process looks for.
#[derive(Debug, Default)]
pub(crate) struct Switch(Mutex<Option<Vec<String>>>);

impl Switch {
    /// Whether this process, or one that it comes from, is off. `owner` is whom the folder belongs to, `own` this user: others do
    /// not decide.
    pub fn is_off(&self, folder: &Path, owner: u32, own: u32) -> bool {
        // Most often there is none, and no limit is lifted for nothing.
        if fs::symlink_metadata(folder.join(PLACE)).is_err() {
            return false;
        }
        let trusts = |user| user == 0 || user == owner || user == own;
        let files = lock(&self.0).get_or_insert_with(files).clone();
        aside::lifted(|| {
            let Ok(place) = open(CWD, folder.join(PLACE)) else { return false };
            // Whose that folder is does not matter, nor what it calls the users'.
            places(&place).any(|(_, users)| {
                let found = rustix::fs::fstat(&users);
                let is_users = found.is_ok_and(|found| trusts(found.st_uid) && found.st_mode & 0o022 == 0);
                let stands = |file: &String| {
                    let found = rustix::fs::statat(&users, file, AtFlags::SYMLINK_NOFOLLOW);
                    found.is_ok_and(|found| trusts(found.st_uid))
                };
                is_users && files.iter().any(stands)
            })
        })
    }

    /// In a child made by fork: it is another process.
    pub fn forget(&self) {
        *lock(&self.0) = None;
    }
}

/// The files of this process and its ancestors.
fn files() -> Vec<String> {
    aside::lifted(|| {
        let own = Name::of(std::process::id());
        // All that it sees live where it lives.
        let Some(namespace) = own.map(|(name, _)| name.namespace) else { return Vec::new() };
        let next = |(_, parent): &(Name, u32)| {
            let (grandparent, started) = stat(&format!("/proc/{parent}/stat"))?;
            Some((Name { pid: *parent, started, namespace }, grandparent))
        };
        std::iter::successors(own, next).take(ANCESTORS).map(|(name, _)| name.file()).collect()
    })
}

/// Removes what says that processes are off which have ended, as far as this process can tell and may.
///
/// # Errors
/// What the file system says of the folder.
pub fn sweep(folder: &Path) -> io::Result<()> {
    let folder = rustix::fs::openat(CWD, folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let Some(place) = place_in(&folder)? else { return Ok(()) };
    let Some((own, _)) = Name::of(std::process::id()) else { return Ok(()) };
    let is_over = |name: &Name| {
        name.namespace == own.namespace && Name::of(name.pid).is_none_or(|(now, _)| now.started != name.started)
    };
    for (user, users) in places(&place) {
        for file in names(&users, FILES) {
            let name = |file: &CStr| Name::from_file(file.to_str().ok()?);
            if name(&file).as_ref().is_some_and(is_over) {
                let _ = rustix::fs::unlinkat(&users, &*file, AtFlags::empty());
            }
        }
        // As long as somebody is off they stay.
        let _ = rustix::fs::unlinkat(&place, &*user, AtFlags::REMOVEDIR);
    }
    let _ = rustix::fs::unlinkat(&folder, PLACE, AtFlags::REMOVEDIR);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> (Name, u32) {
        Name::of(std::process::id()).unwrap()
    }

    fn at(folder: &Path) -> OwnedFd {
        open(CWD, folder).unwrap()
    }

    fn place(folder: &Path) -> std::path::PathBuf {
        folder.join(PLACE)
    }

    fn users(folder: &Path) -> std::path::PathBuf {
        place(folder).join(geteuid().as_raw().to_string())
    }

    #[test]
    fn s7_process_is_off_by_its_own_file_or_an_ancestors_and_by_no_other() {
        let user = geteuid().as_raw();
        let folder = tempfile::tempdir().unwrap();
        let is_off = || Switch::default().is_off(folder.path(), user, user);
        let (name, parent) = own();
        assert_eq!(Name::from_file(&name.file()), Some(name));
        assert!(!is_off());
        put_file(at(folder.path()), &Name { started: name.started - 1, ..name }).unwrap();
        put_file(at(folder.path()), &Name { namespace: 1, ..name }).unwrap();
        assert!(!is_off(), "of an earlier process with this number, and of another container");
        for name in [name, Name::of(parent).unwrap().0] {
            put_file(at(folder.path()), &name).unwrap();
            put_file(at(folder.path()), &name).unwrap();
            assert!(is_off() && is_said(at(folder.path()), &name));
            assert!(remove_file(at(folder.path()), &name).unwrap());
            assert!(!is_off() && !is_said(at(folder.path()), &name) && !remove_file(at(folder.path()), &name).unwrap());
        }
    }

    #[test]
    fn s7_file_of_another_user_switches_nothing_off() {
        let user = geteuid().as_raw();
        if user != 0 {
            return; // Only root can make one.
        }
        let folder = tempfile::tempdir().unwrap();
        put_file(at(folder.path()), &own().0).unwrap();
        let file = users(folder.path()).join(own().0.file());
        let is_off = |owner, own| Switch::default().is_off(folder.path(), owner, own);
        assert!(is_off(8, 8), "root's");
        std::os::unix::fs::chown(&file, Some(7), None).unwrap();
        assert!(!is_off(8, 8));
        assert!(is_off(7, 8), "the folder's owner");
        std::os::unix::fs::chown(users(folder.path()), Some(9), None).unwrap();
        assert!(!is_off(7, 8), "in a folder of somebody else, who may have moved it there");
    }

    #[test]
    fn s7_who_was_the_first_to_switch_a_process_off_keeps_nobody_else_from_it() {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o1777)).unwrap();
        put_file(at(folder.path()), &own().0).unwrap();
        assert_eq!(fs::metadata(place(folder.path())).unwrap().mode() & 0o7777, 0o1777);
        assert_eq!(fs::metadata(users(folder.path())).unwrap().mode() & 0o7777, 0o755);
        if geteuid().is_root() {
            // Whose the place is does not count.
            std::os::unix::fs::chown(place(folder.path()), Some(9), None).unwrap();
            assert!(Switch::default().is_off(folder.path(), 8, 8));
            std::os::unix::fs::chown(users(folder.path()), Some(9), None).unwrap();
            let error = put_file(at(folder.path()), &own().0).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "another has put something in its place");
        }
        let alone = tempfile::tempdir().unwrap();
        put_file(at(alone.path()), &own().0).unwrap();
        assert_eq!(fs::metadata(place(alone.path())).unwrap().mode() & 0o7777, 0o755);
    }

    #[test]
    fn s7_link_in_the_place_of_a_folder_is_not_followed() {
        let [folder, elsewhere] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let gone = Name { started: own().0.started - 1, ..own().0 };
        let kept = elsewhere.path().join(gone.file());
        fs::write(&kept, "").unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), place(folder.path())).unwrap();
        assert!(put_file(at(folder.path()), &own().0).is_err() && remove_file(at(folder.path()), &gone).is_err());
        let _ = sweep(folder.path());
        fs::remove_file(place(folder.path())).unwrap();
        fs::create_dir(place(folder.path())).unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), users(folder.path())).unwrap();
        assert!(put_file(at(folder.path()), &own().0).is_err() && !remove_file(at(folder.path()), &gone).unwrap());
        sweep(folder.path()).unwrap();
        assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 1);
        assert!(kept.exists());
    }

    #[test]
    fn s7_files_of_processes_that_ended_are_swept_and_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let (name, _) = own();
        let [gone, elsewhere] = [Name { started: name.started - 1, ..name }, Name { namespace: 1, ..name }];
        [gone, elsewhere, name].iter().for_each(|name| put_file(at(folder.path()), name).unwrap());
        sweep(folder.path()).unwrap();
        let stands = |name: &Name| users(folder.path()).join(name.file()).exists();
        assert!(!stands(&gone) && stands(&elsewhere) && stands(&name));
        assert!(remove_file(at(folder.path()), &elsewhere).unwrap());
        fs::remove_file(users(folder.path()).join(name.file())).unwrap();
        sweep(folder.path()).unwrap();
        assert!(!place(folder.path()).exists());
    }
}
