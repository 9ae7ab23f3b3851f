// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 0. Uses: nothing of ours.
//!
//! Wraps what every crate needs of Linux, once. There are descriptors that come over sockets ([`passing`]), sleeping on
//! descriptors ([`poll`]), eventfds ([`event`]), locks ([`lock`]) and random bytes ([`random`]). There are readers of
//! what `/proc` shows of a process ([`process`]) and of small files of the kernel's ([`files`]), and a clock that costs
//! almost nothing ([`clock`]). Last are the process at the other end of a socket ([`credentials`]), the addresses of a
//! network namespace ([`addresses`]), and descriptors out of a program's way ([`reserved`]).
//!
//! Errors are [`std::io::Error`]. The caller adds what the call was for, for example by [`failed_call`].
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
