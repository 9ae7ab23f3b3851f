// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where the sockets of a broker's folder are.

use std::path::{Path, PathBuf};

use crate::config::Config;

/// The socket for programs and tools.
#[must_use]
pub fn control_socket(folder: &Path) -> PathBuf {
    folder.join("tombolod.socket")
}

/// Where programs of this kernel find the broker.
#[must_use]
pub fn program_socket(folder: &Path) -> PathBuf {
    folder.join("broker.sock")
}

/// Where a domain's QEMU finds its ivshmem server.
#[must_use]
pub fn device_socket(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.ivshmem"))
}

/// Where a domain's QEMU has its control socket, if the configuration says nothing else.
#[must_use]
pub fn qmp_socket(folder: &Path, config: &Config, name: &str) -> PathBuf {
    let configured = config.domains.get(name).and_then(|domain| domain.qmp.clone());
    configured.unwrap_or_else(|| folder.join(format!("{name}.qmp")))
}
