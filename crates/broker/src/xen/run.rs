// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon in a domain of Xen's, from its start to its end.

use std::path::Path;

use tokio::signal::unix::{SignalKind, signal};
use tombolo_domain_xen::GrantReaper;

use crate::{
    endpoint::run::attach_hook,
    sd_notify::notify,
    startup::{self, open_folder},
    xen::grant_reaper::ReaperThread,
};

/// In a domain of Xen's: serves its programs until a signal says to end. With `hook` the kernel tells programs the sequence numbers
/// of their connections, by which those prove themselves to other domains' (S-6).
///
/// # Errors
/// It cannot begin.
pub fn run_in_domain(folder: &Path, hook: bool) -> Result<(), Box<dyn std::error::Error>> {
    GrantReaper::new()?;
    if hook {
        attach_hook();
    }
    open_folder(folder)?;
    let _lock = startup::lock(&folder.join("lock"))?;
    let _keep = ReaperThread::begin(folder)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (mut end, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        notify("READY=1");
        tokio::select! {
            _ = end.recv() => {}
            _ = interrupt.recv() => {}
        }
        notify("STOPPING=1");
        Ok(())
    })
}
