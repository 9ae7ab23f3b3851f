// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the grant reaper of a Xen domain: a socket, and a thread beside the rest of the broker, because mapping
//! a peer's page may be slow.

use std::{
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    thread::{self, JoinHandle},
};

use rustix::net::SocketType;
use tombolo_domain_xen::GrantReaper;
use tombolo_os::event;

use crate::{fd_passing, panics, startup::raise_limit};

/// Name of the socket for programs that grant pages, in the broker's folder.
const SOCKET: &str = "keeper.sock";

/// Returns whether this kernel runs in a Xen domain.
#[must_use]
pub fn is_domain() -> bool {
    std::fs::read_to_string("/sys/hypervisor/type").is_ok_and(|says| says.trim() == "xen")
}

/// The running grant reaper, until it is dropped. From then on the kernel keeps the pages that it kept.
#[derive(Debug)]
pub struct ReaperThread {
    path: PathBuf,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl ReaperThread {
    /// Starts the grant reaper in `folder`. Returns `None` if this is no Xen domain, or its drivers are not loaded.
    ///
    /// # Errors
    /// The socket or the thread cannot be made.
    pub fn begin(folder: &Path) -> io::Result<Option<Self>> {
        // Raised first, because the grant reaper takes a share of the limit.
        raise_limit()?;
        let (Ok(reaper), Ok((mode, group))) = (GrantReaper::new(), GrantReaper::admits()) else { return Ok(None) };
        let path = folder.join(SOCKET);
        // Whoever may open gntalloc may connect. No privilege is needed if that group is root's own.
        let group = Some(group).filter(|group| *group != rustix::process::getegid().as_raw());
        let listener = fd_passing::listen(&path, SocketType::SEQPACKET, mode, None, group)?;
        let stop = Arc::new(event::eventfd(0)?);
        let stops = Arc::clone(&stop);
        let mut first = Some(reaper);
        let serve = move || {
            // A grant reaper that failed keeps no pages any more; the next one serves programs that connect from then
            // on.
            let keeps = || match first.take() {
                Some(reaper) => reaper.serve(&listener, &stops),
                None => GrantReaper::new().map_err(io::Error::other)?.serve(&listener, &stops),
            };
            let is_over = |rest| panics::is_stopped_within(&stops, rest);
            panics::work_until_done("pages of programs that die are not kept", is_over, keeps);
        };
        let thread = Some(thread::Builder::new().name("tombolod-keep".into()).spawn(serve)?);
        tracing::info!("keeps pages of programs that die, see tombolo ls: {}", path.display());
        Ok(Some(Self { path, stop, thread }))
    }
}

impl Drop for ReaperThread {
    fn drop(&mut self) {
        event::raise(&*self.stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}
