// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer backends. Uses: channel, domain, domain-ivshmem, domain-local, domain-xen, mem, vchan-wire.
//!
//! The backends that a program is built with. The facade asks here for all of them; fronts of this project ask for what
//! only one backend has, which is no part of the public crate. A feature that is off leaves its backend out of the build.
#![forbid(unsafe_code)]

#[cfg(feature = "vchan")]
pub mod vchan;
#[cfg(all(feature = "vm", feature = "xen"))]
mod vm;

use std::{path::Path, sync::LazyLock};

use tombolo_channel::Backends;
use tombolo_domain::Rendezvous;
#[cfg(feature = "vm")]
use tombolo_domain_ivshmem::VmDomain;
use tombolo_domain_local::LocalDomain;
pub use tombolo_domain_local::services_folder;
#[cfg(feature = "xen")]
use tombolo_domain_xen::{XenDomain, XenNeighbours};

/// Returns the backends of this program, by the scheme of their addresses: `local`, and by feature `vm` and `xen`.
///
/// One that this machine lacks says what is missing when it is called; one that was not built says how to build it.
pub fn backends() -> &'static Backends {
    static BACKENDS: LazyLock<Backends> = LazyLock::new(register);
    &BACKENDS
}

fn register() -> Backends {
    let backends = Backends::new().with(LocalDomain::new());
    #[cfg(feature = "xen")]
    let xen = XenDomain::new();
    #[cfg(all(feature = "vm", feature = "xen"))]
    let backends = backends.with(vm::Vm::new(VmDomain::new(), xen.names()));
    #[cfg(all(feature = "vm", not(feature = "xen")))]
    let backends = backends.with(VmDomain::new());
    #[cfg(not(feature = "vm"))]
    let backends = backends.without("vm");
    #[cfg(feature = "xen")]
    let backends = backends.with(xen);
    #[cfg(not(feature = "xen"))]
    let backends = backends.without("xen");
    backends
}

/// Meets other processes of this kernel in `folder`: for fronts that stand in a program's way to the kernel.
#[must_use]
pub fn rendezvous_in(folder: &Path) -> Box<dyn Rendezvous> {
    Box::new(LocalDomain::in_folder(folder).with_unique_names())
}

/// Meets processes of neighbouring virtual machines by the broker of this kernel, if there is one now: for the same fronts.
#[must_use]
pub fn machines() -> Option<Box<dyn Rendezvous>> {
    #[cfg(feature = "vm")]
    {
        let domain = VmDomain::new();
        domain.is_there().then(|| Box::new(domain) as Box<dyn Rendezvous>)
    }
    #[cfg(not(feature = "vm"))]
    None
}

/// Meets processes of other domains of Xen's, if this process may use its drivers: for the same fronts.
#[must_use]
pub fn xen_domains() -> Option<Box<dyn Rendezvous>> {
    #[cfg(feature = "xen")]
    {
        XenNeighbours::find().map(|neighbours| Box::new(neighbours) as Box<dyn Rendezvous>)
    }
    #[cfg(not(feature = "xen"))]
    None
}

/// The kernel module of a virtual machine, for what it does beside channels.
#[cfg(feature = "vm")]
pub mod module {
    pub use tombolo_domain_ivshmem::{interface, uapi};
}

/// This domain of Xen's, for tools that look what works.
#[cfg(feature = "xen")]
pub mod xen {
    use super::XenDomain;
    use tombolo_channel::Result;
    pub use tombolo_domain_xen::{OrphanedGrants, ReaperListing};

    /// Lists the listeners that this domain's nodes in XenStore lead to: for which domain, under which name, and the
    /// reference of the listener page.
    ///
    /// # Errors
    /// Where this is no domain of Xen's; what XenStore says.
    pub fn listeners() -> Result<Vec<(u16, String, u32)>> {
        Ok(XenDomain::new().listeners()?)
    }

    /// Tries what a channel needs: asks XenStore for this domain's number, grants a page, makes an event channel. Page and
    /// channel are given back. Returns the number.
    ///
    /// # Errors
    /// What of it does not work, and what mends it.
    pub fn try_out() -> Result<u16> {
        // To dom0, which is always there; it is not told.
        let pieces = XenDomain::new().pieces(0)?;
        pieces.share(1, None)?;
        pieces.offer_port()?;
        Ok(pieces.own())
    }
}
