// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What there is on this kernel, seen from outside: channels, their ends, listeners. No program is asked and nothing is
//! registered: `/proc` leads to the segments of the programs that this user may look into, and the rest stands there. Of channels
//! to other machines the broker tells.
//!
//! What is read was written by strangers. Nothing here follows, indexes or allocates by it, no file is opened of which
//! it is not certain that it is a memfd, and no page is touched that could go away.

mod call;
mod channel;
mod listener;
mod process;
mod segment;
mod socket;
mod vm;
mod xen;

use std::path::PathBuf;

use serde::Serialize;
use tombolo_layout::xen::PAGE;

pub use call::Machine;
pub use channel::{Channel, Counted, End, Growth, Half, Mode, Pipe, State};
pub use listener::{Listener, Pulse, known_folders};
pub use process::{known_groups, known_users, name_of};
pub use socket::{Bytes, Carried, Socket};
pub use xen::{OrphanedGrants, ReaperHoldings, keeper};

use crate::failure::Result;

/// All that can be seen at one moment.
#[derive(Debug, Serialize)]
pub struct View {
    pub channels: Vec<Channel>,
    pub sockets: Vec<Socket>,
    pub listeners: Vec<Listener>,
    pub kept: Vec<OrphanedGrants>,
    pub summary: Summary,
}

/// How much was looked at.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Summary {
    /// Processes that were looked into.
    pub processes: u64,
    /// Processes that this user may not look into.
    pub hidden: u64,
    /// Memory that is called a segment and is none.
    pub broken: u64,
    /// TCP connections under `tombolo run` that had no room in their processes' lists.
    pub unlisted: u64,
    /// Pages of programs that died for which this domain's keeper had no room: the kernel keeps them, out of sight.
    pub let_go: u64,
    /// Why the broker of this kernel told nothing of channels to other machines, though it is there.
    pub broker: Option<String>,
}

/// Looks at everything, and for listeners in these folders.
pub fn inspect(folders: &[PathBuf]) -> Result<View> {
    let scan = process::scan()?;
    let (mut channels, broken) = channel::find(&scan)?;
    let (sockets, unlisted) = socket::find(&scan)?;
    let mut listeners = listener::find(folders, &scan)?;
    listeners.extend(xen::listeners(&scan.holders, || tombolo_backends::xen::listeners().unwrap_or_default()));
    let vm::BrokerRows { channels: across, listeners: told, silent: broker } = vm::ask_brokers();
    channels.extend(across);
    channels.sort_by_key(|channel| channel.id);
    listeners.extend(told);
    let ReaperHoldings { kept, let_go, .. } = xen::keeper();
    let summary = Summary { processes: scan.looked_into, hidden: scan.hidden, broken, unlisted, let_go, broker };
    Ok(View { channels, sockets, listeners, kept, summary })
}

/// Pages that programs of this domain of Xen's granted and have mapped, and those that they retired and keep because a peer may
/// still map them.
pub fn granted() -> Result<(u64, u64)> {
    let scan = process::scan()?;
    let all = scan.holders.iter().map(xen::granted).map(|granted| {
        let quarantine: u64 = granted.links.iter().map(|link| link.quarantine / PAGE as u64).sum();
        (granted.pages, quarantine)
    });
    Ok(all.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1)))
}
