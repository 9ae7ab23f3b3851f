// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 4. Uses: backends, os, sockets.
//!
//! The library that `tombolo run` preloads. It stands between an unmodified program and libc's socket calls, and gives
//! TCP connections to peer processes shared memory. The descriptor that the program holds stays the real socket.
//!
//! There is one short function for each call that the library stands in for. What these functions have in common is in
//! `flow`, `wait` and `epoll`, and everything that is not interception is in `tombolo-sockets`. The library has no
//! thread of its own. A call on a descriptor that is not watched costs one load more than before.
//!
//! From the bottom up: `kernel` makes this library's own system calls, and `epoll` and `state` hold the tables.
//! `handback` gives connections back to TCP, and `closing` lets them go. Above are `wait` and `flow`, and on top the
//! files of the exported calls. Of these `life` is below `closing`, which asks it what a child of `vfork` closes.
//!
//! `unsafe` is needed because the functions are libc's, with a program's pointers.
#![deny(unsafe_code)]

mod aliases;
mod ancillary;
mod asynchronous;
mod batch;
mod closing;
mod confine;
mod control;
mod data;
#[cfg(target_arch = "x86_64")]
mod direct;
mod epoll;
mod errno;
mod flow;
mod handback;
mod inside;
mod kernel;
mod life;
mod mapped;
mod plain;
mod poll;
mod real;
mod renewal;
mod splice;
mod state;
mod streams;
#[cfg(target_arch = "x86_64")]
mod variadic;
mod wait;
