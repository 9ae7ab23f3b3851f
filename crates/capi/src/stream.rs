// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Streams: bytes both ways.
#![allow(unsafe_code)]

use libc::{c_int, iovec, ssize_t};
use tombolo::{ReadHalf, Stream as Bytestream, WriteHalf};

use crate::{
    border::{deadline, guard},
    channel::Channel,
    listener::{Kind, Listener},
    options::Options,
    pointers::{Bytes, Handle, In, Out, Parts, Room, Text},
    structs::{Peer, Statistics},
};

/// A stream of bytes both ways, as a connected TCP socket is. One thread may read while another writes.
#[derive(Debug)]
pub struct Stream(Channel<ReadHalf, WriteHalf>);

impl Stream {
    fn new(stream: Bytestream) -> Self {
        let watch = stream.watch();
        let (reader, writer) = stream.into_split();
        Self(Channel::new(reader, writer, watch))
    }
}

/// Connects to the stream listener at an address such as "local:NAME" or "local:/path/to/socket".
///
/// Blocks for the handshake, 5 s at most unless the options say otherwise; where nobody listens it fails at once with
/// -ENOENT, or waits as the options say. Other errors: -EINVAL (no address, no such options), -EAFNOSUPPORT (a scheme
/// this library does not know), -EACCES, -ECONNREFUSED (the listener does not want this channel: it carries messages,
/// or the ring is too large for it), -EPROTONOSUPPORT, -ETIMEDOUT, -ENOMEM.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_connect(address: Text, options: In<Options>, stream: Out<Handle<Stream>>) -> c_int {
    guard(|| {
        stream.check()?;
        stream.give(Stream::new(tombolo::connect_with(address.get()?, &options.get()?.knobs()?)?))
    })
}

/// Begins to listen for streams at an address. Errors as for connect, and -EADDRINUSE.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_listen(address: Text, options: In<Options>, listener: Out<Handle<Listener>>) -> c_int {
    guard(|| {
        listener.check()?;
        let made = tombolo::listen_with(address.get()?, &options.get()?.knobs()?)?;
        listener.give(Listener::new(Kind::Streams(made)))
    })
}

/// The next stream with a peer that connected, within a time. A peer that says nothing, too little or nonsense is
/// dropped and keeps nobody else waiting. Errors: -EAGAIN, -ETIMEDOUT, -EPROTOTYPE (a listener for messages).
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_accept(
    listener: Handle<Listener>,
    timeout_ns: i64,
    stream: Out<Handle<Stream>>,
) -> c_int {
    guard(|| {
        stream.check()?;
        stream.give(Stream::new(listener.get()?.accept_stream(timeout_ns)?))
    })
}

/// Reads what is there, at least one byte and at most len; returns how many, 0 at the end of file (or if len is 0). Whether
/// the peer closed in order or died, tombolo_stream_ending tells. Errors: -EAGAIN, -ETIMEDOUT, -EPROTO.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_read(
    stream: Handle<Stream>,
    mut buffer: Room,
    len: usize,
    timeout_ns: i64,
) -> ssize_t {
    guard(|| {
        let (stream, buffer) = (&stream.get()?.0, buffer.get(len)?);
        let mut reader = stream.reader.begin()?;
        if let Some(read) = reader.half.try_read(buffer)? {
            return Ok(read);
        }
        let deadline = deadline(timeout_ns)?;
        stream.flush_first();
        Ok(reader.half.read_until(buffer, deadline)?)
    })
}

/// As tombolo_stream_read, into count buffers in turn, 1024 at most.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_readv(
    stream: Handle<Stream>,
    mut parts: Parts,
    count: c_int,
    timeout_ns: i64,
) -> ssize_t {
    guard(|| {
        let (stream, mut parts) = (&stream.get()?.0, parts.room(count)?);
        let mut reader = stream.reader.begin()?;
        if let Some(read) = reader.half.try_read_vectored(&mut parts)? {
            return Ok(read);
        }
        let deadline = deadline(timeout_ns)?;
        stream.flush_first();
        Ok(reader.half.read_vectored_until(&mut parts, deadline)?)
    })
}

