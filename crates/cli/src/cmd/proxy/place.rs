// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connects and listens for a proxy: TCP, UNIX sockets, channels.

use std::{
    fmt, fs, io,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use tokio::{
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    task, time,
};
use tombolo::{
    Address, Options, Stream,
    tokio::{AsyncListener, AsyncStream},
};

use super::{
    join::End,
    vchan::{VchanListeners, Vchans},
};

/// Time before a listener whose queue is full is tried again.
const FULL: Duration = Duration::from_millis(10);

/// Address of any kind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    Tcp(String),
    Unix(PathBuf),
    Channel(Address),
    Vchans(Vchans),
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(vchans) = Vchans::parse(text) {
            return vchans.map(Self::Vchans);
        }
        match text.split_once(':') {
            Some(("tcp", rest)) => match rest.rsplit_once(':') {
                Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(Self::Tcp(rest.into())),
                _ => Err("a TCP address is tcp:HOST:PORT, such as tcp:127.0.0.1:8080 or tcp:[::1]:8080".into()),
            },
            Some(("unix", "")) => Err("a UNIX socket's address is unix:PATH".into()),
            Some(("unix", path)) => Ok(Self::Unix(path.into())),
            _ => tombolo::address(text).map(Self::Channel).map_err(|error| error.to_string()),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(at) => write!(f, "tcp:{at}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Channel(address) => address.fmt(f),
            Self::Vchans(vchans) => vchans.fmt(f),
        }
    }
}

impl Place {
    /// Connects, waiting at most `wait`.
    pub async fn connect(&self, options: Arc<Options>, wait: Duration, most: usize) -> io::Result<End> {
        match self {
            Self::Tcp(at) => undelayed(time::timeout(wait, TcpStream::connect(at)).await??),
            Self::Unix(path) => Ok(connect_unix(path, time::Instant::now() + wait).await?.into()),
            Self::Channel(address) => {
                let address = address.to_string();
                let connect = move || tombolo::connect_with::<Stream>(&address, &options);
                Ok(AsyncStream::new(task::spawn_blocking(connect).await??)?.into())
            }
            Self::Vchans(vchans) => {
                let vchans = vchans.clone();
                Ok(task::spawn_blocking(move || vchans.connect(wait, most)).await??.into())
            }
        }
    }
}

/// Connects again while the listener's queue is full. The kernel does not let a non-blocking socket wait for that, and
/// there is room in a moment.
async fn connect_unix(path: &Path, deadline: time::Instant) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if time::Instant::now() >= deadline {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                time::sleep(FULL).await;
            }
            other => return other,
        }
    }
}

fn undelayed(stream: TcpStream) -> io::Result<End> {
    // Pieces are passed on as they came; the sender knows best what belongs together.
    stream.set_nodelay(true)?;
    Ok(stream.into())
}

/// Listener for clients.
#[derive(Debug)]
pub enum Listening {
    Tcp(TcpListener),
    Unix(UnixListener, Socket),
    Channel(AsyncListener<Stream>, Address),
    Vchans(VchanListeners),
}

impl Listening {
    pub async fn begin(place: &Place, options: &Options) -> io::Result<Self> {
        Ok(match place {
            Place::Tcp(at) => Self::Tcp(TcpListener::bind(at).await?),
            Place::Unix(path) => Self::Unix(bind(path)?, Socket(path.clone())),
            Place::Channel(address) => {
                let listener = tombolo::listen_with::<Stream>(&address.to_string(), options)?;
                Self::Channel(AsyncListener::new(listener)?, address.clone())
            }
            Place::Vchans(vchans) => Self::Vchans(VchanListeners::open(vchans)?),
        })
    }

    /// Returns the address of the listener: with the port that was chosen, if the kernel was to choose one.
    pub fn place(&self) -> Place {
        match self {
            Self::Tcp(listener) => Place::Tcp(listener.local_addr().map_or_else(|_| "?".into(), |at| at.to_string())),
            Self::Unix(_, socket) => Place::Unix(socket.0.clone()),
            Self::Channel(_, address) => Place::Channel(address.clone()),
            Self::Vchans(listeners) => Place::Vchans(listeners.place()),
        }
    }

    pub async fn accept(&mut self) -> io::Result<End> {
        match self {
            Self::Tcp(listener) => undelayed(listener.accept().await?.0),
            Self::Unix(listener, _) => Ok(listener.accept().await?.0.into()),
            Self::Channel(listener, _) => Ok(AsyncStream::new(listener.accept().await?)?.into()),
            Self::Vchans(listeners) => Ok(listeners.accept().await?.into()),
        }
    }
}

/// Path of a socket, which is removed with its listener.
#[derive(Debug)]
pub struct Socket(PathBuf);

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Listens at `path`. Takes over a socket without a listener; leaves anything else there as it is.
fn bind(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_stale(path) => {
            fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        bound => bound,
    }
}

fn is_stale(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|at| at.file_type().is_socket())
        && std::os::unix::net::UnixStream::connect(path)
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_each_kind_are_told_apart_and_said_as_they_were() {
        for text in [
            "tcp:127.0.0.1:80",
            "tcp:[::1]:0",
            "tcp:localhost:8080",
            "unix:/run/x",
            "local:web",
            "local:/a/b",
            "xen:7/vchan:a/b",
        ] {
            assert_eq!(text.parse::<Place>().unwrap().to_string(), text);
        }
        for bad in ["", "tcp:", "tcp:80", "tcp:host:http", "tcp::80", "unix:", "x", "pigeon:x"] {
            assert!(bad.parse::<Place>().is_err(), "{bad}");
        }
    }
}
