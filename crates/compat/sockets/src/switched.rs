// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Switches running processes off and on by files: a process that is off joins no connections. Whoever may write to the
//! folder where endpoints meet can do so (S-7).
//!
//! A file is used because no thread of this library could receive a message, and a signal would be the program's. Each
//! process looks for its own file and for those of its ancestors, so the descendants of a process that is off are off
//! too.

use std::{
    ffi::{CStr, CString},
    fs, io,
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
use tombolo_os::{lock::lock, process::Stat};

use crate::claim::Claims;

/// Number of processes whose files are looked for: the process itself and its nearest ancestors.
const ANCESTORS: usize = 16;

/// A process, distinct from earlier ones with its number and from those that have its number in another container.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Name {
    /// Its number in its own namespace.
    pub pid: u32,
    /// Time at which it was started, in the kernel's ticks.
    pub started: u64,
    /// Inode number of its namespace of process numbers.
    pub namespace: u64,
}

impl Name {
    /// Returns the name of the process with this number, and its parent's number, as this process sees both; `None` if
    /// there is none.
    #[must_use]
    pub fn of(pid: u32) -> Option<(Self, u32)> {
        let namespace = fs::metadata(format!("/proc/{pid}/ns/pid")).ok().map(|found| found.ino());
        let found = Stat::of(pid)?;
        Some((Self { pid, started: found.began, namespace: namespace? }, found.parent))
    }

    /// Returns the name of the file that switches the process off.
    #[must_use]
    pub fn file(&self) -> String {
        format!("{}-{}-{}", self.pid, self.started, self.namespace)
    }

    /// Returns the process that a file of this name switches off.
    #[must_use]
    pub fn from_file(file: &str) -> Option<Self> {
        let mut parts = file.split('-');
        let mut number = || parts.next()?.parse::<u64>().ok();
        let name = Self { pid: number()?.try_into().ok()?, started: number()?, namespace: number()? };
        parts.next().is_none().then_some(name)
    }
}

/// Name of the folder, in a folder where endpoints meet, that holds a folder for each user who made such files.
const PLACE: &str = "off";
/// Largest number of such folders that are read, and of files in one. Whoever can write there can make more.
const USERS: usize = 1 << 12;
const FILES: usize = 1 << 16;

/// Opens a folder. Does not follow a link to one.
fn open(within: impl AsFd, name: impl rustix::path::Arg) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(within, name, flags, Mode::empty())
}

/// Returns up to `most` names in a folder.
fn names(folder: impl AsFd, most: usize) -> Vec<CString> {
    let entries = Dir::read_from(folder).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_owned());
    names.filter(|name| !matches!(name.to_bytes(), b"." | b"..")).take(most).collect()
}

/// Users whose files switch a process off: root, the owner of the folder where it meets its peers, and its own user.
#[derive(Clone, Copy)]
struct Believed([u32; 3]);

impl Believed {
    fn has(self, user: u32) -> bool {
        self.0.contains(&user)
    }

    /// Returns whether one of them owns this folder, and nobody else can put files into it.
    fn has_folder(self, folder: &OwnedFd) -> bool {
        rustix::fs::fstat(folder).is_ok_and(|found| self.has(found.st_uid) && found.st_mode & 0o022 == 0)
    }

    /// Returns whether the folder holds a file of this name that belongs to one of them.
    fn own_file(self, folder: &OwnedFd, file: &str) -> bool {
        let found = rustix::fs::statat(folder, file, AtFlags::SYMLINK_NOFOLLOW);
        found.is_ok_and(|found| self.has(found.st_uid))
    }
}

/// Returns the users' folders with their names. Those named by the numbers of the `believed` users come first, so that
/// other users cannot hide these by making many folders.
fn places(place: &OwnedFd, believed: Believed) -> impl Iterator<Item = (CString, OwnedFd)> {
    let mut first: Vec<_> = believed.0.iter().filter_map(|user| CString::new(user.to_string()).ok()).collect();
    first.dedup();
    let others = names(place, USERS).into_iter();
    let known = first.clone();
    let all = first.into_iter().chain(others.filter(move |name| !known.contains(name)));
    all.filter_map(move |name| open(place, &*name).ok().map(|folder| (name, folder)))
}

/// Makes a folder where there is none. Returns whether it did.
fn make(within: impl AsFd, name: &str) -> rustix::io::Result<bool> {
    match rustix::fs::mkdirat(within, name, Mode::from_raw_mode(0o755)) {
        Err(Errno::EXIST) => Ok(false),
        made => made.map(|()| true),
    }
}

