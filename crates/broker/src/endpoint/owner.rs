// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whose a connection is.

use std::time::Instant;

use tombolo_control::{ConnectionEnd, Name};
use tracing::Span;

use crate::endpoint::program::Program;

/// What is known of a connection besides what was agreed.
#[derive(Clone, Debug)]
pub(crate) struct About {
    pub service: Name,
    pub end: ConnectionEnd,
    pub process: u32,
    pub user: u32,
    pub since: Instant,
    /// Names the connection in the log.
    pub span: Span,
}

impl About {
    /// The connection `serial` to `service` begins, of which `program` is this `end`, on the link that `link` names in the log.
    pub(crate) fn new(link: &Span, serial: u32, service: Name, end: ConnectionEnd, program: &Program) -> Self {
        // Of the highest level, so that it is there whatever is written.
        let span = tracing::error_span!(parent: link, "connection", serial, service = service.as_str());
        Self { span, service, end, process: program.process, user: program.user, since: Instant::now() }
    }
}
