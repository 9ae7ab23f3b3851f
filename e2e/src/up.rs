// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keeps machines running for interactive use: `up` serves a socket, and the other commands connect to it.

use crate::control::{Control, Job};
use crate::error::{Context, Error, Result};
use crate::line_reader::within;
use crate::wire::{End, ToHost};
use rustix::fs::unlink;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use tombolo_os::lock::lock;

/// How long a waiting command holds the lock, which keeps other commands out.
const TURN: Duration = Duration::from_millis(20);

/// Machines for interactive use.
pub trait Machines: Send + 'static {
    /// Name of their socket, by which clients find them.
    const NAME: &'static str;

    /// Returns the connection that carries commands to one machine.
    ///
    /// # Errors
    /// No machine has that name.
    fn control(&mut self, at: &str) -> Result<&mut Control>;

    /// Copies a file of the host into one machine and makes it executable.
    ///
    /// # Errors
    /// The file or the machine does not exist.
    fn push(&mut self, to: &str, from: &Path, path: &str) -> Result<()>;

    /// Returns all console output of one machine.
    ///
    /// # Errors
    /// No machine has that name.
    fn log(&mut self, of: &str) -> Result<String>;

    /// Recreates one machine, and returns a description of it.
    ///
    /// # Errors
    /// The machine cannot be recreated.
    fn renew(&mut self, at: &str) -> Result<String>;

    /// Ends the machines.
    ///
    /// # Errors
    /// A console shows a fault.
    fn finish(self) -> Result<()>;
}

/// A request from a client.
#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    Run { at: String, argv: Vec<String> },
    Push { to: String, from: PathBuf, path: String },
    Log { of: String },
    Renew { at: String },
    Down,
}

/// Returns the path of the socket: in the build's folder, so that each tree has its own.
fn place(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../target/{name}.socket"))
}

/// Serves machines until a client asks to end them.
///
/// # Errors
/// The socket cannot be made, or a console shows a fault at the end.
pub fn serve<M: Machines>(machines: M) -> Result<()> {
    let place = place(M::NAME);
    _ = unlink(&place);
    let listener = UnixListener::bind(&place).context(place.display())?;
    serve_at(&place, listener, machines)
}

/// Serves machines at an existing socket. A client that sends nothing, or nothing valid, does not affect other clients.
fn serve_at<M: Machines>(place: &Path, listener: UnixListener, machines: M) -> Result<()> {
    let machines = Arc::new(Mutex::new(Some(machines)));
    let (sender, down) = channel::<Result<UnixStream>>();
    let served = Arc::clone(&machines);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = match stream {
                Ok(stream) => stream,
                Err(error) => return sender.send(Err(error.into())),
            };
            let (machines, sender) = (Arc::clone(&served), sender.clone());
            thread::spawn(move || attend(stream, &machines, &sender));
        }
        Ok(())
    });
    let asked = down.recv().context("nobody listens any more")?;
    _ = unlink(place);
    let mut stream = asked?;
    let ended = lock(&machines).take().map_or(Ok(()), M::finish);
    // The client that asked need not wait for the answer.
    _ = finish(&mut stream, ended.clone().map(|()| End::Code(0)));
    ended
}

/// Does what one connection asks. Passes a request to end the machines on to `down`.
fn attend<M: Machines>(mut stream: UnixStream, machines: &Mutex<Option<M>>, down: &Sender<Result<UnixStream>>) {
    let done = match receive_request(&stream) {
        Ok(Ask::Down) => {
            // The send fails only if the machines were ended already.
            _ = down.send(Ok(stream));
            return;
        }
        Ok(ask) => answer(machines, ask, &mut stream),
        Err(why) => Err(why),
    };
    _ = finish(&mut stream, done);
}

/// Reads the request of a connection.
fn receive_request(stream: &UnixStream) -> Result<Ask> {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).context("what is asked")?;
    serde_json::from_str(&line).context("what is asked")
}

fn answer<M: Machines>(machines: &Mutex<Option<M>>, ask: Ask, stream: &mut UnixStream) -> Result<End> {
    let gone = || Error::new("they are gone");
    let text = match ask {
        Ask::Run { at, argv } => {
            let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
            let job = lock(machines).as_mut().ok_or_else(gone)?.control(&at)?.start(&argv)?;
            return follow(machines, &at, job, stream);
        }
        Ask::Push { to, from, path } => {
            lock(machines).as_mut().ok_or_else(gone)?.push(&to, &from, &path)?;
            String::new()
        }
        Ask::Log { of } => lock(machines).as_mut().ok_or_else(gone)?.log(&of)?,
        Ask::Renew { at } => lock(machines).as_mut().ok_or_else(gone)?.renew(&at)?,
        Ask::Down => String::new(),
    };
    send_to_client(stream, &ToHost::Line { job: 0, text })?;
    Ok(End::Code(0))
}