/// Switches process `name` off, in the folder where it meets its peers. Each user does so in a folder of their own, so
/// nobody can prevent another by being the first.
///
/// # Errors
/// Returns the file system's error; [`io::ErrorKind::PermissionDenied`] where another user's folder is in this user's
/// place.
pub fn put_file(folder: impl AsFd, name: &Name) -> io::Result<()> {
    let (own, found) = (geteuid(), rustix::fs::fstat(&folder)?);
    let is_new = make(&folder, PLACE)?;
    let place = open(&folder, PLACE)?;
    if is_new {
        // This process's umask has cut the mode. Where root makes the folder, it belongs to the owner of the folder
        // around it.
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

/// Removes the files that switch process `name` of `user` off. Returns whether there were any.
///
/// # Errors
/// Returns the file system's error, for example where another user whom the process believes has switched it off.
pub fn remove_file(folder: impl AsFd, name: &Name, user: u32) -> io::Result<bool> {
    let Some(place) = place_in(&folder)? else { return Ok(false) };
    let believed = believed_in(&folder, user)?;
    let (mut was_off, mut refused) = (false, None);
    for (user, users) in places(&place, believed) {
        match rustix::fs::unlinkat(&users, name.file(), AtFlags::empty()) {
            Ok(()) => was_off = true,
            Err(Errno::NOENT) => {}
            // Files of other users do not count, and need not be removed.
            Err(_) if !believed.has_folder(&users) || !believed.own_file(&users, &name.file()) => {}
            Err(error) => refused = Some(error),
        }
        // This fails as long as some process is off, and the folder stays.
        let _ = rustix::fs::unlinkat(&place, &*user, AtFlags::REMOVEDIR);
    }
    let _ = rustix::fs::unlinkat(&folder, PLACE, AtFlags::REMOVEDIR);
    refused.map_or(Ok(was_off), |error| Err(error.into()))
}

/// Returns whether a user whom process `name` of `user` believes has switched it off.
#[must_use]
pub fn is_said(folder: impl AsFd, name: &Name, user: u32) -> bool {
    let (Ok(Some(place)), Ok(believed)) = (place_in(&folder), believed_in(&folder, user)) else { return false };
    has_files_at(&place, believed, &[name.file()])
}

fn believed_in(folder: impl AsFd, user: u32) -> io::Result<Believed> {
    Ok(Believed([0, rustix::fs::fstat(folder)?.st_uid, user]))
}

/// Returns whether one of these files stands in one of the users' folders. It does not matter whose the folder around
/// these is, or how they are named in it.
fn has_files_at(place: &OwnedFd, believed: Believed, files: &[String]) -> bool {
    let mut places = places(place, believed);
    places.any(|(_, users)| believed.has_folder(&users) && files.iter().any(|file| believed.own_file(&users, file)))
}

fn place_in(folder: impl AsFd) -> io::Result<Option<OwnedFd>> {
    match open(folder, PLACE) {
        Err(Errno::NOENT) => Ok(None),
        place => Ok(Some(place?)),
    }
}

/// The names of the files that this process looks for, once they are known.
#[derive(Debug, Default)]
pub(crate) struct Switch(Mutex<Option<Vec<String>>>);

impl Switch {
    /// Returns whether this process or one of its ancestors is off. `owner` owns the folder and `own` is this process's
    /// user; only these two and root decide.
    pub fn is_off(&self, folder: &Path, owner: u32, own: u32) -> bool {
        // Mostly the folder does not exist. Then the limit of descriptors need not be lifted.
        if fs::symlink_metadata(folder.join(PLACE)).is_err() {
            return false;
        }
        let files = lock(&self.0).get_or_insert_with(files).clone();
        aside::lifted(|| {
            let place = open(CWD, folder.join(PLACE));
            place.is_ok_and(|place| has_files_at(&place, Believed([0, owner, own]), &files))
        })
    }

    /// Does the same for the folder and the user of these claims.
    pub fn is_off_for(&self, claims: &Claims) -> bool {
        self.is_off(claims.folder.path(), claims.folder.owner(), claims.own())
    }

    /// Forgets the names, in a child made by fork, which is another process.
    pub fn forget(&self) {
        *lock(&self.0) = None;
    }
}

/// Returns the names of the files of this process and its ancestors.
fn files() -> Vec<String> {
    aside::lifted(|| {
        let own = Name::of(std::process::id());
        // All ancestors that it can see are in its own namespace.
        let Some(namespace) = own.map(|(name, _)| name.namespace) else { return Vec::new() };
        let next = |(_, parent): &(Name, u32)| {
            let found = Stat::of(*parent)?;
            Some((Name { pid: *parent, started: found.began, namespace }, found.parent))
        };
        std::iter::successors(own, next).take(ANCESTORS).map(|(name, _)| name.file()).collect()
    })
}

/// Removes the files of processes that have ended, as far as this process can determine that and has permission.
///
/// # Errors
/// Returns the file system's error for the folder.
pub fn sweep(folder: &Path) -> io::Result<()> {
    let folder = rustix::fs::openat(CWD, folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let Some(place) = place_in(&folder)? else { return Ok(()) };
    let Some((own, _)) = Name::of(std::process::id()) else { return Ok(()) };
    let is_over = |name: &Name| {
        name.namespace == own.namespace && Name::of(name.pid).is_none_or(|(now, _)| now.started != name.started)
    };
    for (user, users) in places(&place, believed_in(&folder, geteuid().as_raw())?) {
        for file in names(&users, FILES) {
            let name = |file: &CStr| Name::from_file(file.to_str().ok()?);
            if name(&file).as_ref().is_some_and(is_over) {
                let _ = rustix::fs::unlinkat(&users, &*file, AtFlags::empty());
            }
        }
        // This fails as long as some process is off, and the folder stays.
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
            assert!(is_off() && is_said(at(folder.path()), &name, user));
            assert!(remove_file(at(folder.path()), &name, user).unwrap());
            assert!(
                !is_off()
                    && !is_said(at(folder.path()), &name, user)
                    && !remove_file(at(folder.path()), &name, user).unwrap()
            );
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
            // The owner of the place does not count.
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
    fn s7_folders_and_files_of_others_keep_nobody_from_switching_a_process_off_and_on() {
        if !geteuid().is_root() {
            return; // Only root can make some of others.
        }
        let (folder, name, nobody) = (tempfile::tempdir().unwrap(), own().0, 65534);
        fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o1777)).unwrap();
        put_file(at(folder.path()), &name).unwrap();
        // More entries than are looked at, before and after it in the folder's order.
        for other in 0..300 {
            let other = place(folder.path()).join(format!("other-{other}"));
            fs::create_dir(&other).unwrap();
            // The entry that prevents its removal belongs to another user.
            fs::create_dir(other.join(name.file())).unwrap();
            std::os::unix::fs::chown(&other, Some(nobody), None).unwrap();
        }
        assert!(Switch::default().is_off(folder.path(), 0, 0) && is_said(at(folder.path()), &name, 0));
        assert!(remove_file(at(folder.path()), &name, 0).unwrap());
        assert!(!Switch::default().is_off(folder.path(), 0, 0) && !is_said(at(folder.path()), &name, 0));
    }

    #[test]
    fn s7_process_whose_name_is_no_utf8_is_found_with_its_parent() {
        use std::os::unix::ffi::OsStrExt;
        let program = tempfile::tempdir().unwrap();
        let file = program.path().join(std::ffi::OsStr::from_bytes(b"caf\xe9"));
        std::os::unix::fs::symlink("/bin/cat", &file).unwrap();
        let mut command = std::process::Command::new(file);
        let mut child = command.stdin(std::process::Stdio::piped()).spawn().unwrap();
        let found = Name::of(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found.map(|(_, parent)| parent), Some(std::process::id()));
    }

    #[test]
    fn s7_link_in_the_place_of_a_folder_is_not_followed() {
        let [folder, elsewhere] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let gone = Name { started: own().0.started - 1, ..own().0 };
        let kept = elsewhere.path().join(gone.file());
        fs::write(&kept, "").unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), place(folder.path())).unwrap();
        assert!(
            put_file(at(folder.path()), &own().0).is_err()
                && remove_file(at(folder.path()), &gone, geteuid().as_raw()).is_err()
        );
        let _ = sweep(folder.path());
        fs::remove_file(place(folder.path())).unwrap();
        fs::create_dir(place(folder.path())).unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), users(folder.path())).unwrap();
        assert!(
            put_file(at(folder.path()), &own().0).is_err()
                && !remove_file(at(folder.path()), &gone, geteuid().as_raw()).unwrap()
        );
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
        assert!(remove_file(at(folder.path()), &elsewhere, geteuid().as_raw()).unwrap());
        fs::remove_file(users(folder.path()).join(name.file())).unwrap();
        sweep(folder.path()).unwrap();
        assert!(!place(folder.path()).exists());
    }
}
