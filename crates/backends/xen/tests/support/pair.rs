// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two sides of the conformance suite. The suite has one text for a service at both sides: each side puts its own
//! address before it.

use std::{
    any::Any,
    fmt::Debug,
    sync::atomic::{AtomicU32, Ordering},
};

use tombolo_domain::{Deadline, Endpoint, Listener, Rendezvous, Result};
use tombolo_testing::conformance::Fixture;

/// A domain, and the texts that it puts before a service to listen there and to connect.
#[derive(Debug)]
pub struct Side<D> {
    pub domain: D,
    pub here: &'static str,
    pub there: &'static str,
}

impl<D: Rendezvous + Debug> Rendezvous for Side<D> {
    fn scheme(&self) -> &'static str {
        self.domain.scheme()
    }

    fn listen(&self, service: &str) -> Result<Box<dyn Listener>> {
        self.domain.listen(&format!("{}{service}", self.here))
    }

    fn connect(&self, service: &str, deadline: Deadline) -> Result<Box<dyn Endpoint>> {
        self.domain.connect(&format!("{}{service}", self.there), deadline)
    }
}

/// The two sides.
pub struct Pair<D> {
    listening: Side<D>,
    connecting: Side<D>,
    made: AtomicU32,
    _keeps: Box<dyn Any + Send + Sync>,
}

impl<D> Pair<D> {
    /// Makes a pair that keeps a value for as long as it exists.
    pub fn of(listening: Side<D>, connecting: Side<D>, keeps: impl Any + Send + Sync) -> Self {
        Self { listening, connecting, made: 0.into(), _keeps: Box::new(keeps) }
    }
}

impl<D: Rendezvous + Debug + Send + Sync> Fixture for Pair<D> {
    fn listening(&self) -> &dyn Rendezvous {
        &self.listening
    }

    fn connecting(&self) -> &dyn Rendezvous {
        &self.connecting
    }

    fn service(&self) -> String {
        format!("service{}", self.made.fetch_add(1, Ordering::Relaxed))
    }
}
