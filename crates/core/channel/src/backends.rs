// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The backends of a program, and the two operations on an address: connect and listen.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    thread,
    time::Duration,
};

use tombolo_domain::{Deadline, Error as DomainError, Rendezvous};
use tombolo_layout::handshake::Refusal;

use crate::{
    Address, Error, Listener, Options, Result,
    connect::{Channel, introduce, requires_ahead},
};

/// First and longest pause between two attempts to connect where nobody listens yet.
const PAUSE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));

/// The backends of a program, by the scheme of their addresses.
#[derive(Clone, Default, Debug)]
pub struct Backends {
    known: BTreeMap<&'static str, Arc<dyn Rendezvous>>,
    /// Schemes of backends that exist and were left out of this program.
    absent: BTreeSet<&'static str>,
}

impl Backends {
    /// Makes a set without any backend.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a backend.
    #[must_use]
    pub fn with(mut self, backend: impl Rendezvous + 'static) -> Self {
        self.known.insert(backend.scheme(), Arc::new(backend));
        self
    }

    /// Names a backend that this program was built without. Its addresses fail with [`Error::NotBuilt`].
    #[must_use]
    pub fn without(mut self, scheme: &'static str) -> Self {
        self.absent.insert(scheme);
        self
    }

    /// Parses an address and checks that its backend is known.
    ///
    /// # Errors
    /// [`Error::Address`] where `text` is not an address, [`Error::UnknownScheme`], [`Error::NotBuilt`].
    pub fn address(&self, text: &str) -> Result<Address> {
        let address = text.parse()?;
        self.of(&address)?;
        Ok(address)
    }

    fn of(&self, address: &Address) -> Result<&Arc<dyn Rendezvous>> {
        self.known.get(address.scheme()).ok_or_else(|| {
            let scheme = address.scheme().into();
            let known = self.known.keys().copied().collect::<Vec<_>>().join(", ");
            if self.absent.contains(address.scheme()) {
                Error::NotBuilt { scheme, known }
            } else {
                Error::UnknownScheme { scheme, known }
            }
        })
    }

    /// Connects to the listener at `address` and agrees with it on a channel.
    ///
    /// # Blocking
    /// Blocks until the listener has answered, at most for the [handshake's timeout](Options::handshake_timeout). If
    /// nobody listens yet, it waits first, for at most [`Options::wait_for_listener`].
    ///
    /// # Errors
    /// The backend's error ([`Error::Domain`]); [`Error::Refused`] and [`Error::VersionMismatch`] where the listener
    /// does not agree; [`Error::TimedOut`].
    pub fn connect<C: Channel>(&self, address: &Address, options: &Options) -> Result<C> {
        let backend = self.of(address)?;
        let patience = Deadline::after(options.connect_timeout.unwrap_or_default());
        let mut pause = PAUSE.0;
        let mut as_ever = None;
        loop {
            let options = as_ever.as_ref().unwrap_or(options);
            let mut asks_much = false;
            let connected = backend.connect_early(address.service(), Deadline::after(options.handshake_timeout));
            let introduced = connected.map_err(Error::from).and_then(|link| {
                asks_much = requires_ahead(&*link, C::MESSAGES, options);
                introduce(link, C::MESSAGES, options)
            });
            match introduced {
                // A listener that does not support a writer that goes ahead (H-9) is asked again, for a channel without
                // it (C-4).
                Err(Error::Refused { code: Refusal::Feature, .. }) if asks_much => {
                    let fixed = Options { growth: None, ..options.clone() };
                    as_ever = Some(fixed);
                }
                Err(Error::Domain(DomainError::NotFound(_))) if !patience.expired() => {
                    thread::park_timeout(pause.min(patience.remaining().unwrap_or(pause)));
                    pause = (pause * 2).min(PAUSE.1);
                }
                other => return other.map(C::from_halves),
            }
        }
    }

    /// Starts listening at `address`.
    ///
    /// # Errors
    /// The backend's error: [`Error::Domain`].
    pub fn listen<C: Channel>(&self, address: &Address, options: &Options) -> Result<Listener<C>> {
        Listener::new(self.of(address)?.listen(address.service())?, options.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c1_backend_that_was_left_out_is_told_from_one_that_nobody_knows() {
        let backends = Backends::new().without("xen");
        let left_out = backends.address("xen:0/web").unwrap_err();
        assert!(matches!(&left_out, Error::NotBuilt { scheme, .. } if scheme == "xen"), "{left_out:?}");
        assert!(left_out.to_string().contains("feature \"xen\""), "{left_out}");
        let unknown = backends.address("pigeon:web").unwrap_err();
        assert!(matches!(unknown, Error::UnknownScheme { .. }), "{unknown:?}");
        assert_eq!(left_out.errno(), unknown.errno());
    }
}
