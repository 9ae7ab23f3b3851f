// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Makes segments in the memory of a device.
//!
//! # Safety
//! The caller promises that nobody else writes the memory, because a device's memory has no seals. The functions are
//! `unsafe` for that reason alone; nothing unsafe is done here.
#![allow(unsafe_code)]

use std::{any::Any, io, os::fd::BorrowedFd};

use crate::{
    OwnSegment,
    map::{Access, Mapping},
};

impl OwnSegment {
    /// Maps `len` bytes of `fd` from `offset` on, for a backend whose memory comes from a device.
    ///
    /// # Errors
    /// The error of `mmap`.
    ///
    /// # Safety
    /// Nothing else writes these bytes for as long as the mapping lives, which [`guarded`](Self::guarded) can tell:
    /// nothing in this process, another process or another domain. The memory stays where it is.
    pub unsafe fn map_only(fd: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        Ok(Self::from_only_writable(Mapping::new(fd, offset, len, Access::ReadWrite)?))
    }

    /// Maps `len` bytes of `fd` from `offset` on as a segment of this endpoint, for a backend whose memory is a part of
    /// a device. The device may be unplugged: see [`OwnControl::is_lost`](crate::OwnControl::is_lost). Drops `guard` as
    /// [`PeerSegment::map_guarded`](crate::PeerSegment::map_guarded) does.
    ///
    /// # Errors
    /// The error of `mmap`.
    ///
    /// # Safety
    /// Nobody else writes these bytes for as long as the segment and its parts live: no other process, no other domain,
    /// no other mapping in this process.
    pub unsafe fn map_revocable(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        guard: impl Any + Send + Sync,
    ) -> io::Result<Self> {
        Mapping::revocable(fd, offset, len, Access::ReadWrite).map(|it| Self::from_only_writable(it.guarded(guard)))
    }
}
