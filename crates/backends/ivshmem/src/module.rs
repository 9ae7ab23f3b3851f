// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Wraps the kernel module's descriptors for the broker in a guest.

use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
};

use tombolo_layout::limits::PAGE;
use tombolo_mem::{PeerData, PeerSegment};

use crate::{
    sys,
    uapi::{self, Info, LinkArgs, NotifyArgs, RangeArgs, WindowArgs},
};

/// Folder in which the kernel lists devices of the module's kind.
const CLASS: &str = "/sys/class/misc";

/// A device: `/dev/tomboloN`.
#[derive(Debug)]
pub struct Node(File);

impl Node {
    /// Opens a device's node for reading and writing.
    ///
    /// # Errors
    /// The system's error; or the device is not the module's, or has another version of its interface.
    pub fn open(path: &Path) -> io::Result<Self> {
        let node = Self(OpenOptions::new().read(true).write(true).open(path)?);
        match node.info()?.version {
            uapi::VERSION => Ok(node),
            version => Err(io::Error::other(format!(
                "{} speaks version {version} and this program {}: use the module and the broker of one release",
                path.display(),
                uapi::VERSION
            ))),
        }
    }

    /// Opens the device at `place` on this machine's PCI bus, written as the broker does (`04.0`, `1c.3/00.0`).
    ///
    /// # Errors
    /// As for [`open`](Self::open); `NotFound` while no such device exists.
    pub fn at(place: &str) -> io::Result<Self> {
        for entry in std::fs::read_dir(CLASS)? {
            let name = entry?.file_name();
            let Some(name) = name.to_str().filter(|name| name.starts_with("tombolo")) else { continue };
            let Ok(device) = std::fs::canonicalize(Path::new(CLASS).join(name).join("device")) else { continue };
            if is_at(&device, place) {
                return Self::open(&Path::new("/dev").join(name));
            }
        }
        Err(io::ErrorKind::NotFound.into())
    }

    /// Opens the first device with interrupts, of which a machine has one.
    ///
    /// # Errors
    /// As for [`open`](Self::open); `NotFound`, with a text that states what is missing.
    pub fn doorbell() -> io::Result<Self> {
        let missing = |what: &str| Err(io::Error::new(io::ErrorKind::NotFound, what));
        if !Path::new("/sys/bus/pci/drivers/tombolo_ivshmem").exists() {
            return missing("the kernel module is not loaded: modprobe tombolo_ivshmem");
        }
        for entry in std::fs::read_dir(CLASS)? {
            let name = entry?.file_name();
            let Some(name) = name.to_str().filter(|name| name.starts_with("tombolo")) else { continue };
            let node = Self::open(&Path::new("/dev").join(name))?;
            if node.info()?.flags & uapi::INFO_DOORBELL != 0 {
                return Ok(node);
            }
        }
        missing("this machine has no ivshmem-doorbell device: `tombolo link snippet` on the host says what QEMU needs")
    }

    /// Returns the description of the device.
    ///
    /// # Errors
    /// The device was unplugged, or is not the module's.
    pub fn info(&self) -> io::Result<Info> {
        Ok(sys::info(self.0.as_fd())?)
    }

    /// Makes a link whose own region half is in this device. `own` and `peer` are ranges (offset and length); the
    /// peer's is in the device `theirs`. Notifications leave through `doorbell` to `target` (peer and vector) and
    /// arrive at its vector `wait`.
    ///
    /// # Errors
    /// As the module's header states.
    pub fn link(
        &self,
        own: (u64, u64),
        theirs: &Self,
        peer: (u64, u64),
        doorbell: &Self,
        target: (u16, u16),
        wait: u16,
    ) -> io::Result<ModuleLink> {
        let args = LinkArgs {
            own_offset: own.0,
            own_length: own.1,
            peer_offset: peer.0,
            peer_length: peer.1,
            peer_fd: theirs.0.as_raw_fd(),
            doorbell_fd: doorbell.0.as_raw_fd(),
            notify_peer: target.0,
            notify_vector: target.1,
            wait_vector: wait,
            flags: 0,
        };
        Ok(ModuleLink(sys::link(self.0.as_fd(), args)?))
    }
}

