// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the suite with one of its two sides elsewhere: in another process, another domain, another machine.
//!
//! On the other side an *agent* ([`serve`]) operates a backend by requests over a byte stream (a TCP connection, say).
//! Here [`Remote`] is that backend's stand-in: a [`Rendezvous`](tombolo_domain::Rendezvous) whose every call is carried
//! out by the agent, so that the suite's tests run unchanged. Only memory needs help, because a store here is no call.
//! What the other side owns or maps is a copy here, and [`Remote::sync_memory`] brings both up to date
//! ([`Fixture::quiesce`](super::Fixture::quiesce)). Each test is worth running twice, with the sides swapped: what is a
//! copy in one run is the original in the other.
//!
//! Both endpoints of the stream are programs of one test; they trust each other and panic on malformed messages.

mod agent;
mod frames;
mod proxy;

pub use agent::serve;
pub use proxy::{Actor, Remote};
