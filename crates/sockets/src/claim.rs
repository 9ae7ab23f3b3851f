// SPDX-License-Identifier: Apache-2.0 OR MIT
//! S-7. Where two ends find each other: a folder in which each claims its connection by a file.
//!
//! The waiting end's file names the service at which its process can be reached; the seeking end's keeps others from
//! seeking the same connection. A second claim of the same role and key makes the connection ambiguous for both.

use std::{
    fs, io,
    io::Write,
    path::{Path, PathBuf},
};

use tombolo_domain::aside;

use crate::tuple::{Role, Tuple};

/// The folder of claims.
#[derive(Clone, Debug)]
pub struct Claims {
    folder: PathBuf,
}

/// A claim of this process; dropping it takes it back.
#[derive(Debug)]
pub struct Claimed {
    file: PathBuf,
    contest: PathBuf,
    process: u32,
}

/// Why there is no claim.
#[derive(Debug)]
pub enum NotClaimed {
    /// Somebody else has one; this is the service that it names.
    Taken(String),
    /// The folder cannot be used.
    Io(io::Error),
}

impl Claims {
    /// Claims in `folder`, which is made if it is missing.
    ///
    /// # Errors
    /// What the file system says.
    pub fn in_folder(folder: &Path) -> io::Result<Self> {
        let folder = folder.join("claims");
        match fs::create_dir(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(Self { folder }),
        }
    }

    fn file(&self, tuple: Tuple, role: Role) -> PathBuf {
        let ending = match role {
            Role::Waiting => "waiting",
            Role::Seeking => "seeking",
        };
        self.folder.join(format!("{}.{ending}", tuple.key()))
    }

    fn contest(&self, tuple: Tuple) -> PathBuf {
        self.folder.join(format!("{}.contested", tuple.key()))
    }

    /// Claims the end of `tuple` that has this `role`, reachable at `service`.
    ///
    /// # Errors
    /// [`NotClaimed::Taken`] where somebody has.
    pub fn claim(&self, tuple: Tuple, role: Role, service: &str) -> Result<Claimed, NotClaimed> {
        let file = self.file(tuple, role);
        aside::lifted(|| {
            let mut open = match fs::File::create_new(&file) {
                Ok(open) => open,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    return Err(NotClaimed::Taken(fs::read_to_string(&file).unwrap_or_default()));
                }
                Err(error) => return Err(NotClaimed::Io(error)),
            };
            let claimed = Claimed { file, contest: self.contest(tuple), process: std::process::id() };
            open.write_all(service.as_bytes()).map_err(NotClaimed::Io)?;
            Ok(claimed)
        })
    }

    /// The service at which the waiting end can be reached, if it has claimed the connection.
    #[must_use]
    pub fn find(&self, tuple: Tuple) -> Option<String> {
        let file = self.file(tuple, Role::Waiting);
        // Most often there is none yet, and no limit is lifted for nothing.
        let read = file.exists().then(|| aside::lifted(|| fs::read_to_string(file).ok()));
        read.flatten().filter(|service| !service.is_empty())
    }

    /// Says that a second end claims this connection.
    pub fn contest_it(&self, tuple: Tuple) {
        // A folder that takes no file takes no second claim either.
        let _ = aside::lifted(|| fs::File::create(self.contest(tuple)).map(drop));
    }

    /// Whether more than one end claims this connection.
    #[must_use]
    pub fn is_contested(&self, tuple: Tuple) -> bool {
        self.contest(tuple).exists()
    }

    /// Takes away the claim of a process that died: one that still names `service`.
    pub fn bury(&self, tuple: Tuple, role: Role, service: &str) {
        let file = self.file(tuple, role);
        if aside::lifted(|| fs::read_to_string(&file)).is_ok_and(|named| named == service) {
            let _ = fs::remove_file(file);
        }
    }
}

impl Drop for Claimed {
    /// A child made by fork leaves its parent's claims alone.
    fn drop(&mut self) {
        if self.process == std::process::id() {
            let _ = fs::remove_file(&self.file);
            let _ = fs::remove_file(&self.contest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s7_second_claim_of_a_role_is_refused_and_the_first_can_be_found() {
        let folder = tempfile::tempdir().unwrap();
        let claims = Claims::in_folder(folder.path()).unwrap();
        let tuple = Tuple::new("10.0.0.1:80".parse().unwrap(), "10.0.0.2:4000".parse().unwrap());
        let first = claims.claim(tuple, Role::Waiting, "one").unwrap();
        assert!(matches!(claims.claim(tuple, Role::Waiting, "two"), Err(NotClaimed::Taken(by)) if by == "one"));
        assert!(claims.claim(tuple.mirrored(), Role::Seeking, "three").is_ok());
        assert_eq!(claims.find(tuple.mirrored()).as_deref(), Some("one"));
        claims.contest_it(tuple);
        assert!(claims.is_contested(tuple.mirrored()));
        drop(first);
        assert_eq!(claims.find(tuple), None);
        assert!(!claims.is_contested(tuple));
        assert_eq!(fs::read_dir(folder.path().join("claims")).unwrap().count(), 0, "nothing is left behind");
    }

    #[test]
    fn s7_claim_of_a_dead_process_is_buried_by_its_name_only() {
        let folder = tempfile::tempdir().unwrap();
        let claims = Claims::in_folder(folder.path()).unwrap();
        let tuple = Tuple::new("10.0.0.1:80".parse().unwrap(), "10.0.0.2:4000".parse().unwrap());
        let claimed = claims.claim(tuple, Role::Waiting, "dead").unwrap();
        claims.bury(tuple, Role::Waiting, "other");
        assert!(claims.find(tuple).is_some());
        claims.bury(tuple, Role::Waiting, "dead");
        assert_eq!(claims.find(tuple), None);
        drop(claimed);
    }
}
