// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the daemon in a Xen domain.

use std::path::Path;

use tokio::signal::unix::{SignalKind, signal};
use tombolo_domain_xen::GrantReaper;

use crate::{
    endpoint::run::attach_hook,
    sd_notify::notify,
    startup::{self, open_folder},
    xen::grant_reaper::ReaperThread,
};

/// Serves the programs of a Xen domain until a signal arrives. With `hook` the kernel tells programs the sequence
/// numbers of their connections, with which they prove themselves to programs of other domains (S-6).
///
/// # Errors
/// The daemon cannot start.
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
