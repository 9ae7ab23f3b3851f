// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A channel as a stream of bytes.

use std::{
    io::{self, IoSlice, IoSliceMut, Read, Write},
    os::fd::{AsFd, BorrowedFd},
    task::Poll,
    time::Duration,
};

use tombolo_domain::{Deadline, Liveness, Peer};
use tombolo_mem::Mapped;
use tombolo_ring::{Error as RingError, Reader};

use crate::{
    Channel, Error, ReadHalf, Result, Statistics, Watch, WriteHalf,
    connect::{Parts, sealed::Sealed},
    receiving::Receiving,
    sending::{Sending, write_rest},
};

/// A stream of bytes in both directions with an endpoint in another domain, used like a `TcpStream`.
///
/// [`Read`] and [`Write`] block. The halves that [`split`](Self::split) returns have two variants of each call: a
/// `try_` variant that never blocks, and an `_until` variant with a deadline. Dropping a stream closes it in order: the
/// peer reads what was written and then finds the end of file.
///
/// # Example
/// ```
/// use std::io::{Read, Write};
///
/// # let folder = tempfile::tempdir()?;
/// # let address = format!("local:{}/echo", folder.path().display());
/// # let mut listener = tombolo::listen(&address)?;
/// # let echo = std::thread::spawn(move || {
/// #     let (mut reader, mut writer) = listener.accept()?.into_split();
/// #     std::io::copy(&mut reader, &mut writer)
/// # });
/// let mut stream = tombolo::connect(&address)?;
/// stream.write_all(b"hello")?;
/// let mut answer = [0; 5];
/// stream.read_exact(&mut answer)?;
/// assert_eq!(&answer, b"hello");
/// # drop(stream);
/// # echo.join().unwrap()?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Stream {
    read: ReadHalf,
    write: WriteHalf,
}

impl Sealed for Stream {
    const MESSAGES: bool = false;

    fn from_halves(Parts { sending, receiving }: Parts) -> Self {
        Self { read: ReadHalf::new(receiving), write: WriteHalf::new(sending) }
    }
}

impl Channel for Stream {}

impl Stream {
    /// Splits the stream into its two halves, for two threads.
    ///
    /// # Example
    /// ```
    /// # let folder = tempfile::tempdir()?;
    /// # let address = format!("local:{}/echo", folder.path().display());
    /// # let mut listener = tombolo::listen(&address)?;
    /// # let client = std::thread::spawn(move || tombolo::connect(&address));
    /// let (mut reader, mut writer) = listener.accept()?.into_split();
    /// # drop(client.join());
    /// let echo = std::thread::spawn(move || std::io::copy(&mut reader, &mut writer));
    /// # assert_eq!(echo.join().unwrap()?, 0);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    #[must_use]
    pub fn into_split(self) -> (ReadHalf, WriteHalf) {
        (self.read, self.write)
    }

    /// Borrows the two halves, for calls that [`Stream`] itself does not have.
    pub fn split(&mut self) -> (&mut ReadHalf, &mut WriteHalf) {
        (&mut self.read, &mut self.write)
    }

    /// Returns the counters of both directions, as this endpoint counts them.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        statistics(&self.write.0, &self.read.0)
    }

    /// Returns the peer's identity, as reported by the backend.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.read.0.ring.waiter.end().peer()
    }

    /// Returns the peer's liveness, which tells a paused peer from one that is gone. May cost a few system calls.
    #[must_use]
    pub fn liveness(&self) -> Liveness {
        self.read.0.ring.waiter.end().liveness()
    }

    /// Returns a [`Watch`], which reports on the peer while other threads use the halves.
    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch::new(self.read.0.ring.waiter.end())
    }
}

impl Stream {
    /// Reads without a deadline. While it waits, the ring that this endpoint writes into follows its load.
    #[inline]
    fn read_beside_load(
        &mut self,
        mut call: impl FnMut(&mut Reader<Mapped>) -> std::result::Result<Option<usize>, RingError>,
    ) -> Result<usize> {
        let (read, write) = (&mut self.read.0, &mut self.write.0);
        let mut again = None;
        loop {
            let before_wait = || {
                write.push();
                again.take().unwrap_or_else(|| write.moves.next_look(&write.ring))
            };
            match read.complete(&mut call, Deadline::NEVER, before_wait) {
                // The next write reports an error of the writing half.
                Err(Error::TimedOut) => again = Some(write.follow_load().unwrap_or_default()),
                done => return done.map(Option::unwrap_or_default),
            }
        }
    }
}

