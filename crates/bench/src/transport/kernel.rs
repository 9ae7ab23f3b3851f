// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The kernel's own transports: TCP, UNIX sockets, pipes and eventfds. All are descriptors that are read and written.

use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

use super::{Card, Context, End, Namespaces, Wire, serial};
use crate::error::{Error, Os, Result};
use crate::job::{Job, Mode, Test, Wait};

/// Buffer of UNIX sockets, in the kernel's own measure: a message of 4 MiB and its overhead fit.
const UNIX_BUFFER: usize = 8 << 20;
/// Largest pipe that the kernel gives to everyone by default.
const PIPE_BUFFER: usize = 1 << 20;
const SOCKET_TESTS: &[Test] =
    &[Test::Throughput, Test::Rate, Test::Latency, Test::Load, Test::Switches, Test::Setup, Test::Channels, Test::Cpu];

const SOCKET: Card = Card {
    name: "tcp",
    mode: Mode::Stream,
    variants: &[""],
    namespaces: Namespaces::Shared,
    tests: SOCKET_TESTS,
    waits: &[Wait::Spin, Wait::Sleep],
    size: None,
    rings: false,
};

/// An endpoint that consists of one or two descriptors.
pub(super) struct FdEnd {
    rx: OwnedFd,
    tx: Option<OwnedFd>,
    syscalls: u64,
}

impl FdEnd {
    fn new(rx: OwnedFd, tx: OwnedFd, job: &Job) -> Result<Self> {
        for fd in [&rx, &tx] {
            rustix::io::ioctl_fionbio(fd, job.wait == Some(Wait::Spin)).os("setting O_NONBLOCK")?;
        }
        Ok(Self { rx, tx: Some(tx), syscalls: 0 })
    }

    fn socket(socket: OwnedFd, job: &Job) -> Result<Self> {
        let tx = socket.try_clone().os("duplicating a socket")?;
        Self::new(socket, tx, job)
    }
}

impl End for FdEnd {
    #[inline]
    fn send(&mut self, mut message: &[u8]) -> Result<()> {
        let tx = self.tx.as_ref().ok_or_else(|| Error::Spoiled("sent after the end".into()))?;
        while !message.is_empty() {
            self.syscalls += 1;
            match rustix::io::write(tx, message) {
                Ok(n) => message = &message[n..],
                Err(Errno::AGAIN) => std::hint::spin_loop(),
                Err(Errno::INTR) => {}
                Err(Errno::MSGSIZE) => {
                    let size = message.len();
                    return Err(Error::Unsupported(format!(
                        "a message of {size} bytes is longer than the socket buffer; raise net.core.wmem_max"
                    )));
                }
                Err(e) => return Ok(Err(e).os("write")?),
            }
        }
        Ok(())
    }

    #[inline]
    fn recv(&mut self, buffer: &mut [u8]) -> Result<usize> {
        loop {
            self.syscalls += 1;
            match rustix::io::read(&self.rx, &mut *buffer) {
                Ok(n) => return Ok(n),
                Err(Errno::AGAIN) => std::hint::spin_loop(),
                Err(Errno::INTR) => {}
                Err(e) => return Ok(Err(e).os("read")?),
            }
        }
    }

    fn finish(&mut self) -> Result<()> {
        let Some(tx) = self.tx.take() else { return Ok(()) };
        match rustix::net::shutdown(&tx, Shutdown::Write) {
            // A pipe ends when its descriptor is closed.
            Err(Errno::NOTSOCK) => Ok(()),
            other => Ok(other.os("shutdown")?),
        }
    }

    fn syscalls(&self) -> Option<u64> {
        Some(self.syscalls)
    }
}

/// TCP, over loopback or over a veth pair between two network namespaces.
pub(super) struct Tcp {
    pub veth: bool,
}

impl Tcp {
    fn end(stream: TcpStream, job: &Job) -> Result<FdEnd> {
        stream.set_nodelay(job.variant == "nodelay").os("setting TCP_NODELAY")?;
        FdEnd::socket(stream.into(), job)
    }
}

impl Wire for Tcp {
    type Host = TcpListener;
    type End = FdEnd;

    fn card(&self) -> Card {
        let (name, namespaces) = if self.veth { ("tcp-veth", Namespaces::Veth) } else { ("tcp", Namespaces::Anywhere) };
        Card { name, namespaces, variants: &["nagle", "nodelay"], ..SOCKET }
    }

    fn listen(&self, context: &Context) -> Result<(TcpListener, String)> {
        let listener = TcpListener::bind((context.host.as_str(), 0)).os("listening on TCP")?;
        let address = listener.local_addr().os("getsockname")?.to_string();
        Ok((listener, address))
    }

    fn accept(&self, host: &mut TcpListener, context: &Context) -> Result<FdEnd> {
        Self::end(host.accept().os("accept")?.0, &context.job)
    }

    fn connect(&self, address: &str, context: &Context) -> Result<FdEnd> {
        Self::end(TcpStream::connect(address).os("connecting over TCP")?, &context.job)
    }
}

