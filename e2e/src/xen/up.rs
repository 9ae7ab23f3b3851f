// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keeps a pair of domUs for somebody who types: `xen up` waits at a socket, the other words come to it there.

use super::host::{Host, Kind, Parts};
use super::packages::Packages;
use crate::control::Job;
use crate::debian::Archive;
use crate::error::{Context, Error, Result};
use crate::image::Extra;
use crate::lines::within;
use crate::wire::{End, ToHost};
use rustix::fs::unlink;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// For how long one who waits for a command keeps others from theirs.
const TURN: Duration = Duration::from_millis(20);

/// What is asked of the pair.
#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    Run { at: String, argv: Vec<String> },
    Push { to: String, from: PathBuf, path: String },
    Log { of: String },
    Renew { place: usize },
    Down,
}

/// The socket: in the build's folder, so that each tree has its own.
fn place() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/xen.socket")
}

/// Boots a pair and serves it until it is told to go.
///
/// # Errors
/// It does not come up, or a console tells of a fault at the end.
pub fn up(kind: Kind, extra: &[Extra]) -> Result<()> {
    let parts = Parts::new(Packages::get(&Archive::open()?)?, extra)?;
    let mut host = Host::boot(&parts)?;
    host.create_pair(kind)?;
    _ = unlink(place());
    let listener = UnixListener::bind(place()).context(place().display())?;
    let numbers = host.domus.each_ref().map(|domain| format!("{} is domain {}", domain.name, domain.domid));
    println!("up: {}", numbers.join(", "));
    let host = Arc::new(Mutex::new(Some(host)));
    for stream in listener.incoming() {
        let (mut stream, host) = (stream?, Arc::clone(&host));
        let mut line = String::new();
        BufReader::new(stream.try_clone()?).read_line(&mut line)?;
        let ask: Ask = serde_json::from_str(&line)?;
        if matches!(ask, Ask::Down) {
            _ = unlink(place());
            let ended = lock(&host).take().map_or(Ok(()), Host::finish);
            finish(&mut stream, ended.clone().map(|()| End::Code(0)))?;
            return ended;
        }
        thread::spawn(move || {
            let done = serve(&host, ask, kind, &mut stream);
            finish(&mut stream, done)
        });
    }
    Ok(())
}

fn serve(host: &Mutex<Option<Host>>, ask: Ask, kind: Kind, stream: &mut UnixStream) -> Result<End> {
    let gone = || Error::new("the pair is gone");
    let text = match ask {
        Ask::Run { at, argv } => {
            let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
            let job = lock(host).as_mut().ok_or_else(gone)?.control(&at)?.start(&argv)?;
            return follow(host, &at, job, stream);
        }
        Ask::Push { to, from, path } => {
            lock(host).as_mut().ok_or_else(gone)?.push(&to, &from, &path)?;
            String::new()
        }
        Ask::Log { of } if of == "dom0" => lock(host).as_mut().ok_or_else(gone)?.dom0.console.text().join("\n"),
        Ask::Log { of } => lock(host).as_mut().ok_or_else(gone)?.console(&of)?.text().join("\n"),
        Ask::Renew { place } => {
            let mut host = lock(host);
            let host = host.as_mut().ok_or_else(gone)?;
            host.destroy(place)?;
            host.create(place, kind, "")?;
            format!("{} is domain {}", host.domus[place].name, host.domus[place].domid)
        }
        Ask::Down => String::new(),
    };
    tell(stream, &ToHost::Line { job: 0, text })?;
    Ok(End::Code(0))
}

/// Passes on what a command prints. It is killed when nobody listens any more.
fn follow(host: &Mutex<Option<Host>>, at: &str, job: Job, stream: &mut UnixStream) -> Result<End> {
    loop {
        let mut host = lock(host);
        let control = host.as_mut().ok_or_else(|| Error::new("the pair is gone"))?.control(at)?;
        match control.line(job, Instant::now() + TURN) {
            Ok(text) => {
                if tell(stream, &ToHost::Line { job: 0, text }).is_err() {
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

fn lock(host: &Mutex<Option<Host>>) -> MutexGuard<'_, Option<Host>> {
    host.lock().unwrap_or_else(PoisonError::into_inner)
}

fn tell(stream: &mut UnixStream, what: &ToHost) -> Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    Ok(stream.write_all(&line)?)
}

fn finish(stream: &mut UnixStream, result: Result<End>) -> Result<()> {
    let end = match result {
        Ok(end) => end,
        Err(why) => {
            tell(stream, &ToHost::Line { job: 1, text: why.to_string() })?;
            End::NotStarted
        }
    };
    tell(stream, &ToHost::Exit { job: 0, end })
}

/// Takes words to the pair that is up: `run`, `push`, `log`, `renew`, `down`. Prints what comes of it, and says how the
/// command ended.
///
/// # Errors
/// There is no pair, or what was asked fails.
pub fn ask(words: &[&str]) -> Result<End> {
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
        ["renew", place] => Ask::Renew { place: usize::from(place == "B") },
        ["down"] => Ask::Down,
        _ => return Err(Error::new("run WHERE COMMAND…, push WHERE FILE [PATH], log WHERE, renew A|B, or down")),
    };
    let mut stream = UnixStream::connect(place()).context("nothing is up")?;
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
    Err(Error::new("the pair went"))
}
