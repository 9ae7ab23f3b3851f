// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Makes the kernel module's ioctls, and is the only way to map memory that this endpoint writes.
//!
//! # Safety
//! The number of an ioctl states what the kernel reads and writes; the numbers in `uapi` are made from the types that
//! are passed here. [`OwnMemory`] maps each byte at most once at a time, as an own segment requires. The broker
//! guarantees that no other program writes it, because it gives each window to one program.
#![allow(unsafe_code)]

use std::{
    ffi::c_void,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr,
    sync::{Arc, Mutex},
};

use rustix::{
    io::{Errno, Result},
    ioctl::{Ioctl, IoctlOutput, Opcode, ioctl},
};
use tombolo_mem::OwnSegment;
use tombolo_os::{lock::lock, reserved::ReservedFd};

use crate::uapi::{
    self, EventfdArgs, Info, LinkArgs, NetArgs, NetLinkArgs, NetPlace, NetStat, NetTurn, NotifyArgs, RangeArgs,
    WindowArgs, WindowsArgs,
};

/// An ioctl: its number and its argument, which the kernel may read and write.
struct Call<T> {
    opcode: u32,
    argument: T,
}

// SAFETY: (opcode) those of `uapi`, made from the argument's type; (pointer) to the argument, ours alone while the call
// lasts; (output) any bytes that the kernel leaves there are valid, T being integers.
unsafe impl<T: Copy> Ioctl for Call<T> {
    type Output = (IoctlOutput, T);

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.opcode as Opcode
    }

    fn as_ptr(&mut self) -> *mut c_void {
        ptr::from_mut(&mut self.argument).cast()
    }

    unsafe fn output_from_ptr(output: IoctlOutput, argument: *mut c_void) -> Result<Self::Output> {
        // SAFETY: (valid) it is the pointer that `as_ptr` returned, to a T.
        let argument = unsafe { argument.cast::<T>().read() };
        Ok((output, argument))
    }
}

fn call<T: Copy>(fd: BorrowedFd<'_>, opcode: u32, argument: T) -> Result<(IoctlOutput, T)> {
    // SAFETY: (opcode) each caller below passes the type from which its number was made.
    unsafe { ioctl(fd, Call { opcode, argument }) }
}

fn made((number, _): (IoctlOutput, impl Copy)) -> OwnedFd {
    // SAFETY: (owned) the module has just made this descriptor for us.
    unsafe { OwnedFd::from_raw_fd(number) }
}

pub(crate) fn info(node: BorrowedFd<'_>) -> Result<Info> {
    call(node, uapi::IOC_INFO, Info::default()).map(|(_, info)| info)
}

pub(crate) fn link(node: BorrowedFd<'_>, args: LinkArgs) -> Result<OwnedFd> {
    call(node, uapi::IOC_LINK, args).map(made)
}

pub(crate) fn window(link: BorrowedFd<'_>, args: WindowArgs) -> Result<OwnedFd> {
    call(link, uapi::IOC_WINDOW, args).map(made)
}

/// Lists the windows of a link, as many as fit into `room`. Returns the number of windows, which may be greater.
pub(crate) fn windows(link: BorrowedFd<'_>, room: &mut [WindowArgs]) -> Result<usize> {
    let count = u32::try_from(room.len()).map_err(|_| Errno::INVAL)?;
    let args = WindowsArgs { entries: room.as_mut_ptr().expose_provenance() as u64, count, reserved: 0 };
    call(link, uapi::IOC_WINDOWS, args).map(|(_, args)| args.count as usize)
}

pub(crate) fn hang_up(link: BorrowedFd<'_>) -> Result<()> {
    call(link, uapi::IOC_HANG_UP, ()).map(drop)
}

pub(crate) fn notify(link: BorrowedFd<'_>, args: NotifyArgs) -> Result<()> {
    call(link, uapi::IOC_NOTIFY, args).map(drop)
}

pub(crate) fn clear(link: BorrowedFd<'_>, args: RangeArgs) -> Result<()> {
    call(link, uapi::IOC_CLEAR, args).map(drop)
}

pub(crate) fn eventfd(window: BorrowedFd<'_>, channel: u32, event: BorrowedFd<'_>) -> Result<()> {
    call(window, uapi::IOC_EVENTFD, EventfdArgs { channel, fd: event.as_raw_fd() }).map(drop)
}

pub(crate) fn net(file: BorrowedFd<'_>, args: NetArgs) -> Result<NetArgs> {
    call(file, uapi::IOC_NET, args).map(|(_, args)| args)
}

pub(crate) fn net_link(file: BorrowedFd<'_>, args: NetLinkArgs) -> Result<()> {
    call(file, uapi::IOC_NET_LINK, args).map(drop)
}

