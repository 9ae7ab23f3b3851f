// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A message of any bytes is refused, or means what its encoding means (C-2 to C-5).
#![no_main]

use libfuzzer_sys::fuzz_target;
use tombolo_layout::{handshake::Message, limits};

fuzz_target!(|input: &[u8]| {
    match Message::decode(input) {
        Ok(message) => {
            let again = message.encode();
            assert!(again.len() <= limits::CONTROL_MESSAGE_MAX);
            assert_eq!(Message::decode(&again), Ok(message));
        }
        Err(error) => assert!(["C-2", "C-3", "C-5"].contains(&error.clause), "{error:?}"),
    }
});
