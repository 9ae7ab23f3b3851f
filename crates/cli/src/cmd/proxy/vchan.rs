// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Serves and joins vchans whose peer runs Xen's libxenvchan. Two threads stand between the halves of each and the
//! proxy.
//!
//! A path has room for one client. A path with `{n}` has room for as many as there are numbers: the server keeps a free
//! vchan at the lowest free number, and the client looks for it.
//!
//! A vchan has no half-close. After the other side has ended its stream, the vchan is therefore kept until its peer has
//! been silent for [`SILENCE`], or closes: only then is it closed.

use std::{
    collections::BTreeSet,
    fmt,
    io::{self, ErrorKind},
    str::FromStr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use tokio::sync::mpsc::{self, Receiver, Sender};
use tombolo_backends::vchan::{self, Error, Live, Reader, Server, Writer};
use tombolo_os::lock::lock;

/// Time without a byte from the peer after which a vchan is closed, once everything was sent to it.
const SILENCE: Duration = Duration::from_secs(5);
/// Time between two checks that the peer's domain is there.
const EVERY: Duration = Duration::from_secs(1);
/// Time between two searches for a server.
const AGAIN: Duration = Duration::from_millis(100);
/// Bytes of each ring.
const RING: usize = 64 << 10;
/// Number of pieces under way in one direction.
const PIECES: usize = 2;
/// Part of the path that stands for a number.
const NUMBER: &str = "{n}";

/// Place of vchans: `xen:DOMID/vchan:PATH`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Vchans {
    peer: u16,
    path: String,
}

impl Vchans {
    /// Parses `text`. Returns `None` if it is not such an address at all.
    pub fn parse(text: &str) -> Option<Result<Self, String>> {
        let (peer, path) = text.strip_prefix("xen:")?.split_once("/vchan:")?;
        Some(match u16::from_str(peer) {
            Ok(peer) if !path.is_empty() => Ok(Self { peer, path: path.into() }),
            _ => Err("a vchan's address is xen:DOMID/vchan:PATH, with the number of the other domain".into()),
        })
    }

    fn path(&self, number: usize) -> String {
        self.path.replace(NUMBER, &number.to_string())
    }

    /// Looks for a server that has no client, for at most `wait`.
    pub fn connect(&self, wait: Duration, most: usize) -> io::Result<Ends> {
        let until = Instant::now() + wait;
        loop {
            let mut refused = Error::NotFound(self.path.clone());
            for number in 0..if self.path.contains(NUMBER) { most } else { 1 } {
                let path = self.path(number);
                match vchan::join(self.peer, &path) {
                    Ok(halves) => return begin(halves, Held { peer: self.peer, server: None, path, _number: None }),
                    Err(error @ Error::Busy(_)) => refused = error,
                    Err(error) => {
                        refused = error;
                        break;
                    }
                }
            }
            match refused {
                Error::NotFound(_) | Error::Busy(_) if Instant::now() < until => thread::park_timeout(AGAIN),
                Error::NotFound(_) | Error::Busy(_) => {
                    return Err(io::Error::new(ErrorKind::TimedOut, refused.to_string()));
                }
                other => return Err(io(other)),
            }
        }
    }
}

impl fmt::Display for Vchans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "xen:{}/vchan:{}", self.peer, self.path)
    }
}

fn io(error: Error) -> io::Error {
    match error {
        Error::Ground(error) => error,
        Error::Corrupt { .. } => io::Error::new(ErrorKind::InvalidData, error.to_string()),
        Error::Closed => ErrorKind::BrokenPipe.into(),
        other => io::Error::other(other.to_string()),
    }
}

/// Number that is in use until this is dropped.
#[derive(Debug)]
struct Number(usize, Arc<Mutex<BTreeSet<usize>>>);

impl Number {
    fn lowest(used: &Arc<Mutex<BTreeSet<usize>>>) -> Self {
        let mut numbers = lock(used);
        let free = (0..).find(|number| numbers.insert(*number)).expect("there are more numbers than vchans");
        Self(free, Arc::clone(used))
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        lock(&self.1).remove(&self.0);
    }
}

