// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds out by trying what this machine is and does. `findings` judges the results.

use std::{
    fs, io,
    io::{IoSliceMut, Read, Write},
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use rustix::{
    event::{EventfdFlags, epoll, eventfd},
    io::ReadWriteFlags,
    process::{Resource, getrlimit},
    thread::{MembarrierCommand, membarrier_query},
};
use tombolo::{Deadline, Options, Stream};

use super::{
    guest::{self, Guest},
    host,
    net::{self, Interfaces},
    xen,
};
use crate::{
    cmd::demo::Kind,
    memory::{self, Limit},
};

/// Result of a trial: success, or why it failed.
pub type Tried = Result<(), String>;

/// Time that no probe takes unless something is wrong.
const PATIENCE: Duration = Duration::from_secs(5);

/// All facts that were found out.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Release as `uname -r` prints it.
    pub kernel: String,
    pub proc: Tried,
    pub memfd: Tried,
    pub eventfd: Tried,
    pub membarrier: Membarrier,
    /// Trial of a whole channel with itself, in a folder of its own.
    pub channel: Tried,
    pub folder: Folder,
    /// Most descriptors of a process: soft and hard limit.
    pub files: (u64, u64),
    /// Most memory in bytes that may be locked.
    pub memlock: Option<u64>,
    /// Bytes that the machine reports as available.
    pub memory: Option<u64>,
    /// Cgroups that limit memory.
    pub limits: Vec<Limit>,
    /// Number of CPUs that are online, and of those that this process may use.
    pub cpus: (usize, usize),
    /// Number of CPUs whose time a cgroup allows, and that cgroup.
    pub quota: Option<(f64, PathBuf)>,
    pub namespaces: Tried,
    pub shm: bool,
    /// Parts of a virtual machine under QEMU.
    pub guest: Guest,
    /// Answer of the broker of a host of virtual machines.
    pub host: host::BrokerAnswer,
    pub interfaces: Interfaces,
    /// Parts of a Xen domain.
    pub xen: Option<xen::Domain>,
}

/// Kernel barriers that make writes cheap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Membarrier {
    pub global: bool,
    pub global_expedited: bool,
    pub registers: bool,
}

/// Folder of services.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Folder {
    pub path: PathBuf,
    /// Whether the user named it, and answers for it.
    pub named: bool,
    pub own_uid: u32,
    pub found: Found,
}

/// Kind of what is at the folder's path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Found {
    Nothing {
        /// Whether the folder could be made.
        parent_writable: bool,
    },
    Folder {
        uid: u32,
        mode: u32,
        writable: bool,
    },
    /// A symbolic link or a file.
    SomethingElse,
    Unreadable(String),
}

/// Collects all facts.
pub fn probe() -> Facts {
    let allowed = rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count() as usize);
    let files = getrlimit(Resource::Nofile);
    Facts {
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        proc: with_error_text(fs::read_link("/proc/self/fd/0").or_else(|_| fs::read_link("/proc/self/exe")).map(drop)),
        memfd: with_error_text(memfd()),
        eventfd: with_error_text(eventfd_as_doorbell()),
        membarrier: barriers(),
        channel: with_error_text(channel()),
        folder: folder(),
        files: (files.current.unwrap_or(u64::MAX), files.maximum.unwrap_or(u64::MAX)),
        memlock: getrlimit(Resource::Memlock).current,
        memory: memory::machine(),
        limits: memory::limits(),
        cpus: (online().unwrap_or(allowed), allowed),
        quota: quota(),
        namespaces: match Kind::probe() {
            Kind::Namespaces => Ok(()),
            Kind::Plain { why } => Err(why),
        },
        shm: Path::new("/dev/shm").is_dir(),
        guest: guest::probe(Path::new("/sys")),
        host: host::probe(),
        interfaces: net::probe(),
        xen: xen::probe(),
    }
}

fn with_error_text(tried: io::Result<()>) -> Tried {
    tried.map_err(|error| error.to_string())
}

/// Tries memory as a channel needs it, from the maker's side and the peer's (L-6).
fn memfd() -> io::Result<()> {
    let (segment, fd) = tombolo_mem::create_sealed("tombolo-doctor", 8192)?;
    let len = tombolo_mem::check_sealed(fd.as_fd(), 8192).map_err(|error| io::Error::other(format!("{error:?}")))?;
    tombolo_mem::PeerSegment::map(fd.as_fd(), len)?;
    drop(segment);
    match rustix::io::pwrite(&fd, &[1], 0) {
        Err(rustix::io::Errno::PERM) => Ok(()),
        _ => Err(io::Error::other("a sealed memfd can be written")),
    }
}

