// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The descriptor store: a small process that keeps descriptors under names while the broker is away (B-16).
//!
//! It knows four requests: keep these, forget that name, give back all, and end once nothing is kept. It reads no
//! descriptor and decides nothing, so it has no reason to end before the machine does.

use std::{
    collections::BTreeMap,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Mutex,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{SocketType, sockopt},
};
use tombolo_os::lock::lock;

use crate::{
    fd_passing::{self, DESCRIPTORS_MAX},
    panics,
    startup::{open_folder, raise_limit},
};

/// Largest length of a name, in bytes.
const KEY_MAX: usize = 200;
/// Largest number of names.
const ITEMS_MAX: usize = 16 << 10;
/// Largest number of clients at a time: one broker, and one that takes over from it.
const CLIENTS_MAX: usize = 4;
/// Time that a question may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time for which nobody is accepted after there was no descriptor for a client.
const SHUT: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

const KEEP: u8 = b'k';
const FORGET: u8 = b'f';
const GIVE: u8 = b'g';
const LEAVE: u8 = b'l';
const OK: u8 = b'o';
const ITEM: u8 = b'i';
const NO: u8 = b'n';

/// Kind of error that stands for a refusal.
const REFUSED: io::ErrorKind = io::ErrorKind::QuotaExceeded;

/// Returns whether the error is a refusal of the descriptor store, which is there then.
#[must_use]
pub fn is_refusal(error: &io::Error) -> bool {
    error.kind() == REFUSED
}

/// Returns the path of the socket at which the descriptor store listens.
fn socket_in(folder: &Path) -> PathBuf {
    folder.join("holder.socket")
}

/// The broker's connection with the descriptor store.
#[derive(Debug)]
pub struct DescriptorStore {
    /// Locked from a question to the end of its answer.
    socket: Mutex<OwnedFd>,
}

