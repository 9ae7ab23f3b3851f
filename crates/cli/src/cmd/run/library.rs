// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds the library, and prepares its preloading into the program.

use std::{
    env,
    ffi::OsString,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use crate::failure::{Failure, Os, Result};

const NAME: &str = "libtombolo_preload.so";

/// Returns the library that was named, or the one that was installed with this program.
pub fn find(named: Option<&Path>) -> Result<PathBuf> {
    let named = named.map(Path::to_owned).or_else(|| env::var_os("TOMBOLO_PRELOAD").map(PathBuf::from));
    let found = match named {
        Some(path) => std::path::absolute(path).os("getcwd")?,
        None => {
            let program = env::current_exe().os("readlink")?;
            let beside = program.with_file_name(NAME);
            let installed = program.parent().map(|folder| folder.join("../lib/tombolo").join(NAME));
            [Some(beside.clone()), installed].into_iter().flatten().find(|path| path.is_file()).unwrap_or(beside)
        }
    };
    if !found.is_file() {
        let file = found.display();
        return Err(Failure::Usage(format!("no library at {file}: build tombolo-preload, or name it by --library")));
    }
    Ok(found)
}

/// Returns the value for `LD_PRELOAD`: the previous value, then the library, so that the wrappers of others still come
/// first.
pub fn preload(library: &Path, before: Option<OsString>) -> Result<OsString> {
    if library.as_os_str().as_bytes().iter().any(|byte| b": \t\n".contains(byte)) {
        let file = library.display();
        return Err(Failure::Usage(format!("{file}: LD_PRELOAD cannot name a path with a blank or a colon; move it")));
    }
    let mut all = before.filter(|before| !before.is_empty()).unwrap_or_default();
    if all.as_bytes().split(|byte| b": ".contains(byte)).any(|one| one == library.as_os_str().as_bytes()) {
        return Ok(all);
    }
    if !all.is_empty() {
        all.push(":");
    }
    all.push(library);
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_comes_after_what_is_preloaded_already_and_only_once() {
        let library = Path::new("/lib/x.so");
        assert_eq!(preload(library, None).unwrap(), "/lib/x.so");
        assert_eq!(preload(library, Some("/a.so b.so".into())).unwrap(), "/a.so b.so:/lib/x.so");
        assert_eq!(preload(library, Some("/a.so:/lib/x.so".into())).unwrap(), "/a.so:/lib/x.so");
        assert!(preload(Path::new("/my lib/x.so"), None).is_err());
    }
}
