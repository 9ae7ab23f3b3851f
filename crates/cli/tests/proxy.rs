// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo proxy`, as it is used: two of them, with a channel between them.

mod common;

use std::{
    fs,
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::{
        net::{UnixListener, UnixStream},
        process::ExitStatusExt,
    },
    thread,
    time::Duration,
};

use common::{Place, Running, noise, wait_until};
use rustix::process::Signal;

const MIB: usize = 1 << 20;
/// Longer than anything here takes.
const LIMIT: Duration = Duration::from_secs(30);

/// Starts a proxy that listens. Returns it with its address.
fn proxy(listen: &str, connect: &str, options: &str) -> (Running, String) {
    let mut words = vec!["proxy", "--listen", listen, "--connect", connect];
    words.extend(options.split_whitespace());
    let mut running = Running::start(&words, |_| {});
    let mut said = BufReader::new(running.child.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    let place = line.strip_prefix("tombolo: ").and_then(|line| line.split_once(" joined to ")).map(|(place, _)| place);
    let place = place.unwrap_or_else(|| panic!("{line}")).to_owned();
    // The rest of the output is read so that the proxy need not wait.
    thread::spawn(move || said.read_to_string(&mut String::new()));
    (running, place)
}

fn port(place: &str) -> &str {
    place.strip_prefix("tcp:").expect(place)
}

fn patient(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
    stream
}

/// Starts two proxies: TCP to a channel, and the channel to `server`.
fn chain(place: &Place, server: &str) -> ([Running; 2], TcpStream) {
    let (far, _) = proxy(&place.address(), server, "");
    let (near, at) = proxy("tcp:127.0.0.1:0", &place.address(), "--ring 16KiB");
    ([near, far], patient(TcpStream::connect(port(&at)).unwrap()))
}

/// Echoes to every client, after each has sent everything.
fn echo(listener: TcpListener) {
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            thread::spawn(move || {
                let mut all = Vec::new();
                let _ = stream.read_to_end(&mut all);
                let _ = stream.write_all(&all);
            });
        }
    });
}

fn server() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = format!("tcp:{}", listener.local_addr().unwrap());
    (listener, at)
}

#[test]
fn many_clients_at_once_get_their_bytes_back_through_two_proxies() {
    let place = Place::new();
    let (listener, at) = server();
    echo(listener);
    let (_far, _) = proxy(&place.address(), &at, "");
    let unix = format!("unix:{}", place.path("front").display());
    let (_near, said) = proxy(&unix, &place.address(), "--ring 16KiB");
    assert_eq!(said, unix);
    thread::scope(|scope| {
        for number in 0..40 {
            let front = place.path("front");
            scope.spawn(move || {
                let mut stream = UnixStream::connect(front).unwrap();
                stream.set_read_timeout(Some(LIMIT)).unwrap();
                let bytes = noise(MIB / 2 + number);
                stream.write_all(&bytes).unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
                let mut back = Vec::new();
                stream.read_to_end(&mut back).unwrap();
                assert!(back == bytes, "{} of {} bytes", back.len(), bytes.len());
            });
        }
    });
}

#[test]
fn both_ways_at_once_arrive_whole() {
    let place = Place::new();
    let (listener, at) = server();
    let (_proxies, client) = chain(&place, &at);
    let server = patient(listener.accept().unwrap().0);
    let (there, back) = (&noise(5 * MIB + 1), &noise(7 * MIB + 3));
    let speak = |mut stream: &TcpStream, say: &[u8]| {
        stream.write_all(say).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
    };
    let hear = |mut stream: &TcpStream, expected: &[u8]| {
        let mut heard = Vec::new();
        stream.read_to_end(&mut heard).unwrap();
        assert!(heard == expected);
    };
    thread::scope(|scope| {
        scope.spawn(|| speak(&client, there));
        scope.spawn(|| speak(&server, back));
        scope.spawn(|| hear(&client, back));
        scope.spawn(|| hear(&server, there));
    });
}

