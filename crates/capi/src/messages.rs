// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Messages: each arrives whole or not at all, separate from the others and in order.
#![allow(unsafe_code)]

use std::task::Poll;

use libc::{c_int, iovec, ssize_t};
use tombolo::Messages;

use crate::{
    border::{Fault, deadline, guard},
    channel::Channel,
    listener::{Kind, Listener},
    options::Options,
    pointers::{Bytes, Handle, In, Out, Parts, Room, Text},
};

/// The end of the messages. It is an error and not a length, because an empty message has length 0.
const END: Fault = Fault::new(libc::ENODATA, c"the end: the peer sends no more");

/// Connects to the listener for messages at an address; see tombolo_stream_connect.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_connect(
    address: Text,
    options: In<Options>,
    channel: Out<Handle<Channel>>,
) -> c_int {
    guard(|| {
        channel.check()?;
        let messages: Messages = tombolo::connect_with(address.get()?, &options.get()?.knobs()?)?;
        channel.give(messages.into())
    })
}

/// Begins to listen for channels of messages at an address; see tombolo_stream_listen.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_listen(
    address: Text,
    options: In<Options>,
    listener: Out<Handle<Listener>>,
) -> c_int {
    guard(|| {
        listener.check()?;
        let made = tombolo::listen_with(address.get()?, &options.get()?.knobs()?)?;
        listener.give(Listener::new(Kind::Messages(made)))
    })
}

/// Sends one message of len bytes, 0 to tombolo_messages_max. All of it is sent or nothing. Returns 0. Errors: -EAGAIN,
/// -ETIMEDOUT, -EMSGSIZE (it can never fit), -EPIPE (the peer no longer receives, or is gone), -EPROTO.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_send(channel: Handle<Channel>, bytes: Bytes, len: usize, timeout_ns: i64) -> c_int {
    guard(|| {
        let (messages, bytes) = (channel.get()?.messages()?, bytes.get(len)?);
        let mut sender = messages.writer.begin()?;
        if sender.half.try_send(bytes)?.is_some() {
            return Ok(());
        }
        let deadline = deadline(timeout_ns)?;
        messages.release_first();
        Ok(sender.half.send_until(bytes, deadline)?)
    })
}

/// Sends count parts, 1024 at most, as one message; see tombolo_messages_send.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_sendv(
    channel: Handle<Channel>,
    parts: Parts,
    count: c_int,
    timeout_ns: i64,
) -> c_int {
    guard(|| {
        let (messages, parts) = (channel.get()?.messages()?, parts.bytes(count)?);
        let mut sender = messages.writer.begin()?;
        if sender.half.try_send_vectored(&parts)?.is_some() {
            return Ok(());
        }
        let deadline = deadline(timeout_ns)?;
        messages.release_first();
        Ok(sender.half.send_vectored_until(&parts, deadline)?)
    })
}

/// Receives the next message. Returns its length, which is 0 for an empty message. Errors: -ENODATA at the end
/// (tombolo_channel_ending tells how it came), -EMSGSIZE if the message is longer than len, -EAGAIN, -ETIMEDOUT,
/// -EPROTO.
///
/// No message is ever cut. One that is too long stays the next one, and tombolo_messages_peek returns its length.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_recv(
    channel: Handle<Channel>,
    mut buffer: Room,
    len: usize,
    timeout_ns: i64,
) -> ssize_t {
    guard(|| {
        let (messages, buffer) = (channel.get()?.messages()?, buffer.get(len)?);
        let mut receiver = messages.reader.begin()?;
        let received = match receiver.half.try_recv(buffer)? {
            Poll::Ready(received) => received,
            Poll::Pending => {
                let deadline = deadline(timeout_ns)?;
                messages.flush_first();
                receiver.half.recv_until(buffer, deadline)?
            }
        };
        received.ok_or(END)
    })
}

/// Shows the next message in the ring itself, as two parts (the second is empty unless the ring wraps there). Returns
/// its length. Release it with tombolo_messages_consume. Errors: those of tombolo_messages_recv, but no
/// message is too long.
///
/// The parts are memory that the peer writes: see tombolo_stream_peek.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_peek(channel: Handle<Channel>, timeout_ns: i64, parts: Out<iovec>) -> ssize_t {
    guard(|| {
        parts.check()?;
        parts.put(channel.get()?.messages()?.peek(timeout_ns)?.ok_or(END)?)
    })
}

/// Returns the room of the message of the last peek to the peer. Fails with -EINVAL if none was peeked at.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_consume(channel: Handle<Channel>) -> c_int {
    guard(|| {
        let mut receiver = channel.get()?.messages()?.reader.enter()?;
        receiver.end_hold(0)?;
        Ok(receiver.half.consume()?)
    })
}

/// Returns the length in bytes of the largest message that this endpoint can send: the size of its ring less eight.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_max(channel: Handle<Channel>) -> ssize_t {
    guard(|| {
        let max = channel.get()?.messages()?.writer.enter()?.half.message_max();
        Ok(usize::try_from(max).unwrap_or(usize::MAX))
    })
}
