// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Endpoints in processes of their own, which can be stopped and killed.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::{Mortal, mortal_peer, wait_for};
use tombolo_domain::{Deadline, Endpoint, Rendezvous};

/// Name of the test, in each test program, in which its actors play; it begins with [`part`].
const STAGE: &str = "child_process";
const PART: &str = "TOMBOLO_TEST_PART";

/// A process of a test, killed at the latest when the test ends.
#[derive(Debug)]
pub struct Actor(Child);

impl Actor {
    /// Starts a process that plays `role` at `service`, which it reaches through `place`.
    ///
    /// # Panics
    /// If the test cannot start itself.
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

    /// Stops the process, and waits until it has stopped.
    ///
    /// # Panics
    /// If the process has ended.
    pub fn stop(&self) {
        let pid = Pid::from_child(&self.0);
        kill_process(pid, Signal::STOP).expect("it is ours");
        waitpid(Some(pid), WaitOptions::UNTRACED).expect("it is ours");
    }

    /// Lets the process continue.
    ///
    /// # Panics
    /// If the process has ended.
    pub fn go_on(&self) {
        kill_process(Pid::from_child(&self.0), Signal::CONT).expect("it is ours");
    }

    /// Kills the process and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }

    /// Makes a peer of the process, at the other side of `link`. `show_pause` tells the backend that the peer's domain
    /// is paused, or that it runs again.
    pub fn into_mortal(self, link: Box<dyn Endpoint>, show_pause: impl FnMut(bool) + 'static) -> Box<dyn Mortal> {
        Box::new(MortalActor { actor: self, link, show_pause })
    }
}

struct MortalActor<F> {
    actor: Actor,
    link: Box<dyn Endpoint>,
    show_pause: F,
}

impl<F: FnMut(bool)> Mortal for MortalActor<F> {
    fn link(&mut self) -> &mut dyn Endpoint {
        &mut *self.link
    }

    fn pause(&mut self) {
        self.actor.stop();
        (self.show_pause)(true);
    }

    fn resume(&mut self) {
        self.actor.go_on();
        (self.show_pause)(false);
    }

    fn kill(&mut self) {
        self.actor.kill();
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Task of an actor.
#[derive(Debug)]
pub struct Part {
    /// Name of the role.
    pub role: String,
    /// Place through which it reaches its peer.
    pub place: PathBuf,
    /// Service where they meet.
    pub service: String,
}

/// Returns the part of this process; `None` in the test itself.
#[must_use]
pub fn part() -> Option<Part> {
    let told = env::var(PART).ok()?;
    let mut words = told.splitn(3, ' ').map(str::to_owned);
    Some(Part { role: words.next()?, place: words.next()?.into(), service: words.next()? })
}

impl Part {
    /// Plays the roles that the suite's fixtures need: `mortal` connects and `mortal-listener` accepts, both to be a
    /// [`mortal_peer`]; `listen` takes the name and does nothing more.
    ///
    /// # Panics
    /// If it is another role, or cannot be played.
    pub fn play(&self, domain: &dyn Rendezvous) {
        match &*self.role {
            "mortal" => mortal_peer(domain.connect(&self.service, Deadline::NEVER).expect("the parent listens")),
            "mortal-listener" => {
                let mut listener = domain.listen(&self.service).expect("the service is free");
                let deadline = Deadline::after(Duration::from_secs(60));
                let link = wait_for(&mut *listener, deadline, |it| it.fd(), |it| it.accept());
                mortal_peer(link.expect("the parent connects"));
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

/// Waits for a condition that no event reports.
///
/// # Panics
/// If it does not come true.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < end, "never came true: {what}");
        thread::yield_now();
    }
}
