// SPDX-License-Identifier: Apache-2.0 OR MIT
//! L-5: callers whose files are never done closing. The caller mounts a file system of its own, in namespaces of its own,
//! and serves it by hand: it answers `open` and, once it is told to, nothing else.

mod support;

use std::{
    fs::{self, File},
    io::{Read, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::{
    io::FdFlags,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};
use support::{Child, Folder, eventually, raw::send_to};
use tombolo_domain::{Deadline, Error, Link, Rendezvous};
use tombolo_layout::local::Head;

/// Calls of each kind that the child makes, and descriptors that come with one.
const CALLS: usize = 300;
const CROWD: usize = 8;
const MANY: usize = 250;

/// Operations of FUSE.
const LOOKUP: u32 = 1;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const INIT: u32 = 26;

/// The attributes of the folder (node 1) and of the one file in it (node 2).
fn attributes(node: u64) -> Vec<u8> {
    let mode: u32 = if node == 1 { 0o40_755 } else { 0o100_666 };
    let mut bytes = Vec::new();
    [node, 0, 0, 0, 0, 0].iter().for_each(|word| bytes.extend(word.to_ne_bytes()));
    [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0].iter().for_each(|word: &u32| bytes.extend(word.to_ne_bytes()));
    bytes
}

/// Answers what the kernel asks of the file system behind `device` until it is gone. What asks for no more than an answer
/// that `is_mute` forbids goes without one.
fn serve(mut device: File, is_mute: &AtomicBool) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(len) = device.read(&mut buffer) {
        let request = &buffer[..len];
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_ne_bytes(request[at..at + 8].try_into().unwrap());
        let (operation, unique, node) = (word(4), long(8), long(16));
        let answer = match operation {
            INIT => {
                let mut answer = vec![0; 64];
                answer[..4].copy_from_slice(&7u32.to_ne_bytes());
                answer[4..8].copy_from_slice(&31u32.to_ne_bytes());
                answer[20..24].copy_from_slice(&4096u32.to_ne_bytes());
                answer
            }
            LOOKUP => [&2u64.to_ne_bytes()[..], &[0; 32], &attributes(2)].concat(),
            GETATTR => [&[0; 16][..], &attributes(node)].concat(),
            OPEN => vec![0; 16],
            _ if is_mute.load(Ordering::Relaxed) => continue,
            _ => vec![],
        };
        let head = [(16 + answer.len() as u32).to_ne_bytes(), [0; 4]].concat();
        let _ = device.write(&[&head[..], &unique.to_ne_bytes(), &answer].concat());
    }
}

/// Mounts a file system at `folder` that `is_mute` on demand; why not, if that cannot be done here.
fn mount(folder: &Path, is_mute: Arc<AtomicBool>) -> Result<(), String> {
    let device =
        File::options().read(true).write(true).open("/dev/fuse").map_err(|error| format!("/dev/fuse: {error}"))?;
    rustix::io::fcntl_setfd(&device, FdFlags::empty()).unwrap();
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", std::os::fd::AsRawFd::as_raw_fd(&device));
    let serving = device.try_clone().unwrap();
    thread::spawn(move || serve(serving, &is_mute));
    let mut mount = Command::new("mount");
    mount.args(["-i", "-t", "fuse", "-o", &options, "tombolo-test"]).arg(folder);
    match mount.output() {
        Ok(done) if done.status.success() => Ok(()),
        Ok(done) => Err(String::from_utf8_lossy(&done.stderr).into_owned()),
        Err(error) => Err(format!("mount: {error}")),
    }
}

fn call(service: &str) -> OwnedFd {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let to = SocketAddrUnix::new(service).unwrap();
    rustix::net::connect(&socket, &to).expect("the parent listens");
    socket
}

/// The hostile caller: with files that never close it calls often, with many, and with as many as belong there.
fn hostile(service: &str) {
    let say = |what: &str| fs::write(format!("{service}.said"), what).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let is_mute = Arc::new(AtomicBool::new(false));
    if let Err(why) = mount(folder.path(), Arc::clone(&is_mute)) {
        say(&why);
        return;
    }
    let file = File::open(folder.path().join("file")).unwrap();
    is_mute.store(true, Ordering::Relaxed);
    let send = |head: Head, count: usize| {
        let socket = call(service);
        let files = vec![file.as_fd(); count];
        send_to(&socket, &[&head.encode()[..], b"x"].concat(), &files);
        socket
    };
    let mut kept = Vec::new();
    for _ in 0..CROWD {
        kept.push(send(Head { bells: true, segment: true, len: 1 }, MANY));
        kept.push(send(Head { bells: false, segment: false, len: 1 }, MANY));
    }
    for _ in 0..CALLS {
        kept.push(send(Head { bells: true, segment: true, len: 1 }, 3));
    }
    say("");
    loop {
        thread::park();
    }
}

fn count(folder: &str) -> usize {
    fs::read_dir(folder).unwrap().count()
}

fn readable(fd: BorrowedFd<'_>, time: Duration) -> bool {
    tombolo_domain::wait_readable(fd, Deadline::after(time)).unwrap()
}

#[test]
fn l5_files_that_never_close_cost_a_listener_few_threads_and_descriptors_and_no_time() {
    let folder = Folder::new();
    let service = folder.service();
    let mut listener = folder.domain.listen(&service).unwrap();
    let (files, threads) = (count("/proc/self/fd"), count("/proc/self/task"));
    let launcher = ["unshare", "--user", "--map-root-user", "--mount"];
    let mut child = Child::start(&launcher, "hostile", &service);
    let (said, since) = (format!("{service}.said"), Instant::now());
    let (mut refused, mut quota, mut longest) = (0, 0, Duration::ZERO);
    let mut waits: Vec<Box<dyn Link>> = Vec::new();
    while refused + quota < 2 * CROWD + CALLS {
        if let Ok(why) = fs::read_to_string(&said)
            && !why.is_empty()
        {
            let name = "l5_files_that_never_close_cost_a_listener_few_threads_and_descriptors_and_no_time";
            let _ = writeln!(std::io::stderr(), "SKIP {name} (needs fuse): {why}");
            return;
        }
        assert!(since.elapsed() < Duration::from_secs(60), "{refused} refused, {quota} beyond the share");
        if child.is_over() && !fs::exists(&said).unwrap() {
            let name = "l5_files_that_never_close_cost_a_listener_few_threads_and_descriptors_and_no_time";
            let _ = writeln!(std::io::stderr(), "SKIP {name} (needs userns): the child could not begin");
            return;
        }
        let began = Instant::now();
        match listener.accept() {
            Ok(Some(link)) => waits.push(link),
            Ok(None) => drop(readable(listener.fd(), Duration::from_millis(20))),
            Err(error) => panic!("{error}: {} files", count("/proc/self/fd")),
        }
        waits.retain_mut(|link| match link.recv(1 << 20) {
            Ok(None) => true,
            Err(Error::Malformed { clause: "L-5" | "L-7", .. }) => {
                refused += 1;
                false
            }
            Err(Error::Quota(_)) => {
                quota += 1;
                false
            }
            other => panic!("{other:?}"),
        });
        longest = longest.max(began.elapsed());
        let (files, threads) = (count("/proc/self/fd") - files, count("/proc/self/task") - threads);
        assert!(files < 200 && threads < 100, "{files} files, {threads} threads after {refused} and {quota}");
    }
    assert!(quota > 0, "none of {refused} was stuck: the test shows nothing");
    // Somebody else is let in as ever, and what he sends in vain is closed.
    let mut honest = Child::start(&[], "honest", &service);
    let mut link = support::accept(&mut *listener);
    eventually("an honest caller is heard", || link.recv(1 << 20).is_ok_and(|got| got.is_some()));
    honest.kill();
    assert!(longest < Duration::from_secs(5), "{longest:?} for one turn");
    drop((link, listener));
    // Its threads end only with its file system.
    child.kill();
    eventually("all is closed", || count("/proc/self/task") <= threads && count("/proc/self/fd") <= files);
}

#[test]
fn child_process() {
    match support::role() {
        Some((role, service)) if role == "hostile" => hostile(&service),
        Some((role, service)) if role == "honest" => {
            let domain = tombolo_domain_local::LocalDomain::new();
            let mut link = domain.connect(&service, Deadline::NEVER).unwrap();
            link.send(b"good day", None).unwrap();
            loop {
                thread::park();
            }
        }
        _ => {}
    }
}
