// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How two endpoints meet, their identity and their liveness (L-1 to L-3, L-8 to L-10, L-12).

mod support;

use std::{
    fs,
    io::Write,
    os::unix::{
        fs::{FileTypeExt, MetadataExt, PermissionsExt},
        net::{UnixDatagram, UnixListener},
    },
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use support::{Child, Folder, accept, eventually, patience};
use tombolo_domain::{Deadline, Error, Liveness, Rendezvous, Slot, Woken};
use tombolo_domain_local::LocalDomain;
use tombolo_testing::conformance;

#[test]
fn child_process() {
    support::play();
}

fn meets(domain: &LocalDomain, service: &str) {
    let mut listener = domain.listen(service).expect("it is free");
    let mut caller = domain.connect(service, patience()).expect("somebody listens");
    caller.send(b"hello", None).expect("the path has room");
    assert_eq!(conformance::receive(&mut *accept(&mut *listener), patience()).unwrap().message, b"hello");
}

#[test]
fn l1_name_stands_for_a_socket_in_the_folder() {
    let folder = Folder::new();
    let _listener = folder.domain.listen("my.service").unwrap();
    assert!(fs::metadata(folder.file("my.service.sock")).unwrap().file_type().is_socket());
    assert!(folder.domain.connect("my.service", patience()).is_ok());
    let path = folder.file("my.service.sock").to_str().unwrap().to_owned();
    assert!(LocalDomain::new().connect(&path, patience()).is_ok(), "a path needs no folder");
}

#[test]
fn l1_path_longer_than_a_socket_address_is_reached_all_the_same() {
    let folder = Folder::new();
    let deep = folder.file(&"d".repeat(100)).join("e".repeat(100));
    fs::create_dir_all(&deep).unwrap();
    meets(&LocalDomain::in_folder(&deep), "service");
    meets(&LocalDomain::new(), deep.join("socket").to_str().unwrap());
    assert_eq!(fs::read_dir(&deep).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn l1_file_name_longer_than_a_socket_address_is_refused_in_words() {
    let folder = Folder::new();
    let path = folder.file(&"n".repeat(110)).to_str().unwrap().to_owned();
    let error = folder.domain.listen(&path).unwrap_err();
    assert!(matches!(error, Error::BadService { .. }), "{error}");
    assert!(matches!(folder.domain.connect(&path, patience()), Err(Error::BadService { .. })));
}

#[test]
fn l2_socket_is_its_owners_alone_from_its_first_moment() {
    let folder = Folder::new();
    let path = folder.file("a.sock");
    // Watches for the socket while it is being made, again and again.
    thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut seen = 0;
            while seen < 1_000_000 {
                match fs::metadata(&path) {
                    Ok(file) => {
                        assert_eq!(file.permissions().mode() & 0o7777, 0o600);
                        seen += 1;
                    }
                    Err(_) if folder.file("over").exists() => return seen,
                    Err(_) => {}
                }
            }
            seen
        });
        for _ in 0..200 {
            drop(folder.domain.listen("a").unwrap());
        }
        let listener = folder.domain.listen("a").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        drop(listener);
        fs::write(folder.file("over"), "").unwrap();
        watcher.join().expect("mode 0600 whenever it is there");
    });
}

#[test]
fn l2_folder_is_made_when_missing_but_the_one_of_a_path_is_not() {
    let folder = Folder::new();
    let made = folder.file("services");
    meets(&LocalDomain::in_folder(&made), "a");
    assert_eq!(fs::metadata(&made).unwrap().permissions().mode() & 0o7777, 0o700);
    let missing = folder.file("missing/a").to_str().unwrap().to_owned();
    let error = folder.domain.listen(&missing).unwrap_err();
    assert!(matches!(error, Error::Os { call: "open", .. }) && error.to_string().contains("missing"), "{error}");
    assert!(matches!(folder.domain.connect(&missing, patience()), Err(Error::NotFound(_))));
    assert!(!folder.file("missing").exists());
}