/// A UNIX socket, SOCK_STREAM or SOCK_SEQPACKET, under an abstract name so that no file remains.
pub(super) struct Unix {
    pub messages: bool,
}

impl Unix {
    fn end(socket: OwnedFd, job: &Job) -> Result<FdEnd> {
        sockopt::set_socket_send_buffer_size_force(&socket, UNIX_BUFFER)
            .or_else(|_| sockopt::set_socket_send_buffer_size(&socket, UNIX_BUFFER))
            .os("setting SO_SNDBUF")?;
        FdEnd::socket(socket, job)
    }

    fn seqpacket(address: &str) -> Result<(OwnedFd, SocketAddrUnix)> {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .os("socket")?;
        Ok((socket, SocketAddrUnix::new_abstract_name(address.as_bytes()).os("naming a socket")?))
    }
}

impl Wire for Unix {
    type Host = OwnedFd;
    type End = FdEnd;

    fn card(&self) -> Card {
        let (name, mode) =
            if self.messages { ("unix-seqpacket", Mode::Message) } else { ("unix-stream", Mode::Stream) };
        Card { name, mode, ..SOCKET }
    }

    fn listen(&self, _: &Context) -> Result<(OwnedFd, String)> {
        let name = format!("tombolo-bench-{}-{:x}", std::process::id(), serial());
        let host = if self.messages {
            let (socket, address) = Self::seqpacket(&name)?;
            rustix::net::bind(&socket, &address).os("bind")?;
            rustix::net::listen(&socket, 128).os("listen")?;
            socket
        } else {
            let address = SocketAddr::from_abstract_name(&name).os("naming a socket")?;
            UnixListener::bind_addr(&address).os("bind")?.into()
        };
        Ok((host, name))
    }

    fn accept(&self, host: &mut OwnedFd, context: &Context) -> Result<FdEnd> {
        Self::end(rustix::net::accept_with(host, SocketFlags::CLOEXEC).os("accept")?, &context.job)
    }

    fn connect(&self, address: &str, context: &Context) -> Result<FdEnd> {
        let socket = if self.messages {
            let (socket, address) = Self::seqpacket(address)?;
            rustix::net::connect(&socket, &address).os("connect")?;
            socket
        } else {
            let address = SocketAddr::from_abstract_name(address).os("naming a socket")?;
            UnixStream::connect_addr(&address).os("connect")?.into()
        };
        Self::end(socket, &context.job)
    }
}

/// Two pipes of 1 MiB, one for each direction.
pub(super) struct Pipe;

impl Wire for Pipe {
    type Host = ();
    type End = FdEnd;

    fn card(&self) -> Card {
        // No set-up test: it would measure how descriptors are passed, not the pipe.
        const TESTS: &[Test] =
            &[Test::Throughput, Test::Rate, Test::Latency, Test::Load, Test::Switches, Test::Channels, Test::Cpu];
        Card { name: "pipe", tests: TESTS, ..SOCKET }
    }

    fn listen(&self, _: &Context) -> Result<((), String)> {
        Ok(((), String::new()))
    }

    fn accept(&self, (): &mut (), context: &Context) -> Result<FdEnd> {
        let pipe = || -> Result<_> {
            let (rx, tx) = pipe_with(PipeFlags::CLOEXEC).os("pipe")?;
            // A refusal (many pipes, no privilege) leaves the kernel's default, and is no failure.
            let _ = fcntl_setpipe_size(&tx, PIPE_BUFFER);
            Ok((rx, tx))
        };
        let ((rx, their_tx), (their_rx, tx)) = (pipe()?, pipe()?);
        context.link.pass(their_rx.as_fd())?;
        context.link.pass(their_tx.as_fd())?;
        FdEnd::new(rx, tx, &context.job)
    }

    fn connect(&self, _: &str, context: &Context) -> Result<FdEnd> {
        FdEnd::new(context.link.receive_descriptor()?, context.link.receive_descriptor()?, &context.job)
    }
}

/// Two eventfds, one for each direction: they measure the cost of waking a sleeping process.
pub(super) struct Eventfd;

impl Wire for Eventfd {
    type Host = ();
    type End = FdEnd;

    fn card(&self) -> Card {
        Card { name: "eventfd", mode: Mode::Message, tests: &[Test::Latency], size: Some(8), ..SOCKET }
    }

    fn listen(&self, _: &Context) -> Result<((), String)> {
        Ok(((), String::new()))
    }

    fn accept(&self, (): &mut (), context: &Context) -> Result<FdEnd> {
        let rx = eventfd(0, EventfdFlags::CLOEXEC).os("eventfd")?;
        let tx = eventfd(0, EventfdFlags::CLOEXEC).os("eventfd")?;
        context.link.pass(tx.as_fd())?;
        context.link.pass(rx.as_fd())?;
        FdEnd::new(rx, tx, &context.job)
    }

    fn connect(&self, _: &str, context: &Context) -> Result<FdEnd> {
        FdEnd::new(context.link.receive_descriptor()?, context.link.receive_descriptor()?, &context.job)
    }
}
