// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Processes that are killed between any two steps of connect: before a system call, and after it, each in its turn.
//!
//! The debugger's interface stops a child at every system call from its first word to Xen on. One child dies at the
//! first stop, the next one some stops later, and so on, until one comes to its end alive. The other domain stays the
//! same process all the time: it is told of each death, and serves the next.

use std::{
    io::{Write, stdin},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    sys::{
        ptrace,
        wait::{WaitStatus, waitpid},
    },
    unistd::Pid,
};
use tombolo_domain::{Deadline, Endpoint, Error, Rendezvous};
use tombolo_testing::conformance;

use crate::link::Side;

/// The pages of a ring.
const RING: usize = 16 << 10;
/// How long the endpoint that is left may wait for anything: a second is promised, the rest is for emulation on a
/// loaded machine.
const PATIENCE: Duration = Duration::from_secs(20);
/// What the last one says, who is not killed.
const FINISHED: &str = "finished";

fn patience() -> Deadline {
    Deadline::after(PATIENCE)
}

/// Kills children of `role`, each `every` stops later than the one before.
pub fn kill(role: &str, other: &str, service: &str, every: usize) -> bool {
    let mut killed = 0;
    while !lives(role, other, service, killed * every) {
        killed += 1;
    }
    println!("steps: {killed} processes ({role}) killed at every {every}th of {} stops", killed * every);
    let mut last = child(role, other, service, FINISHED);
    last.stdin.take().expect("piped").write_all(b"go\n").expect("it reads");
    killed > 1 && last.wait().expect("our own child").success()
}

fn child(role: &str, other: &str, service: &str, word: &str) -> Child {
    let mut command = Command::new("/proc/self/exe");
    command.args(["step", role, other, service, word]).stdin(Stdio::piped());
    command.spawn().expect("a process can be started")
}

/// Starts a child and kills it at a stop; says whether it came to its end before.
fn lives(role: &str, other: &str, service: &str, stops: usize) -> bool {
    let mut child = child(role, other, service, "hello");
    let pid = Pid::from_raw(child.id().cast_signed());
    ptrace::seize(pid, ptrace::Options::PTRACE_O_TRACESYSGOOD).expect("it is our child");
    ptrace::interrupt(pid).expect("it is traced");
    child.stdin.take().expect("piped").write_all(b"go\n").expect("it reads");
    // The stop that was asked for, and the end of the call that reads the word, come first.
    let lived = (0..stops + 2).any(|stop| {
        if stop > 0 {
            ptrace::syscall(pid, None).expect("it is stopped");
        }
        match waitpid(pid, None).expect("our own child") {
            WaitStatus::Exited(_, code) => {
                assert_eq!(code, 0, "a child failed by itself");
                true
            }
            WaitStatus::PtraceSyscall(_) | WaitStatus::PtraceEvent(..) => false,
            other => panic!("a child {other:?}"),
        }
    });
    if !lived {
        child.kill().expect("our own child");
    }
    // Whoever ended by itself was waited for.
    let _ = child.wait();
    lived
}

/// The one who may be killed.
pub fn step(role: &str, other: &str, service: &str, word: &str) -> bool {
    let mut go = String::new();
    stdin().read_line(&mut go).expect("a word");
    let side = Side::new(other);
    let done = match role {
        "caller" => side.connect(service, patience()).and_then(|link| call(link, word.as_bytes())).map(drop),
        _ => side.listen(service).and_then(|mut listener| {
            let link = conformance::wait_for(&mut *listener, patience(), |it| it.fd(), |it| it.accept())?;
            answer(link, word.as_bytes()).map(drop)
        }),
    };
    done.inspect_err(|error| eprintln!("{role}: {error:?}")).is_ok()
}

/// What a channel does to open: a word and a segment each way. The word that came.
fn call(mut link: Box<dyn Endpoint>, word: &[u8]) -> Result<Vec<u8>, Error> {
    let (_own, offer) = link.allocate(RING)?;
    link.send(word, Some(&offer))?;
    Ok(conformance::receive(&mut *link, patience())?.message)
}

/// The other endpoint of it.
fn answer(mut link: Box<dyn Endpoint>, word: &[u8]) -> Result<Vec<u8>, Error> {
    let came = conformance::receive(&mut *link, patience())?;
    let (_own, offer) = link.allocate(RING)?;
    link.send(word, Some(&offer))?;
    // It has heard the answer when it goes, or it was killed.
    match conformance::receive(&mut *link, patience()) {
        Err(Error::PeerGone) => Ok(came.message),
        other => Err(other.err().unwrap_or(Error::PeerGone)),
    }
}

/// The endpoint that is left: it serves, or calls, whoever is killed, until one is not.
pub fn outlive(role: &str, other: &str, service: &str) -> bool {
    let side = Side::new(other);
    let mut listener = (role == "caller").then(|| side.listen(service).expect("a fresh service is free"));
    println!("ready");
    let (mut met, mut lost, mut slowest) = (0, 0, Duration::ZERO);
    loop {
        let mut start = Instant::now();
        let met_one = match &mut listener {
            Some(listener) => {
                let link = conformance::wait_for(&mut **listener, Deadline::NEVER, |it| it.fd(), |it| it.accept());
                start = Instant::now();
                answer(link.expect("there is room"), b"welcome")
            }
            None => match side.connect(service, patience()) {
                Err(Error::NotFound(_)) => continue,
                link => link.and_then(|link| call(link, b"hello")),
            },
        };
        match met_one {
            Ok(word) if word == FINISHED.as_bytes() => break,
            Ok(_) => met += 1,
            Err(Error::PeerGone | Error::Revoked) => lost += 1,
            Err(error) => panic!("after {met} met and {lost} lost: {error:?}"),
        }
        slowest = slowest.max(start.elapsed());
    }
    println!("steps: {met} met, {lost} lost on the way, none took longer than {slowest:?}");
    lost > 0 && slowest < PATIENCE / 2
}
