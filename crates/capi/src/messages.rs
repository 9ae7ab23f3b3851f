// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Messages: whole ones or none, kept apart, in order.
#![allow(unsafe_code)]

use std::task::Poll;

use libc::{c_int, iovec, ssize_t};
use tombolo::{MessageReceiver, MessageSender, Messages as Postbox};

use crate::{
    border::{Fault, deadline, guard},
    channel::Channel,
    listener::{Kind, Listener},
    options::Options,
    pointers::{Bytes, Handle, In, Out, Parts, Room, Text},
    structs::{Peer, Statistics},
};

/// A channel of messages both ways: whole ones or none, kept apart, in order. One thread may receive while another
/// sends.
#[derive(Debug)]
pub struct Messages(Channel<MessageReceiver, MessageSender>);

impl Messages {
    fn new(messages: Postbox) -> Self {
        let watch = messages.watch();
        let (sender, receiver) = messages.into_split();
        Self(Channel::new(receiver, sender, watch))
    }
}

/// No length: an empty message is one too.
const END: Fault = Fault::new(libc::ENODATA, c"the end: the peer sends no more");

/// Connects to the listener for messages at an address; see tombolo_stream_connect.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_connect(
    address: Text,
    options: In<Options>,
    messages: Out<Handle<Messages>>,
) -> c_int {
    guard(|| {
        messages.check()?;
        messages.give(Messages::new(tombolo::connect_with(address.get()?, &options.get()?.knobs()?)?))
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

/// The next channel of messages with a peer that connected; see tombolo_stream_accept.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_accept(
    listener: Handle<Listener>,
    timeout_ns: i64,
    messages: Out<Handle<Messages>>,
) -> c_int {
    guard(|| {
        messages.check()?;
        messages.give(Messages::new(listener.get()?.accept_messages(timeout_ns)?))
    })
}

/// Sends one message of len bytes, 0 to tombolo_messages_max; returns 0. All of it is sent or nothing. Errors: -EAGAIN,
/// -ETIMEDOUT, -EMSGSIZE (it can never fit), -EPIPE (the peer receives no more, or is gone), -EPROTO.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_send(
    messages: Handle<Messages>,
    bytes: Bytes,
    len: usize,
    timeout_ns: i64,
) -> c_int {
    guard(|| {
        let (messages, bytes) = (&messages.get()?.0, bytes.get(len)?);
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
    messages: Handle<Messages>,
    parts: Parts,
    count: c_int,
    timeout_ns: i64,
) -> c_int {
    guard(|| {
        let (messages, parts) = (&messages.get()?.0, parts.bytes(count)?);
        let mut sender = messages.writer.begin()?;
        if sender.half.try_send_vectored(&parts)?.is_some() {
            return Ok(());
        }
        let deadline = deadline(timeout_ns)?;
        messages.release_first();
        Ok(sender.half.send_vectored_until(&parts, deadline)?)
    })
}

/// Receives the next message; returns its length, 0 for an empty one. Errors: -ENODATA at the end (how it came,
/// tombolo_messages_ending tells), -EMSGSIZE where the message is longer than len, -EAGAIN, -ETIMEDOUT, -EPROTO.
///
/// No message is ever cut: one that is too long stays the next, and tombolo_messages_peek tells its length.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_recv(
    messages: Handle<Messages>,
    mut buffer: Room,
    len: usize,
    timeout_ns: i64,
) -> ssize_t {
    guard(|| {
        let (messages, buffer) = (&messages.get()?.0, buffer.get(len)?);
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

/// Room in the ring itself for a message of len bytes, as two parts (the second is empty unless the ring wraps there),
/// to be filled and then handed to tombolo_messages_commit. What is reserved ends with the next call that sends. Errors
/// as for send.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_reserve(
    messages: Handle<Messages>,
    len: usize,
    timeout_ns: i64,
    room: Out<iovec>,
) -> c_int {
    guard(|| {
        room.check()?;
        room.put(messages.get()?.0.reserve(len, timeout_ns)?).map(drop)
    })
}

/// Sends the first len bytes of what was last reserved as one message. -EINVAL where that is more than was reserved.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_commit(messages: Handle<Messages>, len: usize) -> c_int {
    guard(|| messages.get()?.0.commit(len))
}

/// The next message where it lies, as two parts (the second is empty unless the ring wraps there); returns its length.
/// Hand it back with tombolo_messages_consume. Errors as for recv, but no message is too long.
///
/// The parts are memory that the peer writes: see tombolo_stream_peek.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_peek(messages: Handle<Messages>, timeout_ns: i64, parts: Out<iovec>) -> ssize_t {
    guard(|| {
        parts.check()?;
        parts.put(messages.get()?.0.peek(timeout_ns)?.ok_or(END)?)
    })
}

/// Hands back the message that was last peeked at. -EINVAL where none was.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_consume(messages: Handle<Messages>) -> c_int {
    guard(|| {
        let mut receiver = messages.get()?.0.reader.enter()?;
        receiver.end_hold(0)?;
        Ok(receiver.half.consume()?)
    })
}

/// Largest message that this end can send, in bytes: its ring less eight.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_max(messages: Handle<Messages>) -> ssize_t {
    guard(|| {
        let max = messages.get()?.0.writer.enter()?.half.message_max();
        Ok(usize::try_from(max).unwrap_or(usize::MAX))
    })
}

