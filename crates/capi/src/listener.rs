// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listeners for either kind of channel.
#![allow(unsafe_code)]

use std::{
    os::fd::{AsFd, AsRawFd},
    sync::{Mutex, TryLockError},
};

use libc::c_int;
use tombolo::{Channel as Kinds, Messages, Stream};

use crate::{
    border::{Fault, Outcome, deadline, guard},
    channel::Channel,
    pointers::{Handle, Out},
};

/// Accepts peers at an address. Made by tombolo_stream_listen or tombolo_messages_listen. Only one thread may use it at
/// a time.
#[derive(Debug)]
pub struct Listener(Mutex<Kind>);

/// Kind of channels that a listener makes.
#[derive(Debug)]
pub enum Kind {
    Streams(tombolo::Listener<Stream>),
    Messages(tombolo::Listener<Messages>),
}

impl Listener {
    pub fn new(kind: Kind) -> Self {
        Self(Mutex::new(kind))
    }

    fn with<T>(&self, call: impl FnOnce(&mut Kind) -> Outcome<T>) -> Outcome<T> {
        match self.0.try_lock() {
            Ok(mut kind) => call(&mut kind),
            Err(TryLockError::WouldBlock) => Err(Fault::new(libc::EBUSY, c"another thread is in a call on it")),
            Err(TryLockError::Poisoned(_)) => Err(Fault::new(libc::ENOTRECOVERABLE, c"a fault in Tombolo broke it")),
        }
    }
}

fn accept<C: Kinds + Into<Channel>>(listener: &mut tombolo::Listener<C>, timeout_ns: i64) -> Outcome<Channel> {
    Ok(match listener.try_accept()? {
        Some(channel) => channel,
        None => listener.accept_until(deadline(timeout_ns)?)?,
    }
    .into())
}

/// Accepts the next peer within the timeout, as a channel of the listener's kind. A peer that sends nothing, too little
/// or nonsense is dropped and keeps no other peer waiting. Errors: -EAGAIN, -ETIMEDOUT.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_listener_accept(
    listener: Handle<Listener>,
    timeout_ns: i64,
    channel: Out<Handle<Channel>>,
) -> c_int {
    guard(|| {
        channel.check()?;
        channel.give(listener.get()?.with(|kind| match kind {
            Kind::Streams(listener) => accept(listener, timeout_ns),
            Kind::Messages(listener) => accept(listener, timeout_ns),
        })?)
    })
}

/// Returns a descriptor that polls readable (POLLIN) when an accept may find a peer. It belongs to the listener: poll
/// it, never read or close it. After it polled readable, accept with a timeout of 0 until that returns -EAGAIN.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_listener_poll_fd(listener: Handle<Listener>) -> c_int {
    guard(|| {
        listener.get()?.with(|kind| {
            Ok(match kind {
                Kind::Streams(listener) => listener.as_fd().as_raw_fd(),
                Kind::Messages(listener) => listener.as_fd().as_raw_fd(),
            })
        })
    })
}

/// Stops listening and frees the handle; accepted channels stay open. A null pointer is not an error.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_listener_close(listener: Handle<Listener>) -> c_int {
    guard(|| {
        drop(listener.into_box());
        Ok(())
    })
}