/// Servers whose next client is waited for.
#[derive(Debug)]
pub struct VchanListeners {
    at: Vchans,
    /// Next client, or why there is none.
    next: Receiver<io::Result<Ends>>,
    ask: Option<Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Drop for VchanListeners {
    /// Removes the server to which no client came, before this process ends.
    fn drop(&mut self) {
        self.next.close();
        drop(self.ask.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl VchanListeners {
    /// Serves at once: the first server exists when this returns.
    pub fn open(at: &Vchans) -> io::Result<Self> {
        let (ask, asked) = mpsc::channel(1);
        let (tell, next) = mpsc::channel(1);
        let used = Arc::default();
        let first = serve(at, &used)?;
        let here = at.clone();
        let answer = move || answer(&here, &used, first, asked, &tell);
        let thread = Some(thread::Builder::new().name("vchan-listeners".into()).spawn(answer)?);
        Ok(Self { at: at.clone(), next, ask: Some(ask), thread })
    }

    pub fn place(&self) -> Vchans {
        self.at.clone()
    }

    /// Waits for a client.
    pub async fn accept(&mut self) -> io::Result<Ends> {
        // An earlier request that was not waited for still counts, so none is added.
        let _ = self.ask.as_ref().map(|ask| ask.try_send(()));
        self.next.recv().await.unwrap_or_else(|| Err(io::Error::other("nobody waits for clients any more")))
    }
}

type Waiting = ((Reader, Writer), Held);

fn serve(at: &Vchans, used: &Arc<Mutex<BTreeSet<usize>>>) -> io::Result<Waiting> {
    let number = Number::lowest(used);
    let path = at.path(number.0);
    let (server, halves) = vchan::serve(at.peer, &path, RING, RING).map_err(io)?;
    Ok((halves, Held { peer: at.peer, server: Some(server), path, _number: Some(number) }))
}

/// Delivers a client for each request.
fn answer(
    at: &Vchans,
    used: &Arc<Mutex<BTreeSet<usize>>>,
    first: Waiting,
    mut asked: Receiver<()>,
    tell: &Sender<io::Result<Ends>>,
) {
    let mut ready = Some(Ok(first));
    while asked.blocking_recv().is_some() {
        let came = ready.take().unwrap_or_else(|| serve(at, used)).and_then(|((mut reader, writer), kept)| {
            let mut fruitless = 0;
            while reader.live() == Live::NotYet && !tell.is_closed() {
                reader.wait_a_while(1, fruitless).map_err(io)?;
                fruitless += 1;
            }
            begin((reader, writer), kept)
        });
        if tell.blocking_send(came).is_err() {
            return;
        }
        // A path with room for one is free when its client has gone.
        while !at.path.contains(NUMBER) && !lock(used).is_empty() {
            if tell.is_closed() {
                return;
            }
            thread::park_timeout(AGAIN);
        }
    }
}

/// Resources of a vchan that are kept until both its threads have ended.
#[derive(Debug)]
struct Held {
    peer: u16,
    server: Option<Server>,
    path: String,
    _number: Option<Number>,
}

impl Held {
    /// Returns whether the peer's domain is there, as far as that can be known.
    fn is_there(&self) -> bool {
        let there = match self.server {
            Some(_) => vchan::is_there(self.peer),
            None => vchan::is_served(self.peer, &self.path),
        };
        there.unwrap_or(true)
    }
}

/// State that both threads of a vchan share.
#[derive(Debug)]
struct Shared {
    /// Whether everything was sent to the peer, and the peer has read it.
    finished: AtomicBool,
    /// Whether the other side or the peer broke off.
    broken: AtomicBool,
    kept: Held,
}

/// Both directions of a vchan, as the proxy uses them.
#[derive(Debug)]
pub struct Ends {
    pub source: Incoming,
    pub sink: Outgoing,
}

/// Bytes from the peer.
#[derive(Debug)]
pub struct Incoming {
    pieces: Receiver<io::Result<Vec<u8>>>,
    piece: Vec<u8>,
    from: usize,
}

impl Incoming {
    /// Returns the next bytes; 0 where the peer closed.
    pub async fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.from == self.piece.len() {
            self.piece = match self.pieces.recv().await {
                Some(piece) => piece?,
                None => return Ok(0),
            };
            self.from = 0;
        }
        let len = buffer.len().min(self.piece.len() - self.from);
        buffer[..len].copy_from_slice(&self.piece[self.from..self.from + len]);
        self.from += len;
        Ok(len)
    }
}

/// Bytes to the peer. If this is dropped before `finish`, the vchan is broken off.
#[derive(Debug)]
pub struct Outgoing {
    pieces: Sender<Vec<u8>>,
    shared: Arc<Shared>,
    all: bool,
}

impl Outgoing {
    pub async fn write(&self, bytes: &[u8]) -> io::Result<()> {
        self.pieces.send(bytes.to_vec()).await.map_err(|_| ErrorKind::BrokenPipe.into())
    }

    /// Notes that everything was sent.
    pub fn finish(mut self) {
        self.all = true;
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        if !self.all {
            self.shared.broken.store(true, Ordering::Release);
        }
    }
}

fn begin((reader, writer): (Reader, Writer), kept: Held) -> io::Result<Ends> {
    let shared = Arc::new(Shared { finished: AtomicBool::new(false), broken: AtomicBool::new(false), kept });
    let (to_proxy, pieces) = mpsc::channel(PIECES);
    let source = Incoming { pieces, piece: Vec::new(), from: 0 };
    let (to_peer, orders) = mpsc::channel(PIECES);
    let sink = Outgoing { pieces: to_peer, shared: Arc::clone(&shared), all: false };
    let reading = Arc::clone(&shared);
    thread::Builder::new().name("vchan-in".into()).spawn(move || copy_from_peer(reader, &to_proxy, &reading))?;
    thread::Builder::new().name("vchan-out".into()).spawn(move || give(writer, orders, &shared))?;
    Ok(Ends { source, sink })
}

/// Copies from the peer to the proxy, until the peer closes or the proxy wants no more.
fn copy_from_peer(mut reader: Reader, to: &Sender<io::Result<Vec<u8>>>, shared: &Shared) {
    let (mut fruitless, mut heard, mut asked) = (0, Instant::now(), Instant::now());
    let told = loop {
        if shared.broken.load(Ordering::Acquire) || to.is_closed() {
            break None;
        }
        let live = reader.live();
        let mut piece = vec![0; RING];
        match reader.read(&mut piece) {
            Err(error) => break Some(io(error)),
            Ok(0) if live == Live::Gone => break None,
            Ok(0) => {
                if shared.finished.load(Ordering::Acquire) && heard.elapsed() > SILENCE {
                    break None;
                }
                if asked.elapsed() > EVERY {
                    asked = Instant::now();
                    if !shared.kept.is_there() && reader.live() == Live::Here {
                        break Some(io::Error::new(ErrorKind::ConnectionReset, "the peer's domain is gone"));
                    }
                }
                if let Err(error) = reader.wait_a_while(1, fruitless) {
                    break Some(io(error));
                }
                fruitless += 1;
            }
            Ok(len) => {
                piece.truncate(len);
                if to.blocking_send(Ok(piece)).is_err() {
                    break None;
                }
                (fruitless, heard) = (0, Instant::now());
            }
        }
    };
    shared.broken.store(true, Ordering::Release);
    if let Some(error) = told {
        let _ = to.blocking_send(Err(error));
    }
}

/// Copies from the proxy to the peer, until everything was sent and read, or the peer is gone.
fn give(mut writer: Writer, mut orders: Receiver<Vec<u8>>, shared: &Shared) {
    let broken = || shared.broken.load(Ordering::Acquire);
    while let Some(piece) = orders.blocking_recv() {
        let mut rest = &piece[..];
        let mut fruitless = 0;
        while !rest.is_empty() {
            let Ok(written) = writer.write(rest) else { return };
            rest = &rest[written..];
            if written > 0 {
                fruitless = 0;
            } else if broken() || writer.wait_a_while(1, fruitless).is_err() {
                return;
            } else {
                fruitless += 1;
            }
        }
    }
    let all = writer.capacity();
    let mut fruitless = 0;
    while !broken() && writer.wait_a_while(all, fruitless).is_ok_and(|room| room < all) {
        fruitless += 1;
    }
    shared.finished.store(true, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use tombolo_backends::vchan::FakeXen;

    use super::*;

    #[test]
    fn addresses_of_vchans_are_told_from_those_of_channels() {
        let at = Vchans::parse("xen:7/vchan:data/vchan/7/42").unwrap().unwrap();
        assert_eq!(at.to_string(), "xen:7/vchan:data/vchan/7/42");
        assert_eq!((at.peer, at.path(3).as_str()), (7, "data/vchan/7/42"));
        assert_eq!(Vchans::parse("xen:7/vchan:data/web-{n}").unwrap().unwrap().path(3), "data/web-3");
        assert!(Vchans::parse("xen:7/web").is_none() && Vchans::parse("local:web").is_none());
        for bad in ["xen:x/vchan:a", "xen:7/vchan:"] {
            assert!(Vchans::parse(bad).unwrap().is_err(), "{bad}");
        }
    }

    #[test]
    fn numbers_are_the_lowest_that_are_free() {
        let used = Arc::default();
        let (a, b) = (Number::lowest(&used), Number::lowest(&used));
        assert_eq!((a.0, b.0), (0, 1));
        drop(a);
        assert_eq!((Number::lowest(&used).0, b.0), (0, 1));
    }

    /// Returns a vchan between two domains of a test; the test holds one end.
    async fn pair() -> (Ends, (Reader, Writer), FakeXen) {
        let xen = FakeXen::new();
        let (here, there) = (xen.domain(5), xen.domain(7));
        let (server, halves) = vchan::serve_in(&here, 7, "data/x", 4096, 4096).unwrap();
        let peer = vchan::join_in(&there, 5, "/local/domain/5/data/x").unwrap();
        let kept = Held { peer: 7, server: Some(server), path: "data/x".into(), _number: None };
        (begin(halves, kept).unwrap(), peer, xen)
    }

    fn read(reader: &mut Reader, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let mut done = 0;
        while done < len {
            assert!(reader.wait_for(1).unwrap() > 0, "it ended after {done} of {len}");
            done += reader.read(&mut bytes[done..]).unwrap();
        }
        bytes
    }

    #[tokio::test]
    async fn w3_w6_bytes_pass_both_ways_and_the_peers_end_is_the_end() {
        let (ends, (mut reader, mut writer), _xen) = pair().await;
        let (mut source, sink) = (ends.source, ends.sink);
        let sent: Vec<u8> = (0..100_000u32).map(|number| number as u8).collect();
        let (want, reads) = (sent.clone(), tokio::task::spawn_blocking(move || (read(&mut reader, 100_000), reader)));
        sink.write(&sent).await.unwrap();
        let (came, mut reader) = reads.await.unwrap();
        assert!(came == want);
        writer.write(b"answer").unwrap();
        let mut buffer = [0; 64];
        assert_eq!(source.read(&mut buffer[..4]).await.unwrap(), 4);
        assert_eq!(source.read(&mut buffer[4..]).await.unwrap(), 2);
        assert_eq!(&buffer[..6], b"answer");
        // Everything was sent, but the vchan continues, because it ends only as a whole.
        sink.finish();
        assert_eq!(reader.available(1).unwrap(), 0);
        assert_eq!(reader.live(), Live::Here);
        writer.write(b"late").unwrap();
        assert_eq!(source.read(&mut buffer).await.unwrap(), 4);
        drop((reader, writer));
        assert_eq!(source.read(&mut buffer).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn w3_break_on_the_other_side_closes_the_vchan() {
        let (ends, (reader, writer), _xen) = pair().await;
        let (mut source, sink) = (ends.source, ends.sink);
        drop(sink);
        assert_eq!(source.read(&mut [0; 4]).await.unwrap(), 0);
        tokio::task::spawn_blocking(move || {
            while writer.live() != Live::Gone {
                thread::yield_now();
            }
            drop((reader, writer));
        })
        .await
        .unwrap();
    }
}
