// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A broker's message of any bytes, on any path, is refused, or means what its encoding means (B-1, B-2).
#![no_main]

use libfuzzer_sys::fuzz_target;
use tombolo_control::{MESSAGE_MAX, Path, Envelope};

fuzz_target!(|input: &[u8]| {
    let Some((path, message)) = input.split_first() else { return };
    let path = match path {
        1 => Path::Host,
        2 => Path::Link,
        _ => Path::Socket,
    };
    match Envelope::decode(path, message) {
        Ok(said) => {
            assert!(message.len() <= MESSAGE_MAX);
            assert_eq!(said.encode(), message);
        }
        Err(fault) => assert!(["B-1", "B-2"].contains(&fault.clause), "{fault:?}"),
    }
});
