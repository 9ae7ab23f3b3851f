// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Random numbers: nonces, and names of endpoints, sessions and services.

pub(crate) fn random<const N: usize>() -> [u8; N] {
    // So few bytes come without waiting once the system is up.
    loop {
        if let Ok(bytes) = tombolo_os::random::bytes() {
            return bytes;
        }
    }
}

pub(crate) fn random_id() -> u64 {
    u64::from_ne_bytes(random()).max(1)
}
