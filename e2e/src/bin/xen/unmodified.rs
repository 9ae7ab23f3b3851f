// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs of this host that know nothing of Tombolo, for domUs.

use std::path::Path;
use tombolo_e2e::error::Result;
use tombolo_e2e::image::Extra;
use tombolo_e2e::programs::Programs;
use tombolo_e2e::vchan;

/// What the case of sockets runs.
const PROGRAMS: [&str; 3] = ["/usr/bin/iperf3", "/usr/bin/redis-server", "/usr/bin/redis-benchmark"];

/// The program that forks while it has a connection.
pub const FORKS: &str = "/bin/forks";

/// The first of them that this host lacks.
pub fn missing() -> Option<&'static str> {
    PROGRAMS.into_iter().find(|program| !Path::new(program).exists())
}

/// The library that `tombolo run` puts before libc, the program that forks, and those of the others that this host has.
///
/// # Errors
/// The library or the program does not build.
pub fn programs() -> Result<Vec<Extra>> {
    let library = Programs::shared("tombolo-preload", "libtombolo_preload.so")?;
    let there = PROGRAMS.into_iter().filter(|program| Path::new(program).exists());
    let named = there.map(|program| (program.trim_start_matches("/usr/").to_owned(), program.into()));
    let forks = vchan::compile("forks", &vchan::here("src/bin/xen/forks.c"), |_| ())?;
    let own = [("bin/libtombolo_preload.so".to_owned(), library), (FORKS.trim_start_matches('/').to_owned(), forks)];
    Ok(named.chain(own).collect())
}
