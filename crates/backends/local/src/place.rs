// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds the path of a service's socket (L-1, L-2).

use std::{
    env,
    ffi::{OsStr, OsString},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{CWD, Mode, OFlags},
    io::Errno,
    net::SocketAddrUnix,
};
use tombolo_domain::{Error, Result};

/// Largest length of a service's name.
const NAME_MAX: usize = 64;
/// Largest length of `sun_path` without its terminating zero.
const ADDRESS_MAX: usize = 107;

/// Folder and file name of a socket.
#[derive(Debug)]
pub(crate) struct SocketPath {
    folder: PathBuf,
    name: OsString,
    /// Whether the folder is made when missing, and whether it must then be this user's alone.
    custody: Custody,
}

/// Party that is responsible for a folder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Custody {
    /// The user, who gave the full path of the socket: the folder must exist.
    Path,
    /// The user, who named it as the folder of services: it is made when missing.
    Folder,
    /// This crate, because no folder was named: it is made when missing and must be this user's alone.
    Ours,
}

impl SocketPath {
    /// Finds the socket's path for `service` in `folder`, or in the folder that the environment names.
    pub(crate) fn find(service: &str, folder: Option<&Path>) -> Result<Self> {
        let bad = |why| Err(Error::BadService { service: service.into(), why });
        if service.contains('\0') {
            return bad("it contains a zero byte");
        }
        if service.starts_with('/') {
            // `file_name` ignores a trailing slash or dot, with which no file name ends.
            let path = Path::new(service);
            return match (path.parent(), path.file_name()) {
                (Some(folder), Some(name)) if service.ends_with(&*name.to_string_lossy()) => {
                    Ok(Self { folder: folder.into(), name: name.into(), custody: Custody::Path })
                }
                _ => bad("a path has to end in a file name"),
            };
        }
        if service.is_empty() || service.len() > NAME_MAX {
            return bad("a name has 1 to 64 characters");
        }
        if !service.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)) {
            return bad("a name is made of letters, digits, `.`, `_` and `-`; a path begins with `/`");
        }
        let (folder, custody) = match folder {
            Some(folder) => (folder.into(), Custody::Folder),
            None => default_folder(|name| env::var_os(name), rustix::process::geteuid().as_raw()),
        };
        Ok(Self { folder, name: format!("{service}.sock").into(), custody })
    }

    /// Returns the file name within the folder.
    pub(crate) fn name(&self) -> &OsStr {
        &self.name
    }

    /// Returns the path, for error messages.
    pub(crate) fn shown(&self) -> String {
        self.folder.join(&self.name).display().to_string()
    }

    /// Opens the folder so that it can be locked. Makes it first if this crate is responsible for that.
    pub(crate) fn folder_to_listen(&self) -> Result<OwnedFd> {
        if self.custody != Custody::Path {
            match rustix::fs::mkdir(&self.folder, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(self.error("mkdir", error)),
            }
        }
        self.open_folder(OFlags::RDONLY)
    }

    /// Opens the folder so that the socket can be reached through it.
    pub(crate) fn folder_to_connect(&self) -> Result<OwnedFd> {
        self.open_folder(OFlags::PATH)
    }

    fn open_folder(&self, access: OFlags) -> Result<OwnedFd> {
        let shown = self.folder.display();
        let follow = if self.custody == Custody::Ours { OFlags::NOFOLLOW } else { OFlags::empty() };
        let flags = access | follow | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = match rustix::fs::openat(CWD, &self.folder, flags, Mode::empty()) {
            Ok(folder) => folder,
            Err(Errno::NOENT) if access == OFlags::PATH => return Err(Error::NotFound(self.shown())),
            Err(Errno::NOTDIR | Errno::LOOP) if self.custody == Custody::Ours => {
                return Err(Error::Denied(format!("{shown}, which is no folder but a link or a file")));
            }
            Err(error) => return Err(self.error("open", error)),
        };
        if self.custody == Custody::Ours {
            let stat = rustix::fs::fstat(&folder).map_err(|error| self.error("fstat", error))?;
            if stat.st_uid != rustix::process::geteuid().as_raw() {
                return Err(Error::Denied(format!("{shown}, which belongs to user {}", stat.st_uid)));
            }
            if stat.st_mode & 0o022 != 0 {
                return Err(Error::Denied(format!(
                    "{shown}, which others may write (mode {:o})",
                    stat.st_mode & 0o7777
                )));
            }
        }
        Ok(folder)
    }

    /// Returns the socket's address: its path if that fits, else a path through the open `folder`.
    pub(crate) fn address(&self, folder: &impl AsFd) -> Result<SocketAddrUnix> {
        let path = self.folder.join(&self.name);
        let short = if path.as_os_str().len() <= ADDRESS_MAX {
            path
        } else {
            Path::new(&format!("/proc/self/fd/{}", folder.as_fd().as_raw_fd())).join(&self.name)
        };
        SocketAddrUnix::new(short.as_os_str().as_bytes()).map_err(|_| Error::BadService {
            service: self.name.to_string_lossy().into_owned(),
            why: "the file name is longer than a socket's can be",
        })
    }

    /// Translates the refusal of a connection.
    pub(crate) fn refused(&self, error: Errno) -> Error {
        match error {
            Errno::NOENT | Errno::CONNREFUSED => Error::NotFound(self.shown()),
            Errno::PROTOTYPE => {
                Error::BadService { service: self.shown(), why: "a socket of another kind is in its place" }
            }
            error => self.error("connect", error),
        }
    }

    /// Translates an error of the system call `call`.
    pub(crate) fn error(&self, call: &'static str, error: Errno) -> Error {
        match error {
            Errno::ACCESS | Errno::PERM | Errno::ROFS => {
                Error::Denied(format!("{}: check its owner and permissions", self.shown()))
            }
            error => match Error::os(call, error) {
                Error::Os { call, source, .. } => Error::Os { call, path: Some(self.shown()), source },
                named => named,
            },
        }
    }
}