/// Tries a full eventfd that is notified by reading it (L-7).
fn eventfd_as_doorbell() -> io::Result<()> {
    let doorbell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE)?;
    rustix::io::write(&doorbell, &(u64::MAX - 1).to_ne_bytes())?;
    let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&set, &doorbell, epoll::EventData::new_u64(0), epoll::EventFlags::OUT | epoll::EventFlags::ET)?;
    let mut count = [0; 8];
    rustix::io::preadv2(&doorbell, &mut [IoSliceMut::new(&mut count)], u64::MAX, ReadWriteFlags::NOWAIT)?;
    let mut events = Vec::with_capacity(1);
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    epoll::wait(&set, rustix::buffer::spare_capacity(&mut events), Some(&now))?;
    if events.is_empty() { Err(io::Error::other("a ring is not heard")) } else { Ok(()) }
}

fn barriers() -> Membarrier {
    let supported = membarrier_query();
    let has = |command| supported.contains_command(command);
    Membarrier {
        global: has(MembarrierCommand::Global),
        global_expedited: has(MembarrierCommand::GlobalExpedited),
        registers: rustix::thread::membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok(),
    }
}

/// Tries a channel with itself, which needs everything at once.
fn channel() -> io::Result<()> {
    let folder = tempfile::Builder::new().prefix("tombolo-doctor-").tempdir()?;
    let address = format!("local:{}/socket", folder.path().display());
    let options = Options::new().ring_size(4096).handshake_timeout(PATIENCE);
    let mut listener = tombolo::listen_with::<Stream>(&address, &options)?;
    thread::scope(|scope| {
        let client = scope.spawn(|| tombolo::connect_with::<Stream>(&address, &options)?.write_all(b"doctor"));
        let mut heard = [0; 6];
        listener.accept_until(Deadline::after(PATIENCE))?.read_exact(&mut heard)?;
        client.join().map_err(|_| io::Error::other("the connecting end failed"))?
    })
}

/// Examines the folder in which listeners of this kernel are found (L-1, L-2).
fn folder() -> Folder {
    let path = tombolo_backends::services_folder();
    let named = std::env::var_os("TOMBOLO_DIR").is_some_and(|value| !value.is_empty());
    let found = match fs::symlink_metadata(&path) {
        Ok(meta) if meta.is_dir() || (named && path.is_dir()) => {
            Found::Folder { uid: meta.uid(), mode: meta.mode() & 0o7777, writable: writable(&path) }
        }
        Ok(_) => Found::SomethingElse,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Found::Nothing { parent_writable: path.parent().is_some_and(writable) }
        }
        Err(error) => Found::Unreadable(error.to_string()),
    };
    Folder { path, named, own_uid: rustix::process::geteuid().as_raw(), found }
}

fn writable(folder: &Path) -> bool {
    let access = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
    rustix::fs::accessat(rustix::fs::CWD, folder, access, rustix::fs::AtFlags::EACCESS).is_ok()
}

/// Returns the number of CPUs that are online, from a list such as `0-3,8`.
fn online() -> Option<usize> {
    cpus_of(&fs::read_to_string("/sys/devices/system/cpu/online").ok()?)
}

fn cpus_of(list: &str) -> Option<usize> {
    let range = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)? + 1)
    };
    list.trim().split(',').map(range).sum()
}

/// Returns the least CPU time that a cgroup allows, and that cgroup.
fn quota() -> Option<(f64, PathBuf)> {
    let quotas = memory::groups().into_iter().filter_map(|group| {
        let text = fs::read_to_string(group.join("cpu.max")).ok()?;
        Some((quota_of(&text)?, group))
    });
    quotas.min_by(|a, b| a.0.total_cmp(&b.0))
}

fn quota_of(cpu_max: &str) -> Option<f64> {
    let (quota, period) = cpu_max.trim().split_once(' ')?;
    Some(quota.parse::<f64>().ok()? / period.parse::<f64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_files_are_understood() {
        assert_eq!(cpus_of("0-3,8\n"), Some(5));
        assert_eq!((cpus_of("3-0"), cpus_of("x")), (None, None));
        assert_eq!(quota_of("150000 100000\n"), Some(1.5));
        assert_eq!(quota_of("max 100000\n"), None);
    }
}
