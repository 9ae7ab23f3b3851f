// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 0. Uses: nothing of ours.
//!
//! What every crate asks of Linux, once. There are descriptors that come over sockets ([`passing`]), sleeping on
//! descriptors ([`poll`]), eventfds ([`event`]), locks ([`lock`]) and random bytes ([`random`]). Then there is what `/proc` shows of a
//! process ([`process`]), what small files of the kernel's say ([`files`]), and a clock that costs nothing ([`clock`]).
//! Last are who is at the other end of a socket ([`credentials`]), the addresses of a network namespace ([`addresses`]), and
//! descriptors out of a program's way ([`reserved`]).
//!
//! Errors are [`std::io::Error`]: who calls says what the call was for, by [`failed_call`] for one.
#![forbid(unsafe_code)]

pub mod addresses;
pub mod clock;
pub mod credentials;
pub mod event;
pub mod failed_call;
pub mod files;
pub mod lock;
pub mod passing;
pub mod poll;
pub mod process;
pub mod random;
pub mod reserved;
