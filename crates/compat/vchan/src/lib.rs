// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 4. Uses: os, backends, channel, testing, tombolo.
//!
//! libvchan on Tombolo. Programs written for Xen's libxenvchan or for Qubes' vchan are compiled against the headers in
//! `include/` and linked with this library instead, and then run on every backend. `docs/guide/vchan.md` describes how;
//! `spec/8-vchan.md` describes what the two endpoints of a vchan exchange.
//!
//! `place` turns the number of a domain and a path into an address. `vchan` is one endpoint. `acceptor` is the thread
//! that admits clients while the program does something else. `domains` watches peers whose end nothing else would
//! report. `side` carries the bytes, and `original` does so by the layout of peers that run the original. The exported
//! functions are in `xen` and `qubes`: a few lines each, inside `border`'s guard.
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
