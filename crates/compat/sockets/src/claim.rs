// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where two ends find each other: a folder in which each claims its connection by a file (S-7).
//!
//! The waiting end's file names the service at which its process can be reached; the seeking end's keeps others from
//! seeking the same connection. A second claim of the same role and key makes the connection ambiguous for both.

use std::{
    fs, io,
    io::Write,
    os::{
        fd::AsRawFd,
        unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    },
    path::PathBuf,
    sync::{Arc, Mutex},
};

use rustix::{
    fs::{CWD, Mode, OFlags},
    io::{Errno, ReadWriteFlags},
};
use tombolo_domain::aside;
use tombolo_os::lock::lock;

use crate::{
    folder::{self, Folder},
    tuple::{Role, Tuple},
};

/// Bytes of a claim at most.
const CLAIM_MAX: u64 = 64;
/// What the name of every process's service begins with; sixteen hexadecimal digits follow.
const SERVICE: &str = "sockets-";

/// The folder of claims.
#[derive(Debug)]
pub struct Claims {
    /// Where ends meet.
    pub folder: Folder,
    claims: PathBuf,
    own: u32,
    /// What stood there when it was checked.
    stamps: Option<[Stamp; 2]>,
}

/// A folder, and who may do what in it: device, number, mode, owner.
type Stamp = (u64, u64, u32, u32);

/// A claim of this process; dropping it takes it back.
#[derive(Debug)]
pub struct Claimed {
    place: Place,
    process: u32,
}

#[derive(Debug)]
enum Place {
    /// Nowhere: nobody else can claim it.
    Nowhere,
    /// A file, and that which says that another claimed the same (S-7).
    Folder { file: PathBuf, contest: PathBuf },
    /// At the broker, which is told that it is over once somebody looks here (S-18).
    Broker { key: u32, withdrawn: Arc<Mutex<Vec<u32>>> },
}

impl Claimed {
    /// What is sought by the broker's word takes no claim.
    pub(crate) fn nowhere() -> Self {
        Self { place: Place::Nowhere, process: std::process::id() }
    }

    pub(crate) fn of_key(key: u32, withdrawn: Arc<Mutex<Vec<u32>>>) -> Self {
        Self { place: Place::Broker { key, withdrawn }, process: std::process::id() }
    }

    /// Whether it is at the broker.
    pub(crate) fn is_at_broker(&self) -> bool {
        matches!(self.place, Place::Broker { .. })
    }
}

/// Why there is no claim.
#[derive(Debug)]
pub enum NotClaimed {
    /// Somebody else has one; this is the service that it names, if it names one.
    Taken(Option<String>),
    /// The folder cannot be used.
    Io(io::Error),
}

/// The name of the service with this number.
#[must_use]
pub fn service_name(number: u64) -> String {
    format!("{SERVICE}{number:016x}")
}

/// Whether a process's service can have this name. A path, or any other socket of the machine, is none.
#[must_use]
pub fn is_service(name: &str) -> bool {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    name.strip_prefix(SERVICE).is_some_and(|number| number.len() == 16 && number.bytes().all(is_digit))
}

/// The service that a claim names, and whose file it is; none where it is no claim. Whatever a member has put there, it is not
/// waited for, and no link is followed.
#[must_use]
pub fn read(file: &std::path::Path) -> Option<(String, u32)> {
    aside::lifted(|| {
        let opened = folder::open(file).ok()?;
        let about = opened.metadata().ok().filter(|about| about.is_file() && about.len() <= CLAIM_MAX)?;
        let mut name = [0; CLAIM_MAX as usize];
        let len = read_now(&opened, &mut name).ok()?;
        let name = str::from_utf8(&name[..len]).ok().filter(|name| is_service(name))?;
        Some((name.to_owned(), about.uid()))
    })
}

/// Reads what is in memory. A member who writes to the file, and whose own memory never comes, holds its lock, which some file
/// systems take for reads too (XFS). Those that know of no such read take none themselves, but on a network; overlayfs, which is one,
/// reads from the file system below it as that one does.
fn read_now(file: &fs::File, to: &mut [u8]) -> rustix::io::Result<usize> {
    match rustix::io::preadv2(file, &mut [io::IoSliceMut::new(to)], 0, ReadWriteFlags::NOWAIT) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => rustix::io::pread(file, to, 0),
        read => read,
    }
}

