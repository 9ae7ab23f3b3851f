// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A Xen host under QEMU: the hypervisor, dom0, and domUs that dom0 starts.
//!
//! Everything comes from Debian ([`packages`]), packed into one image for dom0 and one for every domU ([`images`]). The
//! host talks to dom0 as to any guest, over the second serial line. A domU's agent listens in the virtual network. dom0
//! connects the agent to a virtio-serial port ([`init`]), so that the host has a [`Control`](crate::control::Control)
//! for each domain ([`host`]). [`vchan`] builds the programs that use libxenvchan, [`trace`] reads what Xen itself
//! counted, and [`up`] keeps a pair for interactive use.

pub mod host;
pub mod images;
pub mod init;
pub mod packages;
pub mod trace;
pub mod up;
pub mod vchan;
