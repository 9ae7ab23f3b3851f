// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks the folder in which endpoints meet: who may be in it, and what its configuration allows (S-7).
//!
//! Without a configuration the folder is for one user: this user owns it, nobody else may write to it, and peers are of
//! this user. `tombolo.conf` in the folder, a file of the folder's owner, can allow more.

use std::{
    fs, io,
    io::Read,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{CWD, Mode, OFlags},
    io::Errno,
};
use tombolo_domain::aside;

/// Name of the configuration file.
pub const CONFIGURATION: &str = "tombolo.conf";
/// Largest size of it in bytes, and largest number of users that it may name.
const CONFIGURATION_MAX: usize = 4096;
const USERS_MAX: usize = 64;

/// Reason for which a folder is refused, with what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The folder cannot be opened.
    #[error("{folder}: {source}")]
    Io {
        /// The folder.
        folder: String,
        /// The file system's error.
        source: io::Error,
    },
    /// It is not a folder.
    #[error("{0}: it is no folder; name another one")]
    NotFolder(String),
    /// It belongs to another user, who does not admit this one.
    #[error(
        "{folder}: it belongs to user {owner}, and no {CONFIGURATION} of theirs in it names user {user}; name a folder of your own"
    )]
    Foreign {
        /// The folder.
        folder: String,
        /// The user who owns it.
        owner: u32,
        /// This process's user.
        user: u32,
    },
    /// Others may write to it.
    #[error(
        "{folder}: others may write to it (mode {mode:o}): chmod go-w, or name its users in {CONFIGURATION} and set the sticky bit"
    )]
    Writable {
        /// The folder.
        folder: String,
        /// Its mode.
        mode: u32,
    },
    /// Its configuration is invalid, or belongs to another user.
    #[error("{file}: {why}")]
    Configuration {
        /// The file.
        file: String,
        /// What is wrong with it.
        why: String,
    },
}

/// Users whose processes may be peers.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Users {
    /// This process's own user.
    #[default]
    Own,
    /// The users with these numbers, and this process's own.
    These(Vec<u32>),
    /// All users who can write to the folder.
    Any,
}

/// A folder that was checked, and what its configuration says.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Folder {
    path: PathBuf,
    owner: u32,
    /// Users whose processes may be peers.
    pub users: Users,
    /// Whether connections are joined only where both endpoints know the sequence numbers.
    pub sequences_required: bool,
    /// Whether endpoints may see different addresses of each other.
    pub translated: bool,
}

impl Folder {
    /// Checks a folder for user `own`.
    ///
    /// # Errors
    /// Returns why the folder is refused.
    pub fn check(path: &Path, own: u32) -> Result<Self, Refused> {
        let shown = || path.display().to_string();
        let found = fs::metadata(path).map_err(|source| Refused::Io { folder: shown(), source })?;
        if !found.is_dir() {
            return Err(Refused::NotFolder(shown()));
        }
        let (owner, mode) = (found.uid(), found.mode() & 0o7777);
        let shared = mode & 0o022 != 0;
        let mut folder = Self { path: path.into(), owner, ..Self::default() };
        // In a folder without the sticky bit, everybody who may write can put a file in another's place.
        if !shared || mode & 0o1000 != 0 {
            folder.configure()?;
        }
        let named = match &folder.users {
            Users::Own => false,
            Users::These(users) => owner == own || users.contains(&own),
            Users::Any => true,
        };
        if owner != own && !named {
            return Err(Refused::Foreign { folder: shown(), owner, user: own });
        }
        if shared && !named {
            return Err(Refused::Writable { folder: shown(), mode });
        }
        Ok(folder)
    }