impl ReadHalf {
    /// Reads the available bytes into `buffer`, at least one. Returns the number of bytes read; 0 means the end of
    /// file.
    ///
    /// Reading into an empty `buffer` also returns 0.
    ///
    /// # Blocking
    /// Blocks until there is something to read, at most until `deadline`.
    ///
    /// # Errors
    /// [`Error::TimedOut`](crate::Error::TimedOut) at the deadline; [`Error::Corrupt`](crate::Error::Corrupt) where the
    /// peer violated the specification. The peer's death is not an error: reads return the bytes that the peer wrote,
    /// then the end of file, and [`ending`](Self::ending) tells that it died.
    ///
    /// # Example
    /// ```
    /// use std::time::Duration;
    /// use tombolo::{Deadline, Error};
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let address = format!("local:{}/slow", folder.path().display());
    /// # let mut listener = tombolo::listen(&address)?;
    /// # let client = std::thread::spawn(move || tombolo::connect(&address));
    /// # let _peer = listener.accept()?;
    /// # let mut stream = client.join().unwrap()?;
    /// let (reader, _) = stream.split();
    /// let soon = Deadline::after(Duration::from_millis(10));
    /// assert!(matches!(reader.read_until(&mut [0; 64], soon), Err(Error::TimedOut)));
    /// # Ok::<(), Error>(())
    /// ```
    #[inline]
    pub fn read_until(&mut self, buffer: &mut [u8], deadline: Deadline) -> Result<usize> {
        self.0.complete(|reader| reader.read(buffer), deadline, || None).map(Option::unwrap_or_default)
    }

    /// Reads the available bytes into `buffer`, at least one. Never blocks.
    ///
    /// Returns `None` while there is nothing to read, and `Some(0)` at the end of file.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt).
    ///
    /// # Example
    /// ```
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let address = format!("local:{}/now", folder.path().display());
    /// # let mut listener = tombolo::listen(&address)?;
    /// # let client = std::thread::spawn(move || tombolo::connect(&address));
    /// # let mut peer = listener.accept()?;
    /// # let mut stream = client.join().unwrap()?;
    /// let mut buffer = [0; 64];
    /// assert_eq!(stream.split().0.try_read(&mut buffer)?, None); // nothing yet
    /// # peer.split().1.close();
    /// // the peer closes
    /// assert_eq!(stream.split().0.try_read(&mut buffer)?, Some(0)); // the end of file
    /// # Ok::<(), tombolo::Error>(())
    /// ```
    #[inline]
    pub fn try_read(&mut self, buffer: &mut [u8]) -> Result<Option<usize>> {
        Ok(match self.0.attempt(|reader| reader.read(buffer))? {
            Poll::Ready(read) => Some(read.unwrap_or_default()),
            Poll::Pending => None,
        })
    }

    /// Reads like [`read_until`](Self::read_until) into several buffers, filling each before the next.
    ///
    /// # Blocking
    /// Like [`read_until`](Self::read_until).
    ///
    /// # Errors
    /// Those of [`read_until`](Self::read_until).
    pub fn read_vectored_until(&mut self, buffers: &mut [IoSliceMut<'_>], deadline: Deadline) -> Result<usize> {
        self.0.complete(|reader| reader.read_vectored(buffers), deadline, || None).map(Option::unwrap_or_default)
    }

    /// Reads like [`try_read`](Self::try_read) into several buffers, filling each before the next. Never blocks.
    ///
    /// # Errors
    /// Those of [`try_read`](Self::try_read).
    pub fn try_read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> Result<Option<usize>> {
        Ok(match self.0.attempt(|reader| reader.read_vectored(buffers))? {
            Poll::Ready(read) => Some(read.unwrap_or_default()),
            Poll::Pending => None,
        })
    }

    /// Returns the number of bytes that can be read now. Never blocks.
    ///
    /// If there are fewer than `need` bytes, [`poll_fd`](Self::poll_fd) becomes readable once there are `need` bytes or
    /// once no more bytes will come, and not before.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt).
    pub fn available(&mut self, need: usize) -> Result<u64> {
        self.0.look_for(need as u64, false)
    }

    /// Waits until `need` bytes can be read. Returns the number of bytes available, which is smaller only if no more
    /// will come.
    ///
    /// `need` must not exceed the size of the peer's ring, or the size that this ring [may grow
    /// to](crate::Options::ring_growth).
    ///
    /// # Blocking
    /// Blocks until the bytes are there or the peer has closed or died, at most until `deadline`.
    ///
    /// # Errors
    /// Those of [`read_until`](Self::read_until).
    pub fn wait_for(&mut self, need: usize, deadline: Deadline) -> Result<u64> {
        self.0.wait_for(need as u64, deadline)
    }

    /// Marks the first `len` bytes of the last peek as read and returns their room to the peer.
    ///
    /// # Panics
    /// If `len` is larger than what the last peek showed.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt); [`BackendError::Revoked`](tombolo_domain::Error::Revoked) where the
    /// memory was taken back meanwhile, so that the bytes seen were not the peer's.
    pub fn consume(&mut self, len: usize) -> Result<()> {
        self.0.consumed(len)
    }
}

impl WriteHalf {
    /// Writes as many of `bytes` as there is room for, at least one. Returns the number of bytes written.
    ///
    /// # Blocking
    /// Blocks until there is room, at most until `deadline`.
    ///
    /// # Errors
    /// [`Error::Closed`](crate::Error::Closed) and [`Error::PeerGone`](crate::Error::PeerGone) where the peer no longer
    /// reads; [`Error::TimedOut`](crate::Error::TimedOut); [`Error::Corrupt`](crate::Error::Corrupt).
    #[inline]
    pub fn write_until(&mut self, bytes: &[u8], deadline: Deadline) -> Result<usize> {
        if self.0.try_at_once(|writer| writer.write_at_once(bytes)) {
            Ok(bytes.len())
        } else {
            self.write_at_length(bytes, deadline)
        }
    }