#[test]
fn l3_what_a_killed_listener_left_is_taken_over() {
    let folder = Folder::new();
    let service = folder.stale();
    let left = fs::metadata(&service).unwrap().ino();
    assert!(matches!(folder.domain.connect(&service, patience()), Err(Error::NotFound(_))));
    let listener = folder.domain.listen(&service).unwrap();
    assert_eq!(fs::read_dir(folder.path.path()).unwrap().count(), 1, "no lock file");
    assert!(folder.domain.connect(&service, patience()).is_ok());
    drop(listener);
    assert!(fs::metadata(&service).is_err(), "{left}");
}

#[test]
fn l3_live_listener_of_any_kind_is_left_alone_and_does_not_notice() {
    let folder = Folder::new();
    let service = folder.service();
    let mut listener = folder.domain.listen(&service).unwrap();
    assert!(matches!(folder.domain.listen(&service), Err(Error::InUse(_))));
    assert!(listener.accept().unwrap().is_none(), "the question whether it lives is no connection");

    let service = folder.service();
    let stream = UnixListener::bind(&service).unwrap();
    stream.set_nonblocking(true).unwrap();
    assert!(matches!(folder.domain.listen(&service), Err(Error::InUse(_))));
    assert!(matches!(folder.domain.connect(&service, patience()), Err(Error::BadService { .. })));
    assert!(stream.accept().is_err(), "nobody connected");

    let service = folder.service();
    let _datagrams = UnixDatagram::bind(&service).unwrap();
    assert!(matches!(folder.domain.listen(&service), Err(Error::InUse(_))));
}

#[test]
fn l3_file_that_is_no_socket_is_not_removed() {
    let folder = Folder::new();
    let service = folder.service();
    fs::write(&service, "precious").unwrap();
    assert!(matches!(folder.domain.listen(&service), Err(Error::BadService { .. })));
    let link = folder.service();
    std::os::unix::fs::symlink(&service, &link).unwrap();
    assert!(matches!(folder.domain.listen(&link), Err(Error::BadService { .. })));
    assert_eq!(fs::read(&service).unwrap(), b"precious");
}

#[test]
fn l3_of_racing_starters_one_listens_and_nobody_else_removes_its_socket() {
    const STARTERS: usize = 8;
    let folder = Folder::new();
    for round in 0..50 {
        let service = folder.service();
        if round % 2 == 0 {
            // A file without a socket, as a killed listener leaves it.
            drop(UnixDatagram::bind(&service).unwrap());
        }
        let start = Barrier::new(STARTERS);
        let results: Vec<_> = thread::scope(|scope| {
            let starters = [(); STARTERS].map(|()| {
                scope.spawn(|| {
                    start.wait();
                    listen(&service)
                })
            });
            starters.map(|starter| starter.join().unwrap()).into()
        });
        let refused = results.iter().filter(|result| matches!(result, Err(Error::InUse(_)))).count();
        let listening: Vec<_> = results.into_iter().filter_map(Result::ok).collect();
        assert_eq!((listening.len(), refused), (1, STARTERS - 1), "round {round}");
        assert!(folder.domain.connect(&service, patience()).is_ok(), "round {round}");
    }
}

fn listen(service: &str) -> tombolo_domain::Result<Box<dyn tombolo_domain::Listener>> {
    LocalDomain::new().listen(service)
}

#[test]
fn l3_listener_whose_socket_was_replaced_removes_nothing() {
    let folder = Folder::new();
    let service = folder.service();
    let first = folder.domain.listen(&service).unwrap();
    fs::remove_file(&service).unwrap();
    let second = folder.domain.listen(&service).unwrap();
    drop(first);
    assert!(folder.domain.connect(&service, patience()).is_ok(), "it was the second's");
    drop(second);
    assert!(fs::metadata(&service).is_err());
}

