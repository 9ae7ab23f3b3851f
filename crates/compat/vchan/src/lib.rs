// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 4. Uses: os, backends, channel, domain, testing, tombolo.
//!
//! libvchan on Tombolo. Programs that were written for Xen's libxenvchan or for Qubes' vchan are compiled against the
//! headers in `include/` and linked with this library instead, and then run on every backend. `docs/guide/vchan.md` says
//! how; `spec/8-vchan.md` says what the two ends of a vchan tell each other.
//!
//! `place` turns the number of a domain and a path into an address. `vchan` is one end. `acceptor` is the thread
//! that lets clients in while the program does something else. `domains` asks after peers that nobody
//! else would miss; `side` is what carries the bytes, `original` by the
//! layout of peers that run the original. The exported functions
//! are in `xen` and `qubes`: a few lines each, inside `border`'s guard.
#![deny(unsafe_code)]

mod acceptor;
mod backends;
mod biased_mutex;
mod border;
mod client;
mod domains;
mod hello;
mod original;
mod place;
mod pointers;
mod poll_descriptor;
mod qubes;
mod server_listener;
mod side;
mod threads;
mod vchan;
mod xen;