    #[inline(never)]
    fn write_at_length(&mut self, bytes: &[u8], deadline: Deadline) -> Result<usize> {
        let written = self.0.complete(|writer| writer.write(bytes), || 1, deadline, || Ok(()))?;
        Ok(write_rest(&mut self.0, written, &[IoSlice::new(bytes)]))
    }

    /// Writes all of `bytes`. On an error some of them may have been written.
    ///
    /// # Blocking
    /// Blocks until the last byte is in the ring, at most until `deadline`. It does not wait until the peer has read
    /// the bytes; [`drained_until`](Self::drained_until) does.
    ///
    /// # Errors
    /// Those of [`write_until`](Self::write_until).
    ///
    /// # Example
    /// ```
    /// use tombolo::Deadline;
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let address = format!("local:{}/file", folder.path().display());
    /// # let mut listener = tombolo::listen(&address)?;
    /// # let client = std::thread::spawn(move || tombolo::connect(&address));
    /// # let mut peer = listener.accept()?;
    /// # let reading = std::thread::spawn(move || std::io::copy(&mut peer, &mut std::io::sink()));
    /// let (_, mut writer) = client.join().unwrap()?.into_split();
    /// writer.write_all_until(&[7; 100_000], Deadline::NEVER)?;
    /// writer.drained_until(Deadline::NEVER)?; // the peer has read them
    /// writer.close();
    /// # assert_eq!(reading.join().unwrap().unwrap(), 100_000);
    /// # Ok::<(), tombolo::Error>(())
    /// ```
    #[inline]
    pub fn write_all_until(&mut self, bytes: &[u8], deadline: Deadline) -> Result<()> {
        if bytes.is_empty() || self.0.try_at_once(|writer| writer.write_at_once(bytes)) {
            return Ok(());
        }
        self.write_all_at_length(bytes, deadline)
    }

    #[inline(never)]
    fn write_all_at_length(&mut self, mut bytes: &[u8], deadline: Deadline) -> Result<()> {
        while !bytes.is_empty() {
            // A caller that waits for room anyway does not need a larger ring.
            let written = self.0.complete(|writer| writer.write(bytes), || 1, deadline, || Ok(()))?;
            self.0.note_written(written, bytes.len());
            bytes = &bytes[written..];
        }
        Ok(())
    }

    /// Writes as many of `bytes` as there is room for. Never blocks.
    ///
    /// Returns the number of bytes written, or `None` where there is no room.
    ///
    /// # Errors
    /// Those of [`write_until`](Self::write_until), except the deadline's.
    ///
    /// # Example
    /// ```
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let address = format!("local:{}/small", folder.path().display());
    /// # let options = tombolo::Options::new().ring_size(4096);
    /// # let mut listener = tombolo::listen(&address)?;
    /// # let client = std::thread::spawn(move || tombolo::connect_with::<tombolo::Stream>(&address, &options));
    /// # let _peer = listener.accept()?;
    /// # let mut stream = client.join().unwrap()?;
    /// let (_, writer) = stream.split();
    /// assert_eq!(writer.try_write(&[0; 10_000])?, Some(4096)); // all that the ring takes
    /// assert_eq!(writer.try_write(&[0; 10_000])?, None); // full: wait, or poll `poll_fd`
    /// # Ok::<(), tombolo::Error>(())
    /// ```
    #[inline]
    pub fn try_write(&mut self, bytes: &[u8]) -> Result<Option<usize>> {
        if self.0.try_at_once(|writer| writer.write_at_once(bytes)) {
            Ok(Some(bytes.len()))
        } else {
            self.try_write_at_length(bytes)
        }
    }

    #[inline(never)]
    fn try_write_at_length(&mut self, bytes: &[u8]) -> Result<Option<usize>> {
        let written = self.0.attempt(|writer| writer.write(bytes), || 1)?;
        Ok(written.map(|written| write_rest(&mut self.0, written, &[IoSlice::new(bytes)])))
    }

