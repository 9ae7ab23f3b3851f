// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Adapters for tokio (feature `tokio`), for a runtime with I/O enabled: streams as [`AsyncRead`] and [`AsyncWrite`],
//! messages and listeners with `async` calls.
//!
//! Dropping an unfinished call's future loses nothing and repeats nothing: bytes and messages move only in the very
//! poll that returns ready.
//!
//! # Example
//! ```
//! use tombolo::{Stream, tokio::{AsyncListener, AsyncStream}};
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//!
//! # let folder = tempfile::tempdir()?;
//! # let address = format!("local:{}/greetings", folder.path().display());
//! # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
//! let mut listener = AsyncListener::new(tombolo::listen(&address)?)?;
//! // Connecting waits for the listener's answer, so it has a thread of its own.
//! let client = tokio::task::spawn_blocking(move || tombolo::connect(&address));
//! let server: Stream = listener.accept().await?;
//! let mut server = AsyncStream::new(server)?;
//! let mut client = AsyncStream::new(client.await??)?;
//!
//! client.write_all(b"hello, neighbour").await?;
//! client.shutdown().await?;
//! let mut greeting = String::new();
//! server.read_to_string(&mut greeting).await?;
//! assert_eq!(greeting, "hello, neighbour");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::{
    future::poll_fn,
    io::{self, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    pin::Pin,
    task::{Context, Poll, ready},
};

use ::tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf, unix::AsyncFd};
use tombolo_domain::Error as DomainError;

use crate::{Channel, Listener, MessageReceiver, MessageSender, Messages, ReadHalf, Result, Stream, WriteHalf};

/// A pollable descriptor registered with the runtime.
#[derive(Debug)]
struct Watched(AsyncFd<OwnedFd>);

impl Watched {
    fn new(fd: BorrowedFd<'_>) -> Result<Self> {
        let fd = fd.try_clone_to_owned().map_err(|error| DomainError::os("dup", error))?;
        #[allow(deprecated, reason = "the safe way; what its successor asks for, an `OwnedFd` promises by its type")]
        let watched = AsyncFd::with_interest(fd, Interest::READABLE);
        Ok(Self(watched.map_err(|error| DomainError::os("epoll_ctl", error))?))
    }

    /// Calls `attempt` until it succeeds. An attempt that found nothing makes the descriptor unreadable, and it gives
    /// an edge once there is something. So a readiness cleared in between comes back.
    fn poll<T>(&self, cx: &mut Context<'_>, mut attempt: impl FnMut() -> Result<Option<T>>) -> Poll<Result<T>> {
        loop {
            let mut readiness =
                ready!(self.0.poll_read_ready(cx)).map_err(|error| DomainError::os("epoll_wait", error))?;
            if let Some(done) = attempt()? {
                return Poll::Ready(Ok(done));
            }
            readiness.clear_ready();
        }
    }
}

/// A [`Stream`] for tokio: [`AsyncRead`] and [`AsyncWrite`].
///
/// # Example
/// See the [module](self).
#[derive(Debug)]
pub struct AsyncStream {
    stream: Stream,
    readable: Watched,
    writable: Watched,
}

/// The reading half of an [`AsyncStream`], which implements [`AsyncRead`].
///
/// # Example
/// See [`AsyncStream::into_split`].
#[derive(Debug)]
pub struct AsyncReadHalf {
    half: ReadHalf,
    readable: Watched,
}

/// The writing half of an [`AsyncStream`], which implements [`AsyncWrite`].
///
/// # Example
/// See [`AsyncStream::into_split`].
#[derive(Debug)]
pub struct AsyncWriteHalf {
    half: WriteHalf,
    writable: Watched,
}

impl AsyncStream {
    /// Registers a stream with the runtime.
    ///
    /// # Panics
    /// If called outside a runtime, or in one without I/O.
    ///
    /// # Errors
    /// If the process has no descriptor to spare.
    pub fn new(mut stream: Stream) -> Result<Self> {
        let (read, write) = stream.split();
        let (readable, writable) = (Watched::new(read.poll_fd()?)?, Watched::new(write.poll_fd()?)?);
        Ok(Self { stream, readable, writable })
    }

    /// Borrows the stream itself, for its statistics and its peer.
    #[must_use]
    pub fn get_ref(&self) -> &Stream {
        &self.stream
    }

    /// Takes the stream back from the runtime.
    #[must_use]
    pub fn into_inner(self) -> Stream {
        self.stream
    }

