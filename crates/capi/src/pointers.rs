// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Arguments as a foreign caller passes them: the only place where a pointer becomes a reference.
//!
//! # Safety
//! Each type here is a pointer that came over the border. Safe code cannot make one, because its field is private and
//! it has no constructor. So every value was an argument of an exported function, whose caller promised what
//! `tombolo.h` requires in "What a pointer must be":
//!
//! * it is null, or valid and aligned for its type and for the length that goes with it;
//! * the caller and its other threads leave its target alone until the call returns: buffers of one call do not
//!   overlap, and none is memory that a peer writes;
//! * a handle came from this library and was not closed, and no other call uses it when it is closed.
//!
//! Null is checked here. C offers no way to check the rest. References live no longer than the argument, so they end
//! with the call.
#![allow(unsafe_code)]

use std::{
    ffi::CStr,
    io::{IoSlice, IoSliceMut},
    mem, slice,
};

use libc::{c_char, c_int, c_void, iovec};

use crate::{
    border::{Fault, Outcome},
    halves::Region,
};

/// Largest number of parts of one vectored call, the same as for the system's calls.
const PARTS_MOST: c_int = libc::UIO_MAXIOV;

const fn null(text: &'static CStr) -> Fault {
    Fault::new(libc::EFAULT, text)
}

/// Checks that a slice can have the length `len`.
fn checked(len: usize) -> Outcome<usize> {
    if isize::try_from(len).is_ok() { Ok(len) } else { Err(Fault::new(libc::EINVAL, c"the length is impossible")) }
}

/// A handle that an earlier call [gave](Out::give) to the caller.
#[repr(transparent)]
pub struct Handle<T>(*mut T);

impl<T: Sync> Handle<T> {
    pub fn get(&self) -> Outcome<&T> {
        // SAFETY: (valid, aligned) null or from `Out::give`, and not closed: the caller's promise; (aliasing) only
        // shared references are ever made, until the last; (threads) `T` is Sync.
        unsafe { self.0.as_ref() }.ok_or(null(c"the handle is a null pointer"))
    }

    /// Returns the object itself, to be dropped, or `None` for null.
    pub fn into_box(self) -> Option<Box<T>> {
        // SAFETY: (from a box) from `Out::give`; (once) it was not closed before, and nobody else uses it: the caller's
        // promise.
        (!self.0.is_null()).then(|| unsafe { Box::from_raw(self.0) })
    }
}

/// A text that ends with NUL.
#[repr(transparent)]
pub struct Text(*const c_char);

impl Text {
    pub fn get(&self) -> Outcome<&str> {
        if self.0.is_null() {
            return Err(null(c"the address is a null pointer"));
        }
        // SAFETY: (valid, ends, unchanged) the caller's promise; (lifetime) that of the argument.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map_err(|_| Fault::new(libc::EINVAL, c"the address is not UTF-8"))
    }
}

/// Bytes that the library reads.
#[repr(transparent)]
pub struct Bytes(*const c_void);

impl Bytes {
    /// Returns `len` bytes. Null is allowed if `len` is 0.
    pub fn get(&self, len: usize) -> Outcome<&[u8]> {
        match (self.0.is_null(), checked(len)?) {
            (true, 0) => Ok(&[]),
            (true, _) => Err(null(c"the buffer is a null pointer")),
            // SAFETY: (valid, unchanged) `len` bytes, the caller's promise; (lifetime) that of the argument.
            (false, len) => Ok(unsafe { slice::from_raw_parts(self.0.cast(), len) }),
        }
    }
}

/// Bytes that the library writes.
#[repr(transparent)]
pub struct Room(*mut c_void);

impl Room {
    /// Returns `len` bytes. Null is allowed if `len` is 0.
    pub fn get(&mut self, len: usize) -> Outcome<&mut [u8]> {
        match (self.0.is_null(), checked(len)?) {
            (true, 0) => Ok(&mut []),
            (true, _) => Err(null(c"the buffer is a null pointer")),
            // SAFETY: (valid, unique) `len` bytes, left alone meanwhile, the caller's promise; (lifetime) that of the
            // argument; (initialised) bytes of foreign memory hold something, and they are only written.
            (false, len) => Ok(unsafe { slice::from_raw_parts_mut(self.0.cast(), len) }),
        }
    }
}

