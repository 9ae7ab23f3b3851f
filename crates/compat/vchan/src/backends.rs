// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Selects the backends: those of the facade, and in tests the harsh double as well.

use tombolo::{Channel, Listener, Options, Result};

/// Whether to use the kernel's barrier. With it a polled descriptor becomes readable for a late look (ADR 0086); the
/// original's descriptor is quiet until something changes.
const BARRIER: bool = false;

/// Does the same as [`tombolo::connect_with`].
pub(crate) fn connect<C: Channel>(address: &str, options: &Options) -> Result<C> {
    #[cfg(feature = "testing")]
    if address.starts_with("harsh:") {
        return harsh::client(address).connect(&address.parse()?, options);
    }
    tombolo::connect_with(address, &options.clone().membarrier(BARRIER))
}

/// Does the same as [`tombolo::listen_with`].
pub(crate) fn listen<C: Channel>(address: &str, options: &Options) -> Result<Listener<C>> {
    #[cfg(feature = "testing")]
    if address.starts_with("harsh:") {
        return harsh::server(address).listen(&address.parse()?, options);
    }
    tombolo::listen_with(address, &options.clone().membarrier(BARRIER))
}

/// Hypervisors in this process. At an address `harsh:NAME/SERVICE` the listener is in the domain NAME, and the
/// connecting client in another.
#[cfg(feature = "testing")]
pub(crate) mod harsh {
    use std::{
        collections::HashMap,
        sync::{Arc, LazyLock, Mutex},
    };

    use tombolo_channel::Backends;
    use tombolo_os::lock::lock;
    use tombolo_testing::harsh::{HarshDomain, Hypervisor};

    /// Two domains.
    #[derive(Debug)]
    pub(crate) struct Pair {
        #[cfg(test)]
        pub hypervisor: Hypervisor,
        pub server: HarshDomain,
        pub client: HarshDomain,
    }

    /// Pairs by the name of their first domain.
    static PAIRS: LazyLock<Mutex<HashMap<String, Arc<Pair>>>> = LazyLock::new(Mutex::default);

    /// Returns the two domains that meet at `address`; creates the second as `client`.
    pub(crate) fn pair(address: &str, client: &str) -> Arc<Pair> {
        let name = address.split([':', '/']).nth(1).unwrap_or_default();
        let make = || {
            let hypervisor = Hypervisor::new();
            let (server, client) = (hypervisor.domain(name), hypervisor.domain(client));
            Arc::new(Pair {
                #[cfg(test)]
                hypervisor,
                server,
                client,
            })
        };
        Arc::clone(lock(&PAIRS).entry(name.into()).or_insert_with(make))
    }

    pub(super) fn server(address: &str) -> Backends {
        Backends::new().with(pair(address, "client").server.clone())
    }

    pub(super) fn client(address: &str) -> Backends {
        Backends::new().with(pair(address, "client").client.clone())
    }
}