    /// Splits the stream into its two halves, for two tasks.
    ///
    /// # Example
    /// ```
    /// use tombolo::tokio::AsyncStream;
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let address = format!("local:{}/echo", folder.path().display());
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
    /// # let mut listener = tombolo::listen(&address)?;
    /// # let client = tokio::task::spawn_blocking(move || tombolo::connect(&address).map(drop));
    /// # let stream = listener.accept()?;
    /// let (mut reader, mut writer) = AsyncStream::new(stream)?.into_split();
    /// let echo = tokio::spawn(async move { tokio::io::copy(&mut reader, &mut writer).await });
    /// # client.await??;
    /// # assert_eq!(echo.await??, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn into_split(self) -> (AsyncReadHalf, AsyncWriteHalf) {
        let Self { stream, readable, writable } = self;
        let (read, write) = stream.into_split();
        (AsyncReadHalf { half: read, readable }, AsyncWriteHalf { half: write, writable })
    }
}

impl AsyncReadHalf {
    /// Borrows the half itself, for example to ask how the peer's side ended.
    #[must_use]
    pub fn get_ref(&self) -> &ReadHalf {
        &self.half
    }
}

impl AsyncWriteHalf {
    /// Borrows the half itself, for example to move it to another ring or to set its flush policy.
    pub fn get_mut(&mut self) -> &mut WriteHalf {
        &mut self.half
    }
}

fn poll_read(
    half: &mut ReadHalf,
    readable: &Watched,
    cx: &mut Context<'_>,
    buffer: &mut ReadBuf<'_>,
) -> Poll<io::Result<()>> {
    let read = ready!(readable.poll(cx, || half.try_read(buffer.initialize_unfilled())))?;
    buffer.advance(read);
    Poll::Ready(Ok(()))
}

fn poll_write(half: &mut WriteHalf, writable: &Watched, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
    Poll::Ready(Ok(ready!(writable.poll(cx, || half.try_write(bytes)))?))
}

/// Reads like [`ReadHalf::try_read`]. Before it waits, it flushes what was written.
impl AsyncRead for AsyncStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Self { stream, readable, .. } = self.get_mut();
        let (read, write) = stream.split();
        let polled = poll_read(read, readable, cx, buffer);
        if polled.is_pending() {
            // If flushing fails, the peer is gone. Reading reports that, after everything that is still to be read.
            let _ = write.flush();
        }
        polled
    }
}

impl AsyncRead for AsyncReadHalf {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Self { half, readable } = self.get_mut();
        poll_read(half, readable, cx, buffer)
    }
}

/// Writes like [`WriteHalf::try_write`]. Before it waits, it returns the room of what was read to the peer.
///
/// Shutting down closes the writing side in order: the peer reads what was written and then finds the end.
impl AsyncWrite for AsyncStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let Self { stream, writable, .. } = self.get_mut();
        let (read, write) = stream.split();
        let polled = poll_write(write, writable, cx, bytes);
        if polled.is_pending() {
            read.release()?;
        }
        polled
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.get_mut().stream.flush())
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().stream.split().1.close();
        Poll::Ready(Ok(()))
    }
}

/// Shuts down like [`AsyncStream`].
impl AsyncWrite for AsyncWriteHalf {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let Self { half, writable } = self.get_mut();
        poll_write(half, writable, cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.get_mut().half.flush().map_err(Into::into))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().half.close();
        Poll::Ready(Ok(()))
    }
}

/// [`Messages`] for tokio.
///
/// # Example
/// ```
/// use tombolo::{Messages, Options, tokio::{AsyncListener, AsyncMessages}};
///
/// # let folder = tempfile::tempdir()?;
/// # let address = format!("local:{}/jobs", folder.path().display());
/// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
/// let listener = tombolo::listen_with::<Messages>(&address, &Options::new())?;
/// let mut listener = AsyncListener::new(listener)?;
/// # let client = tokio::task::spawn_blocking(move || -> tombolo::Result<()> {
/// #     tombolo::connect_with::<Messages>(&address, &Options::new())?.send(b"job 1")
/// # });
/// let mut jobs = AsyncMessages::new(listener.accept().await?)?;
/// let mut job = [0; 1024];
/// assert_eq!(jobs.recv(&mut job).await?, Some(5));
/// # client.await??;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct AsyncMessages {
    sender: AsyncMessageSender,
    receiver: AsyncMessageReceiver,
}

/// The sending half of [`AsyncMessages`].
///
/// # Example
/// See [`AsyncMessages`].
#[derive(Debug)]
pub struct AsyncMessageSender {
    half: MessageSender,
    writable: Watched,
}

/// The receiving half of [`AsyncMessages`].
///
/// # Example
/// See [`AsyncMessages`].
#[derive(Debug)]
pub struct AsyncMessageReceiver {
    half: MessageReceiver,
    readable: Watched,
}