/// The parts of a vectored call.
#[repr(transparent)]
pub struct Parts(*const iovec);

impl Parts {
    fn get(&self, count: c_int) -> Outcome<&[iovec]> {
        match (self.0.is_null(), count) {
            (_, 0) => Ok(&[]),
            (true, _) => Err(null(c"the array of parts is a null pointer")),
            (false, 1..=PARTS_MOST) => {
                // SAFETY: (valid, unchanged) `count` parts, the caller's promise; (lifetime) that of the argument.
                Ok(unsafe { slice::from_raw_parts(self.0, count.unsigned_abs() as usize) })
            }
            _ => Err(Fault::with(libc::EINVAL, &format!("{count} parts; 0 to {PARTS_MOST} will do"))),
        }
    }

    /// Returns the bytes of the parts, to be read.
    pub fn bytes(&self, count: c_int) -> Outcome<Vec<IoSlice<'_>>> {
        let parts = self.get(count)?.iter().map(|part| match (part.iov_base.is_null(), checked(part.iov_len)?) {
            (true, 0) => Ok(IoSlice::new(&[])),
            (true, _) => Err(null(c"a part is a null pointer")),
            // SAFETY: as in `Bytes::get`.
            (false, len) => Ok(IoSlice::new(unsafe { slice::from_raw_parts(part.iov_base.cast(), len) })),
        });
        parts.collect()
    }

    /// Returns the bytes of the parts, to be written.
    pub fn room(&mut self, count: c_int) -> Outcome<Vec<IoSliceMut<'_>>> {
        let parts = self.get(count)?.iter().map(|part| match (part.iov_base.is_null(), checked(part.iov_len)?) {
            (true, 0) => Ok(IoSliceMut::new(&mut [])),
            (true, _) => Err(null(c"a part is a null pointer")),
            // SAFETY: as in `Room::get`; (unique) parts of one call do not overlap, the caller's promise.
            (false, len) => Ok(IoSliceMut::new(unsafe { slice::from_raw_parts_mut(part.iov_base.cast(), len) })),
        });
        parts.collect()
    }
}

/// A place for a result.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Checks the pointer before there is a result that would be lost.
    pub fn check(&self) -> Outcome<()> {
        if self.0.is_null() { Err(null(c"the place for the result is a null pointer")) } else { Ok(()) }
    }
}

impl<T> Out<Handle<T>> {
    /// Gives `value` to the caller, until it closes the handle.
    pub fn give(&self, value: T) -> Outcome<()> {
        self.check()?;
        // SAFETY: (valid, aligned) not null, the caller's promise; what was there needs no drop.
        unsafe { self.0.write(Handle(Box::into_raw(Box::new(value)))) };
        Ok(())
    }
}

impl Out<iovec> {
    /// Writes both parts of `place`. Returns their length.
    pub fn put(&self, place: Region) -> Outcome<usize> {
        self.check()?;
        let parts = place.map(|(base, len)| iovec { iov_base: base.cast_mut().cast(), iov_len: len });
        // SAFETY: (valid, aligned) room for two, not null, the caller's promise.
        unsafe { self.0.cast::<[iovec; 2]>().write(parts) };
        Ok(place[0].1 + place[1].1)
    }
}

/// A struct that may grow. It begins with its size, from which each side learns how much of it the other side knows.
///
/// # Safety
/// It is `repr(C)`, has no padding, takes every bit pattern, and its first field is `size: u32`.
pub unsafe trait Versioned: Sized {
    const SIZE: u32 = {
        assert!(mem::size_of::<Self>() < 4096 && mem::align_of::<Self>() <= 8);
        mem::size_of::<Self>() as u32
    };
}

