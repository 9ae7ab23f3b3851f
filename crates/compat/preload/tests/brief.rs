// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connections that end soon. To join them costs more than it saves, so the short connections of a busy service stay on
//! TCP and only its lasting ones are joined.

mod place;

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
};

use place::{Place, has, output, python};

/// `brief.py` as a server that answers.
struct Server {
    child: Child,
    port: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a command of `brief.py` that joins connections `after` so many bytes, or by default.
fn dressed(place: &Place, words: &[&str], after: Option<&str>) -> Command {
    let mut command = python("brief.py");
    place.dress(command.args(words).envs(after.map(|after| ("TOMBOLO_SOCKETS_AFTER", after))));
    command
}

fn serve(place: &Place, words: &[&str], after: Option<&str>) -> Server {
    let mut child = dressed(place, words, after).stdout(Stdio::piped()).spawn().unwrap();
    let mut port = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut port).unwrap();
    Server { child, port: port.trim().into() }
}

/// Makes a connection for each number, with so many requests. Returns for each whether it was joined, according to the
/// client's log.
fn ask(place: &Place, server: &Server, requests: &[&str], after: Option<&str>) -> Vec<bool> {
    let before = place.log().lines().count();
    let words = [&["ask", &server.port], requests].concat();
    output(&mut dressed(place, &words, after), &place.path("asked"));
    let log = place.log();
    let port = format!(":{}", server.port);
    let of_client = |line: &&str| {
        line.contains(" ended")
            && line.split(" - ").nth(1).is_some_and(|to| to.starts_with(&*format!("127.0.0.1{port} ")))
    };
    let ended: Vec<_> = log.lines().skip(before).filter(of_client).map(|line| line.contains(" ended: ")).collect();
    assert_eq!(ended.len(), requests.len(), "{log}");
    ended
}

fn count(joined: &[bool]) -> usize {
    joined.iter().filter(|joined| **joined).count()
}

/// Where the server and the client both learn, 16 short connections are joined on credit, and after that only those
/// that last; each lasting one pays for a short one.
#[test]
fn short_connections_of_a_service_are_joined_sixteen_times_and_long_ones_always() {
    if !has("short_connections_of_a_service_are_joined_sixteen_times_and_long_ones_always", &["python3"]) {
        return;
    }
    let place = Place::new();
    let server = serve(&place, &["serve"], None);
    let requests: Vec<&str> = [["12"; 40].as_slice(), &["300"; 4], &["12"; 10]].concat();
    let joined = ask(&place, &server, &requests, None);
    assert_eq!((count(&joined[..40]), count(&joined[40..44])), (16, 4), "{joined:?}");
    assert_eq!(count(&joined[44..]), 4, "each that lasted pays for one: {joined:?}");
    let brief = "always on TCP (it ended before enough had passed to look for the other end)";
    assert_eq!(place.log().matches(brief).count(), 2 * (24 + 6), "{}", place.log());
    // Canary: with a set threshold every connection is joined.
    let server = serve(&place, &["serve"], Some("0"));
    assert_eq!(count(&ask(&place, &server, &["12"; 30], Some("0"))), 30, "{}", place.log());
}

/// One endpoint that learns is enough: here only the client learns, for the port that it connects to.
#[test]
fn client_that_learns_leaves_short_connections_to_an_eager_server_on_tcp() {
    if !has("client_that_learns_leaves_short_connections_to_an_eager_server_on_tcp", &["python3"]) {
        return;
    }
    let place = Place::new();
    let server = serve(&place, &["serve"], Some("0"));
    let joined = ask(&place, &server, &["12"; 30], None);
    assert_eq!(joined.iter().position(|joined| !joined), Some(16), "{joined:?}");
    assert_eq!(count(&joined), 16, "{joined:?}");
}

/// A server that makes a process for each connection learns as well, through memory that all its processes share.
#[test]
fn processes_of_a_server_learn_together_that_its_connections_are_short() {
    if !has("processes_of_a_server_learn_together_that_its_connections_are_short", &["python3"]) {
        return;
    }
    let place = Place::new();
    let server = serve(&place, &["serve", "forks"], None);
    // Each client is new, and has learnt nothing.
    let joined: Vec<bool> = (0..20).flat_map(|_| ask(&place, &server, &["12"], None)).collect();
    assert_eq!(count(&joined), 16, "{joined:?}\n{}", place.log());
    assert_eq!(ask(&place, &server, &["300"], None), [true], "{}", place.log());
}