impl Claims {
    /// Claims in `folder` by user `own`.
    ///
    /// # Errors
    /// What the file system says.
    pub fn new(folder: Folder, own: u32) -> io::Result<Self> {
        let claims = folder.claims(own)?;
        let mut made = Self { folder, claims, own, stamps: None };
        made.stamps = made.stamps_now();
        Ok(made)
    }

    fn stamps_now(&self) -> Option<[Stamp; 2]> {
        let stamp = |path| fs::metadata(path).map(|found| (found.dev(), found.ino(), found.mode(), found.uid())).ok();
        stamp(self.folder.path()).zip(stamp(&self.claims)).map(<[_; 2]>::from)
    }

    /// Whether the folder is the one that was checked, and nobody else may write to it by now.
    #[must_use]
    pub fn are_as_they_were(&self) -> bool {
        self.stamps.is_some() && self.stamps == self.stamps_now()
    }

    /// Finds out why nothing can be made in the folder.
    ///
    /// # Errors
    /// What the file system says.
    pub fn try_to_write(&self) -> io::Result<()> {
        let file = self.folder.path().join(format!("try-{}", std::process::id()));
        aside::lifted(|| self.make(&file))?;
        fs::remove_file(file)
    }

    /// The user that the folder was checked for.
    #[must_use]
    pub fn own(&self) -> u32 {
        self.own
    }

    /// Whether a process of this user may be at the other end.
    #[must_use]
    pub fn admits(&self, user: Option<u32>) -> bool {
        self.folder.admits(user, self.own)
    }

    fn file(&self, tuple: Tuple, role: Role) -> PathBuf {
        let ending = match role {
            Role::Waiting => "waiting",
            Role::Seeking => "seeking",
        };
        self.claims.join(format!("{}.{ending}", tuple.key()))
    }

    fn contest(&self, tuple: Tuple) -> PathBuf {
        self.claims.join(format!("{}.contested", tuple.key()))
    }

    /// A file where there is none: what another has put there, a link too, is left as it is.
    fn make(&self, file: &std::path::Path) -> io::Result<fs::File> {
        let mode = if self.folder.is_shared() { 0o644 } else { 0o600 };
        let made = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(file)?;
        if self.folder.is_shared() {
            // The mode was cut by the process's mask; others read it.
            made.set_permissions(fs::Permissions::from_mode(mode))?;
        }
        Ok(made)
    }

    fn service(&self, file: &std::path::Path) -> Option<String> {
        read(file).filter(|(_, user)| self.admits(Some(*user))).map(|(service, _)| service)
    }