    /// Writes like [`write_until`](Self::write_until) from several buffers, in order.
    ///
    /// # Blocking
    /// Like [`write_until`](Self::write_until).
    ///
    /// # Errors
    /// Those of [`write_until`](Self::write_until).
    pub fn write_vectored_until(&mut self, buffers: &[IoSlice<'_>], deadline: Deadline) -> Result<usize> {
        let written = self.0.complete(|writer| writer.write_vectored(buffers), || 1, deadline, || Ok(()))?;
        Ok(write_rest(&mut self.0, written, buffers))
    }

    /// Writes like [`try_write`](Self::try_write) from several buffers, in order. Never blocks.
    ///
    /// # Errors
    /// Those of [`try_write`](Self::try_write).
    pub fn try_write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> Result<Option<usize>> {
        let written = self.0.attempt(|writer| writer.write_vectored(buffers), || 1)?;
        Ok(written.map(|written| write_rest(&mut self.0, written, buffers)))
    }

    /// Returns the number of bytes for which there is room now. Never blocks.
    ///
    /// If that is less than `need`, [`poll_fd`](Self::poll_fd) becomes readable once there is room for `need` bytes, or
    /// once there will never be more room.
    ///
    /// # Errors
    /// Those of [`write_until`](Self::write_until), except the deadline's.
    pub fn room(&mut self, need: usize) -> Result<u64> {
        self.0.room_for(need as u64)
    }
}

impl WriteHalf {
    /// Lets the ring follow its load while the program writes nothing: an idle ring shrinks. Never blocks.
    ///
    /// Does nothing unless the ring [follows its load](crate::Options::ring_growth). Returns the time after which to
    /// call again if nothing is written or read meanwhile, or `None` if the next write is soon enough.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt); [`Error::PeerGone`](crate::Error::PeerGone).
    pub fn follow_load(&mut self) -> Result<Option<Duration>> {
        self.0.follow_load()
    }
}

/// Returns the counters of both pipes, taken from the two halves.
pub(crate) fn statistics(sending: &Sending, receiving: &Receiving) -> Statistics {
    let quarantined = sending.ring.waiter.end().link().link.quarantined();
    Statistics { sent: sending.moves.statistics(&sending.ring), received: receiving.ring.statistics(), quarantined }
}

impl Read for ReadHalf {
    #[inline]
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(self.read_until(buffer, Deadline::NEVER)?)
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        Ok(self.read_vectored_until(buffers, Deadline::NEVER)?)
    }
}

impl Write for WriteHalf {
    #[inline]
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(self.write_until(bytes, Deadline::NEVER)?)
    }

    #[inline]
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        Ok(self.write_all_until(bytes, Deadline::NEVER)?)
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(self.write_vectored_until(buffers, Deadline::NEVER)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(self.0.flush()?)
    }
}

/// Reads like [`ReadHalf::read_until`]. Before it waits, it flushes what was written.
impl Read for Stream {
    #[inline]
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(self.read_beside_load(|reader| reader.read(buffer))?)
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        Ok(self.read_beside_load(|reader| reader.read_vectored(buffers))?)
    }
}

/// Writes like [`WriteHalf::write_until`]. Before it waits, it returns the room of what was read to the peer.
impl Write for Stream {
    #[inline]
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (read, write) = (&mut self.read.0, &mut self.write.0);
        if write.try_at_once(|writer| writer.write_at_once(bytes)) {
            return Ok(bytes.len());
        }
        let written = write.complete(|writer| writer.write(bytes), || 1, Deadline::NEVER, || read.release())?;
        Ok(write_rest(write, written, &[IoSlice::new(bytes)]))
    }

    #[inline]
    fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        let (read, write) = (&mut self.read.0, &mut self.write.0);
        if write.try_at_once(|writer| writer.write_at_once(bytes)) {
            return Ok(());
        }
        while !bytes.is_empty() {
            let written = write.complete(|writer| writer.write(bytes), || 1, Deadline::NEVER, || read.release())?;
            write.note_written(written, bytes.len());
            bytes = &bytes[written..];
        }
        Ok(())
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        let (read, write) = (&mut self.read.0, &mut self.write.0);
        let written =
            write.complete(|writer| writer.write_vectored(buffers), || 1, Deadline::NEVER, || read.release())?;
        Ok(write_rest(write, written, buffers))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(self.write.flush()?)
    }
}

/// Returns the reading half's descriptor, as [`Rx::poll_fd`](crate::Rx::poll_fd) does.
///
/// # Panics
/// If the process has no descriptor to spare at the first call; `poll_fd` returns an error instead.
impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.read.as_fd()
    }
}
