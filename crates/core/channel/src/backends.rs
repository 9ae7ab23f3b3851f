// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The backends a program knows, and the two things it does with an address: connect and listen.

use std::{collections::BTreeMap, sync::Arc, thread, time::Duration};

use tombolo_domain::{Deadline, Error as DomainError, Rendezvous};

use crate::{
    Address, Error, Listener, Options, Result,
    connect::{Channel, introduce},
};

/// First pause between two knocks at a door where nobody listens yet, and the longest.
const KNOCK: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));

/// The backends a program knows, by the scheme of their addresses.
#[derive(Clone, Default, Debug)]
pub struct Backends(BTreeMap<&'static str, Arc<dyn Rendezvous>>);

impl Backends {
    /// None.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// These and one more.
    #[must_use]
    pub fn with(mut self, backend: impl Rendezvous + 'static) -> Self {
        self.0.insert(backend.scheme(), Arc::new(backend));
        self
    }

    /// The address that `text` says, of a backend that is known.
    ///
    /// # Errors
    /// [`Error::Address`] where it is none, [`Error::UnknownScheme`].
    pub fn address(&self, text: &str) -> Result<Address> {
        let address = text.parse()?;
        self.of(&address)?;
        Ok(address)
    }

    fn of(&self, address: &Address) -> Result<&Arc<dyn Rendezvous>> {
        self.0.get(address.scheme()).ok_or_else(|| Error::UnknownScheme {
            scheme: address.scheme().into(),
            known: self.0.keys().copied().collect::<Vec<_>>().join(", "),
        })
    }

    /// Reaches the listener at `address` and agrees with it on a channel.
    ///
    /// # Blocking
    /// Until the listener has answered, at most for the [handshake's timeout](Options::handshake_timeout); if nobody
    /// listens yet, as long as [`Options::wait_for_listener`] says.
    ///
    /// # Errors
    /// What the backend says ([`Error::Domain`]); [`Error::Refused`] and [`Error::VersionMismatch`] where the listener
    /// does not agree; [`Error::TimedOut`].
    pub fn connect<C: Channel>(&self, address: &Address, options: &Options) -> Result<C> {
        let backend = self.of(address)?;
        let patience = Deadline::after(options.connect_timeout.unwrap_or_default());
        let mut pause = KNOCK.0;
        loop {
            let knocked = backend.knock(address.service(), Deadline::after(options.handshake_timeout));
            match knocked.map_err(Error::from).and_then(|link| introduce(link, C::MESSAGES, options)) {
                Err(Error::Domain(DomainError::NotFound(_))) if !patience.expired() => {
                    thread::park_timeout(pause.min(patience.remaining().unwrap_or(pause)));
                    pause = (pause * 2).min(KNOCK.1);
                }
                other => return other.map(C::from_halves),
            }
        }
    }

    /// Begins to listen at `address`.
    ///
    /// # Errors
    /// What the backend says: [`Error::Domain`].
    pub fn listen<C: Channel>(&self, address: &Address, options: &Options) -> Result<Listener<C>> {
        Listener::new(self.of(address)?.listen(address.service())?, options.clone())
    }
}
