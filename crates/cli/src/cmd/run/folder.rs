// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where ends meet.

use std::{
    env, fs, io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

use crate::failure::{Failure, Result};

/// The folder that was asked for, or the default one: made if it is missing, and then this user's alone.
pub fn prepare(named: Option<&Path>) -> Result<PathBuf> {
    let folder = named.map_or_else(default, Path::to_owned);
    let open = |source| Failure::Open { file: folder.display().to_string(), source };
    match fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(open(error)),
        _ => {}
    }
    if named.is_none() {
        // Nobody vouched for it: another user may have been there first.
        let found = fs::symlink_metadata(&folder).map_err(open)?;
        let own = rustix::process::geteuid().as_raw();
        if !found.is_dir() || found.uid() != own || found.mode() & 0o022 != 0 {
            let source = io::Error::new(io::ErrorKind::PermissionDenied, "not this user's alone; name one by --folder");
            return Err(open(source));
        }
    }
    fs::canonicalize(&folder).map_err(open)
}

/// The folder of services (L-1), and in it one for sockets.
fn default() -> PathBuf {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let uid = rustix::process::geteuid();
    let services =
        set("TOMBOLO_DIR").or_else(|| set("XDG_RUNTIME_DIR").map(|folder| folder.join("tombolo"))).unwrap_or_else(
            || if uid.is_root() { "/run/tombolo".into() } else { format!("/tmp/tombolo-{}", uid.as_raw()).into() },
        );
    services.join("sockets")
}
