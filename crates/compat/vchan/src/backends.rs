// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which backends there are: those of the facade, and in tests the harsh double as well.

use tombolo::{Channel, Listener, Options, Result};

/// With the kernel's barrier a descriptor that is polled tells of a late look (ADR 0086); that of the original is quiet until
/// something changes.
const BARRIER: bool = false;

/// As [`tombolo::connect_with`].
pub(crate) fn connect<C: Channel>(address: &str, options: &Options) -> Result<C> {
    #[cfg(feature = "testing")]
    if address.starts_with("harsh:") {
        return harsh::client(address).connect(&address.parse()?, options);
    }
    tombolo::connect_with(address, &options.clone().membarrier(BARRIER))
}

/// As [`tombolo::listen_with`].
pub(crate) fn listen<C: Channel>(address: &str, options: &Options) -> Result<Listener<C>> {
    #[cfg(feature = "testing")]
    if address.starts_with("harsh:") {
        return harsh::server(address).listen(&address.parse()?, options);
    }
    tombolo::listen_with(address, &options.clone().membarrier(BARRIER))
}

/// Hypervisors in this process: at an address `harsh:NAME/SERVICE` whoever listens is in the domain NAME, and whoever
/// connects in another.
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

    /// By the name of the first of them.
    static PAIRS: LazyLock<Mutex<HashMap<String, Arc<Pair>>>> = LazyLock::new(Mutex::default);

    /// The two domains that meet at `address`, of which the second is made as `client`.
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
