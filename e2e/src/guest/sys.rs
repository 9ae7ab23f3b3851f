// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Wraps the calls of the kernel module and maps windows. Tests must try what programs must not be able to do, so
//! mappings here are raw. The module is unsafe because ioctl and mmap are.
#![allow(unsafe_code)]

use rustix::io::{Errno, Result};
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl};
use rustix::mm::{MapFlags, MprotectFlags, MremapFlags, ProtFlags, UserfaultfdFlags};
use rustix::mm::{mmap, mmap_anonymous, mprotect, mremap, munmap, userfaultfd};
use rustix::pipe::{IoSliceRaw, SpliceFlags, vmsplice};
use rustix::process::Pid;
use std::arch::asm;
use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};
use std::{ptr, slice};

/// `struct tombolo_info`
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Info {
    /// Version of the interface. The header of the module describes this field and all fields below.
    pub version: u32,
    /// Set of `INFO_…` bits.
    pub flags: u32,
    /// Bytes of shared memory.
    pub size: u64,
    /// Number of this guest among the peers that can be notified.
    pub peer: u32,
    /// Number of interrupt vectors.
    pub vectors: u32,
    /// Number of interrupts so far.
    pub interrupts: u64,
    /// Number of times that the module closed a vector.
    pub storms: u64,
    /// Reserved; always zero.
    pub reserved: [u64; 3],
}

/// `TOMBOLO_INFO_DOORBELL`
pub const INFO_DOORBELL: u32 = 1;
/// `TOMBOLO_INFO_WRITE_BACK`
pub const INFO_WRITE_BACK: u32 = 2;
/// `TOMBOLO_WINDOW_PEER`
pub const WINDOW_PEER: u32 = 1;
/// `TOMBOLO_WINDOW_READ_ONLY`
pub const WINDOW_READ_ONLY: u32 = 2;

/// `struct tombolo_link`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LinkArgs {
    /// Start of this side's half. The header of the module describes this field and all fields below.
    pub own_offset: u64,
    /// Length in bytes.
    pub own_length: u64,
    /// Start of the peer's half in bytes.
    pub peer_offset: u64,
    /// Length in bytes.
    pub peer_length: u64,
    /// Descriptor of the node with the peer's half.
    pub peer_fd: i32,
    /// Descriptor of the node with the doorbell.
    pub doorbell_fd: i32,
    /// Peer that the link notifies.
    pub notify_peer: u16,
    /// Vector at which the peer is notified.
    pub notify_vector: u16,
    /// Vector at which the peer notifies this side.
    pub wait_vector: u16,
    /// Reserved; always zero.
    pub flags: u16,
}

impl LinkArgs {
    /// Returns arguments that are all zero except for the descriptors of the nodes.
    pub fn new(peer: &impl AsRawFd, doorbell: &impl AsRawFd) -> Self {
        Self {
            own_offset: 0,
            own_length: 0,
            peer_offset: 0,
            peer_length: 0,
            peer_fd: peer.as_raw_fd(),
            doorbell_fd: doorbell.as_raw_fd(),
            notify_peer: 0,
            notify_vector: 0,
            wait_vector: 0,
            flags: 0,
        }
    }
}

