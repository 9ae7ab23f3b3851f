// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Prepares a daemon before it serves: its folder, its lock, and its limit of descriptors.

use std::{
    io,
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    },
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    event::{Timespec, poll},
    fs::{FlockOperation, Mode, OFlags},
    process::{Resource, Rlimit},
};

/// Makes the folder for sockets and state. Other users may pass through it to their sockets, but not list it.
///
/// # Errors
/// The folder cannot be made, or other users could put files into it.
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
            // If root's folder is used by another user's broker, it keeps the mode that root gave it.
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

/// Raises this process's limit of open files to the maximum, because each connection takes some.
///
/// # Errors
/// The kernel refuses a limit that it allows.
pub fn raise_limit() -> io::Result<()> {
    let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
    Ok(rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

/// Takes a lock on a file for as long as the returned descriptor lives.
///
/// # Errors
/// Another process holds the lock.
pub fn lock(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|error| match error {
        rustix::io::Errno::AGAIN => {
            io::Error::new(io::ErrorKind::ResourceBusy, format!("another process has {}", path.display()))
        }
        error => error.into(),
    })?;
    Ok(file)
}

/// Time for which a killed process may still seem to hold a lock: a child that it was starting keeps its files until
/// its program begins.
const LINGER: Duration = Duration::from_secs(1);

/// Takes a lock that another process may have held a moment ago.
///
/// # Errors
/// Another process holds the lock and keeps it.
pub fn lock_soon(path: &Path) -> io::Result<OwnedFd> {
    let began = Instant::now();
    loop {
        match lock(path) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && began.elapsed() < LINGER => {
                let _ = poll(&mut [], Some(&Timespec { tv_sec: 0, tv_nsec: 5_000_000 }));
            }
            locked => return locked,
        }
    }
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

    #[test]
    fn b16_second_broker_of_a_folder_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let first = lock(&folder.path().join("lock")).unwrap();
        assert_eq!(lock(&folder.path().join("lock")).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        assert_eq!(lock_soon(&folder.path().join("lock")).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        let path = folder.path().join("lock");
        let next = std::thread::spawn(move || lock_soon(&path));
        drop(first);
        drop(next.join().unwrap().unwrap());
        lock(&folder.path().join("lock")).unwrap();
    }
}
