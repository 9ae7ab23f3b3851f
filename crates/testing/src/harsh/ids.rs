// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Names of the objects that the hypervisor holds.

use std::sync::Arc;

/// A process, as the owner of objects.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Process {
    pub(super) domain: Arc<str>,
    pub(super) number: u64,
}

/// Name of an endpoint for the lifetime of the hypervisor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct EndId(pub(super) u64);

/// Number by which memory is passed. Never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Reference(pub(super) u64);
