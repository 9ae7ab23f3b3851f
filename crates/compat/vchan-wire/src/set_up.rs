// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connects the two endpoints through two nodes in a folder (W-3, W-8).

use std::sync::{Arc, atomic::AtomicBool};

use crate::{
    Error, Result,
    ground::Ground,
    layout::{GRANTS_AT, NOTIFY_WRITE, PAGE, Sizes, at, pages, place},
    pipe::{Common, Live, Place, Reader, Writer, halves},
    sleep::Sleep,
};

/// Two halves of an endpoint.
pub type Halves = (Reader, Writer);

/// Nodes: the reference of the page, the port of the event channel.
const REFERENCE: &str = "ring-ref";
const PORT: &str = "event-channel";

/// Nodes that a server publishes where its client looks for it, until this is dropped.
#[derive(Debug)]
pub struct Server {
    ground: Arc<dyn Ground>,
    path: String,
    common: Arc<Common>,
}

impl Server {
    /// Creates a server that its client finds at `path`, with rings of at least so many bytes.
    ///
    /// # Errors
    /// [`Error::Sizes`], and any error of the system.
    pub fn new(ground: Arc<dyn Ground>, path: &str, read_min: usize, write_min: usize) -> Result<(Self, Halves)> {
        let sizes = Sizes::at_least(read_min, write_min)?;
        let event = ground.offer()?;
        let (references, page) = ground.share(1, Some((at::SERVER_LIVE, event.port())))?;
        page.store32(at::ORDERS, sizes.encode());
        page.store8(at::CLIENT_LIVE, 2);
        page.store8(at::SERVER_LIVE, 1);
        // From the beginning the server asks for events about what its client writes.
        page.store8(at::CLIENT_NOTIFY, NOTIFY_WRITE);
        let mut list = GRANTS_AT;
        let mut own = |order| -> Result<Place> {
            if let Some(base) = place(order) {
                return Ok((Arc::clone(&page), base, order));
            }
            let (references, ring) = ground.share(pages(order), None)?;
            for reference in references {
                page.store32(list, reference);
                list += 4;
            }
            Ok((ring, 0, order))
        };
        let (left, right) = (own(sizes.left)?, own(sizes.right)?);
        let common = Arc::new(Common {
            page,
            sleep: Sleep::new(Arc::clone(&event)),
            server: true,
            lost: AtomicBool::new(false),
        });
        let halves = halves(Arc::clone(&common), left, right);
        // A client looks for the port last, and some watch that node alone.
        let nodes = [(REFERENCE, references[0].to_string()), (PORT, event.port().to_string())];
        let server = Self { ground, path: path.into(), common };
        server.ground.publish(path, &nodes)?;
        Ok((server, halves))
    }

    /// Returns whether the client is there.
    #[must_use]
    pub fn live(&self) -> Live {
        self.common.live()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ground.withdraw(&self.path);
    }
}

/// Returns whether a server is at `path`.
///
/// # Errors
/// Any error of the system.
pub fn is_served(ground: &dyn Ground, path: &str) -> std::io::Result<bool> {
    Ok(ground.look_up(path, REFERENCE)?.is_some())
}

/// Connects a client to the server at `path`.
///
/// # Errors
/// [`Error::NotFound`], [`Error::Busy`], [`Error::Corrupt`], and any error of the system.
pub fn client(ground: &dyn Ground, path: &str) -> Result<Halves> {
    let number = |node| -> Result<u32> {
        let text = ground.look_up(path, node)?.ok_or_else(|| Error::NotFound(path.into()))?;
        // A text that is no number, or the number 0, counts as absent.
        text.parse().ok().filter(|number| *number != 0).ok_or_else(|| Error::NotFound(path.into()))
    };
    let (reference, port) = (number(REFERENCE)?, number(PORT)?);
    // Mapped here without an unmap notification: the kernel would clear the other client's byte.
    if ground.map(&[reference], true, None)?.load8(at::CLIENT_LIVE) == 1 {
        return Err(Error::Busy(path.into()));
    }
    let event = ground.bind(port).map_err(|error| match error.kind() {
        // The page is there and its port is taken: another client came at this moment.
        std::io::ErrorKind::BrokenPipe => Error::Busy(path.into()),
        _ => error.into(),
    })?;
    let page = ground.map(&[reference], true, Some((at::CLIENT_LIVE, event.port())))?;
    // Each word is loaded once: a server that changes it afterwards harms only itself.
    let sizes = Sizes::decode(page.load32(at::ORDERS))?;
    let mut list = GRANTS_AT;
    let mut theirs = |order, write| -> Result<Place> {
        if let Some(base) = place(order) {
            return Ok((Arc::clone(&page), base, order));
        }
        let references: Vec<u32> = (0..pages(order)).map(|index| page.load32(list + 4 * index)).collect();
        list += 4 * references.len();
        Ok((ground.map(&references, write, None)?, 0, order))
    };
    let (left, right) = (theirs(sizes.left, true)?, theirs(sizes.right, false)?);
    debug_assert!([&left, &right].iter().all(|(memory, base, order)| base + (1 << order) <= memory.len().max(PAGE)));
    let common = Arc::new(Common { page, sleep: Sleep::new(event), server: false, lost: AtomicBool::new(false) });
    let halves = halves(Arc::clone(&common), left, right);
    common.page.store8(at::CLIENT_LIVE, 1);
    common.page.set_bits(at::SERVER_NOTIFY, NOTIFY_WRITE);
    common.sleep.event.notify();
    Ok(halves)
}
