// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A header of any bytes is refused, or right and written back as it was (M-1 to M-4).
#![no_main]

use libfuzzer_sys::fuzz_target;
use tombolo_layout::{SegmentHeader, header, limits};

fuzz_target!(|input: &[u8]| {
    // Headers that name the size of their memory rightly get furthest; others are refused by M-2.
    let Some((bytes, rest)) = input.split_first_chunk::<{ header::LEN }>() else { return };
    let said = u64::from_le_bytes(bytes[0x10..0x18].try_into().expect("eight bytes"));
    let memory = if rest.is_empty() { said } else { rest.len() as u64 };
    match SegmentHeader::decode(bytes, memory) {
        Ok(header) => {
            assert_eq!(header.encode(), *bytes);
            let end = header.data_offset.checked_add(header.capacity).expect("no overflow");
            assert_eq!(end, memory);
            assert!(header.capacity.is_power_of_two() && header.capacity <= limits::CAPACITY_MAX);
            assert_eq!(header.geometry().capacity, header.capacity);
        }
        Err(error) => assert!(["M-1", "M-2", "M-3", "M-4"].contains(&error.clause), "{error:?}"),
    }
});
