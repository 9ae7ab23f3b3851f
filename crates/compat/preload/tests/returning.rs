// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs whose connections leave their memory because it is taken away, and are joined again (S-22). Everything runs
//! on one kernel: the broker through which the two endpoints meet, and the machines, are test doubles.

#[path = "../../../backends/ivshmem/tests/support/mod.rs"]
mod support;

#[macro_use]
mod place;

use std::{
    fs,
    io::Write,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use place::{
    Place, SERVER, Started,
    world::{CLIENTS, SERVERS, World, interpreter, script},
};
use tombolo_sockets::hook;

/// A group of processes whose sockets' sequence numbers the kernel reports.
struct Group(PathBuf);

impl Group {
    fn new(test: &str) -> Option<Self> {
        let made = hook::find_root().map(|root| root.join(format!("tombolo-returning-{}-{test}", std::process::id())));
        let group = made.filter(|path| fs::create_dir(path).is_ok()).map(Self);
        let attached = group.as_ref().map_or(Err(std::io::ErrorKind::NotFound.into()), |group| hook::attach(&group.0));
        if let Err(error) = &attached {
            let _ = writeln!(std::io::stderr(), "SKIP {test} (needs bpf): no program can be attached: {error}");
        }
        group.filter(|_| attached.is_ok())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        place::wait_until("the group is empty", || fs::remove_dir(&self.0).is_ok());
    }
}

/// Returns a port for each way, because tests run in parallel.
fn port(way: &str) -> u16 {
    7300 + u16::from(way.as_bytes()[0]) + u16::from(way.as_bytes()[1])
}

/// Returns the number of log lines that report a connection as joined, for the first time and again.
fn joined(place: &Place) -> [usize; 2] {
    let log = place.log();
    [" joined: ", " joined again: "].map(|words| log.matches(words).count())
}

/// Asserts that `count` connections of programs that wait in this `way` leave their memory twice, and are joined again
/// with every byte intact.
fn returns(way: &str, count: usize) {
    let Some(world) = World::new(way, &[], Place::new) else { return };
    let Some(group) = Group::new(way) else { return };
    let brokers = support::World::new();
    let (stop, port) = (world.text("stop"), port(way).to_string());
    let start = |end: usize, role: &str, broker: &str| {
        let enter = format!("echo $$ > {}/cgroup.procs && exec \"$0\" \"$@\"", group.0.display());
        let mut command = Command::new("sh");
        command.args(["-c", &enter, "ip", "netns", "exec", world.namespaces.name(end), &interpreter()]);
        command.args([&script("returning.py"), role, SERVER, &port, way, &count.to_string(), &stop]);
        world.place.dress(&mut command);
        command.env("TOMBOLO_BROKER", brokers.socket(broker));
        command.stdout(fs::File::create(world.place.path(role)).unwrap());
        command.stderr(fs::File::create(world.place.path(&format!("server-{role}"))).unwrap());
        Started::new(&mut command)
    };
    let mut server = start(SERVERS, "serve", "a");
    world.namespaces.wait_for(port.parse().unwrap());
    let mut client = start(CLIENTS, "connect", "b");
    let read = |role: &str| fs::read_to_string(world.place.path(role)).unwrap();
    let told = || {
        let said = [read("server-connect"), read("server-serve")];
        format!("{said:?} {:?}; the log:\n{}", joined(&world.place), world.place.log())
    };
    let until = |what: &str, there: &dyn Fn() -> bool| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !there() {
            assert!(Instant::now() < deadline, "{way}: not {what}: {}", told());
            std::thread::park_timeout(Duration::from_millis(20));
        }
    };
    until("joined", &|| joined(&world.place)[0] == 2 * count);
    for round in 1..=2 {
        // By now the only bytes in memory are those in the rings of a stream.
        std::thread::park_timeout(Duration::from_millis(200));
        brokers.leave();
        until("joined again", &|| joined(&world.place)[1] == 2 * count * round);
    }
    // And bytes go through memory again.
    let before = world.place.received().1;
    until("in memory again", &|| world.place.received().1 > before + (1 << 20));
    fs::write(&stop, "").unwrap();
    let ends = [client.finish(), server.finish()].map(|status| status.success());
    let [mut asked, mut served] =
        ["connect", "serve"].map(|role| read(role).lines().map(str::to_owned).collect::<Vec<_>>());
    assert_eq!(ends, [true; 2], "{way}: {asked:?} {served:?}: {}", told());
    // Each side received what the other sent.
    let turned = |line: &String| line.split(' ').rev().collect::<Vec<_>>().join(" ");
    served = served.iter().map(turned).collect();
    asked.sort();
    served.sort();
    assert_eq!(asked, served, "{way}");
    assert_eq!(asked.len(), count);
    world.place.assert_none_reset();
    // No call used a connection while another took its place.
    assert!(!world.place.log().contains("bytes went past"), "{way}: {}", world.place.log());
}

#[test]
fn s22_blocking_programs_with_a_thread_for_each_connection_come_back() {
    returns("turns", 3);
}

#[test]
fn s22_programs_with_a_thread_for_each_direction_come_back() {
    returns("two", 2);
}

#[test]
fn s22_programs_that_poll_come_back() {
    returns("poll", 3);
}

#[test]
fn s22_programs_with_a_set_that_tells_levels_come_back() {
    returns("level", 3);
}

#[test]
fn s22_programs_with_a_set_that_tells_edges_come_back() {
    returns("edge", 3);
}

#[test]
fn s22_programs_with_a_set_that_tells_once_come_back() {
    returns("once", 3);
}

#[test]
fn s22_programs_with_several_threads_at_one_set_come_back() {
    returns("pool", 3);
}

#[test]
fn s22_server_that_forks_for_each_caller_comes_back_in_the_child() {
    returns("fork", 2);
}
