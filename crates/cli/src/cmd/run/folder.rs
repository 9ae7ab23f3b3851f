// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Prepares the folder where endpoints meet.

use std::{
    env, fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use tombolo_sockets::folder::Folder;

use crate::failure::{Failure, Result};

/// Returns the folder that was asked for, or the default one. A missing folder is made, for this user alone. A folder
/// that others may write to, or that another user owns, needs a configuration that allows it.
pub fn prepare(named: Option<&Path>) -> Result<PathBuf> {
    let folder = named.map_or_else(default, Path::to_owned);
    let open = |source| Failure::Open { file: folder.display().to_string(), source };
    match fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(open(error)),
        _ => {}
    }
    // Nobody vouched for the default folder: another user may have made it first.
    if named.is_none() && fs::symlink_metadata(&folder).map_err(open)?.is_symlink() {
        let source = io::Error::new(io::ErrorKind::PermissionDenied, "it is a symbolic link; name one by --folder");
        return Err(open(source));
    }
    // Reported here, where a user sees it: the library would only leave all connections on TCP.
    Folder::check(&folder, rustix::process::geteuid().as_raw())
        .map_err(|refused| Failure::Usage(refused.to_string()))?;
    fs::canonicalize(&folder).map_err(open)
}

/// Returns the folder for sockets within the folder of services (L-1).
fn default() -> PathBuf {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let uid = rustix::process::geteuid();
    let services =
        set("TOMBOLO_DIR").or_else(|| set("XDG_RUNTIME_DIR").map(|folder| folder.join("tombolo"))).unwrap_or_else(
            || if uid.is_root() { "/run/tombolo".into() } else { format!("/tmp/tombolo-{}", uid.as_raw()).into() },
        );
    services.join("sockets")
}
