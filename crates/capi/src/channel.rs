// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Channels, whatever they carry: all but moving bytes (`stream`) and messages (`messages`).
#![allow(unsafe_code)]

use libc::{c_int, iovec};
use tombolo::{MessageMode, Messages, Stream, StreamMode};

use crate::{
    border::{Fault, Outcome, guard},
    halves::Halves,
    pointers::{Handle, Out},
    structs::{Peer, Statistics},
};

/// One end of a channel: bytes both ways, or messages both ways. One thread may read while another writes.
///
/// tombolo_stream_ and tombolo_messages_ functions move data; the wrong ones get -EPROTOTYPE. All else is the same for both.
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
/// unless the ring wraps there). Fill them, then call tombolo_channel_commit. Nothing is published before; what is reserved
/// ends with the next call that writes or sends. Errors as for write or send; -EMSGSIZE where the ring is smaller than len.
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

/// Publishes the first len bytes of what was last reserved, as bytes of the stream or as one message. -EINVAL where that is
/// more than was reserved.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_commit(channel: Handle<Channel>, len: usize) -> c_int {
    guard(|| halves!(channel, commit(len)))
}

/// Wakes a sleeping reader for what flush_bytes held back. Without flush_bytes there is nothing to do.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_flush(channel: Handle<Channel>) -> c_int {
    guard(|| halves!(channel, flush()))
}

/// Waits until the peer has read everything that was written or sent. The peer says so at the latest when it next looks for
/// more. Errors: -EAGAIN, -ETIMEDOUT, -EPIPE.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_drain(channel: Handle<Channel>, timeout_ns: i64) -> c_int {
    guard(|| halves!(channel, drain(timeout_ns)))
}

/// Begins to move what this endpoint writes to a ring of so many bytes (as ring_size in tombolo_options): the peer
/// follows when it next looks, nothing is lost, doubled or reordered. tombolo_channel_is_moving tells when it is done.
/// What is reserved ends. Errors: -EOPNOTSUPP (the last move is not done, or the peer cannot follow; the text says
/// which), -EMSGSIZE (more than the peer maps), -ENOMEM.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_resize(channel: Handle<Channel>, bytes: u64) -> c_int {
    guard(|| halves!(channel, resize(bytes)))
}

/// Returns 1 while a move to another ring is under way, else 0. The move goes on with each write or send.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_is_moving(channel: Handle<Channel>) -> c_int {
    guard(|| halves!(channel, is_moving()))
}

/// Sets flush_bytes and flush_ns of tombolo_options anew, after a flush.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_set_flush(channel: Handle<Channel>, flush_bytes: u64, flush_ns: u64) -> c_int {
    guard(|| halves!(channel, set_flush(flush_bytes, flush_ns)))
}

/// Sets the longest spin of a half (TOMBOLO_READ or TOMBOLO_WRITE): 0 sleeps at once, TOMBOLO_FOREVER never.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_set_spin(channel: Handle<Channel>, half: c_int, spin_ns: i64) -> c_int {
    guard(|| halves!(channel, set_spin(half, spin_ns)))
}

/// Closes a half: TOMBOLO_WRITE (the peer reads what is left and then finds the end), TOMBOLO_READ (the peer's writes and
/// sends fail with -EPIPE from now on) or TOMBOLO_BOTH.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_shutdown(channel: Handle<Channel>, half: c_int) -> c_int {
    guard(|| halves!(channel, shutdown(half)))
}

/// Gives up writing in the middle: the peer reads what is left and then finds TOMBOLO_ENDING_ABORTED.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_abort(channel: Handle<Channel>) -> c_int {
    guard(|| halves!(channel, abort()))
}

/// Returns how the peer's writing ended: TOMBOLO_ENDING_NONE until the end was read.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_ending(channel: Handle<Channel>) -> c_int {
    guard(|| halves!(channel, ending()))
}

/// Returns what is known of the peer's life now, a TOMBOLO_LIFE value; from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_life(channel: Handle<Channel>) -> c_int {
    guard(|| Ok(halves!(channel, life())))
}

/// Tells who the peer is; from any thread. Set peer->size first.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_peer(channel: Handle<Channel>, peer: Out<Peer>) -> c_int {
    guard(|| peer.fill(&halves!(channel, peer())))
}

/// Tells what one half counted: TOMBOLO_READ or TOMBOLO_WRITE. Set statistics->size first.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_statistics(
    channel: Handle<Channel>,
    half: c_int,
    statistics: Out<Statistics>,
) -> c_int {
    guard(|| statistics.fill(&halves!(channel, statistics(half))?))
}

/// Returns a descriptor that polls readable (POLLIN) while the half (TOMBOLO_READ or TOMBOLO_WRITE) may have something to do:
/// see "Polling".
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_poll_fd(channel: Handle<Channel>, half: c_int) -> c_int {
    guard(|| halves!(channel, poll_fd(half)))
}

/// Closes both halves in order and frees the handle: the peer reads what is left and then finds the end. No other thread may
/// be in a call with it. Null is no error. On backends whose memory goes with its owner it waits for a peer that has not
/// begun to read, 1 s at most.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_channel_close(channel: Handle<Channel>) -> c_int {
    guard(|| {
        drop(channel.into_box());
        Ok(())
    })
}
