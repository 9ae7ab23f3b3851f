// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo hook`: controls whether this kernel gives programs the sequence numbers of their own connections.

use std::{io, path::PathBuf};

use clap::ValueEnum;
use tombolo_sockets::hook;

use crate::{
    failure::{Failure, Result},
    output,
};

/// Let the kernel tell the programs of `tombolo run` their connections' sequence numbers, as proof to each other
///
/// Root attaches a small BPF program once after each start of the machine, or of a container with cgroups of its own.
#[derive(clap::Args)]
pub struct Args {
    /// What to do
    #[arg(value_enum)]
    action: Action,
    /// Programs of this group only [default: the root of cgroup version 2]
    #[arg(long, value_name = "FOLDER")]
    cgroup: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Action {
    /// Attach the program, if it is not
    Attach,
    /// Take it away
    Detach,
    /// Say whether it is attached
    Show,
}

pub fn run(args: &Args) -> Result<()> {
    let missing = || Failure::Outcome("no cgroup version 2 is mounted at /sys/fs/cgroup or its folder unified".into());
    let cgroup = args.cgroup.clone().or_else(hook::find_root).ok_or_else(missing)?;
    let shown = cgroup.display();
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::PermissionDenied => Failure::Outcome(format!(
            "{shown}: the kernel refuses: this takes root (CAP_BPF and CAP_NET_ADMIN) of the machine itself"
        )),
        _ => Failure::Outcome(format!("{shown}: {error}")),
    };
    let said = match args.action {
        Action::Attach if hook::attach(&cgroup).map_err(failed)? => "attached",
        Action::Attach => "attached already",
        Action::Detach if hook::detach(&cgroup).map_err(failed)? => "detached",
        Action::Detach | Action::Show if !hook::is_attached(&cgroup).map_err(failed)? => "not attached",
        Action::Detach | Action::Show => "attached",
    };
    output::print(&format!("{shown}: {said}"))
}