/// `struct tombolo_window`
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WindowArgs {
    /// Number of the caller's own. The header of the module describes this field and all fields below.
    pub cookie: u64,
    /// Start in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Set of `WINDOW_…` bits.
    pub flags: u32,
    /// First channel.
    pub channel: u32,
    /// Number of channels.
    pub channels: u32,
    /// State below which a state byte counts as open.
    pub below: u16,
    /// State that an open state byte becomes at the last close.
    pub closed: u16,
    /// Places of the state bytes within the window.
    pub state: [u32; 2],
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct WindowsArgs {
    entries: u64,
    count: u32,
    reserved: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct EventfdArgs {
    channel: u32,
    fd: i32,
}

const READ: u32 = 2;
const WRITE: u32 = 1;

const fn opcode<T>(direction: u32, number: u32) -> Opcode {
    (direction << 30 | (size_of::<T>() as u32) << 16 | 0xe7 << 8 | number) as Opcode
}

/// Any ioctl: its number, and its argument, which the kernel may read and write.
struct Call<T> {
    opcode: Opcode,
    argument: T,
}

// SAFETY: (opcode) the caller of `call` ensures that the number encodes the size of the argument, and the module reads
// and writes no more than that; (pointer) it points to the argument, which nothing else uses during the call; (output)
// T consists of integers, so any value that the kernel leaves there is valid.
unsafe impl<T: Copy> Ioctl for Call<T> {
    type Output = (IoctlOutput, T);

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.opcode
    }

    fn as_ptr(&mut self) -> *mut c_void {
        ptr::from_mut(&mut self.argument).cast()
    }

    unsafe fn output_from_ptr(output: IoctlOutput, argument: *mut c_void) -> Result<Self::Output> {
        // SAFETY: (valid) this is the pointer to a T that `as_ptr` returned.
        let argument = unsafe { argument.cast::<T>().read() };
        Ok((output, argument))
    }
}

fn call<T: Copy>(fd: impl AsFd, direction: u32, number: u32, argument: T) -> Result<(IoctlOutput, T)> {
    let call = Call { opcode: opcode::<T>(direction, number), argument };
    // SAFETY: (opcode) the number is made from T, as the impl of `Ioctl` requires.
    unsafe { ioctl(fd, call) }
}

fn new_fd(number: IoctlOutput) -> OwnedFd {
    // SAFETY: (owned) the module has just made this descriptor for this process.
    unsafe { OwnedFd::from_raw_fd(number) }
}

/// `TOMBOLO_IOC_INFO`
///
/// # Errors
/// Those of the module, as its header describes them; this holds for all functions below.
pub fn info(node: impl AsFd) -> Result<Info> {
    Ok(call(node, READ, 0, Info::default())?.1)
}

/// `TOMBOLO_IOC_LINK`
///
/// # Errors
/// Those of the module.
pub fn link(node: impl AsFd, args: &LinkArgs) -> Result<OwnedFd> {
    Ok(new_fd(call(node, WRITE, 1, *args)?.0))
}

/// `TOMBOLO_IOC_WINDOW`
///
/// # Errors
/// Those of the module.
pub fn window(link: impl AsFd, args: &WindowArgs) -> Result<OwnedFd> {
    Ok(new_fd(call(link, WRITE, 2, *args)?.0))
}

/// `TOMBOLO_IOC_WINDOWS`: returns as many windows as there is `room` for, and the number of all windows.
///
/// # Errors
/// Those of the module.
pub fn windows(link: impl AsFd, room: u32) -> Result<(Vec<WindowArgs>, u32)> {
    let mut entries = vec![WindowArgs::default(); room as usize];
    let args = WindowsArgs { entries: entries.as_mut_ptr() as u64, count: room, reserved: 0 };
    let count = call(link, READ | WRITE, 3, args)?.1.count;
    entries.truncate(count as usize);
    Ok((entries, count))
}

/// `TOMBOLO_IOC_WINDOWS` with room for one entry, which the kernel writes into `memory`. Returns the number of windows.
///
/// # Errors
/// Those of the module.
pub fn windows_into(link: impl AsFd, memory: &Stalling) -> Result<u32> {
    let args = WindowsArgs { entries: memory.memory.base as u64, count: 1, reserved: 0 };
    Ok(call(link, READ | WRITE, 3, args)?.1.count)
}

/// `TOMBOLO_IOC_HANG_UP`
///
/// # Errors
/// Those of the module.
pub fn hang_up(link: impl AsFd) -> Result<()> {
    call(link, 0, 4, [(); 0]).map(drop)
}

/// `TOMBOLO_IOC_CLEAR`: zeroes `length` bytes from `offset`.
///
/// # Errors
/// The driver refuses.
pub fn clear(link: impl AsFd, offset: u64, length: u64) -> Result<()> {
    call(link, WRITE, 7, [offset, length]).map(drop)
}

/// `TOMBOLO_IOC_NOTIFY`: sets the peer that the link notifies, and the vector.
///
/// # Errors
/// The driver refuses.
pub fn set_notify_target(link: impl AsFd, peer: u16, vector: u16) -> Result<()> {
    call(link, WRITE, 6, [peer, vector]).map(drop)
}

/// `TOMBOLO_IOC_EVENTFD`
///
/// # Errors
/// Those of the module.
pub fn eventfd(window: impl AsFd, channel: u32, fd: i32) -> Result<()> {
    call(window, WRITE, 5, EventfdArgs { channel, fd }).map(drop)
}

/// Makes any ioctl, for abuse tests. Its argument is 64 bytes of this program, or an address at which nothing is
/// mapped.
///
/// # Errors
/// Those of the kernel.
pub fn abuse(fd: impl AsFd, opcode: u32, argument: Option<[u64; 8]>) -> Result<()> {
    struct Nowhere(Opcode);
    // SAFETY: (pointer) the first page is never mapped, so the kernel can neither read nor write there.
    unsafe impl Ioctl for Nowhere {
        type Output = ();
        const IS_MUTATING: bool = true;
        fn opcode(&self) -> Opcode {
            self.0
        }
        fn as_ptr(&mut self) -> *mut c_void {
            ptr::without_provenance_mut(8)
        }
        unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> Result<()> {
            Ok(())
        }
    }
    match argument {
        // SAFETY: (opcode) the calls of the module take less than 64 bytes, and the module refuses all others.
        Some(argument) => unsafe { ioctl(fd, Call { opcode: opcode as Opcode, argument }) }.map(drop),
        // SAFETY: as the impl says.
        None => unsafe { ioctl(fd, Nowhere(opcode as Opcode)) },
    }
}

/// Mapped memory of a window.
#[derive(Debug)]
pub struct Mapping {
    base: *mut c_void,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes at `offset`, shared unless `private`.
    ///
    /// # Errors
    /// The module refuses.
    pub fn new(fd: impl AsFd, offset: u64, len: usize, prot: ProtFlags, private: bool) -> Result<Self> {
        let flags = if private { MapFlags::PRIVATE } else { MapFlags::SHARED };
        // SAFETY: (address) the kernel picks it, so no memory of this program is replaced.
        let base = unsafe { mmap(ptr::null_mut(), len, prot, flags, fd, offset)? };
        Ok(Self { base, len })
    }

    /// Maps for reading and writing.
    ///
    /// # Errors
    /// The module refuses.
    pub fn writable(fd: impl AsFd, len: usize) -> Result<Self> {
        Self::new(fd, 0, len, ProtFlags::READ | ProtFlags::WRITE, false)
    }

    /// Maps for reading.
    ///
    /// # Errors
    /// The module refuses.
    pub fn readable(fd: impl AsFd, len: usize) -> Result<Self> {
        Self::new(fd, 0, len, ProtFlags::READ, false)
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.len
    }

    /// Changes what the mapping allows.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn protect(&self, prot: MprotectFlags) -> Result<()> {
        // SAFETY: (ours) the range belongs to this mapping; only `load` and `store` use it.
        unsafe { mprotect(self.base, self.len, prot) }
    }

    /// Loads a byte.
    ///
    /// # Panics
    /// `at` is beyond the mapping.
    #[must_use]
    pub fn load(&self, at: usize) -> u8 {
        let place = self.place(at);
        // SAFETY: (valid) the place is within the mapping; if the kernel took the memory away, the test expects the
        // signal.
        unsafe { place.read_volatile() }
    }

    /// Stores a byte.
    ///
    /// # Panics
    /// `at` is beyond the mapping.
    pub fn store(&self, at: usize, value: u8) {
        let place = self.place(at);
        // SAFETY: (valid) as in `load`; if the mapping is not writable, the test expects the signal.
        unsafe { place.write_volatile(value) }
    }

    /// Loads a word as the specification defines it.
    ///
    /// # Panics
    /// `at` is beyond the mapping, or not a multiple of 8.
    #[must_use]
    pub fn load_word(&self, at: usize) -> u64 {
        // SAFETY: (valid) `word` checks the place, and the rest is as in `load`; (order) this architecture keeps loads
        // in order.
        u64::from_le(unsafe { self.word(at).read_volatile() })
    }

    /// Stores a word as the specification defines it, after all earlier stores.
    ///
    /// # Panics
    /// `at` is beyond the mapping, or not a multiple of 8.
    pub fn store_word(&self, at: usize, value: u64) {
        fence(Ordering::Release);
        // SAFETY: (valid) `word` checks the place, and the rest is as in `store`.
        unsafe { self.word(at).write_volatile(value.to_le()) }
    }

    /// Stores bytes.
    ///
    /// # Panics
    /// The bytes reach beyond the mapping.
    pub fn store_all(&self, at: usize, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let place = self.place(at);
        assert!(bytes.len() <= self.len - at, "{} at {at} of {}", bytes.len(), self.len);
        // SAFETY: (valid) checked just above, and as in `store`; (apart) `bytes` is Rust's memory, and a mapping is
        // not.
        unsafe { place.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }

    fn word(&self, at: usize) -> *mut u64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.len, "{at} of {}", self.len);
        self.place(at).cast()
    }

    /// Stores 4 bytes in a register at once.
    ///
    /// # Panics
    /// `at` is beyond the mapping, or not a multiple of 4.
    pub fn store_register(&self, at: usize, value: u32) {
        assert!(at.is_multiple_of(4) && at + 4 <= self.len, "{at} of {}", self.len);
        // SAFETY: (valid) checked just above, and a mapping starts at a page boundary; the signal is as in `store`.
        unsafe { self.place(at).cast::<u32>().write_volatile(value) }
    }

    /// Returns the address of the mapping.
    #[must_use]
    pub fn address(&self) -> usize {
        self.base as usize
    }

    /// Makes the mapping longer.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn grow(&self, len: usize) -> Result<()> {
        // SAFETY: (place) the kernel must not move the mapping, so it stays in place; nothing touches the memory beyond
        // `len`.
        unsafe { mremap(self.base, self.len, len, MremapFlags::empty()) }.map(drop)
    }

    /// Puts the pages of the mapping into a pipe, without a copy.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn splice(&self, pipe: impl AsFd) -> Result<usize> {
        // SAFETY: (valid) the range is within the mapping; nothing in this program reads the bytes.
        let pages = IoSliceRaw::from_slice(unsafe { slice::from_raw_parts(self.base.cast(), self.len) });
        // SAFETY: (kept) the caller reads nothing from the pipe that a change of the pages could affect.
        unsafe { vmsplice(pipe, &[pages], SpliceFlags::empty()) }
    }

    /// Makes every access to a missing page of the mapping wait for `pager`.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn page_by(&self, pager: &OwnedFd) -> Result<()> {
        let argument = [self.base as u64, self.len as u64, UFFD_MISSING, 0];
        let register = Call { opcode: (3 << 30 | 32 << 16 | 0xaa << 8) as Opcode, argument };
        // SAFETY: (opcode) this is UFFDIO_REGISTER with its four words.
        unsafe { ioctl(pager, register) }.map(drop)
    }

    fn place(&self, at: usize) -> *mut u8 {
        assert!(at < self.len, "{at} of {}", self.len);
        // SAFETY: (in bounds) checked just above.
        unsafe { self.base.cast::<u8>().add(at) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: (ours) `new` mapped it, and nothing keeps an address in it.
        _ = unsafe { munmap(self.base, self.len) };
    }
}

