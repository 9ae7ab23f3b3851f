// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds and ends a user's interfaces: each has a socket in a folder of that user. A client sends one line, and
//! receives one line of JSON.

use std::{
    fs::{self, DirBuilder},
    io::{self, BufRead, BufReader, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::{
            fs::{DirBuilderExt, FileTypeExt, MetadataExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{
    error::{Error, Result},
    handle::check_name,
};

/// Time that the other side may take; one that is stopped makes others wait.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time that an interface may take to end.
const ENDS: Duration = Duration::from_secs(5);
/// Length in bytes that no line reaches.
const LINE_MOST: u64 = 64 << 10;
const STATUS: &str = "status";
const DOWN: &str = "down";

/// Request of a client to a running interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// Only the status, which every request returns.
    Status,
    /// To end.
    Down,
}

/// Returns the folder of this user's running interfaces.
#[must_use]
pub fn folder() -> PathBuf {
    tombolo_backends::services_folder().join("net")
}

/// The socket of a running interface, which is removed when this value is dropped.
#[derive(Debug)]
pub struct Control {
    listener: UnixListener,
    path: PathBuf,
}

impl Control {
    /// Makes the socket of this process's `interface` in `folder`, and the folder if it is not there.
    ///
    /// # Errors
    /// The folder belongs to another user, or cannot be made or written.
    pub fn open(folder: &Path, interface: &str) -> Result<Self> {
        check_name(interface)?;
        let failed = |source| Error::Folder { folder: folder.into(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
        let meta = fs::symlink_metadata(folder).map_err(failed)?;
        if !meta.is_dir() || meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o022 != 0 {
            return Err(failed(io::Error::other("it must be a folder of this user's that nobody else can write")));
        }
        let name = format!("{}-{interface}", std::process::id());
        let path = folder.join(format!("{name}.sock"));
        // Named only once it listens: a socket that refuses counts as that of a dead process, and is removed.
        let early = folder.join(format!("{name}.new"));
        let _ = fs::remove_file(&early);
        let listener = UnixListener::bind(&early).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        fs::rename(&early, &path).map_err(failed)?;
        Ok(Self { listener, path })
    }

    /// Answers a waiting client, if there is one, and returns its request.
    pub fn answer(&self, status: &impl serde::Serialize) -> Option<Request> {
        let (mut client, _) = self.listener.accept().ok()?;
        client.set_nonblocking(false).ok()?;
        client.set_read_timeout(Some(PATIENCE)).ok()?;
        client.set_write_timeout(Some(PATIENCE)).ok()?;
        let mut line = String::new();
        BufReader::new(&client).take(64).read_line(&mut line).ok()?;
        let request = match line.trim_end() {
            STATUS => Request::Status,
            DOWN => Request::Down,
            _ => return None,
        };
        let mut answer = serde_json::to_string(status).ok()?;
        answer.push('\n');
        client.write_all(answer.as_bytes()).ok()?;
        Some(request)
    }
}

/// Polls readable while a client waits.
impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// A running interface, as another process sees it.
#[derive(Clone, PartialEq, Debug)]
pub struct Found {
    /// Its answer: the fields of [`Status`](crate::Status) or of [`BridgeStatus`](crate::BridgeStatus).
    pub status: Value,
    path: PathBuf,
}

impl Found {
    /// Returns whether the interface has this name.
    #[must_use]
    pub fn is_called(&self, name: &str) -> bool {
        self.status["interface"] == name
    }

    /// Returns whether a rule of the host requires it, so that it would be made again.
    #[must_use]
    pub fn is_by_rule(&self) -> bool {
        self.status["by_rule"] == true
    }

    /// Ends the interface, and waits until it is gone.
    ///
    /// # Errors
    /// It does not answer, or does not end in time.
    pub fn end(&self) -> io::Result<()> {
        ask(&self.path, DOWN)?;
        let until = Instant::now() + ENDS;
        while UnixStream::connect(&self.path).is_ok() {
            if Instant::now() > until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            thread::park_timeout(Duration::from_millis(10));
        }
        Ok(())
    }
}

/// Finds the running interfaces in `folder`, sorted by name. Removes sockets whose process has died.
///
/// # Errors
/// The folder cannot be read. A missing folder is no error.
pub fn find(folder: &Path) -> Result<Vec<Found>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(Error::Folder { folder: folder.into(), source }),
    };
    let is_socket = |path: &PathBuf| {
        let is_called_so = path.extension().is_some_and(|end| end == "sock");
        is_called_so && fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
    };
    let paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(is_socket).collect();
    // All are asked at once, so that a stopped process does not delay the next one.
    let mut found: Vec<Found> = thread::scope(|scope| {
        let asked: Vec<_> = paths.into_iter().map(|path| scope.spawn(|| answer_of(path))).collect();
        asked.into_iter().filter_map(|thread| thread.join().ok().flatten()).collect()
    });
    found.sort_by_key(|found| (found.status["interface"].to_string(), found.status["pid"].as_u64()));
    Ok(found)
}

/// Returns the answer of the process that owns this socket. Removes the socket if that process has died.
fn answer_of(path: PathBuf) -> Option<Found> {
    match ask(&path, STATUS) {
        Ok(status) => Some(Found { status, path }),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            let _ = fs::remove_file(&path);
            None
        }
        Err(_) => None,
    }
}

fn ask(path: &Path, what: &str) -> io::Result<Value> {
    let mut socket = UnixStream::connect(path)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    writeln!(socket, "{what}")?;
    let mut line = String::new();
    BufReader::new(socket).take(LINE_MOST).read_line(&mut line)?;
    serde_json::from_str(&line).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_of_a_dead_process_is_removed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| folder.path().join(name);
        drop(UnixListener::bind(place("7.sock")).unwrap());
        // A socket that does not listen yet has no final name yet.
        drop(UnixListener::bind(place("8.new")).unwrap());
        fs::write(place("9.sock"), "a file").unwrap();
        assert_eq!(find(folder.path()).unwrap(), []);
        let left = ["7.sock", "8.new", "9.sock"].map(|name| place(name).exists());
        assert_eq!(left, [false, true, true]);
        assert_eq!(find(&place("nowhere")).unwrap(), []);
    }

    #[test]
    fn folder_that_others_could_write_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let open = folder.path().join("open");
        DirBuilder::new().create(&open).unwrap();
        fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        let error = Control::open(&open, "tmb0").unwrap_err();
        assert!(
            std::error::Error::source(&error).is_some_and(|why| why.to_string().contains("nobody else")),
            "{error}"
        );
        assert_eq!(fs::read_dir(&open).unwrap().count(), 0);
    }
}
