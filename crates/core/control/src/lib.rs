// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 2. Uses: layout.
//!
//! Implements the messages between brokers, and of brokers with programs and tools: `spec/7-broker.md` in code, without
//! I/O.
//!
//! Only this crate encodes and decodes [`Message`]. [`Session`] carries messages over a pair of outboxes in shared
//! memory, which any implementation of [`Boxes`] reads and writes.
#![forbid(unsafe_code)]

mod field;
mod message;
mod outbox;
mod text;

pub use field::{ADDRESSES_MAX, Fault};
pub use message::{
    ConnectionEnd, Envelope, Form, HEAD_LEN, Head, Life, LinkState, MAGIC, MESSAGE_MAX, Message, NOBODY, NetRole, Path,
    Progress, ROW_WORDS, Seen, Side, Stage, Way, What,
};
pub use outbox::{BOX_LEN, Boxes, Event, QUEUE_MAX, SEQUENCE_AT, Session};
pub use text::{Line, Name, Pattern, Place, Reason, parse_ip};

/// The version that this code speaks (B-3, B-6).
pub const VERSION: u16 = 1;
/// The first version with Leave and Left (B-6, B-21). A peer whose Hello names a lower version is sent neither.
pub const VERSION_LEAVE: u16 = 2;
/// The first version with [`Message::Addresses`], [`Message::Seek`] and the questions by which programs find each other
/// (B-6, B-22). A peer whose Hello names a lower version is sent none of them.
pub const VERSION_FIND: u16 = 3;
/// The newest version that this code speaks, and the first one with [`Message::Nets`] and [`Message::Net`] (B-6, B-28).
/// A peer whose Hello names a lower version is sent neither.
pub const VERSION_NET: u16 = 4;
/// Largest number of interfaces of one domain (B-28).
pub const NETS_MAX: u16 = 64;
/// Number of bytes of the doorbell device's memory (B-3).
pub const DEVICE_LEN: u64 = 64 << 10;
/// Smallest region (B-7).
pub const REGION_MIN: u64 = 64 << 10;
/// Largest region (B-7).
pub const REGION_MAX: u64 = 1 << 30;
/// Offset in a region at which windows begin (B-14).
pub const WINDOWS_AT: u64 = 4096;
/// Number of event channels of a link (B-3).
pub const CHANNELS: u16 = 512;
/// Number of the host's doorbell, in every domain (B-8).
pub const HOST_DOORBELL: u16 = 0;
/// Number of a domain's own doorbell (B-8).
pub const OWN_DOORBELL: u16 = 1;
/// First number of a peer's doorbell (B-8).
pub const FIRST_DOORBELL: u16 = 2;
/// Number that stands for no doorbell (B-8).
pub const NO_DOORBELL: u16 = 0xffff;
/// Value that stands for no domain number (B-19).
pub const NO_NUMBER: u16 = 0xffff;
/// Bound below which domain numbers are, as under Xen (B-19).
pub const NUMBERS: u16 = 0x7ff0;

/// Codes of a refusal: those of C-5 that brokers use, and their own (B-15).
pub mod code {
    /// The message could not be understood (C-5).
    pub const MALFORMED: u16 = 4;
    /// A limit is used up (C-5).
    pub const QUOTA: u16 = 5;
    /// Policy forbids it (C-5).
    pub const DENIED: u16 = 6;
    /// No common version (C-5).
    pub const VERSION: u16 = 1;
    /// Nothing has that name.
    pub const NOT_FOUND: u16 = 32;
    /// The item exists already.
    pub const EXISTS: u16 = 33;
    /// This broker cannot do that.
    pub const UNSUPPORTED: u16 = 34;
    /// The virtual machine has no free slot.
    pub const NO_SLOT: u16 = 35;
    /// Another failure, which the reason describes.
    pub const FAILED: u16 = 36;
    /// The machine's QEMU is not there, or its control socket cannot be reached (B-26).
    pub const NO_QEMU: u16 = 40;
    /// The guest did not release a device in time (B-26).
    pub const KEPT: u16 = 41;
    /// QEMU refused the command (B-26).
    pub const QEMU_REFUSES: u16 = 42;
    /// The machine is being made ready to migrate, or is ready (B-26).
    pub const MIGRATES: u16 = 43;
}

/// Returns whether `len` bytes at `offset` may be a window of a region of `region` bytes (B-14).
#[must_use]
pub const fn window_is_sound(region: u64, offset: u64, len: u64) -> bool {
    let page = tombolo_layout::limits::PAGE;
    let Some(end) = offset.checked_add(len) else { return false };
    offset >= WINDOWS_AT && end <= region && len != 0 && offset % page == 0 && len % page == 0
}

/// Number of event channels of a connection (B-14).
pub const CONNECTION_CHANNELS: u16 = 3;

/// Returns whether a connection may take `channel` and those behind it; the first channel of a link is the brokers'
/// (B-14).
#[must_use]
pub const fn channel_is_sound(channel: u16) -> bool {
    channel != 0 && channel <= CHANNELS - CONNECTION_CHANNELS && (channel - 1) % CONNECTION_CHANNELS == 0
}

/// Returns the vector at which a peer on `link` notifies a device with `vectors` vectors (B-8).
#[must_use]
pub const fn vector_of(link: u32, vectors: u16) -> u16 {
    if vectors < 2 { 0 } else { 1 + (link % (vectors as u32 - 1)) as u16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b14_connections_have_channels_of_their_own_behind_that_of_the_brokers() {
        let sound: Vec<u16> = (0..600).filter(|&channel| channel_is_sound(channel)).collect();
        assert_eq!((sound.len(), sound[0], sound[1], sound[169]), (170, 1, 4, 508));
    }

    #[test]
    fn b8_peers_ring_no_vector_that_is_the_hosts_if_there_is_another() {
        assert_eq!((0..5).map(|link| vector_of(link, 3)).collect::<Vec<_>>(), [1, 2, 1, 2, 1]);
        assert_eq!([vector_of(7, 2), vector_of(7, 1), vector_of(7, 0)], [1, 0, 0]);
    }

    #[test]
    fn b14_window_outside_its_region_or_off_its_pages_is_unsound() {
        let region = 1 << 20;
        assert!(window_is_sound(region, WINDOWS_AT, 4096) && window_is_sound(region, WINDOWS_AT, region - WINDOWS_AT));
        for (offset, len) in [
            (0, 4096),
            (WINDOWS_AT, 0),
            (WINDOWS_AT, 4095),
            (WINDOWS_AT + 1, 4096),
            (WINDOWS_AT, region),
            (region, 4096),
            (u64::MAX - 4095, 8192),
            (WINDOWS_AT, u64::MAX - 4095),
        ] {
            assert!(!window_is_sound(region, offset, len), "{offset:#x} {len:#x}");
        }
    }
}
