// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sizes and bounds, in bytes unless the name says otherwise.

/// Granule of segment sizes and of the data offset (M-2).
pub const PAGE: u64 = 4096;
/// Size of a segment's part before its data: the header, the words and reserved bytes (M-4).
pub const CONTROL_LEN: u64 = PAGE;
/// Smallest ring (M-4).
pub const CAPACITY_MIN: u64 = PAGE;
/// Largest ring: a receiver never has to map more than this and one page for a pipe (M-4).
pub const CAPACITY_MAX: u64 = 1 << 30;
/// Ring size unless the user sets another: fits in L2 and lets the writer run ahead of the reader.
pub const CAPACITY_DEFAULT: u64 = 1 << 20;
/// Largest first ring of a caller that a listener maps unless its user sets another: sixteen default rings (C-7).
pub const FIRST_CAPACITY_MOST: u64 = 16 * CAPACITY_DEFAULT;
/// Granule of records, and the size of a record's header.
pub const RECORD_ALIGN: u64 = 8;
/// Longest control message (C-2).
pub const CONTROL_MESSAGE_MAX: usize = 256;
/// Largest number of memory segments that one control message may carry (C-2).
pub const CONTROL_SEGMENTS_MAX: usize = 1;
/// Longest reason in a refusal, in bytes of UTF-8 (C-3).
pub const REASON_MAX: usize = 160;

/// Returns the largest payload of one record in a ring of `capacity` bytes.
#[must_use]
pub const fn message_max(capacity: u64) -> u64 {
    let fits = capacity - RECORD_ALIGN;
    if fits > u32::MAX as u64 { u32::MAX as u64 & !(RECORD_ALIGN - 1) } else { fits }
}

const _: () = assert!(CAPACITY_MIN.is_power_of_two() && CAPACITY_MAX.is_power_of_two());
const _: () = assert!(CONTROL_LEN % PAGE == 0);
