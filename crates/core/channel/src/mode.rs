// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The modes of a channel: bytes or messages.

use tombolo_layout::record;
use tombolo_mem::Mapped;
use tombolo_ring::{Error as RingError, Reader};

/// The mode of a half: [`StreamMode`] or [`MessageMode`]. Sealed: there are only these two.
///
/// # Example
/// ```
/// use tombolo::{Mode, Rx};
///
/// /// Waits for data on whatever it is.
/// fn is_there_more<M: Mode>(half: &mut Rx<M>) -> tombolo::Result<bool> {
///     half.wait_until(tombolo::Deadline::NEVER)
/// }
/// # let _ = is_there_more::<tombolo::StreamMode>;
/// ```
pub trait Mode: sealed::Sealed {}

/// Mode of a half that carries bytes; see [`ReadHalf`](crate::ReadHalf) and [`WriteHalf`](crate::WriteHalf).
#[derive(Clone, Copy, Debug)]
pub enum StreamMode {}

/// Mode of a half that carries messages; see [`MessageReceiver`](crate::MessageReceiver) and
/// [`MessageSender`](crate::MessageSender).
#[derive(Clone, Copy, Debug)]
pub enum MessageMode {}

impl Mode for StreamMode {}
impl Mode for MessageMode {}

pub(crate) mod sealed {
    use super::{Mapped, Reader, RingError};

    pub trait Sealed {
        /// Returns the bytes of the ring that a piece of `len` bytes takes.
        fn span(len: u64) -> u64;
        /// Returns whether there is something to read.
        fn is_ready(reader: &mut Reader<Mapped>) -> Result<bool, RingError>;
        /// Finds what can be shown in place. Returns whether there is something.
        fn find(reader: &mut Reader<Mapped>) -> Result<bool, RingError>;
    }
}

impl sealed::Sealed for StreamMode {
    #[inline]
    fn span(len: u64) -> u64 {
        len
    }

    #[inline]
    fn is_ready(reader: &mut Reader<Mapped>) -> Result<bool, RingError> {
        Ok(reader.refresh()? > 0)
    }

    #[inline]
    fn find(reader: &mut Reader<Mapped>) -> Result<bool, RingError> {
        Ok(reader.refresh()? > 0 && reader.in_place().find()?)
    }
}

impl sealed::Sealed for MessageMode {
    #[inline]
    fn span(len: u64) -> u64 {
        record::span(len)
    }

    #[inline]
    fn is_ready(reader: &mut Reader<Mapped>) -> Result<bool, RingError> {
        reader.in_place().find()
    }

    #[inline]
    fn find(reader: &mut Reader<Mapped>) -> Result<bool, RingError> {
        reader.in_place().find()
    }
}
