// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Arguments as a C program passes them. This is the one place where a pointer becomes a reference.
//!
//! # Safety
//! As in the crate `capi`: safe code cannot make one of these types, so each value came as an argument of an exported
//! function. Its caller promised that the pointer is null, or valid for its type and length and not used elsewhere
//! until the call returns. The caller also promised that a handle came from this library and was not closed, and that
//! no other thread is in a call with it when it is closed.
#![allow(unsafe_code)]

use std::{
    ffi::{CStr, CString},
    ptr, slice,
    sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering},
};

use libc::{c_char, c_int, c_void};

use crate::{
    border::{Fault, Outcome},
    vchan::Vchan,
};

/// Public part of one direction in `struct libxenvchan`.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Ring {
    /// Always null: the words are not where the original has them.
    shared: AtomicPtr<c_void>,
    /// Always null.
    buffer: AtomicPtr<c_void>,
    /// Logarithm to base two of the ring's size in bytes.
    order: AtomicI32,
}

/// `struct libxenvchan`: the members that a program reads or sets are where the original has them.
#[derive(Debug)]
#[repr(C)]
pub struct Public {
    memory: AtomicPtr<c_void>,
    ring: AtomicPtr<c_void>,
    event: AtomicPtr<c_void>,
    port: AtomicU32,
    /// Three bits of an int; the program sets two of them with plain stores.
    flags: AtomicU32,
    read: Ring,
    write: Ring,
    path: AtomicPtr<c_char>,
}

const IS_SERVER: u32 = 1;
const PERSIST: u32 = 2;
const BLOCKING: u32 = 4;

/// Target of a handle. Programs for libxenvchan know its first part.
#[derive(Debug)]
#[repr(C)]
pub struct Handle {
    public: Public,
    _path: CString,
    pub(crate) vchan: Vchan,
}

impl Handle {
    /// Returns the modes that the program chose in the fields that it sets.
    pub(crate) fn ways(&self) -> crate::vchan::CallMode {
        let flags = self.public.flags.load(Ordering::Relaxed);
        crate::vchan::CallMode { blocking: flags & BLOCKING != 0, persist: flags & PERSIST != 0 }
    }

    /// Sets or clears the blocking flag, as a program for libxenvchan does by itself.
    pub(crate) fn set_blocking(&self, blocking: bool) {
        if blocking {
            self.public.flags.fetch_or(BLOCKING, Ordering::Relaxed);
        } else {
            self.public.flags.fetch_and(!BLOCKING, Ordering::Relaxed);
        }
    }
}

/// Handle, for the functions of both headers.
#[repr(transparent)]
pub struct Ctrl(*mut Handle);

impl Ctrl {
    pub(crate) const NONE: Self = Self(ptr::null_mut());

    /// Gives a vchan to the program, until the program closes it.
    pub(crate) fn give(vchan: Vchan, server: bool, path: &str, blocking: bool) -> Self {
        let path = CString::new(path).unwrap_or_default();
        let null = || AtomicPtr::new(ptr::null_mut());
        let flags = if server { IS_SERVER } else { 0 } | if blocking { BLOCKING } else { 0 };
        let (read, write) = vchan.sizes();
        let ring = |bytes: usize| Ring { order: AtomicI32::new(bytes.max(1).ilog2().cast_signed()), ..Ring::default() };
        let public = Public {
            memory: null(),
            ring: null(),
            event: null(),
            port: AtomicU32::new(0),
            flags: AtomicU32::new(flags),
            read: ring(read),
            write: ring(write),
            path: AtomicPtr::new(path.as_ptr().cast_mut()),
        };
        Self(Box::into_raw(Box::new(Handle { public, _path: path, vchan })))
    }

    pub(crate) fn get(&self) -> Outcome<&Handle> {
        // SAFETY: (valid, aligned) null or from `give`, and not closed: the caller's promise; (aliasing) only shared
        // references are made until `into_box`, and the program writes only atomics; (threads) `Handle` is Sync.
        unsafe { self.0.as_ref() }.ok_or(Fault::new(libc::EFAULT, "the vchan is a null pointer"))
    }

    /// Returns the object itself, to be dropped; `None` for null.
    pub(crate) fn into_box(self) -> Option<Box<Handle>> {
        // SAFETY: (from a box) from `give`; (once) it was not closed before, and no other thread uses it: the caller's
        // promise.
        (!self.0.is_null()).then(|| unsafe { Box::from_raw(self.0) })
    }
}

/// Text that ends with NUL.
#[repr(transparent)]
pub struct Text(*const c_char);

impl Text {
    pub(crate) fn get(&self) -> Outcome<&str> {
        if self.0.is_null() {
            return Err(Fault::new(libc::EFAULT, "the path is a null pointer"));
        }
        // SAFETY: (valid, ends, unchanged) the caller's promise; (lifetime) that of the argument.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map_err(|_| Fault::new(libc::EINVAL, "the path is not UTF-8"))
    }
}

/// Returns `len`, or an error for a length that could not be returned as an int.
fn checked(len: usize) -> Outcome<usize> {
    let text = "more bytes than a vchan's int can count: 2147483647 at most";
    c_int::try_from(len).map(|_| len).map_err(|_| Fault::new(libc::EINVAL, text))
}

