// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whose a call is.

use std::time::Instant;

use tombolo_control::{CallEnd, Name};

use crate::endpoint::program::Program;

/// What is known of a call besides what was agreed.
#[derive(Clone, Debug)]
pub(crate) struct About {
    pub service: Name,
    pub end: CallEnd,
    pub process: u32,
    pub user: u32,
    pub since: Instant,
}

impl About {
    /// A call to `service` begins, of which `program` is this `end`.
    pub(crate) fn new(service: Name, end: CallEnd, program: &Program) -> Self {
        Self { service, end, process: program.process, user: program.user, since: Instant::now() }
    }
}