#[test]
fn l3_folder_locked_by_another_costs_a_bounded_time() {
    let folder = Folder::new();
    let lock = fs::File::open(folder.path.path()).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let before = Instant::now();
    let refused = folder.domain.listen("a");
    assert!(matches!(refused, Err(Error::TimedOut)), "{refused:?}");
    assert!(before.elapsed() < Duration::from_secs(10));
}

#[test]
fn l9_peer_is_who_the_kernel_says() {
    let folder = Folder::new();
    let (child, link) = folder.mortal(&[]);
    let peer = link.peer();
    assert_eq!((peer.domain.as_str(), peer.pid), ("local", Some(child.pid())));
    assert_eq!(peer.uid, Some(rustix::process::geteuid().as_raw()));
    assert!(link.same_kernel());
}

#[test]
fn l9_l10_peer_in_a_pid_namespace_of_its_own_is_known_from_above_and_unknown_from_beside() {
    const LAUNCHER: [&str; 6] = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"];
    let works = std::process::Command::new(LAUNCHER[0]).args(&LAUNCHER[1..]).arg("true").output();
    if !works.is_ok_and(|done| done.status.success()) {
        let test = "l9_l10_peer_in_a_pid_namespace_of_its_own_is_known_from_above_and_unknown_from_beside";
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs userns): the kernel refuses user namespaces");
        return;
    }
    // From above: the child has a process id here.
    let folder = Folder::new();
    let (_child, link) = folder.mortal(&LAUNCHER);
    assert!(link.peer().pid.is_some());
    assert_eq!(link.liveness(), Liveness::Running);

    // From below: a process in the namespace meets this one, which has no process id there, and prints what it sees.
    let service = folder.service();
    let mut listener = folder.domain.listen(&service).unwrap();
    let _child = Child::start(&LAUNCHER, "witness", &service);
    let mut link = accept(&mut *listener);
    let said = conformance::receive(&mut *link, patience()).unwrap().message;
    assert_eq!(String::from_utf8(said).unwrap(), "None Unknown");
}

#[test]
fn l10_d11_stopped_peer_is_paused_and_killed_peer_is_gone() {
    let folder = Folder::new();
    let (mut child, link) = folder.mortal(&[]);
    assert_eq!(link.liveness(), Liveness::Running);
    child.signal(Signal::STOP);
    eventually("the peer is paused", || link.liveness() == Liveness::Paused);
    child.signal(Signal::CONT);
    eventually("the peer runs", || link.liveness() == Liveness::Running);
    child.kill();
    assert_eq!(link.liveness(), Liveness::ProcessGone);
}

#[test]
fn l10_peer_in_a_frozen_cgroup_is_paused() {
    let test = "l10_peer_in_a_frozen_cgroup_is_paused";
    let skip = |why: &str| {
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs cgroup2): {why}");
    };
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    let Some(root) =
        mounts.lines().filter_map(|line| line.split_once(" cgroup2 ")).find_map(|(mount, _)| mount.split(' ').nth(1))
    else {
        return skip("no cgroup2 is mounted");
    };
    let group = std::path::Path::new(root).join(format!("tombolo-test-{}", std::process::id()));
    if fs::create_dir(&group).is_err() {
        return skip("no cgroup may be made here");
    }
    let folder = Folder::new();
    let (mut child, link) = folder.mortal(&[]);
    let frozen = fs::write(group.join("cgroup.procs"), child.pid().to_string())
        .and_then(|()| fs::write(group.join("cgroup.freeze"), "1"));
    if frozen.is_ok() {
        eventually("the peer is paused", || link.liveness() == Liveness::Paused);
        fs::write(group.join("cgroup.freeze"), "0").unwrap();
        eventually("the peer runs", || link.liveness() == Liveness::Running);
    } else {
        skip("cgroups cannot be frozen here");
    }
    child.kill();
    eventually("the cgroup is empty", || fs::remove_dir(&group).is_ok());
}