/// Wakes a sleeping reader for what flush_bytes held back. Without flush_bytes there is nothing to do.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_flush(messages: Handle<Messages>) -> c_int {
    guard(|| messages.get()?.0.flush())
}

/// Waits until the peer has received everything that was sent; it says so at the latest when it next looks for more.
/// Errors: -EAGAIN, -ETIMEDOUT, -EPIPE.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_drain(messages: Handle<Messages>, timeout_ns: i64) -> c_int {
    guard(|| messages.get()?.0.drain(timeout_ns))
}

/// Begins to move what this end sends to a ring of so many bytes (as ring_size in tombolo_options): the peer follows when
/// it next looks, nothing is lost, doubled or reordered. tombolo_messages_is_moving tells when it is done. What is reserved
/// ends. Errors: -EOPNOTSUPP (the last move is not done, or the peer cannot follow; the text says which), -EMSGSIZE (more
/// than the peer maps), -ENOMEM.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_resize(messages: Handle<Messages>, bytes: u64) -> c_int {
    guard(|| messages.get()?.0.resize(bytes))
}

/// 1 while a move to another ring is under way, else 0; it goes on with each send.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_is_moving(messages: Handle<Messages>) -> c_int {
    guard(|| messages.get()?.0.is_moving())
}

/// Sets flush_bytes and flush_ns of tombolo_options anew, after a flush.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_set_flush(messages: Handle<Messages>, flush_bytes: u64, flush_ns: u64) -> c_int {
    guard(|| messages.get()?.0.set_flush(flush_bytes, flush_ns))
}

/// Sets the longest spin of a half (TOMBOLO_READ or TOMBOLO_WRITE): 0 sleeps at once, TOMBOLO_FOREVER never.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_set_spin(messages: Handle<Messages>, half: c_int, spin_ns: i64) -> c_int {
    guard(|| messages.get()?.0.set_spin(half, spin_ns))
}

/// Closes a half: TOMBOLO_WRITE (the peer receives what is left and then finds the end), TOMBOLO_READ (the peer's
/// sends fail with -EPIPE from now on) or TOMBOLO_BOTH.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_shutdown(messages: Handle<Messages>, half: c_int) -> c_int {
    guard(|| messages.get()?.0.shutdown(half))
}

/// How the peer's sending ended: TOMBOLO_ENDING_NONE until the end was found.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_ending(messages: Handle<Messages>) -> c_int {
    guard(|| messages.get()?.0.ending())
}

/// What is known of the peer's life now, a TOMBOLO_LIFE value; from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_life(messages: Handle<Messages>) -> c_int {
    guard(|| Ok(messages.get()?.0.life()))
}

/// Who the peer is; from any thread. Set peer->size first.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_peer(messages: Handle<Messages>, peer: Out<Peer>) -> c_int {
    guard(|| peer.fill(&messages.get()?.0.peer()))
}

/// What one half counted: TOMBOLO_READ or TOMBOLO_WRITE. Set statistics->size first.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_statistics(
    messages: Handle<Messages>,
    half: c_int,
    statistics: Out<Statistics>,
) -> c_int {
    guard(|| statistics.fill(&messages.get()?.0.statistics(half)?))
}

/// A descriptor that polls readable (POLLIN) while the half (TOMBOLO_READ or TOMBOLO_WRITE) may have something to do:
/// see "Polling".
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_poll_fd(messages: Handle<Messages>, half: c_int) -> c_int {
    guard(|| messages.get()?.0.poll_fd(half))
}

/// Closes both halves in order and frees the handle: the peer receives what is left and then finds the end. No
/// other thread may be in a call with it. Null is no error. On backends whose memory goes with its owner it waits for a
/// peer that has not begun to read, 1 s at most.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_messages_close(messages: Handle<Messages>) -> c_int {
    guard(|| {
        drop(messages.into_box());
        Ok(())
    })
}