/// Page at which every access waits until its [`pager`] is dropped.
#[derive(Debug)]
pub struct Stalling {
    memory: Mapping,
}

// SAFETY: (shared) only the kernel uses the memory, by its address.
unsafe impl Sync for Stalling {}

/// `UFFD_API`
const UFFD_API: u64 = 0xaa;
/// `UFFDIO_REGISTER_MODE_MISSING`
const UFFD_MISSING: u64 = 1;

impl Stalling {
    /// Returns the page, and a descriptor that becomes readable once an access waits for the page.
    ///
    /// # Errors
    /// The kernel has no userfaultfd.
    pub fn new() -> Result<(Self, OwnedFd)> {
        let (prot, len) = (ProtFlags::READ | ProtFlags::WRITE, 4096);
        // SAFETY: (address) the kernel picks it.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), len, prot, MapFlags::PRIVATE)? };
        let memory = Mapping { base, len };
        let pager = pager()?;
        memory.page_by(&pager)?;
        Ok((Self { memory }, pager))
    }
}

/// Makes `TOMBOLO_IOC_INFO` as a 32-bit program would.
///
/// # Errors
/// Those of the module; the kernel has no 32-bit calls.
pub fn info_of_32_bit(node: impl AsFd) -> Result<Info> {
    let (prot, below) = (ProtFlags::READ | ProtFlags::WRITE, ptr::without_provenance_mut(1 << 28));
    // SAFETY: (address) it is only a wish: the kernel picks another address if something is there already.
    let base = unsafe { mmap_anonymous(below, 4096, prot, MapFlags::PRIVATE)? };
    let memory = Mapping { base, len: 4096 };
    let address = u32::try_from(memory.address()).map_err(|_| Errno::NOMEM)?;
    let (node, mut result) = (node.as_fd().as_raw_fd(), 54_u32); // ioctl
    // SAFETY: (registers) the kernel changes eax and, on this entry, r8 to r11, and the code restores ebx; (memory) the
    // call writes an `Info` to the page, which belongs to this function.
    unsafe {
        asm!("push rbx", "mov ebx, {node:e}", "int 0x80", "pop rbx", node = in(reg) node, inout("eax") result,
            in("ecx") opcode::<Info>(READ, 0) as u32, in("edx") address,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _);
    }
    match result.cast_signed() {
        // SAFETY: (valid) the page begins with an `Info`, and any bytes are a valid `Info`.
        0 => Ok(unsafe { memory.base.cast::<Info>().read_volatile() }),
        error => Err(Errno::from_raw_os_error(-error)),
    }
}

