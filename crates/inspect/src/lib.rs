// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 4. Uses: os, layout, mem, control, sockets, backends.
//!
//! Lists the channels, accelerated TCP connections and listeners of this kernel, seen from outside. Programs neither
//! answer questions nor register. `/proc` leads to the segments of those programs that this user may look into. Brokers
//! list channels to other machines.
//!
//! All data is untrusted, because other users wrote it. It never decides an index, a length to allocate or a path. Only
//! a descriptor that is certainly a memfd is opened, and no page is read that could go away.
#![forbid(unsafe_code)]

mod broker;
mod channel;
mod error;
mod listener;
mod machine;
mod process;
mod segment;
mod socket;
mod vm;
mod xen;

use std::path::PathBuf;

use serde::Serialize;
use tombolo_layout::xen::PAGE;

pub use broker::{ADMIN_SOCKET, Broker, liveness_word, programs_socket};
pub use channel::{Channel, Counters, Endpoint, Growth, Half, Mode, Pipe, State};
pub use error::{Error, Result};
pub use listener::{Listener, ListenerState, known_folders};
pub use machine::Machine;
pub use process::{known_groups, known_users, name_of};
pub use socket::{Bytes, Socket, Transport};
pub use xen::{OrphanedGrants, ReaperHoldings, reaper_holdings};

/// Everything that could be seen at one moment.
#[derive(Debug, Serialize)]
pub struct View {
    /// Channels, by their identifiers.
    pub channels: Vec<Channel>,
    /// TCP connections of programs under `tombolo run`.
    pub sockets: Vec<Socket>,
    /// Sockets and pages at which channels begin.
    pub listeners: Vec<Listener>,
    /// Pages of programs that died, on Xen.
    pub kept: Vec<OrphanedGrants>,
    /// Extent of the search.
    pub summary: Summary,
}

/// Extent of a search.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Summary {
    /// Number of processes that were looked into.
    pub processes: u64,
    /// Number of processes that this user may not look into.
    pub hidden: u64,
    /// Number of pieces of memory that are named as segments and are none.
    pub broken: u64,
    /// Number of TCP connections under `tombolo run` for which their processes' tables had no room.
    pub unlisted: u64,
    /// Number of pages of dead programs for which the grant reaper had no room: the kernel keeps them, and nothing
    /// lists them.
    pub let_go: u64,
    /// Error of this kernel's broker, if it is there but listed no channels to other machines.
    pub broker: Option<String>,
}

/// Finds all channels and sockets of this kernel, and listeners in `folders`.
///
/// # Blocking
/// For some milliseconds; for two seconds at most with each broker that does not answer.
///
/// # Errors
/// `/proc` or one of the folders cannot be read.
pub fn inspect(folders: &[PathBuf]) -> Result<View> {
    let scan = process::scan()?;
    let (mut channels, broken) = channel::find(&scan)?;
    let (sockets, unlisted) = socket::find(&scan)?;
    let mut listeners = listener::find(folders, &scan)?;
    listeners.extend(xen::listeners(&scan.holders, || tombolo_backends::xen::listeners().unwrap_or_default()));
    let vm::BrokerRows { channels: remote, listeners: told, silent: broker } = vm::ask_brokers();
    channels.extend(remote);
    channels.sort_by_key(|channel| channel.id);
    listeners.extend(told);
    let ReaperHoldings { kept, let_go, .. } = xen::reaper_holdings();
    let summary = Summary { processes: scan.looked_into, hidden: scan.hidden, broken, unlisted, let_go, broker };
    Ok(View { channels, sockets, listeners, kept, summary })
}

/// Counts the pages that programs of this Xen domain have granted and mapped, and those in quarantine: retired, while a
/// peer may still map them.
///
/// # Errors
/// `/proc` cannot be read.
pub fn count_granted_pages() -> Result<(u64, u64)> {
    let scan = process::scan()?;
    let all = scan.holders.iter().map(xen::granted).map(|granted| {
        let quarantine: u64 = granted.links.iter().map(|link| link.quarantine / PAGE as u64).sum();
        (granted.pages, quarantine)
    });
    Ok(all.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1)))
}