    /// Reads the configuration, if there is one.
    fn configure(&mut self) -> Result<(), Refused> {
        let file = self.path.join(CONFIGURATION);
        let wrong = |why: String| Refused::Configuration { file: file.display().to_string(), why };
        let opened = match open(&file) {
            Ok(opened) => opened,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(wrong(error.to_string())),
        };
        let about = opened.metadata().map_err(|error| wrong(error.to_string()))?;
        if !about.is_file() || about.uid() != self.owner || about.mode() & 0o022 != 0 {
            return Err(wrong(format!(
                "it must be a file of user {}, whom the folder belongs to, that nobody else may write to",
                self.owner
            )));
        }
        let mut text = String::new();
        opened
            .take(CONFIGURATION_MAX as u64 + 1)
            .read_to_string(&mut text)
            .map_err(|error| wrong(error.to_string()))?;
        if text.len() > CONFIGURATION_MAX {
            return Err(wrong(format!("it is longer than {CONFIGURATION_MAX} bytes")));
        }
        for line in text.lines().map(|line| line.split('#').next().unwrap_or_default().trim()) {
            if !line.is_empty() {
                self.set(line).map_err(|why| wrong(format!("`{line}`: {why}")))?;
            }
        }
        Ok(())
    }

    fn set(&mut self, line: &str) -> Result<(), String> {
        let Some((key, value)) = line.split_once('=').map(|(key, value)| (key.trim(), value.trim())) else {
            return Err("a line is `key = value`".into());
        };
        match (key, value) {
            ("users", "any") => self.users = Users::Any,
            ("users", list) => {
                let users: Result<Vec<u32>, _> = list.split_whitespace().map(str::parse).collect();
                let users = users.map_err(|_| "users are `any`, or numbers with blanks between them")?;
                if users.is_empty() || users.len() > USERS_MAX {
                    return Err(format!("1 to {USERS_MAX} users can be named"));
                }
                self.users = Users::These(users);
            }
            ("sequence-numbers", "required") => self.sequences_required = true,
            ("sequence-numbers", "used") => self.sequences_required = false,
            ("translated", "yes") => self.translated = true,
            ("translated", "no") => self.translated = false,
            ("sequence-numbers" | "translated", _) => {
                return Err("`sequence-numbers` is `used` or `required`, `translated` is `yes` or `no`".into());
            }
            _ => return Err("known are `users`, `sequence-numbers` and `translated`".into()),
        }
        Ok(())
    }

    /// Returns whether a process of `user` may be the peer of user `own`. A process of unknown user may be only where
    /// any user may.
    #[must_use]
    pub fn admits(&self, user: Option<u32>, own: u32) -> bool {
        match (&self.users, user) {
            (Users::Any, _) => true,
            (_, None) => false,
            (Users::Own, Some(user)) => user == own,
            (Users::These(users), Some(user)) => user == own || users.contains(&user),
        }
    }

