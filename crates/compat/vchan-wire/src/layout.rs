// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Offsets in the page, and the rings that are possible (W-3, W-4).

use crate::{Error, Result};

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Largest ring: 1 MiB.
pub const ORDER_MAX: u32 = 20;
/// Order from which a ring has pages of its own.
const ORDER_PAGE: u32 = 12;
/// Offset at which the references of those pages begin.
pub const GRANTS_AT: usize = 24;
/// Bit that asks the peer to send an event when it has written.
pub const NOTIFY_WRITE: u8 = 1;
/// Bit that asks the peer to send an event when it has read.
pub const NOTIFY_READ: u8 = 2;

/// Offsets in the page. *Left* is the ring that the client writes, *right* the one that the server writes.
pub mod at {
    /// Position of the left ring's reader.
    pub const LEFT_READ: usize = 0;
    /// Position of the left ring's writer.
    pub const LEFT_WRITTEN: usize = 4;
    /// Position of the right ring's reader.
    pub const RIGHT_READ: usize = 8;
    /// Position of the right ring's writer.
    pub const RIGHT_WRITTEN: usize = 12;
    /// Both orders, two bytes each, the left one first.
    pub const ORDERS: usize = 16;
    /// 1 while the client is there, 0 once it is gone, 2 before it came.
    pub const CLIENT_LIVE: usize = 20;
    /// 1 while the server is there, 0 once it is gone.
    pub const SERVER_LIVE: usize = 21;
    /// Bits for the events that the server wants from the client.
    pub const CLIENT_NOTIFY: usize = 22;
    /// Bits for the events that the client wants from the server.
    pub const SERVER_NOTIFY: usize = 23;
}

/// Orders of both rings: a ring of order n has two to the power of n bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sizes {
    /// Order of the ring that the client writes.
    pub left: u32,
    /// Order of the ring that the server writes.
    pub right: u32,
}

impl Sizes {
    /// Returns the smallest rings of at least so many bytes, as the original chooses them: within the page where they
    /// fit.
    ///
    /// # Errors
    /// [`Error::Sizes`].
    pub fn at_least(left: usize, right: usize) -> Result<Self> {
        let most = 1 << ORDER_MAX;
        if left > most || right > most {
            return Err(Error::Sizes { read: left, write: right });
        }
        let own = |bytes: usize| bytes.max(PAGE).next_power_of_two().ilog2();
        Ok(match (left, right) {
            (..=1024, ..=2048) => Self { left: 10, right: 11 },
            (..=2048, ..=1024) => Self { left: 11, right: 10 },
            (..=2048, _) => Self { left: 11, right: own(right) },
            (_, ..=2048) => Self { left: own(left), right: 11 },
            _ => Self { left: own(left), right: own(right) },
        })
    }

    pub(crate) fn encode(self) -> u32 {
        self.left | self.right << 16
    }

    /// Returns the sizes that a server wrote, if they are possible (W-4).
    pub(crate) fn decode(word: u32) -> Result<Self> {
        let sizes = Self { left: word & 0xffff, right: word >> 16 };
        let corrupt = |what| Err(Error::Corrupt { clause: "W-4", what, found: word });
        let known = 10..=ORDER_MAX;
        if !known.contains(&sizes.left) || !known.contains(&sizes.right) {
            return corrupt("a ring of an impossible size");
        }
        if sizes.left == sizes.right && sizes.left < ORDER_PAGE {
            return corrupt("both rings in one place");
        }
        let list_ends = GRANTS_AT + 4 * (pages(sizes.left) + pages(sizes.right));
        let in_page = [sizes.left, sizes.right].into_iter().filter_map(place).min();
        if in_page.is_some_and(|ring| list_ends > ring) {
            return corrupt("the list of pages runs into a ring");
        }
        Ok(sizes)
    }
}

/// Returns how many pages of its own a ring of this order has.
pub(crate) fn pages(order: u32) -> usize {
    if order < ORDER_PAGE { 0 } else { 1 << (order - ORDER_PAGE) }
}

/// Returns the offset in the page of a ring that has no pages of its own.
pub(crate) fn place(order: u32) -> Option<usize> {
    (order < ORDER_PAGE).then_some(1 << order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn w4_rings_are_where_the_original_puts_them() {
        let sizes = |left, right| Sizes::at_least(left, right).map(|it| (it.left, it.right)).ok();
        assert_eq!(sizes(0, 0), Some((10, 11)));
        assert_eq!(sizes(1024, 2048), Some((10, 11)));
        assert_eq!(sizes(1025, 1024), Some((11, 10)));
        assert_eq!(sizes(2048, 2048), Some((11, 12)));
        assert_eq!(sizes(0, 4097), Some((11, 13)));
        assert_eq!(sizes(4096, 0), Some((12, 11)));
        assert_eq!(sizes(1 << 20, 5000), Some((20, 13)));
        assert_eq!(sizes((1 << 20) + 1, 0), None);
        assert_eq!((place(10), place(11), place(12)), (Some(1024), Some(2048), None));
        assert_eq!((pages(11), pages(12), pages(20)), (0, 1, 256));
    }

    #[test]
    fn w4_sizes_that_cannot_be_are_refused() {
        for (left, right) in [(10, 11), (11, 10), (12, 12), (11, 20), (20, 20), (20, 11)] {
            assert_eq!(Sizes::decode(Sizes { left, right }.encode()).unwrap(), Sizes { left, right });
        }
        for (left, right) in [(9, 12), (12, 21), (10, 10), (11, 11), (10, 20), (0, 0), (0xffff, 12)] {
            let refused = Sizes::decode(Sizes { left, right }.encode());
            assert!(matches!(refused, Err(Error::Corrupt { clause: "W-4", .. })), "{left} {right}");
        }
    }
}