    /// Claims the end of `tuple` that has this `role`, reachable at `service`.
    ///
    /// # Errors
    /// [`NotClaimed::Taken`] where somebody has.
    pub fn claim(&self, tuple: Tuple, role: Role, service: &str) -> Result<Claimed, NotClaimed> {
        let file = self.file(tuple, role);
        aside::lifted(|| {
            let mut open = match self.make(&file) {
                Ok(open) => open,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    return Err(NotClaimed::Taken(self.service(&file)));
                }
                Err(error) => return Err(NotClaimed::Io(error)),
            };
            let place = Place::Folder { file, contest: self.contest(tuple) };
            let claimed = Claimed { place, process: std::process::id() };
            open.write_all(service.as_bytes()).map_err(NotClaimed::Io)?;
            Ok(claimed)
        })
    }

    /// The service at which the waiting end can be reached, if it has claimed the connection.
    #[must_use]
    pub fn find(&self, tuple: Tuple) -> Option<String> {
        let file = self.file(tuple, Role::Waiting);
        // Most often there is none yet, and no limit is lifted for nothing.
        fs::symlink_metadata(&file).is_ok().then(|| self.service(&file)).flatten()
    }

    /// Whether a socket stands where `service` must be, and no link to another.
    #[must_use]
    pub fn has_socket(&self, service: &str) -> bool {
        use std::os::unix::fs::FileTypeExt;
        let socket = self.folder.path().join(format!("{service}.sock"));
        fs::symlink_metadata(socket).is_ok_and(|found| found.file_type().is_socket())
    }

    /// Lets the users of the folder call `service`, which this process has just made.
    ///
    /// # Errors
    /// What the file system says.
    pub fn open_to_users(&self, service: &str) -> io::Result<()> {
        if !self.folder.is_shared() {
            return Ok(());
        }
        let socket = self.folder.path().join(format!("{service}.sock"));
        // What the folder's owner may have put in its place meanwhile keeps its mode.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = fs::File::from(aside::lifted(|| rustix::fs::openat(CWD, &socket, flags, Mode::empty()))?);
        let found = file.metadata()?;
        if !found.file_type().is_socket() || found.uid() != rustix::process::geteuid().as_raw() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        fs::set_permissions(format!("/proc/self/fd/{}", file.as_raw_fd()), fs::Permissions::from_mode(0o666))
    }

    /// Says that a second end claims this connection.
    pub fn contest_it(&self, tuple: Tuple) {
        // A folder that takes no file takes no second claim either.
        let _ = aside::lifted(|| self.make(&self.contest(tuple)).map(drop));
    }

    /// Whether more than one end claims this connection.
    #[must_use]
    pub fn is_contested(&self, tuple: Tuple) -> bool {
        fs::symlink_metadata(self.contest(tuple)).is_ok()
    }

    /// Takes away the claim of a process that died: one that still names `service`.
    pub fn remove_dead_claim(&self, tuple: Tuple, role: Role, service: &str) {
        let file = self.file(tuple, role);
        if self.service(&file).is_some_and(|named| named == service) {
            let _ = fs::remove_file(file);
        }
    }
}

