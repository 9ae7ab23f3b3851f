// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The grant reaper of a Xen domain: a socket, and a thread beside everything else of the broker, because mapping a peer's
//! page may be slow.

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

/// The socket for programs that grant pages, in the broker's folder.
const SOCKET: &str = "keeper.sock";

/// Whether this kernel runs in a domain of Xen's.
#[must_use]
pub fn is_domain() -> bool {
    std::fs::read_to_string("/sys/hypervisor/type").is_ok_and(|says| says.trim() == "xen")
}

/// The keeper, until it is dropped. What it keeps then is the kernel's to keep.
#[derive(Debug)]
pub struct ReaperThread {
    path: PathBuf,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl ReaperThread {
    /// Begins, in `folder`; none where this is no domain of Xen's, or its drivers are not loaded.
    ///
    /// # Errors
    /// There can be no socket or thread.
    pub fn begin(folder: &Path) -> io::Result<Option<Self>> {
        // First: the keeper takes its share of it.
        raise_limit()?;
        let (Ok(keeper), Ok((mode, group))) = (GrantReaper::new(), GrantReaper::admits()) else { return Ok(None) };
        let path = folder.join(SOCKET);
        // Whoever may open gntalloc may connect. That of root's own group needs no privilege.
        let group = Some(group).filter(|group| *group != rustix::process::getegid().as_raw());
        let listener = fd_passing::listen(&path, SocketType::SEQPACKET, mode, None, group)?;
        let stop = Arc::new(event::eventfd(0)?);
        let stops = Arc::clone(&stop);
        let mut first = Some(keeper);
        let serve = move || {
            // One that failed keeps nothing any more; the next one serves who comes then.
            let keeps = || match first.take() {
                Some(keeper) => keeper.serve(&listener, &stops),
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