impl DescriptorStore {
    /// Connects to the descriptor store of `folder`. Starts one if there is none and `start` is true.
    ///
    /// # Errors
    /// There is none, or it does not answer.
    pub fn find(folder: &Path, start: bool) -> io::Result<Self> {
        let path = socket_in(folder);
        let began = Instant::now();
        let mut child = None;
        loop {
            match fd_passing::connect(&path, SocketType::SEQPACKET) {
                Ok(socket) => {
                    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(PATIENCE))?;
                    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(PATIENCE))?;
                    return Ok(Self { socket: Mutex::new(socket) });
                }
                // A store whose socket exists but refuses connections is about to listen, or was killed.
                Err(error) if !start && error.kind() != io::ErrorKind::ConnectionRefused => return Err(error),
                Err(error) if began.elapsed() > PATIENCE => return Err(error),
                Err(_) if start && child.is_none() => child = Some(spawn(folder)?),
                // The store was started and does not listen yet; nothing reports when it does.
                Err(_) => drop(poll(&mut [], Some(&Timespec { tv_sec: 0, tv_nsec: 5_000_000 }))),
            }
        }
    }

    /// Sends a question and receives the whole answer. After any error but a refusal, no further question is sent: a
    /// late answer would be taken for the answer to another question.
    fn ask(&self, what: u8, key: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<BTreeMap<String, Vec<OwnedFd>>> {
        let socket = lock(&self.socket);
        Self::ask_on(&socket, what, key, descriptors).inspect_err(|error| {
            if !is_refusal(error) {
                let _ = rustix::net::shutdown(&*socket, rustix::net::Shutdown::Both);
            }
        })
    }

    fn ask_on(
        socket: &OwnedFd,
        what: u8,
        key: &str,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<BTreeMap<String, Vec<OwnedFd>>> {
        let mut bytes = vec![what];
        bytes.extend_from_slice(key.as_bytes());
        if !fd_passing::send(socket, &bytes, descriptors)? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut items = BTreeMap::new();
        loop {
            let mut buffer = [0; KEY_MAX + 1];
            let (len, descriptors) = fd_passing::receive(socket, &mut buffer)?;
            let bytes = buffer.get(..len).filter(|bytes| !bytes.is_empty()).ok_or(io::ErrorKind::UnexpectedEof)?;
            let text = String::from_utf8_lossy(&bytes[1..]).into_owned();
            match bytes[0] {
                ITEM => drop(items.insert(text, descriptors)),
                OK => return Ok(items),
                _ => return Err(io::Error::new(REFUSED, format!("the descriptor store refuses: {text}"))),
            }
        }
    }

    /// Keeps `descriptors` under `key`, in place of what was kept there. They are safe when this returns.
    ///
    /// # Errors
    /// The descriptor store is gone, or full.
    pub fn store_descriptors(&self, key: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.ask(KEEP, key, descriptors).map(drop)
    }

    /// Forgets what is kept under `key`, if anything.
    ///
    /// # Errors
    /// The descriptor store is gone.
    pub fn forget(&self, key: &str) -> io::Result<()> {
        self.ask(FORGET, key, &[]).map(drop)
    }

    /// Returns copies of all descriptors that are kept.
    ///
    /// # Errors
    /// The descriptor store is gone.
    pub fn all(&self) -> io::Result<BTreeMap<String, Vec<OwnedFd>>> {
        self.ask(GIVE, "", &[])
    }

    /// Asks the descriptor store to end if it keeps nothing.
    ///
    /// # Errors
    /// The store keeps something, or is gone already.
    pub fn leave(&self) -> io::Result<()> {
        self.ask(LEAVE, "", &[]).map(drop)
    }
}

/// Starts a descriptor store that outlives this process.
fn spawn(folder: &Path) -> io::Result<std::process::Child> {
    Command::new("/proc/self/exe")
        .arg0("tombolod")
        .args(["hold", "--state"])
        .arg(folder)
        // The service manager started the broker, not this process.
        .env_remove(crate::sd_notify::VARIABLE)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
}

/// Runs the descriptor store until a client asks it to end while it keeps nothing.
///
/// # Errors
/// The socket cannot be created, or another process has it.
pub fn serve(folder: &Path) -> io::Result<()> {
    let path = socket_in(folder);
    open_folder(folder)?;
    let _lock = crate::startup::lock(&folder.join("holder.lock"))?;
    let listener = fd_passing::listen(&path, SocketType::SEQPACKET, 0o600, None, None)?;
    raise_limit()?;
    crate::sd_notify::notify("READY=1");
    let mut store = Store::default();
    let (mut clients, mut shut): (Vec<OwnedFd>, bool) = (Vec::new(), false);
    while !store.over {
        let waiting = (!shut).then_some(&listener);
        let mut polled: Vec<_> = clients.iter().chain(waiting).map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        match poll(&mut polled, shut.then_some(&SHUT)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(polled);
        let mut ready = ready.into_iter();
        // Whatever the outcome of a question, the store keeps what it has.
        let mut serve = |client: &OwnedFd| panics::catch_panic(|| store.serve(client)).is_ok();
        clients.retain(|client| !ready.next().unwrap_or(false) || serve(client));
        shut = false;
        if ready.next() == Some(true) {
            match rustix::net::accept_with(&listener, rustix::net::SocketFlags::CLOEXEC) {
                Ok(client) if is_welcome(&client) => {
                    clients.truncate(CLIENTS_MAX - 1);
                    clients.push(client);
                }
                Ok(_) => {}
                // The client stays in the socket's queue, and `poll` would report it without end.
                Err(_) => shut = true,
            }
        }
    }
    let _ = std::fs::remove_file(path);
    Ok(())
}

/// Returns whether a client runs as this user or as root. The timeout keeps a client that stops in the middle of its
/// answer from blocking the descriptor store.
fn is_welcome(client: &OwnedFd) -> bool {
    let this = rustix::process::geteuid().as_raw();
    fd_passing::user_of(client).is_ok_and(|user| user == this || user == 0)
        && sockopt::set_socket_timeout(client, sockopt::Timeout::Send, Some(PATIENCE)).is_ok()
}

/// The descriptors that are kept.
#[derive(Default)]
struct Store {
    items: BTreeMap<String, Vec<OwnedFd>>,
    over: bool,
}

impl Store {
    /// Handles one question and its answer. An error ends the client.
    fn serve(&mut self, client: &OwnedFd) -> io::Result<()> {
        let mut buffer = [0; KEY_MAX + 1];
        let received = fd_passing::receive(client, &mut buffer);
        let say = |what: u8, text: &str, descriptors: &[BorrowedFd<'_>]| {
            let bytes = [&[what], text.as_bytes()].concat();
            fd_passing::send(client, &bytes, descriptors)
                .and_then(|sent| if sent { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) })
        };
        let (len, descriptors) = match received {
            Err(error) if error.raw_os_error() == Some(Errno::MFILE.raw_os_error()) => {
                return say(NO, "it has all the descriptors that it may: raise LimitNOFILE of its unit", &[]);
            }
            received => received?,
        };
        let bytes = buffer.get(..len).filter(|bytes| !bytes.is_empty()).ok_or(io::ErrorKind::UnexpectedEof)?;
        let key = std::str::from_utf8(&bytes[1..]).map_err(io::Error::other)?;
        match bytes[0] {
            KEEP if descriptors.is_empty() || descriptors.len() > DESCRIPTORS_MAX => {
                say(NO, "1 to 64 descriptors go under one name", &[])
            }
            KEEP if self.items.len() >= ITEMS_MAX && !self.items.contains_key(key) => say(NO, "no more names", &[]),
            KEEP => {
                self.items.insert(key.into(), descriptors);
                say(OK, "", &[])
            }
            FORGET => {
                // An untrusted process decides how long the last close of a descriptor takes, so another thread does
                // it. If none can be started, it happens here.
                let item = self.items.remove(key);
                let _ = std::thread::Builder::new().name("tombolo-close".into()).spawn(move || drop(item));
                say(OK, "", &[])
            }
            GIVE => {
                for (key, descriptors) in &self.items {
                    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
                    say(ITEM, key, &borrowed)?;
                }
                say(OK, "", &[])
            }
            LEAVE => {
                self.over = self.items.is_empty();
                if self.over { say(OK, "", &[]) } else { say(NO, "something is kept", &[]) }
            }
            _ => say(NO, "no such question", &[]),
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, bind, listen, socket_with};

    use super::*;

    #[test]
    fn b16_store_that_is_about_to_listen_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = socket_in(folder.path());
        assert!(DescriptorStore::find(folder.path(), false).is_err(), "a descriptor store that nobody started");
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        let refused = fd_passing::connect(&path, SocketType::SEQPACKET).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        std::thread::scope(|scope| {
            let finds = scope.spawn(|| DescriptorStore::find(folder.path(), false));
            // Enough time for a search that gives up.
            let until = Instant::now() + Duration::from_millis(200);
            while !finds.is_finished() && Instant::now() < until {
                let _ = poll(&mut [], Some(&Timespec { tv_sec: 0, tv_nsec: 1_000_000 }));
            }
            listen(&listener, 1).unwrap();
            finds.join().unwrap().expect("found once it listens");
        });
    }

    #[test]
    fn b16_late_answer_is_not_taken_for_that_to_the_next_question() {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        sockopt::set_socket_timeout(&ours, sockopt::Timeout::Recv, Some(Duration::from_millis(20))).unwrap();
        let store = DescriptorStore { socket: Mutex::new(ours) };
        assert!(!is_refusal(&store.forget("first").unwrap_err()));
        let _ = fd_passing::send(&theirs, &[OK], &[]);
        store.forget("second").expect_err("nobody answered this");
    }
}
