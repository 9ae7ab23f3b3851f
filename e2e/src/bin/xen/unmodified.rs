// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs of this host that know nothing of Tombolo, for domUs.

use std::path::Path;
use tombolo_e2e::error::Result;
use tombolo_e2e::image::Extra;
use tombolo_e2e::programs::Programs;

/// What the case of sockets runs.
const PROGRAMS: [&str; 3] = ["/usr/bin/iperf3", "/usr/bin/redis-server", "/usr/bin/redis-benchmark"];

/// The first of them that this host lacks.
pub fn missing() -> Option<&'static str> {
    PROGRAMS.into_iter().find(|program| !Path::new(program).exists())
}

/// The library that `tombolo run` puts before libc, and those of the programs that this host has.
///
/// # Errors
/// The library does not build.
pub fn programs() -> Result<Vec<Extra>> {
    let library = Programs::shared("tombolo-preload", "libtombolo_preload.so")?;
    let there = PROGRAMS.into_iter().filter(|program| Path::new(program).exists());
    let named = there.map(|program| (program.trim_start_matches("/usr/").to_owned(), program.into()));
    Ok(named.chain([("bin/libtombolo_preload.so".to_owned(), library)]).collect())
}
