// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Gets random bytes from the kernel.

use std::io;

use rustix::{io::Errno, rand::GetRandomFlags};

/// Returns `N` random bytes.
///
/// # Blocking
/// Until the kernel has some, soon after its start.
///
/// # Errors
/// A filter of system calls forbids the call.
pub fn bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut done = 0;
    while done < N {
        match rustix::rand::getrandom(&mut bytes[done..], GetRandomFlags::empty()) {
            Ok(more) => done += more,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_asked_for_are_random() {
        let (one, other) = (bytes::<512>().unwrap(), bytes::<512>().unwrap());
        assert!(one[..8] != other[..8] && one[504..] != other[504..] && one[504..] != [0; 8]);
    }
}
