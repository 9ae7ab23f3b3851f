// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which backends there are: those of the facade, and in tests the harsh double as well.

use tombolo::{Channel, Listener, Options, Result};

/// As [`tombolo::connect_with`].
pub(crate) fn connect<C: Channel>(address: &str, options: &Options) -> Result<C> {
    #[cfg(feature = "testing")]
    if address.starts_with("harsh:") {
        return harsh::CLIENT.connect(&address.parse()?, options);
    }
    tombolo::connect_with(address, options)
}

/// As [`tombolo::listen_with`].
pub(crate) fn listen<C: Channel>(address: &str, options: &Options) -> Result<Listener<C>> {
    #[cfg(feature = "testing")]
    if address.starts_with("harsh:") {
        return harsh::SERVER.listen(&address.parse()?, options);
    }
    tombolo::listen_with(address, options)
}

/// Whoever listens is in the domain `server`, whoever connects in the domain `client`.
#[cfg(feature = "testing")]
pub(crate) mod harsh {
    use std::sync::LazyLock;

    use tombolo::Backends;
    use tombolo_domain::harsh::{HarshDomain, Hypervisor};

    pub(crate) static WORLD: LazyLock<(Hypervisor, HarshDomain, HarshDomain)> = LazyLock::new(|| {
        let hypervisor = Hypervisor::new();
        let (server, client) = (hypervisor.domain("server"), hypervisor.domain("client"));
        (hypervisor, server, client)
    });
    pub(super) static SERVER: LazyLock<Backends> = LazyLock::new(|| Backends::new().with(WORLD.1.clone()));
    pub(super) static CLIENT: LazyLock<Backends> = LazyLock::new(|| Backends::new().with(WORLD.2.clone()));
}
