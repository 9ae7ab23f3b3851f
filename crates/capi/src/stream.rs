// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Streams of bytes in both directions.
#![allow(unsafe_code)]

use libc::{c_int, iovec, ssize_t};
use tombolo::Stream;

use crate::{
    border::{deadline, guard},
    channel::Channel,
    listener::{Kind, Listener},
    options::Options,
    pointers::{Bytes, Handle, In, Out, Parts, Room, Text},
};

/// Connects to the stream listener at an address such as "local:NAME" or "local:/path/to/socket".
///
/// Blocks for the handshake, at most 5 s unless the options set another time. If nobody listens, it fails at once with
/// -ENOENT, or waits as the options say. Other errors: -EINVAL (invalid address or options), -EAFNOSUPPORT (a scheme
/// that this library does not know), -EACCES, -ECONNREFUSED (the listener refuses this channel: it carries messages, or
/// the ring is too large for it), -EPROTONOSUPPORT, -ETIMEDOUT, -ENOMEM.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_connect(address: Text, options: In<Options>, channel: Out<Handle<Channel>>) -> c_int {
    guard(|| {
        channel.check()?;
        let stream: Stream = tombolo::connect_with(address.get()?, &options.get()?.knobs()?)?;
        channel.give(stream.into())
    })
}

/// Begins to listen for streams at an address. Errors: those of tombolo_stream_connect, and -EADDRINUSE.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_listen(address: Text, options: In<Options>, listener: Out<Handle<Listener>>) -> c_int {
    guard(|| {
        listener.check()?;
        let made = tombolo::listen_with(address.get()?, &options.get()?.knobs()?)?;
        listener.give(Listener::new(Kind::Streams(made)))
    })
}

/// Reads the available bytes, at least one and at most len. Returns the number of bytes read, or 0 at the end of file
/// (or if len is 0). tombolo_channel_ending tells whether the peer closed in order or died. Errors: -EAGAIN,
/// -ETIMEDOUT, -EPROTO.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_read(
    channel: Handle<Channel>,
    mut buffer: Room,
    len: usize,
    timeout_ns: i64,
) -> ssize_t {
    guard(|| {
        let (stream, buffer) = (channel.get()?.stream()?, buffer.get(len)?);
        let mut reader = stream.reader.begin()?;
        if let Some(read) = reader.half.try_read(buffer)? {
            return Ok(read);
        }
        let deadline = deadline(timeout_ns)?;
        Ok(stream.wait_to_read(&mut reader.half, deadline, |half, until| half.read_until(buffer, until))?)
    })
}

/// Reads like tombolo_stream_read, into count buffers in turn, 1024 at most.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_readv(
    channel: Handle<Channel>,
    mut parts: Parts,
    count: c_int,
    timeout_ns: i64,
) -> ssize_t {
    guard(|| {
        let (stream, mut parts) = (channel.get()?.stream()?, parts.room(count)?);
        let mut reader = stream.reader.begin()?;
        if let Some(read) = reader.half.try_read_vectored(&mut parts)? {
            return Ok(read);
        }
        let deadline = deadline(timeout_ns)?;
        Ok(stream
            .wait_to_read(&mut reader.half, deadline, |half, until| half.read_vectored_until(&mut parts, until))?)
    })
}

/// Reads until the buffer is full or the end of file comes, within one timeout for the whole call. Returns the number
/// of bytes read. On an error the bytes read before it are in the buffer, but their number is not reported.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_read_all(
    channel: Handle<Channel>,
    mut buffer: Room,
    len: usize,
    timeout_ns: i64,
) -> ssize_t {
    guard(|| {
        let (stream, buffer) = (channel.get()?.stream()?, buffer.get(len)?);
        let mut reader = stream.reader.begin()?;
        let (mut done, mut until) = (0, None);
        while done < len {
            let rest = &mut buffer[done..];
            let read = match until {
                Some(until) => {
                    stream.wait_to_read(&mut reader.half, until, |half, until| half.read_until(rest, until))?
                }
                None => match reader.half.try_read(rest)? {
                    Some(read) => read,
                    None => {
                        until = Some(deadline(timeout_ns)?);
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

/// Writes as much as there is room for, at least one byte. Returns the number of bytes written. Errors: -EAGAIN,
/// -ETIMEDOUT, -EPIPE (the peer no longer reads, or is gone; no signal is sent), -EPROTO.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_write(channel: Handle<Channel>, bytes: Bytes, len: usize, timeout_ns: i64) -> ssize_t {
    guard(|| {
        let (stream, bytes) = (channel.get()?.stream()?, bytes.get(len)?);
        let mut writer = stream.writer.begin()?;
        if let Some(written) = writer.half.try_write(bytes)? {
            return Ok(written);
        }
        let deadline = deadline(timeout_ns)?;
        stream.release_first();
        Ok(writer.half.write_until(bytes, deadline)?)
    })
}

/// Writes like tombolo_stream_write, from count buffers in turn, 1024 at most.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_writev(
    channel: Handle<Channel>,
    parts: Parts,
    count: c_int,
    timeout_ns: i64,
) -> ssize_t {
    guard(|| {
        let (stream, parts) = (channel.get()?.stream()?, parts.bytes(count)?);
        let mut writer = stream.writer.begin()?;
        if let Some(written) = writer.half.try_write_vectored(&parts)? {
            return Ok(written);
        }
        let deadline = deadline(timeout_ns)?;
        stream.release_first();
        Ok(writer.half.write_vectored_until(&parts, deadline)?)
    })
}

/// Writes all len bytes, within one timeout for the whole call. Returns 0. On an error some of them may have been
/// written.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_write_all(
    channel: Handle<Channel>,
    bytes: Bytes,
    len: usize,
    timeout_ns: i64,
) -> c_int {
    guard(|| {
        let (stream, mut bytes) = (channel.get()?.stream()?, bytes.get(len)?);
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

/// Shows the bytes that can be read, in the ring itself, as two parts (the second is empty unless the ring wraps
/// there). Returns the number of bytes, or 0 at the end of file. Release the bytes you have read with
/// tombolo_stream_consume.
///
/// The parts are memory that the peer writes. A store to them causes a SIGSEGV, and a hostile peer can change them
/// while you look. Look at each byte once, or copy them and check the copy. The parts are valid until the next call
/// that reads.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_peek(channel: Handle<Channel>, timeout_ns: i64, parts: Out<iovec>) -> ssize_t {
    guard(|| {
        parts.check()?;
        parts.put(channel.get()?.stream()?.peek(timeout_ns)?.unwrap_or([(std::ptr::null(), 0); 2]))
    })
}

/// Returns the room of the first len bytes of the last peek to the writer; peek again for the rest. Fails with -EINVAL
/// if len is more than the peek showed.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_stream_consume(channel: Handle<Channel>, len: usize) -> c_int {
    guard(|| {
        let mut reader = channel.get()?.stream()?.reader.enter()?;
        reader.end_hold(len)?;
        Ok(reader.half.consume(len)?)
    })
}
