// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Channels of either kind: everything except moving bytes (`stream`) and messages (`messages`).
#![allow(unsafe_code)]

use libc::{c_int, iovec};
use tombolo::{MessageMode, Messages, Stream, StreamMode};

use crate::{
    border::{Fault, Outcome, guard},
    halves::Halves,
    pointers::{Handle, Out},
    structs::{Peer, Statistics},
};

/// One endpoint of a channel that carries bytes in both directions, or messages in both directions. One thread may read
/// while another writes.
///
/// tombolo_stream_ and tombolo_messages_ functions move data; those of the wrong kind fail with -EPROTOTYPE. All other
/// functions work for both kinds.
#[derive(Debug)]
pub struct Channel(Carries);

#[derive(Debug)]
enum Carries {
    Bytes(Halves<StreamMode>),
    Messages(Halves<MessageMode>),
}

impl From<Stream> for Channel {
    fn from(stream: Stream) -> Self {
        let watch = stream.watch();
        let (reader, writer) = stream.into_split();
        Self(Carries::Bytes(Halves::new(reader, writer, watch)))
    }
}

impl From<Messages> for Channel {
    fn from(messages: Messages) -> Self {
        let watch = messages.watch();
        let (sender, receiver) = messages.into_split();
        Self(Carries::Messages(Halves::new(receiver, sender, watch)))
    }
}

impl Channel {
    #[inline]
    pub fn stream(&self) -> Outcome<&Halves<StreamMode>> {
        match &self.0 {
            Carries::Bytes(halves) => Ok(halves),
            Carries::Messages(_) => Err(Fault::new(libc::EPROTOTYPE, c"this channel carries messages, not a stream")),
        }
    }

    #[inline]
    pub fn messages(&self) -> Outcome<&Halves<MessageMode>> {
        match &self.0 {
            Carries::Messages(halves) => Ok(halves),
            Carries::Bytes(_) => Err(Fault::new(libc::EPROTOTYPE, c"this channel carries a stream, not messages")),
        }
    }
}

/// Calls a method of the halves of a handle, whatever they carry.
macro_rules! halves {
    ($channel:expr, $method:ident($($argument:expr),*)) => {
        match &$channel.get()?.0 {
            Carries::Bytes(halves) => halves.$method($($argument),*),
            Carries::Messages(halves) => halves.$method($($argument),*),
        }
    };
}

/// Reserves room for len bytes, or for one message of len bytes, in the ring itself, as two parts (the second is empty
/// unless the ring wraps there). Fill them, then call tombolo_channel_commit; nothing is published before. The
/// reservation ends with the next call that writes or sends. Errors: those of write or send, and -EMSGSIZE if the ring
/// is smaller than len.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_reserve(
    channel: Handle<Channel>,
    len: usize,
    timeout_ns: i64,
    room: Out<iovec>,
) -> c_int {
    guard(|| {
        room.check()?;
        room.put(halves!(channel, reserve(len, timeout_ns))?).map(drop)
    })
}

/// Publishes the first len bytes of the last reservation, as bytes of the stream or as one message. Fails with -EINVAL
/// if that is more than was reserved.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_commit(channel: Handle<Channel>, len: usize) -> c_int {
    guard(|| halves!(channel, commit(len)))
}

/// Notifies a sleeping reader if flush_bytes held back the notification. Does nothing without flush_bytes.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_flush(channel: Handle<Channel>) -> c_int {
    guard(|| halves!(channel, flush()))
}

/// Waits until the peer has read everything that was written or sent. The peer reports this at the latest when it next
/// looks for more. Errors: -EAGAIN, -ETIMEDOUT, -EPIPE.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_drain(channel: Handle<Channel>, timeout_ns: i64) -> c_int {
    guard(|| halves!(channel, drain(timeout_ns)))
}

/// Begins to move the direction that this endpoint writes to a ring of the given size in bytes (as ring_size in
/// tombolo_options). The peer follows when it next looks; nothing is lost, duplicated or reordered.
/// tombolo_channel_is_moving returns 0 once the move is done. A reservation ends. Errors: -EOPNOTSUPP (the previous
/// move is not done, or the peer cannot follow; the text says which), -EMSGSIZE (more than the peer maps), -ENOMEM.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_resize(channel: Handle<Channel>, bytes: u64) -> c_int {
    guard(|| halves!(channel, resize(bytes)))
}

/// Returns 1 while a move to another ring is under way, else 0. Each write or send continues the move.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_is_moving(channel: Handle<Channel>) -> c_int {
    guard(|| halves!(channel, is_moving()))
}

/// Flushes, then sets flush_bytes and flush_ns of tombolo_options anew.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_set_flush(channel: Handle<Channel>, flush_bytes: u64, flush_ns: u64) -> c_int {
    guard(|| halves!(channel, set_flush(flush_bytes, flush_ns)))
}

/// Sets the longest spin of a half (TOMBOLO_READ or TOMBOLO_WRITE). With 0 the half sleeps at once, with
/// TOMBOLO_FOREVER it never sleeps.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_set_spin(channel: Handle<Channel>, half: c_int, spin_ns: i64) -> c_int {
    guard(|| halves!(channel, set_spin(half, spin_ns)))
}

/// Closes a half: TOMBOLO_WRITE (the peer reads the remaining data and then finds the end), TOMBOLO_READ (the peer's
/// writes and sends fail with -EPIPE from now on) or TOMBOLO_BOTH.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_shutdown(channel: Handle<Channel>, half: c_int) -> c_int {
    guard(|| halves!(channel, shutdown(half)))
}

/// Aborts the writing half: the peer reads the remaining data and then finds TOMBOLO_ENDING_ABORTED.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_abort(channel: Handle<Channel>) -> c_int {
    guard(|| halves!(channel, abort()))
}

/// Returns how the peer's writing ended; TOMBOLO_ENDING_NONE until the end was read.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_ending(channel: Handle<Channel>) -> c_int {
    guard(|| halves!(channel, ending()))
}

/// Returns the liveness of the peer now, a TOMBOLO_LIFE value. May be called from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_life(channel: Handle<Channel>) -> c_int {
    guard(|| Ok(halves!(channel, life())))
}

/// Fills in the identity of the peer. May be called from any thread. Set peer->size first.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_peer(channel: Handle<Channel>, peer: Out<Peer>) -> c_int {
    guard(|| peer.fill(&halves!(channel, peer())))
}

/// Fills in the counters of one half: TOMBOLO_READ or TOMBOLO_WRITE. Set statistics->size first.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_statistics(
    channel: Handle<Channel>,
    half: c_int,
    statistics: Out<Statistics>,
) -> c_int {
    guard(|| statistics.fill(&halves!(channel, statistics(half))?))
}

/// Returns a descriptor that polls readable (POLLIN) while the half (TOMBOLO_READ or TOMBOLO_WRITE) may have something
/// to do: see "Polling".
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_poll_fd(channel: Handle<Channel>, half: c_int) -> c_int {
    guard(|| halves!(channel, poll_fd(half)))
}

/// Closes both halves in order and frees the handle: the peer reads the remaining data and then finds the end. No other
/// thread may be in a call with the handle. A null pointer is not an error. On backends whose memory goes with its
/// owner, the call waits at most 1 s for a peer that has not begun to read.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_close(channel: Handle<Channel>) -> c_int {
    guard(|| {
        drop(channel.into_box());
        Ok(())
    })
}
