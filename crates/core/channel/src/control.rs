// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rules that hold for every control message of a channel.

use tombolo_domain::{Endpoint, Error as DomainError, Received};
use tombolo_layout::{
    VERSION,
    handshake::{Message, Refusal, versions},
};

use crate::Error;

/// Passes on the last received message, or fails if a doorbell came with it: no message of a channel carries one (C-2).
pub(crate) fn without_doorbell(
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

/// Returns the error for a refusal with `code` and `reason`, which was decoded from `message`.
pub(crate) fn refused(code: Refusal, reason: String, message: &[u8]) -> Error {
    if code == Refusal::Version {
        let (theirs_min, theirs_max) = versions(message).unwrap_or_default();
        return Error::VersionMismatch { ours: VERSION, theirs_min, theirs_max };
    }
    // The reason is for people to read: one line, without characters that would control their terminal.
    Error::Refused { code, reason: reason.replace(char::is_control, "?") }
}

/// Returns the error for `message` if it is a refusal (C-5).
pub(crate) fn refusal_in(message: &[u8]) -> Option<Error> {
    let Ok(Message::Refuse(code, reason)) = Message::decode(message) else { return None };
    Some(refused(code, reason, message))
}