/// Returns whether a sysfs path ends in a device at `place`. Each of its steps is `DOMAIN:BUS:DEVICE.FUNCTION`.
fn is_at(path: &Path, place: &str) -> bool {
    let steps = path.iter().rev().map(|step| step.to_str().and_then(|step| step.rsplit_once(':')).map(|it| it.1));
    let mut steps = steps.map(Option::unwrap_or_default);
    let placed = !place.is_empty() && place.rsplit('/').all(|wanted| steps.next() == Some(wanted));
    // The step above the device at `place` must be the root bus, which is not a device.
    placed && steps.next().is_none_or(|step| !step.contains('.'))
}

/// A link: the memory and the doorbells that two machines share.
#[derive(Debug)]
pub struct ModuleLink(OwnedFd);

impl ModuleLink {
    /// Makes a window: a descriptor that maps a range of one region half and no more.
    ///
    /// # Errors
    /// As the module's header states.
    pub fn window(&self, args: WindowArgs) -> io::Result<OwnedFd> {
        Ok(sys::window(self.0.as_fd(), args)?)
    }

    /// Lists the existing windows of the link.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn windows(&self) -> io::Result<Vec<WindowArgs>> {
        let mut room = vec![WindowArgs::default(); 2 * uapi::CHANNELS as usize];
        loop {
            let count = sys::windows(self.0.as_fd(), &mut room)?;
            if count <= room.len() {
                room.truncate(count);
                return Ok(room);
            }
            room.resize(count, WindowArgs::default());
        }
    }

    /// Changes the peer and the vector that the link notifies.
    ///
    /// # Errors
    /// The link was hung up, or the device unplugged.
    pub fn set_notify_target(&self, target: (u16, u16)) -> io::Result<()> {
        Ok(sys::notify(self.0.as_fd(), NotifyArgs { peer: target.0, vector: target.1 })?)
    }

    /// Zeroes `length` bytes of the own region half from `offset` on. No program may hold a window of this range.
    ///
    /// # Errors
    /// The range is not whole pages of the region half, or the device was unplugged.
    pub fn clear(&self, offset: u64, length: u64) -> io::Result<()> {
        Ok(sys::clear(self.0.as_fd(), RangeArgs { offset, length })?)
    }

    /// Copies bytes at `offset` of the own region half, or of the peer's if `theirs`, at most to the end of that page.
    /// Notifies nobody. A later broker does not take the window for a program's.
    ///
    /// # Errors
    /// The range crosses a page or leaves the region half, or the device was unplugged.
    pub fn peek(&self, theirs: bool, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let within = offset % PAGE;
        if within + bytes.len() as u64 > PAGE {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let flags = if theirs { uapi::WINDOW_PEER } else { uapi::WINDOW_READ_ONLY };
        let window =
            self.window(WindowArgs { offset: offset - within, length: PAGE, flags, ..WindowArgs::default() })?;
        let page = PeerSegment::map_revocable(window.as_fd(), 0, PAGE as usize, ())?;
        page.data(within as usize).copy_out(0, bytes);
        if page.is_lost() { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
    }

    /// Ends all waits on the link, because the peer is gone.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn hang_up(&self) -> io::Result<()> {
        Ok(sys::hang_up(self.0.as_fd())?)
    }
}

impl AsFd for ModuleLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_is_found_by_its_place() {
        let at = |path: &str, place| is_at(Path::new(path), place);
        assert!(at("/sys/devices/pci0000:00/0000:00:04.0", "04.0"));
        assert!(at("/sys/devices/pci0000:00/0000:00:1c.3/0000:05:00.0", "1c.3/00.0"));
        assert!(!at("/sys/devices/pci0000:00/0000:00:1c.3/0000:05:00.0", "00.0"));
        assert!(!at("/sys/devices/pci0000:00/0000:00:04.0", "04.1"));
        assert!(!at("/sys/devices/pci0000:00/0000:00:04.0", ""));
    }
}