#[test]
fn end_of_one_direction_leaves_the_other() {
    let place = Place::new();
    let (listener, at) = server();
    let (_proxies, mut client) = chain(&place, &at);
    let mut server = patient(listener.accept().unwrap().0);
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(server.read(&mut [0; 8]).unwrap(), 0, "the end comes through");
    server.write_all(b"still here").unwrap();
    drop(server);
    let mut heard = String::new();
    client.read_to_string(&mut heard).unwrap();
    assert_eq!(heard, "still here");
}

/// Reads until the end or an error.
fn outcome(mut stream: TcpStream) -> std::io::Result<u64> {
    std::io::copy(&mut stream, &mut std::io::sink())
}

#[test]
fn connection_that_breaks_off_breaks_off_on_the_other_side() {
    let place = Place::new();
    let (listener, at) = server();
    let (_proxies, mut client) = chain(&place, &at);
    let server = patient(listener.accept().unwrap().0);
    client.write_all(b"never read").unwrap();
    wait_until("it arrives", || server.peek(&mut [0; 16]).unwrap() == 10);
    // Closed with unread bytes: a reset.
    drop(server);
    assert_eq!(outcome(client).unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[test]
fn proxy_that_is_killed_is_not_taken_for_the_end() {
    let place = Place::new();
    let (listener, at) = server();
    let ([_near, far], mut client) = chain(&place, &at);
    let mut server = patient(listener.accept().unwrap().0);
    server.write_all(b"some").unwrap();
    client.read_exact(&mut [0; 4]).unwrap();
    far.signal(Signal::KILL);
    assert_eq!(outcome(client).unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[test]
fn client_that_ended_its_direction_and_then_died_leaves_nothing_behind_beside_a_silent_server() {
    let place = Place::new();
    let (listener, at) = server();
    let ([near, far], client) = chain(&place, &at);
    let mut server = patient(listener.accept().unwrap().0);
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(server.read(&mut [0; 8]).unwrap(), 0);
    let open = || fs::read_dir(format!("/proc/{}/fd", far.child.id())).unwrap().count();
    let before = open();
    near.signal(Signal::KILL);
    wait_until("what belonged to the connection is closed", || open() + 4 < before);
}

#[test]
fn client_of_a_service_that_is_not_there_is_turned_away_and_the_next_is_served() {
    let place = Place::new();
    let (_near, at) = proxy("tcp:127.0.0.1:0", &place.address(), "--wait 0");
    let client = patient(TcpStream::connect(port(&at)).unwrap());
    assert_eq!(outcome(client).unwrap_err().kind(), ErrorKind::ConnectionReset);

    let (listener, server) = server();
    echo(listener);
    let (_far, _) = proxy(&place.address(), &server, "");
    let mut client = patient(TcpStream::connect(port(&at)).unwrap());
    client.write_all(b"again").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut back = String::new();
    client.read_to_string(&mut back).unwrap();
    assert_eq!(back, "again");
}

#[test]
fn client_too_many_waits_until_another_leaves() {
    let (listener, at) = server();
    let (_proxy, front) = proxy("tcp:127.0.0.1:0", &at, "--clients 1");
    let mut first = patient(TcpStream::connect(port(&front)).unwrap());
    first.write_all(b"1").unwrap();
    let first_served = listener.accept().unwrap().0;
    let mut second = patient(TcpStream::connect(port(&front)).unwrap());
    second.write_all(b"2").unwrap();
    listener.set_nonblocking(true).unwrap();
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    drop((first, first_served));
    let mut served = None;
    wait_until("the second is served", || {
        served = listener.accept().ok();
        served.is_some()
    });
    let mut byte = [0];
    let mut served = served.unwrap().0;
    served.set_nonblocking(false).unwrap();
    served.read_exact(&mut byte).unwrap();
    assert_eq!(&byte, b"2");
}

#[test]
fn clients_that_come_faster_than_a_unix_server_accepts_wait_for_it() {
    let place = Place::new();
    let socket = place.path("server");
    let kind = rustix::net::SocketType::STREAM;
    let server = rustix::net::socket(rustix::net::AddressFamily::UNIX, kind, None).unwrap();
    rustix::net::bind(&server, &rustix::net::SocketAddrUnix::new(&socket).unwrap()).unwrap();
    // Room for one client that was not accepted yet.
    rustix::net::listen(&server, 0).unwrap();
    let server = UnixListener::from(server);
    let (_proxy, front) = proxy("tcp:127.0.0.1:0", &format!("unix:{}", socket.display()), "--wait 30");
    let mut clients: Vec<_> = (0..4).map(|_| patient(TcpStream::connect(port(&front)).unwrap())).collect();
    // All clients are at the server by then, or were refused.
    let turned_away = |client: &TcpStream| {
        client.set_nonblocking(true).unwrap();
        let turned_away = !matches!(client.peek(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
        client.set_nonblocking(false).unwrap();
        turned_away
    };
    let began = std::time::Instant::now();
    while began.elapsed() < Duration::from_millis(300) {
        assert!(!clients.iter().any(turned_away));
        thread::yield_now();
    }
    let served: Vec<_> = clients.iter().map(|_| server.accept().unwrap().0).collect();
    served.into_iter().for_each(|mut stream| stream.write_all(b"!").unwrap());
    for client in &mut clients {
        let mut byte = [0];
        client.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"!");
    }
}

#[test]
fn proxy_that_is_terminated_leaves_no_socket_and_breaks_its_connections_off() {
    for signal in [Signal::TERM, Signal::INT] {
        let place = Place::new();
        let (listener, at) = server();
        let unix = format!("unix:{}", place.path("front").display());
        let (on_unix, _) = proxy(&unix, &place.address(), "");
        let (on_channel, _) = proxy(&place.address(), &at, "");
        let mut client = UnixStream::connect(place.path("front")).unwrap();
        client.write_all(b"hello").unwrap();
        let mut served = patient(listener.accept().unwrap().0);
        // The kernel connects before the proxy has noticed the client.
        served.read_exact(&mut [0; 5]).unwrap();
        for running in [on_unix, on_channel] {
            running.signal(signal);
            assert_eq!(running.end().status.signal(), Some(signal.as_raw()));
        }
        assert_eq!(outcome(served).unwrap_err().kind(), ErrorKind::ConnectionReset);
        assert_eq!(fs::read_dir(place.path("")).unwrap().count(), 0, "files left");
    }
}

#[test]
fn stale_socket_is_taken_over_and_nothing_else_is() {
    let place = Place::new();
    let front = place.path("front");
    let address = format!("unix:{}", front.display());
    let words = ["proxy", "--listen", &address, "--connect", "local:x"];

    drop(UnixListener::bind(&front).unwrap());
    let (running, _) = proxy(&address, "local:x", "");
    Running::start(&words, |_| {}).end().expect_failure(2, &["cannot listen at", "front", "in use"]);
    running.signal(Signal::TERM);
    running.end();

    fs::write(&front, "precious").unwrap();
    Running::start(&words, |_| {}).end().expect_failure(2, &["cannot listen at", "front", "in use"]);
    assert_eq!(fs::read_to_string(&front).unwrap(), "precious");
}

#[test]
fn command_lines_without_sense_are_refused_with_2() {
    for line in [
        "",
        "--listen local:x",
        "--listen tcp:80 --connect local:x",
        "--listen local:x --connect unix:",
        "--listen local:x --connect pigeon:y",
        "--listen local:x --connect tcp:h:1 --clients 0",
        "--listen local:x --connect tcp:h:1 --ring 1",
    ] {
        let words: Vec<_> = ["proxy"].into_iter().chain(line.split_whitespace()).collect();
        let ended = Running::start(&words, |_| {}).end().expect(2);
        assert!(ended.out.is_empty() && ended.said.contains("error:"), "{line}: {}", ended.said);
    }
}
