// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Records to whom a connection belongs.

use std::time::Instant;

use tombolo_control::{ConnectionEnd, Name};
use tracing::Span;

use crate::endpoint::program::Program;

/// Details of a connection besides what was agreed.
#[derive(Clone, Debug)]
pub(crate) struct About {
    pub service: Name,
    pub end: ConnectionEnd,
    pub process: u32,
    pub user: u32,
    pub since: Instant,
    /// Span that names the connection in the log.
    pub span: Span,
}

impl About {
    /// Describes a new connection `serial` to `service`, whose side `end` belongs to `program`. `link` is the link's
    /// log span.
    pub(crate) fn new(link: &Span, serial: u32, service: Name, end: ConnectionEnd, program: &Program) -> Self {
        // The error level makes sure that the span exists whatever level is logged.
        let span = tracing::error_span!(parent: link, "connection", serial, service = service.as_str());
        Self { span, service, end, process: program.process, user: program.user, since: Instant::now() }
    }
}
