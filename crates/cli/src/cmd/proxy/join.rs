// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Joins two connections: the bytes of one go to the other, and so do its end and its breaking off.

use std::{
    io::{self, ErrorKind},
    pin::pin,
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UnixStream, tcp, unix},
    time::{self, MissedTickBehavior},
};
use tombolo::{
    Ending, Error, Liveness, Watch,
    tokio::{AsyncReadHalf, AsyncStream, AsyncWriteHalf},
};

use super::vchan;

/// Most bytes under way in one direction.
const BUFFER: usize = 64 << 10;
/// Time between two checks that the peer of a channel to which nothing is sent still reads.
const LOOK: Duration = Duration::from_secs(1);

/// One connection of any kind.
#[derive(Debug)]
pub struct End {
    source: Source,
    sink: Sink,
}

impl End {
    /// Breaks the connection off, so that the peer does not take it for ended. A UNIX socket cannot express that.
    pub fn abort(self) {
        drop(self);
    }
}

impl From<TcpStream> for End {
    fn from(stream: TcpStream) -> Self {
        let (read, write) = stream.into_split();
        Self { source: Source::Tcp(read), sink: Sink(Some(Drain::Tcp(write))) }
    }
}

impl From<UnixStream> for End {
    fn from(stream: UnixStream) -> Self {
        let (read, write) = stream.into_split();
        Self { source: Source::Unix(read), sink: Sink(Some(Drain::Unix(write))) }
    }
}

impl From<AsyncStream> for End {
    fn from(stream: AsyncStream) -> Self {
        let watch = stream.get_ref().watch();
        let (read, write) = stream.into_split();
        Self { source: Source::Channel(Box::new(read)), sink: Sink(Some(Drain::Channel(Box::new(write), watch))) }
    }
}

impl From<vchan::Ends> for End {
    fn from(ends: vchan::Ends) -> Self {
        Self { source: Source::Vchan(Box::new(ends.source)), sink: Sink(Some(Drain::Vchan(ends.sink))) }
    }
}

/// Source of bytes.
#[derive(Debug)]
enum Source {
    Tcp(tcp::OwnedReadHalf),
    Unix(unix::OwnedReadHalf),
    Channel(Box<AsyncReadHalf>),
    Vchan(Box<vchan::Incoming>),
}

impl Source {
    /// Returns the next bytes; 0 only where the peer sent everything.
    async fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let half: &mut (dyn AsyncRead + Unpin + Send) = match self {
            Self::Tcp(half) => half,
            Self::Unix(half) => half,
            Self::Channel(half) => &mut **half,
            Self::Vchan(half) => return half.read(buffer).await,
        };
        let read = half.read(buffer).await?;
        match self {
            Self::Channel(half) if read == 0 => match half.get_ref().ending() {
                None | Some(Ending::Closed) => Ok(0),
                Some(Ending::Aborted) => Err(io::Error::new(ErrorKind::ConnectionAborted, "the peer gave up")),
                Some(Ending::DomainGone) => Err(io::Error::new(ErrorKind::ConnectionReset, "the peer's domain died")),
                Some(_) => Err(io::Error::new(ErrorKind::ConnectionReset, "the peer's process died")),
            },
            _ => Ok(read),
        }
    }
}

#[derive(Debug)]
enum Drain {
    Tcp(tcp::OwnedWriteHalf),
    Unix(unix::OwnedWriteHalf),
    Channel(Box<AsyncWriteHalf>, Watch),
    Vchan(vchan::Outgoing),
}

impl Drain {
    async fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Tcp(half) => half.write_all(bytes).await,
            Self::Unix(half) => half.write_all(bytes).await,
            Self::Channel(half, _) => half.write_all(bytes).await,
            Self::Vchan(half) => half.write(bytes).await,
        }
    }

    async fn finish(self) -> io::Result<()> {
        match self {
            Self::Tcp(mut half) => half.shutdown().await,
            Self::Unix(mut half) => half.shutdown().await,
            Self::Channel(mut half, _) => half.shutdown().await,
            Self::Vchan(half) => {
                half.finish();
                Ok(())
            }
        }
    }
}

/// Sink of bytes. Dropped before it has finished, it breaks the connection off.
#[derive(Debug)]
struct Sink(Option<Drain>);

impl Sink {
    async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.0 {
            Some(drain) => drain.write_all(bytes).await,
            None => Ok(()),
        }
    }

    /// Returns whether the peer is known to take nothing more. Only a channel has to be asked.
    fn is_left(&mut self) -> bool {
        let Some(Drain::Channel(half, watch)) = &mut self.0 else { return false };
        matches!(watch.liveness(), Liveness::ProcessGone | Liveness::DomainGone | Liveness::Revoked)
            || matches!(half.get_mut().try_write(&[]), Err(Error::Closed | Error::PeerGone))
    }

    /// Ends the direction: everything was sent.
    async fn finish(&mut self) -> io::Result<()> {
        match self.0.take() {
            Some(drain) => drain.finish().await,
            None => Ok(()),
        }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        match self.0.take() {
            Some(Drain::Tcp(half)) => {
                let _ = half.as_ref().set_zero_linger();
                // Dropping the half would tell the peer that everything was sent.
                half.forget();
            }
            Some(Drain::Channel(mut half, _)) => half.get_mut().abort(),
            Some(Drain::Unix(_) | Drain::Vchan(_)) | None => {}
        }
    }
}

/// Carries bytes in both directions until both have ended. If one breaks off, both do.
pub async fn join(client: End, server: End) -> io::Result<()> {
    tokio::try_join!(carry(client.source, server.sink), carry(server.source, client.sink)).map(drop)
}

/// Carries one direction to its end, or until its receiver takes no more.
async fn carry(mut source: Source, mut sink: Sink) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    let mut look = time::interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let read = {
            let mut read = pin!(source.read(&mut buffer));
            loop {
                tokio::select! {
                    read = &mut read => break read?,
                    // Without this a silent source would keep what a peer that died has left.
                    _ = look.tick() => if sink.is_left() {
                        return Ok(());
                    }
                }
            }
        };
        let done = match read {
            0 => return unless_closed(sink.finish().await).map(drop),
            read => unless_closed(sink.write(&buffer[..read]).await)?,
        };
        if done.is_none() {
            // That its receiver takes no more is no reason to end the other direction.
            return Ok(());
        }
    }
}

/// Returns `None` where the other side has stopped reading, in order.
fn unless_closed(done: io::Result<()>) -> io::Result<Option<()>> {
    match done {
        Ok(()) => Ok(Some(())),
        Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::NotConnected) => Ok(None),
        Err(error) => Err(error),
    }
}
