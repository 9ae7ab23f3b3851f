// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Locates the sockets of a broker.

use std::path::{Path, PathBuf};

use crate::config::Config;

/// Returns the socket for programs and tools.
#[must_use]
pub fn control_socket(folder: &Path) -> PathBuf {
    folder.join("tombolod.socket")
}

/// Returns where programs of this kernel find the broker.
#[must_use]
pub fn program_socket(folder: &Path) -> PathBuf {
    folder.join("broker.sock")
}

/// Returns where a domain's QEMU finds its ivshmem server.
#[must_use]
pub fn device_socket(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.ivshmem"))
}

/// Returns where a domain's QEMU has its control socket: a default path, unless the configuration names one.
#[must_use]
pub fn qmp_socket(folder: &Path, config: &Config, name: &str) -> PathBuf {
    let configured = config.domains.get(name).and_then(|domain| domain.qmp.clone());
    configured.unwrap_or_else(|| folder.join(format!("{name}.qmp")))
}