/// Returns the folder of services for a caller that named none.
pub(crate) fn default_folder(var: impl Fn(&str) -> Option<OsString>, uid: u32) -> (PathBuf, Custody) {
    let set = |name| var(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(folder) = set("TOMBOLO_DIR") {
        return (folder, Custody::Folder);
    }
    let folder = match set("XDG_RUNTIME_DIR") {
        Some(runtime) => runtime.join("tombolo"),
        None if uid == 0 => "/run/tombolo".into(),
        None => format!("/tmp/tombolo-{uid}").into(),
    };
    (folder, Custody::Ours)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn l1_folder_is_the_first_that_is_named() {
        let folder = |vars: &[(&str, &str)], uid| {
            let var = |name: &str| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
            default_folder(var, uid).0.display().to_string()
        };
        assert_eq!(folder(&[("TOMBOLO_DIR", "/a"), ("XDG_RUNTIME_DIR", "/b")], 7), "/a");
        assert_eq!(folder(&[("TOMBOLO_DIR", ""), ("XDG_RUNTIME_DIR", "/b")], 7), "/b/tombolo");
        assert_eq!(folder(&[], 0), "/run/tombolo");
        assert_eq!(folder(&[], 7), "/tmp/tombolo-7");
    }

    #[test]
    fn l1_service_that_is_neither_name_nor_path_is_refused() {
        for bad in ["", "a/b", "../a", "a b", "ä", "a\0", "/", "/a/", "/a/..", "/a/.", "/a\0b", &"n".repeat(65)] {
            assert!(matches!(SocketPath::find(bad, None), Err(Error::BadService { .. })), "{bad:?}");
        }
        for good in ["a", "A-1_b.c", "..", &"n".repeat(64)] {
            assert_eq!(SocketPath::find(good, None).unwrap().name, *format!("{good}.sock"));
        }
        assert_eq!(SocketPath::find("/a/b", None).unwrap().shown(), "/a/b");
    }

    fn ours(folder: &Path) -> SocketPath {
        SocketPath { folder: folder.into(), name: "a.sock".into(), custody: Custody::Ours }
    }

    #[test]
    fn l2_folder_of_our_own_is_made_private() {
        let parent = tempfile::tempdir().unwrap();
        let folder = ours(&parent.path().join("tombolo")).folder_to_listen().unwrap();
        assert_eq!(rustix::fs::fstat(&folder).unwrap().st_mode & 0o7777, 0o700);
    }

    #[test]
    fn l2_folder_that_is_a_link_or_that_others_may_write_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let (real, link) = (parent.path().join("real"), parent.path().join("link"));
        std::fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        assert!(matches!(ours(&link).folder_to_listen(), Err(Error::Denied(_))));
        assert!(matches!(ours(&link).folder_to_connect(), Err(Error::Denied(_))));
        std::fs::set_permissions(&real, std::os::unix::fs::PermissionsExt::from_mode(0o770)).unwrap();
        assert!(matches!(ours(&real).folder_to_listen(), Err(Error::Denied(_))));
    }

    #[test]
    fn l2_folder_of_somebody_else_is_refused() {
        if !rustix::process::geteuid().is_root() {
            let test = "l2_folder_of_somebody_else_is_refused";
            let _ = writeln!(std::io::stderr(), "SKIP {test} (needs root): only root can give a folder away");
            return;
        }
        let parent = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(parent.path(), Some(12345), None).unwrap();
        let error = ours(parent.path()).folder_to_listen().unwrap_err();
        assert!(error.to_string().contains("user 12345"), "{error}");
    }
}
