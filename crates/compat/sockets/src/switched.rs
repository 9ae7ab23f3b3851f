// SPDX-License-Identifier: Apache-2.0 OR MIT
//! S-7. Running processes that join no connections for now, as somebody said who may write to the folder where ends meet.
//!
//! It is said by a file, as no thread of this library could take a message and a signal would be the program's. Each process
//! looks for the file of its own and for those of its ancestors, so whoever is made by a process that is off is off too.

use std::{
    fs, io,
    io::Read,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Mutex,
};

use tombolo_domain::aside;

use crate::process::lock;

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

    /// The file that says that it is off, in a folder where ends meet.
    #[must_use]
    pub fn file(&self, folder: &Path) -> PathBuf {
        place(folder).join(format!("{}-{}-{}", self.pid, self.started, self.namespace))
    }

    /// Which process a file says to be off.
    #[must_use]
    pub fn from_file(file: &Path) -> Option<Self> {
        let mut parts = file.file_name()?.to_str()?.split('-');
        let mut number = || parts.next()?.parse::<u64>().ok();
        let name = Self { pid: number()?.try_into().ok()?, started: number()?, namespace: number()? };
        parts.next().is_none().then_some(name)
    }
}

/// Where the files are, in a folder where ends meet.
#[must_use]
pub fn place(folder: &Path) -> PathBuf {
    folder.join("off")
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
pub(crate) struct Switch(Mutex<Option<Vec<PathBuf>>>);

impl Switch {
    /// Whether this process, or one that it comes from, is off. `owner` is whom the folder belongs to, `own` this user: others do
    /// not decide.
    pub fn is_off(&self, folder: &Path, owner: u32, own: u32) -> bool {
        let is_trusted = |file: &Path| {
            fs::symlink_metadata(file).is_ok_and(|found| found.uid() == 0 || found.uid() == owner || found.uid() == own)
        };
        is_trusted(&place(folder))
            && lock(&self.0).get_or_insert_with(|| files(folder)).iter().any(|file| is_trusted(file))
    }

    /// In a child made by fork: it is another process.
    pub fn forget(&self) {
        *lock(&self.0) = None;
    }
}

/// The files of this process and its ancestors.
fn files(folder: &Path) -> Vec<PathBuf> {
    aside::lifted(|| {
        let own = Name::of(std::process::id());
        // All that it sees live where it lives.
        let Some(namespace) = own.map(|(name, _)| name.namespace) else { return Vec::new() };
        let next = |(_, parent): &(Name, u32)| {
            let (grandparent, started) = stat(&format!("/proc/{parent}/stat"))?;
            Some((Name { pid: *parent, started, namespace }, grandparent))
        };
        std::iter::successors(own, next).take(ANCESTORS).map(|(name, _)| name.file(folder)).collect()
    })
}

/// Removes what says that processes are off which have ended, as far as this process can tell.
///
/// # Errors
/// What the file system says of the folder.
pub fn sweep(folder: &Path) -> io::Result<()> {
    let place = place(folder);
    let Some((own, _)) = Name::of(std::process::id()) else { return Ok(()) };
    let files = match fs::read_dir(&place) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        files => files?,
    };
    for file in files.flatten().map(|entry| entry.path()).take(1 << 16) {
        let is_over = |name: &Name| {
            name.namespace == own.namespace && Name::of(name.pid).is_none_or(|(now, _)| now.started != name.started)
        };
        if Name::from_file(&file).as_ref().is_some_and(is_over) {
            let _ = fs::remove_file(file);
        }
    }
    // As long as somebody is off it stays.
    let _ = fs::remove_dir(place);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> (Name, u32) {
        Name::of(std::process::id()).unwrap()
    }

    fn write_file(folder: &Path, name: Name) -> PathBuf {
        fs::create_dir_all(place(folder)).unwrap();
        let file = name.file(folder);
        fs::write(&file, "").unwrap();
        file
    }

    #[test]
    fn s7_process_is_off_by_its_own_file_or_an_ancestors_and_by_no_other() {
        let user = rustix::process::geteuid().as_raw();
        let folder = tempfile::tempdir().unwrap();
        let is_off = || Switch::default().is_off(folder.path(), user, user);
        let (name, parent) = own();
        assert_eq!(Name::from_file(&name.file(folder.path())), Some(name));
        assert!(!is_off());
        write_file(folder.path(), Name { started: name.started - 1, ..name });
        write_file(folder.path(), Name { namespace: 1, ..name });
        assert!(!is_off(), "of an earlier process with this number, and of another container");
        for name in [name, Name::of(parent).unwrap().0] {
            let file = write_file(folder.path(), name);
            assert!(is_off());
            fs::remove_file(file).unwrap();
            assert!(!is_off());
        }
    }

    #[test]
    fn s7_file_of_another_user_switches_nothing_off() {
        let user = rustix::process::geteuid().as_raw();
        if user != 0 {
            return; // Only root can make one.
        }
        let folder = tempfile::tempdir().unwrap();
        let file = write_file(folder.path(), own().0);
        std::os::unix::fs::chown(&file, Some(7), None).unwrap();
        assert!(!Switch::default().is_off(folder.path(), 8, 8));
        assert!(Switch::default().is_off(folder.path(), 7, 8), "the folder's owner");
    }

    #[test]
    fn s7_files_of_processes_that_ended_are_swept_and_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let (name, _) = own();
        let gone = write_file(folder.path(), Name { started: name.started - 1, ..name });
        let elsewhere = write_file(folder.path(), Name { namespace: 1, ..name });
        let living = write_file(folder.path(), name);
        sweep(folder.path()).unwrap();
        assert!(!gone.exists() && elsewhere.exists() && living.exists());
        fs::remove_file(elsewhere).unwrap();
        fs::remove_file(living).unwrap();
        sweep(folder.path()).unwrap();
        assert!(!place(folder.path()).exists());
    }
}