pub(crate) fn net_unlink(file: BorrowedFd<'_>) -> Result<NetTurn> {
    call(file, uapi::IOC_NET_UNLINK, NetTurn::default()).map(|(_, turn)| turn)
}

pub(crate) fn net_stat(file: BorrowedFd<'_>) -> Result<NetStat> {
    call(file, uapi::IOC_NET_STAT, NetStat::default()).map(|(_, stat)| stat)
}

/// Returns a descriptor of the interface's network namespace, and its name and number there.
pub(crate) fn net_place(file: BorrowedFd<'_>) -> Result<(OwnedFd, NetPlace)> {
    let answer = call(file, uapi::IOC_NET_PLACE, NetPlace::default())?;
    Ok((made(answer), answer.1))
}

/// A range of shared memory that only this program writes: a window of the kernel module, or a range of a memfd.
#[derive(Debug)]
pub(crate) struct OwnMemory {
    fd: ReservedFd,
    at: u64,
    len: u64,
    /// Mapped ranges, as offset and length.
    mapped: Arc<Mutex<Vec<(u64, u64)>>>,
}

impl OwnMemory {
    /// Takes over the memory that the broker gave.
    pub(crate) fn new(fd: ReservedFd, at: u64, len: u64) -> Self {
        Self { fd, at, len, mapped: Arc::default() }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Maps a range, none of which is mapped yet.
    pub(crate) fn map(&self, offset: u64, len: usize) -> std::io::Result<OwnSegment> {
        let end = offset.checked_add(len as u64).filter(|end| *end <= self.len).ok_or(Errno::INVAL)?;
        let mut mapped = lock(&self.mapped);
        if mapped.iter().any(|(at, len)| *at < end && offset < at + len) {
            return Err(Errno::BUSY.into());
        }
        mapped.push((offset, len as u64));
        drop(mapped);
        let claim = Claim { offset, mapped: Arc::clone(&self.mapped) };
        // SAFETY: (only) nothing else of this range is mapped until the claim is dropped, which is after this mapping
        // is gone; no other program or domain writes it, as the broker guarantees.
        unsafe { OwnSegment::map_revocable(self.fd.as_fd(), self.at + offset, len, claim) }
    }

    /// Returns whether the range mapped at `offset` is still mapped.
    pub(crate) fn is_mapped(&self, offset: u64) -> bool {
        let mapped = lock(&self.mapped);
        mapped.iter().any(|(at, _)| *at == offset)
    }
}

/// Claim on a mapped range, which ends when it is dropped.
#[derive(Debug)]
struct Claim {
    offset: u64,
    mapped: Arc<Mutex<Vec<(u64, u64)>>>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut mapped = lock(&self.mapped);
        mapped.retain(|(at, _)| *at != self.offset);
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::MemfdFlags;

    use super::*;

    #[test]
    fn range_is_mapped_once_at_a_time_and_within_its_window() {
        let memory = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 5 * 4096).unwrap();
        let own = OwnMemory::new(ReservedFd::new(memory).unwrap(), 4096, 4 * 4096);
        let first = own.map(0, 8192).unwrap();
        for (offset, len) in [(0, 4096), (4096, 4096), (4096, 8192), (4 * 4096, 4096), (8192, 3 * 4096), (u64::MAX, 1)]
        {
            assert!(own.map(offset, len).is_err(), "{offset} {len}");
        }
        assert!(own.is_mapped(0) && own.map(8192, 8192).is_ok());
        drop(first);
        assert!(!own.is_mapped(0) && own.map(4096, 8192).is_ok());
    }

    #[test]
    fn descriptor_that_is_none_of_the_modules_is_refused() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(info(file.as_fd()), Err(Errno::NOTTY));
        assert_eq!(hang_up(file.as_fd()), Err(Errno::NOTTY));
        assert!(eventfd(file.as_fd(), 0, file.as_fd()).is_err());
        assert!(link(file.as_fd(), LinkArgs::default()).is_err());
        assert!(window(file.as_fd(), WindowArgs::default()).is_err());
        assert!(windows(file.as_fd(), &mut []).is_err());
        assert_eq!(notify(file.as_fd(), NotifyArgs::default()), Err(Errno::NOTTY));
        assert_eq!(clear(file.as_fd(), RangeArgs::default()), Err(Errno::NOTTY));
        assert_eq!(net(file.as_fd(), NetArgs::default()), Err(Errno::NOTTY));
        assert_eq!(net_link(file.as_fd(), NetLinkArgs::default()), Err(Errno::NOTTY));
        assert_eq!(net_unlink(file.as_fd()), Err(Errno::NOTTY));
        assert_eq!(net_stat(file.as_fd()), Err(Errno::NOTTY));
        assert_eq!(net_place(file.as_fd()).unwrap_err(), Errno::NOTTY);
    }
}
