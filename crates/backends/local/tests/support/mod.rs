// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Peers in separate processes: the test binary starts itself again. Each binary that uses this has a test
//! `child_process`, which is what the child runs.
#![allow(dead_code, unused_imports, reason = "each test binary uses its part")]

pub mod raw;

use std::{
    env,
    path::PathBuf,
    process::{self, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

use rustix::process::{Pid, Signal, kill_process};
use tombolo_domain::{Deadline, Endpoint, Rendezvous};
use tombolo_domain_local::LocalDomain;
use tombolo_testing::conformance;
pub use tombolo_testing::conformance::{accept, eventually, patience};

const ROLE: &str = "TOMBOLO_TEST_ROLE";

/// A process of this test, killed at the latest when the test ends.
pub struct Child(process::Child);

impl Child {
    /// Starts this binary again to play `role` at `service`, an absolute path. `launcher` is put in front.
    pub fn start(launcher: &[&str], role: &str, service: &str) -> Self {
        let own = env::current_exe().expect("a test knows its own binary");
        let own = own.to_str().expect("its path is UTF-8");
        let line: Vec<&str> =
            launcher.iter().copied().chain([own, "--exact", "child_process", "--nocapture"]).collect();
        let child = Command::new(line[0])
            .args(&line[1..])
            .env(ROLE, format!("{role} {service}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Self(child.expect("a test can start itself"))
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.0);
        kill_process(pid, signal).expect("an own child can be signalled");
    }

    pub fn is_over(&mut self) -> bool {
        !matches!(self.0.try_wait(), Ok(None))
    }

    /// Kills it and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns the role of this process, and its service; `None` in the parent.
pub fn role() -> Option<(String, String)> {
    let told = env::var(ROLE).ok()?;
    told.split_once(' ').map(|(role, service)| (role.into(), service.into()))
}

/// Plays the part of a child process; does nothing in the parent. Must be called from the test `child_process`.
pub fn play() {
    let Ok(told) = env::var(ROLE) else { return };
    let (role, service) = told.split_once(' ').expect("a role and a service");
    let domain = LocalDomain::new();
    match role {
        "mortal" => conformance::mortal_peer(domain.connect(service, Deadline::NEVER).expect("the parent listens")),
        "witness" => {
            let mut link = domain.connect(service, Deadline::NEVER).expect("the parent listens");
            let seen = format!("{:?} {:?}", link.peer().pid, link.liveness());
            link.send(seen.as_bytes(), None).expect("the path has room");
            let _ = conformance::receive(&mut *link, Deadline::NEVER);
        }
        "listen" => {
            let _listener = domain.listen(service).expect("the service is free");
            let _ready = std::fs::write(format!("{service}.ready"), "");
            loop {
                std::thread::park();
            }
        }
        other => panic!("no such role: {other}"),
    }
}

/// A folder of services, removed at the end.
pub struct Folder {
    pub path: tempfile::TempDir,
    pub domain: LocalDomain,
    made: AtomicU32,
}

impl Folder {
    pub fn new() -> Self {
        let path = tempfile::tempdir().expect("there is a place for temporary files");
        let domain = LocalDomain::in_folder(path.path());
        Self { path, domain, made: 0.into() }
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path.path().join(name)
    }

    /// Returns an unused service, as an absolute path.
    pub fn service(&self) -> String {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        self.file(&format!("service{number}")).to_str().expect("it is UTF-8").into()
    }

    /// Returns a service whose listener was killed, with the files that it left.
    pub fn stale(&self) -> String {
        let service = self.service();
        let mut child = Child::start(&[], "listen", &service);
        let ready = PathBuf::from(format!("{service}.ready"));
        eventually("the child listens", || ready.exists());
        child.kill();
        std::fs::remove_file(ready).expect("it was there");
        service
    }

    /// Returns a peer in another process, started by `launcher`, and this side's connection to it.
    pub fn mortal(&self, launcher: &[&str]) -> (Child, Box<dyn Endpoint>) {
        let service = self.service();
        let mut listener = self.domain.listen(&service).expect("a fresh service is free");
        let child = Child::start(launcher, "mortal", &service);
        (child, accept(&mut *listener))
    }
}

/// Runs `call`, which must not block, and returns its result.
pub fn unblocked<T: Send + 'static>(what: &str, call: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, wait) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(call()));
    wait.recv_timeout(std::time::Duration::from_secs(20)).unwrap_or_else(|_| panic!("{what} blocks or panicked"))
}
