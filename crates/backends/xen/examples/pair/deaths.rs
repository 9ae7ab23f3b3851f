// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Processes of the other domain that are killed under load, each at another moment.

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use tombolo_domain::{Deadline, Endpoint, Error, Rendezvous};
use tombolo_mem::PeerData;
use tombolo_testing::conformance;

use crate::link::{Side, reach};

/// Lets a process of this domain listen at `service`, and kills it.
pub fn leave_stale(other: u16, service: &str) {
    let mut command = Command::new("/proc/self/exe");
    command.args(["actor", "listener", service, &other.to_string()]).stdout(Stdio::piped());
    let mut child = command.spawn().expect("a process can be started");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("it is ready");
    child.kill().expect("our own child");
    child.wait().expect("our own child");
}

/// Kills `count` processes. Each one's link gives what was published, and then its end within a second of being asked.
pub fn run(address: &str, other: &str, count: u32) -> bool {
    let (here, there) = (Side::new(other), reach(address));
    let mut slowest = Duration::ZERO;
    let mut segments = 0;
    for number in 0..count {
        let service = format!("deaths{number}");
        let mut listener = here.listen(&service).expect("a fresh service is free");
        let actor = there.cast("pump", &service);
        let patience = Deadline::after(Duration::from_secs(30));
        let link = conformance::wait_for(&mut *listener, patience, |it| it.fd(), |it| it.accept());
        let mut link = link.expect("one connected");
        // Another moment each time: after so many messages, and so many microseconds more.
        for _ in 0..number % 17 {
            segments += u32::from(take_segment(&mut *link, patience).expect("it lives"));
        }
        let start = Instant::now();
        while start.elapsed() < Duration::from_micros(u64::from(number * 137 % 3000)) {}
        actor.kill();
        let killed = Instant::now();
        loop {
            match take_segment(&mut *link, patience) {
                Ok(came) => segments += u32::from(came),
                Err(Error::PeerGone) => break,
                Err(Error::Revoked) => {}
                Err(error) => panic!("process {number}: {error:?}"),
            }
        }
        slowest = slowest.max(killed.elapsed());
        assert!(link.liveness().is_gone(), "process {number}: {:?}", link.liveness());
    }
    println!("deaths: {count} processes killed, {segments} segments read, slowest end of file {slowest:?}");
    slowest < Duration::from_secs(1)
}

/// Takes a message; its segment holds its number.
fn take_segment(link: &mut dyn Endpoint, patience: Deadline) -> Result<bool, Error> {
    let received = conformance::receive(link, patience)?;
    let Some(segment) = received.segment else { return Ok(false) };
    let mut found = [0; 8];
    segment.data(0).copy_out(0, &mut found);
    assert_eq!(found.as_slice(), received.message, "another segment than was sent");
    let _ = link.send(b"more", None);
    Ok(true)
}
