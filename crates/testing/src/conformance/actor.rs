// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ends in processes of their own, which can be stopped and killed.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::{mortal_peer, wait_for};
use tombolo_domain::{Deadline, Rendezvous};

/// The test of each test program in which its actors play; it begins with [`part`].
const STAGE: &str = "child_process";
const PART: &str = "TOMBOLO_TEST_PART";

/// A process of a test, killed at the latest when the test ends.
#[derive(Debug)]
pub struct Actor(Child);

impl Actor {
    /// Starts one that plays `role` at `service`, which it reaches through `place`.
    ///
    /// # Panics
    /// The test cannot start itself.
    #[must_use]
    pub fn start(role: &str, place: &Path, service: &str) -> Self {
        let child = Command::new(env::current_exe().expect("a test knows its own binary"))
            .args(["--exact", STAGE, "--nocapture"])
            .env(PART, format!("{role} {} {service}", place.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Self(child.expect("a test can start itself"))
    }

    /// Stops it, and waits until it does.
    ///
    /// # Panics
    /// It is no more.
    pub fn stop(&self) {
        let pid = Pid::from_child(&self.0);
        kill_process(pid, Signal::STOP).expect("it is ours");
        waitpid(Some(pid), WaitOptions::UNTRACED).expect("it is ours");
    }

    /// Lets it go on.
    ///
    /// # Panics
    /// It is no more.
    pub fn go_on(&self) {
        kill_process(Pid::from_child(&self.0), Signal::CONT).expect("it is ours");
    }

    /// Kills it and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What an actor is to do.
#[derive(Debug)]
pub struct Part {
    /// What it is called.
    pub role: String,
    /// Through what it reaches its peer.
    pub place: PathBuf,
    /// Where they meet.
    pub service: String,
}

/// What this process is to play; nothing in the test itself.
#[must_use]
pub fn part() -> Option<Part> {
    let told = env::var(PART).ok()?;
    let mut words = told.splitn(3, ' ').map(str::to_owned);
    Some(Part { role: words.next()?, place: words.next()?.into(), service: words.next()? })
}

impl Part {
    /// Plays what the suite's fixtures need: `mortal` calls and `mortal-listener` is called, both to be a
    /// [`mortal_peer`]; `listen` takes the name and does nothing more.
    ///
    /// # Panics
    /// It is another role, or cannot be played.
    pub fn play(&self, domain: &dyn Rendezvous) {
        match &*self.role {
            "mortal" => mortal_peer(domain.connect(&self.service, Deadline::NEVER).expect("the parent listens")),
            "mortal-listener" => {
                let mut listener = domain.listen(&self.service).expect("the service is free");
                let deadline = Deadline::after(Duration::from_secs(60));
                let link = wait_for(&mut *listener, deadline, |it| it.fd(), |it| it.accept());
                mortal_peer(link.expect("the parent knocks"));
            }
            "listen" => {
                let _listener = domain.listen(&self.service).expect("the service is free");
                loop {
                    thread::park();
                }
            }
            other => panic!("no such role: {other}"),
        }
    }
}

/// Waits for a condition that nothing tells of.
///
/// # Panics
/// It does not come true.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < end, "never came true: {what}");
        thread::yield_now();
    }
}
