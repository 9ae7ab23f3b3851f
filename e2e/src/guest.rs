// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Safe calls to the kernel module's files, for the guest halves of cases.

pub mod sys;
pub mod tsc;

use crate::error::{Context, Error, Result};
use crate::line_reader::within;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags, open};
use rustix::time::Timespec;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use sys::{LinkArgs, WindowArgs};

/// Seconds within which udev or the PCI bus shows a device.
const APPEAR: u64 = 60;

/// The devices of one link, by their PCI addresses, and how to notify the peer. It travels as command-line arguments.
#[derive(Debug, Clone)]
pub struct Ends {
    /// Device with the memory that this side writes.
    pub own: String,
    /// Device with the memory that the peer writes.
    pub peer: String,
    /// Device with the doorbells.
    pub doorbell: String,
    /// Number of the peer.
    pub notify_peer: u16,
    /// Vector at which the peer waits.
    pub notify_vector: u16,
    /// Vector at which this side waits.
    pub wait_vector: u16,
}

impl Ends {
    /// Returns the arguments that [`from_args`](Self::from_args) parses.
    #[must_use]
    pub fn to_args(&self) -> Vec<String> {
        let numbers = [self.notify_peer, self.notify_vector, self.wait_vector].map(|number| number.to_string());
        [self.own.clone(), self.peer.clone(), self.doorbell.clone()].into_iter().chain(numbers).collect()
    }

    /// Parses the first arguments and returns the rest.
    ///
    /// # Errors
    /// There are too few arguments, or one is not a number where there must be one.
    pub fn from_args(args: &[String]) -> Result<(Self, &[String])> {
        let [own, peer, doorbell, notify_peer, notify_vector, wait_vector, rest @ ..] = args else {
            return Err(Error::new(format!("too few arguments: {args:?}")));
        };
        let ends = Self {
            own: own.clone(),
            peer: peer.clone(),
            doorbell: doorbell.clone(),
            notify_peer: notify_peer.parse()?,
            notify_vector: notify_vector.parse()?,
            wait_vector: wait_vector.parse()?,
        };
        Ok((ends, rest))
    }

    /// Opens a link over the whole of both regions.
    ///
    /// # Errors
    /// A device is missing or the driver refuses.
    pub fn link(&self) -> Result<Link> {
        let (own, peer, doorbell) = (open_node(&self.own)?, open_node(&self.peer)?, open_node(&self.doorbell)?);
        let args = LinkArgs {
            own_length: sys::info(&own)?.size,
            peer_length: sys::info(&peer)?.size,
            notify_peer: self.notify_peer,
            notify_vector: self.notify_vector,
            wait_vector: self.wait_vector,
            ..LinkArgs::new(&peer, &doorbell)
        };
        Ok(Link(sys::link(&own, &args).context("link")?))
    }
}

/// Opens the node of the device at a PCI address, once the device is there.
///
/// # Errors
/// The device does not appear in time.
pub fn open_node(address: &str) -> Result<OwnedFd> {
    let name = node_name(address)?;
    open(format!("/dev/{name}"), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).context(name)
}

/// Returns the name in /dev of the device at a PCI address, once the device is there.
///
/// # Errors
/// The device does not appear in time.
pub fn node_name(address: &str) -> Result<String> {
    let folder = format!("/sys/bus/pci/devices/{address}/misc");
    let mut name = None;
    until(within(APPEAR), || {
        let entry = fs::read_dir(&folder).ok().and_then(|mut entries| entries.next()?.ok());
        name = entry.map(|entry| entry.file_name().to_string_lossy().into_owned());
        // The node appears a moment after the device.
        name.as_ref().is_some_and(|name| fs::exists(format!("/dev/{name}")).unwrap_or(false))
    })
    .context(format!("no driver has bound {address}"))?;
    name.ok_or_else(|| Error::new("no name"))
}

/// Waits until a condition holds, and yields the CPU meanwhile.
///
/// # Errors
/// The condition does not hold before the deadline.
pub fn until(deadline: Instant, mut is_true: impl FnMut() -> bool) -> Result<()> {
    while !is_true() {
        if Instant::now() >= deadline {
            return Err(Error::new("not before the deadline"));
        }
        _ = poll(&mut [], Some(&Timespec { tv_sec: 0, tv_nsec: 2_000_000 }));
    }
    Ok(())
}

/// Lets time pass, where a test needs exactly that.
pub fn pass(time: Duration) {
    let end = Instant::now() + time;
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        _ = poll(&mut [], Timespec::try_from(left).ok().as_ref());
    }
}

/// Polls a descriptor until the deadline and returns its events.
///
/// # Errors
/// The kernel refuses.
pub fn polled(fd: BorrowedFd<'_>, deadline: Instant) -> Result<PollFlags> {
    let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now()))?;
    let mut polled = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    poll(&mut polled, Some(&left))?;
    Ok(polled[0].revents())
}

/// A link.
#[derive(Debug)]
pub struct Link(pub OwnedFd);

impl Link {
    /// Makes a window of this link.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn window(&self, args: &WindowArgs) -> Result<Window> {
        let fd = sys::window(&self.0, args).context(format!("window {args:?}"))?;
        Ok(Window(fd))
    }
}

/// A window.
#[derive(Debug)]
pub struct Window(pub OwnedFd);

impl Window {
    /// Waits for notifications. Returns a bit for each channel that was notified.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn wait(&self) -> Result<u64> {
        let mut bits = [0; 8];
        match rustix::io::read(&self.0, &mut bits)? {
            0 => Ok(0),
            _ => Ok(u64::from_ne_bytes(bits)),
        }
    }

    /// Notifies channels of the peer.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn notify_channels(&self, bits: u64) -> Result<()> {
        rustix::io::write(&self.0, &bits.to_ne_bytes())?;
        Ok(())
    }
}

impl AsFd for Window {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
