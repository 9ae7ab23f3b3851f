// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Wraps the calls to a TAP device that exist as `ioctl` only.
//!
//! # Safety
//! The kernel's driver (`drivers/net/tun.c`) reads or writes as many bytes as the types here have, for these codes, and
//! only on the files of `/dev/net/tun`. On any other file a code of the group `T` means what that file's driver says, so
//! each function takes a [`TunFile`], which [`TunFile::open`] alone makes.
#![allow(unsafe_code)]

use std::{
    ffi::c_void,
    io,
    os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr,
};

use rustix::{
    fs::{Mode, OFlags},
    ioctl::{IntegerSetter, Ioctl, IoctlOutput, Opcode, Setter, Updater, ioctl, opcode},
};

const SET_INTERFACE: Opcode = opcode::write::<i32>(b'T', 202);
const SET_OFFLOAD: Opcode = opcode::write::<u32>(b'T', 208);
const SET_HEADER_LEN: Opcode = opcode::write::<i32>(b'T', 216);
const SET_LITTLE_ENDIAN: Opcode = opcode::write::<i32>(b'T', 220);
const SET_CARRIER: Opcode = opcode::write::<i32>(b'T', 226);
const GET_INTERFACE: Opcode = opcode::read::<u32>(b'T', 210);
const GET_NAMESPACE: Opcode = opcode::none(b'T', 227);

/// Flags of an interface: Ethernet frames, without the driver's own prefix, and with virtio's header.
const TAP: u16 = 0x0002;
const NO_PREFIX: u16 = 0x1000;
const VIRTIO_HEADER: u16 = 0x4000;
/// Size of an interface's name in bytes, with the zero at its end.
const NAME_ROOM: usize = 16;

/// An open file of `/dev/net/tun`, which becomes an interface by [`set_interface`](Self::set_interface).
#[derive(Debug)]
pub struct TunFile(OwnedFd);

/// Requests a descriptor of the interface's namespace.
struct Namespace;

// SAFETY: (opcode) the call reads and writes nothing of ours; (output) its number is a descriptor that the driver has
// just made for us.
unsafe impl Ioctl for Namespace {
    type Output = OwnedFd;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        GET_NAMESPACE
    }

    fn as_ptr(&mut self) -> *mut c_void {
        ptr::null_mut()
    }

    unsafe fn output_from_ptr(number: IoctlOutput, _: *mut c_void) -> rustix::io::Result<OwnedFd> {
        // SAFETY: (owned) see above.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    }
}

impl AsFd for TunFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl TunFile {
    /// Opens the device. Its reads and writes do not block.
    pub fn open() -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::open(c"/dev/net/tun", flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&file)?;
        // The driver's device is a character device of this number; any other file could stand at the path.
        let device = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
        if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::CharacterDevice
            || device != (10, 200)
        {
            return Err(io::Error::other("/dev/net/tun is another device"));
        }
        Ok(Self(file))
    }

    /// Makes the interface `name`, or takes one that was made for this user.
    pub fn set_interface(&self, name: &str) -> io::Result<()> {
        // The kernel's `struct ifreq`: the name, then a union of 24 bytes, which begins with the flags.
        let mut request = [0_u8; 40];
        let bytes = name.as_bytes();
        if bytes.len() >= NAME_ROOM {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        request[..bytes.len()].copy_from_slice(bytes);
        request[16..18].copy_from_slice(&(TAP | NO_PREFIX | VIRTIO_HEADER).to_ne_bytes());
        // SAFETY: (code and type) the driver copies a `struct ifreq`, 40 bytes, in and out.
        let call = unsafe { Updater::<SET_INTERFACE, [u8; 40]>::new(&mut request) };
        // SAFETY: (file) a file of the driver, see the module.
        Ok(unsafe { ioctl(&self.0, call) }?)
    }

    /// Duplicates the descriptor. The file is closed with the last of its descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Returns the current name of the interface.
    pub fn name(&self) -> io::Result<String> {
        let mut request = [0_u8; 40];
        // SAFETY: (code and type) the driver copies a `struct ifreq`, 40 bytes, in and out.
        let call = unsafe { Updater::<GET_INTERFACE, [u8; 40]>::new(&mut request) };
        // SAFETY: (file) a file of the driver, see the module.
        unsafe { ioctl(&self.0, call) }?;
        let len = request[..NAME_ROOM].iter().position(|byte| *byte == 0).unwrap_or(NAME_ROOM);
        Ok(String::from_utf8_lossy(&request[..len]).into_owned())
    }

    /// Returns the interface's current network namespace. Needs CAP_NET_ADMIN there, and Linux 5.8.
    pub fn namespace(&self) -> io::Result<OwnedFd> {
        // SAFETY: (file) a file of the driver, see the module; (code) it takes no argument.
        Ok(unsafe { ioctl(&self.0, Namespace) }?)
    }

    /// Sets what may come from the interface: bits `TUN_F_…`.
    pub fn set_offload(&self, bits: u32) -> io::Result<()> {
        // SAFETY: (code and type) the argument is the bits themselves.
        let call = unsafe { IntegerSetter::<SET_OFFLOAD>::new_usize(bits as usize) };
        // SAFETY: (file) a file of the driver, see the module.
        Ok(unsafe { ioctl(&self.0, call) }?)
    }

    /// Sets the length in bytes of the header before each frame, and makes its fields little-endian.
    pub fn set_header(&self, len: usize) -> io::Result<()> {
        self.set_number::<SET_HEADER_LEN>(len as i32)?;
        self.set_number::<SET_LITTLE_ENDIAN>(1)
    }

    /// Sets the carrier, that is, whether there is a peer.
    pub fn set_carrier(&self, on: bool) -> io::Result<()> {
        self.set_number::<SET_CARRIER>(i32::from(on))
    }

    fn set_number<const CODE: Opcode>(&self, number: i32) -> io::Result<()> {
        // SAFETY: (code and type) the driver reads an `int` for each code that is used above.
        let call = unsafe { Setter::<CODE, i32>::new(number) };
        // SAFETY: (file) a file of the driver, see the module.
        Ok(unsafe { ioctl(&self.0, call) }?)
    }
}