/// Forks this process and returns the child's number in the parent, nothing in the child. Both must have a single
/// thread, and the child must not use what other threads could have held.
///
/// # Errors
/// The kernel has no process left.
pub fn fork() -> Result<Option<Pid>> {
    let mut result = 57_isize; // fork
    // SAFETY: (memory) the child's memory is its own, except for shared mappings; (registers) the code names those that
    // the call changes.
    unsafe { asm!("syscall", inout("rax") result, out("rcx") _, out("r11") _) };
    match i32::try_from(result) {
        Ok(number @ 0..) => Ok(Pid::from_raw(number)),
        error => Err(Errno::from_raw_os_error(-error.unwrap_or(-1))),
    }
}

/// Makes a userfaultfd.
///
/// # Errors
/// The kernel has none.
pub fn pager() -> Result<OwnedFd> {
    // SAFETY: (new) the descriptor is new; the calls below decide what it does.
    let pager = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC)? };
    let begin = Call { opcode: (3 << 30 | 24 << 16 | 0xaa << 8 | 0x3f) as Opcode, argument: [UFFD_API, 0, 0] };
    // SAFETY: (opcode) this is UFFDIO_API with its three words.
    unsafe { ioctl(&pager, begin)? };
    Ok(pager)
}

/// Returns the error, if there is one.
pub fn errno<T>(result: Result<T>) -> Option<Errno> {
    result.err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_sizes_of_the_header() {
        assert_eq!(size_of::<Info>(), 64);
        assert_eq!(size_of::<LinkArgs>(), 48);
        assert_eq!(size_of::<WindowArgs>(), 48);
        assert_eq!(size_of::<WindowsArgs>(), 16);
        assert_eq!(size_of::<EventfdArgs>(), 8);
        assert_eq!(opcode::<Info>(READ, 0), 0x8040_e700);
    }
}