// SAFETY: see `options.rs`: fixed widths in order, no padding (its test adds them up).
unsafe impl Versioned for crate::options::Options {}
// SAFETY: see `structs.rs`, likewise.
unsafe impl Versioned for crate::structs::Statistics {}
// SAFETY: see `structs.rs`, likewise.
unsafe impl Versioned for crate::structs::Peer {}

/// Largest size of a struct that a caller may state. Fields that this library does not know are refused only where it
/// would have to act on them.
const SIZE_MOST: u32 = 4096;

fn known<T: Versioned>(size: u32) -> Outcome<usize> {
    match size {
        4..=SIZE_MOST => Ok(size.min(T::SIZE) as usize),
        _ => Err(Fault::with(libc::EINVAL, &format!("a struct of {size} bytes: set its field `size` to its sizeof"))),
    }
}

/// A struct that the library reads.
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T: Versioned + Default> In<T> {
    /// Returns the struct, with defaults for fields that the caller does not know; for null, only defaults.
    ///
    /// A caller may know more fields than this library, if they are zero.
    pub fn get(&self) -> Outcome<T> {
        let mut whole = T::default();
        if self.0.is_null() {
            return Ok(whole);
        }
        // SAFETY: (valid, aligned) the caller's promise, for at least the first field.
        let size = unsafe { self.0.cast::<u32>().read() };
        let known = known::<T>(size)?;
        // SAFETY: (valid, unchanged) `size` bytes, the caller's promise; not more than `SIZE_MOST`.
        let theirs = unsafe { slice::from_raw_parts(self.0.cast::<u8>(), size as usize) };
        if theirs[known..].iter().any(|byte| *byte != 0) {
            return Err(Fault::new(libc::E2BIG, c"the struct asks for more than this version of the library knows"));
        }
        // SAFETY: (valid) `known` is at most the size of `T`; (unique) it is a local; (any bits) `Versioned`.
        let ours = unsafe { slice::from_raw_parts_mut((&raw mut whole).cast::<u8>(), known) };
        ours.copy_from_slice(&theirs[..known]);
        Ok(whole)
    }
}