#[test]
fn l8_hang_up_is_seen_within_100_ms_of_the_kill() {
    let folder = Folder::new();
    let mut times = [(); 5].map(|()| {
        let (mut child, mut link) = folder.mortal(&[]);
        conformance::receive(&mut *link, patience()).unwrap();
        let doorbell = link.doorbell().unwrap();
        let waiting = thread::spawn(move || (doorbell.wait(Slot::Data, patience()).unwrap(), Instant::now()));
        let before = Instant::now();
        child.kill();
        let (woken, at) = waiting.join().unwrap();
        assert_eq!(woken, Woken::PeerGone);
        at.saturating_duration_since(before)
    });
    times.sort();
    assert!(times[2] < Duration::from_millis(100), "{times:?}");
}

#[test]
fn l12_full_backlog_costs_the_caller_its_deadline_and_no_more() {
    let folder = Folder::new();
    let service = folder.service();
    let mut listener = folder.domain.listen(&service).unwrap();
    rustix::net::listen(listener.fd(), 2).unwrap();
    let waiting: Vec<_> = (0..3).map(|_| folder.domain.connect(&service, patience()).unwrap()).collect();
    let before = Instant::now();
    let refused = folder.domain.connect(&service, Deadline::after(Duration::from_millis(50)));
    assert!(matches!(refused, Err(Error::TimedOut)), "{refused:?}");
    assert!((50..5000).contains(&before.elapsed().as_millis()), "{:?}", before.elapsed());
    let refused = folder.domain.connect(&service, Deadline::at(before));
    assert!(matches!(refused, Err(Error::TimedOut)), "{refused:?}");

    // Room wakes a caller that waits for it.
    thread::scope(|scope| {
        let late = scope.spawn(|| LocalDomain::new().connect(&service, Deadline::NEVER).map(|_| ()));
        drop(accept(&mut *listener));
        assert!(late.join().unwrap().is_ok());
    });
    drop(waiting);
}

#[test]
fn l12_backlog_holds_128_callers() {
    let folder = Folder::new();
    let service = folder.service();
    let mut listener = folder.domain.listen(&service).unwrap();
    let callers: Vec<_> = (0..128).map(|_| folder.domain.connect(&service, Deadline::at(Instant::now()))).collect();
    assert!(callers.iter().all(Result::is_ok));
    for _ in callers {
        accept(&mut *listener);
    }
}

/// Returns what the kernel shows of the memory that `link` allocates.
fn shown(link: &mut dyn tombolo_domain::Endpoint) -> String {
    let (_segment, offer) = link.allocate(4096).unwrap();
    let memory: &std::os::fd::OwnedFd = offer.token().unwrap();
    let file = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(memory));
    fs::read_link(file).unwrap().display().to_string()
}

#[test]
fn l13_memory_of_the_end_that_listened_is_called_by_its_address() {
    let folder = Folder::new();
    let mut listener = folder.domain.listen("named").unwrap();
    let mut caller = folder.domain.connect("named", patience()).unwrap();
    let mut callee = accept(&mut *listener);
    assert_eq!(shown(&mut *caller), "/memfd:tombolo (deleted)");
    let path = folder.file("named.sock");
    assert_eq!(shown(&mut *callee), format!("/memfd:tombolo:{} (deleted)", path.display()));
}

#[test]
fn l13_long_address_is_cut_to_what_a_name_holds() {
    let folder = Folder::new();
    let deep = folder.file(&"ü".repeat(100)).join("ü".repeat(100));
    fs::create_dir_all(&deep).unwrap();
    let domain = LocalDomain::in_folder(&deep);
    let mut listener = domain.listen("service").unwrap();
    let _caller = domain.connect("service", patience()).unwrap();
    let name = shown(&mut *accept(&mut *listener));
    assert!((248..=249).contains(&(name.len() - "/memfd: (deleted)".len())), "{name}");
}
