// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer backends. Uses: channel, domain, domain-ivshmem, domain-local, domain-xen, mem, vchan-wire.
//!
//! The backends that a program is built with. The facade gets all of them here; front ends of this project get what
//! only one backend has, which is not part of the public crate. A feature that is off leaves its backend out of the
//! build.
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

/// Returns the backends of this program, by the scheme of their addresses: `local`, and `vm` and `xen` if their
/// features are on.
///
/// The calls of a backend that this machine lacks fail and name what is missing. Those of one that was not built fail
/// and name the feature to build.
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

/// Returns the rendezvous of this kernel's processes in `folder`, for front ends between a program and its kernel.
#[must_use]
pub fn rendezvous_in(folder: &Path) -> Box<dyn Rendezvous> {
    Box::new(LocalDomain::in_folder(folder).with_unique_names())
}

/// Returns the rendezvous of neighbouring virtual machines through this kernel's broker, if that runs now; for the same
/// front ends.
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

/// Returns the rendezvous of other Xen domains, if this process may use Xen's drivers; for the same front ends.
#[must_use]
pub fn xen_domains() -> Option<Box<dyn Rendezvous>> {
    #[cfg(feature = "xen")]
    {
        XenNeighbours::find().map(|neighbours| Box::new(neighbours) as Box<dyn Rendezvous>)
    }
    #[cfg(not(feature = "xen"))]
    None
}

/// The kernel module of a virtual machine, for its functions other than channels.
#[cfg(feature = "vm")]
pub mod module {
    pub use tombolo_domain_ivshmem::{interface, uapi};
}

/// This Xen domain, for tools that check what works.
#[cfg(feature = "xen")]
pub mod xen {
    use super::XenDomain;
    use tombolo_channel::Result;
    pub use tombolo_domain_xen::{OrphanedGrants, ReaperListing};

    /// Lists the listeners that this domain's nodes in XenStore name: the domain that each is for, its name, and the
    /// reference of its listener page.
    ///
    /// # Errors
    /// If this is not a Xen domain; XenStore's error.
    pub fn listeners() -> Result<Vec<(u16, String, u32)>> {
        Ok(XenDomain::new().listeners()?)
    }

    /// Tries what a channel needs: asks XenStore for this domain's number, grants a page and makes an event channel,
    /// and gives page and channel back. Returns the number.
    ///
    /// # Errors
    /// The first step that fails, and its remedy.
    pub fn try_out() -> Result<u16> {
        // The peer is dom0, which is always there; it is not told.
        let pieces = XenDomain::new().pieces(0)?;
        pieces.share(1, None)?;
        pieces.offer_port()?;
        Ok(pieces.own())
    }
}