impl<T: Versioned> Out<T> {
    /// Writes the fields of `whole` that the caller knows. Fields that only the caller knows become zero.
    pub fn fill(&self, whole: &T) -> Outcome<()> {
        self.check()?;
        // SAFETY: (valid, aligned) the caller's promise, for at least the first field.
        let size = unsafe { self.0.cast::<u32>().read() };
        let known = known::<T>(size)?;
        // SAFETY: (valid) `known` is at most the size of `T`; (initialised) it has no padding: `Versioned`.
        let ours = unsafe { slice::from_raw_parts(std::ptr::from_ref(whole).cast::<u8>(), known) };
        // SAFETY: (valid, unique) `size` bytes, the caller's promise; not more than `SIZE_MOST`.
        let theirs = unsafe { slice::from_raw_parts_mut(self.0.cast::<u8>(), size as usize) };
        // The first field keeps the caller's value.
        theirs[4..known].copy_from_slice(&ours[4..]);
        theirs[known..].fill(0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        options::Options,
        structs::{Peer, Statistics},
    };
    use std::ptr::{null, null_mut};

    fn errno<T>(outcome: Outcome<T>) -> c_int {
        outcome.map(drop).unwrap_err().errno
    }

    #[test]
    fn null_is_refused_where_it_stands_for_something() {
        assert_eq!(errno(Handle::<u64>(null_mut()).get()), libc::EFAULT);
        assert!(Handle::<u64>(null_mut()).into_box().is_none());
        assert_eq!(errno(Text(null()).get()), libc::EFAULT);
        assert_eq!(errno(Bytes(null()).get(1)), libc::EFAULT);
        assert_eq!(errno(Room(null_mut()).get(1)), libc::EFAULT);
        assert_eq!(errno(Parts(null()).bytes(1)), libc::EFAULT);
        assert_eq!(errno(Out::<u64>(null_mut()).check()), libc::EFAULT);
        assert_eq!(Bytes(null()).get(0).unwrap(), b"");
        assert_eq!(Room(null_mut()).get(0).unwrap(), b"");
        assert!(Parts(null()).bytes(0).unwrap().is_empty());
        assert_eq!(In::<Options>(null()).get().unwrap().size, 0);
    }

    #[test]
    fn impossible_lengths_are_refused() {
        let byte = 0u8;
        assert_eq!(errno(Bytes((&raw const byte).cast()).get(usize::MAX)), libc::EINVAL);
        let part = iovec { iov_base: (&raw const byte).cast_mut().cast(), iov_len: usize::MAX };
        assert_eq!(errno(Parts(&part).bytes(1)), libc::EINVAL);
        assert_eq!(errno(Parts(&part).bytes(-1)), libc::EINVAL);
        assert_eq!(errno(Parts(&part).room(PARTS_MOST + 1)), libc::EINVAL);
    }

    #[test]
    fn handle_given_is_got_and_taken() {
        let mut place = Handle(null_mut());
        Out(&raw mut place).give(String::from("kept")).unwrap();
        assert_eq!(place.get().unwrap(), "kept");
        assert_eq!(*place.into_box().unwrap(), "kept");
    }

    #[test]
    fn structs_have_no_padding_and_keep_their_first_layout() {
        assert_eq!(Options::SIZE, 2 * 4 + 8 * 8);
        assert_eq!(Statistics::SIZE, 2 * 4 + 14 * 8);
        assert_eq!(Peer::SIZE, 2 * 4 + 2 * 8 + 64);
        assert_eq!(mem::offset_of!(Options, wait_for_listener_ns), 56);
        assert_eq!(mem::offset_of!(Statistics, in_flight), 96);
        assert_eq!(mem::offset_of!(Peer, domain), 24);
    }

    /// A struct as a caller of another version has it.
    #[repr(C)]
    struct Larger<T> {
        known: T,
        later: [u64; 2],
    }

    #[test]
    fn struct_of_a_later_version_is_read_where_what_is_new_is_zero() {
        let known = Options { size: Options::SIZE + 16, ring_size: 4096, ..Options::default() };
        let mut larger = Larger { known, later: [0; 2] };
        assert_eq!(In((&raw const larger).cast::<Options>()).get().unwrap().ring_size, 4096);
        larger.later[1] = 1;
        assert_eq!(errno(In((&raw const larger).cast::<Options>()).get()), libc::E2BIG);
    }

    #[test]
    fn struct_of_an_earlier_version_gets_defaults() {
        let options = Options { size: 8, flags: 1, ring_size: 4096, ..Options::default() };
        let read = In(&raw const options).get().unwrap();
        assert_eq!((read.flags, read.ring_size), (1, 0));
    }

    #[test]
    fn struct_is_filled_as_far_as_the_caller_knows_it() {
        let whole = Statistics { bytes: 1, messages: 2, ..Statistics::default() };
        let mut short = Statistics { size: 16, messages: 7, ..Statistics::default() };
        Out(&raw mut short).fill(&whole).unwrap();
        assert_eq!((short.size, short.bytes, short.messages), (16, 1, 7));
        let known = Statistics { size: Statistics::SIZE + 16, ..Statistics::default() };
        let mut larger = Larger { known, later: [9; 2] };
        Out((&raw mut larger).cast::<Statistics>()).fill(&whole).unwrap();
        assert_eq!((larger.known.size, larger.known.messages, larger.later), (Statistics::SIZE + 16, 2, [0; 2]));
    }

    #[test]
    fn struct_without_a_size_is_refused() {
        for size in [0, 3, SIZE_MOST + 1] {
            let mut peer = Peer { size, reserved: 0, pid: 0, uid: 0, domain: [0; 64] };
            assert_eq!(errno(Out(&raw mut peer).fill(&peer.clone())), libc::EINVAL);
        }
    }
}