impl AsyncMessages {
    /// Registers a channel with the runtime.
    ///
    /// # Panics
    /// If called outside a runtime, or in one without I/O.
    ///
    /// # Errors
    /// If the process has no descriptor to spare.
    pub fn new(messages: Messages) -> Result<Self> {
        let (sender, receiver) = messages.into_split();
        let (writable, readable) = (Watched::new(sender.poll_fd()?)?, Watched::new(receiver.poll_fd()?)?);
        let sender = AsyncMessageSender { half: sender, writable };
        Ok(Self { sender, receiver: AsyncMessageReceiver { half: receiver, readable } })
    }

    /// Splits the channel into its two halves, for two tasks.
    #[must_use]
    pub fn into_split(self) -> (AsyncMessageSender, AsyncMessageReceiver) {
        (self.sender, self.receiver)
    }

    /// Sends one message like [`AsyncMessageSender::send`]. Before it waits, it returns the room of received messages
    /// to the peer.
    ///
    /// # Errors
    /// Those of [`AsyncMessageSender::send`].
    pub async fn send(&mut self, message: &[u8]) -> Result<()> {
        let Self { sender, receiver } = self;
        poll_fn(|cx| {
            let polled = sender.poll_send(cx, message);
            if polled.is_pending() {
                receiver.half.release()?;
            }
            polled
        })
        .await
    }

    /// Receives the next message like [`AsyncMessageReceiver::recv`]. Before it waits, it flushes what was sent.
    ///
    /// # Errors
    /// Those of [`AsyncMessageReceiver::recv`].
    pub async fn recv(&mut self, buffer: &mut [u8]) -> Result<Option<usize>> {
        let Self { sender, receiver } = self;
        poll_fn(|cx| {
            let polled = receiver.poll_recv(cx, buffer);
            if polled.is_pending() {
                // If flushing fails, the peer is gone. Receiving reports that, after everything that is still to be
                // received.
                let _ = sender.half.flush();
            }
            polled
        })
        .await
    }
}

impl AsyncMessageSender {
    /// Sends one message as soon as there is room for all of it. If the future is dropped before it is done, nothing
    /// was sent.
    ///
    /// # Errors
    /// Those of [`MessageSender::send`].
    pub async fn send(&mut self, message: &[u8]) -> Result<()> {
        poll_fn(|cx| self.poll_send(cx, message)).await
    }

    fn poll_send(&mut self, cx: &mut Context<'_>, message: &[u8]) -> Poll<Result<()>> {
        let Self { half, writable } = self;
        writable.poll(cx, || half.try_send(message))
    }

    /// Borrows the half itself, to flush, close or move it.
    pub fn get_mut(&mut self) -> &mut MessageSender {
        &mut self.half
    }
}

impl AsyncMessageReceiver {
    /// Receives the next message into `buffer`. Returns its length, or `None` at the end.
    ///
    /// If the future is dropped before it is done, no message was taken.
    ///
    /// # Errors
    /// Those of [`MessageReceiver::recv`].
    pub async fn recv(&mut self, buffer: &mut [u8]) -> Result<Option<usize>> {
        poll_fn(|cx| self.poll_recv(cx, buffer)).await
    }

    fn poll_recv(&mut self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<Result<Option<usize>>> {
        let Self { half, readable } = self;
        let attempt = || match half.try_recv(buffer)? {
            Poll::Ready(received) => Ok(Some(received)),
            Poll::Pending => Ok(None),
        };
        readable.poll(cx, attempt)
    }

    /// Borrows the half itself, for example to ask how the peer's side ended or to close it.
    pub fn get_mut(&mut self) -> &mut MessageReceiver {
        &mut self.half
    }
}

/// A [`Listener`] for tokio.
///
/// # Example
/// See the [module](self).
#[derive(Debug)]
pub struct AsyncListener<C> {
    listener: Listener<C>,
    watched: Watched,
}

impl<C: Channel> AsyncListener<C> {
    /// Registers a listener with the runtime.
    ///
    /// # Panics
    /// If called outside a runtime, or in one without I/O.
    ///
    /// # Errors
    /// If the process has no descriptor to spare.
    pub fn new(listener: Listener<C>) -> Result<Self> {
        let watched = Watched::new(listener.as_fd())?;
        Ok(Self { listener, watched })
    }

    /// Accepts the next peer and returns the channel with it.
    ///
    /// If the future is dropped before it is done, that peer waits for the next call. Peers that send nothing are
    /// dropped when others connect.
    ///
    /// # Errors
    /// Those of [`Listener::accept`].
    pub async fn accept(&mut self) -> Result<C> {
        let Self { listener, watched } = self;
        poll_fn(|cx| watched.poll(cx, || listener.try_accept())).await
    }
}