/// Reads until the buffer is full or the end of file comes, all within one time; returns how many bytes. On an error
/// those read before it are in the buffer, and how many is not told.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_read_all(
    stream: Handle<Stream>,
    mut buffer: Room,
    len: usize,
    timeout_ns: i64,
) -> ssize_t {
    guard(|| {
        let (stream, buffer) = (&stream.get()?.0, buffer.get(len)?);
        let mut reader = stream.reader.begin()?;
        let (mut done, mut until) = (0, None);
        while done < len {
            let rest = &mut buffer[done..];
            let read = match until {
                Some(until) => reader.half.read_until(rest, until)?,
                None => match reader.half.try_read(rest)? {
                    Some(read) => read,
                    None => {
                        until = Some(deadline(timeout_ns)?);
                        stream.flush_first();
                        continue;
                    }
                },
            };
            if read == 0 {
                break;
            }
            done += read;
        }
        Ok(done)
    })
}

/// Writes as much as there is room for, at least one byte; returns how many. Errors: -EAGAIN, -ETIMEDOUT, -EPIPE (the
/// peer reads no more, or is gone; no signal is sent), -EPROTO.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_write(stream: Handle<Stream>, bytes: Bytes, len: usize, timeout_ns: i64) -> ssize_t {
    guard(|| {
        let (stream, bytes) = (&stream.get()?.0, bytes.get(len)?);
        let mut writer = stream.writer.begin()?;
        if let Some(written) = writer.half.try_write(bytes)? {
            return Ok(written);
        }
        let deadline = deadline(timeout_ns)?;
        stream.release_first();
        Ok(writer.half.write_until(bytes, deadline)?)
    })
}

/// As tombolo_stream_write, from count buffers in turn, 1024 at most.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_writev(
    stream: Handle<Stream>,
    parts: Parts,
    count: c_int,
    timeout_ns: i64,
) -> ssize_t {
    guard(|| {
        let (stream, parts) = (&stream.get()?.0, parts.bytes(count)?);
        let mut writer = stream.writer.begin()?;
        if let Some(written) = writer.half.try_write_vectored(&parts)? {
            return Ok(written);
        }
        let deadline = deadline(timeout_ns)?;
        stream.release_first();
        Ok(writer.half.write_vectored_until(&parts, deadline)?)
    })
}

/// Writes all len bytes, within one time; returns 0. On an error some of them may have been written.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_write_all(stream: Handle<Stream>, bytes: Bytes, len: usize, timeout_ns: i64) -> c_int {
    guard(|| {
        let (stream, mut bytes) = (&stream.get()?.0, bytes.get(len)?);
        let mut writer = stream.writer.begin()?;
        while !bytes.is_empty() {
            let Some(written) = writer.half.try_write(bytes)? else {
                let deadline = deadline(timeout_ns)?;
                stream.release_first();
                return Ok(writer.half.write_all_until(bytes, deadline)?);
            };
            bytes = &bytes[written..];
        }
        Ok(())
    })
}

/// Room for len bytes in the ring itself, as two parts (the second is empty unless the ring wraps there), to be filled
/// and then handed to tombolo_stream_commit. Nothing is published before. What is reserved ends with the next call that
/// writes. Errors as for write, and -EMSGSIZE where the ring is smaller than len.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_reserve(
    stream: Handle<Stream>,
    len: usize,
    timeout_ns: i64,
    room: Out<iovec>,
) -> c_int {
    guard(|| {
        room.check()?;
        room.put(stream.get()?.0.reserve(len, timeout_ns)?).map(drop)
    })
}

/// Publishes the first len bytes of what was last reserved. -EINVAL where that is more than was reserved.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_commit(stream: Handle<Stream>, len: usize) -> c_int {
    guard(|| stream.get()?.0.commit(len))
}

/// What is there to read, where it lies, as two parts (the second is empty unless the ring wraps there); returns how
/// many bytes, 0 at the end of file. Hand back what you have seen with tombolo_stream_consume.
///
/// The parts are memory that the peer writes: a store to them is a SIGSEGV, and a hostile peer can change them while
/// you look. Look at each byte once, or copy, and check the copy. They end with the next call that reads.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_peek(stream: Handle<Stream>, timeout_ns: i64, parts: Out<iovec>) -> ssize_t {
    guard(|| {
        parts.check()?;
        parts.put(stream.get()?.0.peek(timeout_ns)?.unwrap_or([(std::ptr::null(), 0); 2]))
    })
}

