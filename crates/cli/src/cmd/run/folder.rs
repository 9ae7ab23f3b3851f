// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where ends meet.

use std::{
    env, fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use tombolo_sockets::folder::Folder;

use crate::failure::{Failure, Result};

/// The folder that was asked for, or the default one: made if it is missing, and then this user's alone. One that others may
/// write to, or that is somebody else's, needs a configuration that says so.
pub fn prepare(named: Option<&Path>) -> Result<PathBuf> {
    let folder = named.map_or_else(default, Path::to_owned);
    let open = |source| Failure::Open { file: folder.display().to_string(), source };
    match fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(open(error)),
        _ => {}
    }
    // Nobody vouched for the default one: another user may have been there first.
    if named.is_none() && fs::symlink_metadata(&folder).map_err(open)?.is_symlink() {
        let source = io::Error::new(io::ErrorKind::PermissionDenied, "it is a symbolic link; name one by --folder");
        return Err(open(source));
    }
    // Said here, where there is somebody to hear it: the library would leave all connections on TCP.
    Folder::check(&folder, rustix::process::geteuid().as_raw())
        .map_err(|refused| Failure::Usage(refused.to_string()))?;
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
