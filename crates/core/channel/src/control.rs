// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What holds for every control message of a channel.

use tombolo_domain::{Endpoint, Error as DomainError, Received};
use tombolo_layout::{
    VERSION,
    handshake::{Message, Refusal, versions},
};

use crate::Error;

/// What came in last, unless a doorbell of its own came with it: no message of a channel carries one (C-2).
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

/// What a refusal in `message` comes to.
pub(crate) fn refused(code: Refusal, reason: String, message: &[u8]) -> Error {
    if code == Refusal::Version {
        let (theirs_min, theirs_max) = versions(message).unwrap_or_default();
        return Error::VersionMismatch { ours: VERSION, theirs_min, theirs_max };
    }
    // For people to read: one line, and nothing that their terminal would act on.
    Error::Refused { code, reason: reason.replace(char::is_control, "?") }
}

/// What `message` comes to if it is a refusal (C-5).
pub(crate) fn refusal_in(message: &[u8]) -> Option<Error> {
    let Ok(Message::Refuse(code, reason)) = Message::decode(message) else { return None };
    Some(refused(code, reason, message))
}