/// Passes on what a command prints. Kills the command when the client is gone.
fn follow<M: Machines>(host: &Mutex<Option<M>>, at: &str, job: Job, stream: &mut UnixStream) -> Result<End> {
    loop {
        let mut host = lock(host);
        let control = host.as_mut().ok_or_else(|| Error::new("they are gone"))?.control(at)?;
        match control.line(job, Instant::now() + TURN) {
            Ok(text) => {
                if send_to_client(stream, &ToHost::Line { job: 0, text }).is_err() {
                    control.kill(job)?;
                }
            }
            Err(why) if control.ended(job) => {
                _ = why;
                return Ok(control.wait(job, within(0))?.end);
            }
            Err(_) => {}
        }
        drop(host);
        thread::yield_now();
    }
}

fn send_to_client(stream: &mut UnixStream, what: &ToHost) -> Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    Ok(stream.write_all(&line)?)
}

fn finish(stream: &mut UnixStream, result: Result<End>) -> Result<()> {
    let end = match result {
        Ok(end) => end,
        Err(why) => {
            send_to_client(stream, &ToHost::Line { job: 1, text: why.to_string() })?;
            End::NotStarted
        }
    };
    send_to_client(stream, &ToHost::Exit { job: 0, end })
}

/// Sends a request to the machines that are up: `run`, `push`, `log`, `renew` or `down`. Prints the output, and returns
/// the command's exit status.
///
/// # Errors
/// No machines are up, or the request fails.
pub fn ask<M: Machines>(words: &[&str]) -> Result<End> {
    let ask = match *words {
        ["run", at, ref argv @ ..] => {
            Ask::Run { at: at.into(), argv: argv.iter().map(|word| (*word).to_owned()).collect() }
        }
        ["push", to, from, ref path @ ..] => {
            let from = Path::new(from).canonicalize().context(from)?;
            let name = from.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let path = path.first().map_or_else(|| format!("/bin/{name}"), |path| (*path).to_owned());
            Ask::Push { to: to.into(), from, path }
        }
        ["log", of] => Ask::Log { of: of.into() },
        ["renew", at] => Ask::Renew { at: at.into() },
        ["down"] => Ask::Down,
        _ => return Err(Error::new("run WHERE COMMAND…, push WHERE FILE [PATH], log WHERE, renew WHERE, or down")),
    };
    let mut stream = UnixStream::connect(place(M::NAME)).context("nothing is up")?;
    let mut line = serde_json::to_vec(&ask)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    for line in BufReader::new(stream).lines() {
        match serde_json::from_str(&line?)? {
            ToHost::Line { job: 0, text } => println!("{text}"),
            ToHost::Line { text, .. } => return Err(Error::new(text)),
            ToHost::Exit { end, .. } => return Ok(end),
            ToHost::Ready => {}
        }
    }
    Err(Error::new("they went"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use std::net::Shutdown;

    const LIMIT: Duration = Duration::from_secs(20);

    /// Machines that report when they are ended.
    struct Fake(Sender<()>);

    impl Machines for Fake {
        const NAME: &'static str = "fake";

        fn control(&mut self, _: &str) -> Result<&mut Control> {
            Err(Error::new("there is none"))
        }

        fn push(&mut self, _: &str, _: &Path, _: &str) -> Result<()> {
            Err(Error::new("there is none"))
        }

        fn log(&mut self, of: &str) -> Result<String> {
            Ok(format!("the console of {of}"))
        }

        fn renew(&mut self, _: &str) -> Result<String> {
            Err(Error::new("there is none"))
        }

        fn finish(self) -> Result<()> {
            Ok(self.0.send(())?)
        }
    }

    fn connect(place: &Path) -> UnixStream {
        let stream = UnixStream::connect(place).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    /// Sends bytes and returns all messages of the answer.
    fn said(place: &Path, bytes: &[u8]) -> Vec<ToHost> {
        let mut stream = connect(place);
        stream.write_all(bytes).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        BufReader::new(stream).lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect()
    }

    #[test]
    fn machines_outlive_connections_that_say_nothing_or_nothing_that_makes_sense() {
        let folder = Scratch::new("up").unwrap();
        let place = folder.path().join("socket");
        let listener = UnixListener::bind(&place).unwrap();
        let ((ended, end), (returned, result)) = (channel(), channel());
        let at = place.clone();
        thread::spawn(move || returned.send(serve_at(&at, listener, Fake(ended))));

        let _silent = connect(&place);
        drop(connect(&place));
        for bytes in [&b""[..], b"no JSON\n", b"\xff\xfe\n", b"{\"Log\":{}}\n", b"\"Down"] {
            let said = said(&place, bytes);
            let [ToHost::Line { job: 1, text }, ToHost::Exit { end: End::NotStarted, .. }] = &said[..] else {
                panic!("{said:?}")
            };
            assert!(text.starts_with("what is asked: "), "{text}");
        }
        let log = said(&place, b"{\"Log\":{\"of\":\"a\"}}\n");
        assert!(matches!(&log[..], [ToHost::Line { job: 0, text }, _] if text == "the console of a"), "{log:?}");
        assert!(end.try_recv().is_err() && result.try_recv().is_err(), "they are up");

        let down = said(&place, b"\"Down\"\n");
        assert!(matches!(down[..], [ToHost::Exit { end: End::Code(0), .. }]), "{down:?}");
        end.recv_timeout(LIMIT).unwrap();
        result.recv_timeout(LIMIT).unwrap().unwrap();
        assert!(!place.exists());
    }
}
