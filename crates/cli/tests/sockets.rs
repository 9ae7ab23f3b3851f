// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo ls` and `top` on TCP connections of programs under `tombolo run`.

mod common;

use std::{
    env,
    io::{self, BufRead, BufReader, Write},
    net::TcpListener,
    thread,
};

use common::{Place, Running, wait_until};
use serde_json::Value;

/// Two ends in one process that talk, print so, and stay until their input ends.
const PROGRAM: &str = "
import socket, sys
listener = socket.create_server(('127.0.0.1', 0))
a = socket.create_connection(listener.getsockname())
b, _ = listener.accept()
for _ in range(100):
    for x, y in ((a, b), (b, a)):
        x.sendall(b'x' * 1000)
        left = 1000
        while left:
            left -= len(y.recv(left))
print('talked', flush=True)
sys.stdin.read()
";

/// One end that talks to a program without the library.
const ALONE: &str = "
import socket, sys
a = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
for _ in range(10):
    a.sendall(b'x' * 1000)
    left = 1000
    while left:
        left -= len(a.recv(left))
print('talked', flush=True)
sys.stdin.read()
";

fn talking(place: &Place, options: &[&str]) -> Option<Running> {
    start(place, options, &[PROGRAM])
}

/// Starts a program, with its arguments, and returns once it has talked.
fn start(place: &Place, options: &[&str], program: &[&str]) -> Option<Running> {
    if !std::path::Path::new("/usr/bin/python3").is_file() {
        let _ = writeln!(std::io::stderr(), "SKIP tombolo ls of sockets (needs python3): it is not installed");
        return None;
    }
    let library = env::current_exe().unwrap().with_file_name("libtombolo_preload.so");
    let folder = place.path("meet");
    let mut words = vec!["run", "--library", library.to_str().unwrap(), "--folder", folder.to_str().unwrap()];
    words.extend(options);
    words.extend(["--after", "0", "--", "/usr/bin/python3", "-c"]);
    words.extend(program);
    let mut running = Running::start(&words, |_| {});
    let mut said = String::new();
    BufReader::new(running.child.stdout.as_mut().unwrap()).read_line(&mut said).unwrap();
    assert_eq!(said, "talked\n");
    Some(running)
}

/// Returns the JSON output of `words` about the connections of one process.
fn sockets(words: &[&str], pid: u32) -> Vec<Value> {
    let out = Running::start(words, |_| {}).end().expect(0).out;
    let lines = String::from_utf8(out).unwrap();
    let all = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect(line));
    all.filter(|line| line["type"] == "socket" && line["pid"] == pid).collect()
}

#[test]
fn s11_connections_are_listed_with_their_bytes_by_each_path() {
    let place = Place::new();
    let Some(running) = talking(&place, &[]) else { return };
    let pid = running.child.id();
    for words in [&["ls", "--json"][..], &["top", "--once", "--json", "--interval", "0.1"]] {
        let ends = sockets(words, pid);
        assert_eq!(ends.len(), 2, "{ends:?}");
        assert_eq!((&ends[0]["own"], &ends[0]["peer"]), (&ends[1]["peer"], &ends[1]["own"]));
        for (end, other) in [(0, 1), (1, 0)] {
            let end_of = &ends[end];
            assert_eq!((&end_of["state"], &end_of["reason"]), (&"shared".into(), &Value::Null), "{end_of}");
            let bytes = |way: &str, path: &str| end_of[way][path].as_u64().unwrap();
            assert_eq!(bytes("sent", "tcp") + bytes("sent", "shared"), 100_000);
            assert!(bytes("received", "shared") > 80_000);
            assert_eq!(end_of["sent"], ends[other]["received"]);
        }
    }
    let text = Running::start(&["ls"], |_| {}).end().expect(0).out;
    let text = String::from_utf8(text).unwrap();
    assert!(
        text.lines().any(|line| line.contains(&format!("{pid} python3")) && line.contains("shared memory")),
        "{text}"
    );
    let text = Running::start(&["top", "--once", "--interval", "0.1"], |_| {}).end().expect(0).out;
    let text = String::from_utf8(text).unwrap();
    assert!(
        text.lines().any(|line| line.contains(&format!("{pid} python3")) && line.contains("shared memory")),
        "{text}"
    );
    running.end().expect(0);
    assert_eq!(sockets(&["ls", "--json"], pid), Vec::<Value>::new());
}

#[test]
fn s11_reason_of_a_connection_on_tcp_is_shown() {
    let place = Place::new();
    let Some(running) = talking(&place, &["--no-loopback"]) else { return };
    let mut ends = Vec::new();
    wait_until("both ends are listed", || {
        ends = sockets(&["ls", "--json"], running.child.id());
        ends.len() == 2
    });
    for end in ends {
        assert_eq!(end["state"], "tcp", "{end}");
        assert!(end["reason"].as_str().unwrap().contains("switched off"), "{end}");
        assert_eq!((&end["sent"]["tcp"], &end["sent"]["shared"]), (&100_000.into(), &0.into()));
    }
}

#[test]
fn s11_connection_whose_other_end_is_looked_for_has_the_reason_why_it_is_on_tcp_so_far() {
    let place = Place::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    // Echoes. The test does not wait for this thread where the program could not be started.
    thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        io::copy(&mut &stream, &mut &stream)
    });
    let Some(running) = start(&place, &[], &[ALONE, &port]) else { return };
    let pid = running.child.id();
    for words in [&["ls", "--json"][..], &["top", "--once", "--json", "--interval", "0.1"]] {
        let ends = sockets(words, pid);
        assert_eq!(ends.len(), 1, "{ends:?}");
        assert_eq!(ends[0]["state"], "candidate", "{ends:?}");
        assert!(ends[0]["reason"].as_str().is_some_and(|why| why.contains("did not claim it")), "{ends:?}");
    }
    let text = String::from_utf8(Running::start(&["ls"], |_| {}).end().expect(0).out).unwrap();
    let mut lines = text.lines().filter(|line| line.contains(&format!("{pid} python3")));
    assert!(lines.any(|line| line.contains("TCP so far: the other end did not claim it")), "{text}");
    running.end().expect(0);
}