impl Drop for Claimed {
    /// A child made by fork leaves its parent's claims alone.
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        match &self.place {
            Place::Nowhere => {}
            Place::Folder { file, contest } => {
                let _ = fs::remove_file(file);
                let _ = fs::remove_file(contest);
            }
            Place::Broker { key, withdrawn } => lock(withdrawn).push(*key),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meet() -> (tempfile::TempDir, Claims) {
        let folder = tempfile::tempdir().unwrap();
        let own = rustix::process::geteuid().as_raw();
        let claims = Claims::new(Folder::check(folder.path(), own).unwrap(), own).unwrap();
        (folder, claims)
    }

    fn tuple() -> Tuple {
        Tuple::new("10.0.0.1:80".parse().unwrap(), "10.0.0.2:4000".parse().unwrap())
    }

    #[test]
    fn s7_second_claim_of_a_role_is_refused_and_the_first_can_be_found() {
        let ((folder, claims), tuple) = (meet(), tuple());
        let [one, two, three] = [1, 2, 3].map(service_name);
        let first = claims.claim(tuple, Role::Waiting, &one).unwrap();
        assert!(matches!(claims.claim(tuple, Role::Waiting, &two), Err(NotClaimed::Taken(Some(by))) if by == one));
        assert!(claims.claim(tuple.mirrored(), Role::Seeking, &three).is_ok());
        assert_eq!(claims.find(tuple.mirrored()), Some(one));
        claims.contest_it(tuple);
        assert!(claims.is_contested(tuple.mirrored()));
        drop(first);
        assert_eq!(claims.find(tuple), None);
        assert!(!claims.is_contested(tuple));
        assert_eq!(fs::read_dir(folder.path().join("claims")).unwrap().count(), 0, "nothing is left behind");
    }

    #[test]
    fn s7_folder_that_takes_no_claim_is_told_from_a_claim_that_another_has() {
        let ((folder, claims), tuple) = (meet(), tuple());
        assert!(claims.are_as_they_were());
        fs::remove_dir(folder.path().join("claims")).unwrap();
        let claimed = claims.claim(tuple, Role::Waiting, &service_name(1));
        assert!(matches!(&claimed, Err(NotClaimed::Io(_))), "{claimed:?}");
        assert!(!claims.are_as_they_were());
    }

    #[test]
    fn s7_claim_of_a_dead_process_is_buried_by_its_name_only() {
        let ((_folder, claims), tuple) = (meet(), tuple());
        let [dead, other] = [1, 2].map(service_name);
        let claimed = claims.claim(tuple, Role::Waiting, &dead).unwrap();
        claims.remove_dead_claim(tuple, Role::Waiting, &other);
        assert!(claims.find(tuple).is_some());
        claims.remove_dead_claim(tuple, Role::Waiting, &dead);
        assert_eq!(claims.find(tuple), None);
        drop(claimed);
    }

    #[test]
    fn s7_claim_that_is_no_small_file_with_a_services_name_is_none() {
        let ((folder, claims), tuple) = (meet(), tuple());
        let good = service_name(1);
        let elsewhere = folder.path().join("elsewhere");
        fs::write(&elsewhere, &good).unwrap();
        let file = folder.path().join("claims").join(format!("{}.waiting", tuple.key()));
        for bad in [
            "",
            "liar",
            "/run/some.sock",
            "sockets-",
            "sockets-0123456789abcde",
            "sockets-0123456789abcdef0",
            "sockets-0123456789ABCDEF",
            "sockets-../3456789abcdef",
            "sockets-0123456789abcdef\n",
            &"x".repeat(65),
            &" ".repeat(1 << 20),
        ] {
            fs::write(&file, bad).unwrap();
            assert_eq!(claims.find(tuple), None, "{bad:?}");
            assert!(matches!(claims.claim(tuple, Role::Waiting, &good), Err(NotClaimed::Taken(None))), "{bad:?}");
            fs::remove_file(&file).unwrap();
        }
        std::os::unix::fs::symlink(&elsewhere, &file).unwrap();
        assert_eq!(claims.find(tuple), None, "a link");
        fs::remove_file(&file).unwrap();
        // Nobody writes to it, and none of this may wait for that.
        rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        assert_eq!(claims.find(tuple), None, "a pipe");
        assert!(matches!(claims.claim(tuple, Role::Waiting, &good), Err(NotClaimed::Taken(None))));
        fs::remove_file(&file).unwrap();
        fs::write(&file, &good).unwrap();
        assert_eq!(claims.find(tuple), Some(good), "canary: a good one is found");
    }

    #[test]
    fn s7_claim_of_a_user_who_may_not_meet_here_is_none() {
        let test = "s7_claim_of_a_user_who_may_not_meet_here_is_none";
        if !rustix::process::geteuid().is_root() {
            let _ = writeln!(io::stderr(), "SKIP {test} (needs root): only root can give a file to somebody else");
            return;
        }
        let ((folder, claims), tuple) = (meet(), tuple());
        let good = service_name(1);
        let file = folder.path().join("claims").join(format!("{}.waiting", tuple.key()));
        fs::write(&file, &good).unwrap();
        assert_eq!(claims.find(tuple), Some(good.clone()), "canary: one's own");
        std::os::unix::fs::chown(&file, Some(65534), None).unwrap();
        assert_eq!(claims.find(tuple), None);
        claims.remove_dead_claim(tuple, Role::Waiting, &good);
        assert!(file.exists(), "nor is it taken away");
    }

    #[test]
    fn s7_link_in_the_place_of_a_file_that_is_made_is_not_followed() {
        let ((folder, claims), tuple) = (meet(), tuple());
        let mine = folder.path().join("mine");
        fs::write(&mine, "what a program keeps").unwrap();
        for ending in ["contested", "waiting"] {
            let file = folder.path().join("claims").join(format!("{}.{ending}", tuple.key()));
            std::os::unix::fs::symlink(&mine, file).unwrap();
        }
        claims.contest_it(tuple);
        assert!(claims.claim(tuple, Role::Waiting, &service_name(1)).is_err());
        assert_eq!(fs::read_to_string(&mine).unwrap(), "what a program keeps");
        assert!(claims.is_contested(tuple));
    }

    #[test]
    fn s7_socket_that_is_a_link_to_another_is_not_called() {
        let (folder, claims) = meet();
        let other = std::os::unix::net::UnixListener::bind(folder.path().join("other")).unwrap();
        let [link, own] = [1, 2].map(service_name);
        let at = |service: &str| folder.path().join(format!("{service}.sock"));
        std::os::unix::fs::symlink(folder.path().join("other"), at(&link)).unwrap();
        assert!(!claims.has_socket(&link));
        let _own = std::os::unix::net::UnixListener::bind(at(&own)).unwrap();
        assert!(claims.has_socket(&own), "canary");
        drop(other);
    }
}