    /// Returns whether other users meet here, so that they must be able to open what this process makes.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.users != Users::Own
    }

    /// Returns the folder's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the folder of claims in it. Makes that folder if it is missing, and checks it likewise.
    ///
    /// # Errors
    /// Returns the file system's error; [`io::ErrorKind::PermissionDenied`] where it is no folder, or not one of an
    /// admitted user.
    pub fn claims(&self, own: u32) -> io::Result<PathBuf> {
        let claims = self.path.join("claims");
        match fs::DirBuilder::new().mode(0o700).create(&claims) {
            // All members make files in it. The process's umask has cut the mode.
            Ok(()) if self.is_shared() => {
                // If the folder's owner has put another one in its place meanwhile, that one keeps its mode.
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let made = aside::lifted(|| rustix::fs::openat(CWD, &claims, flags, Mode::empty()))?;
                if rustix::fs::fstat(&made)?.st_uid == own {
                    rustix::fs::fchmod(&made, Mode::from_raw_mode(0o1777))?;
                }
            }
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let found = fs::symlink_metadata(&claims)?;
        let trusted = found.is_dir() && (found.uid() == self.owner || self.admits(Some(found.uid()), own));
        let mode = found.mode();
        if !trusted || mode & 0o022 != 0 && !(self.is_shared() && mode & 0o1000 != 0) {
            let why = "it must be a folder of a user's who may meet here, to which nobody else may write";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        Ok(claims)
    }

    /// Returns the user who owns it.
    #[must_use]
    pub fn owner(&self) -> u32 {
        self.owner
    }
}

/// Opens a file for reading, whatever a member may have put there: does not follow a link, and does not block.
pub(crate) fn open(file: &Path) -> io::Result<fs::File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    aside::lifted(|| match rustix::fs::openat(CWD, file, flags, Mode::empty()) {
        Ok(opened) => Ok(opened.into()),
        Err(Errno::LOOP) => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is a symbolic link")),
        Err(error) => Err(error.into()),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn folder(mode: u32, configuration: Option<&str>) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        if let Some(text) = configuration {
            let file = folder.path().join(CONFIGURATION);
            fs::write(&file, text).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        }
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(mode)).unwrap();
        folder
    }

    fn own() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    fn check(mode: u32, configuration: Option<&str>, user: u32) -> Result<Folder, String> {
        Folder::check(folder(mode, configuration).path(), user).map_err(|refused| refused.to_string())
    }

    #[test]
    fn s7_folder_without_a_configuration_is_one_users_alone() {
        for mode in [0o700, 0o755, 0o1755] {
            let found = check(mode, None, own()).unwrap();
            assert!(
                found.admits(Some(own()), own()) && !found.admits(Some(own() + 1), own()) && !found.admits(None, own())
            );
            assert!(!found.is_shared());
        }
        for mode in [0o777, 0o1777, 0o770, 0o1720, 0o702] {
            assert!(check(mode, None, own()).unwrap_err().contains("others may write"), "{mode:o}");
        }
        assert!(check(0o755, None, own() + 1).unwrap_err().contains("belongs to user"));
    }

    #[test]
    fn s7_configuration_names_the_users_and_the_folder_needs_the_sticky_bit() {
        let text = "# who may\nusers = 7 8 # these\n sequence-numbers = required\ntranslated=yes\n";
        let found = check(0o1777, Some(text), 7).unwrap();
        assert!(
            found.admits(Some(7), 7) && found.admits(Some(8), 7) && !found.admits(Some(9), 7) && !found.admits(None, 7)
        );
        assert!(found.is_shared() && found.sequences_required && found.translated);
        assert!(check(0o1777, Some(text), 9).unwrap_err().contains("belongs to user"), "not named");
        assert!(check(0o777, Some(text), 7).is_err(), "anybody could have put it there");
        assert!(check(0o777, Some(text), own()).unwrap_err().contains("others may write"));
        let found = check(0o1777, Some("users = any"), 7).unwrap();
        assert!(found.admits(Some(9), 7) && found.admits(None, 7));
    }

    #[test]
    fn s7_configuration_of_somebody_else_or_of_nonsense_refuses_the_folder() {
        for text in ["users", "users = root", "users =", "uses = 7", "translated = maybe", "sequence-numbers = no"] {
            assert!(check(0o755, Some(text), own()).unwrap_err().contains(CONFIGURATION), "{text}");
        }
        assert!(check(0o755, Some(&"#".repeat(CONFIGURATION_MAX + 1)), own()).unwrap_err().contains("longer"));
        let writable = folder(0o755, Some("users = any"));
        let file = writable.path().join(CONFIGURATION);
        fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
        assert!(Folder::check(writable.path(), own()).is_err());
        fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", &file).unwrap();
        assert!(Folder::check(writable.path(), own()).unwrap_err().to_string().contains("symbolic link"));
        fs::remove_file(&file).unwrap();
        // The pipe has no writer, and an open must not wait for one.
        rustix::fs::mknodat(CWD, &file, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert!(Folder::check(writable.path(), own()).is_err());
    }

    #[test]
    fn s7_folder_of_claims_is_a_members_and_no_link() {
        let alone = folder(0o700, None);
        let found = Folder::check(alone.path(), own()).unwrap();
        let claims = found.claims(own()).unwrap();
        assert_eq!(fs::metadata(&claims).unwrap().mode() & 0o7777, 0o700);
        fs::set_permissions(&claims, fs::Permissions::from_mode(0o1777)).unwrap();
        assert!(found.claims(own()).is_err(), "others may write to it");
        fs::remove_dir(&claims).unwrap();
        std::os::unix::fs::symlink("/tmp", &claims).unwrap();
        assert!(found.claims(own()).is_err(), "a link");
        let shared = folder(0o1777, Some("users = any"));
        let found = Folder::check(shared.path(), own()).unwrap();
        assert_eq!(fs::metadata(found.claims(own()).unwrap()).unwrap().mode() & 0o7777, 0o1777);
    }
}
