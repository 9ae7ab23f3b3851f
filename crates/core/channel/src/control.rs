// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What holds for every control message of a channel.

use tombolo_domain::{Endpoint, Error as DomainError, Received};

/// What came in last, unless a doorbell of its own came with it: no message of a channel carries one (C-2).
pub(crate) fn without_bell(
    link: &mut dyn Endpoint,
    received: std::result::Result<Received, DomainError>,
) -> std::result::Result<Received, DomainError> {
    match (link.take_notifier(), received) {
        (Some(_), Ok(_)) => {
            Err(DomainError::Malformed { clause: "C-2", what: "a doorbell with a message that carries none".into() })
        }
        (_, received) => received,
    }
}