/// Hands back the first len bytes of what was last peeked at, so that the writer can use their room; peek again for the
/// rest. -EINVAL where that is more than was peeked at.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_consume(stream: Handle<Stream>, len: usize) -> c_int {
    guard(|| {
        let mut reader = stream.get()?.0.reader.enter()?;
        reader.end_hold(len)?;
        Ok(reader.half.consume(len)?)
    })
}

/// Wakes a sleeping reader for what flush_bytes held back. Without flush_bytes there is nothing to do.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_flush(stream: Handle<Stream>) -> c_int {
    guard(|| stream.get()?.0.flush())
}

/// Waits until the peer has read everything that was written; it says so at the latest when it next looks for more.
/// Errors: -EAGAIN, -ETIMEDOUT, -EPIPE.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_drain(stream: Handle<Stream>, timeout_ns: i64) -> c_int {
    guard(|| stream.get()?.0.drain(timeout_ns))
}

/// Begins to move what this end writes to a ring of so many bytes (as ring_size in tombolo_options): the peer follows when
/// it next looks, nothing is lost, doubled or reordered. tombolo_stream_is_moving tells when it is done. What is reserved
/// ends. Errors: -EOPNOTSUPP (the last move is not done, or the peer cannot follow; the text says which), -EMSGSIZE (more
/// than the peer maps), -ENOMEM.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_resize(stream: Handle<Stream>, bytes: u64) -> c_int {
    guard(|| stream.get()?.0.resize(bytes))
}

/// 1 while a move to another ring is under way, else 0; it goes on with each write.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_is_moving(stream: Handle<Stream>) -> c_int {
    guard(|| stream.get()?.0.is_moving())
}

/// Sets flush_bytes and flush_ns of tombolo_options anew, after a flush.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_set_flush(stream: Handle<Stream>, flush_bytes: u64, flush_ns: u64) -> c_int {
    guard(|| stream.get()?.0.set_flush(flush_bytes, flush_ns))
}

/// Sets the longest spin of a half (TOMBOLO_READ or TOMBOLO_WRITE): 0 sleeps at once, TOMBOLO_FOREVER never.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_set_spin(stream: Handle<Stream>, half: c_int, spin_ns: i64) -> c_int {
    guard(|| stream.get()?.0.set_spin(half, spin_ns))
}

/// Closes a half: TOMBOLO_WRITE (the peer reads what is left and then finds the end of file), TOMBOLO_READ (the peer's
/// writes fail with -EPIPE from now on) or TOMBOLO_BOTH.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_shutdown(stream: Handle<Stream>, half: c_int) -> c_int {
    guard(|| stream.get()?.0.shutdown(half))
}

/// Gives up writing in the middle: the peer reads what is left and then finds TOMBOLO_ENDING_ABORTED.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_abort(stream: Handle<Stream>) -> c_int {
    guard(|| {
        stream.get()?.0.writer.begin()?.half.abort();
        Ok(())
    })
}

/// How the peer's writing ended: TOMBOLO_ENDING_NONE until the end of file was read.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_ending(stream: Handle<Stream>) -> c_int {
    guard(|| stream.get()?.0.ending())
}

/// What is known of the peer's life now, a TOMBOLO_LIFE value; from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_life(stream: Handle<Stream>) -> c_int {
    guard(|| Ok(stream.get()?.0.life()))
}

/// Who the peer is; from any thread. Set peer->size first.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_peer(stream: Handle<Stream>, peer: Out<Peer>) -> c_int {
    guard(|| peer.fill(&stream.get()?.0.peer()))
}

/// What one half counted: TOMBOLO_READ or TOMBOLO_WRITE. Set statistics->size first.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_statistics(stream: Handle<Stream>, half: c_int, statistics: Out<Statistics>) -> c_int {
    guard(|| statistics.fill(&stream.get()?.0.statistics(half)?))
}

/// A descriptor that polls readable (POLLIN) while the half (TOMBOLO_READ or TOMBOLO_WRITE) may have something to do:
/// see "Polling".
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_poll_fd(stream: Handle<Stream>, half: c_int) -> c_int {
    guard(|| stream.get()?.0.poll_fd(half))
}

/// Closes both halves in order and frees the handle: the peer reads what is left and then finds the end of file. No
/// other thread may be in a call with it. Null is no error. On backends whose memory goes with its owner it waits for a
/// peer that has not begun to read, 1 s at most.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_close(stream: Handle<Stream>) -> c_int {
    guard(|| {
        drop(stream.into_box());
        Ok(())
    })
}