/// Bytes to be read.
#[repr(transparent)]
pub struct Bytes(*const c_void);

impl Bytes {
    pub(crate) fn get(&self, len: usize) -> Outcome<&[u8]> {
        match (self.0.is_null(), checked(len)?) {
            (true, 0) => Ok(&[]),
            (true, _) => Err(Fault::new(libc::EFAULT, "the data is a null pointer")),
            // SAFETY: (valid, unchanged) `len` bytes, the caller's promise; (lifetime) that of the argument.
            (false, len) => Ok(unsafe { slice::from_raw_parts(self.0.cast(), len) }),
        }
    }
}

/// Bytes to be written.
#[repr(transparent)]
pub struct Room(*mut c_void);

impl Room {
    pub(crate) fn get(&mut self, len: usize) -> Outcome<&mut [u8]> {
        match (self.0.is_null(), checked(len)?) {
            (true, 0) => Ok(&mut []),
            (true, _) => Err(Fault::new(libc::EFAULT, "the data is a null pointer")),
            // SAFETY: (valid, unique) `len` bytes, not used elsewhere meanwhile, the caller's promise; (lifetime) that
            // of the argument; (initialised) foreign memory holds some bytes, and they are only written.
            (false, len) => Ok(unsafe { slice::from_raw_parts_mut(self.0.cast(), len) }),
        }
    }
}

/// Place for a descriptor.
#[repr(transparent)]
pub struct OutFd(*mut c_int);

impl OutFd {
    pub(crate) fn check(&self) -> Outcome<()> {
        if self.0.is_null() {
            Err(Fault::new(libc::EFAULT, "the place for the descriptor is a null pointer"))
        } else {
            Ok(())
        }
    }

    pub(crate) fn put(&self, fd: c_int) -> Outcome<()> {
        self.check()?;
        // SAFETY: (valid, aligned) not null, the caller's promise.
        unsafe { self.0.write(fd) };
        Ok(())
    }
}

/// First function of a `struct xentoollog_logger`: level, errno, context, format, arguments.
type Message = unsafe extern "C" fn(*mut Logger, c_int, c_int, *const c_char, *const c_char, *mut c_void);

/// `struct xentoollog_logger`, as far as it is needed.
#[repr(C)]
pub struct Logger {
    message: Option<Message>,
}

/// XTL_ERROR.
const LEVEL_ERROR: c_int = 8;

/// Logger that a program for libxenvchan passes to learn why a set-up failed; null for standard error.
#[repr(transparent)]
pub struct Log(*mut Logger);

impl Log {
    pub(crate) fn log_fault(&self, fault: &Fault) {
        // SAFETY: (valid) null, or a logger that lives as long as the call, the caller's promise.
        let Some(Logger { message: Some(message) }) = (unsafe { self.0.as_ref() }) else {
            return crate::border::complain(fault);
        };
        // A format without conversions takes no arguments.
        let format = CString::new(fault.text.replace('%', "%%").replace('\0', " ")).unwrap_or_default();
        // Stands for an empty list of arguments: it is never read, but perhaps copied, and no ABI has a larger one.
        let mut none = [0u64; 8];
        // SAFETY: (contract) as `xtl_log` calls it: `errnoval` is -1 for none; the texts end with NUL and outlive the
        // call; (arguments) the format asks for none, so that the list is not read.
        unsafe {
            message(self.0, LEVEL_ERROR, fault.errno, c"vchan".as_ptr(), format.as_ptr(), none.as_mut_ptr().cast());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    /// Offsets as in Xen's public header, on a 64-bit machine.
    #[test]
    fn fields_that_programs_know_have_their_places() {
        assert_eq!(offset_of!(Public, ring), 8);
        assert_eq!(offset_of!(Public, port), 24);
        assert_eq!(offset_of!(Public, flags), 28);
        assert_eq!((offset_of!(Public, read), offset_of!(Public, write)), (32, 56));
        assert_eq!((offset_of!(Ring, order), size_of::<Ring>()), (16, 24));
        assert_eq!((offset_of!(Public, path), size_of::<Public>()), (80, 88));
        assert_eq!(offset_of!(Handle, public), 0);
    }

    #[test]
    fn null_and_impossible_lengths_are_refused() {
        let errno = |fault: Fault| fault.errno;
        assert_eq!(errno(Ctrl::NONE.get().map(drop).unwrap_err()), libc::EFAULT);
        assert!(Ctrl::NONE.into_box().is_none());
        assert_eq!(errno(Text(ptr::null()).get().map(drop).unwrap_err()), libc::EFAULT);
        assert_eq!(errno(Bytes(ptr::null()).get(1).map(drop).unwrap_err()), libc::EFAULT);
        assert_eq!(errno(Room(ptr::null_mut()).get(1).map(drop).unwrap_err()), libc::EFAULT);
        assert_eq!(errno(OutFd(ptr::null_mut()).put(1).unwrap_err()), libc::EFAULT);
        let byte = 0u8;
        assert_eq!(errno(Bytes((&raw const byte).cast()).get(1 << 31).map(drop).unwrap_err()), libc::EINVAL);
    }
}
