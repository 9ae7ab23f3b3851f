// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two network namespaces, and `tombolo net up` in them.
#![allow(dead_code, reason = "each test program uses its part of this")]

pub mod routes;

use std::{
    fs::File,
    io::{ErrorKind, Write},
    net::{IpAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::AsFd,
    path::Path,
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::Value;

use super::common::{Place, Running, wait_until};

/// Longer than any single answer takes.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// From a peer's end to another path to it: time that all of this takes if no side waits for a timer (N-13).
const AT_ONCE: Duration = Duration::from_millis(50);
/// The addresses of the two interfaces.
pub const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];

static COUNT: AtomicU32 = AtomicU32::new(0);

/// Returns whether a test can run here; if not, prints the reason.
pub fn can_run(test: &str) -> bool {
    let why = if !rustix::process::geteuid().is_root() {
        "it is not root"
    } else if !Path::new("/dev/net/tun").exists() {
        "there is no /dev/net/tun"
    } else if !run(&["ip", "netns", "list"]).0 {
        "there is no `ip netns`"
    } else {
        return true;
    };
    let _ = writeln!(std::io::stderr(), "SKIP {test} (needs netns): {why}");
    false
}

/// Runs a command. Returns whether it succeeded, and its output.
pub fn run(words: &[&str]) -> (bool, String) {
    // A command that the kernel, or another program's lock, delays for longer than this fails instead of hanging the
    // test.
    let output = Command::new("timeout").args(["-k", "1", "60"]).args(words).stdin(Stdio::null()).output();
    let Ok(output) = output else { return (false, String::new()) };
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

#[track_caller]
fn must(words: &[&str]) -> String {
    let (done, said) = run(words);
    assert!(done, "{words:?}: {said}");
    said
}

/// A namespace, removed at the end with everything in it.
pub struct Netns(pub String);

impl Netns {
    pub fn new() -> Self {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("tmb-{}-{number}", std::process::id());
        must(&["ip", "netns", "add", &name]);
        must(&["ip", "-n", &name, "link", "set", "lo", "up"]);
        Self(name)
    }

    /// Keeps the kernel from sending anything here of its own accord: only the test sends.
    pub fn be_quiet(&self) {
        self.enter(|| {
            for which in ["all", "default"] {
                let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6"), "1");
            }
        });
    }

    /// Runs `ip` in this namespace.
    #[track_caller]
    pub fn ip(&self, words: &[&str]) -> String {
        must(&[&["ip", "-n", &self.0], words].concat())
    }

    /// Runs `f` in a thread that is in this namespace: sockets that it makes stay there.
    pub fn enter<T: Send + 'static>(&self, f: impl FnOnce() -> T + Send + 'static) -> T {
        let path = format!("/run/netns/{}", self.0);
        let inside = thread::spawn(move || {
            let file = File::open(path).unwrap();
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            f()
        });
        inside.join().expect("what runs in a namespace does not panic")
    }

    /// Returns what the kernel shows of the interface.
    pub fn shown(&self) -> String {
        self.ip(&["-o", "link", "show", "tmb0"])
    }

    pub fn has_carrier(&self) -> bool {
        self.shown().contains("LOWER_UP")
    }

    pub fn has_mtu(&self, mtu: u32) -> bool {
        self.shown().contains(&format!(" mtu {mtu} "))
    }

    pub fn has_interface(&self) -> bool {
        run(&["ip", "-n", &self.0, "link", "show", "tmb0"]).0
    }

    /// Returns a socket at the interface's address, once the kernel allows it.
    pub fn udp(&self, end: usize) -> UdpSocket {
        let socket = self.enter(move || UdpSocket::bind((ADDRESSES[end], 0))).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        socket
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        run(&["ip", "netns", "del", &self.0]);
    }
}

/// Two namespaces with a folder for the channel's socket and one for the running interfaces.
pub struct Wires {
    pub place: Place,
    pub netns: [Netns; 2],
}

impl Wires {
    pub fn new() -> Self {
        Self { place: Place::new(), netns: [Netns::new(), Netns::new()] }
    }

    /// Returns the folder where interfaces are found.
    pub fn folder(&self) -> String {
        self.place.path("net").display().to_string()
    }

    /// Runs `tombolo net` with these words, in the folder of this test.
    pub fn tombolo(&self, words: &[&str]) -> Running {
        let folder = self.folder();
        let words = [&["net", "--folder", folder.as_str()], words].concat();
        Running::start(&words, |_| {})
    }

    /// Runs `tombolo net up tmb0` in a namespace: the first listens, the second connects.
    pub fn up(&self, end: usize, more: &[&str]) -> Running {
        let (role, address) = (["--listen", "--connect"][end], self.place.address());
        self.tombolo(&[&["up", "tmb0", role, &address, "--netns", &self.netns[end].0], more].concat()).hush()
    }

    /// Starts both, linked, with addresses.
    pub fn pair(&self, more: [&[&str]; 2]) -> [Running; 2] {
        let running = [self.up(0, more[0]), self.up(1, more[1])];
        for end in [0, 1] {
            self.wait_for(end, "a link", |status| status["state"] == "linked");
            self.add_address(end);
        }
        running
    }

    pub fn add_address(&self, end: usize) {
        self.netns[end].ip(&["addr", "add", &format!("{}/24", ADDRESSES[end]), "dev", "tmb0"]);
    }

    /// Returns the status of the interface in a namespace, once it answers.
    #[track_caller]
    pub fn status(&self, end: usize) -> Value {
        self.wait_for(end, "an answer", |_| true)
    }

    fn find_status(&self, end: usize) -> Option<Value> {
        let found = self.tombolo(&["ls", "--json"]).end().expect(0);
        let text = String::from_utf8(found.out).unwrap();
        let mut statuses = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        statuses.find(|status| status["netns"] == *self.netns[end].0)
    }

    /// Waits until the status is as wanted.
    #[track_caller]
    pub fn wait_for(&self, end: usize, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let until = Instant::now() + PATIENCE;
        loop {
            let status = self.find_status(end);
            match status {
                Some(status) if is_so(&status) => return status,
                status => assert!(Instant::now() < until, "{what}: not within {PATIENCE:?}: {status:#?}"),
            }
        }
    }

    /// Asserts that a datagram goes from the second to the first and back.
    #[track_caller]
    pub fn assert_joined(&self) {
        echo_udp(&self.netns[0].udp(0), &self.netns[1].udp(1), b"are you there?");
    }
}

/// Makes a connection from one namespace to an address of the other. Neither side waits longer than its time limit: a
/// stalled connection fails its test instead of hanging it.
#[track_caller]
pub fn connect_tcp(from: &Netns, to: &Netns, address: IpAddr) -> [TcpStream; 2] {
    let listener = to.enter(move || TcpListener::bind((address, 0))).unwrap();
    listener.set_nonblocking(true).unwrap();
    let place = listener.local_addr().unwrap();
    let client = from.enter(move || TcpStream::connect_timeout(&place, PATIENCE)).unwrap();
    let mut server = None;
    wait_until("the connection arrives", || {
        server = listener.accept().ok();
        server.is_some()
    });
    let streams = [client, server.unwrap().0];
    for stream in &streams {
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
    }
    streams
}

/// Sends a datagram there and back until it has arrived: neither ARP nor UDP guarantees delivery.
#[track_caller]
pub fn echo_udp(there: &UdpSocket, here: &UdpSocket, bytes: &[u8]) {
    let mut buffer = vec![0; 70_000];
    let until = Instant::now() + PATIENCE;
    for socket in [there, here] {
        socket.set_write_timeout(Some(PATIENCE)).unwrap();
    }
    while Instant::now() < until {
        here.send_to(bytes, there.local_addr().unwrap()).unwrap();
        if arrived(there, bytes, &mut buffer) {
            there.send_to(bytes, here.local_addr().unwrap()).unwrap();
            if arrived(here, bytes, &mut buffer) {
                return;
            }
        }
    }
    panic!("a datagram of {} bytes did not come back", bytes.len());
}

fn arrived(socket: &UdpSocket, bytes: &[u8], buffer: &mut [u8]) -> bool {
    loop {
        match socket.recv_from(buffer) {
            // A datagram that was sent again before.
            Ok((len, _)) if buffer[..len] != *bytes => {}
            Ok(_) => return true,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return false,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Waits until an interface has a carrier, or none.
pub fn wait_carrier(netns: &Netns, on: bool) {
    wait_until(if on { "the carrier comes" } else { "the carrier goes" }, || netns.has_carrier() == on);
}

/// Checks the shortest times of several tries. A busy machine makes any of them long; a wait in this program, or the
/// kernel's wait for its next check of carriers, makes all of them long.
#[track_caller]
pub fn assert_no_wait(best: &[Duration], of: &str) {
    assert!(best.iter().all(|best| *best < AT_ONCE), "another way was taken after {best:?} at best ({of})");
}
